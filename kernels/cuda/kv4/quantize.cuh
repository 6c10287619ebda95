/* Quantization of keys and values for the 4-bit cache. */
#ifndef QT_KERNELS_CUDA_KV4_QUANTIZE_CUH
#define QT_KERNELS_CUDA_KV4_QUANTIZE_CUH

#include "kernels/cuda/kv4/cache.cuh"

static __device__ __forceinline__ float kv_clamp_f16(float v)
{
    return fminf(fmaxf(v, -65504.0f), 65504.0f);
}

/* Codes of numbers x: x / scale + zero-point, rounded. */
struct kv_grid {
    float per, zero; /* per: 1 / scale */

    /* Additions round, and leave the code in the low bits: conversions are slower. */
    __device__ __forceinline__ uint32_t code(float x) const
    {
        const float q = fminf(fmaxf(__fadd_rn(__fmul_rn(x, per), zero), 0), 15);
        return __float_as_uint(__fadd_rn(q, 0x1.8p23f)) - __float_as_uint(0x1.8p23f);
    }
};

static __device__ __forceinline__ float kv_per(int scale)
{
    return __frcp_rn(__half2float(__ushort_as_half((uint16_t)scale)));
}

/* The FP16 number nearest to a range / 15, as bits. */
static __device__ __forceinline__ int kv_scale_bits(float range)
{
    return __half_as_ushort(__float2half(__fdiv_rn(range, 15)));
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
    const int word = (max(kv_scale_bits(range) + 32 - zero, 0) & ~63) + zero;
    return (uint16_t)(word == 0 ? 0x3c00 : word);
}

/* Zero-point of keys around `middle`. */
static __device__ __forceinline__ int kv_key_zero(float middle, int scale)
{
    const float zero = rintf(__fsub_rn(7.5f, __fmul_rn(middle, kv_per(scale))));
    return (int)fminf(fmaxf(zero, -63), 63);
}

/* Parameter of keys from low to high: see qtool_kv4.h. */
static __device__ __forceinline__ uint16_t kv_key_param_of(float low, float high, kv_grid *grid)
{
    const float middle = (low + high) / 2;
    const float range = fmaxf(high - low, __fmul_rn(fabsf(middle), 9.f / 32));
    const int want = max(kv_scale_bits(range), 96);
    int zero = kv_key_zero(middle, want);
    const int base = (want + 32 - abs(zero)) & ~63;
    zero = kv_key_zero(middle, base + abs(zero));
    const int scale = base + abs(zero);
    *grid = {kv_per(scale), (float)zero};
    return (uint16_t)((zero < 0 ? 0x8000 : 0) + scale);
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
        const kv_grid grid = {kv_per(param), (float)(param & 63) / 4};
#pragma unroll
        for (int j = 0; j < 2; j++)
            codes += grid.code(v[j]) << 4 * (2 * i + j);
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
static __device__ __forceinline__ uint32_t kv_key_codes(const kv_keys &k, const kv_grid grid[8])
{
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = __half22float2(k.x[i]);
        codes += grid[2 * i].code(x.x) << 4 * i;
        codes += grid[2 * i + 1].code(x.y) << (4 * i + 16);
    }
    return codes;
}

/* Range of the keys of a channel. */
struct kv_range {
    __half low, high;
};

/* Returns the range of channel threadIdx.x % D, from those of all threads' own tokens. */
template <int D, int THREADS>
static __device__ __forceinline__ kv_range kv_join_ranges(kv_keys low, kv_keys high)
{
    typedef kv_group<D, THREADS> G;
    __shared__ alignas(16) __half ranges[2][G::WARPS][D];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int channel = (int)threadIdx.x % D;
#pragma unroll
    for (int d = G::CHUNKS; d < 32; d *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            low.x[i] = __hmin2(low.x[i], __shfl_xor_sync(~0u, low.x[i], d));
            high.x[i] = __hmax2(high.x[i], __shfl_xor_sync(~0u, high.x[i], d));
        }
    if (lane < G::CHUNKS) {
        *(kv_keys *)&ranges[0][warp][lane * 8] = low;
        *(kv_keys *)&ranges[1][warp][lane * 8] = high;
    }
    __syncthreads();
    kv_range all = {ranges[0][0][channel], ranges[1][0][channel]};
#pragma unroll
    for (int w = 1; w < G::WARPS; w++) {
        all.low = __hmin(all.low, ranges[0][w][channel]);
        all.high = __hmax(all.high, ranges[1][w][channel]);
    }
    return all;
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

/* Computes the grid of each channel in one thread and copies those of eight channels from `channel`
 * on to each thread: eight per thread, unrolled, would be slower. range: that of channel
 * threadIdx.x % D, whose parameter is returned. */
template <int D>
static __device__ __forceinline__ uint16_t kv_share_grids(kv_grid grid[8], kv_range range,
                                                          int channel)
{
    __shared__ alignas(16) float per[D], zero[D];
    kv_grid own;
    const uint16_t param = kv_key_param_of(__half2float(range.low), __half2float(range.high), &own);
    if (threadIdx.x < D) {
        per[threadIdx.x] = own.per;
        zero[threadIdx.x] = own.zero;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++)
        grid[i] = {per[channel + i], zero[channel + i]};
    return param;
}

/* Quantizes a KV group. row: cache row of position 0 of the group. at: position of its last token
 * so far. begin: the first position whose keys are quantized; earlier ones get codes of 0. run:
 * tokens of the group in the call: fresh.wait() waits until their keys can be read, and
 * fresh.keys(back, channel) returns those of the token `back` positions before the last. The others
 * come from k_tail. Fresh::ONE: run is 1, and the ranges of the others are joined before the
 * wait; fresh.key(channel) is a key of the last token. */
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
    kv_range range;
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
    if constexpr (Fresh::ONE)
        range = kv_join_ranges<D, THREADS>(low, high);
    fresh.wait();
#pragma unroll
    for (int s = 0; s < G::STEPS; s++) {
        const int j = s * G::ROWS + own;
        if (j < begin || j > at || j <= at - run)
            continue;
        k[s] = fresh.keys(at - j, channel);
        kv_widen_ranges(&low, &high, k[s]);
    }
    if constexpr (Fresh::ONE) {
        const __half x = fresh.key((int)threadIdx.x % D);
        range = {__hmin(range.low, x), __hmax(range.high, x)};
    } else {
        range = kv_join_ranges<D, THREADS>(low, high);
    }
    if (at < begin) /* token 0 alone */
        range = {__float2half(0), __float2half(0)};
    kv_grid grid[8];
    const uint16_t param = kv_share_grids<D>(grid, range, channel);
#pragma unroll
    for (int s = 0; s < G::STEPS; s++) {
        const int j = s * G::ROWS + own;
        if (j <= at)
            *(uint32_t *)(cache.k + ((row + j) * D + channel) / 2) =
                j >= begin ? kv_key_codes(k[s], grid) : 0;
    }
    if (threadIdx.x < D)
        ((uint16_t *)cache.k_param)[row / QTOOL_KV_GROUP * D + threadIdx.x] = param;
}

#endif
