/* Tensor maps for TMA copies. */
#include "kernels/cuda/common/tensor_map.h"

#include <cudaTypedefs.h>

int qt_need_tensor_maps(struct qtool_matmul_plan *p)
{
    void *f = NULL;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess || !f)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "the CUDA driver has no cuTensorMapEncodeTiled");
    qt_state(p)->encode_map = (void (*)(void))f;
    return QTOOL_OK;
}

/* Products that are limited by memory bandwidth are slower with a promotion to 256 bytes: fp5,
 * 57344 x 8192, one token: 75.5 us, with 128 bytes 69.8. Other products get their data sooner with
 * 256 bytes: nf4, 4096 x 4096: 5.17 us instead of 5.25. */
static CUtensorMapL2promotion promotion(const struct qtool_matmul_plan *p)
{
    return p->m <= 32 && qt_bandwidth_bound(p->n, p->k, qt_state(p)->sms)
               ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
               : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
}

bool qt_tensor_map(const struct qtool_matmul_plan *p, CUtensorMap *map, const struct qt_tensor *t)
{
    cuuint64_t dims[3], strides[2];
    cuuint32_t box[3], steps[3] = {1, 1, 1};
    for (int i = 0; i < t->rank; i++) {
        dims[i] = t->dims[i];
        box[i] = (cuuint32_t)t->box[i];
    }
    for (int i = 0; i + 1 < t->rank; i++)
        strides[i] = t->strides[i];
    CUtensorMapSwizzle swizzle =
        t->halves ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
    return ((PFN_cuTensorMapEncodeTiled_v12000)qt_state(p)->encode_map)(
               map, t->halves ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT64,
               (cuuint32_t)t->rank, (void *)t->base, dims, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion(p),
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool qt_x_map(const struct qtool_matmul_plan *p, CUtensorMap *map, const void *x, size_t k_blocks,
              int tokens, int blocks)
{
    size_t pitch = k_blocks * QT_BLOCK_COLS * 2;
    struct qt_tensor t = {x,
                          3,
                          {QT_BLOCK_COLS, p->m, k_blocks},
                          {pitch, QT_BLOCK_COLS * 2},
                          {QT_BLOCK_COLS, tokens, blocks},
                          true};
    return qt_tensor_map(p, map, &t);
}
