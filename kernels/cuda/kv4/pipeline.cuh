/*
 * The attention kernel: its arguments, the work of a thread block, and the producer side of the
 * pipelines, which copies the cache to shared memory.
 */
#ifndef QT_KERNELS_CUDA_KV4_PIPELINE_CUH
#define QT_KERNELS_CUDA_KV4_PIPELINE_CUH

#include "kernels/cuda/kv4/cache.cuh"

/* SUMS_AT_ONCE: partial sums that a thread loads at once. With more splits than that, two thread
 * blocks share the combine step. */
enum { SPLIT_UNIT = 128, MAX_SPLITS = 256, SUMS_AT_ONCE = 8 };

struct kv_args {
    kv_view cache;
    const void *q;
    void *out;
    const int *length;
    float *partial;     /* [sequence][query head][split][D + 4]: output, maximum, denominator */
    unsigned *arrivals; /* [sequence][grid.y], 0 between launches; or NULL: `partial` is 0 between
                         * launches */
    int heads, group, tiles; /* query heads; query heads per KV head; tiles of a group */
    int split_tokens, max_length;
    float scale_log2; /* softmax scale * log2(e) */
    int bf16;
    int dependent; /* launched before the previous kernel has ended */
};

extern __shared__ __align__(256) unsigned char kv_smem[]; /* F16 addresses are computed by XOR */

/* Layout of a pipeline stage: TOKENS tokens of one KV head. */
template <class F> struct kv_stage {
    enum {
        ROWS = F::TOKENS * F::ROW,
        PARAM_AT = 2 * ROWS,
        GRID_AT = PARAM_AT + F::TOKENS * F::PARAMS,
        BYTES = GRID_AT + F::GRID,
        TILES = F::TOKENS / 16,
        STEPS = F::DIM / 16,
    };
};

struct kv_work {
    int lane, warp, sequence, kv_head, head0, heads; /* query heads of this thread block */
    int begin, end;                                  /* tokens of its split */
};

/* Sets all fields but begin and end. */
static __device__ __forceinline__ kv_work kv_work_open(const kv_args &a, int tile_heads)
{
    kv_work w;
    w.lane = (int)kv_kept(threadIdx.x % 32);
    w.warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    w.sequence = (int)blockIdx.z;
    w.kv_head = (int)blockIdx.y / a.tiles;
    int first = (int)blockIdx.y % a.tiles * tile_heads;
    w.head0 = w.kv_head * a.group + first;
    w.heads = min(tile_heads, a.group - first);
    return w;
}

/* A stage of a warp. Warps take stages round-robin; or pairs of stages, each a KV group, so that
 * queries are multiplied by the scales of a group once. */
template <class F, int WARPS> struct kv_turn {
    enum { ROUND = WARPS * F::TOKENS, PAIRS = F::GROUP == 2 * F::TOKENS };
    int token, step; /* first token; tokens from there to the next stage of the warp */

    /* The first one. Pairs, where they give no warp more stages, or few more. */
    __device__ __forceinline__ explicit kv_turn(const kv_work &w)
    {
        const int tokens = w.end - w.begin;
        const bool paired =
            PAIRS && ((tokens + ROUND - 1) / ROUND % 2 == 0 || tokens >= 16 * ROUND);
        step = paired ? F::TOKENS : ROUND;
        token = w.begin + w.warp * (paired ? 2 * F::TOKENS : F::TOKENS);
    }
    /* Whether it is the first one of the warp in a KV group. */
    __device__ __forceinline__ bool opens() const
    {
        return step != 2 * ROUND - F::TOKENS;
    }
    __device__ __forceinline__ void next()
    {
        token += step;
        if (PAIRS)
            step = 2 * ROUND - step;
    }
};

/* ---- producer ------------------------------------------------------------------------------- */

/* Addresses of a lane's copies. A lane copies 16 bytes of one of the rows that a warp copies at
 * once, and 16 bytes each of the parameters of values and of keys. A row index counts
 * tokens in [pages][heads][page_tokens]. */
