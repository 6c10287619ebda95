/*
 * The mix24 kernel for up to 16 tokens (skinny_ring.cuh): what is in a stage, and how it becomes
 * products.
 *
 *   launch 1:  X in packed order (mix24_gather.cu); the kernel's weights are on their way meanwhile
 *   a stage:   X | unit 0: a record a strip | unit 1: the same
 *   block      and up to QT_MIX24_OUTLIER_WARPS warps that add up outliers
 *
 * Which units are FOURs follows from u F mod U, which grows by a constant and is taken along. The
 * places of a unit in a stage have room for FOURs, if there are any, and for as many strips as the
 * warps have: what they make of those that a tile lacks is not used.
 *
 * Requires    compute capability 9.0; stream 16-byte aligned
 * Moves       packed bytes once; X twice in the first launch, or four times with outliers, then
 *             once per block and tile, and a sector or two an outlier (through L2); Y once
 * Oracle      the weights' exact values and an FP64 product; relative error <= 2.3e-4, FP16 output
 */
#ifndef QT_KERNELS_CUDA_MIX24_SKINNY_CUH
#define QT_KERNELS_CUDA_MIX24_SKINNY_CUH

#include "kernels/cuda/matmul/skinny_ring.cuh"
#include "kernels/cuda/mix24/outliers.cuh"
#include "kernels/cuda/mix24/skinny.h"
#include "kernels/cuda/mix24/slot.cuh"

/* ---- the units of a stage ----------------------------------------------------------------------
 */

/* Of U units, F of them FOURs, unit u is one iff its rest, u F mod U, + F >= U. */
static __device__ __forceinline__ bool mix24_rest_is_four(const qt_mix24_skinny_args &a, int rest)
{
    return rest + a.fours >= a.units;
}

/* The rest of a unit further on; by: F times how many units, modulo U, or F for the next. */
static __device__ __forceinline__ int mix24_rest_after(const qt_mix24_skinny_args &a, int rest,
                                                       int by)
{
    rest += by;
    return rest >= a.units ? rest - a.units : rest;
}

struct mix24_skinny_copies : skinny_source<qt_mix24_skinny_args> {
    int rest, at; /* of its first unit; in a strip, in U64 */

    __device__ __forceinline__ mix24_skinny_copies(const qt_mix24_skinny_args &args)
        : skinny_source(args), rest(0), at(0)
    {
    }
    __device__ __forceinline__ void copy_weights(uint32_t dst, uint32_t bar) const
    {
        const bool four[2] = {mix24_rest_is_four(a, rest),
                              mix24_rest_is_four(a, mix24_rest_after(a, rest, a.fours))};
        const int bytes[2] = {mix24_unit_bytes(four[0]), mix24_unit_bytes(four[1])};
        ptx_barrier_expect(bar, (uint32_t)(a.weights_at + a.tile_strips * (bytes[0] + bytes[1])));
        dst += a.weights_at;
        ptx_copy_box(dst, &a.records[four[0]], at, strip(), bar);
        ptx_copy_box(dst + a.unit_bytes, &a.records[four[1]], at + bytes[0] / 8, strip(), bar);
    }
    __device__ __forceinline__ bool next()
    {
#pragma unroll
        for (int unit = 0; unit < QT_SKINNY_SLOTS; unit++) {
            at += mix24_unit_bytes(mix24_rest_is_four(a, rest)) / 8;
            rest = mix24_rest_after(a, rest, a.fours);
        }
        return skinny_source::next();
    }
    __device__ __forceinline__ bool next_tile()
    {
        rest = at = 0;
        return skinny_source::next_tile();
    }
};

/* ---- products ----------------------------------------------------------------------------------
 */

/* X of a slot. row: of its blocks, token g, the first half of what lane t needs. */
template <int MT> struct mix24_x_stage {
    uint32_t row[2];

    __device__ __forceinline__ void load(uint4 x[MT], int b, int half) const
    {
#pragma unroll
        for (int t = 0; t < MT; t++)
            x[t] = ptx_load_16((row[b] ^ half * 16) + t * 1024);
    }
};

