/*
 * The mma.sync tile kernel: Y = X W^T for many tokens on devices of compute capability 8.0 and up.
 * On Hopper it runs only 4-bit integers with zero-points that TMA cannot copy.
 *
 *   grid       (output tiles, split-K); a tile is 16 STRIPS WN rows x 8 MT WM tokens
 *   block      WN x WM warps, each 16 STRIPS rows x 8 MT tokens
 *   smem       [ look-up table | stages of 64 columns of k ]; the epilogue reuses the stages
 *
 *   stage:     [ X: tokens x 128 bytes, 16-byte chunk c of row r at c ^ r % 8 | planes, strip by
 *                strip | group scales | zero-points ]            <-- cp.async -- all threads
 *   mainloop:  packed words --> A fragments --+
 *              X -- ldmatrix --> B fragments -+--> mma.sync --> FP32 accumulators
 *
 * The operands of a k-step (16 columns) are loaded during the products of the previous k-step.
 * There is one barrier per stage, before its last k-step: all warps have then read the stage, so
 * copies into it may start, and the next stage has arrived for all warps.
 *
 * Group scales: accumulators are kept in units of the scale of the current group (see tile.cuh).
 *
 * Split-K: each thread stores its accumulators in the workspace; the last thread block to arrive
 * adds them in the order of the splits, so results do not depend on timing.
 *
 * Requires   X FP16, 16-byte aligned rows of a multiple of 64 columns
 * Traffic    packed bytes once per tile of tokens, X once per tile of rows (both through L2), Y
 *            once; with split-K: 8 * splits * n * m bytes of partial sums through L2
 * Reference  qt_packed_decode and an FP64 product; relative error <= 2.3e-4 with FP16 output
 */
#ifndef QT_KERNELS_CUDA_MATMUL_MMA_TILE_CUH
#define QT_KERNELS_CUDA_MATMUL_MMA_TILE_CUH

#include "kernels/cuda/common/accumulators.cuh"
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/common/split_k.cuh"
#include "kernels/cuda/matmul/decode.cuh"
#include "kernels/cuda/matmul/mma_tile.h"

/* The work of a thread block: rows from strip0, tokens from token0, k range [k0, k1) in units of 64
 * columns. */
struct mma_tile_place {
    int strip0, token0, k0, k1;
};

/* Rasterization: bands of token tiles; within a band, all token tiles of a row tile, then the next
 * row tile. */
template <int BN, int BM>
static __device__ __forceinline__ mma_tile_place mma_tile_place_of(const qt_mma_tile_args &a)
{
    const int band = (int)blockIdx.x / (a.row_tiles * QT_MMA_TILE_BAND);
    const int in_band = (int)blockIdx.x % (a.row_tiles * QT_MMA_TILE_BAND);
    const int wide = min(QT_MMA_TILE_BAND, a.token_tiles - band * QT_MMA_TILE_BAND);
    mma_tile_place p;
    p.strip0 = in_band / wide * (BN / 16);
    p.token0 = (band * QT_MMA_TILE_BAND + in_band % wide) * BM;
    p.k0 = (int)blockIdx.y * a.split_blocks;
    p.k1 = min(p.k0 + a.split_blocks, a.blocks);
    return p;
}

/* ---- copies -------------------------------------------------------------------------------------
 *
 * The addresses that a thread copies in every stage, in units of 16 bytes from the first row of the
 * tile; a stage adds the same offset to all. Strips beyond the matrix and tokens beyond m are
 * clamped to the last one: their results are not stored.
 */
