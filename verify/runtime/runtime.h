/* A decoder in GPU memory, and the list of kernels that a step of it enqueues. Private to
 * verify/. */
#ifndef QT_VERIFY_RUNTIME_RUNTIME_H
#define QT_VERIFY_RUNTIME_RUNTIME_H

#include "verify/gpu/gpu.h"

/* Device memory in the order of allocation. */
struct rt_block {
    void *data;
    size_t bytes;
};
struct rt_memory {
    struct rt_block *list;
    size_t count, capacity, bytes;
};

enum { RT_PARTS = 3 };

/* W[n][k]: FP16 for cuBLAS, or packed. */
struct rt_linear {
    size_t n, k;
    const void *dense; /* NULL: `weight`, or `w4ax` */
    struct qtool_matmul_weight weight;
    struct qtool_w4ax_weight w4ax; /* plane NULL: none */
};

/* Linears with the same input: q, k and v; gate and up. Where their formats agree they are the rows
 * of one product. */
struct rt_group {
    struct rt_linear linear[RT_PARTS];
    size_t linears;
    struct gpu_w4ax_input input; /* of w4ax linears; blocks 0: none */
    struct {
        size_t linear, first; /* the part's output: columns from `first` on of that linear's */
    } part[RT_PARTS];
};

/* The routed experts of a layer; experts 0: none. */
struct rt_mixture {
    size_t experts;
    struct gpu_experts grouped; /* without `packed`; or */
    /* F16 [experts][2 * width][hidden], gate and then up, and [experts][hidden][width]. */
    const void *gate_up, *down; /* NULL: `grouped` */
    size_t width;
    /* F16 [experts][hidden]; with shared_gate one more row, whose sigmoid multiplies the output of
     * the shared expert. */
    struct rt_linear router;
    bool shared_gate, sigmoid, normalize;
    const float *bias, *select_bias;
    size_t top_k;
    float eps, scale;
};

struct rt_layer {
    struct qtool_decoder_norm attn_in, q_norm, k_norm, v_norm, attn_out, mlp_in, mlp_out;
    /* gate_up: gate, up; or up only. gate_up and down: of the dense MLP or of the shared expert */
    struct rt_group qkv, o, gate_up, down;
    struct rt_mixture mixture;
    const float *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias, *sinks;
    size_t width; /* channels of the input of down; 0: only routed experts */
    bool gated;
    /* A third sublayer: out(act(gate x) * the layer's inputs); linears 0: none. */
    struct rt_group input_gate, input_out;
    struct qtool_decoder_norm input_norm;
    float scale; /* of the output of the layer; 0: none */
    size_t kv_heads, head_dim;
    size_t keys_of; /* number of the layer with the cache: this one, or an earlier one */
    size_t window;
    enum qt_rope_kind rope;
    struct qtool_kv_cache cache; /* k and v: the FP16 cache, or that of the 4-bit format */
};

/* What all layers share. */
struct rt_config {
    size_t layers, hidden, vocab, heads;
    size_t inputs; /* channels of the inputs of a layer; 0: none */
    bool norm_after, parallel, norm_all_heads, norm_last, interleaved;
    size_t position_offset;
    enum qtool_decoder_act act;
    float clip, attn_scale, attn_softcap, embed_scale, residual_scale, logit_scale, logit_softcap;
};

struct rt_rope {
    float *cos, *sin; /* [capacity][rotary / 2]; NULL: none */
    size_t rotary;
};

enum rt_type {
    RT_KERNEL,
    RT_MATMUL,
    RT_MANY,
    RT_QUANTIZE,
    RT_W4AX,
    RT_DENSE,
    RT_DENSE_F32,
    RT_EXPERTS,
    RT_APPEND,
    RT_CACHED
};

