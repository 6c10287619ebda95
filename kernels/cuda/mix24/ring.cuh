/*
 * The mix24 ring kernel: Y = X W^T for up to 32 tokens, one pass over a matrix of 2- and 4-bit
 * groups and its outliers. For devices without TMA, batch-invariant plans, and matrices that do not
 * fit the other kernels.
 *
 *   grid       (cluster, row groups): a cluster of `cluster` thread blocks computes strips_cta
 *              strips of 16 rows; thread block r of the cluster takes the r-th part of their units
 *              (128 columns)
 *   block      `warps` = WN x WK warps: WK along k, WN along rows. A pass is WN * STRIPS strips; in
 *              a pass a warp multiplies its part of the units of STRIPS strips
 *   smem       [ X: m rows of the thread block's columns | row pointers | partial sums | outliers |
 *              stages of each warp ]
 *
 *   mainloop:  each warp has a pipeline of `depth` stages, a unit of STRIPS strips each, filled by
 *              TMA (9.0) or cp.async; it dequantizes the records of a stage to FP16 A fragments for
 *              mma.sync, while up to depth - 1 stages are being copied
 *
 * Epilogue of a pass: the WK partial sums of an output, and the outliers of its row, are added in
 * shared memory in a fixed order. The thread blocks of a cluster send their sums to one of them,
 * which adds them in order one pass later, because by then they have usually arrived. Results do
 * not depend on timing.
 *
 * If X does not fit into shared memory, k is split into several launches, which pass on FP32 sums.
 *
 * Template parameters: MT token tiles of 8 (m <= 8 MT); STRIPS.
 *
 * Requires   compute capability 8.0 (clusters of more than one thread block: 9.0); stream, csr_col
 *            and csr_val 16-byte aligned; at most 32 units per warp
 * Traffic    packed bytes once; X once per row group; Y once, and FP32 sums between launches
 * Reference  the weights' exact values and an FP64 product; relative error <= 2.3e-4, FP16 output
 */
#ifndef QT_KERNELS_CUDA_MIX24_RING_CUH
#define QT_KERNELS_CUDA_MIX24_RING_CUH

#include "kernels/cuda/mix24/ring_epilogue.cuh"
#include "kernels/cuda/mix24/warp_mma.cuh"

/* ---- mainloop -------------------------------------------------------------------------------- */

/* X in shared memory. row[t]: address of the lane's token g of token tile t, at chunk t of a block;
 * at: offset of the unit's columns. */
template <int MT> struct mix24_x_rows {
    const uint32_t *row;
    uint32_t at;

    __device__ __forceinline__ void load(uint4 x[MT], int b, int half) const
    {
#pragma unroll
        for (int t = 0; t < MT; t++)
            x[t] = ptx_load_16(row[t] + at + b * 128 + half * 16);
    }
};

/* Products of a unit. */
template <bool FOUR, int MT, int STRIPS>
static __device__ __forceinline__ void mix24_ring_unit(qt_accumulators<MT, STRIPS> *sums,
                                                       uint32_t stage, const mix24_x_rows<MT> &x,
                                                       int lane)
{
    uint32_t record[STRIPS];
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
        record[u] = stage + u * mix24_record<FOUR>::BYTES;
    mix24_unit_mma<FOUR, MT, STRIPS>(sums, record, x, lane);
}

/* ---- kernel ---------------------------------------------------------------------------------- */

/* Prologue: starts the copies of weights, X and outliers, and waits for X. Without TMA, the weights
 * are in the first of depth - 1 cp.async groups, together with X. */
template <int STRIPS>
static __device__ __forceinline__ void mix24_begin(const qt_mix24_args &a, const mix24_warp &w,
                                                   mix24_cursor<STRIPS> *c)
{
    const int groups = MIX24_TMA ? 2 : a.depth - 1;
    uint32_t run[2] = {0, 0}, perm = mix24_perm_word(a, w, 0);
    if (a.csr_ptr) {
        const int row0 = w.first_strip * 16, row1 = row0 + min(w.pass_strips, a.strips_cta) * 16;
        run[0] = __ldg(a.csr_ptr + row0);
        run[1] = __ldg(a.csr_ptr + min(row1, a.n));
    }
    mix24_cursor_open(a, w, c);
#pragma unroll 1
    for (int i = 0; i < a.depth - 1; i++)
        mix24_copy_weights(a, w, c, w.ring + i * mix24_stage_bytes(STRIPS));
    if (a.dependent) {
        ptx_launch_dependents();
        ptx_wait_previous();
    }
    if (a.x_aligned)
        mix24_copy_x(a, w, perm);
    else
        mix24_x_ragged(a, w);
    if (groups > 1)
        ptx_copy_commit();
    if (a.csr_ptr) {
        mix24_stage_ptr(a, w);
        mix24_copy_run(a, 0, run[0], run[1]);
    }
#pragma unroll 1
    for (int i = groups > 1 ? 1 : 0; i < groups; i++)
        ptx_copy_commit();
    mix24_copy_wait(groups - 1);
    if (w.warps_n > 1 || a.bf16)
        __syncthreads();
    else
        __syncwarp();
    if (a.bf16) {
        mix24_bf16_to_f16(a, (w.cta_unit1 - w.cta_unit0) * QT_MIX24_UNIT_COLS,
                          (int *)(qt_smem + a.top_at));
        __syncthreads();
    }
}

