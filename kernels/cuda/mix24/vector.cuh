/*
 * The mix24 kernel for one token: y = W x, outliers included, in one launch. Where a matrix takes a
 * few microseconds, most of them are waits before and after the products. So all that is wanted is
 * asked for when the kernel begins, in the order in which it is wanted, as what is asked for later
 * comes later; and nothing is waited for before it is used.
 *
 *   grid      row groups: a block owns strips_cta strips of 16 rows
 *   block     12 to 16 warps = WN x WK: WK side by side along k, WN along rows; a PASS is WN x
 *             STRIPS strips, and a warp's share of it its units of STRIPS strips
 *   smem      [ barriers, a few words | rings | x as it is | at | sums ]
 *
 *   warp:     records -- copy engine --> ring, a slot a unit of STRIPS strips
 *                 scales, zeros -> codes -> FP16 fragments -> mma.sync
 *   thread:   row pointers, a pass ahead -> outliers of a row -> registers, before the products of
 *             a pass; times x, after them
 *
 * At the end of a pass the WK sums of an output meet in shared memory and are added in order, by
 * the threads that have the outliers of its row. So results do not depend on timing.
 *
 * The template: STRIPS.
 *
 * Requires    compute capability 9.0; at most 32 units a warp and 64 Ki packed columns
 * Moves       packed bytes once; x once per row group; y once
 * Oracle      the weights' exact values and an FP64 product; relative error <= 2.3e-4, FP16 output
 */
#ifndef QT_KERNELS_CUDA_MIX24_VECTOR_CUH
#define QT_KERNELS_CUDA_MIX24_VECTOR_CUH

#include "kernels/cuda/common/ptx_barrier.cuh"
#include "kernels/cuda/common/round.cuh"
#include "kernels/cuda/common/token_scale.cuh"
#include "kernels/cuda/mix24/slot.cuh"
#include "kernels/cuda/mix24/vector.h"

extern __shared__ __align__(1024) unsigned char qt_smem[];

/* ---- weights -----------------------------------------------------------------------------------
 */

/* Which unit of its share a warp copies next. */
struct mix24_walk {
    int left;       /* units of all passes */
    uint32_t units; /* of these, in this pass */
    uint32_t fours; /* bit i: the i-th from here is a FOUR */
    uint32_t at;    /* U64 of a strip before it */
    int strip;      /* the first */
};

/* Starts copying the next unit, if there is one. Behind the last strip of the matrix the copy
 * engine finds zeros. By a warp that has not diverged. */
template <int STRIPS>
static __device__ __forceinline__ void
mix24_copy_next(const qt_mix24_vector_args &a, const qt_mix24_share &share, mix24_walk *next,
                uint32_t slot, uint32_t barrier)
{
    if (next->left == 0)
        return;
    const bool four = next->fours & 1;
    const uint32_t bytes = (uint32_t)mix24_unit_bytes(four);
    if (ptx_elect()) {
        ptx_barrier_expect(barrier, STRIPS * bytes);
        ptx_copy_box(slot, &a.records[four], (int)next->at, next->strip, barrier);
    }
    next->left--;
    next->at += bytes / 8;
    next->fours >>= 1;
    if (--next->units == 0) {
        next->units = share.count;
        next->fours = share.fours;
        next->at = share.at;
        next->strip += a.pass_strips;
    }
}

/* ---- x -----------------------------------------------------------------------------------------
 *
 * x is in shared memory as it is, zero behind k, and
 *
 *     at[packed group]     U32, where its chunk of 16 channels is: a shared address
 *
 * so that the permutation and x are read at the same time. Padding groups (0xffff) are the last
 * chunk, which is zero if there are any.
 */

static __device__ __forceinline__ void mix24_ask_x(const qt_mix24_vector_args &a)
{
    const uint32_t dst = ptx_shared(qt_smem) + (uint32_t)a.x_at;
    const int chunks = a.units * (QT_MIX24_UNIT_COLS / 8);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < chunks; i += (int)blockDim.x)
        ptx_copy_16_zero(dst + (uint32_t)i * 16, (const uint16_t *)a.x + (i * 8 < a.k ? i * 8 : 0),
                         i * 8 < a.k ? 16 : 0);
}

/* Where its elements are not 16-byte aligned. */
static __device__ __noinline__ void mix24_read_x(const qt_mix24_vector_args &a)
{
    uint16_t *dst = (uint16_t *)(qt_smem + a.x_at);
    for (int i = (int)threadIdx.x; i < a.units * QT_MIX24_UNIT_COLS; i += (int)blockDim.x)
        dst[i] = i < a.k ? ((const uint16_t *)a.x)[i] : (uint16_t)0;
}

