/* QT_MATMUL_MIX24 behind qtool_kernels.h: matmul.cu hands these matrices on. */
#ifndef QT_CUDA_MIX24_H
#define QT_CUDA_MIX24_H

#include "kernels/qtool_kernels.h"

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

/* Kernel instances as host addresses: token_tiles 1, 2, 4; strips 1, 2, 4; depth 2..4. NULL if
 * there is none. */
const void *qt_mix24_instance(int token_tiles, int strips, int depth);

#endif
