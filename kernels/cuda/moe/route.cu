/*
 * Kernels around the grouped products.
 *
 * Route sorts pairs by expert (counting sort, stable) and divides each expert's pairs into work
 * items. One thread block; warp w has the w-th part of the pairs. The result does not depend on
 * timing: atomics only count.
 *
 *   count    pairs of each warp and expert, in shared memory
 *   scan     over experts and, within an expert, over warps: first position of each warp and expert
 *   place    every warp places its pairs in ascending order
 *
 * Combine adds the results of the experts of a token in the order of the choices:
 *   grid       (tokens, columns / 1024); 128 threads of 8 columns
 *   Traffic    4 n topk bytes per token in, or 2 n topk if they were rounded; 2 n out
 */
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/smem.cuh"
#include "kernels/cuda/moe/moe.h"

/* Calls visit(pair, expert) by all lanes for the pairs of the warp, 32 at a time, ascending. pair:
 * -1 in lanes beyond the last pair; expert: -1: none of this layer. Loads are issued four at a
 * time. */
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
            const int pair = at + i * 32 + lane;
            visit(pair < end ? pair : -1, expert[i]);
        }
    }
}

/* The lanes with the same expert. __match_any_sync would take a step for each different expert. */
static __device__ __forceinline__ unsigned same_expert(int expert, int experts)
{
    unsigned same = ~0u;
#pragma unroll 1
    for (int bit = 1; bit <= experts; bit *= 2) { /* expert + 1 is at most `experts` */
        const bool set = (expert + 1) & bit;
        const unsigned with = __ballot_sync(~0u, set);
        same &= set ? with : ~with;
    }
    return same;
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

/*
 * How the pairs of an expert are divided into items of the kind MANY, of about equal size: `larger`
 * of `steps` + 1 times STEP pairs, then the others of `steps` times STEP. The last item has what is
 * left.
 */
enum { STEP = 32, SIZES = QT_MOE_WIDE_TOKENS / STEP };
struct division {
    int items, larger, steps;

    __device__ __forceinline__ division(int pairs, int most)
        : items(tiles(pairs, most)), larger(0), steps(0)
    {
        if (items) {
            steps = tiles(pairs, STEP) / items;
            larger = tiles(pairs, STEP) % items;
        }
    }
    /* Number of items of `size` times STEP pairs. */
    __device__ __forceinline__ int of_size(int size) const
    {
        return size == steps ? items - larger : size == steps + 1 ? larger : 0;
    }
};

/* Writes the items of an expert; few, many[size - 1]: numbers of its first items of the kind FEW,
 * and of those of `size` times STEP pairs. */
static __device__ __forceinline__ void put_items(const qt_moe_route_args &a, int expert, int first,
                                                 int pairs, int few, const int *many)
{
    if (pairs <= a.few_pairs) {
        qt_moe_item *item = a.item[QT_MOE_FEW] + few;
        for (int i = 0; i < pairs; i += QT_MOE_FEW_TOKENS)
            *item++ = qt_moe_item{expert, first + i, min((int)QT_MOE_FEW_TOKENS, pairs - i), 0};
        return;
    }
    const division d(pairs, a.many_tokens);
    for (int i = 0, at = 0; i < d.items; i++) {
        const int size = d.steps + (i < d.larger), number = i < d.larger ? i : i - d.larger;
        const int rows = min(size * STEP, pairs - at);
        a.item[QT_MOE_MANY][many[(size - 1) * a.experts + expert] + number] =
            qt_moe_item{expert, first + at, rows, 0};
        at += rows;
    }
}

static __global__ void __launch_bounds__(1024) route_kernel(const qt_moe_route_args a)
{
    int *const count = (int *)qt_smem; /* [warps][experts] */
    const int warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    int *const total = count + warps * a.experts; /* [experts] */
    /* [2 + SIZES][experts]: position; first item of the kind FEW; of the kind MANY by size. */
    int *const base = total + a.experts;
    ptx_launch_dependents();
    ptx_wait_previous();
    for (int i = (int)threadIdx.x; i < warps * a.experts; i += (int)blockDim.x)
        count[i] = 0;
    __syncthreads();
    int *const mine = count + warp * a.experts;
    route_pairs(a, [&](int, int expert) {
        if (expert >= 0)
            atomicAdd(&mine[expert], 1);
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
        int begin[2 + SIZES] = {};
        for (int at = 0; at < a.experts; at += 32) {
            const int e = at + (int)threadIdx.x, pairs = e < a.experts ? total[e] : 0;
            const bool many = pairs > a.few_pairs;
            const division d(many ? pairs : 0, a.many_tokens);
#pragma unroll
            for (int i = 0; i < 2 + SIZES; i++) {
                const int v = i >= 2   ? d.of_size(i - 1)
                              : i == 0 ? tiles(pairs, a.align) * a.align
                              : many   ? 0
                                       : tiles(pairs, QT_MOE_FEW_TOKENS);
                int sum;
                const int before = warp_scan(v, &sum);
                if (e < a.experts)
                    base[i * a.experts + e] = begin[i] + before;
                begin[i] += sum;
            }
        }
        /* The largest items first: thread blocks take items in turns, and so have about the same
         * work. */
        int larger = 0;
#pragma unroll
        for (int i = 1 + SIZES; i >= 2; i--) {
            for (int e = (int)threadIdx.x; e < a.experts; e += 32)
                base[i * a.experts + e] += larger;
            larger += begin[i];
        }
        if (threadIdx.x < QT_MOE_KINDS)
            a.items[threadIdx.x] = threadIdx.x == QT_MOE_FEW ? begin[1] : larger;
    }
    __syncthreads();
    for (int e = (int)threadIdx.x; e < a.experts; e += (int)blockDim.x) {
        int at = base[e];
        put_items(a, e, at, total[e], base[a.experts + e], base + 2 * a.experts);
        for (int w = 0; w < warps; w++) {
            const int pairs = count[w * a.experts + e];
            count[w * a.experts + e] = at;
            at += pairs;
        }
    }
    __syncthreads();
    route_pairs(a, [&](int pair, int expert) {
        const unsigned same = same_expert(expert, a.experts);
        const int lower = __popc(same & ((1u << threadIdx.x % 32) - 1));
        const int at = expert < 0 ? -1 : mine[expert] + lower;
        if (pair >= 0)
            a.position[pair] = at;
        if (expert >= 0)
            a.order[at] = pair;
        __syncwarp();
        if (expert >= 0 && lower == 0)
            mine[expert] += __popc(same);
        __syncwarp();
    });
}

static __device__ __forceinline__ float4 widen_four(bool bf16, uint32_t low, uint32_t high)
{
    return make_float4(qt_widen(bf16, (uint16_t)low), qt_widen(bf16, (uint16_t)(low >> 16)),
                       qt_widen(bf16, (uint16_t)high), qt_widen(bf16, (uint16_t)(high >> 16)));
}

static __device__ __forceinline__ int combine_position(const qt_moe_combine_args &a, int pair)
{
    if (!a.direct.ids)
        return a.position[pair];
    const int expert = a.direct.ids[pair] - a.direct.first_expert;
    return expert >= 0 && expert < a.direct.experts ? pair : -1;
}

/* y[0..8) of a token, from column c. */
static __device__ __forceinline__ void combine_add(float sum[8], const qt_moe_combine_args &a,
                                                   int token, int c)
{
#pragma unroll 4
    for (int j = 0; j < a.topk; j++) {
        const int at = combine_position(a, token * a.topk + j);
        const float weight = a.weights[token * a.topk + j];
        if (at < 0)
            continue;
        float4 low, high;
        if (a.rounded) {
            const uint4 v =
                *(const uint4 *)((const uint16_t *)a.partial + (size_t)at * a.pitch + c);
            low = widen_four(a.bf16, v.x, v.y);
            high = widen_four(a.bf16, v.z, v.w);
        } else {
            const float4 *from =
                (const float4 *)((const float *)a.partial + (size_t)at * a.pitch + c);
            low = from[0];
            high = from[1];
        }
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