/* Two entries of `at`, of groups 2 * pair and the next. */
static __device__ __forceinline__ void mix24_put_at(const qt_mix24_vector_args &a, int pair,
                                                    uint32_t perm)
{
    const uint32_t x0 = ptx_shared(qt_smem) + (uint32_t)a.x_at, last = (uint32_t)a.units * 8 - 1;
    *(uint2 *)(qt_smem + a.at_at + pair * 8) =
        make_uint2(x0 + min(perm & 0xffff, last) * 32, x0 + min(perm >> 16, last) * 32);
}

/* BF16 to FP16 (token_scale.cuh), by the whole block, which has met. Returns what sums are to be
 * multiplied by. */
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

/* x of a unit, for mix24_slot. */
struct mix24_vector_x {
    uint32_t chunk[2]; /* the lane's, by block */

    /* at: the lane's entry of the unit. */
    __device__ __forceinline__ explicit mix24_vector_x(uint32_t at)
        : chunk{ptx_load_4(at), ptx_load_4(at + 16)}
    {
    }
    /* Of the lanes that hold the first token; columns of others are never stored. */
    __device__ __forceinline__ void load(uint4 x[1], int b, int half) const
    {
        x[0] = ptx_load_16_if(chunk[b] + half * 16, threadIdx.x % 32 < 4);
    }
};

/* ---- outliers ----------------------------------------------------------------------------------
 *
 * Of a row, a thread takes every row_threads-th entry of the CSR. It loads the first of them before
 * the products of a pass, for nothing else waits for them then. What a long row has beyond some for
 * each thread is dealt out to the whole block.
 */
enum { MIX24_AHEAD = 4, MIX24_LONG = 64 /* of a thread */ };

struct mix24_outliers {
    uint32_t col[MIX24_AHEAD], val[MIX24_AHEAD];
    uint32_t next, end; /* entries: the thread's first, and the end of those of the row */
};

/* Begin and end of row `out`, if it is one. */
static __device__ __forceinline__ void mix24_ask_row(const qt_mix24_vector_args &a, uint32_t run[2],
                                                     int out, int row_end)
{
    const bool any = a.csr_ptr && out < row_end;
    run[0] = ptx_load_global_if(a.csr_ptr + out, any);
    run[1] = ptx_load_global_if(a.csr_ptr + out + 1, any);
}

