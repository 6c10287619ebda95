/*
 * Quantizes the keys and values of new tokens and appends them to the KV cache.
 *
 *   grid    (tokens, KV heads), INT4: (tokens, KV heads, 2): keys, and values
 *   block   INT4: 4 warps; F16: 1 warp
 *   values  INT4: warp 0; a lane has D / 32 adjacent channels of the token
 *   keys    INT4: the thread block of the last new token of a KV group quantizes the whole group;
 *           the other thread blocks quantize no keys. A thread has 8 adjacent channels of every
 *           ROWS-th token. Keys of earlier calls come from k_tail
 *
 * Keys from k_tail are read before the preceding kernel has finished, new keys and values after it.
 *
 * The thread block that quantizes a sequence's first KV group of this call also stores the keys of
 * the sequence's last KV group to k_tail, after it has read the first group's earlier keys from
 * there.
 *
 * Traffic    bytes per token and head: 4 * head_dim read, head_dim / 2 + 4 written (codes and
 *            parameters of values); per head and KV group with new tokens: up to 128 * head_dim
 *            read from k_tail, 36 * head_dim written (codes and parameters of keys); per head and
 *            sequence: up to 128 * head_dim written to k_tail
 * Reference  the same arithmetic in plain C (tests/gpu/test_kv4.c), bit for bit
 * Used by    qtool_kv_append
 */
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/kv4/view.h"

#include <math.h>

struct kv_append_args {
    kv_view cache;
    const void *k, *v; /* [tokens][heads][D] */
    const int *sequence, *position;
    int tokens, bf16;
};

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

/* Quantizes the value of the token at index `token` of the call; 32 threads of PER channels. */
template <int PER>
static __device__ __forceinline__ void kv_append_value(const kv_append_args &a, int token, int head,
                                                       size_t row)
{
    enum { D = 32 * PER };
    const int channel = (int)threadIdx.x * PER;
    const size_t from = ((size_t)token * a.cache.heads + head) * D + channel;
    float v[PER], low = INFINITY, high = -INFINITY;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        v[i] = kv_clamp_f16(qt_widen(a.bf16, ((const uint16_t *)a.v)[from + i]));
        low = fminf(low, v[i]);
        high = fmaxf(high, v[i]);
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        low = fminf(low, __shfl_xor_sync(~0u, low, d));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, d));
    }
    const float2 grid = kv_grid_of(low, high);
    const float per = __frcp_rn(grid.x);
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < PER; i++)
        codes += (kv_code(v[i], grid.y, per) - CODE_BASE) << 4 * i;
    unsigned char *to = a.cache.v + (row * D + channel) / 2;
    if (PER == 4)
        *(uint16_t *)to = (uint16_t)codes;
    else
        *to = (unsigned char)codes;
    if (threadIdx.x == 0)
        a.cache.param[row] = __floats2half2_rn(grid.x, grid.y);
}

/* Eight keys as FP16. */
struct alignas(16) kv_keys {
    __half2 x[4];
};

/* The keys from `channel` on of the token at an index of the call. */
static __device__ __forceinline__ kv_keys kv_new_keys(const kv_append_args &a, int token, int head,
                                                      int dim, int channel)
{
    const size_t at = ((size_t)token * a.cache.heads + head) * dim + channel;
    const uint4 bits = *(const uint4 *)((const uint16_t *)a.k + at);
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    kv_keys k;
#pragma unroll
    for (int i = 0; i < 4; i++)
        k.x[i] = __floats2half2_rn(kv_clamp_f16(qt_widen(a.bf16, (uint16_t)words[i])),
                                   kv_clamp_f16(qt_widen(a.bf16, (uint16_t)(words[i] >> 16))));
    return k;
}

enum { APPEND_THREADS = 128 };

