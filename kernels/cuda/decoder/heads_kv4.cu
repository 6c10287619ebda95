/*
 * Query, key and value heads of tokens of different sequences, with the append to a 4-bit cache.
 *
 *   grid   (KV heads, m), 256 threads
 *   warps  0: key; 1: value; others: the query heads of the KV head. Then all quantize the KV group
 *          of the key (kv4/quantize.cuh)
 *
 * Before the preceding kernel has finished, the keys of earlier tokens are loaded, and cosines and
 * sines start on their way to L2.
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/head.cuh"
#include "kernels/cuda/kv4/quantize.cuh"
#include "kernels/cuda/kv4/view.h"

enum { KV4_THREADS = 256, KV4_WARPS = KV4_THREADS / 32 };

struct heads_kv4_args {
    qtool_decoder_heads heads;
    kv_view cache;
};

template <int D>
static __device__ __forceinline__ void append_value(const kv_view &cache, size_t place,
                                                    const float *row)
{
    float x[D / 32];
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        x[i] = __half2float(to_half(row[kv_value_channel<D>(i)]));
    kv_quantize_value<D>(cache, place, x);
}

/* The heads of a token that a thread block has, for kv_quantize_group. */
template <bool NORM, int D> struct fresh_heads {
    static constexpr head_parts PARTS = NORM ? HEAD_NORMS : HEAD_BIASES;

    static constexpr bool ONE = true;
    const heads_kv4_args &args;
    size_t token;
    int head, position; /* KV head */
    size_t place;       /* cache row */
    float (*rows)[D];   /* of warps; rows[0]: the key */

    __device__ __forceinline__ head_of find(enum head_kind kind, int number) const
    {
        return find_head(args.heads, kind, number, token, position);
    }
    __device__ __forceinline__ void queries(float *row, int first) const
    {
        const qtool_decoder_heads &a = args.heads;
        const int count = (int)(a.heads / a.kv_heads);
        for (int i = first; i < count; i += KV4_WARPS - 2) {
            const head_of h = find(HEAD_QUERY, head * count + i);
            prepare_head<PARTS>(row, a, h);
            store_head(a.q_out, (token * a.heads + h.head) * D, row, D);
            __syncwarp();
        }
    }
    __device__ __forceinline__ void wait() const
    {
        const int warp = (int)threadIdx.x / 32;
        ptx_wait_previous();
        if (warp > 1)
            queries(rows[warp], warp - 2);
        else
            prepare_head<PARTS>(rows[warp], args.heads, find(warp ? HEAD_VALUE : HEAD_KEY, head));
        if (warp == 1)
            append_value<D>(args.cache, place, rows[1]);
        __syncthreads();
    }
    __device__ __forceinline__ __half key(int channel) const
    {
        return to_half(rows[0][channel]);
    }
    __device__ __forceinline__ kv_keys keys(int, int channel) const
    {
        kv_keys k;
#pragma unroll
        for (int i = 0; i < 4; i++)
            k.x[i] = __halves2half2(key(channel + 2 * i), key(channel + 2 * i + 1));
        return k;
    }
};

template <bool NORM, int D>
static __global__ void __launch_bounds__(KV4_THREADS, 4)
    heads_kv4_kernel(const __grid_constant__ heads_kv4_args args)
{
    __shared__ float rows[KV4_WARPS][D];
    const qtool_decoder_heads &a = args.heads;
    const kv_view &cache = args.cache;
    const int head = (int)blockIdx.x, channel = (int)threadIdx.x * 8;
    const size_t token = blockIdx.y;
    ptx_launch_dependents();
    const int position = a.position[token], sequence = a.sequence[token];
    const int at = position % QTOOL_KV_GROUP, page = kv_page(cache, sequence, position);
    const size_t place = kv_row(cache, page, head, position);
    const size_t tail = (size_t)sequence * cache.heads + (size_t)head; /* of all sequences */
    const fresh_heads<NORM, D> fresh = {args, token, head, position, place, rows};
    if (head == 0 && threadIdx.x < 32)
        prefetch_angles(fresh.find(HEAD_KEY, 0), (int)a.rotary / 2);
    kv_quantize_group<D, KV4_THREADS>(cache, head, sequence, place - at, at,
                                      position < QTOOL_KV_GROUP, 1, fresh);
    if (channel >= D)
        return;
    const kv_keys k = fresh.keys(0, channel);
    *(kv_keys *)(cache.k_tail + (tail * QTOOL_KV_GROUP + at) * D + channel) = k;
    if (position == 0)
        *(kv_keys *)(cache.k_first + tail * D + channel) = k;
}

int qt_decoder_heads_kv4(const struct qtool_decoder_heads *a, bool dependent, void *stream)
{
    static void (*const kernels[2][2])(heads_kv4_args) = {
        {heads_kv4_kernel<false, 64>, heads_kv4_kernel<false, 128>},
        {heads_kv4_kernel<true, 64>, heads_kv4_kernel<true, 128>}};
    const struct qtool_kv_cache *cache = a->kv4;
    const bool norm = a->q_norm.weight || a->k_norm.weight;
    struct heads_kv4_args args = {};
    struct qt_kernel_launch l = {};
    if (qt_kv_cache_fault(cache) || cache->format != QTOOL_KV_INT4 || cache->heads != a->kv_heads ||
        cache->head_dim != a->head_dim || a->heads % a->kv_heads || a->cache_k || a->cache_v ||
        a->row_k || a->row_v || a->rotary > a->head_dim || a->rotary % 2 || a->m > 65535 ||
        a->v_norm.weight || a->clip > 0 || (a->norm_all_heads && a->norm_last))
        return QTOOL_UNSUPPORTED;
    args.heads = *a;
    args.cache = qt_kv_view(cache);
    l.kernel = (const void *)kernels[norm][a->head_dim == 128];
    l.grid = dim3((unsigned)a->kv_heads, (unsigned)a->m);
    l.threads = KV4_THREADS;
    l.dependent = l.most_smem = dependent;
    return qt_launch_kernel(&l, &args, stream);
}
