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
    QTOOL_KV_INT4, /* codes 0..15, FP16 scales */
    QTOOL_KV_F16,  /* unquantized, for comparison */
};

/* INT4: tokens of a KV group. KV group g of a sequence is the tokens 64 g to 64 g + 63, without
 * token 0; the last one may be partial. For each KV head and channel its keys share a scale and a
 * zero-point. */
enum { QTOOL_KV_GROUP = 64 };
/* INT4: adjacent channels of a value that share a scale and a zero-point. */
enum { QTOOL_KV_CHANNELS = 16 };

/*
 * A cache in device memory. A page holds page_tokens tokens of every KV head. Paged: token i of
 * sequence b is on page table[b * table_pitch + i / page_tokens]. Contiguous (table NULL): sequence
 * b is page b, and page_tokens is its capacity.
 *
 * INT4 dequantizes channel d of a token and KV head to
 *
 *     key[d]   = (key_code[d] - zero) * |k_param[d]|        k_param: of the token's KV group
 *     value[d] = (value_code[d] - zero) * v_param           v_param: of the token and of d / 16
 *
 * where the low six bits of the FP16 number k_param are |zero|, and its sign is the sign of zero;
 * the low six bits of v_param are 4 * zero.
 *
 * The keys of token 0 of a sequence are an exception: k_first holds them in FP16, and their codes
 * are not used. In most models they differ strongly from all other keys.
 *
 * Keys: a 32-bit word holds the codes of eight adjacent channels, number 2 i + h (i = 0..3, h = 0,
 * 1) in bits 4 i + 16 h to 4 i + 16 h + 3. Bit 0 is the least significant. Values: byte head_dim /
 * 16 * i + j (i = 0..7) holds the codes of channels 16 j + 2 i, in bits 0 to 3, and 16 j + 2 i + 1.
 */
struct qtool_kv_cache {
    enum qtool_kv_format format;
    size_t heads;       /* KV heads */
    size_t head_dim;    /* 64 or 128 */
    size_t page_tokens; /* a multiple of 64 (INT4) or 16 (F16); with a table also a power of two */
    const int *table;   /* device, or NULL */
    size_t table_pitch; /* entries of `table` per sequence; with more than one sequence at least
                           ceil(options.max_length / page_tokens) */
    /* INT4: [pages][heads][page_tokens][head_dim / 2] bytes; F16: F16 [pages][heads][page_tokens]
     * [head_dim]. pages * heads * page_tokens must be below 2^32. The caller owns all arrays; k, v,
     * k_param, v_param, k_first and k_tail are 16-byte aligned. */
    void *k, *v;
    void *k_param; /* INT4: F16 [pages][heads][page_tokens / 64][head_dim] */
    /* INT4: F16 [pages][heads][page_tokens / 8][4][head_dim / 16][2]: token 8 a + b + 4 c of a page
     * and channel d are at [a][b][d / 16][c]. */
    void *v_param;
    void *k_first; /* INT4: F16 [sequences][heads][head_dim], the keys of token 0 */
    /* INT4: F16 [sequences][heads][64][head_dim], the keys of each sequence's last KV group, which
     * append reads to quantize that group again. Attention does not read it. `sequences`, here and
     * in k_first, is the largest sequence number + 1. */
    void *k_tail;
};