struct rt_op {
    enum rt_type type;
    enum qt_runtime_share share;
    union {
        struct qtool_decoder_op kernel;
        struct {
            const struct rt_linear *linear;
            void *y;
            const void *x;
            size_t m;
            struct qtool_matmul_plan plan;
        } product;
        struct {
            const struct rt_group *group;
            void *y;
            const void *x;
            struct qtool_matmul_plan plan;
        } many;
        struct {
            const struct gpu_w4ax_input *input;
            const void *x;
            size_t m;
        } quantize;
        struct {
            const struct rt_linear *linear;
            void *y;
            struct qtool_w4ax_plan plan;
        } w4ax;
        struct {
            const struct rt_mixture *mixture;
            void *y;
            const void *x;
            struct qtool_moe_plan plan;
        } experts;
        struct {
            const struct qtool_kv_cache *cache;
            const void *k, *v;
            const int *sequence, *position;
            size_t tokens;
        } append;
        struct {
            const struct qtool_kv_cache *cache;
            void *out;
            const void *q;
            struct qtool_kv_plan plan;
        } cached;
    };
};

struct rt_program {
    struct rt_op *ops;
    size_t count, capacity;
};

struct qt_runtime {
    struct qt_gpu *gpu;
    struct qt_runtime_options opt;
    struct rt_config config;
    struct rt_layer *layers;
    struct rt_memory memory;
    size_t weights; /* entries of `memory` that hold weights; the others follow */
    /* random.c: the entry of `memory` that the next allocation becomes a copy of; 0: none. Nothing
     * is uploaded into copies. */
    size_t original;
    struct rt_rope rope[QT_ROPES], query_rope; /* query_rope: for QT_ROPE_FULL, if it differs */
    const float *slopes;                       /* [heads], ALiBi; NULL: none */
    float slope_factor;
    const void *embed, *positions; /* F16 */
    const void *inputs;            /* F16 [vocab][layers * inputs]; NULL: none */
    struct rt_linear inputs_project;
    struct rt_linear project_in, project_out; /* FP16; n 0: none */
    struct qtool_decoder_norm inputs_norm;
    struct rt_linear head; /* not w4ax */
    const float *head_bias;
    struct qtool_decoder_norm embed_norm, final_norm;
    size_t page;       /* tokens of a sequence in the cache */
    size_t rows;       /* tokens that run at a time, at most */
    size_t group_most; /* sequences of a prompt that run at a time, at most */
    /* Activations of `rows` tokens. */
    float *hidden;
    void *x, *qkv, *q, *attended, *o, *gate_up, *act, *down, *row_k, *row_v;
    float *input_sum;              /* inputs of all layers; or an embedding to be projected */
    void *layer_inputs;            /* F16, the same */
    void *shared;                  /* output of the shared expert; `down` is that of the others */
    float *router, *expert_weight; /* logits; weights of the chosen experts */
    int *expert;                   /* numbers of these */
    struct qtool_kv_cache scratch; /* FP16 keys and values of a layer, for prompts; 4-bit cache */
    float *logits;                 /* [max(sequences, RT_LOGIT_ROWS)][vocab] */
    void *head_out;                /* F16, the same shape: of a packed head */
    struct gpu_operands operands;  /* workspace */
    /* Tokens of a prompt: [rows]; the next tokens: [sequences]. */
    int *ids, *position, *sequence, *all_sequences;
    int *next_ids, *next_position, *next_length, *next_sequence, *fault;
    size_t past; /* tokens of each sequence in the cache */
    struct rt_program step;
    struct qt_gpu_graph *graph; /* of `step` */
    bool warm;                  /* `step` has run */
};

enum { RT_LOGIT_ROWS = 256, RT_PROMPT_ROWS = 8192, RT_INVARIANT_ROWS = 16 };
/* Channels of an attention head, at most; with ALiBi. */
enum { RT_HEAD_DIM = 512, RT_SLOPES_DIM = 128 };

/* ---- load.c --------------------------------------------------------------------------------- */

int rt_alloc(struct qt_runtime *rt, void *out, size_t count, size_t size, struct qt_err *err);
/* Copies to memory of rt_alloc, unless that is a copy already. */
int rt_upload(struct qt_runtime *rt, void *dst, const void *src, size_t bytes, struct qt_err *err);
/* Loads everything but the caches and activations. container NULL: all linears are FP16. */
int rt_load(struct qt_runtime *rt, const struct qt_model *model, const struct qt_weights *w,
            const struct qt_container *container, struct qt_err *err);
/* Copies the first `sections` sections of packed[count], which follow each other, to GPU memory. */
int rt_upload_sections(const void **out, struct qt_runtime *rt, const struct qt_packed *packed,
                       size_t count, size_t sections, struct qt_err *err);
