/* The path QTOOL_MATMUL_DENSE, for all kinds of weights. */
#ifndef QT_KERNELS_CUDA_API_DENSE_H
#define QT_KERNELS_CUDA_API_DENSE_H

#include "kernels/cuda/common/plan.h"

/* Replaces the planned path by DENSE if that is possible, allowed and faster. us: the estimated
 * time of the planned path in microseconds. packed_bytes: size of the weight's codes. */
void qt_dense_prefer(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                     size_t packed_bytes, double us);
/* Validates plan->config.dense and sets the rest of the plan. */
int qt_dense_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_dense_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, void *y,
                 const void *x, void *workspace, void *stream);

#endif
