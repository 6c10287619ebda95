/*
 * The mix24 vector kernel (GEMV): y = W x for one token, outliers included, in one launch, sm_90a.
 * With one token a launch takes microseconds, most of them spent on latencies before and after the
 * products. Therefore all loads are issued when the kernel begins, in the order in which their
 * results are needed, because later loads also return later; and no result is waited for before its
 * use.
 *
 *   grid       row groups: a thread block computes strips_cta strips of 16 rows
 *   block      12 to 16 warps = WN x WK: WK along k, WN along rows. A pass is WN x STRIPS strips;
 *              in a pass a warp multiplies its part of the units of STRIPS strips
 *   smem       [ mbarriers, a few words | stages of each warp | x | at (addresses of the groups in
 *              x) | partial sums ]
 *
 *   warp:      TMA: records --> the warp's stages, a unit of STRIPS strips each
 *              scales, zero-points -> codes -> FP16 A fragments -> mma.sync
 *   thread:    row pointers (a pass ahead) -> outliers of a row -> registers, before the products
 *              of a pass; multiplied by x after the products
 *
 * Epilogue of a pass: the threads that have the outliers of a row add the WK partial sums of its
 * output in shared memory in a fixed order. Results do not depend on timing.
 *
 * A launch multiplies one matrix, or several (qt_mix24_vector_many_kernel): each has thread blocks
 * of its own.
 *
 * Template parameter: STRIPS.
 *
 * Requires   at most 32 units per warp and 64 Ki packed columns
 * Traffic    packed bytes once; x once per row group; y once
 * Reference  the weights' exact values and an FP64 product; relative error <= 2.3e-4, FP16 output
 */
#ifndef QT_KERNELS_CUDA_MIX24_VECTOR_CUH
#define QT_KERNELS_CUDA_MIX24_VECTOR_CUH

#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/ptx_barrier.cuh"
#include "kernels/cuda/common/smem.cuh"
#include "kernels/cuda/common/token_scale.cuh"
#include "kernels/cuda/mix24/vector.h"
#include "kernels/cuda/mix24/warp_mma.cuh"

/* ---- weights --------------------------------------------------------------------------------- */

/* The next unit that a warp copies. */
struct mix24_vector_cursor {
    int remaining;  /* units of all passes still to copy */
    uint32_t units; /* of these, in this pass */
    uint32_t fours; /* bit i: the i-th next unit is a FOUR */
    uint32_t at;    /* offset of the unit in a strip, in U64 */
    int strip;      /* first strip */
};

/* Starts copying the next unit, if any. Behind the last strip of the matrix, TMA fills with zeros.
 * Called by a converged warp. */
template <int STRIPS>
static __device__ __forceinline__ void
mix24_copy_next(const qt_mix24_vector_args &a, const qt_mix24_share &share,
                mix24_vector_cursor *next, uint32_t stage, uint32_t barrier)
{
    if (next->remaining == 0)
        return;
    const bool four = next->fours & 1;
    const uint32_t bytes = (uint32_t)mix24_unit_bytes(four);
    if (ptx_elect()) {
        ptx_barrier_expect(barrier, STRIPS * bytes);
        ptx_copy_box(stage, &a.records[four], (int)next->at, next->strip, barrier);
    }
    next->remaining--;
    next->at += bytes / 8;
    next->fours >>= 1;
    if (--next->units == 0) {
        next->units = share.count;
        next->fours = share.fours;
        next->at = share.at;
        next->strip += a.pass_strips;
    }
}

/* ---- x ------------------------------------------------------------------------------------------
 *
 * x is in shared memory in the order of the channels, followed by zeros, and
 *
 *     at[packed group]     U32, shared address of the group's 16 channels
 *
 * so the permutation and x are loaded at the same time. Padding groups (0xffff) map to the last 16
 * channels, which are zero if there are padding groups.
 */

static __device__ __forceinline__ void mix24_load_x_async(const qt_mix24_vector_args &a)
{
    const uint32_t dst = ptx_shared(qt_smem) + (uint32_t)a.x_at;
    const int chunks = a.units * (QT_MIX24_UNIT_COLS / 8);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < chunks; i += (int)blockDim.x)
        ptx_copy_16_zero(dst + (uint32_t)i * 16, (const uint16_t *)a.x + (i * 8 < a.k ? i * 8 : 0),
                         i * 8 < a.k ? 16 : 0);
}

/* Copies x if it is not 16-byte aligned. */
static __device__ __noinline__ void mix24_read_x(const qt_mix24_vector_args &a)
{
    uint16_t *dst = (uint16_t *)(qt_smem + a.x_at);
    for (int i = (int)threadIdx.x; i < a.units * QT_MIX24_UNIT_COLS; i += (int)blockDim.x)
        dst[i] = i < a.k ? ((const uint16_t *)a.x)[i] : (uint16_t)0;
}

