/*
 * Attention of decode steps over a 4-bit key-value cache, for CUDA devices of compute capability
 * 8.0 and up. Plain C; part of libqtool_kernels and as self-contained as qtool_kernels.h, whose
 * status codes it uses.
 *
 *     qtool_kv_append(&cache, k, v, ...)                  quantizes the new tokens into the cache
 *     qtool_kv_attention_plan(&plan, &cache, ...)         once per batch size and longest length
 *     qtool_kv_attention_run(&plan, &cache, out, q, length, workspace, stream)
 *
 * append and run only enqueue kernels. Results are bitwise repeatable; those of a sequence depend
 * on nothing but that sequence and plan->split_tokens.
 */
#ifndef QTOOL_KV4_H
#define QTOOL_KV4_H

#include "qtool_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum qtool_kv_format {
    QTOOL_KV_INT4, /* codes 0..15, two to a byte, the even channel in the low half */
    QTOOL_KV_F16,  /* for comparison */
};

/*
 * Device memory of a cache, in pages of page_tokens tokens of every KV head. Paged: sequence b has
 * token i on page table[b * table_pitch + i / page_tokens]. Contiguous (table NULL): sequence b is
 * page b, and page_tokens its capacity.
 *
 * INT4 keys:   key[d]   = (code - k_zero[d]) * k_scale[d], scales fixed per head and channel
 * INT4 values: value[d] = code * scale + least, per token and head
 */
struct qtool_kv_cache {
    enum qtool_kv_format format;
    size_t heads;       /* of keys and values */
    size_t head_dim;    /* 64 or 128 */
    size_t page_tokens; /* a multiple of 16; with a table a power of two */
    const int *table;
    size_t table_pitch; /* of several sequences at least ceil(max_length / page_tokens) */
    /* [pages][heads][page_tokens][head_dim] codes or F16, 16-byte aligned; fewer than 2^32 rows */
    void *k, *v;
    void *v_param;        /* INT4: F16 [pages][heads][page_tokens][2], scale and least; aligned */
    const float *k_scale; /* INT4: [heads][head_dim], positive */
    const float *k_zero;  /* INT4: [heads][head_dim], any value */
};

/*
 * Writes `tokens` new tokens: k and v [tokens][heads][head_dim] of `dtype`; token i becomes number
 * position[i] of sequence[i]. Ties to even. A value's scale is (max - min) / 15 rounded to F16, and
 * 1 where that is 0; values beyond the range of F16 are clamped.
 */
int qtool_kv_append(const struct qtool_kv_cache *cache, const void *k, const void *v,
                    const int *sequence, const int *position, size_t tokens, enum qtool_dtype dtype,
                    void *stream);

struct qtool_kv_options {
    size_t batch;
    size_t heads;           /* of queries; a multiple of the cache's */
    size_t max_length;      /* of any sequence */
    float scale;            /* of the products, positive; mostly 1 / sqrt(head_dim) */
    enum qtool_dtype dtype; /* of q and out */
    int device;             /* CUDA ordinal; must be the current device */
    /* Programmatic dependent launch: attention may begin to read the cache while the previous
     * kernel of the stream ends, and with it those in front of it that let the next begin early, as
     * qtool_kv_append does and what is launched so itself. They may write q and the last token of each
     * sequence, but neither other tokens nor lengths and tables. */
    int dependent_launch;
};

struct qtool_kv_plan {
    struct qtool_kv_options options;
    size_t split_tokens; /* of a sequence, per block; a multiple of 128 */
    size_t splits;       /* of max_length; 0 if refused, and run refuses too */
    size_t workspace_bytes;
    size_t cache_heads;
    int kernel;       /* its number */
    int dependent;    /* launched so: asked for, on compute capability 9.0 */
    int in_zeros;     /* sums of splits meet in the workspace's zeros, or else behind them */
    char reason[160]; /* why not, when the status is not OK */
};

/* Chooses split_tokens, unless `split_tokens` is not 0. The workspace is 256-byte aligned; its
 * first QTOOL_WORKSPACE_ZEROED bytes are to be zero before its first use, and runs leave them
 * so. */
int qtool_kv_attention_plan(struct qtool_kv_plan *out, const struct qtool_kv_cache *cache,
                            const struct qtool_kv_options *opt, size_t split_tokens);

/*
 * out[b][h][d] = sum_i softmax_i(scale * q[b][h] . key[i]) * value[i][d] over the length[b] tokens
 * of sequence b, of KV head h * cache heads / heads. q and out [batch][heads][head_dim], 16-byte
 * aligned; length [batch] on the device, 1..max_length (more is cut; a length of 0 gives zeros).
 */
int qtool_kv_attention_run(const struct qtool_kv_plan *plan, const struct qtool_kv_cache *cache,
                           void *out, const void *q, const int *length, void *workspace,
                           void *stream);

#ifdef __cplusplus
}
#endif

#endif
