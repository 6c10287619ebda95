/*
 * The mix24 skinny kernel: Y = X W^T for up to 16 tokens, sm_90a. Work distribution, pipeline and
 * epilogue are in matmul/skinny_common.cuh; this file defines the contents of a stage, and the
 * products.
 *
 *   launch 1:  gather.cu: X in packed order; this kernel's weights are copied meanwhile
 *   stage:     X | unit 2 s: a record per strip | unit 2 s + 1: a record per strip
 *   block      also up to QT_MIX24_OUTLIER_WARPS warps that add the outliers (outliers.cuh)
 *
 * A matrix has U units, F of them FOURs. Unit u is a FOUR iff (u F mod U) + F >= U; the remainder u
 * F mod U is updated by additions. (FOUR: a unit of 4-bit groups, see decode.cuh.) Each unit of a
 * stage has room for one record per strip of all warps; if the matrix has FOURs, for a record of a
 * FOUR each, which is larger. Results of strips beyond the tile are discarded.
 *
 * Requires   stream 16-byte aligned
 * Traffic    packed bytes once; X twice in the first launch, or four times with outliers, then once
 *            per thread block and tile, and a sector or two per outlier (through L2); Y once
 * Reference  the weights' exact values and an FP64 product; relative error <= 2.3e-4, FP16 output
 */
#ifndef QT_KERNELS_CUDA_MIX24_SKINNY_CUH
#define QT_KERNELS_CUDA_MIX24_SKINNY_CUH

#include "kernels/cuda/matmul/skinny_common.cuh"
#include "kernels/cuda/mix24/outliers.cuh"
#include "kernels/cuda/mix24/skinny.h"
#include "kernels/cuda/mix24/warp_mma.cuh"

/* ---- units of a stage ------------------------------------------------------------------------ */

/* With U units, F of them FOURs, unit u is a FOUR iff (u F mod U) + F >= U. The remainder of a unit
 * is u F mod U. */
static __device__ __forceinline__ bool mix24_remainder_is_four(const qt_mix24_skinny_args &a,
                                                               int remainder)
{
    return remainder + a.fours >= a.units;
}

/* The remainder of a later unit; by: F times the number of units, modulo U; F for the next unit. */
static __device__ __forceinline__ int mix24_remainder_after(const qt_mix24_skinny_args &a,
                                                            int remainder, int by)
{
    remainder += by;
    return remainder >= a.units ? remainder - a.units : remainder;
}

struct mix24_skinny_producer : skinny_producer_base<qt_mix24_skinny_args> {
    int remainder, at; /* of the stage's first unit: remainder; offset in a strip, in U64 */

    __device__ __forceinline__ mix24_skinny_producer(const qt_mix24_skinny_args &args)
        : skinny_producer_base(args), remainder(0), at(0)
    {
    }
    __device__ __forceinline__ void copy_weights(uint32_t dst, uint32_t bar) const
    {
        const bool four[2] = {
            mix24_remainder_is_four(a, remainder),
            mix24_remainder_is_four(a, mix24_remainder_after(a, remainder, a.fours))};
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
            at += mix24_unit_bytes(mix24_remainder_is_four(a, remainder)) / 8;
            remainder = mix24_remainder_after(a, remainder, a.fours);
        }
        return skinny_producer_base::next();
    }
    __device__ __forceinline__ bool next_tile()
    {
        remainder = at = 0;
        return skinny_producer_base::next_tile();
    }
};

/* ---- products -------------------------------------------------------------------------------- */

/* X of a slot. row[b]: address of token g, block b, at the first half of what lane t needs. */
template <int MT> struct mix24_x_stage {
    uint32_t row[2];

    __device__ __forceinline__ void load(uint4 x[MT], int b, int half) const
    {
#pragma unroll
        for (int t = 0; t < MT; t++)
            x[t] = ptx_load_16((row[b] ^ half * 16) + t * 1024);
    }
};

