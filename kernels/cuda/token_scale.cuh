/* BF16 activations as FP16: each token is multiplied by a power of two, its results divided. */
#ifndef QT_CUDA_TOKEN_SCALE_CUH
#define QT_CUDA_TOKEN_SCALE_CUH

#include "kernels/cuda/ptx.cuh"

static __device__ __forceinline__ float qt_pow2(int e)
{
    return __int_as_float((e + 127) << 23);
}

/* log2 of the factor that brings the token's largest magnitude, given as BF16 bits, to 2^14. */
static __device__ __forceinline__ int qt_token_shift(int top)
{
    int e = (top >> 7) - 127;
    return e == 128 ? 0 : min(14 - e, 127);
}

/* BF16 bits times 2^up; in two steps, as 2^up itself may be more than FP32 holds. */
static __device__ __forceinline__ __half qt_token_half(uint16_t bits, int up)
{
    float v = __int_as_float((int)bits << 16);
    return __float2half(v * qt_pow2(up / 2) * qt_pow2(up - up / 2));
}

#endif
