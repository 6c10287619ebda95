/*
 * Conversion of BF16 activations to FP16. BF16 has less precision and more range than FP16: each
 * token is multiplied by the power of two that brings its largest magnitude into [2^14, 2^15), and
 * its results are multiplied by the inverse (the token factor). The conversion is exact for values
 * of at least 2^-31 times the largest; smaller ones are rounded to multiples of 2^-24 after
 * scaling.
 */
#ifndef QT_KERNELS_CUDA_COMMON_TOKEN_SCALE_CUH
#define QT_KERNELS_CUDA_COMMON_TOKEN_SCALE_CUH

#include "kernels/cuda/common/ptx.cuh"

static __device__ __forceinline__ float qt_pow2(int e)
{
    return __int_as_float((e + 127) << 23);
}

/* log2 of the power of two that brings the token's largest magnitude, given as BF16 bits, into
 * [2^14, 2^15). */
static __device__ __forceinline__ int qt_token_shift(int top)
{
    int e = (top >> 7) - 127;
    return e == 128 ? 0 : min(14 - e, 127);
}

/* The factor for results of the token: 2^-up, in two steps because qt_pow2 cannot express
 * 2^-127. */
static __device__ __forceinline__ float qt_token_factor(int up)
{
    return qt_pow2(-(up / 2)) * qt_pow2(-(up - up / 2));
}

/* BF16 bits times 2^up; FP32 holds the product exactly. */
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

/* Running maxima of magnitudes as two BF16 values, one for even and one for odd positions, updated
 * with v. */
static __device__ __forceinline__ uint32_t qt_token_tops(uint32_t tops, uint32_t v)
{
    return __vmaxu2(tops, v & 0x7fff7fff);
}

static __device__ __forceinline__ uint32_t qt_token_tops(uint32_t tops, uint4 v)
{
    return qt_token_tops(qt_token_tops(qt_token_tops(qt_token_tops(tops, v.x), v.y), v.z), v.w);
}

/* The larger of the two maxima: qt_lane_top of the lane, qt_token_top of the warp. */
static __device__ __forceinline__ int qt_lane_top(uint32_t tops)
{
    return max((int)(tops & 0xffff), (int)(tops >> 16));
}

static __device__ __forceinline__ int qt_token_top(uint32_t tops)
{
    return __reduce_max_sync(~0u, qt_lane_top(tops));
}

#endif