/* Waits for the outliers of a pass. They were copied in the pass's first cp.async group, or in the
 * last group before the first pass. With TMA there are no other groups. */
static __device__ __forceinline__ void mix24_wait_run(const qt_mix24_args &a, int units)
{
    if (MIX24_TMA || units < a.depth)
        mix24_copy_wait(MIX24_TMA || units == 0 ? 0 : units - 1);
}

/* Starts the copies of the outliers of the next pass; all threads have passed the barriers of this
 * one. */
static __device__ __forceinline__ void mix24_next_run(const qt_mix24_args &a, const mix24_warp &w,
                                                      int pass)
{
    const int row0 = (w.first_strip + (pass + 1) * w.pass_strips) * 16;
    if (pass + 1 == a.passes)
        return;
    mix24_copy_run(
        a, pass + 1, *mix24_row_ptr(a, w, 0, row0),
        *mix24_row_ptr(a, w, 0, min(row0 + w.pass_strips * 16, (w.last_strip + 1) * 16)));
    if (MIX24_TMA || w.count == 0) /* no later commit of this warp */
        ptx_copy_commit();
}

template <int MT, int STRIPS>
__global__ void __launch_bounds__(512, 1) qt_mix24_kernel(const __grid_constant__ qt_mix24_args a)
{
    const mix24_warp w = mix24_warp_open<STRIPS>(a);
    mix24_cursor<STRIPS> c;
    if (threadIdx.x == 0)
        *(int *)(qt_smem + a.long_at) = 0;
    if (a.cluster > 1 && threadIdx.x == 0) {
        ptx_barrier_init(ptx_shared(qt_smem) + (uint32_t)a.barrier_at, 1);
        ptx_barrier_init(ptx_shared(qt_smem) + (uint32_t)a.barrier_at + 8, 1);
    }
    mix24_ring_open<STRIPS>(a, w);
    ptx_barrier_init_fence();
    __syncwarp();
    if (a.cluster > 1)
        ptx_cluster_arrive();
    mix24_begin<STRIPS>(a, w, &c);

    uint32_t x_row[MT]; /* results of tokens >= m are not stored */
#pragma unroll
    for (int t = 0; t < MT; t++) {
        x_row[t] = ptx_shared(qt_smem) +
                   (uint32_t)(min(t * 8 + w.lane / 4, a.m - 1) * a.x_pitch + w.lane % 4 * 32 +
                              (w.unit0 - w.cta_unit0) * MIX24_UNIT_BYTES);
        asm volatile("" : "+r"(x_row[t]));
    }
    const uint32_t last = w.ring + (uint32_t)(a.depth - 1) * mix24_stage_bytes(STRIPS);
    uint32_t stage = w.ring, unused = last, rounds = 0;
#pragma unroll 1
    for (int pass = 0; pass < a.passes; pass++) {
        qt_accumulators<MT, STRIPS> sums = {};
        uint32_t fours = w.fours;
#pragma unroll 1
        for (int unit = 0; unit < w.count; unit++) {
            mix24_wait_stage<STRIPS>(a, stage, rounds & 1);
            __syncwarp(); /* lanes read each other's copies; the previous stage has been read */
            mix24_copy_weights(a, w, &c, unused);
            if (!MIX24_TMA)
                ptx_copy_commit();
            const mix24_x_rows<MT> x = {x_row, (uint32_t)unit * MIX24_UNIT_BYTES};
            if (fours & 1)
                mix24_ring_unit<true, MT, STRIPS>(&sums, stage, x, w.lane);
            else
                mix24_ring_unit<false, MT, STRIPS>(&sums, stage, x, w.lane);
            fours >>= 1;
            unused = stage;
            rounds += stage == last;
            stage = stage == last ? w.ring : stage + mix24_stage_bytes(STRIPS);
        }
        if (a.csr_ptr)
            mix24_wait_run(a, w.count);
        mix24_pass_epilogue(a, w, sums, pass);
        if (a.csr_ptr)
            mix24_next_run(a, w, pass);
    }
    if (a.cluster > 1)
        mix24_add_blocks(a, w, a.passes - 1);
}

#endif