/* The linears of the rows of packed[count], copied to GPU memory, as one product if possible. */
int rt_pack_group(struct rt_group *out, struct qt_runtime *rt, const struct qt_packed *packed,
                  size_t count, struct qt_err *err);

/* ---- w4ax.c --------------------------------------------------------------------------------- */

/* The same for w4ax linears; the caller has brought act into the order of the input. */
int rt_pack_w4ax(struct rt_group *out, struct qt_runtime *rt, const struct qt_packed *packed,
                 size_t count, const struct qt_act *act, struct qt_err *err);
/* Brings values[p->n] of a bias into the order and scale of the rows of a w4ax matrix. */
int rt_arrange_rows(float *values, const struct qt_packed *p, struct qt_err *err);
/* QT_E_UNSUPPORTED: channels have factors, and !may. */
int rt_check_factors(const struct qt_act *act, bool may, struct qt_err *err);

/* The rows that compute an input: those of `packed` from `first` on; in attention those of the
 * values, with heads of `head` rows that `repeat` query heads share. */
struct rt_rows {
    const struct qt_packed *packed; /* NULL: in source order */
    size_t first, head, repeat;
};
/* Replaces the order of act, by source channels, by that of an input that such rows compute.
 * QT_E_UNSUPPORTED: its factors are others. */
int rt_follow(struct qt_act *act, const struct rt_rows *from, struct qt_err *err);

/* ---- load_experts.c ------------------------------------------------------------------------- */

/* The activation of experts; out may be NULL. False: grouped products do not have it. */
bool rt_expert_act(enum qtool_moe_activation *out, enum qtool_decoder_act act);
/* Memory for the experts, whose `packed` is filled, and their table. */
int rt_place_experts(struct gpu_experts *e, struct qt_runtime *rt, struct qt_err *err);

/* ---- random.c ------------------------------------------------------------------------------- */

/* Random weights: those of a decoder layer, and copies of them for the others. spec, head NULL:
 * FP16. */
int rt_load_random(struct qt_runtime *rt, const struct qt_runtime_shape *shape,
                   const struct qt_spec *spec, const struct qt_spec *head, struct qt_err *err);

/* ---- program.c ------------------------------------------------------------------------------ */

/* Tokens that run at a time: `tokens` of each of the sequences [first, first + sequences). */
struct rt_batch {
    size_t sequences, tokens, first;
    bool prompt;   /* the tokens are whole sequences */
    bool all;      /* keeps the final norm of all tokens in rt->x, and computes no logits */
    float *logits; /* [sequences][vocab] of the last tokens */
    const int *ids, *position, *sequence, *all_sequences; /* `sequence` counts from `first` */
};
int rt_build(struct rt_program *out, struct qt_runtime *rt, const struct rt_batch *b,
             struct qt_err *err);
/* Appends the head for rows [row, row + m) of rt->x. */
int rt_add_head(struct rt_program *out, struct qt_runtime *rt, float *logits, size_t row, size_t m,
                float softcap, struct qt_err *err);
/* The choice of the next tokens. */
int rt_add_next(struct rt_program *out, struct qt_runtime *rt, struct qt_err *err);
void rt_program_free(struct rt_program *p);

/* ---- enqueue.c ------------------------------------------------------------------------------ */

/* Enqueues the operations; share < QT_RUNTIME_SHARES: only those. */
int rt_enqueue(struct qt_runtime *rt, const struct rt_program *p, int share, struct qt_err *err);

/* ---- runtime.c ------------------------------------------------------------------------------ */

/* Runs as many of the prompts ids[][tokens] as run at a time, *sequences of them, and gives all
 * other sequences copies of their caches: for measurements. */
int rt_prompt_some(struct qt_runtime *rt, const uint32_t *ids, size_t tokens, size_t *sequences,
                   double *seconds, struct qt_err *err);
/* The next step follows the first `tokens` tokens of the caches; the logits choose its input. */
int rt_rewind(struct qt_runtime *rt, size_t tokens, struct qt_err *err);
/* Allocates caches and activations. */
int rt_prepare(struct qt_runtime *rt, struct qt_err *err);

#endif
