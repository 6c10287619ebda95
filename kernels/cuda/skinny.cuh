/*
 * The skinny kernel: Y = X W^T for up to 16 tokens, sm_90a. A block has whole rows, so that nothing
 * is added between blocks, and X comes along with the weights:
 *
 *   grid      one block a multiprocessor, each strips_cta strips of 16 rows, in tiles of
 * tile_strips block     WN x WK warps that multiply, WK side by side along k, STRIPS strips each;
 * and one that keeps the copy engine busy smem      [ look-up table | ring of stages | row scales |
 * partial sums | barriers ]
 *
 *   copy engine:  packed planes, group scales, X (128-byte swizzle)  --> a stage: 256 columns of k
 *   warp:         a slot of 128 columns: packed words -> A fragments --+
 *                                        X -------------- ldmatrix ----+--> mma.sync --> FP32 sums
 *
 * Slots go round the WK warps. A warp waits for the stages of its own slots alone, so the number of
 * stages is a multiple of how many it steps over: then it has seen every earlier phase of a barrier
 * that it waits for, and cannot take the phase before last for the last.
 *
 * At the end of a tile the WK partial sums of an output meet in shared memory and are added in
 * order.
 *
 * The template: Format how codes are decoded; MT token tiles of 8 (m <= 8 MT); STRIPS.
 *
 * Requires    compute capability 9.0; X FP16, k a multiple of 64, 16-byte aligned (prepare.cu makes
 *             such)
 * Moves       packed bytes once; X once per block and tile (through L2); Y once
 * Oracle      qt_packed_decode and an FP64 product; relative error <= 2.3e-4 with FP16 output
 */
#ifndef QT_CUDA_SKINNY_CUH
#define QT_CUDA_SKINNY_CUH

#include "kernels/cuda/ptx_sm90.cuh"
#include "kernels/cuda/skinny.h"
#include "kernels/cuda/sums.cuh"

#include <cuda_bf16.h>

/* ---- the ring ----------------------------------------------------------------------------------
 */

struct skinny_ring {
    uint32_t full, empty; /* shared addresses of the first barriers; 8 bytes each */
    int stage;
    uint32_t parity;
};

static __device__ __forceinline__ void skinny_ring_step(skinny_ring *r, int by, int stages)
{
    for (r->stage += by; r->stage >= stages; r->stage -= stages)
        r->parity ^= 1;
}

static __device__ __forceinline__ void skinny_ring_next(skinny_ring *r, int stages)
{
    if (++r->stage == stages) {
        r->stage = 0;
        r->parity ^= 1;
    }
}

/* Bits of plane p. */
template <class Format> static __device__ __forceinline__ constexpr int skinny_width(int p)
{
    return p == 0 ? Format::WIDTH0 : p == 1 ? Format::WIDTH1 : Format::WIDTH2;
}

/*
 * The threads that copy, of two warps: all stages of all tiles. Weights do not depend on the
 * previous kernel; X does.
 */
template <class Format>
static __device__ __forceinline__ void skinny_copy_weights(const qt_skinny_args &a, skinny_ring r)
{
    int strip = (int)blockIdx.x * a.strips_cta;
#pragma unroll 1
    for (int tile = 0; tile < a.tiles; tile++, strip += a.tile_strips) {
#pragma unroll 1
        for (int k_stage = 0; k_stage < a.k_stages; k_stage++) {
            const uint32_t bar = r.full + 8 * r.stage;
            const uint32_t dst = ptx_shared(qt_smem) + a.ring_at + r.stage * a.stage_bytes;
            ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
            ptx_barrier_expect(bar, (uint32_t)a.stage_tx);
#pragma unroll
            for (int p = 0; p < 3; p++)
                if (skinny_width<Format>(p))
                    ptx_copy_box(dst + a.planes_at[p], &a.plane[p],
                                 k_stage * (QT_SKINNY_BLOCKS * 16 * skinny_width<Format>(p)), strip,
                                 bar);
            if (Format::GROUPED)
                ptx_copy_box(dst + a.scales_at, &a.scales,
                             (k_stage * QT_SKINNY_BLOCKS * 64 >> a.group_shift) * 4, strip, bar);
            skinny_ring_next(&r, a.stages);
        }
    }
}

static __device__ __forceinline__ void skinny_copy_x(const qt_skinny_args &a, skinny_ring r)
{
    if (a.dependent)
        ptx_wait_previous();
#pragma unroll 1
    for (int tile = 0; tile < a.tiles; tile++) {
#pragma unroll 1
        for (int k_stage = 0; k_stage < a.k_stages; k_stage++) {
            ptx_barrier_wait(r.empty + 8 * r.stage, r.parity ^ 1);
            ptx_copy_box_3d(ptx_shared(qt_smem) + a.ring_at + r.stage * a.stage_bytes, &a.x, 0,
                            a.token0, k_stage * QT_SKINNY_BLOCKS, r.full + 8 * r.stage);
            skinny_ring_next(&r, a.stages);
        }
    }
}

/* ---- products ----------------------------------------------------------------------------------
 */

