/*
 * The decoder graph, shared by the files of this folder that name, load and run its parts.
 *
 * Every supported decoder block is an instance of one drawing; a family leaves parts out:
 *
 *   hidden -+- ATTN_IN -- Q K V -- (Q_NORM K_NORM) -- (rope) -- attention -- O -- (ATTN_OUT) -(+)-
 *           +---------------------------------------------------------------------------------+
 *          -+- MLP_IN -- (GATE) UP -- act -- DOWN -- (MLP_OUT) -(+)-
 *           +----------------------------------------------------+
 *
 * In a mixture of experts there are many of what stands between MLP_IN and MLP_OUT. ROUTER says,
 * of what MLP_IN gives, which few of them a token goes through; their outputs are added up, each
 * times its share. CHOICE is added to the router's scores to choose by, not to shares. The last
 * expert may be one that all tokens go through, of a width of its own; its share is 1, or the
 * sigmoid of what SHARED_GATE says. Some layers may have one MLP instead, again of another width.
 *
 * Some families have the weights of Q, K, V in one tensor, QKV, and those of GATE, UP in GATE_UP;
 * these are then the linears, and Q, K, V, GATE, UP are rows of them.
 *
 * With `norm_after` (early OPT) ATTN_IN and MLP_IN are applied behind the additions instead. What
 * comes to the additions is multiplied by `residual_scale`.
 */
#ifndef QT_MODEL_GRAPH_INTERNAL_H
#define QT_MODEL_GRAPH_INTERNAL_H

#include "model/model.h"

enum role {
    ROLE_ATTN_IN,
    ROLE_QKV,
    ROLE_Q,
    ROLE_K,
    ROLE_V,
    ROLE_Q_NORM,
    ROLE_K_NORM,
    ROLE_O,
    ROLE_ATTN_OUT,
    ROLE_MLP_IN,
    ROLE_ROUTER,
    ROLE_CHOICE,
    ROLE_SHARED_GATE,
    ROLE_MLP_OUT,
    ROLE_GATE_UP, /* from here on: of each expert */
    ROLE_GATE,
    ROLE_UP,
    ROLE_DOWN,
    ROLE_COUNT,
    EXPERT_ROLES = ROLE_COUNT - ROLE_GATE_UP
};

/* A yes/no that is fixed for a family (key NULL) or read from config.json (value: when missing). */
struct arch_flag {
    const char *key;
    bool value;
};

enum window_rule {
    WINDOW_NONE,
    WINDOW_ALL,          /* every layer has the sliding window */
    WINDOW_IF_USED,      /* every layer, if use_sliding_window */
    WINDOW_EVEN,         /* layers 0, 2, 4, ... */
    WINDOW_PATTERN,      /* all layers but every window_period-th */
    WINDOW_FROM_LAYER,   /* layers from max_window_layers on, if use_sliding_window */
    WINDOW_EVEN_TO_LAYER /* layers 0, 2, 4, ... below max_window_layers, if use_sliding_window */
};

/* Layers without the rotary embedding. */
enum unrotated_rule {
    UNROTATED_NONE,
    UNROTATED_LISTED, /* no_rope_layers: those with a 0; or every no_rope_layer_interval-th */
    UNROTATED_WIDE    /* unless sliding_window is null, those without a window */
};

/* A model family: what config.json calls things, and which parts the graph has. */
struct arch {
    const char *family; /* model_type */
    /* Where config.json does not say it. 0: it must; of head_dim: hidden / heads. */
    size_t vocab, max_positions, heads, kv_heads, head_dim;
    /* Tensor names without the decoder's prefix ("model.") and ".weight"/".bias"; of a layer:
     * behind `layers` and its number. */
    const char *layers, *embed, *positions, *final_norm, *project_in, *project_out;
    const char *parts[ROLE_COUNT]; /* NULL: the family has no such part */
    /* What stands before an expert's number and part (NULL: no experts); before a part of the one
     * that all tokens go through (NULL: none); of the MLP in layers without (NULL: none are). */
    const char *experts, *shared, *dense;
    struct arch_flag shares_of_one; /* shares of the chosen experts are made to sum to 1 */
    bool sigmoid_router; /* n_group, topk_group, routed_scaling_factor, first_k_dense_replace */
    size_t first_dense;  /* where config.json does not say it, layers in front without experts */
    bool moe_layers;     /* moe_k, moe_layer_start_index, moe_layer_end_index, moe_layer_interval */
    bool choice_row;     /* CHOICE is a matrix of one row */
    const char *intermediate_key; /* of experts, if there are any; NULL: intermediate_size */
    /* Of the expert that all go through: its width, or how many experts wide it is, and that where
     * config.json does not say it; NULL: neither. */
    const char *shared_key, *shared_count_key;
    size_t shared_count;
    const char *act_key, *act;
    const char *eps_key; /* NULL: 1e-5 */
    double eps, theta;   /* where config.json does not say it; 0: 1e-6, 1e4 */
    /* rope_theta of layers with a window where config.json does not say it; 0: all layers have one
     * rotary embedding. */
    double local_theta;
    const char *local_theta_key;        /* NULL: it never does, outside of rope_parameters */
    double attn_softcap, logit_softcap; /* where config.json does not say it, 0: none */
    enum qt_norm_kind norm;
    struct arch_flag qkv_bias, o_bias, mlp_bias, tied;
    enum window_rule window;
    const char *window_period_key; /* NULL: config.json does not say it */
    size_t window_period;
    size_t window_from;   /* max_window_layers where config.json does not say it; 0: 28 */
    bool window_given;    /* without sliding_window in config.json: no window; else 4096 */
    bool window_optional; /* with WINDOW_PATTERN: sliding_window may be null, no window */
    enum unrotated_rule unrotated;
    bool norms_of_all_heads;    /* Q_NORM and K_NORM are over all heads together */
    const char *head_norms_key; /* whether there are any (missing: no); NULL: always */
    bool multipliers;           /* of embedding, attention, residual, and logits_scaling */
    bool rope;         /* else learned positions, `position_offset` rows into their table */
    bool partial_rope; /* partial_rotary_factor */
    double rotated;    /* where config.json does not say it; 0: 1 */
    bool interleaved;  /* the rotary embedding turns neighbouring channels */
    bool query_steps;  /* llama_4_scaling_beta: queries grow with the position */
    bool mrope; /* rope_type mrope: positions of images; in text an ordinary rotary embedding */
    /* original_max_position_embeddings where config.json does not say it outside the options of its
     * rotary embedding, which has only LongRoPE, also called su or yarn; 0: what these say. */
    size_t original_positions;
    bool opt_layout;   /* do_layer_norm_before, word_embed_proj_dim and their like */
    bool gemma_scales; /* softcaps, query_pre_attn_scalar, embedding times sqrt(hidden) */
    size_t position_offset;
};
/* NULL when unknown. */
const struct arch *arch_find(const char *family);
/* The family of the decoder in a model of images and text of this model_type, where config.json
 * does not name it under "text_config"; NULL: it is no such model. */
