/* Shared by forward and backward pass: a decoder layer, the embedding and the head in backend
 * memory, and the steps of the forward pass that the backward pass repeats. */
#ifndef QT_MODEL_GRAPH_LAYER_H
#define QT_MODEL_GRAPH_LAYER_H

#include "model/graph/internal.h"

/* Approximate number of tokens of a chunk, in decoder layers and in the head. Large enough for
 * efficient matrix products; fixed, so that results do not depend on the machine. APART: if backend
 * memory is not that of the host; a GPU converts the weights for every product. */
enum {
    LAYER_TOKENS = 2048,
    LAYER_TOKENS_APART = 8192,
    HEAD_TOKENS = 512,
    HEAD_TOKENS_APART = 2048, /* the head, not the embedding */
};

/* The weights of a part in backend memory; NULL: none. */
struct loaded {
    float *weight, *bias;
};

/* Working memory of backward.c, for chunks of `rows` tokens. */
struct layer_grad_work {
    size_t rows;
    float *memory; /* holds the following arrays, without the forward activations */
    float *kept_memory;
    size_t kept_floats;
    /* Forward activations, [rows][hidden] except q, k, v, y, gate, up, act. *_raw: input of a norm;
     * *_sum: result of a residual add. attn_gate: NULL, or gates of attended, which give y, the
     * input of O; otherwise attended is y. */
    float *attn_in, *q_raw, *k_raw, *q, *k, *v, *attn_gate, *attended, *y, *o_raw, *attn_sum, *mid;
    float *mlp_in, *gate, *up, *act, *down_raw, *mlp_sum;
    float *dx;       /* gradient, [rows][hidden] */
    float *dexpert;  /* [rows][hidden], gradient of an expert's output, and */
    float *dsum;     /* [rows][hidden], of the weighted sum of experts; NULL: no experts */
    float *dmlp;     /* [rows][hidden], of a parallel MLP with a norm of its own; else NULL */
    float *qkv;      /* [rows][rows of QKV] with grouped_qkv, output or gradient; else NULL */
    float *dscratch; /* gradients of q, y, k, v, or of gate, up, one after the other */
    float *dw;       /* [dw_count] dL/dW of a part whose scales have a gradient */
    size_t dw_count;
};

/* Tables of a rotary embedding, [seqlen][rotary.dim / 2]; NULL: none. */
struct rope {
    float *cos, *sin, *minus_sin;
};

/* Working memory of experts.c and head_experts.c, for chunks of `rows` tokens. */
struct layer_experts {
    float *in, *out;         /* backend, [rows][hidden], of one expert */
    float *normed;           /* backend, [rows][hidden], input of the router or of routed experts */
    float *sum;              /* backend, [rows][hidden], weighted sum over the experts */
    float *logits;           /* backend, [rows][routed], of the router */
    float *scores;           /* host, copy of logits */
    float *select_bias;      /* host, [routed] */
    float *output_scale;     /* host, [routed], see ROLE_EXPERT_SCALE */
    float *gate;             /* host, [rows], logits of the shared expert's gate */
    float *weights;          /* host, [rows][experts], routing weights */
    struct qt_tokens tokens; /* of one expert */
};

/* Working memory of altup.c, for chunks of `rows` tokens. */
struct layer_altup {
    float *states;          /* backend, [cfg.altup][rows][hidden] */
    float *mixed, *laurel;  /* backend, [rows][hidden]; output of LAuReL */
    float *low;             /* backend, [rows][cfg.laurel] */
    float *logits;          /* backend, [rows][cfg.altup] */
    float *modes, *factors; /* host, [rows][cfg.altup]; [rows] */
};

/* Working memory for `rows` tokens and positions below `seqlen`, of any decoder layer. */
struct layer_work {
    size_t rows, seqlen;
    float *x;                     /* [rows][hidden] */
    float *mixed;                 /* [rows][hidden], output of the mixer in parallel layers */
    float *scratch;               /* q, k, v and attention output, then up and gate */
    float *hidden;                /* [rows][hidden], if info.state is larger */
    float *quantized_input;       /* linear input after simulated quantization */
    float *exact_keys;            /* keys before simulated quantization */
    float *ones;                  /* weights of norms without weights, and of sums */
    float *sums;                  /* [2][rows], for cutoffs */
    float *host_sums;             /* [2][rows], the same in host memory */
    float *bias;                  /* [heads][seqlen], ALiBi; NULL: none */
    struct rope rope, local_rope; /* local: for layers with a window, if they differ */
    struct rope query_rope;       /* for queries, if they are scaled by position */
    struct layer_experts experts;
    struct layer_altup altup;
};

