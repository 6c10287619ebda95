/*
 * Attention of single queries: a thread block of 128 threads per query and head. L lanes have a key
 * each time, 8 channels per lane (L: a power of two); 128 / L groups of lanes take every
 * (128 / L)-th key, with an online softmax, and add up their results at the end.
 *
 *   Traffic  the cache once per query head; the heads of a KV head share it in L2
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/reduce.cuh"

enum { ROWS_THREADS = 128, ROWS_AT_ONCE = 4 };

struct rows_args {
    qtool_decoder_attention a;
    int wide; /* rows of q, k and v are 16-byte aligned */
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

template <int L>
static __global__ void __launch_bounds__(ROWS_THREADS) attention_rows_kernel(rows_args args)
{
    const qtool_decoder_attention &a = args.a;
    const bool wide = args.wide != 0;
    enum { GROUPS = ROWS_THREADS / L };
    __shared__ float tops[GROUPS], sums[GROUPS], out[GROUPS][8 * L + 1];
    const int head = (int)blockIdx.x, dim = (int)a.head_dim;
    const size_t token = blockIdx.y;
    const int group = (int)threadIdx.x / L, channel = (int)threadIdx.x % L * 8;
    const int own = min(dim - channel, 8); /* channels of the lane that exist */
    ptx_launch_dependents();
    ptx_wait_previous();
    const int end = a.position[token] + 1;
    const int begin = a.window && end > (int)a.window ? end - (int)a.window : 0;
    const size_t kv = head / (a.heads / a.kv_heads), sequence = token / a.queries;
    const size_t base = sequence * a.sequence_stride + kv * a.head_stride + channel;
    const __half *k = (const __half *)a.k + base, *v = (const __half *)a.v + base;
    float q[8], sum[8] = {}, top = -INFINITY, total = 0;
    load_8_halves(q, (const __half *)a.q + (token * a.heads + head) * dim + channel, own, wide);
#pragma unroll 1
    for (int j = begin; j < end; j += GROUPS * ROWS_AT_ONCE) {
        float score[ROWS_AT_ONCE], value[ROWS_AT_ONCE][8], most = top;
#pragma unroll
        for (int u = 0; u < ROWS_AT_ONCE; u++) {
            const int key = j + u * GROUPS + group;
            float x[8];
            load_8_halves(x, k + (size_t)key * dim, key < end ? own : 0, wide);
            load_8_halves(value[u], v + (size_t)key * dim, key < end ? own : 0, wide);
            float dot = 0;
#pragma unroll
            for (int i = 0; i < 8; i++)
                dot += q[i] * x[i];
#pragma unroll
            for (int d = L / 2; d > 0; d /= 2)
                dot += __shfl_xor_sync(~0u, dot, d);
            dot *= a.scale;
            if (a.softcap > 0)
                dot = a.softcap * tanhf(dot / a.softcap);
            score[u] = key < end ? dot : -INFINITY;
            most = fmaxf(most, score[u]);
        }
        const float base = most == -INFINITY ? 0 : most, keep = __expf(top - base);
        top = most;
        total *= keep;
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] *= keep;
#pragma unroll
        for (int u = 0; u < ROWS_AT_ONCE; u++) {
            const float p = __expf(score[u] - base);
            total += p;
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum[i] += p * value[u][i];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        out[group][channel + i] = sum[i];
    if (threadIdx.x % L == 0) {
        tops[group] = top;
        sums[group] = total;
    }
    __syncthreads();
    float most = a.sinks ? a.sinks[head] : -INFINITY;
    for (int i = 0; i < GROUPS; i++)
        most = fmaxf(most, tops[i]);
    float denominator = a.sinks ? __expf(a.sinks[head] - most) : 0;
    for (int i = 0; i < GROUPS; i++)
        denominator += sums[i] * __expf(tops[i] - most);
    for (int c = (int)threadIdx.x; c < dim; c += ROWS_THREADS) {
        float r = 0;
        for (int i = 0; i < GROUPS; i++)
            r += out[i][c] * __expf(tops[i] - most);
        ((__half *)a.out)[(token * a.heads + head) * dim + c] = to_half(r / denominator);
    }
}

int qt_attention_rows(const struct qtool_decoder_attention *a, bool dependent, void *stream)
{
    struct rows_args args = {*a, a->head_dim % 8 == 0};
    struct qt_kernel_launch l = {};
    l.kernel = a->head_dim <= 32    ? (const void *)attention_rows_kernel<4>
               : a->head_dim <= 64  ? (const void *)attention_rows_kernel<8>
               : a->head_dim <= 128 ? (const void *)attention_rows_kernel<16>
                                    : (const void *)attention_rows_kernel<32>;
    l.grid = dim3((unsigned)a->heads, (unsigned)(a->sequences * a->queries));
    l.threads = ROWS_THREADS;
    l.dependent = dependent;
    return qt_launch_kernel(&l, &args, stream);
}
