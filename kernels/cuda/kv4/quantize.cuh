/* Quantization of keys and values for the 4-bit cache. */
#ifndef QT_KERNELS_CUDA_KV4_QUANTIZE_CUH
#define QT_KERNELS_CUDA_KV4_QUANTIZE_CUH

#include "kernels/cuda/kv4/cache.cuh"

static __device__ __forceinline__ float kv_clamp_f16(float v)
{
    return fminf(fmaxf(v, -65504.0f), 65504.0f);
}

/* Scale and minimum of numbers from low to high. */
static __device__ __forceinline__ float2 kv_grid_of(float low, float high)
{
    float scale = __half2float(__float2half(__fdiv_rn(high - low, 15)));
    return make_float2(scale == 0 ? 1 : scale, __half2float(__float2half(low)));
}

/*
 * Returns a code in the low bits of the FP32 number 1.5 * 2^23 + code: conversion instructions are
 * slower than additions. per: 1 / scale.
 */
enum { CODE_BASE = 0x4b400000 };
static __device__ __forceinline__ uint32_t kv_code(float x, float minimum, float per)
{
    const float code = fminf(fmaxf(__fmul_rn(x - minimum, per), 0), 15);
    return __float_as_uint(__fadd_rn(code, 0x1.8p23f));
}

/* Channel i, i < D / 32, of the value of a token that a lane quantizes: of each two, those whose
 * codes share a byte. */
template <int D> static __device__ __forceinline__ int kv_value_channel(int i)
{
    const int lane = (int)threadIdx.x % 32, group = lane % 4 * (D / 64) + i / 2;
    return group * QTOOL_KV_CHANNELS + lane / 4 * 2 + i % 2;
}

/* Parameter of value channels from low <= 0 to high >= 0: see qtool_kv4.h. */
static __device__ __forceinline__ uint16_t kv_value_param_of(float low, float high)
{
    const float range = high - low;
    const int zero = range == 0 ? 0 : (int)rintf(__fdiv_rn(__fmul_rn(low, -60), range));
    const int scale = __half_as_ushort(__float2half(__fdiv_rn(range, 15)));
    const int word = (max(scale + 32 - zero, 0) & ~63) + zero;
    return (uint16_t)(word == 0 ? 0x3c00 : word);
}

/* Quantizes the value of a token of a head, by 32 threads: x[i] is channel kv_value_channel<D>(i).
 * row: its cache row. */
template <int D>
static __device__ __forceinline__ void kv_quantize_value(const kv_view &cache, size_t row,
                                                         const float x[D / 32])
{
    const int lane = (int)threadIdx.x % 32;
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        const float v[2] = {kv_clamp_f16(x[2 * i]), kv_clamp_f16(x[2 * i + 1])};
        float low = fminf(fminf(v[0], v[1]), 0), high = fmaxf(fmaxf(v[0], v[1]), 0);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) {
            low = fminf(low, __shfl_xor_sync(~0u, low, d));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, d));
        }
        const uint16_t param = kv_value_param_of(low, high);
        const float zero = (float)(param & 63) / 4;
        const float per = __frcp_rn(__half2float(__ushort_as_half(param)));
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float code = fminf(fmaxf(__fadd_rn(__fmul_rn(v[j], per), zero), 0), 15);
            codes += (__float_as_uint(__fadd_rn(code, 0x1.8p23f)) - CODE_BASE) << 4 * (2 * i + j);
        }
        if (lane < 4)
            cache.v_param[kv_value_param<D>(row, lane * (D / 64) + i)] = __ushort_as_half(param);
    }
    unsigned char *to = cache.v + row * (D / 2) + lane * (D / 64);
    if (D == 128)
        *(uint16_t *)to = (uint16_t)codes;
    else
        *to = (unsigned char)codes;
}

/* Eight keys as FP16. */
struct alignas(16) kv_keys {
    __half2 x[4];
};

/* Layout of a group in a thread block. */
template <int D, int THREADS> struct kv_group {
    enum {
        CHUNKS = D / 8, /* threads per row */
        ROWS = THREADS / CHUNKS,
        STEPS = QTOOL_KV_GROUP / ROWS,
        WARPS = THREADS / 32,
    };
};

/* Codes of eight keys in the order of qtool_kv4.h. */
static __device__ __forceinline__ uint32_t kv_key_codes(const kv_keys &k, const float2 grid[8],
                                                        const float per[8])
{
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = __half22float2(k.x[i]);
        codes += (kv_code(x.x, grid[2 * i].y, per[2 * i]) - CODE_BASE) << 4 * i;
        codes += (kv_code(x.y, grid[2 * i + 1].y, per[2 * i + 1]) - CODE_BASE) << (4 * i + 16);
    }
    return codes;
}

