/*
 * Common parts of the tile kernels (formats with planes, mix24, w4ax): Y = X W^T for more tokens
 * than the skinny kernels take, sm_90a.
 *
 *   grid       one thread block per multiprocessor; a tile is 64 WGS rows x BM tokens
 *   block      WGS consumer warpgroups, 64 rows each; a warpgroup with two producer warps
 *   smem       [ data of the kernel | stages | mbarriers | results ]
 *
 *   producers:  TMA: packed weights, X (128-byte swizzle) --> a stage: C x 64 columns of k
 *   consumers:  packed words --> registers --> A fragments (registers) -+
 *               X (shared memory) --------------------------- B --------+--> wgmma
 *
 * Each warp of a warpgroup holds 16 rows of A, so the fragments of mma.sync are those of wgmma: a
 * lane dequantizes its packed words to its own operands, as in the stream kernel.
 *
 * Stream-K: a thread block takes a range of (tile, stage) pairs, which may begin and end inside a
 * tile. If its first tile began in another thread block, it stores the accumulators in the
 * workspace; the thread block that began the tile adds them to its own in a fixed order, so results
 * do not depend on timing. Thread block 0 has the last range, and the last thread block the first
 * one. So a thread block only waits for thread blocks with lower numbers. These started earlier,
 * and the tile that it waits for is the first in their ranges, so there is no deadlock. If there
 * are at least twice as many tiles as thread blocks, only the first tiles are shared, and the
 * others are processed whole.
 *
 * Clusters: if two or four thread blocks are available for every tile, they split k and exchange
 * accumulators through distributed shared memory, which is faster than the workspace.
 *
 * Template parameters: WGS: consumer warpgroups; BM: tokens of a tile; C: 64-column blocks of k per
 * stage; Work: the kernel-specific part of the consumers:
 *
 *     sum                                    type of the accumulators, float or int
 *     multiply(sums, ring, segment, strip)   mainloop of a segment, for the warp's strip of 16 rows
 *     sync()                                 called before the epilogue of a tile
 *     per_token, token(t)                    what epilogue needs for tokens t and t + 1 of Y
 *     AHEAD                                  load per_token and token factors one step ahead
 *     epilogue<N>(out, v, tokens, token0, token, end)
 *                                            turns accumulators v into values for tile_scale; token
 *                                            is relative to token0, the first of the tile; tokens
 *                                            of Y from number `end` on are not stored
 *     wide()                                 whether Y is FP32
 *     GATED                                  whether products are gated; then also gated(), which
 *                                            returns an enum qtool_matmul_gated
 */
#ifndef QT_KERNELS_CUDA_MATMUL_TILE_COMMON_CUH
#define QT_KERNELS_CUDA_MATMUL_TILE_COMMON_CUH

#include "kernels/cuda/common/gated.cuh"
#include "kernels/cuda/common/pipeline.cuh"
#include "kernels/cuda/common/ptx_cluster.cuh"
#include "kernels/cuda/common/ptx_sm90.cuh"
#include "kernels/cuda/common/ptx_wgmma.cuh"
#include "kernels/cuda/matmul/tile.h"

/* ---- work distribution ----------------------------------------------------------------------- */

/* Named barriers; from TILE_WARPGROUP on, one per warpgroup. */
enum { TILE_SYNC = PIPELINE_BARRIERS, TILE_WARPGROUP = TILE_SYNC + PIPELINE_DOUBLE_BUFFER };

/* Stages [k0, k1) of a tile. */
struct tile_segment {
    int row_tile, token0, k0, k1;
};

/* The first (tile, stage) pair of range number `i`. */
static __device__ __forceinline__ int tile_range(const qt_tile_base &a, int i)
{
    return i * a.range + min(i, a.ranges_longer);
}

static __device__ __forceinline__ int tile_of_pair(const qt_tile_base &a, int pair)
{
    return (int)__umulhi(2 * (unsigned)pair, a.k_stages_inverse);
}

/*
 * The work of a thread block: its range of (shared tile, stage) pairs, then whole tiles. No
 * division if each thread block has one tile: the first copies wait for this computation.
 */
