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
        BYTES = 2 * ROWS + F::PARAMS * F::TOKENS * 4,
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

/* ---- producer ------------------------------------------------------------------------------- */

/* Addresses of a lane's copies. A lane copies 16 bytes of one of the rows that a warp copies at
 * once, and the value parameters of four tokens. A row index counts tokens in
 * [pages][heads][page_tokens]. */
struct kv_source {
    const unsigned char *k, *v; /* the lane's part of row 0 */
    const __half2 *param;
    uint32_t k_to, v_to, param_to; /* offsets in a stage */
    const int *pages;              /* page table of the sequence, or NULL */
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
    s.param = kv_kept(c.param + lane % 4 * 4);
    s.row = (int)kv_kept(lane / CHUNKS);
    s.k_to = kv_kept(F::key_at(lane / CHUNKS, lane % CHUNKS));
    s.v_to = kv_kept(F::value_at(lane / CHUNKS, lane % CHUNKS) + kv_stage<F>::ROWS);
    s.param_to = kv_kept(lane * 16 + kv_stage<F>::PARAM_AT);
    s.pages = c.table ? c.table + (size_t)w.sequence * c.table_pitch : NULL;
    s.page_rows = page_rows;
    s.base = (uint32_t)(w.kv_head * c.page_tokens) + (c.table ? 0 : w.sequence * page_rows);
    return s;
}

/* Returns the row of `token`; the 16 tokens from there on are in one page. */
static __device__ __forceinline__ uint32_t kv_group_row(const kv_args &a, const kv_source &s,
                                                        int token)
{
    if (!s.pages)
        return s.base + token;
    return s.base + s.pages[token >> a.cache.page_shift] * s.page_rows +
           (token & (a.cache.page_tokens - 1));
}

/* Starts the copies of the tokens from token0 on to a stage and commits them as one cp.async group.
 * Tokens from w.end on become zeros. */
template <class F>
static __device__ __forceinline__ void kv_copy(const kv_args &a, const kv_source &s,
                                               const kv_work &w, uint32_t dst, int token0)
{
    enum { AT_ONCE = 32 * 16 / F::ROW, PER_GROUP = 16 / AT_ONCE, GROUPS = F::TOKENS / 16 };
    const int remaining = w.end - token0;
    if (remaining > 0) {
        uint32_t group_row[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            group_row[g] = kv_group_row(a, s, remaining > g * 16 ? token0 + g * 16 : token0);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const unsigned char *k = s.k + (size_t)group_row[g] * F::ROW;
            const unsigned char *v = s.v + (size_t)group_row[g] * F::ROW;
#pragma unroll
            for (int i = 0; i < PER_GROUP; i++) {
                const int rows = g * 16 + i * AT_ONCE;
                const uint32_t bytes = rows + s.row < remaining ? 16 : 0;
                ptx_copy_16_zero(dst + F::moved(s.k_to, rows), k + i * 512, bytes);
                ptx_copy_16_zero(dst + F::moved(s.v_to, rows), v + i * 512, bytes);
            }
        }
        if (F::PARAMS && w.lane < F::TOKENS / 4) {
            const int count = min(max(remaining - w.lane * 4, 0), 4);
            ptx_copy_16_zero(dst + s.param_to,
                             s.param + (w.lane < 4 ? group_row[0] : group_row[GROUPS - 1]),
                             (uint32_t)count * 4);
        }
    }
    ptx_copy_commit();
}

#endif
