/*
 * BF16 activations as FP16. BF16 has less precision and more range: each token is multiplied by the
 * power of two that brings its largest value to 2^14, which is exact but for values 2^-38 of the
 * largest, and its results are divided by that.
 */
#ifndef QT_KERNELS_CUDA_COMMON_TOKEN_SCALE_CUH
#define QT_KERNELS_CUDA_COMMON_TOKEN_SCALE_CUH

#include "kernels/cuda/common/ptx.cuh"

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

/* What results of the token are to be multiplied by, in two steps: 2^-127 is less than qt_pow2 can
 * say. */
static __device__ __forceinline__ float qt_token_factor(int up)
{
    return qt_pow2(-(up / 2)) * qt_pow2(-(up - up / 2));
}

/* BF16 bits times 2^up, which FP32 holds. */
static __device__ __forceinline__ __half qt_token_half(uint16_t bits, int up)
{
    return __float2half(__int_as_float((int)bits << 16) * qt_pow2(up));
}

static __device__ __forceinline__ uint32_t qt_token_halves(uint32_t two, int up)
{
    const float factor = qt_pow2(up);
    const __half2 v = __floats2half2_rn(__int_as_float((int)(two << 16)) * factor,
                                        __int_as_float((int)(two & 0xffff0000)) * factor);
    return *(const uint32_t *)&v;
}

static __device__ __forceinline__ uint4 qt_token_halves(uint4 v, int up)
{
    return make_uint4(qt_token_halves(v.x, up), qt_token_halves(v.y, up), qt_token_halves(v.z, up),
                      qt_token_halves(v.w, up));
}

/* The largest magnitudes so far of values at even and at odd places, two BF16, and of v. */
static __device__ __forceinline__ uint32_t qt_token_tops(uint32_t tops, uint32_t v)
{
    return __vmaxu2(tops, v & 0x7fff7fff);
}

static __device__ __forceinline__ uint32_t qt_token_tops(uint32_t tops, uint4 v)
{
    return qt_token_tops(qt_token_tops(qt_token_tops(qt_token_tops(tops, v.x), v.y), v.z), v.w);
}

/* The larger of both; of all lanes. */
static __device__ __forceinline__ int qt_lane_top(uint32_t tops)
{
    return max((int)(tops & 0xffff), (int)(tops >> 16));
}

static __device__ __forceinline__ int qt_token_top(uint32_t tops)
{
    return __reduce_max_sync(~0u, qt_lane_top(tops));
}

#endif