struct tile_work {
    int pair, end, first, shared; /* range; its first tile and number of tiles */
    int whole, step;              /* first whole tile; step to the next */
};

/* tile_cluster: number of the cluster (of the thread block without clusters). tile_rank: number of
 * the thread block in its cluster, which splits k. */
static __device__ __forceinline__ int tile_cluster(const qt_tile_base &a)
{
    return (int)blockIdx.x >> a.split_log2;
}

static __device__ __forceinline__ int tile_rank(const qt_tile_base &a)
{
    return (int)blockIdx.x & ((1 << a.split_log2) - 1);
}

static __device__ __forceinline__ tile_work tile_work_of(const qt_tile_base &a)
{
    const int i = (int)(gridDim.x - 1 - blockIdx.x);
    tile_work w;
    w.whole = a.shared_tiles + tile_cluster(a);
    w.step = (int)gridDim.x >> a.split_log2;
    w.pair = tile_range(a, i);
    w.end = tile_range(a, i + 1);
    w.first = tile_of_pair(a, w.pair);
    w.shared = w.pair < w.end ? tile_of_pair(a, w.end - 1) - w.first + 1 : 0;
    return w;
}

/*
 * Number of segments of the thread block. Loops count segments: if the compiler cannot see that all
 * lanes leave a loop together, it does not use uniform registers in the loop, which costs 30
 * instructions per stage.
 */
static __device__ __forceinline__ int tile_segments(const qt_tile_base &a)
{
    return tile_work_of(a).shared + a.whole_tiles + (tile_cluster(a) < a.blocks_with_more);
}

/*
 * Segment number `i` of the thread block. Rasterization: bands of row tiles; within a band, all row
 * tiles of a token tile, then the next token tile. Thread blocks that run at the same time thus
 * share weights and activations in L2.
 */
static __device__ __forceinline__ tile_segment tile_segment_at(const qt_tile_base &a, int i,
                                                               int tokens)
{
    const tile_work w = tile_work_of(a);
    int t = w.whole + (i - w.shared) * w.step;
    tile_segment s;
    s.k0 = 0;
    s.k1 = a.k_stages;
    if (i < w.shared) {
        t = w.first + i;
        s.k0 = max(0, w.pair - t * a.k_stages);
        s.k1 = min(a.k_stages, w.end - t * a.k_stages);
    }
    if (a.split_log2) {
        const int rank = tile_rank(a), up = (1 << a.split_log2) - 1;
        s.k0 = (rank * a.k_stages + up) >> a.split_log2;
        s.k1 = ((rank + 1) * a.k_stages + up) >> a.split_log2;
    }
    s.row_tile = t;
    s.token0 = 0;
    if (a.token_tiles > 1) {
        const unsigned per_band = (unsigned)(a.band * a.token_tiles), band = (unsigned)t / per_band;
        const unsigned in_band = (unsigned)t - band * per_band;
        const unsigned rows = (unsigned)min(a.band, a.row_tiles - (int)band * a.band);
        const unsigned token_tile = in_band / rows;
        s.row_tile = (int)(band * (unsigned)a.band + in_band - token_tile * rows);
        s.token0 = (int)token_tile * tokens;
    }
    return s;
}

/* ---- producers ----------------------------------------------------------------------------------
 *
 * Producer lanes, one for weights and one for X, each for all stages of all segments, because
 * copies that one lane issues are serialized. Weights do not depend on the previous kernel; X does.
 * If the last token tile has fewer tokens, only cut_tokens are copied, with a box per 64 columns,
 * because TMA is slow for box lines outside of X (fp6, 8192 x 8192, 65 tokens in a tile of 128: 40
 * us; 128 tokens take 28). The other lines of the stage keep old data, whose results are not
 * stored. w4ax, without this swizzle, is not slowed down.
 */

template <int BM>
static __device__ __forceinline__ bool tile_is_cut(const qt_tile_base &a, const tile_segment &s)
{
    return a.cut_tokens && s.token0 + BM > a.m;
}

