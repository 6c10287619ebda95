/*
 * The decoder graph, shared by the files that read config.json and that name, load and run the
 * parts of a decoder layer.
 *
 * Every supported decoder layer is an instance of this drawing. Parts in parentheses exist in some
 * families only; (+) is the residual add.
 *
 *   attention sublayer:
 *   hidden -+- ATTN_IN -- Q K V -- (Q_NORM K_NORM) -- (rope) -- attention -- O -- (ATTN_OUT) -(+)-
 *           +---------------------------------------------------------------------------------+
 *   MLP sublayer:
 *          -+- MLP_IN -- (GATE) UP -- act -- DOWN -- (MLP_OUT) -(+)-
 *           +----------------------------------------------------+
 *
 * Mixture of experts: every expert has its own GATE, UP and DOWN. ROUTER scores the output of
 * MLP_IN and chooses a few experts for each token. The outputs of these experts are multiplied by
 * their routing weights and added. SELECT_BIAS is added to the scores for the choice, not to the
 * routing weights. The last expert may be a shared expert with its own width; its routing weight is
 * 1, or the sigmoid of SHARED_GATE. Some layers may have a dense MLP instead, with yet another
 * width.
 *
 * Other mixers than attention have their parts between ATTN_IN and ATTN_OUT: latent.c, delta.c,
 * short.c, ssm.c and head_experts.c draw them. A layer may also be a mixer without an MLP, or an
 * MLP without a mixer. SINKS adds a term to the softmax of each attention head; with gates, Q also
 * computes a factor for each channel in front of O, or ATTN_GATE does.
 *
 * With grouped_qkv, QKV has for each KV head the rows of its queries, key and value; with
 * qkv_shards (CodeGen), for each shard the rows of its queries, values and keys.
 *
 * Fused tensors: some families store Q, K, V as one tensor QKV, and GATE, UP as GATE_UP. The fused
 * tensors are then the linears, and Q, K, V, GATE, UP are row ranges of them.
 *
 * With `parallel`, MLP_IN is applied to the input of the layer (without MLP_IN, the MLP reads the
 * output of ATTN_IN), and both outputs are added to the hidden states at the end: the layer is one
 * sublayer.
 *
 * Gemma 4 has a dense MLP beside the experts: it is the shared expert. Then the hidden states pass
 * ROUTER_NORM before the router and EXPERTS_IN before the experts; MLP_IN is for the shared expert
 * only. EXPERTS_OUT follows the sum over the routed experts, each of which is multiplied by its
 * EXPERT_SCALE, and SHARED_OUT the shared expert. LAYER_SCALE multiplies the hidden states at the
 * end of the layer. Values may pass a norm without weights, and K may compute values, too.
 *
 * altup.c says what Gemma 3n has around the sublayers. With a cutoff, an MLP sets gates (the
 * outputs of GATE) below mean + cutoff * standard deviation of the token's gates to 0, and
 * subtracts this limit from the others.
 *
 * per_layer.c draws a third sublayer. A layer whose heads are `shared` has no K and V: it attends
 * to the keys and values of an earlier layer.
 *
 * With `norm_after` (early OPT), ATTN_IN and MLP_IN are applied after the residual adds instead.
 * The output of a sublayer is multiplied by `residual_scale` before the residual add.
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
    ROLE_ATTN_GATE,
    ROLE_Q_A, /* latent attention, up to KV_B */
    ROLE_KV_A,
    ROLE_Q_A_NORM,
    ROLE_Q_B,
    ROLE_KV_A_NORM,
    ROLE_KV_B,
    ROLE_SINKS,
    ROLE_DELTA_QKVZ, /* gated DeltaNet, up to DELTA_OUT */
    ROLE_DELTA_QKV,
    ROLE_DELTA_Z,
    ROLE_DELTA_BA,
    ROLE_DELTA_B,
    ROLE_DELTA_A,
    ROLE_CONV,
    ROLE_A_LOG,
    ROLE_DT_BIAS,
    ROLE_DELTA_NORM,
    ROLE_DELTA_OUT,
    ROLE_SHORT_IN, /* short convolution, up to SHORT_OUT */
    ROLE_SHORT_CONV,
    ROLE_SHORT_OUT,
    ROLE_SSM_IN, /* state space model, with CONV, A_LOG, DT_BIAS and SSM_OUT */
    ROLE_SSM_D,
    ROLE_SSM_NORM,
    ROLE_O,
    ROLE_SSM_OUT,
    ROLE_HEADS_ROUTER, /* see head_experts.c */
    ROLE_HEADS_BIAS,
    ROLE_ATTN_OUT,
    ROLE_MLP_IN,
    ROLE_ROUTER,
    ROLE_SELECT_BIAS,
    ROLE_SHARED_GATE,
    ROLE_ROUTER_NORM,
    ROLE_EXPERT_SCALE,
    ROLE_EXPERTS_IN,
    ROLE_EXPERTS_OUT,
    ROLE_EXPERTS_BIAS, /* added to the sum over the experts */
    ROLE_SHARED_OUT,
    ROLE_MLP_OUT,
    ROLE_PER_LAYER_GATE,
    ROLE_PER_LAYER_OUT,
    ROLE_PER_LAYER_NORM,
    ROLE_LAYER_SCALE,
    ROLE_ALTUP_NORM, /* see altup.c, up to LAUREL_NORM */
    ROLE_ALTUP_ROUTER,
    ROLE_ALTUP_PREDICT,
    ROLE_ALTUP_CORRECT,
    ROLE_ALTUP_SCALE,
    ROLE_LAUREL_LEFT,
    ROLE_LAUREL_RIGHT,
    ROLE_LAUREL_NORM,
    ROLE_GATE_UP, /* this and the following parts exist once per expert */
    ROLE_GATE,
    ROLE_UP,
    ROLE_DOWN,
    ROLE_EXPERT_Q, /* of head_experts.c, as EXPERT_O */
    ROLE_EXPERT_O,
    ROLE_COUNT,
    EXPERT_ROLES = ROLE_COUNT - ROLE_GATE_UP
};