const char *arch_of_wrapper(const char *type);

/* A rotary embedding: channels i and i + rotated / 2 of a head, or 2i and 2i + 1 where they are
 * interleaved, are turned by an angle of position * inv_freq[i]; cosines and sines are multiplied
 * by `scale`. */
struct rotary {
    float *inv_freq; /* [config.rotated / 2], NULL: none */
    /* Instead, for sequences of more than long_from tokens; NULL: the same for all. */
    float *long_inv_freq;
    size_t long_from;
    float scale;
};

/* config.json in numbers. All sizes, but of what there is none, are at least 1 and small enough
 * that a product of any two fits easily; heads is a multiple of kv_heads. */
struct config {
    const struct arch *arch;
    struct qt_model_info info;
    size_t embed_dim; /* width of the embedding table */
    /* Widths between UP and DOWN: of the MLP in layers without experts, of an expert, and of the
     * one that all tokens go through; 0: there is none. */
    size_t dense_width, expert_width, shared_width;
    bool *dense;     /* [layers]: without experts; NULL: all are as info.experts says */
    size_t *windows; /* [layers], 0 = none */
    bool *unrotated; /* [layers]: without the rotary embedding */
    size_t rotated;  /* channels of a head that the rotary embedding turns */
    /* Queries are multiplied by 1 + query_beta ln(1 + floor(position / query_step)); 0: they are
     * not. */
    float query_beta;
    size_t query_step;
    struct rotary rope, local_rope; /* local: of layers with a window; none: as the others */
    /* Numbers by which scores of attention, the embedding, what is added to hidden states, and the
     * head's output are multiplied. */
    float attn_scale, embed_scale, residual_scale, logit_scale;
    float eps, attn_softcap;
    enum qt_act_kind act;
    bool qkv_bias, o_bias, mlp_bias, tied, norm_after, final_norm, head_norms;
    bool wrapped;
    /* Wrappers say `tied` here, there, in both places or not at all. Where that is nothing, or both
     * yes and no: it is tied if there is no head. */
    bool tied_unclear;
    /* The router chooses `chosen` of the first `routed` of info.experts for a token, from the best
     * `chosen_groups` of `groups` of them; their shares are multiplied by share_scale. */
    size_t routed, chosen, groups, chosen_groups;
    bool shares_of_one;
    double share_scale;
};
int config_read(struct config *out, const char *dir, struct qt_err *err);
void config_free(struct config *cfg);

/* A linear layer, norm or table: y[n] = W[n][k] x[k] + b[n]; k = 0: the weight is a vector [n].
 * weight NULL: absent, or, with k, rows of a part that several are in. */
struct part {
    char *weight, *bias;
    size_t n, k;
    bool linear;         /* that qt_model_linears lists */
    size_t index;        /* among these, or among the norms; of rows of a part: as that */
    size_t whole, first; /* rows [first, first + n) of that part; itself, 0 */
};

struct layer_def {
    size_t experts;     /* 0: no mixture */
    struct part *parts; /* [layer_parts()] */
    struct qt_linear *linears;
    struct qt_norm norms[QT_LAYER_NORMS];
    size_t linear_count, norm_count;
};

struct qt_model {
    struct config cfg;
    struct layer_def *layers;
    struct part embed, positions, project_in, project_out, final_norm;
    struct part head;    /* absent when tied to embed */
    char *tied_head;     /* a tensor that is stored although it is tied; or NULL */
    struct qt_norm last; /* final_norm */
};

/* Where among the parts. Experts count from 0, which is also the MLP where there are none. */
static inline size_t part_at(size_t expert, enum role role)
{
    return expert * EXPERT_ROLES + role;
}

/* Room for the parts of any layer. */
static inline size_t layer_parts(const struct config *cfg)
{
    return part_at(cfg->info.experts ? cfg->info.experts - 1 : 0, ROLE_COUNT);
}

/* The inputs of an expert's linears. */
static inline int expert_input(size_t expert, bool down)
{
    return 2 + 2 * (int)expert + down;
}

/* -1: it is no expert's. */
static inline int layer_expert(const struct layer_def *layer, int input)
{
    return input >= 2 && layer->experts ? (input - 2) / 2 : -1;
}

static inline size_t part_count(const struct part *p)
{
    return p->n * (p->k ? p->k : 1);
}

#endif