/* Bytes of X in a stage. */
template <int BM, int C>
static __device__ __forceinline__ int tile_x_bytes(const qt_tile_base &a, const tile_segment &s)
{
    return C * 128 * (tile_is_cut<BM>(a, s) ? a.cut_tokens : BM);
}

/* The part of a pipeline Source (see qt_pipeline_produce) that all tile kernels share: X and the
 * position. Every thread block has at least one segment. */
template <class Args, int BM, int C> struct tile_producer_base {
    const Args &a;
    int segment, k_stage;
    tile_segment s;

    __device__ __forceinline__ tile_producer_base(const Args &args)
        : a(args), segment(0), s(tile_segment_at(args, 0, BM))
    {
        k_stage = s.k0;
    }
    __device__ __forceinline__ void copy_x(uint32_t dst, uint32_t bar) const
    {
        if (!tile_is_cut<BM>(a, s))
            ptx_copy_box_3d(dst, &a.x, 0, s.token0, k_stage * C, bar);
        else
#pragma unroll
            for (int c = 0; c < C; c++)
                ptx_copy_box_3d(dst + c * (BM * 128), &a.x_cut, 0, s.token0, k_stage * C + c, bar);
    }
    __device__ __forceinline__ bool copies_x() const
    {
        return true;
    }
    __device__ __forceinline__ bool next()
    {
        return ++k_stage < s.k1;
    }
    __device__ __forceinline__ bool next_tile()
    {
        if (++segment == tile_segments(a))
            return false;
        s = tile_segment_at(a, segment, BM);
        k_stage = s.k0;
        return true;
    }
};

/* The producer warps of a thread block with WGS consumer warpgroups. The extra mbarrier counts the
 * data from the other thread blocks of a cluster. */
template <int WGS, class Args, class Source>
static __device__ __forceinline__ void tile_produce(const Args &a, const qt_pipeline &r, int warp,
                                                    const Source &source)
{
    if (warp < WGS * 4 + 2)
        qt_pipeline_produce(a, r, warp == WGS * 4, WGS * 128, WGS * 4, source);
}

/* ---- accumulators ---------------------------------------------------------------------------- */

template <int BM, class sum_t = float> struct tile_accumulators {
    sum_t v[BM / 2]; /* [tokens / 8][4]: rows g, g + 8 x tokens 2t, 2t + 1 */
};

/* A vector of four accumulators. */
template <class sum_t> struct tile_vector {
    typedef float4 type;
};
template <> struct tile_vector<int> {
    typedef int4 type;
};
template <class sum_t> using tile_four = typename tile_vector<sum_t>::type;

template <class sum_t>
static __device__ __forceinline__ tile_four<sum_t> tile_four_of(const sum_t v[4])
{
    return {v[0], v[1], v[2], v[3]};
}

template <class sum_t>
static __device__ __forceinline__ void tile_add(sum_t v[4], tile_four<sum_t> more)
{
    v[0] += more.x;
    v[1] += more.y;
    v[2] += more.z;
    v[3] += more.w;
}

/* Keeps the A registers of asynchronous products allocated. */
template <int STEPS>
static __device__ __forceinline__ void tile_keep_registers(const uint32_t f[STEPS][4])
{
#pragma unroll
    for (int i = 0; i < 4 * STEPS; i++)
        asm volatile("" ::"r"(f[i / 4][i % 4]));
}

/* Waits for all products. The asm keeps the compiler from moving uses of the accumulators before
 * the wait. */
template <int BM>
static __device__ __forceinline__ void tile_wait_accumulators(tile_accumulators<BM> *d)
{
    ptx_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < BM / 2; i++)
        asm volatile("" : "+f"(d->v[i])::"memory");
}

/* ---- epilogue -------------------------------------------------------------------------------- */

/* Rounds 16 rows x 8 N tokens to FP16 or BF16: out[N][rows + 0, + 8], two tokens of a lane per
 * word. */
template <int N>
static __device__ __forceinline__ void tile_round(uint32_t out[N][2], const float4 v[N], bool bf16)
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        out[j][0] = qt_round_two(bf16, v[j].x, v[j].y);
        out[j][1] = qt_round_two(bf16, v[j].z, v[j].w);
    }
}

