/*
 * Kernels around the grouped products.
 *
 * Route sorts pairs by expert (counting sort, stable) and divides each expert's pairs into work
 * items. One thread block, for many pairs a cluster; the w-th warp of the grid has the w-th part of
 * the pairs. The result does not depend on timing: atomics only count.
 *
 *   count    pairs of each warp and expert, in shared memory
 *   scan     over experts and, within an expert, over warps: first position of each warp and expert
 *   place    every warp places its pairs in ascending order
 *
 * Gather copies the rows of X of items of the kind MANY to the order of positions, so that TMA can
 * copy tiles of them. A thread block takes 32 rows of an item at a time.
 *   Traffic    2 k bytes per position in (most from L2) and out
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
    const int lane = (int)threadIdx.x % 32, of_block = (int)blockDim.x / 32;
    const int warp = (int)blockIdx.x * of_block + (int)threadIdx.x / 32;
    const int warps = (int)gridDim.x * of_block;
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
enum { STEP = 32, SIZES = QT_MOE_WIDE_TOKENS / STEP, KINDS = QT_MOE_ROUTE_KINDS };
static_assert(KINDS == 2 + SIZES, "kinds of the scan");
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

/* Shared memory of the sort. */
struct route_space {
    int *count;  /* [warps][experts] pairs, later the next position */
    int *total;  /* [experts] pairs of the thread block */
    int *all;    /* [experts] pairs of the cluster */
    int *before; /* [experts] those of the thread blocks in front */
    int *base;   /* [KINDS][experts]: of kind 0 first positions; else numbers of first items */
    int *end;    /* [KINDS]: sums over the experts */

    __device__ __forceinline__ route_space(int warps, int experts) : count((int *)qt_smem)
    {
        total = count + warps * experts;
        all = total + experts;
        before = all + experts;
        base = before + experts;
        end = base + KINDS * experts;
    }
};

/* The scan adds up this amount of each expert: its positions, its items of the kind FEW, or its
 * items of the kind MANY by size. */
static __device__ __forceinline__ int route_amount(const qt_moe_route_args &a, int kind, int pairs)
{
    const bool many = pairs > a.few_pairs;
    if (kind == 0)
        return tiles(pairs, a.align) * a.align;
    if (kind == 1)
        return many ? 0 : tiles(pairs, QT_MOE_FEW_TOKENS);
    return division(many ? pairs : 0, a.many_tokens).of_size(kind - 1);
}

/* The kinds are scanned by a warp each. */
static __device__ __forceinline__ void route_scan(const qt_moe_route_args &a, const route_space &s)
{
    const int lane = (int)threadIdx.x % 32;
    for (int kind = (int)threadIdx.x / 32; kind < KINDS; kind += (int)blockDim.x / 32) {
        int begin = 0;
        for (int at = 0; at < a.experts; at += 32) {
            const int e = at + lane;
            int sum;
            const int before = warp_scan(e < a.experts ? route_amount(a, kind, s.all[e]) : 0, &sum);
            if (e < a.experts)
                s.base[kind * a.experts + e] = begin + before;
            begin += sum;
        }
        if (lane == 0)
            s.end[kind] = begin;
    }
}

/* Items of the kind MANY with more than `size` times STEP pairs. They come first: thread blocks
 * take items in turns, and so have about the same work. */
static __device__ __forceinline__ int route_larger(const route_space &s, int size)
{
    int items = 0;
    for (int kind = size + 2; kind < KINDS; kind++)
        items += s.end[kind];
    return items;
}

static __device__ __forceinline__ void put_items(const qt_moe_route_args &a, const route_space &s,
                                                 int expert)
{
    const int first = s.base[expert], pairs = s.all[expert];
    if (pairs <= a.few_pairs) {
        qt_moe_item *item = a.item[QT_MOE_FEW] + s.base[a.experts + expert];
        for (int i = 0; i < pairs; i += QT_MOE_FEW_TOKENS)
            *item++ = qt_moe_item{expert, first + i, min((int)QT_MOE_FEW_TOKENS, pairs - i), 0};
        return;
    }
    const division d(pairs, a.many_tokens);
    for (int i = 0, at = 0; i < d.items; i++) {
        const int size = d.steps + (i < d.larger), number = i < d.larger ? i : i - d.larger;
        const int rows = min(size * STEP, pairs - at);
        a.item[QT_MOE_MANY][route_larger(s, size) + s.base[(size + 1) * a.experts + expert] +
                            number] = qt_moe_item{expert, first + at, rows, 0};
        at += rows;
    }
}