/* Stores two entries of `at`, of groups 2 * pair and 2 * pair + 1. */
static __device__ __forceinline__ void mix24_store_at(const qt_mix24_vector_args &a, int pair,
                                                      uint32_t perm)
{
    const uint32_t x0 = ptx_shared(qt_smem) + (uint32_t)a.x_at, last = (uint32_t)a.units * 8 - 1;
    *(uint2 *)(qt_smem + a.at_at + pair * 8) =
        make_uint2(x0 + min(perm & 0xffff, last) * 32, x0 + min(perm >> 16, last) * 32);
}

/* Converts BF16 x to FP16 (token_scale.cuh), by the whole thread block, after a barrier. Returns
 * the factor for the results. */
static __device__ __noinline__ float mix24_bf16_x(const qt_mix24_vector_args &a)
{
    uint4 *x = (uint4 *)(qt_smem + a.x_at);
    int *top = (int *)(qt_smem + QT_MIX24_VECTOR_TOP);
    uint32_t tops = 0;
    const int chunks = a.units * QT_MIX24_UNIT_COLS / 8;
    if (threadIdx.x == 0)
        *top = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < chunks; i += (int)blockDim.x)
        tops = qt_token_tops(tops, x[i]);
    const int most = qt_token_top(tops);
    if (threadIdx.x % 32 == 0)
        atomicMax(top, most);
    __syncthreads();
    const int up = qt_token_shift(*top);
    for (int i = (int)threadIdx.x; i < chunks; i += (int)blockDim.x)
        x[i] = qt_token_halves(x[i], up);
    __syncthreads();
    return qt_token_factor(up);
}

/* x of a unit, for mix24_unit_mma. */
struct mix24_vector_x {
    uint32_t chunk[2]; /* shared address of the lane's group, by block */

    /* at: shared address of the lane's entry of `at`. */
    __device__ __forceinline__ explicit mix24_vector_x(uint32_t at)
        : chunk{ptx_load_4(at), ptx_load_4(at + 16)}
    {
    }
    /* Only lanes 0 to 3 hold the first token; results of other tokens are not stored. */
    __device__ __forceinline__ void load(uint4 x[1], int b, int half) const
    {
        x[0] = ptx_load_16_if(chunk[b] + half * 16, threadIdx.x % 32 < 4);
    }
};

/* ---- outliers -----------------------------------------------------------------------------------
 *
 * A thread takes every row_threads-th CSR entry of a row. It loads the first ones before the
 * products of a pass, when nothing else waits for loads. The entries of a long row beyond
 * MIX24_LONG per thread are shared by the whole thread block.
 */
enum { MIX24_AHEAD = 4, MIX24_LONG = 64 /* entries per thread */ };

struct mix24_outliers {
    uint32_t col[MIX24_AHEAD], val[MIX24_AHEAD];
    uint32_t next, end; /* the thread's first entry; end of the row */
};

/* Loads begin and end of row `out`, or zeros from row_end on. */
static __device__ __forceinline__ void
mix24_load_row_pointers(const qt_mix24_vector_args &a, uint32_t run[2], int out, int row_end)
{
    const bool any = a.csr_ptr && out < row_end;
    run[0] = ptx_load_global_if(a.csr_ptr + out, any);
    run[1] = ptx_load_global_if(a.csr_ptr + out + 1, any);
}

static __device__ __forceinline__ void mix24_load_outliers(const qt_mix24_vector_args &a,
                                                           mix24_outliers *o, uint32_t begin,
                                                           uint32_t end, uint32_t step)
{
    o->next = begin;
    o->end = end;
#pragma unroll
    for (uint32_t i = 0; i < MIX24_AHEAD; i++) {
        const uint32_t e = begin + i * step;
        o->col[i] = ptx_load_global_16_if(a.csr_col + e, e < end);
        o->val[i] = ptx_load_global_16_if(a.csr_val + e, e < end);
    }
}

/* x of a packed column: address of its 16 channels, then the value. */
static __device__ __forceinline__ uint32_t mix24_x_chunk(const qt_mix24_vector_args &a,
                                                         uint32_t col)
{
    return ptx_load_4(ptx_shared(qt_smem) + (uint32_t)a.at_at + (col >> 4) * 4);
}

static __device__ __forceinline__ float mix24_x_value(uint32_t chunk, uint32_t col)
{
    return qt_widen(false, (uint16_t)ptx_load_2(chunk + (col & 15) * 2));
}

/* Adds val * x for entries begin, begin + step, ..., which it loads. */
static __device__ __noinline__ float mix24_add_entries(const qt_mix24_vector_args &a,
                                                       uint32_t begin, uint32_t end, uint32_t step)
{
    float sum = 0;
#pragma unroll 4
    for (uint32_t e = begin; e < end; e += step) {
        const uint32_t col = __ldg(a.csr_col + e);
        sum = fmaf(qt_widen(false, __ldg(a.csr_val + e)), mix24_x_value(mix24_x_chunk(a, col), col),
                   sum);
    }
    return sum;
}