template <class Format, int THREADS, int BN, int BM> struct mma_tile_loader {
    enum { STRIPS = BN / 16, X_COPIES = BM * 8 / THREADS, W_COPIES = STRIPS * 32 / THREADS };
    uint32_t x[X_COPIES], plane[3][W_COPIES], scale;
    uint32_t x_to, w_to; /* offsets in a stage */

    __device__ __forceinline__ mma_tile_loader(const qt_mma_tile_args &a, const mma_tile_place &p)
    {
        const unsigned thread = threadIdx.x, last = (unsigned)(a.strips - 1 - p.strip0);
        x_to = thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
        w_to = BM * 128 + thread * 16;
#pragma unroll
        for (int i = 0; i < X_COPIES; i++)
            x[i] = min(thread / 8 + i * (THREADS / 8), (unsigned)(a.m - 1 - p.token0)) *
                       (uint32_t)a.blocks * 8 +
                   thread % 8;
#pragma unroll
        for (int j = 0; j < 3; j++)
#pragma unroll
            for (int i = 0; i < W_COPIES; i++) {
                const unsigned chunk = thread + i * THREADS, chunks = 2 * qt_lane_width<Format>(j);
                plane[j][i] = chunks
                                  ? min(chunk / chunks, last) * (uint32_t)a.pitch_blocks * chunks +
                                        chunk % chunks
                                  : 0;
            }
        scale = Format::GROUPED
                    ? min(thread / 2 >> (a.stage_groups - 1), last) * (uint32_t)a.pitch_groups * 2 +
                          thread % 2
                    : 0;
    }
    __device__ __forceinline__ void copy(const qt_mma_tile_args &a, const mma_tile_place &p,
                                         int block, uint32_t stage) const
    {
        const unsigned thread = threadIdx.x;
        const uint4 *from = (const uint4 *)a.x + ((size_t)p.token0 * a.blocks + block) * 8;
#pragma unroll
        for (int i = 0; i < X_COPIES; i++)
            ptx_copy_16(stage + x_to + i * (THREADS * 16), from + x[i]);
        uint32_t to = stage + w_to;
#pragma unroll
        for (int j = 0; j < 3; j++) {
            const unsigned chunks = 2 * qt_lane_width<Format>(j); /* per strip */
            from = (const uint4 *)a.plane[j] + ((size_t)p.strip0 * a.pitch_blocks + block) * chunks;
#pragma unroll
            for (int i = 0; i < W_COPIES; i++)
                if (thread + i * THREADS < STRIPS * chunks)
                    ptx_copy_16(to + i * (THREADS * 16), from + plane[j][i]);
            to += STRIPS * chunks * 16;
        }
        if (Format::GROUPED && thread < STRIPS * 2 * (unsigned)a.stage_groups) {
            const int group = (block * 64 >> a.group_shift) + (thread / 2 & (a.stage_groups - 1));
            from = (const uint4 *)a.scale + (size_t)p.strip0 * a.pitch_groups * 2;
            const uint32_t at = scale + min(group, a.groups - 1) * 2;
            ptx_copy_16(to, from + at);
            if (Format::ZEROS && a.decode.zeros) { /* the thread that copies half of a group's
                                                      scales also copies half of its zero-points */
                const unsigned char *zero =
                    a.zero + ((size_t)p.strip0 * a.pitch_groups * 2 + at) * (Format::ZEROS / 2);
                to += (STRIPS * 2 * a.stage_groups - thread) * 16 + thread * (Format::ZEROS / 2);
                if (Format::ZEROS == 8)
                    ptx_copy_4(to, zero);
                else
                    ptx_copy_8(to, zero);
            }
        }
    }
};

/* ---- mainloop -------------------------------------------------------------------------------- */

/* Converts the accumulators of strip u from units of *unit to units of scale s. */
template <int MT, int STRIPS>
static __device__ __forceinline__ void mma_tile_rescale(qt_accumulators<MT, STRIPS> *sums, int u,
                                                        float2 *unit, float2 s)
{
    const float2 f = make_float2(__fdividef(unit->x, s.x), __fdividef(unit->y, s.y));
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums->v[u][t][i] *= i < 2 ? f.x : f.y;
    *unit = s;
}

