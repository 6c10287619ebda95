/* A head of queries, keys or values of a token, prepared by a warp: bias, norm, rotary
 * embedding. */
#ifndef QT_KERNELS_CUDA_DECODER_HEAD_CUH
#define QT_KERNELS_CUDA_DECODER_HEAD_CUH

#include "kernels/cuda/decoder/reduce.cuh"

enum head_kind { HEAD_QUERY, HEAD_KEY, HEAD_VALUE };

/* A head of queries, keys or values. */
struct head_of {
    const __half *x;   /* all heads of the token */
    const float *bias; /* of all heads, or NULL */
    const qtool_decoder_norm *norm;
    const float *cos, *sin; /* of the token's position, or NULL */
    int head, heads;
    enum head_kind kind;
};

/* Head `head` of a token that has this position. */
static __device__ __forceinline__ head_of find_head(const qtool_decoder_heads &a,
                                                    enum head_kind kind, int head, size_t token,
                                                    int position)
{
    const size_t angles = (size_t)position * (a.rotary / 2);
    head_of h = {};
    h.kind = kind;
    h.head = head;
    h.heads = (int)(kind == HEAD_QUERY ? a.heads : a.kv_heads);
    if (kind == HEAD_QUERY) {
        h.x = (const __half *)a.q + token * a.q_stride;
        h.bias = a.q_bias;
        h.norm = &a.q_norm;
        h.cos = a.q_cos;
        h.sin = a.q_sin;
    } else {
        h.x = kind == HEAD_KEY ? (const __half *)a.k + token * a.k_stride
                               : (const __half *)a.v + token * a.v_stride;
        h.bias = kind == HEAD_KEY ? a.k_bias : a.v_bias;
        h.norm = &a.k_norm;
        h.cos = kind == HEAD_KEY ? a.k_cos : NULL;
        h.sin = a.k_sin;
    }
    if (h.cos) {
        h.cos += angles;
        h.sin += angles;
    }
    return h;
}

/* Starts to bring the cosines and sines of a head, if any, to L2: 128 bytes per lane. */
static __device__ __forceinline__ void prefetch_angles(const head_of &h, int half)
{
    for (int i = (int)threadIdx.x % 32 * 32; h.cos && i < half; i += 32 * 32) {
        prefetch_line(h.cos + i);
        prefetch_line(h.sin + i);
    }
}

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

/* An instance of a kernel supports heads with biases only, with norms of queries and keys, or with
 * norms of values and clipping, too. */
enum head_parts { HEAD_BIASES, HEAD_NORMS, HEAD_ALL };

/* row[head_dim] = the head. */
template <head_parts PARTS>
static __device__ __forceinline__ void prepare_head(float *row, const qtool_decoder_heads &a,
                                                    const head_of &h)
{
    const int dim = (int)a.head_dim;
    for (int i = (int)threadIdx.x % 32; i < dim; i += 32) {
        row[i] = head_value(h, h.head * dim + i);
        if (PARTS == HEAD_ALL && a.clip > 0)
            row[i] = fminf(fmaxf(row[i], -a.clip), a.clip);
    }
    __syncwarp();
    const bool may = PARTS == HEAD_ALL || (PARTS == HEAD_NORMS && h.kind != HEAD_VALUE);
    const bool norm = may && h.norm->weight, all = a.norm_all_heads != 0;
    if (norm && !a.norm_last)
        norm_head(row, h, dim, all);
    if (h.cos)
        rotate_head(row, h, (int)a.rotary / 2, a.interleaved != 0);
    if (norm && a.norm_last)
        norm_head(row, h, dim, all);
}

#endif