/* An option that is fixed for a family (key NULL), or read from config.json with a default. */
struct arch_flag {
    const char *key;
    bool value;
};

/* A key of config.json that a family calls `alias`; the key itself is understood too. */
struct arch_alias {
    const char *key, *alias;
};

enum window_rule {
    WINDOW_NONE,
    WINDOW_ALL,           /* every layer has the sliding window */
    WINDOW_LISTED,        /* every layer, unless layer_types says otherwise */
    WINDOW_EVEN,          /* layers 0, 2, 4, ... */
    WINDOW_PATTERN,       /* all layers but every window_period-th: the last of each period */
    WINDOW_PATTERN_FIRST, /* all layers but every window_period-th: the first of each period */
    WINDOW_FROM_LAYER,    /* layers from max_window_layers on */
    WINDOW_EVEN_TO_LAYER  /* layers 0, 2, 4, ... below max_window_layers */
};

/* Which layers have no rotary embedding (NoPE). */
enum no_rope_rule {
    NO_ROPE_NEVER,
    NO_ROPE_LISTED, /* a 0 in no_rope_layers, or else every no_rope_layer_interval-th layer */
    NO_ROPE_GLOBAL  /* layers without a window, unless sliding_window is null */
};

enum { CONFIG_ALTUP = 8 }; /* most hidden states of a token */

struct config;
struct source;

/* The first sublayer of a decoder layer is one of these, between ATTN_IN and ATTN_OUT.
 * SSM_ATTENTION is the sum of a state space model and attention. */
enum mixer_kind {
    MIXER_ATTENTION,
    MIXER_LATENT,
    MIXER_DELTA,
    MIXER_SHORT,
    MIXER_SSM,
    MIXER_SSM_ATTENTION,
    MIXER_HEAD_EXPERTS, /* all layers have experts, too */
    MIXER_NONE,
    MIXER_KINDS
};

/* Which layers have state space models. */
enum ssm_rule {
    SSM_NEVER,
    SSM_UNLISTED, /* layers that are not in attn_layer_indices */
    SSM_TYPES,    /* by layer_types; without it, all */
    SSM_BESIDE,   /* all, beside attention */
    SSM_BLOCKS    /* a layer is one mixer or one MLP: by layer_types, or hybrid_override_pattern */
};