struct qt_layer {
    const struct qt_model *model;
    const struct layer_def *def;
    struct qt_backend *be;
    const char *dir; /* directory of the weights, for messages */
    struct qt_fake_quant fake_quant;
    size_t index, window, chunk;
    bool no_rope;
    float scale;                 /* see ROLE_LAYER_SCALE; 1: none */
    struct loaded *parts;        /* [layer_parts()] */
    struct layer_work work;      /* allocated by the first run */
    struct layer_grad_work grad; /* allocated by the first backward pass */
};

struct qt_embed_head {
    const struct qt_model *model;
    struct qt_backend *be;
    struct loaded embed, embed_norm, positions, project_in, project_out, final_norm, head;
    struct loaded layer_embed, layer_project, layer_norm, transform, transform_norm;
    struct loaded *altup_in, *altup_out; /* [cfg.altup - 1]; or NULL */
    float *altup_work;                   /* [2][rows][hidden] */
    float *per_layer;                    /* [2][HEAD_TOKENS][layers * per_layer] */
    size_t rows;                         /* HEAD_TOKENS, or HEAD_TOKENS_APART */
    float *normed, *projected;           /* [rows][hidden], [rows][embed_dim] */
    float *logits, *ref_logits;          /* [rows][vocab], allocated by the first backward pass */
};

struct layer_cache;

/* Arguments of the steps of a decoder layer, for one chunk of tokens. */
struct layer_run {
    struct qt_layer *layer;
    float *hidden; /* [m][hidden] */
    float *state;  /* [m][info.state], which begins with the hidden states before the sublayer */
    size_t m, seqlen;
    size_t past;               /* positions of each sequence before the first token */
    struct layer_cache *cache; /* state of the sequences; NULL: past is 0, and nothing is kept */
    const struct qt_hook *hook;
    int stop; /* stop at this linear input, and call the hook for it only; -1: run to the end */
    const struct qt_tokens *tokens; /* tokens of the expert with input `stop`; NULL: the router's */
    size_t first_token;             /* number of the chunk's first token */
    float *weights;                 /* result of qt_layer_route, for all tokens */
    const float *last_input; /* input of `last`, the last linear of the sublayer; NULL: not known */
    size_t last;             /* part */
};

/* ---- load.c --------------------------------------------------------------------------------- */

/* Host memory for one tensor, which grows on demand; the caller frees p. layer_staging makes room
 * for `count` numbers and discards the contents if it has to allocate. */
struct staging {
    float *p;
    size_t count;
};
int layer_staging(struct staging *s, size_t count, struct qt_err *err);
/* Loads a part, if it is present. */
int layer_load_part(struct loaded *out, const struct part *part, struct staging *staging,
                    const struct qt_weights *w, struct qt_backend *be, struct qt_err *err);
void layer_free_part(struct loaded *l, struct qt_backend *be);
void layer_free_parts(struct qt_layer *l);

/* ---- layer.c -------------------------------------------------------------------------------- */

/* The factor of queries at a position: see struct config, query_beta. */
float layer_query_growth(const struct config *cfg, size_t position);
/* cos, sin[positions][dim / 2] of position * inv_freq. The angle is rounded to float first,
 * as in transformers. */
void rope_fill(float *cos_out, float *sin_out, const struct config *cfg,
               const struct rotary *rotary, bool queries, size_t positions);
/* Multiplies q[m][width] by the growth at the positions of the tokens. */
int layer_scale_queries(const struct layer_run *r, float *q, size_t width,
                        float (*growth)(const struct config *cfg, size_t position),
                        struct qt_err *err);
/* ALiBi: slopes are powers of 2^(-8 / n) for the largest power of two n up to the number of heads.
 * Further heads have every second slope of 2 n heads. */
float layer_slope(size_t head, size_t heads);
/* The rotary embedding of the layer. */
const struct rotary *layer_rotary(const struct qt_layer *l);
/* Its tables, of queries or keys; NULL tables if the layer has no rotary embedding. */
const struct rope *layer_rope(const struct qt_layer *l, bool queries);
/* The linear of a part, or of the fused part that contains it. */
const struct qt_linear *layer_linear_of(const struct layer_def *l, size_t part);
/* The first part that is a linear with this input. */
size_t layer_part_with(const struct qt_layer *l, int input);
/* QT_E_USAGE: seqlen exceeds max_positions. QT_E_INTERNAL: m is not a multiple of seqlen. */
int layer_check_length(const struct qt_model *model, size_t m, size_t seqlen, struct qt_err *err);
/* Allocates working memory for chunks of up to `rows` tokens, and the rotary tables (rows = 0: only
 * the tables). */
int layer_prepare(struct qt_layer *l, size_t rows, size_t seqlen, struct qt_err *err);

