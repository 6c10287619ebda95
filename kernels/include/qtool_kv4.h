/*
 * Decode attention over a 4-bit key-value cache, for CUDA devices of compute capability 8.0 and
 * higher. Plain C; part of libqtool_kernels. Status codes and the workspace rules are those of
 * qtool_kernels.h.
 *
 *     qtool_kv_append(&cache, k, v, ...)                  quantizes new tokens into the cache
 *     qtool_kv_attention_plan(&plan, &cache, ...)         once per batch size and maximum length
 *     qtool_kv_attention_run(&plan, &cache, out, q, length, workspace, stream)
 *
 * append and run only enqueue kernels. Results are bitwise reproducible: the result of a sequence
 * depends only on that sequence and on plan->split_tokens.
 */
#ifndef QTOOL_KV4_H
#define QTOOL_KV4_H

#include "qtool_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum qtool_kv_format {
    QTOOL_KV_INT4, /* codes 0..15 with scales and minima */
    QTOOL_KV_F16,  /* unquantized, for comparison */
};

enum { QTOOL_KV_GROUP = 64 }; /* INT4: tokens whose keys share scales and minima */

/*
 * A cache in device memory. A page holds page_tokens tokens of every KV head. Paged: token i of
 * sequence b is on page table[b * table_pitch + i / page_tokens]. Contiguous (table NULL): sequence
 * b is page b, and page_tokens is its capacity.
 *
 * INT4 dequantizes channel d of a token and head to
 *
 *     key[d]   = key_code[d] * k_param[0][d] + k_param[1][d]     k_param: of the token's group
 *     value[d] = value_code[d] * scale + minimum
 *
 * but for the keys of token 0 of a sequence: they are unlike all others in most models, so k_first
 * holds them exactly, and their codes are not used.
 *
 * Of eight value codes in a 32-bit word, channel c is in the 4 bits from 4 c on; of eight key
 * codes, channel 2 i + h is in the 4 bits from 4 i + 16 h on.
 */
struct qtool_kv_cache {
    enum qtool_kv_format format;
    size_t heads;       /* KV heads */
    size_t head_dim;    /* 64 or 128 */
    size_t page_tokens; /* a multiple of 64 (INT4) or 16 (F16); with a table also a power of two */
    const int *table;
    size_t table_pitch; /* with several sequences at least ceil(max_length / page_tokens) */
    /* [pages][heads][page_tokens][head_dim] codes or F16; fewer than 2^32 rows of head_dim. All
     * arrays are 16-byte aligned. */
    void *k, *v;
    void *k_param; /* INT4: F16 [pages][heads][page_tokens / 64][2][head_dim], scales and minima */
    void *v_param; /* INT4: F16 [pages][heads][page_tokens][2], scale and minimum */
    void *k_first; /* INT4: F16 [sequences][heads][head_dim] */
    /* INT4: F16 [sequences][heads][64][head_dim], the exact keys of each sequence's last group.
     * Attention does not read it. */
    void *k_tail;
};

/*
 * Enqueues the quantization of `tokens` new tokens, k (16-byte aligned) and v
 * [tokens][heads][head_dim] of `dtype`.
 * Token i is written as token number position[i] of sequence sequence[i]. All arrays are in device
 * memory. The tokens of a sequence must follow each other in the arrays, with consecutive
 * positions. The first of them is the sequence's length, or less, down to the start of its last
 * group, to replace tokens.
 *
 * INT4 computes, over the channels of a token and head for values, and over the tokens present of a
 * group, but token 0, for each head and channel of keys, in FP32:
 *
 *     minimum = F16(min over x)
 *     scale   = F16((max over x - min over x) / 15), or 1 if that is 0
 *     code    = clamp(rint((x - minimum) * (1 / scale)), 0, 15)
 *
 * where x is clamped to the range of FP16, and keys are rounded to FP16 first. rint rounds ties to
 * even. All keys of a group that gets a token are quantized again, the earlier ones from k_tail. The
 * F16 format stores k and v clamped to the range of FP16.
 *
 * Sequence, position and page numbers are not checked. Returns QTOOL_UNSUPPORTED if a pointer is
 * NULL or the cache or dtype is invalid; 0 tokens are valid.
 */
int qtool_kv_append(const struct qtool_kv_cache *cache, const void *k, const void *v,
                    const int *sequence, const int *position, size_t tokens, enum qtool_dtype dtype,
                    void *stream);

struct qtool_kv_options {
    size_t batch;
    size_t heads;           /* query heads: a multiple of the cache's KV heads */
    size_t max_length;      /* maximum length of a sequence in tokens */
    float scale;            /* factor of the scores, positive; usually 1 / sqrt(head_dim) */
    enum qtool_dtype dtype; /* of q and out */
    int device;             /* CUDA device ordinal; must be the current device */
    /* Not 0: use programmatic dependent launch (PDL). Attention may start to read the cache before
     * the preceding kernel in the stream has finished, and before kernels that allowed PDL to that
     * kernel (qtool_kv_append does) have finished. Those kernels may write q and the last group of
     * each sequence (F16: the last token), but no other tokens, lengths or tables. */
    int dependent_launch;
};

/* Result of planning; read-only for callers. */
struct qtool_kv_plan {
    struct qtool_kv_options options;
    size_t split_tokens;    /* tokens of a sequence per thread block (split-K); a multiple of 128 */
    size_t splits;          /* ceil(max_length / split_tokens); 0 if the plan was refused */
    size_t workspace_bytes; /* that run needs; never 0 */
    char reason[160];       /* error message when the status is not QTOOL_OK, else "" */
    QTOOL_KERNELS_OPAQUE(64) internal;
};

/* Plans attention over caches of the format, heads and head_dim of `cache`. split_tokens: 0 lets
 * the planner choose. If the status is not QTOOL_OK, out->reason says why and run refuses the plan.
 * */
int qtool_kv_attention_plan(struct qtool_kv_plan *out, const struct qtool_kv_cache *cache,
                            const struct qtool_kv_options *opt, size_t split_tokens);

/*
 * Enqueues, for every sequence b and query head h,
 *
 *     out[b][h] = sum over i < length[b] of p[i] * value[i]
 *     p         = softmax over i < length[b] of (options.scale * dot(q[b][h], key[i]))
 *
 * where key and value are those of sequence b and KV head h * cache heads / query heads. q and out
 * are [batch][heads][head_dim] of options.dtype, 16-byte aligned. length [batch] is in device
 * memory; a length above max_length is cut to max_length, and a length of 0 gives zeros. Returns
 * QTOOL_UNSUPPORTED, and enqueues nothing, if an address is misaligned or NULL or the cache does
 * not match the plan.
 */
int qtool_kv_attention_run(const struct qtool_kv_plan *plan, const struct qtool_kv_cache *cache,
                           void *out, const void *q, const int *length, void *workspace,
                           void *stream);

#ifdef __cplusplus
}
#endif

#endif