/* A model family: the keys of config.json, their defaults, tensor names and parts of the graph. */
struct arch {
    const char *family; /* model_type */
    /* Defaults. 0: config.json must have the key; for kv_heads: heads; head_dim: hidden / heads. */
    size_t vocab, max_positions, heads, kv_heads, head_dim;
    size_t value_dim;                 /* default of v_head_dim; 0: hidden / heads */
    const struct arch_alias *aliases; /* ends with {0}; NULL: none */
    /* Tensor names without the decoder's prefix ("model.") and ".weight" or ".bias". The names of a
     * layer follow `layers` and the layer number. */
    const char *layers, *embed, *positions, *final_norm, *project_in, *project_out;
    /* Encoders: attention goes both ways; token types, whose first row is added to all positions;
     * and what a masked-language model has in front of its head, linear, activation and norm, and
     * the bias of its head. NULL: there are none. */
    bool both_ways;
    const char *types, *transform, *transform_norm, *head_biases;
    struct arch_flag transform_bias;
    bool first_bare;        /* layer 0 has no ATTN_IN */
    const char *embed_norm; /* of a norm of the embedding; NULL: none */
    const char *head; /* name of the head without ".weight"; NULL: as in graph/model.c, `naming` */
    /* Inputs of single layers: their table, projection and norm. NULL: there are none. */
    const char *layer_embed, *layer_project, *layer_norm;
    bool layer_embed_first; /* tokens beyond that table have its first row; else they are errors */
    /* Names, before the number, of the projections of AltUp; NULL: there are none. */
    const char *altup_in, *altup_out;
    const char *parts[ROLE_COUNT]; /* NULL: the family has no such part */
    /* Name prefixes of MLP parts in families with experts: `experts` precedes the expert number,
     * `shared` a part of the shared expert, `dense` a part of a dense MLP. NULL: there are none. */
    const char *experts, *shared, *dense;
    /* The same of EXPERT_Q and EXPERT_O; all layers are MIXER_HEAD_EXPERTS. NULL: none is. */
    const char *head_experts;
    /* The shared expert stores GATE_UP, with these names, where routed ones have GATE and UP. */
    const char *shared_gate_up, *shared_down;
    /* Names of routed experts' parts; NULL: as in `parts`. */
    const char *routed_parts[EXPERT_ROLES];
    const char *experts_switch; /* key that enables the experts, default false; NULL: always */
    bool experts_optional;      /* num_local_experts may be 0 */
    struct arch_flag normalize_routing; /* routing weights of the chosen experts sum to 1 */
    bool sigmoid_router;                /* scores are sigmoids, not a softmax */
    bool sparse_mixer;                  /* see experts.c; reads router_jitter_noise */
    bool scaled_inputs;    /* routing weights multiply the inputs of experts, not their outputs */
    bool shared_optional;  /* shared_key 0 or missing: no shared expert */
    const char *dense_key; /* width of dense MLPs; NULL: intermediate_size */
    bool moe_listed;       /* moe_layers lists the layers with experts */
    /* Also reads n_group, topk_group, routed_scaling_factor and first_k_dense_replace. */
    bool grouped_router;
    size_t groups, top_groups;    /* their defaults; 0: 1 */
    double routing_eps;           /* added to the sum of weights that is divided by; 0: 1e-20 */
    double routing_scale;         /* default of routed_scaling_factor; 0: 1 */
    bool mlp_types;               /* reads mlp_layer_types */
    bool group_best;              /* a group's score is its best score, not the sum of two */
    size_t first_dense;           /* default of the number of leading layers with a dense MLP */
    bool moe_layers;              /* reads moe_k and moe_layer_{start_index,end_index,interval} */
    bool select_bias_row;         /* SELECT_BIAS is stored as a matrix of one row */
    const char *intermediate_key; /* width of the MLP, or of an expert; NULL: intermediate_size */
    /* Width of the shared expert: the key of the width itself, or the key and default of the number
     * of experts whose widths it adds up. NULL: no such key. */
    const char *shared_key, *shared_count_key;
    size_t shared_count;
    const char *act_key, *act;
    const char *eps_key; /* NULL: always 1e-5 */
    double eps, theta;   /* defaults of the norm's epsilon and rope_theta; 0: 1e-6 and 1e4 */
    float layer_eps;     /* epsilon of norms of layers, whatever config.json says; 0: the same */
    /* Default rope_theta of layers with a window. 0: all layers have the same rotary embedding. */
    double local_theta;
    const char *local_theta_key;        /* NULL: only rope_parameters can set it */
    double attn_softcap, logit_softcap; /* defaults; 0: none */
    double query_scalar; /* default of query_pre_attn_scalar; 0: the key is not read */
    enum qt_norm_kind norm;
    bool norms_plus_1;          /* norms multiply by 1 + the stored weight */
    bool norms_unbiased;        /* LayerNorms have no bias */
    struct arch_flag head_bias; /* the head has one */
    bool grows;                 /* the default of intermediate_size is 4 times hidden_size */
    bool parallel_norms;        /* with `parallel`: the MLP has MLP_IN */
    /* Names of ATTN_IN and MLP_IN in such a layer; NULL: those in `parts`. */
    const char *parallel_attn_in, *parallel_mlp_in;
    bool grouped_qkv;  /* rows of QKV: for each KV head its queries, key and value */
    size_t qkv_shards; /* with grouped_qkv: see the drawing; 0: none */
    bool clips;        /* reads clip_qkv, the largest magnitude of queries, keys and values */
    /* ALiBi: the bias of a key's score is its position times the head's slope, instead of a rotary
     * embedding. alibi_scaled (Falcon): slopes and products are BF16 numbers, and attn_scale
     * multiplies them, too. */
    struct arch_flag alibi;
    bool alibi_scaled;
    struct arch_flag parallel; /* attention and MLP have the same input: see the drawing */
    struct arch_flag qkv_bias, o_bias, mlp_bias, tied;
    enum window_rule window;
    const char *window_period_key; /* NULL: window_period is fixed */
    size_t window_period;
    const char *positions_key; /* the model is run on at most so many tokens; NULL: no such key */
    size_t positions_most;     /* its default */
    const char *sparse_type;   /* another name of attention in layer_types; NULL: none */
    bool chunked;              /* reads attention_chunk_size */
    size_t window_from;        /* default of max_window_layers; 0: 28 */
    bool window_switch;        /* reads use_sliding_window, default false */
    size_t window_size;        /* default of sliding_window; 0: 4096 */
    bool window_given; /* without the key sliding_window there is no window (else: the default) */
    bool window_optional; /* with WINDOW_PATTERN: sliding_window null means no window */
    bool first_global;    /* without layer_types, the first layer has no window */
    bool last_global;     /* the last layer has no window, whatever layer_types says */
    enum no_rope_rule no_rope;
    bool norms_of_all_heads;    /* Q_NORM and K_NORM normalize all attention heads together */
    bool norms_after_rope;      /* Q_NORM and K_NORM follow the rotary embedding */
    bool rope_mscale;           /* reads short_mscale and long_mscale, the scale of LongRoPE */
    const char *head_norms_key; /* key that enables Q_NORM and K_NORM; NULL: always enabled */
    bool value_norm;            /* values pass a norm without weights */
    bool shared_keys;           /* reads num_kv_shared_layers, default `shared_layers` */
    size_t shared_layers;
    /* Layers with a window have twice the KV heads, and only they have SINKS; reads v_head_dim,
     * default value_dim, the width of values. */
    bool window_heads;
    bool layer_heads;  /* layers without a window have other heads: reads global_head_dim */
    bool latent;       /* MIXER_LATENT: reads q_lora_rank and the like */
    bool delta;        /* some layers are MIXER_DELTA, by layer_types or full_attention_interval */
    bool short_conv;   /* some layers are MIXER_SHORT, by layer_types or full_attn_idxs */
    enum ssm_rule ssm; /* reads mamba_n_heads and the like: see config/ssm.c */
    size_t ssm_groups, ssm_state, ssm_dim; /* their defaults; 0: 1, 256, from other sizes */
    struct arch_flag ssm_bias;             /* of SSM_IN and SSM_OUT */
    bool ssm_step_min;                     /* reads time_step_min instead of time_step_limit */
    bool dense_is_shared; /* without experts, the MLP has the names of the shared expert */
    bool gated;           /* Q has a gate for each channel of the attention output, too */
    bool router_bias;     /* of ROUTER */
    bool rope;            /* false: learned positions from row `position_offset` of the table */
    bool partial_rope;    /* reads partial_rotary_factor */
    double rotary_factor; /* default of partial_rotary_factor; 0: 1 */
    bool rotary_read;     /* rotary_dim gives the number of rotary channels */
    bool interleaved;     /* the rotary embedding pairs channels 2i and 2i + 1 */
    bool interleave_read; /* rope_interleave overrides it */
    bool query_steps;     /* reads llama_4_scaling_beta: queries are scaled by position */
    bool mrope;           /* accepts rope_type mrope, equal to the default for text */
    bool rope_alpha;      /* rope_type dynamic may have `alpha`, which raises rope_theta */
    bool rope_needed;     /* without rope options the family has a scaling of its own */
    /* Default of the top-level original_max_position_embeddings. In such a family the only scaling
     * is LongRoPE (also called su or yarn). 0: the key is among the rope options. */
    size_t original_positions;
    size_t position_offset;
    /* Writes options of src->json that the family expresses differently into `out`, its copy, by
     * their usual keys, before all others are read; NULL: there are none. */
    int (*adapt)(json_t *out, const struct source *src, struct qt_err *err);
    /* Reads options that only this family and its relatives have, after all others; NULL: none. */
    int (*read)(struct config *cfg, const struct source *src, struct qt_err *err);
};
/* See qt_model_cannot; experts: the model has MoE layers; ssm: some layers have state space
 * models. */