/* Number of tokens of a chunk: whole sequences, about `tokens`. */
static inline size_t layer_chunk(size_t tokens, size_t m, size_t seqlen)
{
    return qt_min_size(m, seqlen < tokens ? tokens / seqlen * seqlen : seqlen);
}

/* y[m][n] = linear of x[m][k], times the part's factor. part: index by part_at(). */
int layer_linear(const struct layer_run *r, size_t part, float *y, const float *x,
                 struct qt_err *err);
/* y = norm of x, m rows of the norm's width. Does nothing if the family has no such norm. */
int layer_apply_norm(const struct layer_run *r, enum role role, float *y, const float *x, size_t m,
                     struct qt_err *err);
/* True if the norm exists and is applied before its sublayer. */
bool layer_norm_in_front(const struct qt_layer *l, enum role norm);
/* Multiplies x[m][hidden], the output of a sublayer or its gradient, by config.residual_scale. */
int layer_scale_residual(const struct layer_run *r, float *x, struct qt_err *err);
/* Number of rows that Q_NORM or K_NORM normalizes in [m][heads][head_dim]. */
size_t layer_head_rows(const struct layer_run *r, size_t heads);
/* Applies Q_NORM or K_NORM and the rotary embedding to x[m][heads][head_dim] in place. raw receives
 * the input of the norm, which may have no weights; raw = x: it is not needed. */
int layer_heads(const struct layer_run *r, enum role norm, float *x, float *raw, size_t heads,
                struct qt_err *err);
/* `table`, of cosines or sines, from the position of the run's first token on. */
const float *layer_rope_from(const struct layer_run *r, const float *table);
struct qt_attention layer_attention(const struct layer_run *r);
/* Called when x[m][k], the input of the linear `part`, is complete: applies simulated quantization
 * (*x then points to the rounded copy) and calls the hook. *stop = true: the run ends here. */
int layer_input(const float **x, bool *stop, const struct layer_run *r, size_t part,
                struct qt_err *err);
/* y[m][hidden] = dense MLP or expert of x[m][hidden]. *stop = true: ended at r->stop, y not set. */
int layer_mlp(bool *stop, float *y, const float *x, const struct layer_run *r, size_t expert,
              struct qt_err *err);

/* Runs the layer on hidden[sequences][tokens][hidden] in place, the next tokens of the sequences of
 * the cache. layer_prepare must have made room. */
int layer_continue(struct qt_layer *layer, float *hidden, size_t tokens, size_t past,
                   struct layer_cache *cache, struct qt_err *err);
/* qt_embed_tokens for tokens from position `past` on. */
int embed_tokens_at(struct qt_embed_head *e, float *hidden, const uint32_t *ids, size_t m,
                    size_t seqlen, size_t past, struct qt_err *err);

/* ---- cache.c -------------------------------------------------------------------------------- */

/* Working memory that the caches of all decoder layers share. NULL arrays are not needed. */
struct cache_work {
    size_t sequences, capacity; /* capacity: tokens of a sequence, at most */
    float *k, *v, *exact;       /* [sequences][past + seqlen][width] */
    float *mixed, *convolved;   /* [sequences][kernel - 1 + seqlen][width], convolutions */
};
/* rounded: keys and values go through simulated quantization. step: tokens of a sequence that run
 * at a time, at most. After an error, too, *out is closed by cache_work_close. */
int cache_work_open(struct cache_work *out, const struct qt_model *model, bool rounded,
                    size_t sequences, size_t capacity, size_t step, struct qt_backend *be,
                    struct qt_err *err);
void cache_work_close(struct cache_work *w, struct qt_backend *be);

/* The state of all sequences in one decoder layer. */
struct layer_cache {
    const struct cache_work *work;
    float *k, *v; /* [sequences][capacity][width], attention */
    float *tail;  /* [sequences][kernel - 1][width]: last inputs of the convolution */
    float *state; /* see struct qt_delta and struct qt_state_space */
};
/* Empty sequences. After an error, too, *out is closed by cache_close. */
int cache_open(struct layer_cache *out, const struct qt_model *model, size_t layer,
               const struct cache_work *work, struct qt_backend *be, struct qt_err *err);
void cache_close(struct layer_cache *c, struct qt_backend *be);
/* Keeps the keys and values k, v[m][kv_heads * head_dim] of the run's tokens. *keys and *values =
 * those of all positions up to now, after simulated quantization, which sets a->exact_keys. */
int cache_keys(const float **keys, const float **values, struct qt_attention *a, float *k, float *v,
               const struct layer_run *r, struct qt_err *err);
/* be->convolve of x[m][width] and the tokens before, with the weights and bias of `part`. */
int cache_convolve(float *y, const float *x, enum role part, const struct layer_run *r,
                   struct qt_err *err);

/* ---- attention.c ---------------------------------------------------------------------------- */

