/*
 * Quantizes the keys and values of new tokens and appends them to the KV cache.
 *
 *   grid    (tokens, KV heads), INT4: (tokens, KV heads, 2): keys, and values
 *   block   INT4: 4 warps; F16: 1 warp
 *   values  INT4: warp 0
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
 * Traffic    bytes per token and head: 4 * head_dim read, head_dim * 5/8 written (codes and
 *            parameters of values); per head and KV group with new tokens: up to 128 * head_dim
 *            read from k_tail, 34 * head_dim written (codes and parameters of keys); per head and
 *            sequence: up to 128 * head_dim written to k_tail
 * Reference  the same arithmetic in plain C (tests/gpu/test_kv4.c), bit for bit
 * Used by    qtool_kv_append
 */
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/kv4/quantize.cuh"
#include "kernels/cuda/kv4/view.h"

enum { APPEND_THREADS = 128 };

struct kv_append_args {
    kv_view cache;
    const void *k, *v; /* [tokens][heads][D] */
    const int *sequence, *position;
    int tokens, bf16;
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

/* The new keys of a head, of the token at an index of the call and those before it. */
struct kv_append_keys {
    static constexpr bool ONE = false;
    const kv_append_args &a;
    int token, head, dim;

    __device__ __forceinline__ void wait() const
    {
        ptx_wait_previous();
    }
    __device__ __forceinline__ kv_keys keys(int back, int channel) const
    {
        return kv_new_keys(a, token - back, head, dim, channel);
    }
};

/* Quantizes the value of the token at index `token` of the call, by one warp. */
template <int D>
static __device__ __forceinline__ void kv_append_value(const kv_append_args &a, int token, int head,
                                                       size_t row)
{
    const uint16_t *from = (const uint16_t *)a.v + ((size_t)token * a.cache.heads + head) * D;
    float x[D / 32];
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        x[i] = qt_widen(a.bf16, from[kv_value_channel<D>(i)]);
    kv_quantize_value<D>(a.cache, row, x);
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
    typedef kv_group<D, APPEND_THREADS> G;
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
            kv_append_value<D>(a, token, head, row);
        if (position == 0 && threadIdx.x < D / 8)
            *(kv_keys *)(a.cache.k_first + ((size_t)sequence * a.cache.heads + head) * D +
                         threadIdx.x * 8) = kv_new_keys(a, token, head, D, (int)threadIdx.x * 8);
        return;
    }
    if (more && at != QTOOL_KV_GROUP - 1)
        return; /* the group has a later token */
    int run = kv_run_of(a, token, sequence, at);
    const kv_append_keys fresh = {a, token, head, D};
    kv_quantize_group<D, APPEND_THREADS>(a.cache, head, sequence, row - at, at,
                                         position < QTOOL_KV_GROUP, run, fresh);
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
    v.v_param = (__half *)c->v_param;
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