/* For skinny_multiply_all. */
template <int MT, int STRIPS> struct mix24_skinny_work : skinny_float_sums {
    const qt_mix24_skinny_args &a;
    const int first;      /* strip of the tile */
    const int records_at; /* in a stage */
    int lane, rest;       /* of the unit */
    uint32_t x[2];        /* mix24_x_stage of a stage at 0 */

    __device__ __forceinline__ mix24_skinny_work(const qt_mix24_skinny_args &args,
                                                 const skinny_warp &w)
        : a(args), first(w.wn * STRIPS), records_at(args.weights_at + w.slot * args.unit_bytes),
          lane((int)(threadIdx.x % 32)), rest(0)
    {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int b = 0; b < 2; b++) {
            x[b] = ptx_shared(qt_smem) + skinny_x_at(a.x_rows, 2 * w.slot + b, g, 2 * t);
            asm volatile("" : "+r"(x[b])); /* computed once */
        }
        asm volatile("" : "+r"(lane));
    }
    __device__ __forceinline__ void begin_tile(int unit)
    {
        rest = (int)((unsigned)(unit * a.fours) % (unsigned)a.units);
    }
    template <bool FOUR, int N>
    __device__ __forceinline__ void unit(qt_accumulators<MT, N> *sums, uint32_t records,
                                         const mix24_x_stage<MT> &x_of) const
    {
        uint32_t record[N];
#pragma unroll
        for (int u = 0; u < N; u++)
            record[u] = records + (uint32_t)(first + u) * mix24_record<FOUR>::BYTES;
        mix24_slot<FOUR, MT, N>(sums, record, x_of, lane);
    }
    template <int N>
    __device__ __forceinline__ void slot(qt_accumulators<MT, N> *sums, int stage, int)
    {
        const uint32_t records = ptx_shared(qt_smem) + (uint32_t)(stage + records_at);
        const mix24_x_stage<MT> x_of = {{x[0] + stage, x[1] + stage}};
        if (mix24_rest_is_four(a, rest))
            unit<true>(sums, records, x_of);
        else
            unit<false>(sums, records, x_of);
        rest = mix24_rest_after(a, rest, a.step_rest);
    }
    __device__ __forceinline__ void meet(int threads, int tile) const
    {
        qt_turn_take(SKINNY_MEET, tile, threads + a.outliers.warps * 32);
    }
    __device__ __forceinline__ const float *added(int tile) const
    {
        return a.outliers.ptr ? (const float *)(qt_smem + a.tail_at + (tile & 1) * a.outlier_bytes)
                              : NULL;
    }
    __device__ __forceinline__ const __half *row_scales(int) const
    {
        return NULL;
    }
};

/* ---- outliers ----------------------------------------------------------------------------------
 */

/* All tiles; thread: of those that do this. A tile's sums have been read when those of the next are
 * met: so two of them take turns. */
template <int MT>
static __device__ __forceinline__ void mix24_skinny_outliers(const qt_mix24_skinny_args &a,
                                                             int pitch, int threads, int thread)
{
    const int rows = a.tile_strips * 16, first = (int)blockIdx.x * a.strips_cta * 16;
    outlier_prefetch(a.outliers, first, a.strips_cta * 16, thread, 32 * a.outliers.warps);
#pragma unroll 1
    for (int tile = 0; tile < a.tiles; tile++) {
        qt_turn_fill(SKINNY_MEET, tile, threads + a.outliers.warps * 32);
        float *to = (float *)(qt_smem + a.tail_at + (tile & 1) * a.outlier_bytes);
        outlier_tile<MT>(a.outliers, to, pitch, a.m, first + tile * rows, rows, thread / 32,
                         tile == 0);
        qt_turn_filled(SKINNY_MEET, tile, threads + a.outliers.warps * 32);
    }
}

/* ---- the kernel --------------------------------------------------------------------------------
 */

template <int MT, int STRIPS, int LAST>
__global__ void __launch_bounds__(qt_mix24_skinny_warps(MT, STRIPS, LAST) * 32, 1)
    qt_mix24_skinny_kernel(const __grid_constant__ qt_mix24_skinny_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const int threads =
        (int)blockDim.x - QT_RING_COPIERS - a.outliers.warps * 32; /* that multiply */
    const qt_ring r = qt_ring_open(ptx_shared(qt_smem) + a.barriers_at);
    const skinny_warp w = skinny_warp_open(a, warp, threads);
    if (warp * 32 >= threads + QT_RING_COPIERS) {
        ptx_launch_dependents();
        mix24_skinny_outliers<MT>(a, w.warps_n * STRIPS * 16 + 4, threads,
                                  (int)threadIdx.x - threads - QT_RING_COPIERS);
    } else if (warp * 32 >= threads) {
        qt_ring_bring(a, r, warp * 32 == threads, threads, a.arrivals, mix24_skinny_copies(a));
    } else {
        ptx_launch_dependents();
        skinny_multiply_all<MT, STRIPS, LAST>(a, r, w, threads,
                                              mix24_skinny_work<MT, STRIPS>(a, w));
    }
}

#endif