/* Token factors, and the per_token data of Work, for 8 N tokens; a lane has two of each eight. */
template <int N, class Work> struct tile_tokens {
    float2 factor[N];
    typename Work::per_token more[N];
};

/* Loads them for tokens from `first` of Y on. A load from L2 takes 0.4 us, so all loads are issued
 * before the first use. */
template <int N, class Work>
static __device__ __forceinline__ tile_tokens<N, Work> tile_tokens_at(const qt_tile_base &a,
                                                                      const Work &work, int first)
{
    const bool any = a.token_factor != NULL;
    tile_tokens<N, Work> t;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const int token = first + 8 * j + (int)threadIdx.x % 4 * 2;
        t.factor[j] =
            make_float2(ptx_load_factor(a.token_factor + token, any && token < a.m),
                        ptx_load_factor(a.token_factor + token + 1, any && token + 1 < a.m));
        t.more[j] = work.token(token);
    }
    return t;
}

/* Multiplies values, which include the row scale, by the remaining factors. */
template <int N>
static __device__ __forceinline__ void tile_scale(const qt_tile_base &a, float4 v[N],
                                                  const float2 factor[N])
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float fx = a.factor * factor[j].x, fy = a.factor * factor[j].y;
        v[j] = make_float4(v[j].x * fx, v[j].y * fy, v[j].z * fx, v[j].w * fy);
    }
}

/* The lane has 8 rows of gate, and lane + 2 those of up (`up`: or the other way round). Returns the
 * activation of gate times up for half of these rows. */
static __device__ __forceinline__ uint2 tile_gate(int gated, bool bf16, uint4 rows, bool up)
{
    const uint32_t own[2] = {up ? rows.z : rows.x, up ? rows.w : rows.y};
    uint32_t v[2] = {up ? rows.x : rows.z, up ? rows.y : rows.w}; /* of the other lane's half */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        v[i] = __shfl_xor_sync(~0u, v[i], 2);
        v[i] = qt_gated_two(gated, bf16, up ? v[i] : own[i], up ? own[i] : v[i]);
    }
    return make_uint2(v[0], v[1]);
}

/*
 * Stores 64 rows x 8 N tokens of Y, those before `end`, by a warpgroup whose warps have 16 rows
 * each. The values are transposed through shared memory, a 128-byte line per token with the
 * 128-byte swizzle, so a warp stores four whole lines instead of 16-byte parts of eight tokens. Of
 * gated products a line has 16 rows of gate, 16 of up, and so on, and a thread stores 4 channels.
 */
template <int N, class Work>
static __device__ __forceinline__ void tile_store(const qt_tile_base &a, const Work &work,
                                                  const uint32_t out[N][2], int row0, int token0,
                                                  int end)
{
    const int lane = (int)threadIdx.x % 32, thread = (int)threadIdx.x % 128;
    const int group = (int)threadIdx.x / 128;
    const uint32_t at = ptx_shared(qt_smem) + a.results_at + group * QT_TILE_RESULT_BYTES;
    const uint32_t to =
        at + (lane / 16 * 8 + lane % 8) * 128 + ((thread / 32 * 2 + lane / 8 % 2) ^ lane % 8) * 16;
    const uint32_t from = at + thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
    const int token = token0 + thread / 8, line_row = row0 - thread / 32 * 16, part = thread % 8;
    const int row = Work::GATED ? line_row / 2 + part / 4 * 16 + part % 2 * 8 + part / 2 % 2 * 4
                                : line_row + part * 8;
    const int tokens = N > 1 || thread < 64 ? end - token : 0, rows = max(0, a.n - row);
    char *y = (char *)a.y + ((size_t)token * a.n + row) * 2;
    const size_t step = (size_t)a.n * 8 * 2;
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        if (j > 0 && token0 + j * 8 >= end)
            break;
        const uint32_t four[4] = {out[j][0], out[j][1], N > 1 ? out[j + 1][0] : 0,
                                  N > 1 ? out[j + 1][1] : 0};
        const uint4 line = ptx_transpose_16(TILE_WARPGROUP + group, to, four, from);
        if constexpr (Work::GATED) {
            const uint2 v = tile_gate(work.gated(), a.bf16, line, part / 2 % 2);
            if (j * 8 < tokens && rows > 0)
                *(uint2 *)(y + j * step) = v;
        } else {
            ptx_store_halves(y + j * step, line, j * 8 < tokens ? rows : 0, a.whole_stores);
        }
    }
}

