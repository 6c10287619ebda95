/* QT_MATMUL_MIX24 behind qtool_kernels.h: matmul.cu hands these matrices on. */
#ifndef QT_CUDA_MIX24_H
#define QT_CUDA_MIX24_H

#include "kernels/cuda/plan.h"

enum { QT_MIX24_UNIT_COLS = 128 };

static inline int qt_mix24_units(const struct qt_matmul_weight *w)
{
    return (int)(w->mix24.twos + w->mix24.fours);
}

static inline int qt_mix24_strips(const struct qt_matmul_weight *w)
{
    return (int)ceil_div(w->n, QT_STRIP_ROWS);
}

static inline size_t qt_mix24_strip_bytes(const struct qt_matmul_weight *w)
{
    return w->mix24.twos * QT_MATMUL_MIX24_TWO + w->mix24.fours * QT_MATMUL_MIX24_FOUR;
}

static inline size_t qt_mix24_csr_rows(const struct qt_matmul_weight *w)
{
    return w->mix24.csr_rows ? w->mix24.csr_rows : w->n;
}

/* As qt_matmul_slice, _plan_check, _run and _dequantize. choose: the part of qt_matmul_plan after
 * the facts of the device are known. */
int qt_mix24_slice(struct qt_matmul_weight *out, const struct qt_matmul_weight *w, size_t n0,
                   size_t n, size_t k0, size_t k);
const char *qt_mix24_fault(const struct qt_matmul_weight *w);
int qt_mix24_choose(struct qt_matmul_plan *p, const struct qt_matmul_weight *w);
int qt_mix24_plan_check(struct qt_matmul_plan *p, const struct qt_matmul_weight *w);
int qt_mix24_run(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w, void *y,
                 const void *x, void *workspace, void *stream);
int qt_mix24_dequantize(const struct qt_matmul_weight *w, void *out, enum qt_matmul_dtype dtype,
                        void *stream);

/* The stream for the copy engine: boxes of a TWO and of a FOUR of so many strips. */
bool qt_mix24_record_maps(const struct qt_matmul_plan *p, CUtensorMap records[2],
                          const struct qt_matmul_weight *w, int box_strips);

/* Kernel instances as host addresses: token_tiles 1, 2, 4; strips 1, 2, 4; depth 2..4. NULL if
 * there is none. */
const void *qt_mix24_instance(int token_tiles, int strips, int depth);

#endif
