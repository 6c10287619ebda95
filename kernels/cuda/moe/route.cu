/*
 * Kernels around the grouped products.
 *
 * Route sorts pairs by expert (counting sort, stable) and divides each expert's pairs into work
 * items. One thread block; warp w has the w-th part of the pairs. No atomics: the result does not
 * depend on timing.
 *
 *   count    pairs of each warp and expert, in shared memory
 *   scan     over experts and, within an expert, over warps: first position of each warp and expert
 *   place    every warp places its pairs in ascending order
 *
 * Combine adds the results of the experts of a token in the order of the choices:
 *   grid       (tokens, columns / 1024); 128 threads of 8 columns
 *   Traffic    4 n topk bytes per token in, 2 n out
 */
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/smem.cuh"
#include "kernels/cuda/moe/moe.h"

/* Calls visit(pair, expert, lower, same) by all lanes for the pairs of the warp, 32 at a time in
 * ascending order. pair: -1 in lanes beyond the last pair; expert: -1: none of this layer; lower:
 * number of lower lanes with the same expert; same: number of lanes with it. Loads are issued four
 * at a time. */
template <class Visit>
static __device__ __forceinline__ void route_pairs(const qt_moe_route_args &a, Visit visit)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int warps = (int)blockDim.x / 32;
    const int part = (a.pairs + warps * 32 - 1) / (warps * 32) * 32;
    const int begin = warp * part, end = min(begin + part, a.pairs);
#pragma unroll 1
    for (int at = begin; at < end; at += 128) {
        int expert[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int pair = at + i * 32 + lane;
            expert[i] = pair < end ? a.ids[pair] - a.first_expert : -1;
            if (expert[i] < 0 || expert[i] >= a.experts)
                expert[i] = -1;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned same = __match_any_sync(~0u, expert[i]);
            const int lower = __popc(same & ((1u << lane) - 1));
            const int pair = at + i * 32 + lane;
            visit(pair < end ? pair : -1, expert[i], lower, __popc(same));
            __syncwarp();
        }
    }
}

/* Exclusive prefix sum over the warp; *total: the sum. */
static __device__ __forceinline__ int warp_scan(int v, int *total)
{
    const int lane = (int)threadIdx.x % 32;
    int sum = v;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int lower = __shfl_up_sync(~0u, sum, d);
        sum += lane >= d ? lower : 0;
    }
    *total = __shfl_sync(~0u, sum, 31);
    return sum - v;
}

static __device__ __forceinline__ int tiles(int pairs, int tile)
{
    return (pairs + tile - 1) / tile;
}