const char *arch_cannot(const struct arch *arch, bool experts, bool ssm, enum qt_use use);
/* Returns NULL for an unknown family. */
const struct arch *arch_find(const char *family);
/* A multimodal model: the family of its decoder, and the decoder's default of the norms' epsilon
 * (0: the family's), if "text_config" of config.json does not have them. */
struct arch_multimodal {
    const char *type, *decoder;
    double eps;
};
/* NULL: not the model_type of a multimodal model. */
const struct arch_multimodal *arch_of_multimodal(const char *type);

/* A rotary embedding rotates channels i and i + dim / 2 of an attention head (2i and 2i + 1 if
 * interleaved) by position * inv_freq[i]. Cosines and sines are multiplied by `scale`. */
struct rotary {
    size_t dim;      /* channels of an attention head that it rotates */
    float *inv_freq; /* [dim / 2], NULL: none */
    /* Replaces inv_freq in sequences of more than long_from tokens; NULL: no replacement. */
    float *long_inv_freq;
    size_t long_from;
    float scale;
};

/* Attention heads of a decoder layer. */
struct heads {
    size_t kv, dim;       /* KV heads; channels of a head */
    bool keys_are_values; /* V is absent: values are the outputs of K */
    bool shared;          /* keys and values are those of an earlier layer */
    size_t kept;          /* where they are in the state of a token; 0: they are not kept */
};

