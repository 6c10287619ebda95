/*
 * What the skinny kernels share: Y = X W^T for up to 16 tokens, sm_90a. A block has whole rows, so
 * that nothing is added between blocks, and X comes along with the weights:
 *
 *   grid      one block a multiprocessor, each strips_cta strips of 16 rows, in tiles of
 *             tile_strips
 *   block     WN x WK warps that multiply, WK side by side along k, STRIPS strips each; and two
 *             that keep the copy engine busy
 *   smem      [ look-up table | ring of stages | partial sums | the kernel's own | barriers ]
 *
 *   copy engine:  packed weights, X (128-byte swizzle)  --> a stage: 256 columns of k
 *   warp:         a slot of 128 columns: packed words -> A fragments --+
 *                                        X ----------------------------+--> mma.sync --> FP32 sums
 *
 * Slots go round the WK warps. A warp waits for the stages of its own slots alone, so the number of
 * stages is a multiple of how many it steps over: then it has seen every earlier phase of a barrier
 * that it waits for, and cannot take the phase before last for the last.
 *
 * A warp gives a stage back when the sums of its slot are known, not earlier: the assembler moves
 * the arrival up to right behind the slot's last loads, which the copy engine then may overtake
 * (scales of the next round, once in some thousand runs). So the address of the barrier depends on
 * the sums.
 *
 * At the end of a tile the WK partial sums of an output meet in shared memory and are added in
 * order.
 *
 * The template: MT token tiles of 8 (m <= 8 MT); STRIPS; LAST, as many as the last warp along the
 * rows has at most, STRIPS or half of them; and Work, what differs:
 *
 *     begin_tile(slot)             before the first slot of a tile, the slot-th of k
 *     slot(sums, stage, x)         products of a slot, of as many strips as there are sums for;
 *                                  stage: offset in shared memory, x: that of its X, likewise. A
 *                                  warp's are all first slots of stages, or all second ones
 *     meet(threads, tile)          a barrier, after which the sums of the warps that multiply, and
 *                                  what else the outputs need, are in shared memory
 *     added(tile)                  sums to add, as those of a warp, or NULL
 *     row_scales(tile)             scales of its rows in stored order, or NULL
 *     f32()                        Y is FP32, not of 16 bits
 *     sum                          what sums are; INT32 as bits of FP32 until they are results
 *     value(sum, token)            what such a sum stands for, but for factors and scales
 */
#ifndef QT_KERNELS_CUDA_MATMUL_SKINNY_RING_CUH
#define QT_KERNELS_CUDA_MATMUL_SKINNY_RING_CUH

#include "kernels/cuda/common/accumulators.cuh"
#include "kernels/cuda/common/ptx_sm90.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/round.cuh"
#include "kernels/cuda/matmul/skinny.h"

/* Numbers of barriers of a part of the block. */
enum {
    SKINNY_SUMS = RING_BARRIERS,
    SKINNY_MEET,
    SKINNY_TOPS = SKINNY_MEET + RING_TURN_BARRIERS,
    SKINNY_X
};

/* ---- the ring ----------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void skinny_ring_step(qt_ring *r, int by, int stages)
{
    r->stage += by;
    if (r->stage >= stages) { /* by is no more than they are */
        r->stage -= stages;
        r->parity ^= 1;
    }
}

/* A source of qt_ring_bring but for weights. Args: of the kernel. */
template <class Args> struct skinny_source {
    const Args &a;
    int tile, k_stage;

    __device__ __forceinline__ skinny_source(const Args &args) : a(args), tile(0), k_stage(0)
    {
    }
    __device__ __forceinline__ void copy_x(uint32_t dst, uint32_t bar) const
    {
        ptx_copy_box_3d(dst, &a.x, 0, a.token0, k_stage * QT_SKINNY_BLOCKS, bar);
    }
    __device__ __forceinline__ bool brings_x() const
    {
        return a.converters == 0;
    }
    __device__ __forceinline__ int strip() const
    {
        return (int)blockIdx.x * a.strips_cta + tile * a.tile_strips;
    }
    __device__ __forceinline__ bool next()
    {
        return ++k_stage < a.k_stages;
    }
    __device__ __forceinline__ bool next_tile()
    {
        k_stage = 0;
        return ++tile < a.tiles;
    }
};