static __global__ void __launch_bounds__(1024) route_kernel(const qt_moe_route_args a)
{
    int *const count = (int *)qt_smem; /* [warps][experts] */
    const int warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    int *const total = count + warps * a.experts; /* [experts] */
    int *const base = total + a.experts;          /* [3][experts]: position, item by kind */
    ptx_launch_dependents();
    ptx_wait_previous();
    for (int i = (int)threadIdx.x; i < warps * a.experts; i += (int)blockDim.x)
        count[i] = 0;
    __syncthreads();
    int *const mine = count + warp * a.experts;
    route_pairs(a, [&](int, int expert, int lower, int same) {
        if (expert >= 0 && lower == 0)
            mine[expert] += same;
    });
    __syncthreads();
    for (int e = (int)threadIdx.x; e < a.experts; e += (int)blockDim.x) {
        int sum = 0;
        for (int w = 0; w < warps; w++)
            sum += count[w * a.experts + e];
        total[e] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        int begin[3] = {0, 0, 0};
        for (int at = 0; at < a.experts; at += 32) {
            const int e = at + (int)threadIdx.x, pairs = e < a.experts ? total[e] : 0;
            const bool many = pairs > a.few_pairs;
            const int v[3] = {pairs, many ? 0 : tiles(pairs, QT_MOE_FEW_TOKENS),
                              many ? tiles(pairs, QT_MOE_MANY_TOKENS) : 0};
#pragma unroll
            for (int i = 0; i < 3; i++) {
                int sum;
                const int before = warp_scan(v[i], &sum);
                if (e < a.experts)
                    base[i * a.experts + e] = begin[i] + before;
                begin[i] += sum;
            }
        }
        if (threadIdx.x < QT_MOE_KINDS)
            a.items[threadIdx.x] = threadIdx.x == QT_MOE_FEW ? begin[1] : begin[2];
    }
    __syncthreads();
    for (int e = (int)threadIdx.x; e < a.experts; e += (int)blockDim.x) {
        int at = base[e];
        const int kind = total[e] > a.few_pairs ? QT_MOE_MANY : QT_MOE_FEW;
        const int tile = kind == QT_MOE_MANY ? QT_MOE_MANY_TOKENS : QT_MOE_FEW_TOKENS;
        qt_moe_item *item = a.item[kind] + base[(1 + kind) * a.experts + e];
        for (int i = 0; i < total[e]; i += tile)
            *item++ = qt_moe_item{e, at + i, min(tile, total[e] - i), 0};
        for (int w = 0; w < warps; w++) {
            const int pairs = count[w * a.experts + e];
            count[w * a.experts + e] = at;
            at += pairs;
        }
    }
    __syncthreads();
    route_pairs(a, [&](int pair, int expert, int lower, int same) {
        const int at = expert < 0 ? -1 : mine[expert] + lower;
        if (pair >= 0)
            a.position[pair] = at;
        if (expert >= 0)
            a.order[at] = pair;
        __syncwarp();
        if (expert >= 0 && lower == 0)
            mine[expert] += same;
    });
}

/* y[0..8) of a token, from column c. */
static __device__ __forceinline__ void combine_add(float sum[8], const qt_moe_combine_args &a,
                                                   int token, int c)
{
#pragma unroll 4
    for (int j = 0; j < a.topk; j++) {
        const int at = a.position[token * a.topk + j];
        const float weight = a.weights[token * a.topk + j];
        if (at < 0)
            continue;
        const float4 *from = (const float4 *)(a.partial + (size_t)at * a.pitch + c);
        const float4 low = from[0], high = from[1];
        sum[0] = fmaf(weight, low.x, sum[0]);
        sum[1] = fmaf(weight, low.y, sum[1]);
        sum[2] = fmaf(weight, low.z, sum[2]);
        sum[3] = fmaf(weight, low.w, sum[3]);
        sum[4] = fmaf(weight, high.x, sum[4]);
        sum[5] = fmaf(weight, high.y, sum[5]);
        sum[6] = fmaf(weight, high.z, sum[6]);
        sum[7] = fmaf(weight, high.w, sum[7]);
    }
}

static __global__ void __launch_bounds__(128) combine_kernel(const qt_moe_combine_args a)
{
    const int token = (int)blockIdx.x, c = ((int)blockIdx.y * 128 + (int)threadIdx.x) * 8;
    ptx_launch_dependents();
    ptx_wait_previous();
    if (c >= a.n)
        return;
    float sum[8] = {};
    combine_add(sum, a, token, c);
    const size_t at = (size_t)token * a.n + c;
    if (a.wide)
        *(uint4 *)((uint16_t *)a.y + at) =
            make_uint4(qt_round_two(a.bf16, sum[0], sum[1]), qt_round_two(a.bf16, sum[2], sum[3]),
                       qt_round_two(a.bf16, sum[4], sum[5]), qt_round_two(a.bf16, sum[6], sum[7]));
    else
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (c + i < a.n)
                qt_put_rounded(a.y, at + i, sum[i], a.bf16);
}

const void *qt_moe_route_instance(void)
{
    return (const void *)route_kernel;
}

const void *qt_moe_combine_instance(void)
{
    return (const void *)combine_kernel;
}
