/*
 * Attention of single queries: a thread block of 128 threads per query and head, or a cluster of
 * up to 8 (compute capability 9.0) that divides the keys where there are few queries and heads. L
 * lanes have a key each time, EACH channels per lane (L: a power of two); 128 / L groups of lanes
 * take every (128 / L)-th key, with an online softmax, and add up their results at the end. The
 * first thread block of a cluster adds those of all, in order.
 *
 *   Traffic  the cache once per query head; the heads of a KV head share it in L2
 */
#ifndef QT_KERNELS_CUDA_DECODER_ATTENTION_ROWS_CUH
#define QT_KERNELS_CUDA_DECODER_ATTENTION_ROWS_CUH

#include "kernels/cuda/common/ptx_dsmem.cuh"
#include "kernels/cuda/decoder/reduce.cuh"

enum { ROWS_THREADS = 128, ROWS_AT_ONCE = 4, ROWS_SPLITS = 8 };

struct rows_args {
    qtool_decoder_attention a;
    int wide;   /* rows of q, k and v are 16-byte aligned */
    int splits; /* thread blocks of a cluster */
};

/* Loads 8 channels, of which the first `count` (at most 8) exist; wide: as 16 bytes. */
static __device__ __forceinline__ void load_8_halves(float out[8], const __half *p, int count,
                                                     bool wide)
{
    if (!wide) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            out[i] = i < count ? __half2float(p[i]) : 0;
        return;
    }
    unpack_8_halves(out, count > 0 ? *(const uint4 *)p : make_uint4(0, 0, 0, 0));
}

template <int EACH>
static __device__ __forceinline__ void load_channels(float out[EACH], const __half *p, int count,
                                                     bool wide)
{
#pragma unroll
    for (int i = 0; i < EACH; i += 8)
        load_8_halves(out + i, p + i, min(count - i, 8), wide);
}

/* exp(top - most), 0 if there is no key. */
static __device__ __forceinline__ float share_of(float top, float most)
{
    return top == -INFINITY ? 0 : __expf(top - most);
}

/* A thread block contributes its largest score `top`, the sum of exp(score - top) over its keys,
 * and the sum of the values with these weights. */
template <int CHANNELS> struct rows_part {
    float top, sum, out[CHANNELS];
};

/* Writes the output of a head: the sum over the parts of the cluster, and the sink. */
template <int CHANNELS>
static __device__ __forceinline__ void
rows_finish(const rows_args &args, const rows_part<CHANNELS> *part, int head, size_t token)
{
    const qtool_decoder_attention &a = args.a;
    const uint32_t at = ptx_shared(part);
    float share[ROWS_SPLITS], most = a.sinks ? a.sinks[head] : -INFINITY, denominator = 0;
#pragma unroll
    for (int i = 0; i < ROWS_SPLITS; i++) {
        share[i] = i >= args.splits   ? -INFINITY
                   : args.splits == 1 ? part->top
                                      : ptx_cluster_load(ptx_cluster_map(at, i));
        most = fmaxf(most, share[i]);
    }
    if (a.sinks)
        denominator = __expf(a.sinks[head] - most);
#pragma unroll
    for (int i = 0; i < ROWS_SPLITS; i++)
        if (i < args.splits) {
            share[i] = share_of(share[i], most);
            denominator +=
                share[i] *
                (args.splits == 1 ? part->sum : ptx_cluster_load(ptx_cluster_map(at + 4, i)));
        }
    for (int c = (int)threadIdx.x; c < (int)a.head_dim; c += ROWS_THREADS) {
        float r = 0;
#pragma unroll
        for (int i = 0; i < ROWS_SPLITS; i++)
            if (i < args.splits)
                r += share[i] * (args.splits == 1
                                     ? part->out[c]
                                     : ptx_cluster_load(ptx_cluster_map(at + 8 + 4 * c, i)));
        ((__half *)a.out)[(token * a.heads + head) * a.head_dim + c] = to_half(r / denominator);
    }
}

