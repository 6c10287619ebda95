/* Activation of an MLP, with or without a gate: 256 threads of 8 values each, or of 2 for few
 * tokens. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/activation.cuh"
#include "kernels/cuda/decoder/decoder.h"

enum { ACT_THREADS = 256, ACT_FEW = 1 << 19 /* values of few tokens */ };

/* Loads EACH (2 or 8) values; wide: as one word of 4 or 16 bytes. */
template <int EACH>
static __device__ __forceinline__ void load_act_values(float out[EACH], const __half *x, int i,
                                                       int n, bool wide)
{
    if (!wide) {
#pragma unroll
        for (int j = 0; j < EACH; j++)
            out[j] = i + j < n ? __half2float(x[i + j]) : 0;
    } else if constexpr (EACH == 8) {
        unpack_8_halves(out, *(const uint4 *)(x + i));
    } else {
        const float2 pair = __half22float2(*(const __half2 *)(x + i));
        out[0] = pair.x;
        out[1] = pair.y;
    }
}

struct activation_args {
    qtool_decoder_activation a;
    int wide; /* rows of all arrays are 16-byte aligned, and n is a multiple of 8 */
};

/* One instance per activation, without jumps among activations for every value. */
template <qtool_decoder_act ACT, int EACH>
static __global__ void __launch_bounds__(ACT_THREADS) activation_kernel(activation_args args)
{
    const qtool_decoder_activation &a = args.a;
    const int i = ((int)blockIdx.y * ACT_THREADS + (int)threadIdx.x) * EACH, n = (int)a.n;
    const size_t token = blockIdx.x;
    float g[EACH], u[EACH];
    ptx_launch_dependents();
    ptx_wait_previous();
    if (i >= n)
        return;
    const __half *gate = (const __half *)a.gate + token * a.gate_stride;
    const __half *up = a.up ? (const __half *)a.up + token * a.up_stride : gate;
    load_act_values<EACH>(g, gate, i, n, args.wide);
    load_act_values<EACH>(u, up, i, n, args.wide);
    const float factor = token_factor(a, token);
    uint32_t out[EACH / 2];
#pragma unroll
    for (int j = 0; j < EACH; j++)
        g[j] = act_value<ACT>(a, g[j], u[j], min(i + j, n - 1), factor);
#pragma unroll
    for (int j = 0; j < EACH; j += 2) {
        const __half2 pair = __halves2half2(to_half(g[j]), to_half(g[j + 1]));
        out[j / 2] = *(const uint32_t *)&pair;
    }
    __half *to = (__half *)a.out + token * n + i;
    if (!args.wide) {
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (i + j < n)
                to[j] = to_half(g[j]);
    } else if constexpr (EACH == 8)
        *(uint4 *)to = make_uint4(out[0], out[1], out[2], out[3]);
    else
        *(uint32_t *)to = out[0];
}

#define INSTANCE(ACT)                                                                              \
    {                                                                                              \
        (const void *)activation_kernel<ACT, 2>, (const void *)activation_kernel<ACT, 8>           \
    }
static const void *const activations[][2] = {
    INSTANCE(QTOOL_DECODER_SILU),   INSTANCE(QTOOL_DECODER_GELU_TANH),
    INSTANCE(QTOOL_DECODER_GELU),   INSTANCE(QTOOL_DECODER_RELU),
    INSTANCE(QTOOL_DECODER_RELU2),  INSTANCE(QTOOL_DECODER_SIGMOID),
    INSTANCE(QTOOL_DECODER_CLAMPED)};
#undef INSTANCE

int qt_decoder_activation(const struct qtool_decoder_activation *a, bool dependent, void *stream)
{
    struct activation_args args = {*a, 0};
    struct qt_kernel_launch l = {};
    if (a->w4ax) {
        int rc = qt_decoder_activation_w4ax(a, dependent, stream);
        if (rc != QTOOL_UNSUPPORTED)
            return rc;
        struct qtool_decoder_activation alone = *a;
        alone.w4ax = NULL;
        rc = qt_decoder_activation(&alone, dependent, stream);
        return rc == QTOOL_OK
                   ? qtool_w4ax_quantize(&a->acts, a->w4ax, NULL, a->out, a->m, QTOOL_F16, stream)
                   : rc;
    }
    const bool many = a->m * a->n > ACT_FEW;
    const size_t each = ACT_THREADS * (many ? 8 : 2);
    if (a->act > QTOOL_DECODER_CLAMPED || a->m >= 1u << 31 || a->n > 65535 * each)
        return QTOOL_UNSUPPORTED;
    args.wide = a->n % 8 == 0 && a->gate_stride % 8 == 0 && (size_t)a->gate % 16 == 0 &&
                (size_t)a->out % 16 == 0 &&
                (!a->up || (a->up_stride % 8 == 0 && (size_t)a->up % 16 == 0));
    l.kernel = activations[a->act][many];
    l.grid = dim3((unsigned)a->m, (unsigned)((a->n + each - 1) / each));
    l.threads = ACT_THREADS;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
