/* Activation of an MLP, with or without a gate: 256 threads of 8 values each. */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/reduce.cuh"

enum { ACT_THREADS = 256, ACT_EACH = 8 };

static __device__ __forceinline__ float sigmoid(float x)
{
    return __fdividef(1, 1 + __expf(-x));
}

static __device__ __forceinline__ float activate(qtool_decoder_act act, float g, float u)
{
    switch (act) {
    case QTOOL_DECODER_SILU:
        return g * sigmoid(g) * u;
    case QTOOL_DECODER_GELU_TANH:
        return .5f * g * (1 + tanhf(.7978845608f * (g + .044715f * g * g * g))) * u;
    case QTOOL_DECODER_GELU:
        return .5f * g * (1 + erff(g * .7071067812f)) * u;
    case QTOOL_DECODER_RELU:
        return fmaxf(g, 0) * u;
    case QTOOL_DECODER_RELU2:
        return fmaxf(g, 0) * fmaxf(g, 0) * u;
    case QTOOL_DECODER_SIGMOID:
        return sigmoid(g) * u;
    default:
        g = fminf(g, 7);
        return g * sigmoid(1.702f * g) * (fminf(fmaxf(u, -7), 7) + 1);
    }
}

/* Loads 8 values; wide: as 16 bytes. */
static __device__ __forceinline__ void load_act_values(float out[ACT_EACH], const __half *x, int i,
                                                       int n, bool wide)
{
    if (wide) {
        unpack_8_halves(out, *(const uint4 *)(x + i));
    } else {
#pragma unroll
        for (int j = 0; j < ACT_EACH; j++)
            out[j] = i + j < n ? __half2float(x[i + j]) : 0;
    }
}

struct activation_args {
    qtool_decoder_activation a;
    int wide; /* rows of all arrays are 16-byte aligned, and n is a multiple of 8 */
};

static __global__ void __launch_bounds__(ACT_THREADS) activation_kernel(activation_args args)
{
    const qtool_decoder_activation &a = args.a;
    const int i = ((int)blockIdx.x * ACT_THREADS + (int)threadIdx.x) * ACT_EACH, n = (int)a.n;
    const size_t token = blockIdx.y;
    float g[ACT_EACH], u[ACT_EACH];
    ptx_launch_dependents();
    ptx_wait_previous();
    if (i >= n)
        return;
    load_act_values(g, (const __half *)a.gate + token * a.gate_stride, i, n, args.wide);
    if (a.up)
        load_act_values(u, (const __half *)a.up + token * a.up_stride, i, n, args.wide);
    const float factor = a.token_gate ? sigmoid(a.token_gate[token * a.token_gate_stride]) : 1;
    uint32_t out[ACT_EACH / 2];
#pragma unroll
    for (int j = 0; j < ACT_EACH; j++) {
        const bool in = i + j < n;
        const float gate = g[j] + (a.gate_bias && in ? a.gate_bias[i + j] : 0);
        const float up = a.up ? u[j] + (a.up_bias && in ? a.up_bias[i + j] : 0) : 1;
        ((__half *)out)[j] = to_half(factor * activate(a.act, gate, up));
    }
    __half *to = (__half *)a.out + token * n + i;
    if (args.wide)
        *(uint4 *)to = make_uint4(out[0], out[1], out[2], out[3]);
    else
        for (int j = 0; j < ACT_EACH && i + j < n; j++)
            to[j] = ((const __half *)out)[j];
}

int qt_decoder_activation(const struct qtool_decoder_activation *a, bool dependent, void *stream)
{
    struct activation_args args = {*a, 0};
    struct qt_kernel_launch l = {};
    const size_t each = ACT_THREADS * ACT_EACH;
    if (a->m > 65535)
        return QTOOL_UNSUPPORTED;
    args.wide = a->n % 8 == 0 && a->gate_stride % 8 == 0 && (size_t)a->gate % 16 == 0 &&
                (size_t)a->out % 16 == 0 &&
                (!a->up || (a->up_stride % 8 == 0 && (size_t)a->up % 16 == 0));
    l.kernel = (const void *)activation_kernel;
    l.grid = dim3((unsigned)((a->n + each - 1) / each), (unsigned)a->m);
    l.threads = ACT_THREADS;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
