/*
 * The ring mix24 kernel: Y = X W^T for up to 32 tokens, one pass over a matrix of 2- and 4-bit
 * groups, its outliers included.
 *
 *   grid      (cluster, row groups): a cluster of `cluster` blocks owns strips_cta strips of 16
 *             rows; block r of it the r-th part of the units of 128 columns
 *   block     `warps` warps = WN x WK: WK side by side along k, WN along rows; a PASS is
 *             WN * STRIPS strips, and a warp's share of it its units of STRIPS strips
 *   smem      [ X: m rows of the block's columns | row pointers | sums | outliers | rings ]
 *
 *   warp:     records -- copies --> ring of depth slots, a unit of STRIPS strips each
 *                 slot u + depth - 1   its copy is started
 *                 slot u + 1, ...      on their way
 *                 slot u               scales, zeros -> codes -> FP16 fragments -> mma.sync
 *
 * At the end of a pass the WK sums of an output meet in shared memory and are added in order, and
 * with them the outliers of its row. Those of the blocks of a cluster are sent to one of them,
 * which adds them in order one pass later, when they have long been there. So results do not depend
 * on timing.
 *
 * Where X has no room in shared memory, k is cut into parts of a launch each, which pass on FP32
 * sums.
 *
 * The template: MT token tiles of 8 (m <= 8 MT); STRIPS.
 *
 * Requires    compute capability 8.0 (clusters of more than one block: 9.0); stream, csr_col and
 *             csr_val 16-byte aligned; at most 32 units a warp
 * Moves       packed bytes once; X once per row group; Y once, and FP32 sums between parts of k
 * Oracle      the weights' exact values and an FP64 product; relative error <= 2.3e-4, FP16 output
 */
#ifndef QT_KERNELS_CUDA_MIX24_RING_CUH
#define QT_KERNELS_CUDA_MIX24_RING_CUH

#include "kernels/cuda/mix24/ring_finish.cuh"
#include "kernels/cuda/mix24/slot.cuh"

/* ---- products ----------------------------------------------------------------------------------
 */

/* X as it stands in shared memory. row: token g of each tile, chunk t of a block; at: the slot's
 * columns. */
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

/* One slot. */
template <bool FOUR, int MT, int STRIPS>
static __device__ __forceinline__ void mix24_ring_slot(qt_accumulators<MT, STRIPS> *sums,
                                                       uint32_t slot, const mix24_x_rows<MT> &x,
                                                       int lane)
{
    uint32_t record[STRIPS];
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
        record[u] = slot + u * mix24_record<FOUR>::BYTES;
    mix24_slot<FOUR, MT, STRIPS>(sums, record, x, lane);
}

/* ---- the kernel --------------------------------------------------------------------------------
 */

/* Weights, X and outliers on their way; X has come. Weights that the lanes copy are in the first of
 * depth - 1 groups, with X. */
template <int STRIPS>
static __device__ __forceinline__ void mix24_begin(const qt_mix24_args &a, const mix24_warp &w,
                                                   mix24_cursor<STRIPS> *c)
{
    const int groups = MIX24_ENGINE ? 2 : a.depth - 1;
    uint32_t run[2] = {0, 0}, perm = mix24_perm_word(a, w, 0);
    if (a.csr_ptr) {
        const int row0 = w.first_strip * 16, row1 = row0 + min(w.pass_strips, a.strips_cta) * 16;
        run[0] = __ldg(a.csr_ptr + row0);
        run[1] = __ldg(a.csr_ptr + min(row1, a.n));
    }
    mix24_cursor_open(a, w, c);
#pragma unroll 1
    for (int i = 0; i < a.depth - 1; i++)
        mix24_copy_weights(a, w, c, w.ring + i * mix24_slot_bytes(STRIPS));
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

/* Outliers were copied in the first of a pass's groups, or in the last before the first pass. With
 * a copy engine there are no others. */
static __device__ __forceinline__ void mix24_wait_run(const qt_mix24_args &a, int units)
{
    if (MIX24_ENGINE || units < a.depth)
        mix24_copy_wait(MIX24_ENGINE || units == 0 ? 0 : units - 1);
}

/* Copies the outliers of the next pass; all threads have been through the barriers of this one. */
static __device__ __forceinline__ void mix24_next_run(const qt_mix24_args &a, const mix24_warp &w,
                                                      int pass)
{
    const int row0 = (w.first_strip + (pass + 1) * w.pass_strips) * 16;
    if (pass + 1 == a.passes)
        return;
    mix24_copy_run(
        a, pass + 1, *mix24_row_ptr(a, w, 0, row0),
        *mix24_row_ptr(a, w, 0, min(row0 + w.pass_strips * 16, (w.last_strip + 1) * 16)));
    if (MIX24_ENGINE || w.count == 0) /* nothing else of this warp will */
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

    uint32_t x_row[MT]; /* columns of tokens >= m are never stored */
#pragma unroll
    for (int t = 0; t < MT; t++) {
        x_row[t] = ptx_shared(qt_smem) +
                   (uint32_t)(min(t * 8 + w.lane / 4, a.m - 1) * a.x_pitch + w.lane % 4 * 32 +
                              (w.unit0 - w.cta_unit0) * MIX24_UNIT_BYTES);
        asm volatile("" : "+r"(x_row[t]));
    }
    const uint32_t last = w.ring + (uint32_t)(a.depth - 1) * mix24_slot_bytes(STRIPS);
    uint32_t slot = w.ring, unused = last, rounds = 0;
#pragma unroll 1
    for (int pass = 0; pass < a.passes; pass++) {
        qt_accumulators<MT, STRIPS> sums = {};
        uint32_t fours = w.fours;
#pragma unroll 1
        for (int unit = 0; unit < w.count; unit++) {
            mix24_wait_slot<STRIPS>(a, slot, rounds & 1);
            __syncwarp(); /* lanes read what others copied, and have read the slot before */
            mix24_copy_weights(a, w, &c, unused);
            if (!MIX24_ENGINE)
                ptx_copy_commit();
            const mix24_x_rows<MT> x = {x_row, (uint32_t)unit * MIX24_UNIT_BYTES};
            if (fours & 1)
                mix24_ring_slot<true, MT, STRIPS>(&sums, slot, x, w.lane);
            else
                mix24_ring_slot<false, MT, STRIPS>(&sums, slot, x, w.lane);
            fours >>= 1;
            unused = slot;
            rounds += slot == last;
            slot = slot == last ? w.ring : slot + mix24_slot_bytes(STRIPS);
        }
        if (a.csr_ptr)
            mix24_wait_run(a, w.count);
        mix24_finish_pass(a, w, sums, pass);
        if (a.csr_ptr)
            mix24_next_run(a, w, pass);
    }
    if (a.cluster > 1)
        mix24_add_blocks(a, w, a.passes - 1);
}

#endif
