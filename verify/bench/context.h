/* State that bench.c (matrix products), kv.c (attention) and moe.c (experts) share. Private to
 * verify/. */
#ifndef QT_VERIFY_BENCH_CONTEXT_H
#define QT_VERIFY_BENCH_CONTEXT_H

#include "verify/gpu/gpu.h"

#include <stdio.h>

struct bench {
    struct qt_gpu *gpu;
    const struct qt_bench_options *opt;
    struct qt_bench_report *report;
    struct gpu_operands operands;
    struct gpu_dense dense; /* weights of the current shape for cuBLAS; empty without cuBLAS */
    double done, total;     /* progress in rows */
};

/* Stores the reason of QT_E_UNSUPPORTED in the row and returns QT_OK; returns other errors. */
static inline int bench_refused(char why[200], int rc, const struct qt_err *err)
{
    if (rc != QT_E_UNSUPPORTED)
        return rc;
    snprintf(why, 200, "%.199s", err->reason);
    return QT_OK;
}

/* kv.c: appends the rows of all caches to the report. */
enum { BENCH_CACHE_KINDS = 3 };
int bench_caches(struct bench *b, struct qt_err *err);

/* moe.c: appends the rows of all layers of experts to the report. */
int bench_experts(struct bench *b, struct qt_err *err);

#endif