/* Addresses of a warp's operands in a stage. */
template <class Format, int WN, int WM, int STRIPS, int MT> struct mma_tile_stage {
    const unsigned char *plane[3]; /* the lane's words in the first strip */
    const unsigned char *scale;    /* of the lane's two rows in the first strip, first group */
    const unsigned char *zero;     /* of the first strip, first group */
    /* ldmatrix address for the first k-step: lane / 8 % 2 selects 8 of 16 columns, lane / 16
     * selects 8 of 16 tokens. The address of k-step s is x ^ 32 s, because lines have 128 bytes. */
    uint32_t x;

    __device__ __forceinline__ mma_tile_stage(const qt_mma_tile_args &a, int at)
    {
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
        const int strip = warp % WN * STRIPS, row = lane / 16 * 8 + lane % 8;
        at += a.ring_at;
        x = ptx_shared(qt_smem) + at + (warp / WN * (MT * 8) + row) * 128 +
            (lane / 8 % 2 ^ lane % 8) * 16;
        at += WM * MT * 8 * 128;
#pragma unroll
        for (int p = 0; p < 3; p++) {
            plane[p] = qt_smem + at + (strip * 32 + lane) * qt_lane_width<Format>(p);
            at += WN * STRIPS * 32 * qt_lane_width<Format>(p);
        }
        scale = qt_smem + at + strip * a.stage_groups * 32 + lane / 4 * 4;
        zero = qt_smem + at + (WN * STRIPS * 32 + strip * Format::ZEROS) * a.stage_groups;
    }
    /* group: number of the group in the stage. */
    __device__ __forceinline__ void set_zeros(Format words[STRIPS], const qt_mma_tile_args &a,
                                              int group) const
    {
        if (Format::ZEROS)
#pragma unroll
            for (int u = 0; u < STRIPS; u++)
                words[u].set_zeros(qt_lane_zeros<Format>(
                    a.decode, zero + (u * a.stage_groups + group) * Format::ZEROS));
    }
    __device__ __forceinline__ void load(Format words[STRIPS], const qt_mma_tile_args &a) const
    {
#pragma unroll
        for (int u = 0; u < STRIPS; u++) {
            const unsigned char *src[3];
#pragma unroll
            for (int p = 0; p < 3; p++)
                src[p] = plane[p] + u * 32 * qt_lane_width<Format>(p);
            words[u].load(src, a.decode);
        }
    }
};

/* A and B fragments of a k-step (16 columns). */
template <int MT, int STRIPS> struct mma_tile_operands {
    uint32_t a[STRIPS][4], x[MT / 2][4];

    template <class Format>
    __device__ __forceinline__ void load(const Format words[STRIPS], uint32_t x_at, int s,
                                         const qt_lane &lane)
    {
#pragma unroll
        for (int t = 0; t < MT / 2; t++)
            ptx_ldmatrix_x4(x[t], (x_at ^ s * 32) + t * 2048);
#pragma unroll
        for (int u = 0; u < STRIPS; u++)
            words[u].fragment(a[u], s, lane);
    }
    __device__ __forceinline__ void multiply(qt_accumulators<MT, STRIPS> *sums) const
    {
#pragma unroll
        for (int u = 0; u < STRIPS; u++)
#pragma unroll
            for (int t = 0; t < MT; t++)
                ptx_mma_f16(sums->v[u][t], a[u], x[t / 2][t % 2 * 2], x[t / 2][t % 2 * 2 + 1]);
    }
};

/* Whether a group begins at k-step s of the 64 columns number `block`. */
static __device__ __forceinline__ bool mma_tile_new_group(const qt_mma_tile_args &a, int block,
                                                          int s)
{
    return s == 0   ? (block * 64 & ((1 << a.group_shift) - 1)) == 0
           : s == 2 ? a.group_shift == 5
                    : false;
}

/* ---- epilogue -------------------------------------------------------------------------------- */

/* Split-K reduction: stores the accumulators in the workspace. Returns true in the last thread
 * block of the tile to arrive, with the sum over all splits in *sums. last: a word of shared
 * memory. */