/* Layout of a group in a thread block. */
template <int D> struct kv_group {
    enum {
        CHUNKS = D / 8, /* threads per row */
        ROWS = APPEND_THREADS / CHUNKS,
        STEPS = QTOOL_KV_GROUP / ROWS,
        WARPS = APPEND_THREADS / 32,
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
template <int D> static __device__ __forceinline__ void kv_join_ranges(kv_keys *low, kv_keys *high)
{
    typedef kv_group<D> G;
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

/* Quantizes the KV group whose last token so far is at index `token` of the call. row: cache row of
 * position 0 of the group. at: position of the token in the group. begin: the first position whose
 * keys are quantized; earlier ones get codes of 0. run: tokens of the group in the call. */
template <int D>
static __device__ __forceinline__ void kv_append_group(const kv_append_args &a, int token, int head,
                                                       int sequence, size_t row, int at, int begin,
                                                       int run)
{
    typedef kv_group<D> G;
    const int channel = (int)threadIdx.x % G::CHUNKS * 8, own = (int)threadIdx.x / G::CHUNKS;
    const __half *tail =
        a.cache.k_tail + ((size_t)sequence * a.cache.heads + head) * (QTOOL_KV_GROUP * D) + channel;
    const __half2 most = __float2half2_rn(65504);
    kv_keys k[G::STEPS], low, high;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        low.x[i] = most;
        high.x[i] = __hneg2(most);
    }
#pragma unroll
    for (int fresh = 0; fresh < 2; fresh++) {
        if (fresh)
            ptx_wait_previous();
#pragma unroll
        for (int s = 0; s < G::STEPS; s++) {
            const int j = s * G::ROWS + own;
            if (j < begin || j > at || (at - j < run) != fresh)
                continue;
            k[s] = fresh ? kv_new_keys(a, token - (at - j), head, D, channel)
                         : *(const kv_keys *)(tail + (size_t)j * D);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                low.x[i] = __hmin2(low.x[i], k[s].x[i]);
                high.x[i] = __hmax2(high.x[i], k[s].x[i]);
            }
        }
    }
    kv_join_ranges<D>(&low, &high);
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
            *(uint32_t *)(a.cache.k + ((row + j) * D + channel) / 2) =
                j >= begin ? kv_key_codes(k[s], grid, per) : 0;
    }
    if (own == 0) {
        kv_keys *to = (kv_keys *)(a.cache.k_param + row / QTOOL_KV_GROUP * (4 * D) + channel * 2);
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

/* Index of the last token of the sequence, whose tokens are adjacent, from index `token` on. */
static __device__ __forceinline__ int kv_last_of(const kv_append_args &a, int token, int sequence)
{
    const auto has = [&](int index) { return index < a.tokens && a.sequence[index] == sequence; };
    int count = 0;
    do { /* in steps of a group, then of a token */
        count = __syncthreads_count(has(token + ((int)threadIdx.x + 1) * QTOOL_KV_GROUP));
        token += count * QTOOL_KV_GROUP;
    } while (count == APPEND_THREADS);
    return token + __syncthreads_count((int)threadIdx.x < QTOOL_KV_GROUP - 1 &&
                                       has(token + (int)threadIdx.x + 1));
}

/* Tokens of the call in the group of the token at an index, up to that token. */
static __device__ __forceinline__ int kv_run_of(const kv_append_args &a, int token, int sequence,
                                                int at)
{
    const int index = token - (int)threadIdx.x;
    return __syncthreads_count((int)threadIdx.x <= at && index >= 0 &&
                               a.sequence[index] == sequence);
}

/* Stores the new keys, `run` of them, of the group of the token at index `last` to the tail. */
template <int D>
static __device__ __forceinline__ void kv_append_tail(const kv_append_args &a, int last, int run,
                                                      int head, int sequence)
{
    typedef kv_group<D> G;
    const int channel = (int)threadIdx.x % G::CHUNKS * 8, at = a.position[last] % QTOOL_KV_GROUP;
    __half *tail =
        a.cache.k_tail + ((size_t)sequence * a.cache.heads + head) * (QTOOL_KV_GROUP * D) + channel;
#pragma unroll 1
    for (int i = (int)threadIdx.x / G::CHUNKS; i < run; i += G::ROWS)
        *(kv_keys *)(tail + (size_t)(at - i) * D) = kv_new_keys(a, last - i, head, D, channel);
}

template <int D>
__global__ void __launch_bounds__(APPEND_THREADS)
    kv_append_int4(const __grid_constant__ kv_append_args a)
{
    const int token = (int)blockIdx.x, head = (int)blockIdx.y, sequence = a.sequence[token];
    const int position = a.position[token], at = position % QTOOL_KV_GROUP;
    const size_t row = kv_row(a.cache, kv_page(a.cache, sequence, position), head, position);
    const bool more = token + 1 < a.tokens && a.sequence[token + 1] == sequence;
    ptx_launch_dependents();
    if (blockIdx.z) {
        ptx_wait_previous();
        if (threadIdx.x < 32)
            kv_append_value<D / 32>(a, token, head, row);
        if (position == 0 && threadIdx.x < D / 8)
            *(kv_keys *)(a.cache.k_first + ((size_t)sequence * a.cache.heads + head) * D +
                         threadIdx.x * 8) = kv_new_keys(a, token, head, D, (int)threadIdx.x * 8);
        return;
    }
    if (more && at != QTOOL_KV_GROUP - 1)
        return; /* the group has a later token */
    int run = kv_run_of(a, token, sequence, at);
    kv_append_group<D>(a, token, head, sequence, row - at, at, position < QTOOL_KV_GROUP, run);
    const int before = token - run; /* of the sequence only if the whole group is in the call */
    if (before >= 0 && a.sequence[before] == sequence)
        return;      /* not the sequence's first group of the call */
    __syncthreads(); /* the tail has been read */
    int last = token;
    if (more) {
        last = kv_last_of(a, token, sequence);
        run = kv_run_of(a, last, sequence, a.position[last] % QTOOL_KV_GROUP);
    }
    kv_append_tail<D>(a, last, run, head, sequence);
}

template <int D>
__global__ void __launch_bounds__(32) kv_append_f16(const __grid_constant__ kv_append_args a)
{
    const int token = (int)blockIdx.x, head = (int)blockIdx.y, sequence = a.sequence[token];
    const int position = a.position[token];
    const size_t row = kv_row(a.cache, kv_page(a.cache, sequence, position), head, position);
    ptx_launch_dependents();
    ptx_wait_previous();
#pragma unroll
    for (int d = (int)threadIdx.x; d < D; d += 32) {
        const size_t from = ((size_t)token * a.cache.heads + head) * D + d;
        const float k = qt_widen(a.bf16, ((const uint16_t *)a.k)[from]);
        const float v = qt_widen(a.bf16, ((const uint16_t *)a.v)[from]);
        ((__half *)a.cache.k)[row * D + d] = __float2half(kv_clamp_f16(k));
        ((__half *)a.cache.v)[row * D + d] = __float2half(kv_clamp_f16(v));
    }
}

int qtool_kv_append(const struct qtool_kv_cache *cache, const void *k, const void *v,
                    const int *sequence, const int *position, size_t tokens, enum qtool_dtype dtype,
                    int dependent_launch, void *stream)
{
    static void (*const kernels[2][2])(kv_append_args) = {{kv_append_int4<64>, kv_append_int4<128>},
                                                          {kv_append_f16<64>, kv_append_f16<128>}};
    kv_append_args a = {};
    if (qt_kv_cache_fault(cache) || tokens > 0x7fffffff || (unsigned)dtype > QTOOL_BF16)
        return QTOOL_UNSUPPORTED;
    if (tokens == 0)
        return QTOOL_OK;
    if (!k || !v || !sequence || !position || (size_t)k % 16)
        return QTOOL_UNSUPPORTED;
    const bool f16 = cache->format == QTOOL_KV_F16;
    a.cache = qt_kv_view(cache);
    a.k = k;
    a.v = v;
    a.sequence = sequence;
    a.position = position;
    a.tokens = (int)tokens;
    a.bf16 = dtype == QTOOL_BF16;
    struct qt_kernel_launch l = {};
    l.kernel = (const void *)kernels[f16][cache->head_dim == 128];
    l.grid = dim3((unsigned)tokens, (unsigned)cache->heads, f16 ? 1 : 2);
    l.threads = f16 ? 32 : APPEND_THREADS;
    l.dependent = dependent_launch != 0;
    return qt_launch_kernel(&l, &a, stream);
}

/* ---- host ----------------------------------------------------------------------------------- */

static bool aligned(const void *p)
{
    return p && ((size_t)p & 15) == 0;
}

const char *qt_kv_cache_fault(const struct qtool_kv_cache *c)
{
    if (c->head_dim != 64 && c->head_dim != 128)
        return "head_dim must be 64 or 128";
    if (c->heads == 0 || c->heads > 65535)
        return "the number of KV heads must be 1 to 65535";
    if (c->format != QTOOL_KV_INT4 && c->format != QTOOL_KV_F16)
        return "unknown cache format";
    if (c->page_tokens == 0 || c->page_tokens > 1u << 30 ||
        c->page_tokens % (c->format == QTOOL_KV_INT4 ? QTOOL_KV_GROUP : 16))
        return "page_tokens must be a multiple of 64 (F16: of 16), at most 2^30";
    if (c->table && (c->page_tokens & (c->page_tokens - 1)))
        return "page_tokens must be a power of two with a page table";
    if (!aligned(c->k) || !aligned(c->v))
        return "k and v must be set and 16-byte aligned";
    if (c->format == QTOOL_KV_INT4 && (!aligned(c->k_param) || !aligned(c->v_param) ||
                                       !aligned(c->k_first) || !aligned(c->k_tail)))
        return "a 4-bit cache needs k_param, v_param, k_first and k_tail, 16-byte aligned";
    return NULL;
}

kv_view qt_kv_view(const struct qtool_kv_cache *c)
{
    kv_view v = {};
    v.k = (unsigned char *)c->k;
    v.v = (unsigned char *)c->v;
    v.param = (__half2 *)c->v_param;
    v.k_param = (unsigned char *)c->k_param;
    v.k_first = (__half *)c->k_first;
    v.k_tail = (__half *)c->k_tail;
    v.table = c->table;
    v.table_pitch = (int)c->table_pitch;
    v.heads = (int)c->heads;
    v.page_tokens = (int)c->page_tokens;
    for (v.page_shift = 0; v.page_tokens >> v.page_shift > 1;)
        v.page_shift++;
    return v;
}
