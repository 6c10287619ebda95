/*
 * Sums of warps and of splits: per head D floats of sum p * value, then the maximum (log2) and sum
 * p. Sums with different maxima meet by scaling with 2^(maximum - largest maximum), in order.
 */
#ifndef QT_KERNELS_CUDA_KV4_SUMS_CUH
#define QT_KERNELS_CUDA_KV4_SUMS_CUH

#include "kernels/cuda/common/arrive.cuh"
#include "kernels/cuda/common/ptx_int.cuh"
#include "kernels/cuda/common/round.cuh"
#include "kernels/cuda/kv4/work.cuh"

#include <math.h>

static __device__ __forceinline__ void kv_store_4(const kv_args &a, const kv_work &w, int head,
                                                  int dim, int d, float4 v)
{
    size_t at = ((size_t)w.sequence * a.heads + w.head0 + head) * dim + d;
    *(uint2 *)((uint16_t *)a.out + at) =
        make_uint2(qt_round_two(a.bf16, v.x, v.y), qt_round_two(a.bf16, v.z, v.w));
}

/*
 * Sums of splits meet in memory, four at a time. 0 is stored as -0, and who reads clears: so what
 * is not 0 has come. Where splits are not counted (kv_args.arrivals) that is all there is to know,
 * as memory is 0 between launches. A count would wait for all that was stored before it.
 *
 * Blocks of the last splits wait for those of the others. Blocks begin in the order of their
 * numbers, so all but the very last, which is next, have begun by then.
 */
static __device__ __forceinline__ void kv_put_four(float *at, const float4 &v)
{
    ptx_store_whole(at, make_float4(v.x == 0 ? -0.f : v.x, v.y, v.z, v.w));
}

static __device__ __forceinline__ void kv_clear_four(float *at)
{
    ptx_store_whole(at, make_float4(0, 0, 0, 0));
}

/* Four floats of a sum of sums, not yet divided by their denominator. */
struct kv_sum_4 {
    float4 v;
    float most, denominator;
};

/* Of `count` sums, `step` floats apart, AT_ONCE at a time, the four from d on. APART: perhaps not
 * in shared memory; meet: in memory, and perhaps still on their way. */
template <int D, int AT_ONCE, bool APART>
static __device__ __forceinline__ kv_sum_4 kv_add(float *sums, int step, int count, int d,
                                                  bool meet)
{
    const auto load = [](const float *p) { return APART ? ptx_load_whole(p) : *(const float4 *)p; };
    kv_sum_4 all = {make_float4(0, 0, 0, 0), -INFINITY, 0};
#pragma unroll 1
    for (int left = count; left > 0; left -= AT_ONCE) { /* the last too: one wait */
        float4 top[AT_ONCE], v[AT_ONCE];                /* maximum, denominator; sums */
        unsigned least;
        do {
            least = ~0u;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                top[i] = make_float4(-INFINITY, 0, 0, 0);
                v[i] = make_float4(1, 0, 0, 0);
                if (i < left) {
                    top[i] = load(sums + i * step + D);
                    v[i] = load(sums + i * step + d);
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                least = min(least, min(__float_as_uint(top[i].x), __float_as_uint(v[i].x)));
        } while (meet && !least);
        float most = all.most;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            most = fmaxf(most, top[i].x);
        float f = ptx_exp2(all.most - most);
        all = {make_float4(f * all.v.x, f * all.v.y, f * all.v.z, f * all.v.w), most,
               f * all.denominator};
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            f = ptx_exp2(top[i].x - most);
            all.denominator += f * top[i].y;
            all.v.x += f * v[i].x;
            all.v.y += f * v[i].y;
            all.v.z += f * v[i].z;
            all.v.w += f * v[i].w;
            if (meet && i < left)
                kv_clear_four(sums + i * step + d);
        }
        sums += AT_ONCE * step;
    }
    return all;
}

/*
 * Adds the sums of the warps in shared memory, [warp][head][D + 4], to the output; with SPLITS the
 * output gets those of the splits, added in one or two blocks by the same loop: what runs once
 * comes from memory, instructions too, but those of the second round are there already. So little
 * code is what counts here (docs/kernels_tried_w4ax.md, "Attention").
 */
template <class F, int WARPS, bool SPLITS>
static __device__ __forceinline__ void kv_finish(const kv_args &a, const kv_work &w, float *sums,
                                                 int step, int splits)
{
    enum { D = F::DIM, SUM = D + 4, AT_ONCE = SPLITS ? SUMS_AT_ONCE : WARPS };
    __shared__ int last;
    const int head_step = (int)gridDim.x * SUM;
    float *partial = a.partial + ((size_t)w.sequence * a.heads + w.head0) * head_step;
    int count = WARPS, next_head = SUM, first = 0, heads = w.heads;
#pragma unroll 1
    for (bool meet = false;; meet = true) {
        const bool done = !SPLITS || meet;
#pragma unroll 1
        for (int o = (int)threadIdx.x; o < heads * (D / 4); o += WARPS * 32) {
            const int head = o / (D / 4), d = o % (D / 4) * 4;
            const kv_sum_4 s =
                kv_add<D, AT_ONCE, SPLITS>(sums + head * next_head, step, count, d, meet);
            if (done) {
                const float per = __fdividef(1, s.denominator);
                kv_store_4(a, w, first + head, D, d,
                           make_float4(s.v.x * per, s.v.y * per, s.v.z * per, s.v.w * per));
            } else {
                float *to = partial + head * head_step + blockIdx.x * SUM;
                kv_put_four(to + d, s.v);
                if (d == 0)
                    kv_put_four(to + D, make_float4(s.most, s.denominator, 0, 0));
            }
        }
        if (done)
            break;
        if (a.arrivals) {
            if (!qt_last_to_arrive(&a.arrivals[blockIdx.z * gridDim.y + blockIdx.y],
                                   (unsigned)splits, &last))
                return;
        } else { /* two blocks, if that is much to read */
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
    __syncthreads(); /* maxima have been read by all */
    for (int i = (int)threadIdx.x; i < heads * splits; i += WARPS * 32)
        kv_clear_four(partial + i / splits * head_step + i % splits * SUM + D);
}

#endif
