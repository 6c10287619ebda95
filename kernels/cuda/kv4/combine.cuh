/*
 * Attention kernel, epilogue: combines the partial results of warps and of splits. A partial result
 * has, per query head, D + 4 floats: D of sum p * value, the maximum (log2), the denominator (the
 * sum of p), and two unused ones. Partial results with different maxima are scaled by
 * 2^(maximum - largest maximum) and added in a fixed order.
 */
#ifndef QT_KERNELS_CUDA_KV4_COMBINE_CUH
#define QT_KERNELS_CUDA_KV4_COMBINE_CUH

#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/ptx_int.cuh"
#include "kernels/cuda/common/split_k.cuh"
#include "kernels/cuda/kv4/pipeline.cuh"

#include <math.h>

/* Stores four channels of the output from d on. */
static __device__ __forceinline__ void kv_store_4(const kv_args &a, const kv_work &w, int head,
                                                  int dim, int d, float4 v)
{
    size_t at = ((size_t)w.sequence * a.heads + w.head0 + head) * dim + d;
    *(uint2 *)((uint16_t *)a.out + at) =
        make_uint2(qt_round_two(a.bf16, v.x, v.y), qt_round_two(a.bf16, v.z, v.w));
}

/*
 * Partial results of splits are exchanged through the workspace, four floats at a time. The
 * workspace is 0 between launches. The writer stores 0 as -0 and the reader clears what it has
 * read, so a word that is not 0 has arrived. Without kv_args.arrivals the reader polls the words
 * themselves; an arrival counter would first wait for all stores of the writer to complete.
 *
 * The thread blocks of the last splits poll the partial results of the others. Thread blocks start
 * in the order of their numbers, so all others have started by then, except possibly the very last
 * one, which is the next to start.
 */
static __device__ __forceinline__ void kv_put_4(float *at, const float4 &v)
{
    ptx_store_atomic_16(at, make_float4(v.x == 0 ? -0.f : v.x, v.y, v.z, v.w));
}

static __device__ __forceinline__ void kv_clear_4(float *at)
{
    ptx_store_atomic_16(at, make_float4(0, 0, 0, 0));
}

/* Four channels of a combined result, not yet divided by the denominator. */
struct kv_sum_4 {
    float4 v;
    float row_max, denominator;
};

/* Combines the channels d..d+3 of `count` partial results that are `step` floats apart; loads
 * AT_ONCE of them at a time. GENERIC: they may be in global memory. poll: they are in the
 * workspace, so the loop waits until they have arrived, and clears them. */
template <int D, int AT_ONCE, bool GENERIC>
static __device__ __forceinline__ kv_sum_4 kv_add(float *sums, int step, int count, int d,
                                                  bool poll)
{
    const auto load = [](const float *p) {
        return GENERIC ? ptx_load_atomic_16(p) : *(const float4 *)p;
    };
    kv_sum_4 all = {make_float4(0, 0, 0, 0), -INFINITY, 0};
    /* A short last batch is loaded at once, too: one wait instead of one per partial result. */
#pragma unroll 1
    for (int remaining = count; remaining > 0; remaining -= AT_ONCE) {
        float4 top[AT_ONCE], v[AT_ONCE]; /* maximum and denominator; output channels */
        unsigned arrived;
        do {
            arrived = ~0u;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                top[i] = make_float4(-INFINITY, 0, 0, 0);
                v[i] = make_float4(1, 0, 0, 0);
                if (i < remaining) {
                    top[i] = load(sums + i * step + D);
                    v[i] = load(sums + i * step + d);
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                arrived = min(arrived, min(__float_as_uint(top[i].x), __float_as_uint(v[i].x)));
        } while (poll && !arrived);
        float row_max = all.row_max;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            row_max = fmaxf(row_max, top[i].x);
        float f = ptx_exp2(all.row_max - row_max);
        all = {make_float4(f * all.v.x, f * all.v.y, f * all.v.z, f * all.v.w), row_max,
               f * all.denominator};
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            f = ptx_exp2(top[i].x - row_max);
            all.denominator += f * top[i].y;
            all.v.x += f * v[i].x;
            all.v.y += f * v[i].y;
            all.v.z += f * v[i].z;
            all.v.w += f * v[i].w;
            if (poll && i < remaining)
                kv_clear_4(sums + i * step + d);
        }
        sums += AT_ONCE * step;
    }
    return all;
}

/*
 * Combines the partial results of the warps in shared memory, [warp][head][D + 4], and stores the
 * output. SPLITS: the first iteration stores the result of the split to the workspace; the second,
 * in one or two thread blocks, combines the splits. One loop does both: instructions that run once
 * must be fetched from memory, and those of the second iteration are already in the cache
 * (docs/experiments, E123).
 */
template <class F, int WARPS, bool SPLITS>
static __device__ __forceinline__ void kv_combine(const kv_args &a, const kv_work &w, float *sums,
                                                  int step, int splits)
{
    enum { D = F::DIM, SUM = D + 4, AT_ONCE = SPLITS ? SUMS_AT_ONCE : WARPS };
    __shared__ int last;
    const int head_step = (int)gridDim.x * SUM;
    float *partial = a.partial + ((size_t)w.sequence * a.heads + w.head0) * head_step;
    int count = WARPS, next_head = SUM, first = 0, heads = w.heads;
#pragma unroll 1
    for (bool poll = false;; poll = true) {
        const bool done = !SPLITS || poll;
#pragma unroll 1
        for (int o = (int)threadIdx.x; o < heads * (D / 4); o += WARPS * 32) {
            const int head = o / (D / 4), d = o % (D / 4) * 4;
            const kv_sum_4 s =
                kv_add<D, AT_ONCE, SPLITS>(sums + head * next_head, step, count, d, poll);
            if (done) {
                const float per = __fdividef(1, s.denominator);
                kv_store_4(a, w, first + head, D, d,
                           make_float4(s.v.x * per, s.v.y * per, s.v.z * per, s.v.w * per));
            } else {
                float *to = partial + head * head_step + blockIdx.x * SUM;
                kv_put_4(to + d, s.v);
                if (d == 0)
                    kv_put_4(to + D, make_float4(s.row_max, s.denominator, 0, 0));
            }
        }
        if (done)
            break;
        if (a.arrivals) {
            if (!qt_last_to_arrive(&a.arrivals[blockIdx.z * gridDim.y + blockIdx.y],
                                   (unsigned)splits, &last))
                return;
        } else { /* two thread blocks if there is much to read */
            const int readers = splits > AT_ONCE ? 2 : 1, reader = splits - 1 - (int)blockIdx.x;
            if (reader >= readers)
                return;
            heads = (w.heads + readers - 1) / readers;
            first = reader * heads;
            heads = min(heads, w.heads - first);
            partial += first * head_step;
        }
        sums = partial;
        step = SUM;
        count = splits;
        next_head = head_step;
    }
    if (!SPLITS)
        return;
    __syncthreads(); /* all threads have read the maxima */
    for (int i = (int)threadIdx.x; i < heads * splits; i += WARPS * 32)
        kv_clear_4(partial + i / splits * head_step + i % splits * SUM + D);
}

#endif
