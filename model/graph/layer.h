/* What the forward and the backward pass share: a block and the ends in backend memory, and the
 * steps of the forward pass that the backward pass does again. */
#ifndef QT_MODEL_GRAPH_BLOCK_H
#define QT_MODEL_GRAPH_BLOCK_H

#include "model/graph/internal.h"

/* Tokens that go through a block (or the head) at a time, about. Enough that the products are
 * large; fixed, so that results do not depend on the machine. */
enum { LAYER_TOKENS = 2048, HEAD_TOKENS = 512 };

/* A part's weights in backend memory. */
struct loaded {
    float *weight, *bias;
};

struct layer_grad_work {
    size_t rows;
    float *memory; /* holds all that follow */
    /* Forward: [rows][hidden] but q, k, v, y, gate, up, act. The raw ones are in front of a norm.
     */
    float *attn_in, *q_raw, *k_raw, *q, *k, *v, *y, *o_raw, *attn_sum, *mid;
    float *mlp_in, *gate, *up, *act, *down_raw, *mlp_sum;
    float *dx, *dwide; /* gradients: [rows][hidden]; q, k, v, y or gate, up side by side */
};

/* A rotary embedding's tables, [seqlen][config.rotated / 2]. */
struct rope {
    float *cos, *sin, *minus_sin;
};

/* Of experts.c, for chunks of `rows` tokens. */
struct layer_experts {
    float *in, *out, *sum;   /* backend, [rows][hidden]: of an expert, and of all */
    float *logits;           /* backend, [rows][routed] */
    float *scores, *choice;  /* host, [rows][routed], of the router; [routed] */
    float *gate;             /* host, [rows] */
    float *share;            /* host, [rows][experts] */
    struct qt_tokens tokens; /* of an expert */
};

struct qt_layer {
    const struct qt_model *model;
    const struct layer_def *layer;
    struct qt_backend *be;
    const char *dir; /* of the weights */
    struct qt_fake_quant runtime;
    size_t window;
    bool unrotated;
    struct loaded *parts; /* [layer_parts()] */
    /* Working memory for chunks of `rows` tokens in sequences of `seqlen`, made by the first run:
     * x [rows][hidden]; wide: q, k, v and the attention's output, later gate and up; staged: an
     * input of linears behind the runtime. */
    size_t rows, seqlen;
    float *x, *wide, *staged;
    struct rope rope, local_rope; /* of all layers, or of those with and without a window */
    struct rope query_rope;       /* of queries, where these grow with the position */
    struct layer_experts experts;
    struct layer_grad_work grad; /* of backward.c, made by its first run */
};

struct qt_embed_head {
    const struct qt_model *model;
    struct qt_backend *be;
    struct loaded embed, positions, project_in, project_out, final_norm, head;
    /* Working memory for HEAD_TOKENS rows: [hidden] and [embed_dim]. */
    float *normed, *narrow;
    float *logits, *ref_logits; /* of backward.c, [HEAD_TOKENS][vocab], made by its first run */
};

/* One chunk on its way through a block. */
struct layer_run {
    struct qt_layer *b;
    float *hidden;
    size_t m, seqlen;
    const struct qt_hook *tap;
    int stop; /* the input of linears where the way ends, and the only one tapped; -1: none */
    /* NULL, or the tokens that go through the expert whose input that is; the first of the chunk is
     * number `at`. */
    const struct qt_tokens *tokens;
    size_t at;
    float *share; /* of qt_layer_route */
};

/* ---- block.c -------------------------------------------------------------------------------- */

/* Of a part or of none. staging: room for its weight or bias. */
int layer_load_part(struct loaded *out, const struct part *part, float *staging,
                    const struct qt_weights *w, struct qt_backend *be, struct qt_err *err);
void layer_free_part(struct loaded *l, struct qt_backend *be);
/* Of the layer's queries or keys; without tables where the layer has none. */
const struct rope *layer_rope(const struct qt_layer *b, bool queries);
const struct qt_linear *layer_linear_of(const struct layer_def *l, size_t part);
/* QT_E_USAGE, QT_E_INTERNAL: m tokens in sequences of seqlen are not for this model. */
int layer_check_length(const struct qt_model *model, size_t m, size_t seqlen, struct qt_err *err);
/* Working memory for chunks of up to `rows` tokens and the tables of rope; rows = 0: only those. */
int layer_prepare(struct qt_layer *b, size_t rows, size_t seqlen, struct qt_err *err);

/* Tokens of a chunk: whole sequences, about LAYER_TOKENS. */
static inline size_t layer_chunk(size_t m, size_t seqlen)
{
    return qt_min_size(m, seqlen < LAYER_TOKENS ? LAYER_TOKENS / seqlen * seqlen : seqlen);
}

/* part: a role; of an expert, part_at(). */
int layer_linear(const struct layer_run *r, size_t part, float *y, const float *x,
                 struct qt_err *err);
/* Nothing happens where the family has no such norm. */
int layer_apply_norm(const struct layer_run *r, enum role role, float *y, const float *x, size_t m,
                     struct qt_err *err);
bool layer_norm_in_front(const struct qt_layer *b, enum role norm);
/* x[m][hidden], the output of a sublayer or its gradient, times config.residual_scale. */
int layer_scale_residual(const struct layer_run *r, float *x, struct qt_err *err);
/* Rows that a norm of queries or keys, [m][heads][head_dim], goes over. */
size_t layer_head_rows(const struct layer_run *r, size_t heads);
/* Norms and rotates queries or keys, [m][heads][head_dim]. */
int layer_heads(const struct layer_run *r, enum role norm, float *x, size_t heads,
                struct qt_err *err);
struct qt_attention layer_attention(const struct layer_run *r);
/* The input of the linear `part` and of those beside it, x[m][k], is complete: through the runtime,
 * past the tap. *stop: that was all. */
int layer_input(const float **x, bool *stop, const struct layer_run *r, size_t part,
                struct qt_err *err);
/* y[m][hidden] of x[m][hidden] by the MLP, or one of many. *stop: that was not all of the way. */
int layer_mlp(bool *stop, float *y, const float *x, const struct layer_run *r, size_t expert,
              struct qt_err *err);

/* ---- experts.c ------------------------------------------------------------------------------ */

/* share[m][experts] (host memory) of x[m][hidden], which is what the router gets. */
int experts_route(float *share, const struct layer_run *r, const float *x, struct qt_err *err);
/* As layer_mlp, by those experts that the tokens go through; with r->stop, by one at most. */
int experts_run(bool *stop, float *y, const float *x, const struct layer_run *r,
                struct qt_err *err);

#endif