/* Stores 16 rows x 8 N tokens of FP32 Y directly from registers. */
template <int N>
static __device__ __forceinline__ void tile_store_wide(const qt_tile_base &a, const float4 v[N],
                                                       int row0, int token0, int end)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        const int token = token0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int row = row0 + lane / 4 + i / 2 % 2 * 8;
        if (token < end && row < a.n)
            ((float *)a.y)[(size_t)token * a.n + row] = (&v[i / 4].x)[i % 4];
    }
}

/* Stores N x 8 tokens of a tile, from `token` on, those before `end` of Y; v: the accumulators. */
template <int N, class Work>
static __device__ __forceinline__ void
tile_results(const qt_tile_base &a, const Work &work, const tile_four<typename Work::sum> v[N],
             const tile_tokens<N, Work> &tokens, int row0, int token0, int token, int end)
{
    float4 sums[N];
    uint32_t out[N][2];
    work.template epilogue<N>(sums, v, tokens.more, token0, token, end);
    tile_scale<N>(a, sums, tokens.factor);
    if (work.wide()) {
        tile_store_wide<N>(a, sums, row0, token0 + token, end);
        return;
    }
    tile_round<N>(out, sums, a.bf16);
    tile_store<N>(a, work, out, row0, token0 + token, end);
}

/* How many of `groups` groups of 8 tokens tile_results takes at a time: 1, 2 or 4. */
static __host__ __device__ constexpr int tile_results_at_a_time(int groups)
{
    return groups % 4 == 0 ? 4 : groups % 2 == 0 ? 2 : 1;
}

/* The largest divisor of n that is at most `most`. */
static __host__ __device__ constexpr int tile_divisor(int n, int most)
{
    return most >= n ? n : n % most == 0 ? most : tile_divisor(n, most - 1);
}

/* Partial sums of a shared tile in the workspace; per thread block: [tokens / 8][warpgroups *
 * 128][4]. */
template <int WGS, int BM, class sum_t>
static __device__ __forceinline__ tile_four<sum_t> *tile_partial(const qt_tile_base &a, int block)
{
    return (tile_four<sum_t> *)a.partial + (size_t)block * (BM / 8 * WGS * 128) + threadIdx.x;
}

template <int WGS, int BM, class sum_t>
static __device__ __forceinline__ void tile_store_partials(const qt_tile_base &a,
                                                           const tile_accumulators<BM, sum_t> &d)
{
    const int group = (int)threadIdx.x / 128;
    tile_four<sum_t> *out = tile_partial<WGS, BM, sum_t>(a, (int)blockIdx.x);
#pragma unroll
    for (int j = 0; j < BM / 8; j++)
        __stcg(out + j * (WGS * 128), tile_four_of(d.v + 4 * j));
    ptx_named_barrier(TILE_WARPGROUP + group, 128);
    if (threadIdx.x % 128 == 0)
        ptx_store_release(a.ready + blockIdx.x * WGS + group, 1);
}

/* Adds the partial sums of the lower-numbered thread blocks that share the tile; `missing`: stages
 * that they computed. */
