/*
 * Sums of warps and of splits: per head D floats of sum p * value, then the maximum (log2) and sum
 * p. Sums with different maxima meet by scaling with 2^(maximum - largest maximum), in order.
 */
#ifndef QT_CUDA_KV4_SUMS_CUH
#define QT_CUDA_KV4_SUMS_CUH

#include "kernels/cuda/kv4_work.cuh"
#include "kernels/cuda/ptx_cluster.cuh"
#include "kernels/cuda/ptx_int.cuh"
#include "kernels/cuda/round.cuh"

#include <math.h>

static __device__ __forceinline__ void kv_store_4(const kv_args &a, const kv_work &w, int head,
                                                  int dim, int d, float4 v)
{
    size_t at = ((size_t)w.sequence * a.heads + w.head0 + head) * dim + d;
    *(uint2 *)((uint16_t *)a.out + at) =
        make_uint2(qt_round_two(a.bf16, v.x, v.y), qt_round_two(a.bf16, v.z, v.w));
}

/* Adds the sums of the warps: to the output when `alone`, else as one sum, by put(head, d, v): four
 * of its floats from d on. Each thread finds the few factors of its head itself. */
template <class F, int WARPS, class Put>
static __device__ __forceinline__ void kv_add_warps(const kv_args &a, const kv_work &w,
                                                    const float *from, size_t warp_step, bool alone,
                                                    Put put)
{
    enum { D = F::DIM, SUM = D + 4 };
#pragma unroll 1
    for (int o = (int)threadIdx.x; o < w.heads * (D / 4); o += WARPS * 32) {
        const int head = o / (D / 4), d = o % (D / 4) * 4;
        float2 v[WARPS]; /* maximum, denominator */
        float most = -INFINITY, den = 0;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            v[i] = *(const float2 *)(from + i * warp_step + head * SUM + D);
            most = fmaxf(most, v[i].x);
        }
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const float4 more = *(const float4 *)(from + i * warp_step + head * SUM + d);
            const float f = ptx_exp2(v[i].x - most);
            den += f * v[i].y;
            sum.x += f * more.x;
            sum.y += f * more.y;
            sum.z += f * more.z;
            sum.w += f * more.w;
        }
        if (alone) {
            const float per = __fdividef(1, den);
            kv_store_4(a, w, head, D, d,
                       make_float4(sum.x * per, sum.y * per, sum.z * per, sum.w * per));
        } else {
            put(head, d, sum);
            if (d == 0)
                put(head, D, make_float4(most, den, 0, 0));
        }
    }
}

/* The first block of a cluster opens a barrier, on which `bytes` of sums arrive. */
static __device__ __forceinline__ void kv_open_meeting(uint32_t barrier, int bytes)
{
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        ptx_barrier_init(barrier, 1);
        ptx_barrier_init_fence();
        ptx_barrier_expect(barrier, (uint32_t)bytes);
    }
    __syncwarp();
    ptx_cluster_arrive();
}

/* In the first block true, when all have sent. */
static __device__ __forceinline__ bool kv_have_met(uint32_t barrier)
{
    if (blockIdx.x > 0)
        return false;
    ptx_barrier_wait_cluster(barrier, 0);
    __syncthreads(); /* the warps' sums have been read */
    return true;
}

/* Adds the sums of `count` splits, D + 4 floats apart in global or shared memory, to the output.
 * factor: room for count floats a head. */
template <class F, int WARPS>
static __device__ __forceinline__ void kv_add_splits(const kv_args &a, const kv_work &w,
                                                     const float *from, size_t head_step, int count,
                                                     float *factor)
{
    enum { D = F::DIM, SUM = D + 4, ROUNDS = MAX_SPLITS / 32 };
#pragma unroll 1
    for (int head = w.warp; head < w.heads; head += WARPS) {
        const float *sums = from + head * head_step + D;
        float2 v[ROUNDS]; /* maximum, denominator */
        float most = -INFINITY, den = 0;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            v[i] = make_float2(-INFINITY, 0);
            if (i * 32 + w.lane < count)
                v[i] = *(const float2 *)(sums + (i * 32 + w.lane) * SUM);
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            most = fmaxf(most, v[i].x);
#pragma unroll
        for (int d = 1; d < 32; d *= 2)
            most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            v[i].x = ptx_exp2(v[i].x - most);
            den += v[i].x * v[i].y;
        }
#pragma unroll
        for (int d = 1; d < 32; d *= 2)
            den += __shfl_xor_sync(~0u, den, d);
        const float per = __fdividef(1, den);
#pragma unroll
        for (int i = 0; i < ROUNDS; i++)
            if (i * 32 + w.lane < count)
                factor[head * count + i * 32 + w.lane] = v[i].x * per;
    }
    __syncthreads();
#pragma unroll 1
    for (int o = (int)threadIdx.x; o < w.heads * (D / 4); o += WARPS * 32) {
        int head = o / (D / 4), d = o % (D / 4) * 4;
        const float *sums = from + head * head_step + d;
        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int first = 0; first < count; first += 16) /* 16 at a time, the last too: one wait */
#pragma unroll
            for (int i = first; i < first + 16; i++) {
                float4 more = make_float4(0, 0, 0, 0);
                float f = 0;
                if (i < count) {
                    more = *(const float4 *)(sums + i * SUM);
                    f = factor[head * count + i];
                }
                v.x += f * more.x;
                v.y += f * more.y;
                v.z += f * more.z;
                v.w += f * more.w;
            }
        kv_store_4(a, w, head, D, d, v);
    }
}

#endif