/*
 * X of a stage: for each of its blocks of 64 columns x_rows lines of 128 bytes, 16-byte chunk i of
 * line l at i ^ l % 8. There are lines for tokens that exist; for the others a warp reads what
 * comes behind, which goes into sums that nobody stores. Where chunk `chunk` of a token is, in the
 * stage:
 */
static __device__ __forceinline__ uint32_t skinny_x_at(int x_rows, int block, int token, int chunk)
{
    int line = block * x_rows + token;
    return (uint32_t)(line * 128 + (chunk ^ line % 8) * 16);
}

/* ---- results -----------------------------------------------------------------------------------
 *
 * Partial sums in shared memory: [warps_k][m][rows of a tile, rounded up to warps + 4].
 */

/* Of a Work with FP32 sums and results of 16 bits. */
struct skinny_float_sums {
    typedef float sum;

    __device__ __forceinline__ float value(float v, int) const
    {
        return v;
    }
    __device__ __forceinline__ bool f32() const
    {
        return false;
    }
};

static __device__ __forceinline__ void skinny_sum_of(float *v, float bits)
{
    *v = bits;
}

static __device__ __forceinline__ void skinny_sum_of(int *v, float bits)
{
    *v = __float_as_int(bits);
}

/* v += N partial sums of four rows, in order. */
template <int N, class Sum>
static __device__ __forceinline__ void skinny_add(Sum v[4], const float *part, int step)
{
    float4 p[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        p[j] = *(const float4 *)(part + j * step);
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float four[4] = {p[j].x, p[j].y, p[j].z, p[j].w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Sum more;
            skinny_sum_of(&more, four[i]);
            v[i] += more;
        }
    }
}

/* Four rows of Y from `at` on, of which `left` exist. */
static __device__ __forceinline__ void skinny_store(const qt_skinny_base &a, const float v[4],
                                                    size_t at, int left, bool f32)
{
    if (f32) {
        for (int i = 0; i < 4; i++)
            if (i < left)
                ((float *)a.y)[at + i] = v[i];
        return;
    }
    uint16_t *y = (uint16_t *)a.y + at;
    const uint32_t low = qt_round_two(a.bf16, v[0], v[1]);
    const uint32_t high = qt_round_two(a.bf16, v[2], v[3]);
    if (a.wide_stores) {
        if (left > 0)
            *(uint2 *)y = make_uint2(low, high);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < left)
            y[i] = (uint16_t)((i < 2 ? low : high) >> 16 * (i & 1));
}

/* Sums of a tile -> Y; token, row: the thread's first four outputs. */
template <class Work>
static __device__ __forceinline__ void skinny_finish(const qt_skinny_base &a, const Work &work,
                                                     int pitch, int tile, int token, int row)
{
    const int rows = a.tile_strips * 16, first = ((int)blockIdx.x * a.tiles + tile) * rows;
    const int step = pitch * a.m;
    const float *sums = (const float *)(qt_smem + a.sums_at), *added = work.added(tile);
    const float *factors =
        a.kept_pitch ? (const float *)(qt_smem + a.tops_at) + QT_SKINNY_TOPS : a.token_factor;
    const __half *scales = work.row_scales(tile);
#pragma unroll 1
    while (token < a.m) {
        const float *part = sums + token * pitch + row;
        const float factor = factors ? a.factor * factors[token] : a.factor;
        typename Work::sum sums4[4] = {};
        if (added)
            skinny_add<1>(sums4, added + token * pitch + row, 0);
        if (a.warps_k == 2)
            skinny_add<2>(sums4, part, step);
        else if (a.warps_k == 8)
            skinny_add<8>(sums4, part, step);
        else
#pragma unroll 1
            for (int j = 0; j < a.warps_k; j += 4)
                skinny_add<4>(sums4, part + j * step, step);
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = work.value(sums4[i], token) * factor;
            if (scales) /* in stored order */
                v[i] *= __half2float(scales[row / 16 * 16 + 2 * (row % 8 + i) + row / 8 % 2]);
        }
        skinny_store(a, v, (size_t)token * a.n + first + row, a.n - first - row, work.f32());
        token += a.finish_tokens;
        row += a.finish_rows;
        if (row >= rows) {
            row -= rows;
            token++;
        }
    }
}

/* Row scales of the block's strips, in stored order, at `to`; those of a strip so many strips'
 * scales after the one before. */