/* The checked contents of config.json. Sizes are at least 1 (0 only where "0:" says so) and small
 * enough that the product of any two fits in a size_t; heads is a multiple of kv_heads. */
struct config {
    const struct arch *arch;
    struct qt_model_info info;
    size_t embed_dim; /* width of the embedding table */
    /* Intermediate widths (rows of UP) of a dense MLP, an expert and the shared expert; 0: none. */
    size_t dense_width, expert_width, shared_width;
    bool *dense;      /* [layers] true: dense MLP in a model with experts; NULL: no experts */
    size_t *windows;  /* [layers] sliding window in tokens; 0: none */
    size_t *chunks;   /* [layers] tokens see those of their own chunk only; 0: no limit; or NULL */
    bool *no_rope;    /* [layers] true: no rotary embedding */
    bool interleaved; /* see struct arch */
    enum mixer_kind *mixers; /* [layers] */
    struct heads *heads;     /* [layers]; info.kv_heads and head_dim: the largest */
    size_t types;            /* rows of the table of token types; 0: none */
    bool transform_bias;     /* of arch.transform */
    enum qt_act_kind transform_act;
    size_t per_layer, per_layer_vocab; /* inputs of single layers: channels, rows of the table */
    size_t altup, laurel; /* of altup.c: hidden states of a token, width of LAUREL_LEFT; 0: none */
    bool altup_scaled;    /* there is ALTUP_SCALE */
    float *cutoffs;       /* [layers] of gates, see the drawing; -INFINITY: none; or NULL */
    bool wide_shared;     /* layers with shared keys and values have an MLP of twice the width */
    size_t value_dim;     /* channels of a value, fewer than those of a head; 0: as many */
    size_t o_width;       /* channels of the input of O, at most */
    struct {
        size_t key_heads, value_heads, key_dim, value_dim, kernel;
    } delta;             /* MIXER_DELTA: heads, channels of a head, and tokens of the convolution */
    size_t short_kernel; /* MIXER_SHORT: tokens of the convolution */
    /* MIXER_SSM and SSM_ATTENTION: see struct qt_state_space. The outputs of SSM_IN are, in this
     * order, gates, values, input vectors, output vectors and step inputs; `factors` multiply them.
     * The gates multiply what SSM_NORM normalizes, or with norm_first what it has normalized. */
    struct {
        size_t heads, dim, groups, state;
        size_t kernel; /* tokens of the convolution */
        float step_min, step_max, factors[5];
        enum qt_act_kind act; /* of the convolution's outputs */
        bool conv_bias, in_bias, out_bias, norm, norm_first;
    } ssm;
    /* Latent attention. An attention head has `nope` channels without rotary embedding and `rope`
     * channels with it; info.head_dim is the width in memory, at least nope + rope and v. */
    struct {
        size_t q_rank, kv_rank; /* of the latent states; q_rank 0: Q instead of Q_A and Q_B */
        size_t nope, rope, v;
    } latent;
    /* Queries are multiplied by 1 + query_beta ln(1 + floor(position / query_step)); query_beta 0:
     * by 1. */
    float query_beta;
    size_t query_step;
    /* Layers without rotary embedding multiply queries by
     * 1 + floor_beta ln(1 + floor((position + 1) / floor_step)); floor_beta 0: by 1. */
    float floor_beta;
    size_t floor_step;
    struct rotary rope, local_rope;   /* local: for layers with a window; none: `rope` for all */
    float output_factors[ROLE_COUNT]; /* of linears; 0: 1 */
    /* Factors of the attention scores, the embedding, sublayer outputs, and logits. */
    float attn_scale, embed_scale, residual_scale, logit_scale;
    float eps, attn_softcap;
    enum qt_act_kind act;
    bool qkv_bias, o_bias, mlp_bias, tied, norm_after, final_norm, head_norms, parallel, head_bias,
        parallel_norms, alibi;
    bool bare_norms; /* norms of queries and keys have no weights: after the rotary embedding */
    bool unit_head;  /* rows of the head are normalized */
    float clip_qkv;  /* 0: none */
    const struct arch_multimodal *multimodal; /* the decoder is part of such a model; or NULL */
    /* Set if a multimodal config.json has no tie_word_embeddings, or different ones for the decoder
     * and the whole model. The head is then tied if no head tensor is stored. */
    bool tied_unclear;
    /* The router chooses top_k experts per token, from the best top_groups of `groups` equal groups
     * of the first `routed` of info.experts. Routing weights are multiplied by routing_scale. */
    size_t routed, top_k, groups, top_groups;
    bool normalize_routing;
    double routing_scale;
    float jitter; /* of the sparse mixer */
};
/* Reads DIR/config.json; *out is freed by config_free. */
int config_read(struct config *out, const char *dir, const json_t *quantization,
                struct qt_err *err);