/* Ranges of the thread's channels, from those of its own tokens. */
template <int D, int THREADS>
static __device__ __forceinline__ void kv_join_ranges(kv_keys *low, kv_keys *high)
{
    typedef kv_group<D, THREADS> G;
    __shared__ kv_keys ranges[2][G::WARPS][G::CHUNKS];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
#pragma unroll
    for (int d = G::CHUNKS; d < 32; d *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            low->x[i] = __hmin2(low->x[i], __shfl_xor_sync(~0u, low->x[i], d));
            high->x[i] = __hmax2(high->x[i], __shfl_xor_sync(~0u, high->x[i], d));
        }
    if (lane < G::CHUNKS) {
        ranges[0][warp][lane] = *low;
        ranges[1][warp][lane] = *high;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < G::WARPS; w++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            low->x[i] = __hmin2(low->x[i], ranges[0][w][lane % G::CHUNKS].x[i]);
            high->x[i] = __hmax2(high->x[i], ranges[1][w][lane % G::CHUNKS].x[i]);
        }
}

/* Widens the ranges by the keys of a token. */
static __device__ __forceinline__ void kv_widen_ranges(kv_keys *low, kv_keys *high,
                                                       const kv_keys &k)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        low->x[i] = __hmin2(low->x[i], k.x[i]);
        high->x[i] = __hmax2(high->x[i], k.x[i]);
    }
}

/* Quantizes a KV group. row: cache row of position 0 of the group. at: position of its last token
 * so far. begin: the first position whose keys are quantized; earlier ones get codes of 0. run:
 * tokens of the group in the call: fresh.wait() waits until their keys can be read, and
 * fresh.keys(back, channel) returns those of the token `back` positions before the last. The others
 * come from k_tail. Fresh::ONE: run is 1, and the ranges of the others are joined before the
 * wait. */
template <int D, int THREADS, class Fresh>
static __device__ __forceinline__ void kv_quantize_group(const kv_view &cache, int head,
                                                         int sequence, size_t row, int at,
                                                         int begin, int run, const Fresh &fresh)
{
    typedef kv_group<D, THREADS> G;
    const int channel = (int)threadIdx.x % G::CHUNKS * 8, own = (int)threadIdx.x / G::CHUNKS;
    const __half *tail =
        cache.k_tail + ((size_t)sequence * cache.heads + head) * (QTOOL_KV_GROUP * D) + channel;
    const __half2 most = __float2half2_rn(65504);
    kv_keys k[G::STEPS], low, high;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        low.x[i] = most;
        high.x[i] = __hneg2(most);
    }
#pragma unroll
    for (int s = 0; s < G::STEPS; s++) {
        const int j = s * G::ROWS + own;
        if (j < begin || j > at - run)
            continue;
        k[s] = *(const kv_keys *)(tail + (size_t)j * D);
        kv_widen_ranges(&low, &high, k[s]);
    }
    if (Fresh::ONE)
        kv_join_ranges<D, THREADS>(&low, &high);
    fresh.wait();
#pragma unroll
    for (int s = 0; s < G::STEPS; s++) {
        const int j = s * G::ROWS + own;
        if (j < begin || j > at || j <= at - run)
            continue;
        k[s] = fresh.keys(at - j, channel);
        kv_widen_ranges(&low, &high, k[s]);
    }
    if (Fresh::ONE) /* other threads have the token, too, and the same channels */
        kv_widen_ranges(&low, &high, fresh.keys(0, channel));
    else
        kv_join_ranges<D, THREADS>(&low, &high);
    if (at < begin) { /* token 0 alone */
        const __half2 zero = __float2half2_rn(0);
        low = high = {{zero, zero, zero, zero}};
    }
    float2 grid[8];
    float per[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float2 l = __half22float2(low.x[i / 2]), h = __half22float2(high.x[i / 2]);
        grid[i] = i % 2 ? kv_grid_of(l.y, h.y) : kv_grid_of(l.x, h.x);
        per[i] = __frcp_rn(grid[i].x);
    }
#pragma unroll
    for (int s = 0; s < G::STEPS; s++) {
        const int j = s * G::ROWS + own;
        if (j <= at)
            *(uint32_t *)(cache.k + ((row + j) * D + channel) / 2) =
                j >= begin ? kv_key_codes(k[s], grid, per) : 0;
    }
    if (own == 0) {
        kv_keys *to = (kv_keys *)(cache.k_param + row / QTOOL_KV_GROUP * (4 * D) + channel * 2);
        kv_keys scale, minimum;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scale.x[i] = __floats2half2_rn(grid[2 * i].x, grid[2 * i + 1].x);
            minimum.x[i] = __floats2half2_rn(grid[2 * i].y, grid[2 * i + 1].y);
        }
        to[0] = scale;
        to[G::CHUNKS] = minimum;
    }
}

#endif