/* The same location in the shared memory of a thread block of the cluster. */
static __device__ __forceinline__ const int *route_of_block(int *at, int rank)
{
#if __CUDA_ARCH__ >= 900
    return (const int *)__cluster_map_shared_rank(at, (unsigned)rank);
#else
    return at + 0 * rank;
#endif
}

static __device__ __forceinline__ void route_arrive()
{
#if __CUDA_ARCH__ >= 900
    __cluster_barrier_arrive();
#endif
}

static __device__ __forceinline__ void route_wait()
{
#if __CUDA_ARCH__ >= 900
    __cluster_barrier_wait();
#endif
}

static __global__ void __launch_bounds__(1024) route_kernel(const qt_moe_route_args a)
{
    const int warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    const int rank = (int)blockIdx.x, blocks = (int)gridDim.x;
    const route_space s(warps, a.experts);
    int *const mine = s.count + warp * a.experts;
    ptx_launch_dependents();
    ptx_wait_previous();
    for (int i = (int)threadIdx.x; i < warps * a.experts; i += (int)blockDim.x)
        s.count[i] = 0;
    __syncthreads();
    route_pairs(a, [&](int, int expert) {
        if (expert >= 0)
            atomicAdd(&mine[expert], 1);
    });
    __syncthreads();
    for (int e = (int)threadIdx.x; e < a.experts; e += (int)blockDim.x) {
        int sum = 0;
        for (int w = 0; w < warps; w++)
            sum += s.count[w * a.experts + e];
        s.total[e] = sum;
    }
    __syncthreads();
    route_arrive();
    route_wait();
    for (int e = (int)threadIdx.x; e < a.experts; e += (int)blockDim.x) {
        int all = 0, before = 0;
        for (int b = 0; b < blocks; b++) {
            const int pairs = route_of_block(s.total, b)[e];
            before += b < rank ? pairs : 0;
            all += pairs;
        }
        s.all[e] = all;
        s.before[e] = before;
    }
    __syncthreads();
    route_arrive(); /* this thread block has read the sums of the others */
    route_scan(a, s);
    __syncthreads();
    if (rank == 0 && threadIdx.x < QT_MOE_KINDS)
        a.items[threadIdx.x] = threadIdx.x == QT_MOE_FEW ? s.end[1] : route_larger(s, 0);
    for (int e = (int)threadIdx.x; e < a.experts; e += (int)blockDim.x) {
        int at = s.base[e] + s.before[e];
        if (e % blocks == rank)
            put_items(a, s, e);
        for (int w = 0; w < warps; w++) {
            const int pairs = s.count[w * a.experts + e];
            s.count[w * a.experts + e] = at;
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
    route_wait();
}

/* A warp reads a part of a token's row once, and stores it at all positions of the token. */
static __global__ void __launch_bounds__(256) moe_gather_kernel(const qt_moe_gather_args a)
{
    enum { STEPS = 4, PART = STEPS * 32 }; /* chunks */
    const int lane = (int)threadIdx.x % 32, warps = (int)gridDim.x * 8;
    const int parts = (a.pitch + PART - 1) / PART;
    ptx_wait_previous();
    ptx_launch_dependents();
    const int end = *a.items ? a.tokens * parts : 0;
#pragma unroll 1
    for (int i = (int)(blockIdx.x * 8 + threadIdx.x / 32); i < end; i += warps) {
        const int token = i / parts, begin = (i - token * parts) * PART + lane;
        const int place = lane < a.topk ? a.position[token * a.topk + lane] : -1;
        uint4 v[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            if (begin + s * 32 < a.pitch)
                v[s] = a.x[(size_t)token * a.pitch + begin + s * 32];
#pragma unroll 1
        for (int j = 0; j < a.topk; j++) {
            const int at = __shfl_sync(~0u, place, j);
            if (at < 0)
                continue;
#pragma unroll
            for (int s = 0; s < STEPS; s++)
                if (begin + s * 32 < a.pitch)
                    a.out[(size_t)at * a.pitch + begin + s * 32] = v[s];
        }
        if (a.token_factor && i % parts == 0 && place >= 0)
            a.out_factor[place] = a.token_factor[token];
    }
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

const void *qt_moe_gather_instance(void)
{
    return (const void *)moe_gather_kernel;
}

const void *qt_moe_combine_instance(void)
{
    return (const void *)combine_kernel;
}
