/* Tensor maps: descriptors of global memory for TMA copies, encoded by the CUDA driver. */
#ifndef QT_KERNELS_CUDA_COMMON_TENSOR_MAP_H
#define QT_KERNELS_CUDA_COMMON_TENSOR_MAP_H

#include "kernels/cuda/common/plan.h"

/* Looks up cuTensorMapEncodeTiled for the plan. Refuses the plan if the driver does not have it. */
int qt_need_tensor_maps(struct qtool_matmul_plan *p);

/* A tensor and the boxes that are copied from it. The fastest dimension is the first. */
struct qt_tensor {
    const void *base;
    int rank;          /* 2 or 3 */
    size_t dims[3];    /* in elements */
    size_t strides[2]; /* in bytes, of the dimensions after the first */
    int box[3];        /* in elements */
    bool halves;       /* elements are FP16, 64 per line, with the 128-byte swizzle; else U64 */
};

/* Encodes *map. Returns false if the driver refuses the tensor. */
bool qt_tensor_map(const struct qtool_matmul_plan *p, CUtensorMap *map, const struct qt_tensor *t);
/* The same for prepared X as [k_blocks][m][64], in boxes of `blocks` x `tokens` x 64. */
bool qt_x_map(const struct qtool_matmul_plan *p, CUtensorMap *map, const void *x, size_t k_blocks,
              int tokens, int blocks);

#endif