/* Where a lane of a warp reads in a stage. */
template <class Format, int STRIPS> struct skinny_source {
    int words[STRIPS][3]; /* of the first block */
    int scales[STRIPS];   /* of its two rows, first group */
    int x;                /* for ldmatrix, first half of a block of the first token tile */

    __device__ __forceinline__ skinny_source(const qt_skinny_args &a, int wn)
    {
        const int lane = (int)threadIdx.x % 32;
        x = lane % 8 * 128 + ((lane / 8 ^ lane % 8) * 16);
#pragma unroll
        for (int u = 0; u < STRIPS; u++) {
            int strip = min(wn * STRIPS + u, a.tile_strips - 1);
#pragma unroll
            for (int i = 0; i < 3; i++) {
                const int width = skinny_width<Format>(i);
                words[u][i] =
                    a.planes_at[i] + strip * (QT_SKINNY_BLOCKS * 128 * width) + lane * 4 * width;
            }
            scales[u] = a.scales_at + strip * a.stage_groups * 32 + lane / 4 * 4;
        }
    }
};

/* One slot of a stage at shared address `stage`. */
template <class Format, int MT, int STRIPS>
static __device__ __forceinline__ void
skinny_slot(qt_sums<MT, STRIPS> *total, const qt_skinny_args &a,
            const skinny_source<Format, STRIPS> &from, int stage, int slot, uint32_t lane_bytes)
{
    qt_sums<MT, STRIPS> group = {}, *sums = Format::GROUPED ? &group : total;
    const unsigned char *base = qt_smem + stage;
    const unsigned char *scales[STRIPS];
    const int group_at = a.stage_groups > 1 ? slot * a.slot_groups * 32 : 0;
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
        scales[u] = base + from.scales[u] + group_at;
    const uint32_t x_row = ptx_shared(base) + from.x + slot * (2 * MT * 1024);
#pragma unroll
    for (int b = 0; b < 2; b++) {
        Format words[STRIPS];
#pragma unroll
        for (int u = 0; u < STRIPS; u++) {
            const unsigned char *src[3];
#pragma unroll
            for (int i = 0; i < 3; i++)
                src[i] = base + from.words[u][i] + (slot * 2 + b) * 128 * skinny_width<Format>(i);
            words[u].load(src, a.decode);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t x[MT][4];
#pragma unroll
            for (int t = 0; t < MT; t++)
                ptx_ldmatrix_x4(x[t], (x_row ^ half * 64) + (b * MT + t) * 1024);
#pragma unroll
            for (int s = 0; s < 2; s++)
#pragma unroll
                for (int u = 0; u < STRIPS; u++) {
                    uint32_t frag[4];
                    words[u].fragment(frag, 2 * half + s, lane_bytes);
#pragma unroll
                    for (int t = 0; t < MT; t++)
                        ptx_mma_f16(sums->v[u][t], frag, x[t][2 * s], x[t][2 * s + 1]);
                }
            if (Format::GROUPED && half == 0 && a.slot_groups == 4)
                qt_sums_flush<MT, STRIPS>(total, sums, scales, 64 * b);
        }
        if (Format::GROUPED && b == 0 && a.slot_groups >= 2)
            qt_sums_flush<MT, STRIPS>(total, sums, scales, a.slot_groups == 4 ? 32 : 0);
    }
    if (Format::GROUPED)
        qt_sums_flush<MT, STRIPS>(total, sums, scales, 32 * (a.slot_groups - 1));
}

/* ---- results -----------------------------------------------------------------------------------
 *
 * Partial sums in shared memory: [warps_k][m][rows of a tile, rounded up to warps + 4]; the 4 so
 * that the four tokens that a warp writes at a time lie in different banks.
 */
template <int MT, int STRIPS>
static __device__ __forceinline__ void skinny_put(float *to, int pitch, int m, int wn,
                                                  const qt_sums<MT, STRIPS> &sums)
{
    const int lane = (int)threadIdx.x % 32, token0 = lane % 4 * 2;
    to += wn * STRIPS * 16 + lane / 4;
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int token = t * 8 + token0 + h;
            if (token < m)
#pragma unroll
                for (int u = 0; u < STRIPS; u++) {
                    to[token * pitch + u * 16] = sums.v[u][t][h];
                    to[token * pitch + u * 16 + 8] = sums.v[u][t][2 + h];
                }
        }
}

/* The sums over warps_k of the strips of a tile -> Y; token, row: the thread's first output. */
static __device__ __forceinline__ void skinny_finish(const qt_skinny_args &a, const float *part,
                                                     int pitch, int tile, int threads, int token,
                                                     int row, bool row_scale)
{
    const int rows = a.tile_strips * 16, first = ((int)blockIdx.x * a.tiles + tile) * rows;
    const int step = pitch * a.m, count = rows * a.m;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < count; i += threads) {
        const float *src = part + token * pitch + row;
        float v = 0;
#pragma unroll 4
        for (int j = 0; j < a.warps_k; j++)
            v += src[j * step];
        v *= a.token_factor ? a.factor * a.token_factor[token] : a.factor;
        if (row_scale) {
            int slot = row / 16 * 16 + 2 * (row % 8) + row / 8 % 2;
            v *= __half2float(((const __half *)(qt_smem + a.scale_at))[tile * rows + slot]);
        }
        if (first + row < a.n) {
            size_t at = (size_t)token * a.n + first + row;
            if (a.bf16)
                ((__nv_bfloat16 *)a.y)[at] = __float2bfloat16(v);
            else
                ((__half *)a.y)[at] = __float2half(v);
        }
        for (row += threads; row >= rows; row -= rows)
            token++;
    }
}

