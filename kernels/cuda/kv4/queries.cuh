/* Queries as B operands. */
#ifndef QT_KERNELS_CUDA_KV4_QUERIES_CUH
#define QT_KERNELS_CUDA_KV4_QUERIES_CUH

#include "kernels/cuda/common/round.cuh"
#include "kernels/cuda/kv4/work.cuh"

#include <math.h>

/*
 * B fragments of q * k_scale, as the format has them. unit[]: what products with the lane's heads
 * are to be multiplied by.
 */
template <class F, int HQ> struct kv_queries {
    enum { TILES = 4 * HQ / F::TILE_HEADS };
    alignas(16) uint32_t frag[TILES][F::QUERY_WORDS];
    float unit[HQ];
};

/* What a lane prepares of a head. */
template <class F> struct kv_query_part {
    enum { PER_LANE = F::DIM / 32 };
    uint16_t q[PER_LANE];
    float scale[PER_LANE];

    __device__ __forceinline__ void load(const kv_args &a, const kv_work &w, int head)
    {
        const uint16_t *from =
            (const uint16_t *)a.q + ((size_t)w.sequence * a.heads + w.head0 + head) * F::DIM;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int c = F::query_channel(w.lane, i);
            q[i] = from[c];
            scale[i] = a.cache.k_scale ? a.cache.k_scale[w.kv_head * F::DIM + c] : 1;
        }
    }
    /* Into words[2 DIM / 4] of shared memory; unit: see above. */
    __device__ __forceinline__ void prepare(const kv_args &a, const kv_work &w, uint32_t *words,
                                            float *unit) const
    {
        float v[PER_LANE], top = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            v[i] = scale[i] * qt_widen(a.bf16, q[i]);
            top = v[i] == v[i] ? fmaxf(top, fabsf(v[i])) : INFINITY;
        }
#pragma unroll
        for (int d = 1; d < 32; d *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        const float f = F::query_factor(top);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            v[i] *= f;
        F::put_query(words, w.lane, v);
        if (w.lane == 0) { /* 0, of a query of zeros: 0 times an infinite maximum would be NaN */
            const float u = a.scale_log2 * F::query_unit(top);
            *unit = u == 0 ? 1e-37f : u;
        }
    }
};

/*
 * Through shared memory, a warp a head: what a block runs once should be little code, as it has to
 * be fetched. first: part of head number w.warp, loaded before the cache, or queries would come
 * after all that is under way. room: 4 HQ (2 DIM + 4) bytes, which may be written again after the
 * second barrier.
 */
template <class F, int HQ>
static __device__ __forceinline__ void kv_load_queries(kv_queries<F, HQ> *q, const kv_args &a,
                                                       const kv_work &w, kv_query_part<F> first,
                                                       uint32_t *room)
{
    enum { HEADS = 4 * HQ, WORDS = F::DIM / 2, WARPS = F::warps(HQ) };
    float *units = (float *)(room + HEADS * WORDS);
    static_assert(HEADS * (WORDS + 1) * 4 <= kv_slot<F>::BYTES, "room is a slot");
#pragma unroll 1
    for (int head = w.warp; head < w.heads; head += WARPS) {
        if (head != w.warp)
            first.load(a, w, head);
        first.prepare(a, w, room + head * WORDS, &units[head]);
    }
#pragma unroll 1
    for (int i = w.heads * WORDS + (int)threadIdx.x; i < HEADS * WORDS; i += WARPS * 32)
        room[i] = 0;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kv_queries<F, HQ>::TILES; n++) {
        const uint4 *from = (const uint4 *)(room + (n * 32 + w.lane) * F::QUERY_WORDS);
#pragma unroll
        for (int i = 0; i < F::QUERY_WORDS / 4; i++)
            *(uint4 *)&q->frag[n][4 * i] = from[i];
    }
#pragma unroll
    for (int u = 0; u < HQ; u++) {
        const int head = F::head(u, w.lane % 4);
        q->unit[u] = head < w.heads ? units[head] : 1;
    }
    __syncthreads();
}

#endif