/* Multiplies q[m][heads * head_dim], queries or their gradient, by the factors of their positions;
 * see config.floor_beta. Does nothing in layers without them. */
int layer_floor_queries(const struct layer_run *r, float *q, struct qt_err *err);
/* y = attention of q; with chunks, each of them is a sequence of its own. */
int layer_attend(float *y, const float *q, const float *keys, const float *values,
                 const struct qt_attention *a, const struct layer_run *r, struct qt_err *err);

/* Queries, keys and values of x[m][hidden] by QKV with grouped_qkv. all: [m][rows of QKV], its
 * output. */
int layer_grouped(float *q, float *k, float *v, float *all, const float *x,
                  const struct layer_run *r, struct qt_err *err);
/* The way back: q, k and v (or their gradients) in the order of the rows of QKV. */
int layer_group(float *all, float *q, float *k, float *v, const struct layer_run *r,
                struct qt_err *err);

/* ---- mixers --------------------------------------------------------------------------------- */

struct mixer {
    size_t (*scratch_floats)(const struct config *cfg); /* of layer.scratch, per token */
    /* out[m][hidden] = mixer of x[m][hidden], up to the output projection; otherwise like
     * layer_mlp. out may be x. */
    int (*run)(bool *stop, float *out, const float *x, const struct layer_run *r,
               struct qt_err *err);
};
extern const struct mixer mixer_attention, mixer_latent, mixer_delta, mixer_short, mixer_ssm,
    mixer_ssm_attention, mixer_head_experts;
/* mixer_attention.run behind the call of layer_input for x. */
int attention_run(bool *stop, float *out, const float *x, const struct layer_run *r,
                  struct qt_err *err);
const struct mixer *mixer_of(const struct qt_layer *l);

/* ---- per_layer.c ---------------------------------------------------------------------------- */

/* Fills in the inputs of all layers in state[m][info.state], m <= HEAD_TOKENS. embedded[m][hidden]:
 * the embedding. QT_E_INPUT: the table has no such id. */
int per_layer_embed(struct qt_embed_head *e, float *state, const float *embedded,
                    const uint32_t *ids, size_t m, struct qt_err *err);
/* out[m][hidden] = the third sublayer without its norm; otherwise like layer_mlp. */
int per_layer_run(bool *stop, float *out, const struct layer_run *r, struct qt_err *err);

/* ---- altup.c -------------------------------------------------------------------------------- */

/* Allocates work.altup; altup_free frees it, after an error, too. */
int altup_prepare(struct qt_layer *l, size_t rows, struct qt_err *err);
void altup_free(struct qt_layer *l);
/* r->hidden = prediction of the first hidden state; with r->stop < 0, those of all states are kept
 * in r->state. */
int altup_predict(const struct layer_run *r, struct qt_err *err);
/* Computes the output of LAuReL for x[m][hidden], and adds it to r->hidden. */
int altup_laurel(const struct layer_run *r, const float *x, struct qt_err *err);
int altup_add_laurel(const struct layer_run *r, struct qt_err *err);
/* Corrects the hidden states and runs the third sublayer; otherwise like layer_mlp. */
int altup_correct(bool *stop, const struct layer_run *r, struct qt_err *err);
/* Fills in the other hidden states in state[m][info.state]; embedded[m][hidden]: the first. */
int altup_embed(struct qt_embed_head *e, float *state, const float *embedded, size_t m,
                struct qt_err *err);
/* out[m][hidden] = mean of the projected hidden states in state[m][info.state]; m <= e->rows.
 */
int altup_join(struct qt_embed_head *e, float *out, const float *state, size_t m,
               struct qt_err *err);

/* ---- experts.c ------------------------------------------------------------------------------ */

/* Sets weights[m][experts] (host memory) as qt_layer_route; x[m][hidden]: the router's input. */
int experts_route(float *weights, enum role router, const struct layer_run *r, const float *x,
                  struct qt_err *err);
/* Sets experts.sum[m][hidden] to the bias of the sum over the experts, or 0. */
int experts_begin(const struct layer_run *r, enum role bias, struct qt_err *err);
/* Like layer_mlp, for the weighted sum of the chosen experts. If r->stop is an input of an expert,
 * runs that expert only. */
int experts_run(bool *stop, float *y, const float *x, const struct layer_run *r,
                struct qt_err *err);
/* Sets dlogits[m][routed], gradients of the router's logits, and dgate[m], those of the shared
 * expert's gate (NULL: it has none), from dweights[m][experts], those of the weights of the chosen
 * experts. Logits and weights are those of the last experts_route. Host memory. */
int experts_route_grad(float *dlogits, float *dgate, const float *dweights,
                       const struct layer_run *r, struct qt_err *err);

#endif
