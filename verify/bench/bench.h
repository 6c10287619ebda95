/* The parts of bench. Private to verify/. */
#ifndef QT_VERIFY_BENCH_BENCH_H
#define QT_VERIFY_BENCH_BENCH_H

#include "verify/gpu/gpu.h"

#include <stdio.h>

struct bench {
    struct qt_gpu *gpu;
    const struct qt_bench_options *opt;
    struct qt_bench_report *report;
    struct gpu_operands operands;
    struct gpu_dense dense; /* of the shape being measured, if there is cuBLAS */
    double done, total;     /* rows, for progress */
};

/* What a kernel refuses is a row that says so; everything else that fails ends the run. */
static inline int bench_refused(char why[200], int rc, const struct qt_err *err)
{
    if (rc != QT_E_UNSUPPORTED)
        return rc;
    snprintf(why, 200, "%.199s", err->reason);
    return QT_OK;
}

/* bench_kv.c: the rows of caches. */
enum { BENCH_CACHE_KINDS = 3 };
int bench_caches(struct bench *b, struct qt_err *err);

#endif