template <int WGS, int BM, class sum_t>
static __device__ __forceinline__ void
tile_add_partials(const qt_tile_base &a, tile_accumulators<BM, sum_t> *d, int missing)
{
    const int group = (int)threadIdx.x / 128, range = (int)(gridDim.x - 1 - blockIdx.x);
    int others = 0;
    for (; missing > 0; others++)
        missing -= tile_range(a, range + others + 2) - tile_range(a, range + others + 1);
    for (int i = (int)threadIdx.x % 128; i < others; i += 128) {
        unsigned *ready = a.ready + ((int)blockIdx.x - 1 - i) * WGS + group;
        while (ptx_load_acquire(ready) == 0)
            ;
        *ready = 0; /* for the next launch */
    }
    ptx_named_barrier(TILE_WARPGROUP + group, 128);
    const int CHUNK = tile_divisor(BM / 8, 10); /* vectors of a thread block that are loaded
                                                   together ... */
    const int BLOCKS = 16 / CHUNK;              /* ... and thread blocks */
#pragma unroll 1
    for (int i = 0; i < others; i += BLOCKS)
#pragma unroll
        for (int j0 = 0; j0 < BM / 8; j0 += CHUNK) {
            tile_four<sum_t> v[BLOCKS][CHUNK] = {};
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
                if (i + b < others)
#pragma unroll
                    for (int j = 0; j < CHUNK; j++)
                        v[b][j] =
                            __ldcg(tile_partial<WGS, BM, sum_t>(a, (int)blockIdx.x - 1 - i - b) +
                                   (j0 + j) * (WGS * 128));
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int j = 0; j < CHUNK; j++)
                    tile_add(d->v + 4 * (j0 + j), v[b][j]);
        }
}

/*
 * Reduction in a cluster of two: each thread block sends the accumulators of half of the tokens to
 * the other, and then holds the sums of the other half as its first half. The data goes to the
 * stages' memory, so both thread blocks must have finished their products. Producer warps have
 * exited and are not waited for; a warp that arrived at the cluster barrier and then exited would
 * be counted twice.
 */
template <int WGS, int BM, class sum_t>
static __device__ __forceinline__ void
tile_exchange_pair(const qt_tile_base &a, const qt_pipeline &r, tile_accumulators<BM, sum_t> *d)
{
    const int HALF = BM / 16, LINE = WGS * 128 * 16; /* vectors; bytes per 8 tokens */
    const int rank = (int)blockIdx.x & 1, place = a.ring_at + (int)threadIdx.x * 16;
    const uint32_t bar = qt_pipeline_extra_barrier(r), to_bar = ptx_cluster_map(bar, rank ^ 1);
    const uint32_t to = ptx_cluster_map(ptx_shared(qt_smem) + place, rank ^ 1);
    if (threadIdx.x == 0)
        ptx_barrier_expect(bar, HALF * LINE);
    ptx_cluster_arrive(); /* loads from the stages have completed: no fence (600 clocks) */
    ptx_cluster_wait();
#pragma unroll
    for (int j = 0; j < HALF; j++) {
        sum_t *low = d->v + 4 * j, *high = low + 4 * HALF, v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = rank ? low[i] : high[i];
            low[i] = rank ? high[i] : low[i];
        }
        ptx_cluster_send_16(to + j * LINE, tile_four_of(v), to_bar);
    }
    ptx_barrier_wait_cluster(bar, 0);
#pragma unroll
    for (int j = 0; j < HALF; j++)
        tile_add(d->v + 4 * j, *(const tile_four<sum_t> *)(qt_smem + place + j * LINE));
}

/*
 * Reduction in a cluster of four: each thread block then holds a quarter of the tokens. Its own
 * accumulators go through shared memory too, in rank order, because registers cannot be indexed by
 * rank. (Pairs select by a comparison, and are 1 % faster with their own function.)
 */
template <int WGS, int BM, class sum_t>
static __device__ __forceinline__ void
tile_exchange_quad(const qt_tile_base &a, const qt_pipeline &r, tile_accumulators<BM, sum_t> *d)
{
    const int QUARTER = BM / 32, LINE = WGS * 128 * 16;
    const int rank = (int)blockIdx.x & 3, place = a.ring_at + (int)threadIdx.x * 16;
    const uint32_t at = ptx_shared(qt_smem) + place, bar = qt_pipeline_extra_barrier(r);
    if (threadIdx.x == 0)
        ptx_barrier_expect(bar, 3 * QUARTER * LINE);
    ptx_cluster_arrive();
    ptx_cluster_wait();
#pragma unroll
    for (int to = 0; to < 4; to++) {
        const uint32_t there = ptx_cluster_map(at + rank * QUARTER * LINE, to);
        const uint32_t there_bar = ptx_cluster_map(bar, to);
#pragma unroll
        for (int j = 0; j < QUARTER; j++)
            ptx_cluster_put_16(to == rank, at + (rank * QUARTER + j) * LINE, there + j * LINE,
                               tile_four_of(d->v + 4 * (to * QUARTER + j)), there_bar);
    }
    ptx_barrier_wait_cluster(bar, 0);
#pragma unroll
    for (int j = 0; j < QUARTER; j++) {
        sum_t *sums = d->v + 4 * j;
        sums[0] = sums[1] = sums[2] = sums[3] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            tile_add(sums, *(const tile_four<sum_t> *)(qt_smem + place + (i * QUARTER + j) * LINE));
    }
}

