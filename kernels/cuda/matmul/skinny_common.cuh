/*
 * Common parts of the skinny kernels (formats with planes, mix24, w4ax): Y = X W^T for up to 16
 * tokens (w4ax: 32), sm_90a. A thread block computes whole rows, so there is no reduction between
 * thread blocks:
 *
 *   grid       one thread block per multiprocessor, each strips_cta strips of 16 rows, in tiles of
 *              tile_strips
 *   block      WN x WK consumer warps, WK along k, STRIPS strips each; two producer warps
 *   smem       [ look-up table | stages | partial sums | data of the kernel | mbarriers ]
 *
 *   producers:  TMA: packed weights, X (128-byte swizzle) --> a stage: 512 bytes of X per token,
 *               which are 256 columns of FP16 (w4ax: 512 channels)
 *   consumers:  half a stage (slot): packed words --> A fragments --+
 *                                    X --> B fragments -------------+--> mma.sync
 *
 * The WK warps take the slots round-robin. A warp waits only for the stages of its own slots, which
 * are WK / 2 stages apart. The number of stages must be a multiple of that distance: then the warp
 * waits on the same mbarriers in every round and sees each of their phases, so parities are
 * unambiguous.
 *
 * A warp arrives at the empty mbarrier of a stage only after the mma.sync of its slot have written
 * the accumulators. Otherwise the assembler moves the arrival directly behind the last loads of the
 * slot, and TMA may overwrite the data before the loads complete (seen for scales, once in some
 * thousand runs). The address of the mbarrier is therefore made to depend on the accumulators.
 *
 * Epilogue: the WK partial sums of an output are added in shared memory in a fixed order.
 *
 * Template parameters: MT token tiles of 8 (m <= 8 MT); STRIPS: strips of a warp; LAST: maximum
 * strips of the last warp along the rows (STRIPS or STRIPS / 2); Work: the kernel-specific part:
 *
 *     begin_tile(slot)          called before the warp's first slot of a tile; slot: its index
 *                               along k
 *     slot(sums, stage, x)      adds the products of a slot, for as many strips as sums has; stage,
 *                               x: offsets of the stage and of its X in shared memory. A warp's
 *                               slots are all first or all second halves of stages
 *     sync(threads, tile)       barrier after which the partial sums of the consumer warps, and
 *                               whatever else the epilogue reads, are in shared memory
 *     addend(tile)              additional partial sums, in the layout of a warp's, or NULL
 *     row_scales(tile)          row scales of the tile in stored order, or NULL
 *     f32()                     whether Y is FP32; otherwise 16 bits
 *     sum                       type of the accumulators; INT32 is stored in the bits of FP32
 *     value(sum, token)         a sum as a value, before factors and scales
 *     a                         the arguments
 *     GATED                     whether products are gated; then also gated(), which returns an
 *                               enum qtool_matmul_gated, and no addend, row_scales, f32, value
 */
#ifndef QT_KERNELS_CUDA_MATMUL_SKINNY_COMMON_CUH
#define QT_KERNELS_CUDA_MATMUL_SKINNY_COMMON_CUH

#include "kernels/cuda/common/accumulators.cuh"
#include "kernels/cuda/common/gated.cuh"
#include "kernels/cuda/common/pipeline.cuh"
#include "kernels/cuda/common/ptx_sm90.cuh"
#include "kernels/cuda/matmul/skinny.h"

/* Named barriers. */
enum {
    SKINNY_PARTIALS = PIPELINE_BARRIERS,
    SKINNY_SYNC,
    SKINNY_TOPS = SKINNY_SYNC + PIPELINE_DOUBLE_BUFFER,
    SKINNY_X
};

/* Number of the thread block among those of its matrix. */
static __device__ __forceinline__ int skinny_block(const qt_skinny_base &)
{
    return (int)blockIdx.x;
}
static __device__ __forceinline__ int skinny_block(const qt_skinny_part &a)
{
    return (int)blockIdx.x - a.first;
}

/* ---- producers ------------------------------------------------------------------------------- */

static __device__ __forceinline__ void skinny_pipeline_step(qt_pipeline *r, int by, int stages)
{
    r->stage += by;
    if (r->stage >= stages) { /* by <= stages */
        r->stage -= stages;
        r->parity ^= 1;
    }
}

/* The part of a pipeline Source (see qt_pipeline_produce) that all skinny kernels share: X and the
 * position. Args: the kernel arguments. */
