/* Launch of the dequantize kernel. */
#include "kernels/cuda/matmul/dequantize.h"
#include "kernels/cuda/matmul/matmul.h"

int qt_matmul_dequantize(const struct qtool_matmul_weight *w, void *out, enum qtool_dtype dtype,
                         void *stream)
{
    struct qt_shape s;
    if (qt_shape_of(&s, w))
        return QTOOL_UNSUPPORTED;
    struct qt_dequantize_args a = {};
    a.decode = qt_decode_args_of(w);
    for (int i = 0; i < 3; i++) {
        a.plane[i] = (const unsigned char *)w->plane[i];
        a.width[i] = s.width[i];
    }
    a.scale = (const __half *)w->scale;
    a.zero = (const unsigned char *)w->zero;
    a.out = out;
    a.pitch_blocks = s.pitch_blocks;
    a.pitch_groups = s.pitch_groups;
    a.n = (int)w->n;
    a.k = (int)w->k;
    a.group_shift = s.group_shift;
    a.factor = qt_result_factor(w);
    a.bf16 = dtype == QTOOL_BF16;
    a.wide = w->k % 8 == 0 && (size_t)out % 16 == 0;
    a.parts = (int)ceil_div((size_t)s.blocks, QT_DEQUANTIZE_WARPS);
    const size_t grid = (size_t)s.strips * (size_t)a.parts;
    if (grid >> 30)
        return QTOOL_UNSUPPORTED;
    void *args[] = {&a};
    cudaError_t e = cudaLaunchKernel(qt_dequantize_instance(s.format), dim3((unsigned)grid),
                                     dim3(QT_DEQUANTIZE_WARPS * 32), args,
                                     (size_t)qt_dequantize_smem(s.format), (cudaStream_t)stream);
    return e == cudaSuccess ? QTOOL_OK : QTOOL_FAILED;
}
