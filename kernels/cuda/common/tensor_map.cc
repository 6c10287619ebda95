/* Descriptions of tensors for Hopper's copy engine, made by the driver. */
#include "kernels/cuda/common/plan.h"

#include <cudaTypedefs.h>

int qt_need_tensor_maps(struct qtool_matmul_plan *p)
{
    void *f = NULL;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess || !f)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "the driver has no cuTensorMapEncodeTiled");
    p->encode_map = (void (*)(void))f;
    return QTOOL_OK;
}

/* Where memory is what a product waits for, lines by twos take its time: one token of 57344 x 8192,
 * fp5, 75.5 us, by ones 69.8. Elsewhere they come sooner so: nf4, 4096 x 4096, 5.25 us, 5.17. */
static CUtensorMapL2promotion promotion(const struct qtool_matmul_plan *p)
{
    return p->m <= 32 && qt_long_share(p->n, p->k, p->sms) ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
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
    return ((PFN_cuTensorMapEncodeTiled_v12000)p->encode_map)(
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

bool qt_weight_maps(const struct qtool_matmul_plan *p, CUtensorMap plane[3], CUtensorMap *scales,
                    CUtensorMap *zeros, const struct qt_shape *s,
                    const struct qtool_matmul_weight *w, int box_strips, int box_blocks,
                    int box_groups)
{
    bool ok = true;
    for (int i = 0; i < 3 && s->width[i] && ok; i++) {
        size_t block = 16 * (size_t)s->width[i];
        struct qt_tensor t = {w->plane[i],
                              2,
                              {(size_t)s->blocks * block, (size_t)s->strips},
                              {s->pitch_blocks * block * 8},
                              {box_blocks * (int)block, box_strips},
                              false};
        ok = qt_tensor_map(p, &plane[i], &t);
    }
    struct qt_tensor t = {w->scale,
                          2,
                          {s->groups * 4, (size_t)s->strips},
                          {s->pitch_groups * 32},
                          {box_groups * 4, box_strips},
                          false};
    ok = ok && (!s->grouped || qt_tensor_map(p, scales, &t));
    if (!ok || !s->zero_bytes)
        return ok;
    struct qt_tensor z = {w->zero,
                          2,
                          {s->groups * (size_t)s->zero_bytes / 8, (size_t)s->strips},
                          {s->pitch_groups * (size_t)s->zero_bytes},
                          {qt_zero_pitch(s, box_groups) / 8, box_strips},
                          false};
    return qt_tensor_map(p, zeros, &z);
}
