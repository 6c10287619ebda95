/* The prepare kernel: X as FP16 with k padded to a multiple of QT_BLOCK_COLS, for kernels that do
 * not convert X themselves. */
#ifndef QT_KERNELS_CUDA_COMMON_PREPARE_H
#define QT_KERNELS_CUDA_COMMON_PREPARE_H

#include "kernels/cuda/common/plan.h"

/* True if X is BF16 or k is not a multiple of QT_BLOCK_COLS. */
bool qt_prepare_needed(const struct qtool_matmul_plan *p);
/* Bytes of workspace that qt_prepare_run writes; 0 if it is not needed. */
size_t qt_prepare_bytes(const struct qtool_matmul_plan *p);
/* Enqueues the kernel, if it is needed, and sets *x to the prepared X in `workspace`. *token_factor
 * becomes the array [m] of factors of BF16 tokens, or NULL. */
int qt_prepare_run(const struct qtool_matmul_plan *p, const void **x, const float **token_factor,
                   void *workspace, void *stream);
/* Host address of a kernel that is compiled for every architecture of the library. */
const void *qt_prepare_instance(void);

#endif
