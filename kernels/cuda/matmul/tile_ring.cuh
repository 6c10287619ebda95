/*
 * What the tile kernels share: Y = X W^T for more tokens than the skinny kernels are for, sm_90a.
 *
 *   grid      one block a multiprocessor; the blocks share out (tile, stage of k) evenly, a tile
 *             being 64 WGS rows x BM tokens
 *   block     WGS warpgroups that multiply, 64 rows each, and one of which two lanes keep the copy
 *             engine busy
 *   smem      [ the kernel's own | ring of stages | barriers | results ]
 *
 *   copy engine:  packed weights, X (128-byte swizzle)  --> a stage of C blocks of 64 columns of k
 *   warpgroup:    packed words -> registers -> A fragments (registers) --+
 *                 X (shared memory) --------------------------- B -------+--> wgmma --> FP32 sums
 *
 * A warp of a warpgroup owns 16 rows, so the fragments of mma.sync are those of wgmma: the packed
 * words of a lane become its own operands, as in the stream kernel.
 *
 * Stream-K: a block takes a range of (tile, stage) pairs, which begins and ends inside a tile. The
 * sums of its first tile go to the workspace if the tile began in another block; the block that
 * began it adds them to its own, in order, so that results do not depend on timing. Ranges are
 * given out from the last block to the first: a block only waits for blocks of lower numbers, which
 * were started before it, and for what they do first. If there are more than twice as many tiles as
 * blocks, the others are taken whole.
 *
 * Clusters: where two or four blocks can be had for every tile, each takes its part of k, and they
 * exchange sums through distributed shared memory, which is faster than the workspace.
 *
 * The template: WGS; BM; C; and Work, what differs, for the warps that multiply:
 *
 *     sum                                    type of sums, float or int
 *     multiply(sums, ring, segment, strip)   products of a segment, for the warp's strip of 16 rows
 *     meet()                                 before the sums of a tile become results
 *     per_token, token(t)                    what finish wants of tokens t and t + 1 of Y
 *     AHEAD                                  they and token factors are loaded ahead
 *     finish<N>(out, v, tokens, token0, token, end)
 *                                            results, as tile_scale takes them, of sums v; token is
 *                                            that of the tile, which begins at token0; those from
 *                                            `end` of Y on are not stored
 *     wide()                                 Y is FP32
 */
#ifndef QT_KERNELS_CUDA_MATMUL_TILE_RING_CUH
#define QT_KERNELS_CUDA_MATMUL_TILE_RING_CUH

#include "kernels/cuda/common/ptx_cluster.cuh"
#include "kernels/cuda/common/ptx_sm90.cuh"
#include "kernels/cuda/common/ptx_wgmma.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/round.cuh"
#include "kernels/cuda/matmul/tile.h"

/* ---- who does what -----------------------------------------------------------------------------
 */

/* Numbers of barriers of a part of the block; TILE_WARPGROUP and on: of each warpgroup. */
enum { TILE_MEET = RING_BARRIERS, TILE_WARPGROUP = TILE_MEET + RING_TURN_BARRIERS };

/* Consecutive stages [k0, k1) of a tile. */
struct tile_segment {
    int row_tile, token0, k0, k1;
};

/* Where range number `i` of the shared tiles begins. */
static __device__ __forceinline__ int tile_range(const qt_tile_base &a, int i)
{
    return i * a.range + min(i, a.ranges_longer);
}

static __device__ __forceinline__ int tile_of_pair(const qt_tile_base &a, int pair)
{
    return (int)__umulhi(2 * (unsigned)pair, a.k_stages_inverse);
}

/*
 * What a block has to do: its range of (shared tile, stage) pairs, which touches so many tiles,
 * then whole tiles. Nothing is divided where there is one tile to a block: the first copies wait
 * for it.
 */
struct tile_work {
    int pair, end, first, shared; /* the range; its first tile; tiles */
    int whole, step;              /* the first whole tile; from one to the next */
};

/* The block's cluster, or itself, and its number among the blocks that share a tile along k. */
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
 * How many segments. Loops count them: where the compiler does not see that all lanes leave a loop
 * together it gives up uniform registers in it, which cost 30 instructions a stage.
 */
