/* Sums, conversions and prefetches that the decoder's kernels share. */
#ifndef QT_KERNELS_CUDA_DECODER_REDUCE_CUH
#define QT_KERNELS_CUDA_DECODER_REDUCE_CUH

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/include/qtool_decoder.h"

static __device__ __forceinline__ float sum_of_warp(float v)
{
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(~0u, v, d);
    return v;
}

/* The sum over the thread block, in all threads. parts[32]: shared memory, which may be used again
 * after the next barrier. */
static __device__ __forceinline__ float sum_of_block(float v, float *parts)
{
    const int warps = (int)blockDim.x / 32;
    v = sum_of_warp(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = v;
    __syncthreads();
    v = (int)threadIdx.x % 32 < warps ? parts[threadIdx.x % 32] : 0;
    return sum_of_warp(v);
}

/* Logit i of all sequences, after factor, bias and softcap; of its sequence it is logit `id`. */
static __device__ __forceinline__ float changed_logit(const qtool_decoder_next &a, size_t i, int id)
{
    float v = a.half ? __half2float(((const __half *)a.half)[i]) : a.logits[i];
    v = v * a.factor + (a.bias ? a.bias[id] : 0);
    return a.softcap > 0 ? a.softcap * tanhf(v / a.softcap) : v;
}

static __device__ __forceinline__ void unpack_8_halves(float out[8], uint4 v)
{
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 f = __half22float2(*(const __half2 *)&words[i]);
        out[2 * i] = f.x;
        out[2 * i + 1] = f.y;
    }
}

/* Starts to bring the cache line at p into L2. */
static __device__ __forceinline__ void prefetch_line(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* FP16 of v, within its range; NaN stays NaN. */
static __device__ __forceinline__ __half to_half(float v)
{
    return __float2half_rn(v > 65504 ? 65504 : v < -65504 ? -65504 : v);
}

/* The term of ALiBi in the score of key j. */
static __device__ __forceinline__ float slope_term(const qtool_decoder_attention &a, float slope,
                                                   int j)
{
    const float term = slope * (float)j;
    if (a.slope_factor == 0)
        return term;
    const uint32_t bits = __float_as_uint(term);
    return a.slope_factor * __uint_as_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

#endif