void config_free(struct config *cfg);

/* A linear, norm or table: y[n] = W[n][k] x[k] + b[n]; k = 0: the weight is a vector [n].
 * weight = NULL: the part is absent (k = 0), or is a row range of a fused part (k > 0). */
struct part {
    char *weight, *bias; /* tensor names, owned; NULL: none */
    size_t n, k;
    float eps;    /* of a norm */
    float factor; /* multiplies y; 0: 1 */
    bool linear;  /* listed by qt_model_linears */
    bool plus_1;  /* 1 is added to the stored weight */
    bool unit;    /* each row of the stored weight is divided by its L2 norm */
    size_t index; /* in the list of linears or of norms; row range: that of the fused part */
    /* This is rows [first, first + n) of part number `whole`; else: itself, 0. */
    size_t whole, first;
};

struct layer_def {
    enum mixer_kind mixer;
    bool mlp;
    struct heads heads;
    size_t index;       /* of the layer */
    int mixer_inputs;   /* linear inputs of the mixer; those of the MLP follow */
    size_t experts;     /* 0: dense MLP */
    struct part *parts; /* [layer_parts()], indexed by part_at() */
    struct qt_linear *linears;
    struct qt_norm norms[ROLE_COUNT];
    size_t linear_count, norm_count;
};