/* Row scales of the block's strips, in stored order. */
static __device__ __forceinline__ void skinny_load_row_scales(const qt_skinny_args &a, int threads)
{
    __half *dst = (__half *)(qt_smem + a.scale_at);
    const int first = (int)blockIdx.x * a.strips_cta;
    for (int i = (int)threadIdx.x; i < a.strips_cta * 16; i += threads)
        dst[i] = a.scale[(size_t)min(first + i / 16, a.strips - 1) * a.pitch_groups * 16 + i % 16];
}

template <class Format, int MT, int STRIPS>
static __device__ __forceinline__ void skinny_multiply_all(const qt_skinny_args &a, skinny_ring r,
                                                           int warp, int threads)
{
    const int lane = (int)threadIdx.x % 32, shift = 31 - __clz(a.warps_k);
    const int wk = warp & (a.warps_k - 1), wn = warp >> shift;
    const int warps_n = threads / 32 >> shift, pitch = warps_n * STRIPS * 16 + 4;
    const int step = a.warps_k / QT_SKINNY_SLOTS; /* stages; 0: both slots of one */
    const skinny_source<Format, STRIPS> from(a, wn);
    const uint32_t lane_bytes = (uint32_t)lane * 4;
    float *part = (float *)(qt_smem + a.sums_at);
    const int token = (int)threadIdx.x / (a.tile_strips * 16);
    const int row = (int)threadIdx.x - token * (a.tile_strips * 16);
    int n = wk; /* slot, over all tiles */
    skinny_ring_step(&r, wk / QT_SKINNY_SLOTS, a.stages);
#pragma unroll 1
    for (int tile = 0; tile < a.tiles; tile++) {
        qt_sums<MT, STRIPS> sums = {};
        const int end = (tile + 1) * a.k_stages * QT_SKINNY_SLOTS;
#pragma unroll 1
        while (n < end) {
            ptx_barrier_wait(r.full + 8 * r.stage, r.parity);
            skinny_slot<Format, MT, STRIPS>(&sums, a, from, a.ring_at + r.stage * a.stage_bytes,
                                            n & 1, lane_bytes);
            __syncwarp();
            if (lane == 0)
                ptx_barrier_arrive(r.empty + 8 * r.stage);
            skinny_ring_step(&r, step ? step : n & 1, a.stages);
            n += a.warps_k;
        }
        if (tile > 0 || a.alias)
            ptx_named_barrier(2, threads); /* the sums of the tile before have been read */
        skinny_put(part + wk * a.m * pitch, pitch, a.m, wn, sums);
        ptx_named_barrier(2, threads);
        skinny_finish(a, part, pitch, tile, threads, token, row, !Format::GROUPED);
    }
}

/* ---- the kernel --------------------------------------------------------------------------------
 */

template <class Format, int MT, int STRIPS>
__global__ void __launch_bounds__(16 * 32 + 64, 1)
    qt_skinny_kernel(const __grid_constant__ qt_skinny_args a)
{
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const int threads = (int)blockDim.x - 64; /* that multiply */
    skinny_ring r;
    r.full = ptx_shared(qt_smem) + a.barriers_at;
    r.empty = r.full + 8 * a.stages;
    r.stage = 0;
    r.parity = 0;
    if (warp * 32 >= threads) {
        const bool weights = warp * 32 == threads;
        if (weights && ptx_elect()) {
            int warps_n = threads / 32 / a.warps_k;
            for (int i = 0; i < a.stages; i++) {
                ptx_barrier_init(r.full + 8 * i, 1);
                ptx_barrier_init(r.empty + 8 * i, (uint32_t)(QT_SKINNY_SLOTS * warps_n));
            }
            ptx_barrier_init_fence();
        }
        __syncwarp();
        ptx_launch_dependents();
        if (weights) {
            ptx_named_barrier_arrive(1, threads + 64);
            if (ptx_elect())
                skinny_copy_weights<Format>(a, r);
        } else {
            ptx_named_barrier(1, threads + 64);
            if (ptx_elect())
                skinny_copy_x(a, r);
        }
    } else {
        Format::fill_table(&a.decode, Format::TABLE_BYTES ? qt_lane_value(&a.decode) : __half(),
                           threads);
        if (!Format::GROUPED)
            skinny_load_row_scales(a, threads);
        ptx_launch_dependents();
        ptx_named_barrier(1, threads + 64);
        skinny_multiply_all<Format, MT, STRIPS>(a, r, warp, threads);
    }
}

#endif
