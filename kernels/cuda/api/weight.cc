/* qtool_kernels.h: functions of weights, dispatched by kind. */
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/mix24/mix24.h"

int qtool_matmul_slice(struct qtool_matmul_weight *out, const struct qtool_matmul_weight *w,
                       size_t n0, size_t n, size_t k0, size_t k)
{
    return w->kind == QTOOL_MATMUL_MIX24 ? qt_mix24_slice(out, w, n0, n, k0, k)
                                         : qt_shape_slice(out, w, n0, n, k0, k);
}

int qtool_matmul_dequantize(const struct qtool_matmul_weight *w, void *out, enum qtool_dtype dtype,
                            void *stream)
{
    if (!out || (size_t)out % 2 || (unsigned)dtype > QTOOL_BF16)
        return QTOOL_UNSUPPORTED;
    return w->kind == QTOOL_MATMUL_MIX24 ? qt_mix24_dequantize(w, out, dtype, stream)
                                         : qt_matmul_dequantize(w, out, dtype, stream);
}