/* Multiplies the thread's outliers by x. All addresses are loaded before all values: alternating
 * loads would wait for shared memory eight times. */
static __device__ __forceinline__ float mix24_add_outliers(const qt_mix24_vector_args &a,
                                                           const mix24_outliers &o, uint32_t step)
{
    uint32_t chunk[MIX24_AHEAD];
    float x[MIX24_AHEAD], sum = 0;
    if (!a.csr_ptr)
        return 0;
#pragma unroll
    for (int i = 0; i < MIX24_AHEAD; i++)
        chunk[i] = mix24_x_chunk(a, o.col[i]);
#pragma unroll
    for (int i = 0; i < MIX24_AHEAD; i++)
        x[i] = mix24_x_value(chunk[i], o.col[i]);
#pragma unroll
    for (uint32_t i = 0; i < MIX24_AHEAD; i++)
        sum =
            o.next + i * step < o.end ? fmaf(qt_widen(false, (uint16_t)o.val[i]), x[i], sum) : sum;
    if (o.next + MIX24_AHEAD * step < o.end)
        sum += mix24_add_entries(a, o.next + MIX24_AHEAD * step, o.end, step);
    return sum;
}

/* The pass that has long rows, for even and for odd passes. */
static __device__ __forceinline__ int *mix24_long_pass(int pass)
{
    return (int *)(qt_smem + QT_MIX24_VECTOR_LONG) + (pass & 1);
}

/* Adds the remaining entries of the long rows of a pass, from row0 on, to its sums. By the whole
 * thread block. */
static __device__ __noinline__ void mix24_long_rows(const qt_mix24_vector_args &a, float *sums,
                                                    int row0, int rows)
{
    float *tail = (float *)(qt_smem + QT_MIX24_VECTOR_TAIL);
    for (int row = 0; row < rows; row++) {
        const uint32_t begin = __ldg(a.csr_ptr + row0 + row),
                       end = __ldg(a.csr_ptr + row0 + row + 1);
        const uint32_t most = (uint32_t)MIX24_LONG << a.log2_row_threads;
        if (end - begin <= most)
            continue;
        float v = mix24_add_entries(a, begin + most + threadIdx.x, end, blockDim.x);
        for (int d = 16; d; d /= 2)
            v += __shfl_xor_sync(~0u, v, d);
        if (threadIdx.x % 32 == 0)
            tail[threadIdx.x / 32] = v;
        __syncthreads();
        if (threadIdx.x == 0)
            for (int i = 0; i < (int)blockDim.x / 32; i++)
                sums[row] += tail[i];
        __syncthreads();
    }
}

/* ---- kernel ---------------------------------------------------------------------------------- */