struct qt_model {
    struct config cfg;
    struct layer_def *layers;
    struct part embed, embed_norm, positions, project_in, project_out, final_norm;
    struct part types, transform, transform_norm;       /* of encoders */
    struct part layer_embed, layer_project, layer_norm; /* of per_layer.c */
    struct part *altup_in, *altup_out;                  /* [cfg.altup - 1] of altup.c; or NULL */
    struct part head;                                   /* absent if tied to embed */
    const char *prefix, *head_name; /* before the names of the decoder's tensors; of the head */
    char *tied_head;     /* name of a head that is stored although it is tied; NULL: none */
    struct qt_norm last; /* final_norm, for qt_model_norms */
};

/* False: the layer is a mixer only. */
static inline bool config_has_mlp(const struct config *cfg, size_t layer)
{
    return cfg->arch->ssm != SSM_BLOCKS || cfg->mixers[layer] == MIXER_NONE;
}

/* Floats per token: values of a state space model, and the channels of its convolution. */
static inline size_t ssm_values(const struct config *cfg)
{
    return cfg->ssm.heads * cfg->ssm.dim;
}

static inline size_t ssm_mixed(const struct config *cfg)
{
    return ssm_values(cfg) + 2 * cfg->ssm.groups * cfg->ssm.state;
}

/* Where the inputs of single layers begin in the state of a token. */
static inline size_t per_layer_at(const struct config *cfg)
{
    return cfg->info.hidden * (cfg->altup ? cfg->altup + 1 : 1);
}

/* Index of a part in layer_def.parts. A dense MLP is expert 0. */
static inline size_t part_at(size_t expert, enum role role)
{
    return expert * EXPERT_ROLES + role;
}

/* Size of layer_def.parts, for any layer. */
static inline size_t layer_parts(const struct config *cfg)
{
    return part_at(cfg->info.experts ? cfg->info.experts - 1 : 0, ROLE_COUNT);
}

/* The linear input of an expert of the MLP: of DOWN, or of GATE and UP. */
static inline int expert_input(const struct layer_def *layer, size_t expert, bool down)
{
    return layer->mixer_inputs + 2 * (int)expert + down;
}

/* The expert that has this linear input; -1: none. */
static inline int layer_expert(const struct layer_def *layer, int input)
{
    const bool heads = layer->mixer == MIXER_HEAD_EXPERTS && input < layer->mixer_inputs;
    const int first = heads ? 1 : layer->mixer_inputs, expert = (input - first) / 2;
    return input >= first && (size_t)expert < layer->experts ? expert : -1;
}

/* Intermediate width of the dense MLP of a layer. */
static inline size_t dense_width(const struct config *cfg, const struct heads *heads)
{
    return cfg->dense_width << (cfg->wide_shared && heads->shared);
}

/* Linear inputs of the mixer and the MLP. */
static inline int layer_mlp_end(const struct layer_def *layer)
{
    const size_t mlps = !layer->mlp ? 0 : layer->experts ? layer->experts : 1;
    return layer->mixer_inputs + 2 * (int)mlps;
}

/* The number of the input that all routed experts share, behind all linear inputs. */
static inline int experts_input(const struct config *cfg, const struct layer_def *layer)
{
    return layer_mlp_end(layer) + (cfg->per_layer ? 2 : 0);
}

/* Number of elements of the weight. */
static inline size_t part_count(const struct part *p)
{
    return p->n * (p->k ? p->k : 1);
}

#endif