static __device__ __forceinline__ int tile_segments(const qt_tile_base &a)
{
    return tile_work_of(a).shared + a.whole_tiles + (tile_cluster(a) < a.blocks_with_more);
}

/*
 * Segment number `i` of the block. Tile number t is in bands of row tiles, in a band all row tiles
 * of a token tile, then the next token tile: what runs at the same time shares both weights and
 * activations in L2.
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

/* ---- copies ------------------------------------------------------------------------------------
 *
 * A lane for weights and one for X, each for all stages of all segments: what one lane issues it
 * issues one after the other. Weights do not depend on the previous kernel; X does.
 *
 * Of a last token tile that has fewer tokens only these are copied (cut_tokens), a box for each
 * block of k, as the copy engine is slow where lines of a box are outside of X (fp6, 8192 x 8192,
 * 65 tokens in a tile of 128: 40 us, where 128 take 28). The other lines of a stage are whatever
 * they were, and go into sums that nobody stores. w4ax, which has no such swizzle, is not slow.
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

/* A source of qt_ring_bring but for weights. Each block has something to do. */
template <class Args, int BM, int C> struct tile_source {
    const Args &a;
    int segment, k_stage;
    tile_segment s;

    __device__ __forceinline__ tile_source(const Args &args)
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
    __device__ __forceinline__ bool brings_x() const
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

/* Of a block that multiplies with WGS warpgroups. The spare barrier is of what the blocks of a
 * cluster send. */
template <int WGS, class Args, class Source>
static __device__ __forceinline__ void tile_bring(const Args &a, const qt_ring &r, int warp,
                                                  const Source &source)
{
    if (warp < WGS * 4 + 2)
        qt_ring_bring(a, r, warp == WGS * 4, WGS * 128, WGS * 4, source);
}

/* ---- products ----------------------------------------------------------------------------------
 */

template <int BM, class sum_t = float> struct tile_sums {
    sum_t v[BM / 2]; /* [tokens / 8][4]: rows g, g + 8 x tokens 2t, 2t + 1 */
};

/* Four of them. */
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

/* Keeps the registers of products that may still be under way. */
template <int STEPS> static __device__ __forceinline__ void tile_keep(const uint32_t f[STEPS][4])
{
#pragma unroll
    for (int i = 0; i < 4 * STEPS; i++)
        asm volatile("" ::"r"(f[i / 4][i % 4]));
}

/* Outstanding products have been added, and the compiler may not have moved a use before this. */
template <int BM> static __device__ __forceinline__ void tile_settle(tile_sums<BM> *d)
{
    ptx_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < BM / 2; i++)
        asm volatile("" : "+f"(d->v[i])::"memory");
}

/* ---- results -----------------------------------------------------------------------------------
 */

/* Values of 16 rows x 8 N tokens as FP16 or BF16: [N][rows + 0, + 8], a lane two tokens. */
template <int N>
static __device__ __forceinline__ void tile_round(uint32_t out[N][2], const float4 v[N], bool bf16)
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        out[j][0] = qt_round_two(bf16, v[j].x, v[j].y);
        out[j][1] = qt_round_two(bf16, v[j].z, v[j].w);
    }
}

/* What the sums of 8 N tokens are multiplied by, of which a lane has two in eight, and what else
 * Work wants of them. */
template <int N, class Work> struct tile_tokens {
    float2 factor[N];
    typename Work::per_token more[N];
};

/* From `first` of Y on. Loads are of the L2, 0.4 us, and better not waited for one after the other:
 * where there always are some. */
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

/* Sums of the rows' scale times the factors that are left. */
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

/*
 * 64 rows x 8 N tokens of Y, those before `end`, by a warpgroup, of which each warp has 16 rows.
 * They go through shared memory, a token of 128 bytes a line, pieces of 16 bytes in the order of
 * the 128-byte swizzle: so that a warp stores four whole lines, and not eight parts of 16 bytes of
 * as many tokens.
 */