/* The Work of skinny_consume. */
template <int MT, int STRIPS> struct mix24_skinny_consumer : skinny_float_accumulators {
    const qt_mix24_skinny_args &a;
    const int first;      /* the warp's first strip in the tile */
    const int records_at; /* offset in a stage */
    int lane, remainder;  /* remainder of the unit */
    uint32_t x[2];        /* mix24_x_stage for stage offset 0 */

    __device__ __forceinline__ mix24_skinny_consumer(const qt_mix24_skinny_args &args,
                                                     const skinny_warp &w)
        : a(args), first(w.wn * STRIPS), records_at(args.weights_at + w.slot * args.unit_bytes),
          lane((int)(threadIdx.x % 32)), remainder(0)
    {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int b = 0; b < 2; b++) {
            x[b] = ptx_shared(qt_smem) + skinny_x_at(a.x_rows, 2 * w.slot + b, g, 2 * t);
            asm volatile("" : "+r"(x[b])); /* keeps it in a register */
        }
        asm volatile("" : "+r"(lane));
    }
    __device__ __forceinline__ void begin_tile(int unit)
    {
        remainder = (int)((unsigned)(unit * a.fours) % (unsigned)a.units);
    }
    template <bool FOUR, int N>
    __device__ __forceinline__ void unit(qt_accumulators<MT, N> *sums, uint32_t records,
                                         const mix24_x_stage<MT> &x_of) const
    {
        uint32_t record[N];
#pragma unroll
        for (int u = 0; u < N; u++)
            record[u] = records + (uint32_t)(first + u) * mix24_record<FOUR>::BYTES;
        mix24_unit_mma<FOUR, MT, N>(sums, record, x_of, lane);
    }
    template <int N>
    __device__ __forceinline__ void slot(qt_accumulators<MT, N> *sums, int stage, int)
    {
        const uint32_t records = ptx_shared(qt_smem) + (uint32_t)(stage + records_at);
        const mix24_x_stage<MT> x_of = {{x[0] + stage, x[1] + stage}};
        if (mix24_remainder_is_four(a, remainder))
            unit<true>(sums, records, x_of);
        else
            unit<false>(sums, records, x_of);
        remainder = mix24_remainder_after(a, remainder, a.step_rest);
    }
    __device__ __forceinline__ void sync(int threads, int tile) const
    {
        qt_double_buffer_wait(SKINNY_SYNC, tile, threads + a.outliers.warps * 32);
    }
    __device__ __forceinline__ const float *addend(int tile) const
    {
        return a.outliers.ptr ? (const float *)(qt_smem + a.tail_at + (tile & 1) * a.outlier_bytes)
                              : NULL;
    }
    __device__ __forceinline__ const __half *row_scales(int) const
    {
        return NULL;
    }
};

/* ---- outliers -------------------------------------------------------------------------------- */

/* The outlier sums of all tiles; thread: number among the outlier threads. Two buffers: those of a
 * tile are read when the next tile's partial sums are synchronized. */
template <int MT>
static __device__ __forceinline__ void mix24_skinny_outliers(const qt_mix24_skinny_args &a,
                                                             int pitch, int threads, int thread)
{
    const int rows = a.tile_strips * 16, first = (int)blockIdx.x * a.strips_cta * 16;
    outlier_prefetch(a.outliers, first, a.strips_cta * 16, thread, 32 * a.outliers.warps);
#pragma unroll 1
    for (int tile = 0; tile < a.tiles; tile++) {
        qt_double_buffer_acquire(SKINNY_SYNC, tile, threads + a.outliers.warps * 32);
        float *to = (float *)(qt_smem + a.tail_at + (tile & 1) * a.outlier_bytes);
        outlier_tile<MT>(a.outliers, to, pitch, a.m, first + tile * rows, rows, thread / 32,
                         tile == 0);
        qt_double_buffer_commit(SKINNY_SYNC, tile, threads + a.outliers.warps * 32);
    }
}

/* ---- kernel ---------------------------------------------------------------------------------- */

template <int MT, int STRIPS, int LAST>
__global__ void __launch_bounds__(qt_mix24_skinny_warps(MT, STRIPS, LAST) * 32, 1)
    qt_mix24_skinny_kernel(const __grid_constant__ qt_mix24_skinny_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const int threads =
        (int)blockDim.x - QT_PRODUCER_THREADS - a.outliers.warps * 32; /* consumer threads */
    const qt_pipeline r = qt_pipeline_make(ptx_shared(qt_smem) + a.barriers_at);
    const skinny_warp w = skinny_warp_open(a, warp, threads);
    if (warp * 32 >= threads + QT_PRODUCER_THREADS) {
        ptx_launch_dependents();
        mix24_skinny_outliers<MT>(a, w.warps_n * STRIPS * 16 + 4, threads,
                                  (int)threadIdx.x - threads - QT_PRODUCER_THREADS);
    } else if (warp * 32 >= threads) {
        qt_pipeline_produce(a, r, warp * 32 == threads, threads, a.arrivals,
                            mix24_skinny_producer(a));
    } else {
        ptx_launch_dependents();
        skinny_consume<MT, STRIPS, LAST>(a, r, w, threads, mix24_skinny_consumer<MT, STRIPS>(a, w));
    }
}

#endif
