/*
 * What a block of the attention kernel works on, and the cache into its rings.
 */
#ifndef QT_CUDA_KV4_WORK_CUH
#define QT_CUDA_KV4_WORK_CUH

#include "kernels/cuda/kv4_cache.cuh"

enum { WARPS = 4, THREADS = WARPS * 32, SPLIT_UNIT = 128, MAX_SPLITS = 256 };

struct kv_args {
    kv_view cache;
    const void *q;
    void *out;
    const int *length;
    float *partial;          /* [sequence][query head][split][D + 4]: sums, maximum, denominator */
    unsigned *arrivals;      /* [sequence][grid.y], 0 between launches */
    int heads, group, tiles; /* query heads; per KV head; tiles of them */
    int split_tokens, max_length;
    float scale_log2; /* softmax scale * log2(e) */
    int bf16;
};

extern __shared__ __align__(128) unsigned char kv_smem[];

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
    w.lane = (int)threadIdx.x % 32;
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

/* What a lane copies from: chunk `lane` of the rows from place 0 on. */
struct kv_source {
    const unsigned char *k, *v;
    const __half2 *param; /* lane % 4 * 4 further */
    const int *pages;     /* of the sequence, or NULL */
    uint32_t base;        /* place of the head's first token: of a page 0, or of the sequence */
    uint32_t page_places; /* from one page to the next */
};

static __device__ __forceinline__ kv_source kv_source_of(const kv_args &a, const kv_work &w)
{
    const kv_view &c = a.cache;
    const uint32_t page_places = (uint32_t)(c.heads * c.page_tokens);
    kv_source s;
    s.k = c.k + w.lane * 16;
    s.v = c.v + w.lane * 16;
    s.param = c.param + w.lane % 4 * 4;
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
    enum { CHUNKS = F::ROW / 16, AT_ONCE = 32 / CHUNKS, PER_GROUP = 16 / AT_ONCE };
    const int left = w.end - token0, row = w.lane / CHUNKS, chunk = w.lane % CHUNKS;
    if (left > 0) {
#pragma unroll
        for (int g = 0; g < F::TOKENS / 16; g++) {
            const uint32_t place = kv_group_place(a, s, left > g * 16 ? token0 + g * 16 : token0);
            const unsigned char *k = s.k + (size_t)place * F::ROW;
            const unsigned char *v = s.v + (size_t)place * F::ROW;
#pragma unroll
            for (int i = 0; i < PER_GROUP; i++) {
                const int in_slot = g * 16 + i * AT_ONCE + row;
                const uint32_t bytes = in_slot < left ? 16 : 0;
                ptx_copy_16_zero(dst + F::key_at(in_slot, chunk), k + i * 512, bytes);
                ptx_copy_16_zero(dst + kv_slot<F>::ROWS + F::value_at(in_slot, chunk), v + i * 512,
                                 bytes);
            }
            if (F::PARAMS && w.lane / 4 == g) {
                const int count = min(max(left - w.lane * 4, 0), 4);
                ptx_copy_16_zero(dst + kv_slot<F>::PARAM_AT + w.lane * 16, s.param + place,
                                 (uint32_t)count * 4);
            }
        }
    }
    ptx_copy_commit();
}

#endif
