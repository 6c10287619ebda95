/* What the forward and the backward pass share: a block and the ends in backend memory, and the
 * steps of the forward pass that the backward pass does again. */
#ifndef QT_CALIB_BLOCK_H
#define QT_CALIB_BLOCK_H

#include "calib/model_internal.h"

/* Tokens that go through a block (or the head) at a time, about. Enough that the products are
 * large; fixed, so that results do not depend on the machine. */
enum { BLOCK_TOKENS = 2048, ENDS_TOKENS = 512 };

/* A part's weights in backend memory. */
struct loaded {
    float *weight, *bias;
};

struct block_grad_work {
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
struct block_experts {
    float *in, *out, *sum;   /* backend, [rows][hidden]: of an expert, and of all */
    float *logits;           /* backend, [rows][routed] */
    float *scores, *choice;  /* host, [rows][routed], of the router; [routed] */
    float *gate;             /* host, [rows] */
    float *share;            /* host, [rows][experts] */
    struct qt_tokens tokens; /* of an expert */
};

struct qt_block {
    const struct qt_model *model;
    const struct layer *layer;
    struct qt_backend *be;
    const char *dir; /* of the weights */
    struct qt_runtime runtime;
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
    struct block_experts experts;
    struct block_grad_work grad; /* of backward.c, made by its first run */
};

struct qt_ends {
    const struct qt_model *model;
    struct qt_backend *be;
    struct loaded embed, positions, project_in, project_out, final_norm, head;
    /* Working memory for ENDS_TOKENS rows: [hidden] and [embed_dim]. */
    float *normed, *narrow;
    float *logits, *ref_logits; /* of backward.c, [ENDS_TOKENS][vocab], made by its first run */
};

/* One chunk on its way through a block. */
struct block_run {
    struct qt_block *b;
    float *hidden;
    size_t m, seqlen;
    const struct qt_tap *tap;
    int stop; /* the input of linears where the way ends, and the only one tapped; -1: none */
    /* NULL, or the tokens that go through the expert whose input that is; the first of the chunk is
     * number `at`. */
    const struct qt_tokens *tokens;
    size_t at;
    float *share; /* of qt_block_route */
};

/* ---- block.c -------------------------------------------------------------------------------- */

/* Of a part or of none. staging: room for its weight or bias. */
int block_load_part(struct loaded *out, const struct part *part, float *staging,
                    const struct qt_weights *w, struct qt_backend *be, struct qt_err *err);
void block_free_part(struct loaded *l, struct qt_backend *be);
/* Of the layer's queries or keys; without tables where the layer has none. */
const struct rope *block_rope(const struct qt_block *b, bool queries);
const struct qt_linear *block_linear_of(const struct layer *l, size_t part);
/* QT_E_USAGE, QT_E_INTERNAL: m tokens in sequences of seqlen are not for this model. */
int block_check_length(const struct qt_model *model, size_t m, size_t seqlen, struct qt_err *err);
/* Working memory for chunks of up to `rows` tokens and the tables of rope; rows = 0: only those. */
int block_prepare(struct qt_block *b, size_t rows, size_t seqlen, struct qt_err *err);

/* Tokens of a chunk: whole sequences, about BLOCK_TOKENS. */
static inline size_t block_chunk(size_t m, size_t seqlen)
{
    return qt_min_size(m, seqlen < BLOCK_TOKENS ? BLOCK_TOKENS / seqlen * seqlen : seqlen);
}

/* part: a role; of an expert, part_at(). */
int block_linear(const struct block_run *r, size_t part, float *y, const float *x,
                 struct qt_err *err);
/* Nothing happens where the family has no such norm. */
int block_norm(const struct block_run *r, enum role role, float *y, const float *x, size_t m,
               struct qt_err *err);
bool block_norm_in_front(const struct qt_block *b, enum role norm);
/* x[m][hidden], the output of a sublayer or its gradient, times config.residual_scale. */
int block_scale_residual(const struct block_run *r, float *x, struct qt_err *err);
/* Rows that a norm of queries or keys, [m][heads][head_dim], goes over. */
size_t block_head_rows(const struct block_run *r, size_t heads);
/* Norms and rotates queries or keys, [m][heads][head_dim]. */
int block_heads(const struct block_run *r, enum role norm, float *x, size_t heads,
                struct qt_err *err);
struct qt_attention block_attention(const struct block_run *r);
/* The input of the linear `part` and of those beside it, x[m][k], is complete: through the runtime,
 * past the tap. *stop: that was all. */
int block_input(const float **x, bool *stop, const struct block_run *r, size_t part,
                struct qt_err *err);
/* y[m][hidden] of x[m][hidden] by the MLP, or one of many. *stop: that was not all of the way. */
int block_mlp(bool *stop, float *y, const float *x, const struct block_run *r, size_t expert,
              struct qt_err *err);

/* ---- experts.c ------------------------------------------------------------------------------ */

/* share[m][experts] (host memory) of x[m][hidden], which is what the router gets. */
int experts_route(float *share, const struct block_run *r, const float *x, struct qt_err *err);
/* As block_mlp, by those experts that the tokens go through; with r->stop, by one at most. */
int experts_run(bool *stop, float *y, const float *x, const struct block_run *r,
                struct qt_err *err);

#endif
