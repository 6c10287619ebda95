/*
 * What a block of the attention kernel works on, and the cache into its rings.
 */
#ifndef QT_KERNELS_CUDA_KV4_WORK_CUH
#define QT_KERNELS_CUDA_KV4_WORK_CUH

#include "kernels/cuda/kv4/cache.cuh"

/* SUMS_AT_ONCE: that a thread has under way; more splits are added in two blocks. */
enum { SPLIT_UNIT = 128, MAX_SPLITS = 256, SUMS_AT_ONCE = 8 };

struct kv_args {
    kv_view cache;
    const void *q;
    void *out;
    const int *length;
    float *partial;          /* [sequence][query head][split][D + 4]: sums, maximum, denominator */
    unsigned *arrivals;      /* [sequence][grid.y], 0 between launches; or NULL: partial is */
    int heads, group, tiles; /* query heads; per KV head; tiles of them */
    int split_tokens, max_length;
    float scale_log2; /* softmax scale * log2(e) */
    int bf16;
    int dependent; /* launched before the previous kernel has ended */
};

extern __shared__ __align__(256) unsigned char kv_smem[]; /* F16 rows: addresses by XOR */

template <class F> struct kv_slot {
    enum {
        ROWS = F::TOKENS * F::ROW,
        PARAM_AT = 2 * ROWS,
        BYTES = 2 * ROWS + F::PARAMS * F::TOKENS * 4,
        TILES = F::TOKENS / 16,
        STEPS = F::DIM / 16,
    };
};

struct kv_work {
    int lane, warp, sequence, kv_head, head0, heads; /* query heads of this block */
    int begin, end;                                  /* tokens of its split */
};

/* All but begin and end. */
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

/* ---- the ring ----------------------------------------------------------------------------------
 */

/* What a lane copies: 16 bytes of one of the rows that a warp copies at once, and parameters of
 * four tokens. */
struct kv_source {
    const unsigned char *k, *v; /* of the row of place 0 */
    const __half2 *param;
    uint32_t k_to, v_to, param_to; /* in a slot */
    const int *pages;              /* of the sequence, or NULL */
    uint32_t base;        /* place of the head's first token: of a page 0, or of the sequence */
    uint32_t page_places; /* from one page to the next */
    int row;              /* of those copied at once */
};

template <class F>
static __device__ __forceinline__ kv_source kv_source_of(const kv_args &a, const kv_work &w)
{
    enum { CHUNKS = F::ROW / 16 };
    const kv_view &c = a.cache;
    const uint32_t page_places = (uint32_t)(c.heads * c.page_tokens);
    const unsigned lane = (unsigned)w.lane;
    kv_source s;
    s.k = kv_kept(c.k + lane * 16);
    s.v = kv_kept(c.v + lane * 16);
    s.param = kv_kept(c.param + lane % 4 * 4);
    s.row = (int)kv_kept(lane / CHUNKS);
    s.k_to = kv_kept(F::key_at(lane / CHUNKS, lane % CHUNKS));
    s.v_to = kv_kept(F::value_at(lane / CHUNKS, lane % CHUNKS) + kv_slot<F>::ROWS);
    s.param_to = kv_kept(lane * 16 + kv_slot<F>::PARAM_AT);
    s.pages = c.table ? c.table + (size_t)w.sequence * c.table_pitch : NULL;
    s.page_places = page_places;
    s.base = (uint32_t)(w.kv_head * c.page_tokens) + (c.table ? 0 : w.sequence * page_places);
    return s;
}

/* Where the 16 tokens from `token` on lie, which a page holds together. */
static __device__ __forceinline__ uint32_t kv_group_place(const kv_args &a, const kv_source &s,
                                                          int token)
{
    if (!s.pages)
        return s.base + token;
    return s.base + s.pages[token >> a.cache.page_shift] * s.page_places +
           (token & (a.cache.page_tokens - 1));
}

/* Starts copying the slot of tokens token0... and ends the group of copies. Tokens from `end` on
 * become zeros. */
template <class F>
static __device__ __forceinline__ void kv_copy(const kv_args &a, const kv_source &s,
                                               const kv_work &w, uint32_t dst, int token0)
{
    enum { AT_ONCE = 32 * 16 / F::ROW, PER_GROUP = 16 / AT_ONCE, GROUPS = F::TOKENS / 16 };
    const int left = w.end - token0;
    if (left > 0) {
        uint32_t place[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            place[g] = kv_group_place(a, s, left > g * 16 ? token0 + g * 16 : token0);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const unsigned char *k = s.k + (size_t)place[g] * F::ROW;
            const unsigned char *v = s.v + (size_t)place[g] * F::ROW;
#pragma unroll
            for (int i = 0; i < PER_GROUP; i++) {
                const int rows = g * 16 + i * AT_ONCE;
                const uint32_t bytes = rows + s.row < left ? 16 : 0;
                ptx_copy_16_zero(dst + F::moved(s.k_to, rows), k + i * 512, bytes);
                ptx_copy_16_zero(dst + F::moved(s.v_to, rows), v + i * 512, bytes);
            }
        }
        if (F::PARAMS && w.lane < F::TOKENS / 4) {
            const int count = min(max(left - w.lane * 4, 0), 4);
            ptx_copy_16_zero(dst + s.param_to,
                             s.param + (w.lane < 4 ? place[0] : place[GROUPS - 1]),
                             (uint32_t)count * 4);
        }
    }
    ptx_copy_commit();
}

#endif