/* EACH: 8 or 16. SLOPES: scores have a term that grows with the position of the key. */
template <int L, int EACH, bool SLOPES>
static __global__ void __launch_bounds__(ROWS_THREADS) attention_rows_kernel(rows_args args)
{
    const qtool_decoder_attention &a = args.a;
    const bool wide = args.wide != 0;
    enum { GROUPS = ROWS_THREADS / L, CHANNELS = EACH * L < 256 ? 256 : EACH * L };
    __shared__ float tops[GROUPS], sums[GROUPS], out[GROUPS][EACH * L + 1];
    __shared__ rows_part<CHANNELS> part;
    const int head = (int)blockIdx.x / args.splits, rank = (int)blockIdx.x % args.splits;
    const int dim = (int)a.head_dim;
    const size_t token = blockIdx.y;
    const int group = (int)threadIdx.x / L, channel = (int)threadIdx.x % L * EACH;
    const int own = min(dim - channel, EACH); /* channels of the lane that exist */
    ptx_launch_dependents();
    ptx_wait_previous();
    const int all = a.position[token] + 1;
    const int first = a.window && all > (int)a.window ? all - (int)a.window : 0;
    const int each = (all - first + args.splits - 1) / args.splits;
    const int begin = first + rank * each, end = min(all, begin + each);
    const size_t kv = head / (a.heads / a.kv_heads), sequence = token / a.queries;
    const size_t base = sequence * a.sequence_stride + kv * a.head_stride + channel;
    const __half *k = (const __half *)a.k + base, *v = (const __half *)a.v + base;
    float q[EACH], sum[EACH] = {}, top = -INFINITY, total = 0;
    load_channels<EACH>(q, (const __half *)a.q + (token * a.heads + head) * dim + channel, own,
                        wide);
#pragma unroll 1
    for (int j = begin; j < end; j += GROUPS * ROWS_AT_ONCE) {
        float score[ROWS_AT_ONCE], value[ROWS_AT_ONCE][EACH], most = top;
#pragma unroll
        for (int u = 0; u < ROWS_AT_ONCE; u++) {
            const int key = j + u * GROUPS + group;
            float x[EACH];
            load_channels<EACH>(x, k + (size_t)key * dim, key < end ? own : 0, wide);
            load_channels<EACH>(value[u], v + (size_t)key * dim, key < end ? own : 0, wide);
            float dot = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++)
                dot += q[i] * x[i];
#pragma unroll
            for (int d = L / 2; d > 0; d /= 2)
                dot += __shfl_xor_sync(~0u, dot, d);
            dot *= a.scale;
            if (a.softcap > 0)
                dot = a.softcap * tanhf(dot / a.softcap);
            if constexpr (SLOPES)
                dot += slope_term(a, a.slopes[head], key);
            score[u] = key < end ? dot : -INFINITY;
            most = fmaxf(most, score[u]);
        }
        const float base = most == -INFINITY ? 0 : most, keep = __expf(top - base);
        top = most;
        total *= keep;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            sum[i] *= keep;
#pragma unroll
        for (int u = 0; u < ROWS_AT_ONCE; u++) {
            const float p = __expf(score[u] - base);
            total += p;
#pragma unroll
            for (int i = 0; i < EACH; i++)
                sum[i] += p * value[u][i];
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
        out[group][channel + i] = sum[i];
    if (threadIdx.x % L == 0) {
        tops[group] = top;
        sums[group] = total;
    }
    __syncthreads();
    float most = -INFINITY, sum_of_all = 0;
    for (int i = 0; i < GROUPS; i++)
        most = fmaxf(most, tops[i]);
    for (int i = 0; i < GROUPS; i++)
        sum_of_all += sums[i] * share_of(tops[i], most);
    for (int c = (int)threadIdx.x; c < dim; c += ROWS_THREADS) {
        float r = 0;
        for (int i = 0; i < GROUPS; i++)
            r += out[i][c] * share_of(tops[i], most);
        part.out[c] = r;
    }
    if (threadIdx.x == 0) {
        part.top = most;
        part.sum = sum_of_all;
    }
    if (args.splits == 1)
        __syncthreads();
    else
        ptx_cluster_sync();
    if (rank == 0)
        rows_finish(args, &part, head, token);
    if (args.splits > 1)
        ptx_cluster_sync(); /* shared memory stays until it has been read */
}

#endif
