/*
 * The kernels of a decoder beside matrix products, for CUDA devices of compute capability 8.0 and
 * higher: embedding, residual add and norm, query and key heads with the append to a cache,
 * attention over an FP16 cache, activation, the choice of experts, and that of the next token. Plain
 * C; part of libqtool_kernels. Status codes are those of qtool_kernels.h.
 *
 *     qtool_decoder_run(&op, dependent_launch, stream)        enqueues one kernel
 *
 * Hidden states are FP32, because in many models some of their channels grow beyond the range of
 * FP16 or beyond 2^11 times the updates that are added to them. Linear inputs and outputs are FP16;
 * what exceeds the range of FP16 becomes +-65504. Sums are FP32, in an order that depends only on
 * the shape, so results are bitwise reproducible.
 *
 * All arrays are contiguous and in device memory. FP32 and INT32 arrays are 4-byte aligned, FP16
 * arrays 16-byte aligned unless stated otherwise. Token numbers, positions and sequence numbers are
 * not checked.
 */
#ifndef QTOOL_DECODER_H
#define QTOOL_DECODER_H

#include "qtool_kv4.h"
#include "qtool_w4ax.h"

#ifdef __cplusplus
extern "C" {
#endif

/* hidden[i] = factor * table[ids[i]] + positions[position[i] + position_offset] for m tokens i. */
struct qtool_decoder_embed {
    size_t m, n;           /* n: width of the hidden states */
    float *hidden;         /* [m][n] */
    const void *table;     /* F16 [vocabulary][n], 2-byte aligned */
    const void *positions; /* F16 [][n], 2-byte aligned; NULL: nothing is added */
    const int *ids;        /* [m] */
    const int *position;   /* [m]; used with `positions` */
    int position_offset;
    float factor;
};

enum qtool_decoder_norm_kind { QTOOL_DECODER_RMS, QTOOL_DECODER_LAYER_NORM };

/* x / rms(x) * weight, or (x - mean) / sqrt(variance + eps) * weight + bias. */
struct qtool_decoder_norm {
    enum qtool_decoder_norm_kind kind;
    const float *weight; /* NULL: no norm, x itself */
    const float *bias;   /* LAYER_NORM; NULL: 0 */
    float eps;
};

/* Hidden states grow by factor * norm(x + bias). */
struct qtool_decoder_addend {
    const void *x;     /* F16 [rows of hidden][n]; NULL: nothing */
    const float *bias; /* [n], or NULL */
    struct qtool_decoder_norm norm;
};

/*
 * Residual add and norm of m rows. Row i of out comes from row first + i * step of hidden:
 *
 *     hidden += factor * norm(add[0]) + factor * norm(add[1]);   hidden = after(hidden);
 *     out = norm(hidden)
 */
struct qtool_decoder_add_norm {
    size_t m, n;        /* n: at most 32768 */
    size_t first, step; /* rows of hidden and of the addends */
    float *hidden;      /* FP32 [][n]; not written if there are no addends, `after` or `scale` */
    struct qtool_decoder_addend add[2];
    float factor;
    struct qtool_decoder_norm after, norm;
    void *out; /* F16 [m][n]; NULL: not needed */
    /* On the host, not NULL: out, which may then remain unwritten but is not NULL, is quantized to
     * acts, as by qtool_w4ax_quantize without a norm. */
    const struct qtool_w4ax_input *w4ax;
    struct qtool_w4ax_acts acts;
    float scale; /* of the hidden states, behind `after`; 0: none */
};

/*
 * Bias, norm and rotary embedding of query and key heads, bias of values, and the append of keys
 * and values to a cache, for m tokens. The rotary embedding rotates the pairs (i, i + rotary / 2),
 * or (2i, 2i + 1) if `interleaved`, for i < rotary / 2 <= head_dim / 2.
 *
 * Token i is token position[i] of sequence sequence[i]. Head h of its keys is stored at
 * cache_k + sequence[i] * sequence_stride + h * head_stride + position[i] * head_dim, and, if row_k
 * is not NULL, at row_k[i][h]; values in the same way.
 *
 * With kv4 the keys and values are rounded to FP16 and appended to that cache, as by
 * qtool_kv_append; the tokens must be of different sequences, and the other places be NULL.
 */
struct qtool_decoder_heads {
    size_t m, heads, kv_heads, head_dim; /* head_dim: at most 512; kv_heads 0: only queries */
    const void *q, *k, *v;               /* F16, 2-byte aligned; not q_out, row_k or row_v */
    size_t q_stride, k_stride, v_stride; /* elements from token to token */
    const float *q_bias, *k_bias, *v_bias;
    /* The weights are those of one head, shared by all; with norm_all_heads, of all heads, which are
     * normalized together. norm_last: after the rotary embedding. */
    struct qtool_decoder_norm q_norm, k_norm;
    int norm_all_heads, norm_last;
    size_t rotary;              /* channels that are rotated */
    const float *q_cos, *q_sin; /* [positions][rotary / 2], for queries; NULL: no rotation */
    const float *k_cos, *k_sin; /* for keys */
    int interleaved;
    const int *sequence, *position;      /* [m] */
    void *q_out;                         /* F16 [m][heads][head_dim] */
    void *cache_k, *cache_v;             /* F16; NULL: none */
    size_t sequence_stride, head_stride; /* of the cache, in elements */
    void *row_k, *row_v;                 /* F16 [m][kv_heads][head_dim]; NULL: none */
    const struct qtool_kv_cache *kv4;    /* on the host, INT4; NULL: none */
    /* The norm of a head of values; queries, keys and values are clipped to [-clip, clip] behind
     * their biases (clip 0: not). Neither with norm_all_heads or kv4. */
    struct qtool_decoder_norm v_norm;
    float clip;
};

/*
 * Causal attention of `queries` consecutive tokens of each sequence over an FP16 cache:
 *
 *     out[t][h] = sum over j of p[j] * value[j],   p = softmax over j of score(q[t][h], key[j])
 *     score     = x = scale * dot(q, key), or softcap * tanh(x / softcap)
 *
 * where token t of sequence floor(t / queries) sees the positions j of its sequence with
 * position[t] - window < j <= position[t] (window 0: j <= position[t]), and query head h has KV head
 * floor(h * kv_heads / heads). With sinks, exp(sinks[h]) is added to the denominator of the softmax.
 * The positions of a sequence's queries follow each other.
 */
struct qtool_decoder_attention {
    size_t sequences, queries;
    size_t heads, kv_heads, head_dim; /* head_dim: at most 512, with `slopes` 128 */
    const void *q;                    /* F16 [sequences * queries][heads][head_dim] */
    const void *k, *v;                /* the cache, as in struct qtool_decoder_heads */
    /* Elements; multiples of 8 if head_dim is one. */
    size_t sequence_stride, head_stride;
    const int *position;  /* [sequences * queries] */
    void *out;            /* F16 [sequences * queries][heads][head_dim] */
    float scale, softcap; /* softcap 0: none */
    const float *sinks;   /* [heads], or NULL */
    size_t window;
    int batch_invariant; /* not 0: the order of sums does not depend on `sequences` either */
    const float *slopes; /* [heads]: slopes[h] * j is added to the score (ALiBi); NULL: none */
    float
        slope_factor; /* not 0: slopes[h] * j is rounded to BF16 and multiplied by this (Falcon) */
};

enum qtool_decoder_act {
    QTOOL_DECODER_SILU,
    QTOOL_DECODER_GELU_TANH,
    QTOOL_DECODER_GELU,
    QTOOL_DECODER_RELU,
    QTOOL_DECODER_RELU2,
    QTOOL_DECODER_SIGMOID,
    QTOOL_DECODER_CLAMPED, /* g sigmoid(1.702 g) (u + 1), g = min(gate, 7), u = up within -7, 7;
                              needs `up` */
};

/* out = act(gate + gate_bias) * (up + up_bias), [m][n]; without `up`: act(gate + gate_bias). With
 * `token_gate`, all values of a token are multiplied by the sigmoid of its entry. */
struct qtool_decoder_activation {
    enum qtool_decoder_act act;
    size_t m, n;
    const void *gate, *up;            /* F16, 2-byte aligned; up: NULL without it */
    size_t gate_stride, up_stride;    /* elements from token to token */
    const float *gate_bias, *up_bias; /* [n], or NULL */
    const float *token_gate;          /* entry of token i: [i * token_gate_stride]; NULL: none */
    size_t token_gate_stride;
    void *out;                           /* F16 [m][n] */
    const struct qtool_w4ax_input *w4ax; /* as in struct qtool_decoder_add_norm */
    struct qtool_w4ax_acts acts;
};

enum { QTOOL_DECODER_EXPERTS = 512 }; /* that a token can choose from */

/*
 * The experts of m tokens: with s = softmax(logits + bias) or sigmoid(logits + bias), the top_k
 * experts of largest s + select_bias (ties: the lowest number), in this order, and their weights
 * scale * s, with `normalize` divided by eps + the sum of the s of these experts.
 */
struct qtool_decoder_route {
    size_t m, experts, top_k; /* experts: at most QTOOL_DECODER_EXPERTS; top_k: at most 32 */
    const float *logits;      /* of token i: [i * stride] to [i * stride + experts - 1] */
    size_t stride;
    const float *bias, *select_bias; /* [experts], or NULL */
    int sigmoid, normalize;
    float eps, scale;
    int *ids;       /* [m][top_k] */
    float *weights; /* [m][top_k] */
};

/*
 * Products with FP16 experts that tokens have chosen. Output i is the sum over its terms t of
 *
 *     factor[i][t] * w[ids[i][t]] * (input of term i * terms + t)
 *
 * where `share` terms that follow each other, of one output or of several, have the same input. For
 * example with top_k experts per token, gate and up: m = tokens * top_k, terms = 1, share = top_k;
 * down: m = tokens, terms = top_k, share = 1.
 */
struct qtool_decoder_expert_product {
    size_t m, n, k; /* outputs, their channels, channels of inputs */
    size_t terms, share;
    const void *w;       /* F16 [experts][n][k] */
    const void *x;       /* F16 [m * terms / share][k] */
    const int *ids;      /* [m][terms] */
    const float *factor; /* [m][terms]; NULL: 1 */
    void *y;             /* F16 [m][n] */
};

/*
 * The next token of each sequence, from
 *
 *     logit = product * factor + bias, then softcap * tanh(logit / softcap) if softcap > 0
 *
 * temperature 0: the most probable token (ties: the lowest id). Otherwise a random one with
 * probability exp(logit / temperature), of the top_k most probable ones and of the most probable
 * ones that have the part top_p of their probability together; the random number depends on seed,
 * sequence number and position. Then the token becomes the input of the next step: ids[s] = token,
 * position[s] += 1, length[s] = position[s] + 1. With `text`, text[s * capacity + position[s]] =
 * token, unless position[s] >= capacity. A logit that is not finite sets *fault to 1.
 */
struct qtool_decoder_next {
    size_t sequences, vocab;
    float *logits;     /* [sequences][vocab]; receives the values after factor, bias and softcap */
    const void *half;  /* F16 [sequences][vocab]: products; NULL: `logits` has them */
    const float *bias; /* [vocab], or NULL */
    float factor, softcap;
    float temperature;
    double top_p; /* 1: all */
    size_t top_k; /* 0: all */
    unsigned long long seed;
    int *ids, *position, *length; /* [sequences]; ids NULL: only logits are computed */
    int *text;
    size_t capacity;
    int *fault;
};

enum qtool_decoder_kind {
    QTOOL_DECODER_EMBED,
    QTOOL_DECODER_ADD_NORM,
    QTOOL_DECODER_HEADS,
    QTOOL_DECODER_ATTENTION,
    QTOOL_DECODER_ACTIVATION,
    QTOOL_DECODER_ROUTE,
    QTOOL_DECODER_NEXT,
    QTOOL_DECODER_EXPERT_PRODUCT,
};

struct qtool_decoder_op {
    enum qtool_decoder_kind kind; /* selects the union member of the same name */
    union {
        struct qtool_decoder_embed embed;
        struct qtool_decoder_add_norm add_norm;
        struct qtool_decoder_heads heads;
        struct qtool_decoder_attention attention;
        struct qtool_decoder_activation activation;
        struct qtool_decoder_route route;
        struct qtool_decoder_expert_product expert_product;
        struct qtool_decoder_next next;
    };
};

/*
 * Enqueues the kernel of `op`. dependent_launch: not 0: programmatic dependent launch, as in struct
 * qtool_matmul_options; only if qtool_kernels_compute gives 90. Before the preceding kernel has
 * finished, the kernels read nothing but the weights of norms and, of HEADS, `position` (with kv4
 * also `sequence`, the table of pages and k_tail): after the kernel that writes them, HEADS or a
 * kernel before it must not be a dependent launch. Returns QTOOL_UNSUPPORTED, and enqueues nothing,
 * for a size or alignment that is not supported.
 */
int qtool_decoder_run(const struct qtool_decoder_op *op, int dependent_launch, void *stream);

#ifdef __cplusplus
}
#endif

#endif
