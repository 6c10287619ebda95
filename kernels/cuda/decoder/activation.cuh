/* Values of an activation. */
#ifndef QT_KERNELS_CUDA_DECODER_ACTIVATION_CUH
#define QT_KERNELS_CUDA_DECODER_ACTIVATION_CUH

#include "kernels/cuda/decoder/reduce.cuh"

static __device__ __forceinline__ float sigmoid(float x)
{
    return __fdividef(1, 1 + __expf(-x));
}

template <qtool_decoder_act ACT> static __device__ __forceinline__ float activate(float g, float u)
{
    switch (ACT) {
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

/* Factor of all values of a token. */
static __device__ __forceinline__ float token_factor(const qtool_decoder_activation &a,
                                                     size_t token)
{
    return a.token_gate ? sigmoid(a.token_gate[token * a.token_gate_stride]) : 1;
}

/* Value i of a row from gate and up, before rounding. */
template <qtool_decoder_act ACT>
static __device__ __forceinline__ float act_value(const qtool_decoder_activation &a, float gate,
                                                  float up, int i, float factor)
{
    gate += a.gate_bias ? a.gate_bias[i] : 0;
    up = !a.up ? 1 : a.up_bias ? up + a.up_bias[i] : up;
    return factor * activate<ACT>(gate, up);
}

#endif