struct kv_source {
    const unsigned char *k, *v;             /* the lane's part of row 0 */
    const unsigned char *param;             /* the lane's part of those of rows from 0 on */
    const unsigned char *grid;              /* the lane's part of the first group */
    uint32_t k_to, v_to, param_to, grid_to; /* offsets in a stage */
    const int *pages;                       /* page table of the sequence, or NULL */
    uint32_t base;      /* row of the head's first token in page 0, or in the sequence's page */
    uint32_t page_rows; /* rows per page */
    int row;            /* the lane's row among those copied at once */
};

template <class F>
static __device__ __forceinline__ kv_source kv_source_of(const kv_args &a, const kv_work &w)
{
    enum { CHUNKS = F::ROW / 16 };
    const kv_view &c = a.cache;
    const uint32_t page_rows = (uint32_t)(c.heads * c.page_tokens);
    const unsigned lane = (unsigned)w.lane;
    kv_source s;
    s.k = kv_kept(c.k + lane * 16);
    s.v = kv_kept(c.v + lane * 16);
    s.param = (const unsigned char *)c.v_param + lane * 16;
    s.grid = c.k_param + lane * 16;
    s.row = (int)kv_kept(lane / CHUNKS);
    s.k_to = kv_kept(F::key_at(lane / CHUNKS, lane % CHUNKS));
    s.v_to = kv_kept(F::value_at(lane / CHUNKS, lane % CHUNKS) + kv_stage<F>::ROWS);
    s.param_to = kv_kept(lane * 16 + kv_stage<F>::PARAM_AT);
    s.grid_to = kv_kept(F::grid_at(lane) + kv_stage<F>::GRID_AT);
    s.pages = c.table ? c.table + (size_t)w.sequence * c.table_pitch : NULL;
    s.page_rows = page_rows;
    s.base = (uint32_t)(w.kv_head * c.page_tokens) + (c.table ? 0 : w.sequence * page_rows);
    return s;
}

/* Starts the copies of the keys of token 0, in the same cp.async group as what is copied next. */
template <class F>
static __device__ __forceinline__ void kv_copy_first(const kv_args &a, const kv_work &w,
                                                     uint32_t dst)
{
    const size_t row = (size_t)w.sequence * a.cache.heads + w.kv_head;
    if (F::FIRST && w.lane < F::FIRST / 16)
        ptx_copy_16(dst + F::grid_at((unsigned)w.lane),
                    a.cache.k_first + row * F::DIM + w.lane * 8);
}

/* Returns the row of a stage's first token. A stage is within one page, and within one group. */
static __device__ __forceinline__ uint32_t kv_stage_row(const kv_args &a, const kv_source &s,
                                                        int token)
{
    if (!s.pages)
        return s.base + token;
    return s.base + s.pages[token >> a.cache.page_shift] * s.page_rows +
           (token & (a.cache.page_tokens - 1));
}

/* Starts the copies of the tokens from token0 on to a stage and commits them as one cp.async group.
 * Tokens from w.end on become zeros, but not their value parameters. grid: key parameters, too. */
template <class F>
static __device__ __forceinline__ void kv_copy(const kv_args &a, const kv_source &s,
                                               const kv_work &w, uint32_t dst, int token0,
                                               uint32_t row, bool grid)
{
    enum { AT_ONCE = 32 * 16 / F::ROW };
    const int remaining = w.end - token0;
    if (remaining > 0) {
        const unsigned char *k = s.k + (size_t)row * F::ROW, *v = s.v + (size_t)row * F::ROW;
#pragma unroll
        for (int i = 0; i < F::TOKENS / AT_ONCE; i++) {
            const uint32_t bytes = i * AT_ONCE + s.row < remaining ? 16 : 0;
            ptx_copy_16_zero(dst + F::moved(s.k_to, i * AT_ONCE), k + i * 512, bytes);
            ptx_copy_16_zero(dst + F::moved(s.v_to, i * AT_ONCE), v + i * 512, bytes);
        }
        if (F::PARAMS && w.lane < F::TOKENS * F::PARAMS / 16)
            ptx_copy_16(dst + s.param_to, s.param + (size_t)row * F::PARAMS);
        if (F::GRID && grid && w.lane < F::GRID / 16)
            ptx_copy_16(dst + s.grid_to, s.grid + (size_t)(row / F::GROUP) * F::GRID);
    }
    ptx_copy_commit();
}

#endif