static __device__ __forceinline__ void mix24_ask_outliers(const qt_mix24_vector_args &a,
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

/* x of a packed column: where its chunk is, then the value. */
static __device__ __forceinline__ uint32_t mix24_x_chunk(const qt_mix24_vector_args &a,
                                                         uint32_t col)
{
    return ptx_load_4(ptx_shared(qt_smem) + (uint32_t)a.at_at + (col >> 4) * 4);
}

static __device__ __forceinline__ float mix24_x_value(uint32_t chunk, uint32_t col)
{
    return qt_widen(false, (uint16_t)ptx_load_2(chunk + (col & 15) * 2));
}

/* Entries from `begin` on that have not been loaded, times x. */
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

/* The thread's outliers times x. What is read is read together: one after the other, places and
 * values would wait for shared memory eight times. */
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

/* Which pass has long rows; that of even and of odd ones. */
static __device__ __forceinline__ int *mix24_long_pass(int pass)
{
    return (int *)(qt_smem + QT_MIX24_VECTOR_LONG) + (pass & 1);
}

/* The rest of the long rows of a pass, from row0 on, into its sums. By the whole block. */
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

/* ---- the kernel --------------------------------------------------------------------------------
 */

template <int STRIPS>
__global__ void __launch_bounds__(QT_MIX24_VECTOR_WARPS * 32, 1)
    qt_mix24_vector_kernel(const __grid_constant__ qt_mix24_vector_args a)
{
    constexpr int slots = mix24_vector_slots(STRIPS);
    constexpr uint32_t slot_bytes = mix24_vector_slot_bytes(STRIPS);
    const int thread = (int)threadIdx.x, lane = thread % 32;
    const int warp = __shfl_sync(~0u, thread / 32, 0); /* tell the compiler: uniform */
    const uint32_t smem = ptx_shared(qt_smem);

    /* Who adds up which row of a pass; n and more: none. */
    const int strip0 = (int)blockIdx.x * a.strips_cta;
    const int rows = a.pass_strips * 16, row_threads = 1 << a.log2_row_threads;
    const int row = thread >> a.log2_row_threads, sub = thread & (row_threads - 1);
    const int row_end = min(min(strip0 + a.strips_cta, a.strips) * 16, a.n);
    int out = row < rows ? strip0 * 16 + row : a.n;
    uint32_t run[2];
    const uint32_t perm = ptx_load_global_if(a.perm + thread, thread < a.units * 4);
    mix24_ask_row(a, run, out, row_end);
    if (!a.dependent && a.x_aligned)
        mix24_ask_x(a);

    const qt_mix24_share share = a.share[warp];
    const uint32_t barriers = smem + (uint32_t)(warp * slots) * 8;
    const uint32_t ring = smem + QT_MIX24_VECTOR_RINGS + (uint32_t)(warp * slots) * slot_bytes;
    if (ptx_elect()) {
#pragma unroll
        for (int i = 0; i < slots; i++)
            ptx_barrier_init(barriers + (uint32_t)i * 8, 1);
        ptx_barrier_init_fence();
    }
    __syncwarp();
    mix24_walk next = {share.count * a.passes, share.count, share.fours, share.at,
                       strip0 + share.strip};
#pragma unroll
    for (int i = 0; i < slots; i++)
        mix24_copy_next<STRIPS>(a, share, &next, ring + (uint32_t)i * slot_bytes,
                                barriers + (uint32_t)i * 8);
    if (a.dependent) {
        ptx_launch_dependents();
        ptx_wait_previous();
        if (a.x_aligned)
            mix24_ask_x(a);
    }
    if (!a.x_aligned)
        mix24_read_x(a);
    ptx_copy_commit();
    if (thread < 2)
        *mix24_long_pass(thread) = 0;
    if (thread < a.units * 4)
        mix24_put_at(a, thread, perm);
    for (int i = thread + (int)blockDim.x; i < a.units * 4; i += (int)blockDim.x)
        mix24_put_at(a, i, __ldg(a.perm + i));
    float factor = a.factor;
    ptx_copy_wait<0>();
    __syncthreads();
    if (a.bf16)
        factor *= mix24_bf16_x(a);

    const uint32_t x_at = smem + (uint32_t)a.at_at + (uint32_t)share.unit * QT_MIX24_VECTOR_AT +
                          (uint32_t)(lane % 4 * 4);
    uint32_t slot = ring, barrier = barriers, parity = 0;
#pragma unroll 1
    for (int pass = 0; pass < a.passes; pass++) {
        const uint32_t most = run[0] + ((uint32_t)MIX24_LONG << a.log2_row_threads);
        mix24_outliers outliers;
        if (run[1] > most)
            *mix24_long_pass(pass) = pass + 1;
        mix24_ask_outliers(a, &outliers, run[0] + (uint32_t)sub, min(run[1], most),
                           (uint32_t)row_threads);
        const int here = out;
        out += rows;
        mix24_ask_row(a, run, out, pass + 1 < a.passes ? row_end : 0);
        qt_accumulators<1, STRIPS> sums = {};
        uint32_t fours = share.fours;
#pragma unroll 1
        for (uint32_t unit = 0; unit < share.count; unit++) {
            const mix24_vector_x x(x_at + unit * QT_MIX24_VECTOR_AT);
            uint32_t record[STRIPS];
#pragma unroll
            for (int u = 0; u < STRIPS; u++)
                record[u] = slot + (uint32_t)(u * mix24_unit_bytes(fours & 1));
            ptx_barrier_wait(barrier, parity);
            if (fours & 1)
                mix24_slot<true, 1, STRIPS>(&sums, record, x, lane);
            else
                mix24_slot<false, 1, STRIPS>(&sums, record, x, lane);
            fours >>= 1;
            __syncwarp(); /* all have read the slot */
            mix24_copy_next<STRIPS>(a, share, &next, slot, barrier);
            slot += slot_bytes;
            barrier += 8;
            if (slot == ring + slots * slot_bytes) {
                slot = ring;
                barrier = barriers;
                parity ^= 1;
            }
        }
        float v = mix24_add_outliers(a, outliers, (uint32_t)row_threads);
        const int pitch = rows + 4;
        float *to = (float *)(qt_smem + a.sums_at) + (pass & 1) * a.warps_k * pitch;
        qt_sums_put(to + share.warp_of_k * pitch + share.strip * 16, pitch, 1, sums);
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
        if (sub == 0 && here < row_end)
            qt_put_rounded(a.y, (size_t)here, v * factor, a.bf16);
    }
}

#endif
