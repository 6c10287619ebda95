/* Queries as B operands. */
#ifndef QT_CUDA_KV4_QUERIES_CUH
#define QT_CUDA_KV4_QUERIES_CUH

#include "kernels/cuda/kv4_work.cuh"

#include <math.h>

/*
 * B fragments of q * k_scale as FP16, each head scaled by the power of two that brings its largest
 * value to 2^14. unit[]: what products of the lane's columns (heads 2t, 2t + 1) are to be
 * multiplied by.
 */
template <class F, int NT> struct kv_queries {
    alignas(16) uint32_t frag[NT][kv_slot<F>::STEPS][2];
    float unit[NT][2];
};

/* What a lane prepares of a head: words of fragments, numbered t, step, half. */
template <class F> struct kv_query_words {
    enum { STEPS = kv_slot<F>::STEPS, WORDS = 8 * STEPS, PER_LANE = WORDS / 32 }; /* of a head */
    uint16_t q[PER_LANE][2];
    float scale[PER_LANE][2];

    __device__ __forceinline__ void load(const kv_args &a, const kv_work &w, int head)
    {
        const uint16_t *from =
            (const uint16_t *)a.q + ((size_t)w.sequence * a.heads + w.head0 + head) * F::DIM;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int word = i * 32 + w.lane;
                const int c = F::channel(word / (2 * STEPS), word / 2 % STEPS, word % 2, h);
                q[i][h] = from[c];
                scale[i][h] = a.cache.k_scale ? a.cache.k_scale[w.kv_head * F::DIM + c] : 1;
            }
    }
    /* As FP16 into words[WORDS]; unit: see above. */
    __device__ __forceinline__ void prepare(const kv_args &a, const kv_work &w, uint32_t *words,
                                            float *unit) const
    {
        float v[PER_LANE][2], top = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                v[i][h] = scale[i][h] * (a.bf16 ? __int_as_float((int)q[i][h] << 16)
                                                : __half2float(__ushort_as_half(q[i][h])));
                top = fmaxf(top, fabsf(v[i][h]));
            }
#pragma unroll
        for (int d = 1; d < 32; d *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        const int up = top > 0 && top < INFINITY ? min(14 - ilogbf(top), 100) : 0;
        const float f = exp2f((float)up) * F::channel_factor(w.lane % 2);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            __half2 two = __floats2half2_rn(v[i][0] * f, v[i][1] * f);
            words[i * 32 + w.lane] = *(uint32_t *)&two;
        }
        if (w.lane == 0)
            *unit = a.scale_log2 * exp2f((float)-up) / F::CODE_UNIT;
    }
};

/*
 * Through shared memory, a warp a head: what a block runs once should be little code, as it has to
 * be fetched. first: words of head number w.warp, loaded before the cache, or queries would come
 * after all that is under way. room: NT * 16 * D + 32 NT bytes, which may be written again after
 * the second barrier.
 */
template <class F, int NT>
static __device__ __forceinline__ void kv_load_queries(kv_queries<F, NT> *q, const kv_args &a,
                                                       const kv_work &w, kv_query_words<F> first,
                                                       uint32_t *room)
{
    enum { STEPS = kv_slot<F>::STEPS, WORDS = 8 * STEPS };
    float *units = (float *)(room + 8 * NT * WORDS);
    static_assert(8 * NT * (WORDS + 1) * 4 <= kv_slot<F>::BYTES, "room is a slot");
#pragma unroll 1
    for (int head = w.warp; head < w.heads; head += WARPS) {
        if (head != w.warp)
            first.load(a, w, head);
        first.prepare(a, w, room + head * WORDS, &units[head]);
    }
#pragma unroll 1
    for (int i = w.heads * WORDS + (int)threadIdx.x; i < 8 * NT * WORDS; i += THREADS)
        room[i] = 0;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const uint4 *from = (const uint4 *)(room + (n * 32 + w.lane) * (2 * STEPS));
#pragma unroll
        for (int i = 0; i < STEPS / 2; i++)
            *(uint4 *)q->frag[n][2 * i] = from[i];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int head = n * 8 + w.lane % 4 * 2 + h;
            q->unit[n][h] = head < w.heads ? units[head] : 1;
        }
    }
    __syncthreads();
}

#endif