/*
 * Enqueues the quantization of `tokens` new tokens. k and v are [tokens][heads][head_dim] of
 * `dtype`; k is 16-byte aligned, v 2-byte aligned. Token i is written as token number position[i]
 * of sequence sequence[i]. All arrays are in device memory. The tokens of a sequence must follow
 * each other in the arrays, with consecutive positions. If L is the current length of a sequence,
 * its first new position is L, or, to replace tokens, any position from the start of its last KV
 * group, 64 * floor((L - 1) / 64), to L - 1.
 *
 * INT4 computes the following in FP32. Keys have one k_param per KV head, channel and KV group. low
 * and high are the smallest and the largest of its keys x that are in the cache, middle = (low +
 * high) / 2.
 *
 *     want    = F16(max(high - low, |middle| * 9 / 32) / 15), at least 96 * 2^-24
 *     z(s)    = clamp(rint(7.5 - middle * (1 / s)), -63, 63)
 *     near    = the FP16 number nearest to want whose low six bits are |z(want)|, the larger of two
 *               at equal distance
 *     zero    = z(near)
 *     k_param = near with |zero| as its low six bits and the sign of zero
 *     code    = clamp(rint(x * (1 / |k_param|) + zero), 0, 15)
 *
 * Values have one v_param per token, KV head and 16 channels. low is the smallest of the numbers x
 * of these channels and 0, high the largest.
 *
 *     zero    = rint(-60 * low / (high - low)) / 4, or 0 if low and high are 0
 *     v_param = the FP16 number nearest to F16((high - low) / 15) whose low six bits are 4 * zero,
 *               the larger of two at equal distance; 1 if that is 0
 *     code    = clamp(rint(x * (1 / v_param) + zero), 0, 15)
 *
 * where x is the input, clamped to the range of FP16; keys are then also rounded to FP16. rint
 * rounds ties to even. When tokens are added to a KV group, all its keys are quantized again; those
 * of earlier calls come from k_tail. The F16 format stores k and v clamped to the range of FP16.
 *
 * dependent_launch: not 0: programmatic dependent launch, as in struct qtool_matmul_options; only
 * if qtool_kernels_compute gives 90. `sequence`, `position`, `table` and k_tail are then read while
 * the preceding kernel, which must not write them, still runs; so that kernel must not be another
 * append to the cache.
 *
 * Sequence, position and page numbers are not checked. Returns QTOOL_UNSUPPORTED if a pointer is
 * NULL or the cache or dtype is invalid; 0 tokens are valid.
 */
int qtool_kv_append(const struct qtool_kv_cache *cache, const void *k, const void *v,
                    const int *sequence, const int *position, size_t tokens, enum qtool_dtype dtype,
                    int dependent_launch, void *stream);

struct qtool_kv_options {
    size_t batch;
    size_t heads;           /* query heads: a multiple of the cache's KV heads */
    size_t max_length;      /* maximum length of a sequence in tokens */
    float scale;            /* factor of the scores, positive; usually 1 / sqrt(head_dim) */
    enum qtool_dtype dtype; /* of q and out */
    int device;             /* CUDA device ordinal; must be the current device */
    /* Not 0: use programmatic dependent launch (PDL). Attention may start to read the cache while
     * the preceding kernel in the stream still runs. If that kernel was itself launched with PDL
     * and its predecessor triggers early (as the kernel of qtool_kv_append does), that predecessor
     * may still run, too, and so on. These kernels may write q and the last KV group of each
     * sequence (F16: the last token), but no other tokens, lengths or tables. */
    int dependent_launch;
};

/* Result of planning; read-only for callers. */
struct qtool_kv_plan {
    struct qtool_kv_options options;
    size_t split_tokens;    /* split-KV: tokens of a sequence per thread block; a multiple of 128 */
    size_t splits;          /* ceil(max_length / split_tokens); 0 if the plan was refused */
    size_t workspace_bytes; /* that run needs; never 0 */
    char reason[160];       /* error message when the status is not QTOOL_OK, else "" */
    QTOOL_KERNELS_OPAQUE(64) internal;
};

/* Plans attention over caches of the format, heads and head_dim of `cache`. split_tokens: 0 (the
 * planner chooses), or a multiple of 128, at most 2^30, that gives at most 256 splits. If the
 * status is not QTOOL_OK, out->reason says why and run refuses the plan. */
int qtool_kv_attention_plan(struct qtool_kv_plan *out, const struct qtool_kv_cache *cache,
                            const struct qtool_kv_options *opt, size_t split_tokens);

/*
 * Enqueues, for every sequence b and query head h,
 *
 *     out[b][h] = sum over i < length[b] of p[i] * value[i]
 *     p         = softmax over i < length[b] of (options.scale * dot(q[b][h], key[i]))
 *
 * where key and value belong to sequence b and KV head floor(h * cache->heads / options.heads). q
 * and out are [batch][heads][head_dim] of options.dtype, 16-byte aligned. length [batch] is in
 * device memory; a length above max_length is cut to max_length, and a length of 0 gives zeros.
 * Returns QTOOL_UNSUPPORTED, and enqueues nothing, if an address is misaligned or NULL or the cache
 * does not match the plan.
 */
int qtool_kv_attention_run(const struct qtool_kv_plan *plan, const struct qtool_kv_cache *cache,
                           void *out, const void *q, const int *length, void *workspace,
                           void *stream);

#ifdef __cplusplus
}
#endif

#endif