static __device__ __forceinline__ void skinny_load_row_scales(const qt_skinny_base &a, __half *to,
                                                              const __half *scales, size_t pitch,
                                                              int threads)
{
    const int first = (int)blockIdx.x * a.strips_cta;
    for (int i = (int)threadIdx.x; i < a.strips_cta * 16; i += threads)
        to[i] = scales[(size_t)min(first + i / 16, a.strips - 1) * pitch * 16 + i % 16];
}

/* ---- the warps that multiply -------------------------------------------------------------------
 */

/* Which of them a warp is, and its slot in its stages. */
struct skinny_warp {
    int wn, wk, warps_n, slot;
};

static __device__ __forceinline__ skinny_warp skinny_warp_open(const qt_skinny_base &a, int warp,
                                                               int threads)
{
    const int shift = 31 - __clz(a.warps_k);
    const int wk = warp & (a.warps_k - 1);
    return {warp >> shift, wk, threads / 32 >> shift, wk % QT_SKINNY_SLOTS};
}

/* Products of a tile up to slot `end`, of a warp's first N strips; kept: X of its next slot, if it
 * is apart. */
template <int N, int MT, int STRIPS, class Work>
static __device__ __forceinline__ void skinny_multiply(qt_accumulators<MT, STRIPS> *all,
                                                       const qt_skinny_base &a, qt_ring *r, int *n,
                                                       int end, int kept, int lane, Work *work)
{
    qt_accumulators<MT, N> *sums = qt_sums_first<N>(all);
    const int step = (int)((unsigned)a.warps_k / QT_SKINNY_SLOTS); /* stages */
#pragma unroll 1
    while (*n < end) {
        ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
        const int stage = a.ring_at + r->stage * a.stage_bytes;
        work->slot(sums, stage, a.kept_pitch ? kept : stage);
        kept += step * a.kept_pitch;
        __syncwarp();
        if (lane == 0)
            ptx_barrier_arrive(r->empty + 8 * r->stage + (qt_sums_bits(*sums) & a.zero));
        skinny_ring_step(r, step, a.stages);
        *n += a.warps_k;
    }
}

/* LAST: of its strips, as many as a last warp has at most. */
template <int MT, int STRIPS, int LAST, class Work>
static __device__ __forceinline__ void skinny_multiply_all(const qt_skinny_base &a, qt_ring r,
                                                           const skinny_warp &w, int threads,
                                                           Work work)
{
    const int pitch = w.warps_n * STRIPS * 16 + 4;
    const bool last = LAST < STRIPS && w.wn * STRIPS + LAST >= a.tile_strips;
    const int token = (int)threadIdx.x / (a.tile_strips * 4);
    const int row = ((int)threadIdx.x - token * (a.tile_strips * 4)) * 4;
    int n = w.wk; /* slot, over all tiles */
    int lane = (int)(threadIdx.x % 32);
    asm volatile("" : "+r"(lane)); /* computed once */
    qt_ring_start(threads);
    skinny_ring_step(&r, w.wk / QT_SKINNY_SLOTS, a.stages);
#pragma unroll 1
    for (int tile = 0; tile < a.tiles; tile++) {
        qt_accumulators<MT, STRIPS> sums = {};
        const int slots = a.k_stages * QT_SKINNY_SLOTS;
        int end = (tile + 1) * slots;
        asm volatile("" : "+r"(end));
        work.begin_tile(n - tile * slots);
        const int kept = a.kept_at + (n - tile * slots) / QT_SKINNY_SLOTS * a.kept_pitch;
        /* One of two loops: what most warps run comes first in the code. */
        skinny_multiply<STRIPS>(&sums, a, &r, &n, last ? 0 : end, kept, lane, &work);
        if (LAST < STRIPS)
            skinny_multiply<LAST>(&sums, a, &r, &n, end, kept, lane, &work);
        if (tile > 0 || a.alias)
            ptx_named_barrier(SKINNY_SUMS,
                              threads); /* the sums of the tile before have been read */
        qt_sums_put((float *)(qt_smem + a.sums_at) + w.wk * a.m * pitch + w.wn * STRIPS * 16, pitch,
                    a.m, sums);
        work.meet(threads, tile);
        skinny_finish(a, work, pitch, tile, token, row);
    }
}

#endif
