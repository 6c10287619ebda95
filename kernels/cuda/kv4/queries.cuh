/* Attention kernel: converts queries to B operands. */
#ifndef QT_KERNELS_CUDA_KV4_QUERIES_CUH
#define QT_KERNELS_CUDA_KV4_QUERIES_CUH

#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/kv4/pipeline.cuh"

#include <math.h>

/* B fragments of the queries in the layout of the cache format. If keys have parameters: multiplied
 * by the scales of a KV group, and the products of these with the zero-points of the group.
 * unit[]: factors that convert products with the lane's heads to scores in log2 units. */
template <class F, int HQ> struct kv_queries {
    enum {
        TILES = (HQ + 1) / 2,
        COLUMNS = 8 * TILES,
        BYTES = COLUMNS * (F::DIM / 2 + 1) * 4, /* words of a thread block, and units */
    };
    alignas(16) uint32_t frag[TILES][F::QUERY_WORDS];
    float zeros[HQ];
    float unit[HQ];
};

/* A lane's part of one query head. */
template <class F> struct kv_query_part {
    enum { PER_LANE = F::DIM / 32 };
    uint16_t q[PER_LANE];

    __device__ __forceinline__ void load(const kv_args &a, const kv_work &w, int head)
    {
        const uint16_t *from =
            (const uint16_t *)a.q + ((size_t)w.sequence * a.heads + w.head0 + head) * F::DIM;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            q[i] = from[F::query_channel(w.lane, i)];
    }
    /* Writes the operand words, DIM / 2 from first_word on, to shared memory, and *unit (see
     * kv_queries). */
    __device__ __forceinline__ void prepare(const kv_args &a, const kv_work &w, uint32_t *words,
                                            int first_word, float *unit) const
    {
        float v[PER_LANE], top = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            v[i] = qt_widen(a.bf16, q[i]);
            top = v[i] == v[i] ? fmaxf(top, fabsf(v[i])) : INFINITY;
        }
#pragma unroll
        for (int d = 1; d < 32; d *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        const float exponent = F::query_exp2(top);
#pragma unroll
        for (int i = 0; i < PER_LANE / 2; i++) {
            const int word = w.lane * (PER_LANE / 2) + i;
            const float f = exp2f(exponent) * F::query_part(word);
            const __half2 two = __floats2half2_rn(v[2 * i] * f, v[2 * i + 1] * f);
            words[kv_query_at<F>(first_word + word)] = *(const uint32_t *)&two;
        }
        if (w.lane == 0) { /* not 0, for a query of zeros: 0 times the maximum -inf is NaN */
            const float u = a.scale_log2 * exp2f(-exponent);
            *unit = u == 0 ? 1e-37f : u;
        }
    }
};

/*
 * Loads the queries of a thread block to shared memory, one head per warp at a time, and from there
 * to fragments, unless keys have parameters: the queries then stay in `buffer`. The loop keeps the
 * code small: instructions that run once must be fetched from memory. first: the lane's part of
 * head w.warp, which was loaded before the copies of the cache so as not to queue behind them.
 * buffer: BYTES of shared memory; without parameters free again on return.
 */
template <class F, int HQ>
static __device__ __forceinline__ void kv_load_queries(kv_queries<F, HQ> *q, const kv_args &a,
                                                       const kv_work &w, kv_query_part<F> first,
                                                       uint32_t *buffer)
{
    enum { COLUMNS = kv_queries<F, HQ>::COLUMNS, WORDS = F::DIM / 2, WARPS = F::warps(HQ) };
    float *units = (float *)(buffer + COLUMNS * WORDS);
#pragma unroll 1
    for (int head = w.warp; head < COLUMNS; head += WARPS) {
        const int word = F::column(head) * WORDS;
        if (head >= w.heads) {
#pragma unroll
            for (int i = 0; i < WORDS / 32; i++)
                buffer[word + w.lane + 32 * i] = 0;
            continue;
        }
        if (head != w.warp)
            first.load(a, w, head);
        first.prepare(a, w, buffer, word, &units[head]);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kv_queries<F, HQ>::TILES && !F::GRID; n++)
#pragma unroll
        for (int i = 0; i < F::QUERY_WORDS; i += 4)
            *(uint4 *)&q->frag[n][i] =
                *(const uint4 *)&buffer[kv_query_at<F>((n * 32 + w.lane) * F::QUERY_WORDS + i)];
#pragma unroll
    for (int u = 0; u < HQ; u++) {
        const int head = F::head(u, w.lane % 4);
        q->unit[u] = head < w.heads ? units[head] : 1;
    }
    if (!F::GRID)
        __syncthreads();
}

#endif