template <int THREADS, int MT, int STRIPS>
static __device__ __forceinline__ bool mma_tile_split_k_reduce(const qt_mma_tile_args &a,
                                                               qt_accumulators<MT, STRIPS> *sums,
                                                               volatile int *last)
{
    const int quads = STRIPS * MT;
    float4 *tile = a.partial + (size_t)blockIdx.x * gridDim.y * quads * THREADS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < quads; i++)
        __stcg(tile + ((size_t)blockIdx.y * quads + i) * THREADS,
               *(const float4 *)sums->v[i / MT][i % MT]);
    if (!qt_last_to_arrive(&a.arrivals[blockIdx.x], gridDim.y, last))
        return false;
    *sums = {};
#pragma unroll 1
    for (unsigned split = 0; split < gridDim.y; split++)
#pragma unroll
        for (int i = 0; i < quads; i++) {
            const float4 v = __ldcg(tile + ((size_t)split * quads + i) * THREADS);
            float *sum = sums->v[i / MT][i % MT];
            sum[0] += v.x;
            sum[1] += v.y;
            sum[2] += v.z;
            sum[3] += v.w;
        }
    return true;
}

/* Epilogue: scales and rounds the accumulators, and transposes them through shared memory
 * ([tokens][rows]) for 16-byte stores. */
template <int WN, int WM, int STRIPS, int MT>
static __device__ __forceinline__ void mma_tile_store(const qt_mma_tile_args &a,
                                                      const mma_tile_place &p, unsigned char *to,
                                                      const qt_accumulators<MT, STRIPS> &sums)
{
    const int BN = WN * STRIPS * 16, BM = WM * MT * 8, PITCH = BN * 2 + QT_MMA_TILE_PAD;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int row = warp % WN * STRIPS * 16 + lane / 4;
    __syncthreads(); /* all warps have read the last stage */
#pragma unroll
    for (int t = 0; t < MT; t++) {
        const int token = warp / WN * (MT * 8) + t * 8 + lane % 4 * 2;
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++)
            factor[h] =
                a.factor * ptx_load_factor(a.token_factor + min(p.token0 + token + h, a.m - 1),
                                           a.token_factor != NULL);
#pragma unroll
        for (int u = 0; u < STRIPS; u++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t two = qt_round_two(a.bf16, sums.v[u][t][2 * i] * factor[0],
                                                  sums.v[u][t][2 * i + 1] * factor[1]);
                uint16_t *at = (uint16_t *)(to + token * PITCH) + row + u * 16 + i * 8;
                at[0] = (uint16_t)two;
                at[PITCH / 2] = (uint16_t)(two >> 16);
            }
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < BM * (BN / 8); i += WN * WM * 32) {
        const int token = p.token0 + i / (BN / 8), n0 = p.strip0 * 16 + i % (BN / 8) * 8;
        const uint4 *from = (const uint4 *)(to + i / (BN / 8) * PITCH) + i % (BN / 8);
        uint16_t *y = (uint16_t *)a.y + (size_t)token * a.n + n0;
        if (token >= a.m)
            break;
        if (a.wide_stores && n0 < a.n)
            *(uint4 *)y = *from;
        else
            for (int j = 0; j < 8 && n0 + j < a.n; j++)
                y[j] = ((const uint16_t *)from)[j];
    }
}

/* ---- kernel ---------------------------------------------------------------------------------- */