template <int N>
static __device__ __forceinline__ void tile_store(const qt_tile_base &a, const uint32_t out[N][2],
                                                  int row0, int token0, int end)
{
    const int lane = (int)threadIdx.x % 32, thread = (int)threadIdx.x % 128;
    const int group = (int)threadIdx.x / 128;
    const uint32_t at = ptx_shared(qt_smem) + a.results_at + group * QT_TILE_RESULT_BYTES;
    const uint32_t to =
        at + (lane / 16 * 8 + lane % 8) * 128 + ((thread / 32 * 2 + lane / 8 % 2) ^ lane % 8) * 16;
    const uint32_t from = at + thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
    const int token = token0 + thread / 8, row = row0 - thread / 32 * 16 + thread % 8 * 8;
    const int tokens = N > 1 || thread < 64 ? end - token : 0, rows = max(0, a.n - row);
    char *y = (char *)a.y + ((size_t)token * a.n + row) * 2;
    const size_t step = (size_t)a.n * 8 * 2;
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        if (j > 0 && token0 + j * 8 >= end)
            break;
        const uint32_t four[4] = {out[j][0], out[j][1], N > 1 ? out[j + 1][0] : 0,
                                  N > 1 ? out[j + 1][1] : 0};
        const uint4 line = ptx_turn_16(TILE_WARPGROUP + group, to, four, from);
        ptx_store_halves(y + j * step, line, j * 8 < tokens ? rows : 0, a.whole_stores);
    }
}

/* 16 rows x 8 N tokens of FP32 Y, as they lie in the registers. */
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

/* Of N x 8 tokens of a tile from `token` on, those before `end` of Y: v, sums. */
template <int N, class Work>
static __device__ __forceinline__ void
tile_results(const qt_tile_base &a, const Work &work, const tile_four<typename Work::sum> v[N],
             const tile_tokens<N, Work> &tokens, int row0, int token0, int token, int end)
{
    float4 sums[N];
    uint32_t out[N][2];
    work.template finish<N>(sums, v, tokens.more, token0, token, end);
    tile_scale<N>(a, sums, tokens.factor);
    if (work.wide()) {
        tile_store_wide<N>(a, sums, row0, token0 + token, end);
        return;
    }
    tile_round<N>(out, sums, a.bf16);
    tile_store<N>(a, out, row0, token0 + token, end);
}

/* Of so many groups of 8 tokens: how many tile_results takes, 1, 2 or 4. */
static __host__ __device__ constexpr int tile_results_at_a_time(int groups)
{
    return groups % 4 == 0 ? 4 : groups % 2 == 0 ? 2 : 1;
}

/* The largest divisor of n that is at most `most`. */
static __host__ __device__ constexpr int tile_divisor(int n, int most)
{
    return most >= n ? n : n % most == 0 ? most : tile_divisor(n, most - 1);
}

/* Sums of a shared tile in the workspace: of each block, [tokens / 8][warpgroups * 128][4]. */
template <int WGS, int BM, class sum_t>
static __device__ __forceinline__ tile_four<sum_t> *tile_partial(const qt_tile_base &a, int block)
{
    return (tile_four<sum_t> *)a.partial + (size_t)block * (BM / 8 * WGS * 128) + threadIdx.x;
}

template <int WGS, int BM, class sum_t>
static __device__ __forceinline__ void tile_give(const qt_tile_base &a,
                                                 const tile_sums<BM, sum_t> &d)
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