template <class Args> struct skinny_producer_base {
    const Args &a;
    int tile, k_stage;

    __device__ __forceinline__ skinny_producer_base(const Args &args) : a(args), tile(0), k_stage(0)
    {
    }
    __device__ __forceinline__ void copy_x(uint32_t dst, uint32_t bar) const
    {
        ptx_copy_box_3d(dst, &a.x, 0, a.token0, k_stage * QT_SKINNY_BLOCKS, bar);
    }
    __device__ __forceinline__ bool copies_x() const
    {
        return a.converters == 0;
    }
    __device__ __forceinline__ int strip() const
    {
        return skinny_block(a) * a.strips_cta + tile * a.tile_strips;
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
 * Offset of 16-byte chunk `chunk` of a token in the X of a stage. For each 64 columns there are
 * x_rows lines of 128 bytes; chunk i of line l is at i ^ l % 8. Lines of tokens that do not exist
 * are missing: for these tokens a warp reads the data behind, and their results are not stored.
 */
static __device__ __forceinline__ uint32_t skinny_x_at(int x_rows, int block, int token, int chunk)
{
    int line = block * x_rows + token;
    return (uint32_t)(line * 128 + (chunk ^ line % 8) * 16);
}

/* ---- epilogue -----------------------------------------------------------------------------------
 *
 * Layout of the partial sums in shared memory: [warps_k][m][rows of a tile, rounded up to whole
 * warps, + 4].
 */

/* Base of a Work with FP32 accumulators and 16-bit results. */
struct skinny_float_accumulators {
    enum { GATED = false };
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

/* Stores four rows of Y from index `at` on; only the first `rows_left` exist. */
static __device__ __forceinline__ void skinny_store(const qt_skinny_base &a, const float v[4],
                                                    size_t at, int rows_left, bool f32)
{
    if (f32) {
        for (int i = 0; i < 4; i++)
            if (i < rows_left)
                ((float *)a.y)[at + i] = v[i];
        return;
    }
    uint16_t *y = (uint16_t *)a.y + at;
    const uint32_t low = qt_round_two(a.bf16, v[0], v[1]);
    const uint32_t high = qt_round_two(a.bf16, v[2], v[3]);
    if (a.wide_stores) {
        if (rows_left > 0)
            *(uint2 *)y = make_uint2(low, high);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < rows_left)
            y[i] = (uint16_t)((i < 2 ? low : high) >> 16 * (i & 1));
}

/* Adds the partial sums of a tile and stores Y; token, row: the thread's first four outputs. */
template <class Work>
static __device__ __forceinline__ void skinny_epilogue(const qt_skinny_base &a, const Work &work,
                                                       int pitch, int tile, int token, int row)
{
    const int rows = a.tile_strips * 16, first = (skinny_block(work.a) * a.tiles + tile) * rows;
    const int step = pitch * a.m;
    const float *sums = (const float *)(qt_smem + a.sums_at), *addend = work.addend(tile);
    const float *factors =
        a.kept_pitch ? (const float *)(qt_smem + a.tops_at) + QT_SKINNY_TOPS : a.token_factor;
    const __half *scales = work.row_scales(tile);
#pragma unroll 1
    while (token < a.m) {
        const float *part = sums + token * pitch + row;
        const float factor = factors ? a.factor * factors[token] : a.factor;
        typename Work::sum sums4[4] = {};
        if (addend)
            skinny_add<1>(sums4, addend + token * pitch + row, 0);
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

/* The same for gated products, whose tiles have 16 rows of gate, 16 of up, and so on; token, row:
 * the thread's first four channels. */
template <class Work>
static __device__ __forceinline__ void skinny_gated_epilogue(const qt_skinny_base &a,
                                                             const Work &work, int pitch, int tile,
                                                             int token, int row)
{
    const int rows = a.tile_strips * 8, first = ((int)blockIdx.x * a.tiles + tile) * rows;
    const int step = pitch * a.m;
    const float *factors =
        a.kept_pitch ? (const float *)(qt_smem + a.tops_at) + QT_SKINNY_TOPS : a.token_factor;
#pragma unroll 1
    while (token < a.m) {
        const float factor = factors ? a.factor * factors[token] : a.factor;
        uint32_t two[2][2]; /* of gate and up */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float *part = (const float *)(qt_smem + a.sums_at) + token * pitch +
                                row / 16 * 32 + row % 16 + i * 16;
            float v[4] = {};
#pragma unroll 1
            for (int j = 0; j < a.warps_k; j += 2)
                skinny_add<2>(v, part + j * step, step);
            two[i][0] = qt_round_two(a.bf16, v[0] * factor, v[1] * factor);
            two[i][1] = qt_round_two(a.bf16, v[2] * factor, v[3] * factor);
        }
        uint2 out;
        out.x = qt_gated_two(work.gated(), a.bf16, two[0][0], two[1][0]);
        out.y = qt_gated_two(work.gated(), a.bf16, two[0][1], two[1][1]);
        if (first + row < a.n)
            *(uint2 *)((uint16_t *)a.y + (size_t)token * a.n + first + row) = out;
        token += a.finish_tokens;
        row += a.finish_rows;
        if (row >= rows) {
            row -= rows;
            token++;
        }
    }
}

/* Copies the row scales of the thread block's strips to `to` in stored order; pitch: groups of
 * scales from strip to strip. */
static __device__ __forceinline__ void skinny_load_row_scales(const qt_skinny_base &a, __half *to,
                                                              const __half *scales, size_t pitch,
                                                              int threads)
{
    const int first = (int)blockIdx.x * a.strips_cta;
    for (int i = (int)threadIdx.x; i < a.strips_cta * 16; i += threads)
        to[i] = scales[(size_t)min(first + i / 16, a.strips - 1) * pitch * 16 + i % 16];
}

/* ---- consumers ------------------------------------------------------------------------------- */

/* The warp's position along the rows (wn) and along k (wk), and its half of the stages. */
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

/* Mainloop: adds the products of the warp's first N strips up to slot `end`, which ends the tile.
 * *n: the warp's next slot. kept: offset of the X of that slot, if the thread block converts X. */
template <int N, int MT, int STRIPS, class Work>
static __device__ __forceinline__ void
skinny_mainloop(qt_accumulators<MT, STRIPS> *all, const qt_skinny_base &a, qt_pipeline *r, int *n,
                int end, int kept, int lane, Work *work)
{
    qt_accumulators<MT, N> *sums = qt_accumulators_first<N>(all);
    const int step = (int)((unsigned)a.warps_k / QT_SKINNY_SLOTS); /* in stages */
#pragma unroll 1
    while (*n < end) {
        ptx_barrier_wait(r->full + 8 * r->stage, r->parity);
        const int stage = a.ring_at + r->stage * a.stage_bytes;
        work->slot(sums, stage, a.kept_pitch ? kept : stage);
        kept += step * a.kept_pitch;
        __syncwarp();
        if (lane == 0)
            ptx_barrier_arrive(r->empty + 8 * r->stage + (qt_accumulators_bits(*sums) & a.zero));
        skinny_pipeline_step(r, step, a.stages);
        *n += a.warps_k;
    }
}

/* A consumer warp: mainloop and epilogue of all tiles. */
template <int MT, int STRIPS, int LAST, class Work>
static __device__ __forceinline__ void skinny_consume(const qt_skinny_base &a, qt_pipeline r,
                                                      const skinny_warp &w, int threads, Work work)
{
    const int pitch = w.warps_n * STRIPS * 16 + 4;
    const bool last = LAST < STRIPS && w.wn * STRIPS + LAST >= a.tile_strips;
    const int fours = a.tile_strips * (Work::GATED ? 2 : 4); /* of channels */
    const int token = (int)threadIdx.x / fours, row = ((int)threadIdx.x - token * fours) * 4;
    int n = w.wk; /* slot, counted over all tiles */
    int lane = (int)(threadIdx.x % 32);
    asm volatile("" : "+r"(lane)); /* keeps it in a register */
    qt_pipeline_wait_ready(threads);
    skinny_pipeline_step(&r, w.wk / QT_SKINNY_SLOTS, a.stages);
#pragma unroll 1
    for (int tile = 0; tile < a.tiles; tile++) {
        qt_accumulators<MT, STRIPS> sums = {};
        const int slots = a.k_stages * QT_SKINNY_SLOTS;
        int end = (tile + 1) * slots;
        asm volatile("" : "+r"(end));
        work.begin_tile(n - tile * slots);
        const int kept = a.kept_at + (n - tile * slots) / QT_SKINNY_SLOTS * a.kept_pitch;
        /* Two instances of the mainloop; that of most warps comes first in the code. */
        skinny_mainloop<STRIPS>(&sums, a, &r, &n, last ? 0 : end, kept, lane, &work);
        if (LAST < STRIPS)
            skinny_mainloop<LAST>(&sums, a, &r, &n, end, kept, lane, &work);
        if (tile > 0 || a.alias)
            ptx_named_barrier(SKINNY_PARTIALS,
                              threads); /* partial sums of the previous tile have been read */
        qt_accumulators_store((float *)(qt_smem + a.sums_at) + w.wk * a.m * pitch +
                                  w.wn * STRIPS * 16,
                              pitch, a.m, sums);
        work.sync(threads, tile);
        if constexpr (Work::GATED)
            skinny_gated_epilogue(a, work, pitch, tile, token, row);
        else
            skinny_epilogue(a, work, pitch, tile, token, row);
    }
}

#endif