/* ---- consumers ------------------------------------------------------------------------------- */

template <int WGS, int BM, class Work>
static __device__ __forceinline__ void tile_consume(const qt_tile_base &a, qt_pipeline r, Work work)
{
    const int warp = (int)threadIdx.x / 32;
    const int segments = tile_segments(a);
#pragma unroll 1
    for (int segment = 0; segment < segments; segment++) {
        const tile_segment s = tile_segment_at(a, segment, BM);
        const int strip = s.row_tile * 4 * WGS + warp;
        tile_accumulators<BM, typename Work::sum> d = {};
        work.multiply(&d, &r, s, strip);
        if (!a.split_log2 && s.k0 > 0) {
            tile_store_partials<WGS>(a, d);
            continue;
        }
        if (!a.split_log2 && s.k1 < a.k_stages)
            tile_add_partials<WGS>(a, &d, a.k_stages - s.k1);
        work.sync();
        /* One epilogue for all; clusters run only its first part. A second copy would add much
         * compile time. With few tokens, N is at most the tokens of a cluster's thread block (w4ax,
         * row, 4096 x 4096, tiles of 16: 7.25 us instead of 6.8 otherwise). */
        const int N = tile_results_at_a_time(BM <= 32 ? BM / 16 : BM / 8);
        const int tokens = BM >> a.split_log2, first = s.token0 + tile_rank(a) * tokens;
        const int end = min(a.m, first + tokens);
        tile_tokens<N, Work> next;
        if (Work::AHEAD)
            next = tile_tokens_at<N>(a, work, first);
        if (a.split_log2 == 1)
            tile_exchange_pair<WGS>(a, r, &d);
        else if constexpr (BM % 32 == 0)
            if (a.split_log2 == 2)
                tile_exchange_quad<WGS>(a, r, &d);
#pragma unroll
        for (int j0 = 0; j0 < BM / 8; j0 += N) {
            tile_four<typename Work::sum> v[N];
#pragma unroll
            for (int j = 0; j < N; j++)
                v[j] = tile_four_of(d.v + 4 * (j0 + j));
            if (j0 * 8 < tokens) {
                const tile_tokens<N, Work> now =
                    Work::AHEAD ? next : tile_tokens_at<N>(a, work, first + j0 * 8);
                if (Work::AHEAD && j0 + N < BM / 8)
                    next = tile_tokens_at<N>(a, work, first + (j0 + N) * 8);
                tile_results<N>(a, work, v, now, strip * 16, s.token0, first - s.token0 + j0 * 8,
                                end);
            }
        }
    }
}

enum { TILE_COPY_REGISTERS = 24 };

/* Registers per thread at launch, for a thread block that gets all registers of a multiprocessor.

 */
static __host__ __device__ constexpr int tile_launch_registers(int warpgroups)
{
    return 65536 / (128 * warpgroups) / 8 * 8;
}

/* Registers per consumer thread, in a thread block of wgs consumer warpgroups and `others` whose
 * threads keep other_registers in total: setmaxnreg redistributes the launch registers. Requesting
 * more than are available would deadlock. */
static __host__ __device__ constexpr int tile_registers(int wgs, int others, int other_registers,
                                                        int launch_registers)
{
    return (launch_registers * (wgs + others) - other_registers) / wgs / 8 * 8;
}

#endif