/* The work of thread block `block` of a matrix. */
template <int STRIPS>
static __device__ __forceinline__ void mix24_vector(const qt_mix24_vector_args &a, int block)
{
    constexpr int stages = mix24_vector_stages(STRIPS);
    constexpr uint32_t stage_bytes = mix24_vector_stage_bytes(STRIPS);
    const int thread = (int)threadIdx.x, lane = thread % 32;
    const int warp = __shfl_sync(~0u, thread / 32, 0); /* makes it uniform for the compiler */
    const uint32_t smem = ptx_shared(qt_smem);

    /* The row of a pass that the thread adds up; n or more: none. */
    const int strip0 = block * a.strips_cta;
    const int rows = a.pass_strips * 16, row_threads = 1 << a.log2_row_threads;
    const int row = thread >> a.log2_row_threads, sub = thread & (row_threads - 1);
    const int row_end = min(min(strip0 + a.strips_cta, a.strips) * 16, a.n);
    int out = row < rows ? strip0 * 16 + row : a.n;
    uint32_t run[2];
    const uint32_t perm = ptx_load_global_if(a.perm + thread, thread < a.units * 4);
    mix24_load_row_pointers(a, run, out, row_end);
    if (!a.dependent && a.x_aligned)
        mix24_load_x_async(a);

    const qt_mix24_share share = a.share[warp];
    const uint32_t barriers = smem + (uint32_t)(warp * stages) * 8;
    const uint32_t ring = smem + QT_MIX24_VECTOR_RINGS + (uint32_t)(warp * stages) * stage_bytes;
    if (ptx_elect()) {
#pragma unroll
        for (int i = 0; i < stages; i++)
            ptx_barrier_init(barriers + (uint32_t)i * 8, 1);
        ptx_barrier_init_fence();
    }
    __syncwarp();
    mix24_vector_cursor next = {share.count * a.passes, share.count, share.fours, share.at,
                                strip0 + share.strip};
#pragma unroll
    for (int i = 0; i < stages; i++)
        mix24_copy_next<STRIPS>(a, share, &next, ring + (uint32_t)i * stage_bytes,
                                barriers + (uint32_t)i * 8);
    if (a.dependent) {
        ptx_launch_dependents();
        ptx_wait_previous();
        if (a.x_aligned)
            mix24_load_x_async(a);
    }
    if (!a.x_aligned)
        mix24_read_x(a);
    ptx_copy_commit();
    if (thread < 2)
        *mix24_long_pass(thread) = 0;
    if (thread < a.units * 4)
        mix24_store_at(a, thread, perm);
    for (int i = thread + (int)blockDim.x; i < a.units * 4; i += (int)blockDim.x)
        mix24_store_at(a, i, __ldg(a.perm + i));
    float factor = a.factor;
    ptx_copy_wait<0>();
    __syncthreads();
    if (a.bf16)
        factor *= mix24_bf16_x(a);

    const uint32_t x_at = smem + (uint32_t)a.at_at + (uint32_t)share.unit * QT_MIX24_VECTOR_AT +
                          (uint32_t)(lane % 4 * 4);
    uint32_t stage = ring, barrier = barriers, parity = 0;
#pragma unroll 1
    for (int pass = 0; pass < a.passes; pass++) {
        const uint32_t most = run[0] + ((uint32_t)MIX24_LONG << a.log2_row_threads);
        mix24_outliers outliers;
        if (run[1] > most)
            *mix24_long_pass(pass) = pass + 1;
        mix24_load_outliers(a, &outliers, run[0] + (uint32_t)sub, min(run[1], most),
                            (uint32_t)row_threads);
        const int this_out = out;
        out += rows;
        mix24_load_row_pointers(a, run, out, pass + 1 < a.passes ? row_end : 0);
        qt_accumulators<1, STRIPS> sums = {};
        uint32_t fours = share.fours;
#pragma unroll 1
        for (uint32_t unit = 0; unit < share.count; unit++) {
            const mix24_vector_x x(x_at + unit * QT_MIX24_VECTOR_AT);
            uint32_t record[STRIPS];
#pragma unroll
            for (int u = 0; u < STRIPS; u++)
                record[u] = stage + (uint32_t)(u * mix24_unit_bytes(fours & 1));
            ptx_barrier_wait(barrier, parity);
            if (fours & 1)
                mix24_unit_mma<true, 1, STRIPS>(&sums, record, x, lane);
            else
                mix24_unit_mma<false, 1, STRIPS>(&sums, record, x, lane);
            fours >>= 1;
            __syncwarp(); /* all lanes have read the stage */
            mix24_copy_next<STRIPS>(a, share, &next, stage, barrier);
            stage += stage_bytes;
            barrier += 8;
            if (stage == ring + stages * stage_bytes) {
                stage = ring;
                barrier = barriers;
                parity ^= 1;
            }
        }
        float v = mix24_add_outliers(a, outliers, (uint32_t)row_threads);
        const int pitch = rows + 4;
        float *to = (float *)(qt_smem + a.sums_at) + (pass & 1) * a.warps_k * pitch;
        qt_accumulators_store(to + share.warp_of_k * pitch + share.strip * 16, pitch, 1, sums);
        __syncthreads();
        if (*mix24_long_pass(pass) == pass + 1) {
            const int row0 = strip0 * 16 + pass * rows;
            mix24_long_rows(a, to, row0, min(rows, row_end - row0));
        }
        if (row < rows)
#pragma unroll 2
            for (int j = sub; j < a.warps_k; j += row_threads)
                v += to[j * pitch + row];
#pragma unroll
        for (int d = 16; d; d /= 2)
            if (d < row_threads)
                v += __shfl_xor_sync(~0u, v, d);
        if (sub == 0 && this_out < row_end)
            qt_put_rounded(a.y, (size_t)this_out, v * factor, a.bf16);
    }
}

template <int STRIPS>
__global__ void __launch_bounds__(QT_MIX24_VECTOR_WARPS * 32, 1)
    qt_mix24_vector_kernel(const __grid_constant__ qt_mix24_vector_args a)
{
    mix24_vector<STRIPS>(a, (int)blockIdx.x);
}

template <int STRIPS>
__global__ void __launch_bounds__(QT_MIX24_VECTOR_WARPS * 32, 1)
    qt_mix24_vector_many_kernel(const __grid_constant__ qt_mix24_vector_many_args many)
{
    int i = 0;
#pragma unroll
    for (int j = 1; j < QTOOL_MATMUL_MANY; j++)
        i += (int)blockIdx.x >= many.first[j];
    mix24_vector<STRIPS>(many.args[i], (int)blockIdx.x - many.first[i]);
}

#endif