template <class Format, int WN, int WM, int STRIPS, int MT>
__global__ void __launch_bounds__(WN *WM * 32, MT == 4 ? 2 : 1)
    qt_mma_tile_kernel(const __grid_constant__ qt_mma_tile_args a)
{
    typedef mma_tile_stage<Format, WN, WM, STRIPS, MT> stage;
    const int THREADS = WN * WM * 32, BN = WN * STRIPS * 16, BM = WM * MT * 8;
    const mma_tile_place p = mma_tile_place_of<BN, BM>(a);
    const uint32_t ring = ptx_shared(qt_smem) + a.ring_at;
    const mma_tile_loader<Format, THREADS, BN, BM> loader(a, p);
#pragma unroll 1
    for (int i = 0; i < QT_MMA_TILE_STAGES; i++) {
        if (p.k0 + i < p.k1)
            loader.copy(a, p, p.k0 + i, ring + i * a.stage_bytes);
        ptx_copy_commit();
    }
    const qt_lane lane = qt_lane_start<Format>(qt_lane_value<Format>(&a.decode), THREADS);
    ptx_copy_wait<QT_MMA_TILE_STAGES - 1>();
    __syncthreads();

    qt_accumulators<MT, STRIPS> sums = {};
    mma_tile_operands<MT, STRIPS> operands[2];
    Format words[STRIPS];
    float2 unit[STRIPS];
    int now = 0; /* byte offset of the current stage */
    stage from(a, now);
    from.load(words, a);
    from.set_zeros(words, a, 0);
    operands[0].load(words, from.x, 0, lane);
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
        unit[u] = Format::GROUPED
                      ? qt_scale_unit(*(const __half2 *)(from.scale + u * a.stage_groups * 32))
                      : make_float2(1, 1);
#pragma unroll 1
    for (int block = p.k0; block < p.k1; block++) {
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const unsigned char *scale = from.scale + s / 2 * 32;
            if (s == 3 && block + 1 < p.k1) { /* all of this stage is in registers: advance */
                const int used = now;
                now = now + a.stage_bytes == QT_MMA_TILE_STAGES * a.stage_bytes
                          ? 0
                          : now + a.stage_bytes;
                ptx_copy_wait<QT_MMA_TILE_STAGES - 2>();
                __syncthreads();
                if (block + QT_MMA_TILE_STAGES < p.k1)
                    loader.copy(a, p, block + QT_MMA_TILE_STAGES, ring + used);
                ptx_copy_commit();
                from = stage(a, now);
                from.load(words, a);
                from.set_zeros(words, a, 0);
            }
            if (s == 1 && a.stage_groups == 2)
                from.set_zeros(words, a, 1);
            if (s < 3 || block + 1 < p.k1)
                operands[(s + 1) & 1].load(words, from.x, (s + 1) & 3, lane);
            if (Format::GROUPED && mma_tile_new_group(a, block, s))
#pragma unroll
                for (int u = 0; u < STRIPS; u++)
                    mma_tile_rescale(
                        &sums, u, &unit[u],
                        qt_scale_unit(*(const __half2 *)(scale + u * a.stage_groups * 32)));
            operands[s & 1].multiply(&sums);
        }
    }
#pragma unroll
    for (int u = 0; u < STRIPS; u++) {
        if (!Format::GROUPED) {
            const int strip = p.strip0 + (int)threadIdx.x / 32 % WN * STRIPS + u;
            unit[u] = __half22float2(
                *(const __half2 *)(a.scale + min(strip, a.strips - 1) * a.pitch_groups * 16 +
                                   (int)threadIdx.x % 32 / 4 * 2));
        }
#pragma unroll
        for (int t = 0; t < MT; t++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums.v[u][t][i] *= i < 2 ? unit[u].x : unit[u].y;
    }
    unsigned char *ring_at = qt_smem + a.ring_at;
    if (gridDim.y == 1 || mma_tile_split_k_reduce<THREADS, MT, STRIPS>(a, &sums, (int *)ring_at))
        mma_tile_store<WN, WM, STRIPS, MT>(a, p, ring_at, sums);
}

/* The kernel of a format by `kind`, its index in QT_MMA_TILE_TABLE. */
template <class Format> static const void *qt_mma_tile_of(int kind)
{
#define KERNEL(wn, wm, strips, tokens)                                                             \
    (const void *)qt_mma_tile_kernel<Format, wn, wm, strips, tokens / 8>,
    static const void *const kernels[] = {QT_MMA_TILE_TABLE(KERNEL)};
#undef KERNEL
    return kernels[kind];
}

#endif