/* Adds what the blocks below have of the tile that this one began; `left` stages are missing. */
template <int WGS, int BM, class sum_t>
static __device__ __forceinline__ void tile_collect(const qt_tile_base &a, tile_sums<BM, sum_t> *d,
                                                    int left)
{
    const int group = (int)threadIdx.x / 128, range = (int)(gridDim.x - 1 - blockIdx.x);
    int others = 0;
    for (; left > 0; others++)
        left -= tile_range(a, range + others + 2) - tile_range(a, range + others + 1);
    for (int i = (int)threadIdx.x % 128; i < others; i += 128) {
        unsigned *ready = a.ready + ((int)blockIdx.x - 1 - i) * WGS + group;
        while (ptx_load_acquire(ready) == 0)
            ;
        *ready = 0; /* for the next launch */
    }
    ptx_named_barrier(TILE_WARPGROUP + group, 128);
    const int CHUNK = tile_divisor(BM / 8, 10); /* of loads of one block under way ... */
    const int BLOCKS = 16 / CHUNK;              /* ... and of so many */
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
 * Of a pair of blocks each sends the other its sums of half of the tokens, and has those of the
 * other half then, as its first. They go where the ring was, so both must have done with their
 * products. Warps that have ended are not waited for; one that came to the barrier of the cluster
 * and ended would count twice.
 */
template <int WGS, int BM, class sum_t>
static __device__ __forceinline__ void tile_exchange_pair(const qt_tile_base &a, const qt_ring &r,
                                                          tile_sums<BM, sum_t> *d)
{
    const int HALF = BM / 16, LINE = WGS * 128 * 16; /* of 8 tokens; bytes of 8 tokens */
    const int rank = (int)blockIdx.x & 1, place = a.ring_at + (int)threadIdx.x * 16;
    const uint32_t bar = qt_ring_spare(r), to_bar = ptx_cluster_map(bar, rank ^ 1);
    const uint32_t to = ptx_cluster_map(ptx_shared(qt_smem) + place, rank ^ 1);
    if (threadIdx.x == 0)
        ptx_barrier_expect(bar, HALF * LINE);
    ptx_cluster_arrive(); /* what was read of the ring has been used: no fence (600 clocks) */
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
 * The same of four blocks, of which each has a quarter of the tokens then. Its own sums go through
 * shared memory too, in the order of the blocks, as registers cannot be chosen by number (which is
 * why pairs, which can choose by a comparison, are 1 % faster by themselves).
 */
template <int WGS, int BM, class sum_t>
static __device__ __forceinline__ void tile_exchange_quad(const qt_tile_base &a, const qt_ring &r,
                                                          tile_sums<BM, sum_t> *d)
{
    const int QUARTER = BM / 32, LINE = WGS * 128 * 16;
    const int rank = (int)blockIdx.x & 3, place = a.ring_at + (int)threadIdx.x * 16;
    const uint32_t at = ptx_shared(qt_smem) + place, bar = qt_ring_spare(r);
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

/* ---- the warps that multiply -------------------------------------------------------------------
 */

template <int WGS, int BM, class Work>
static __device__ __forceinline__ void tile_multiply_all(const qt_tile_base &a, qt_ring r,
                                                         Work work)
{
    const int warp = (int)threadIdx.x / 32;
    const int segments = tile_segments(a);
#pragma unroll 1
    for (int segment = 0; segment < segments; segment++) {
        const tile_segment s = tile_segment_at(a, segment, BM);
        const int strip = s.row_tile * 4 * WGS + warp;
        tile_sums<BM, typename Work::sum> d = {};
        work.multiply(&d, &r, s, strip);
        if (!a.split_log2 && s.k0 > 0) {
            tile_give<WGS>(a, d);
            continue;
        }
        if (!a.split_log2 && s.k1 < a.k_stages)
            tile_collect<WGS>(a, &d, a.k_stages - s.k1);
        work.meet();
        /* One end for all, of which clusters do the first part: it is much to compile. Of few
         * tokens a cluster does not take more at a time than it has (w4ax, row, 4096 x 4096, tiles
         * of 16: 7.25 us instead of 6.8). */
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

/* Registers that a thread begins with, of a block that has all those of a multiprocessor. */
static __host__ __device__ constexpr int tile_launch_registers(int warpgroups)
{
    return 65536 / (128 * warpgroups) / 8 * 8;
}

/* Registers of a multiplying thread, of a block of wgs warpgroups of such and `others` whose
 * threads keep other_registers together: what all begin with is shared out anew. More than there
 * are would wait for ever. */
static __host__ __device__ constexpr int tile_registers(int wgs, int others, int other_registers,
                                                        int launch_registers)
{
    return (launch_registers * (wgs + others) - other_registers) / wgs / 8 * 8;
}

#endif
