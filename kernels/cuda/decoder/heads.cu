/*
 * Query, key and value heads: a warp per head of a token, four warps in a thread block.
 *
 *   smem   the head's values in FP32, [warp][head_dim]
 *   grid   (ceil((heads + 2 kv_heads) / 4), m)
 *
 * Before the preceding kernel has finished, cosines and sines start on their way to L2.
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/reduce.cuh"

enum { HEAD_WARPS = 4, MOST_HEAD_DIM = 512 };

/* A head of queries, keys or values. */
struct head_of {
    const __half *x;   /* all heads of the token */
    const float *bias; /* of all heads, or NULL */
    const qtool_decoder_norm *norm;
    const float *cos, *sin; /* of the token's position, or NULL */
    int head, heads;
};

static __device__ __forceinline__ float head_value(const head_of &h, int i)
{
    const float v = __half2float(h.x[i]);
    return h.bias ? v + h.bias[i] : v;
}

/* Normalizes row[dim]. */
static __device__ __forceinline__ void norm_head(float *row, const head_of &h, int dim, bool all)
{
    const int lane = (int)threadIdx.x % 32, count = all ? h.heads * dim : dim;
    const float *weight = h.norm->weight + (all ? h.head * dim : 0);
    const float *bias = h.norm->bias ? h.norm->bias + (all ? h.head * dim : 0) : NULL;
    float mean = 0, sum = 0;
    if (h.norm->kind == QTOOL_DECODER_LAYER_NORM) {
        for (int i = lane; i < count; i += 32)
            sum += all ? head_value(h, i) : row[i];
        mean = sum_of_warp(sum) / (float)count;
        sum = 0;
    }
    for (int i = lane; i < count; i += 32) {
        const float d = (all ? head_value(h, i) : row[i]) - mean;
        sum += d * d;
    }
    const float inverse = rsqrtf(sum_of_warp(sum) / (float)count + h.norm->eps);
    for (int i = lane; i < dim; i += 32)
        row[i] = (row[i] - mean) * inverse * weight[i] + (bias ? bias[i] : 0);
    __syncwarp();
}

static __device__ __forceinline__ void rotate_head(float *row, const head_of &h, int half,
                                                   bool interleaved)
{
    for (int i = (int)threadIdx.x % 32; i < half; i += 32) {
        const int first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
        const float x = row[first], y = row[second], c = h.cos[i], s = h.sin[i];
        row[first] = x * c - y * s;
        row[second] = y * c + x * s;
    }
    __syncwarp();
}

static __device__ __forceinline__ void store_head(void *to, size_t at, const float *row, int dim)
{
    for (int i = (int)threadIdx.x % 32; i < dim; i += 32)
        ((__half *)to)[at + i] = to_half(row[i]);
}

/* NORM: queries or keys have a norm. */
template <bool NORM>
static __global__ void __launch_bounds__(HEAD_WARPS * 32) heads_kernel(qtool_decoder_heads a)
{
    __shared__ float rows[HEAD_WARPS][MOST_HEAD_DIM];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, dim = (int)a.head_dim;
    const int heads = (int)a.heads, kv_heads = (int)a.kv_heads;
    const int number = (int)blockIdx.x * HEAD_WARPS + warp;
    const size_t token = blockIdx.y;
    float *row = rows[warp];
    ptx_launch_dependents();
    if (number >= heads + 2 * kv_heads)
        return;
    const bool query = number < heads, key = !query && number < heads + kv_heads;
    const int position = a.position[token], half = (int)a.rotary / 2;
    head_of h = {};
    if (query) {
        h.x = (const __half *)a.q + token * a.q_stride;
        h.bias = a.q_bias;
        h.norm = &a.q_norm;
        h.cos = a.q_cos;
        h.sin = a.q_sin;
    } else {
        h.x = key ? (const __half *)a.k + token * a.k_stride
                  : (const __half *)a.v + token * a.v_stride;
        h.bias = key ? a.k_bias : a.v_bias;
        h.norm = &a.k_norm;
        h.cos = key ? a.k_cos : NULL;
        h.sin = a.k_sin;
    }
    h.head = query ? number : (number - heads) % kv_heads;
    h.heads = query ? heads : kv_heads;
    if (h.cos) {
        h.cos += (size_t)position * half;
        h.sin += (size_t)position * half;
    }
    /* 128 bytes; one warp per token, because tokens of a step often share their position */
    for (int i = lane * 32; number == 0 && h.cos && i < half; i += 32 * 32) {
        prefetch_line(h.cos + i);
        prefetch_line(h.sin + i);
    }
    ptx_wait_previous();
    for (int i = lane; i < dim; i += 32)
        row[i] = head_value(h, h.head * dim + i);
    __syncwarp();
    const bool norm = NORM && (query || key) && h.norm->weight, all = a.norm_all_heads != 0;
    if (norm && !a.norm_last)
        norm_head(row, h, dim, all);
    if (h.cos)
        rotate_head(row, h, half, a.interleaved != 0);
    if (norm && a.norm_last)
        norm_head(row, h, dim, all);
    if (query) {
        store_head(a.q_out, (token * heads + h.head) * dim, row, dim);
        return;
    }
    void *cache = key ? a.cache_k : a.cache_v, *kept = key ? a.row_k : a.row_v;
    if (cache)
        store_head(cache,
                   (size_t)a.sequence[token] * a.sequence_stride + h.head * a.head_stride +
                       (size_t)position * dim,
                   row, dim);
    if (kept)
        store_head(kept, (token * kv_heads + h.head) * dim, row, dim);
}

int qt_decoder_heads(const struct qtool_decoder_heads *a, bool dependent, void *stream)
{
    struct qtool_decoder_heads args = *a;
    struct qt_kernel_launch l = {};
    const size_t heads = a->heads + 2 * a->kv_heads;
    if (a->head_dim > MOST_HEAD_DIM || a->rotary > a->head_dim || a->rotary % 2 || a->m > 65535 ||
        (a->norm_all_heads && a->norm_last))
        return QTOOL_UNSUPPORTED;
    l.kernel = a->q_norm.weight || a->k_norm.weight ? (const void *)heads_kernel<true>
                                                    : (const void *)heads_kernel<false>;
    l.grid = dim3((unsigned)((heads + HEAD_WARPS - 1) / HEAD_WARPS), (unsigned)a->m);
    l.threads = HEAD_WARPS * 32;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
