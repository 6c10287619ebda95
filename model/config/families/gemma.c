/* Gemma. */
#include "model/config/families/families.h"

/* Like config_read_positive, with the default `missing`; null turns the softcap off (*out = 0). */
static int read_softcap(float *out, const struct source *src, const char *key, double missing,
                        struct qt_err *err)
{
    const json_t *v = json_object_get(src->json, key);
    double value = missing;
    int rc = QT_OK;
    if (json_is_null(v))
        value = 0;
    else if (v)
        rc = config_read_positive(&value, src, key, err);
    *out = (float)value;
    return rc;
}

static int read_gemma(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const struct arch *arch = cfg->arch;
    double scalar = arch->query_scalar > 0 ? arch->query_scalar : (double)cfg->info.head_dim;
    bool both_ways = false;
    int rc = QT_OK;
    QT_TRY(
        read_softcap(&cfg->attn_softcap, src, "attn_logit_softcapping", arch->attn_softcap, err));
    QT_TRY(read_softcap(&cfg->info.logit_softcap, src, "final_logit_softcapping",
                        arch->logit_softcap, err));
    if (arch->query_scalar > 0)
        QT_TRY(config_read_positive(&scalar, src, "query_pre_attn_scalar", err));
    QT_TRY(qt_json_get_bool(&both_ways, src->json, "use_bidirectional_attention", src->path, err));
    if (both_ways)
        QT_TRY(config_unsupported(src, "use_bidirectional_attention", "true", err));
    if (arch->local_theta > 0 && cfg->attn_softcap > 0) /* transformers ignores it */
        QT_TRY(config_unsupported(src, "attn_logit_softcapping", "a number in this family", err));
    if (cfg->multimodal && cfg->info.logit_softcap > 0) /* ignored, too */
        QT_TRY(
            config_unsupported(src, "final_logit_softcapping", "a number in 'text_config'", err));
    if (cfg->act == QT_ACT_GELU) /* transformers does so, because early files had the wrong name */
        cfg->act = QT_ACT_GELU_TANH;
    cfg->attn_scale = (float)(1.0 / sqrt(scalar));
    cfg->embed_scale = (float)sqrt((double)cfg->info.hidden);
done:
    return rc;
}

#define GEMMA_LIKE                                                                                 \
    DECODER_NAMES, .eps_key = "rms_norm_eps", .act = "gelu_pytorch_tanh", .norms_plus_1 = true,    \
                   .tied = {"tie_word_embeddings", true}, .qkv_bias = {"attention_bias", false},   \
                   .o_bias = {"attention_bias", false}, .head_dim = 256, .read = read_gemma

const struct arch arch_gemma = {
    .family = "gemma",
    GEMMA_LIKE,
    .parts = {LLAMA_PARTS},
    .act_key = "hidden_act",
};

#define GEMMA_COMMON                                                                               \
    ATTENTION_PARTS, [ROLE_ATTN_OUT] = "post_attention_layernorm",                                 \
                     [ROLE_MLP_IN] = "pre_feedforward_layernorm",                                  \
                     [ROLE_MLP_OUT] = "post_feedforward_layernorm"

#define GEMMA_PARTS GEMMA_COMMON, MLP_PARTS

const struct arch arch_gemma2 = {
    .family = "gemma2",
    GEMMA_LIKE,
    .parts = {GEMMA_PARTS},
    .act_key = "hidden_activation",
    .window = WINDOW_EVEN,
    .query_scalar = 256,
    .attn_softcap = 50,
    .logit_softcap = 30,
};

const struct arch arch_vaultgemma = {
    .family = "vaultgemma",
    GEMMA_LIKE,
    .parts = {ATTENTION_PARTS, MLP_PARTS, [ROLE_MLP_IN] = "pre_feedforward_layernorm"},
    .act_key = "hidden_activation",
    .window = WINDOW_EVEN,
    .query_scalar = 256,
    .attn_softcap = 50,
    .logit_softcap = 30,
};

const struct arch arch_gemma3_text = {
    .family = "gemma3_text",
    GEMMA_LIKE,
    .vocab = 262208,
    .max_positions = 131072,
    .heads = 8,
    .kv_heads = 4,
    .theta = 1e6,
    .local_theta = 1e4,
    .local_theta_key = "rope_local_base_freq",
    .window_period_key = "sliding_window_pattern",
    .parts = {GEMMA_PARTS, [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm"},
    .act_key = "hidden_activation",
    .window = WINDOW_PATTERN,
    .window_period = 6,
    .query_scalar = 256,
};

#define PER_LAYER_PARTS                                                                            \
    [ROLE_PER_LAYER_GATE] = "per_layer_input_gate", [ROLE_PER_LAYER_OUT] = "per_layer_projection", \
    [ROLE_PER_LAYER_NORM] = "post_per_layer_input_norm"

/* intermediate_size lists the widths of all layers. */
static int adapt_gemma3n(json_t *out, const struct source *src, struct qt_err *err)
{
    static const char key[] = "intermediate_size";
    json_t *list = json_object_get(out, key), *first = json_array_get(list, 0);
    for (size_t i = 1; i < json_array_size(list); i++)
        if (!json_equal(first, json_array_get(list, i)))
            return config_unsupported(src, key, "a list of different numbers", err);
    return !json_is_integer(first) || json_object_set(out, key, first) == 0
               ? QT_OK
               : qt_no_memory(err, NULL);
}

/* The inputs of single layers; *width: the default. */
static int read_per_layer(struct config *cfg, const struct source *src, size_t *width,
                          struct qt_err *err)
{
    static const char key[] = "hidden_size_per_layer_input";
    int rc;
    QT_TRY(qt_json_get_size(width, src->json, key, src->path, err));
    if (*width && cfg->info.experts)
        QT_TRY(config_unsupported(src, key, "a number above 0 with experts", err));
    if (*width > CONFIG_WIDTH / cfg->info.layers)
        QT_TRY(config_unsupported(src, key, "so large a number", err));
    cfg->per_layer = *width;
    cfg->per_layer_vocab = 262144;
    if (*width)
        QT_TRY(config_read_size(&cfg->per_layer_vocab, src, "vocab_size_per_layer_input",
                                CONFIG_WIDTH, err));
done:
    return rc;
}

/* The x with which a normal random number is below x with probability p. */
static double normal_quantile(double p)
{
    double x = 0, step = 1;
    for (int i = 0; i < 100 && fabs(step) > 1e-12; i++) {
        step = (0.5 * erfc(-x * M_SQRT1_2) - p) * sqrt(2 * M_PI) * exp(x * x / 2);
        x -= fmin(fmax(step, -0.5), 0.5);
    }
    return x;
}

/* activation_sparsity_pattern: the fraction of gates that each layer sets to 0. */
static int read_cutoffs(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "activation_sparsity_pattern";
    const json_t *list = json_object_get(src->json, key);
    const size_t layers = cfg->info.layers;
    int rc;
    if (config_given(src->json, key) && json_array_size(list) != layers)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not a list of %zu numbers", key,
                       layers);
    QT_TRY(qt_array_new(&cfg->cutoffs, layers, sizeof *cfg->cutoffs, err));
    for (size_t i = 0; i < layers; i++) {
        const json_t *entry = json_array_get(list, i);
        const double fraction = !config_given(src->json, key) ? (layers > 10 && i < 10 ? 0.95 : 0)
                                : json_is_number(entry)       ? json_number_value(entry)
                                                              : -1;
        if (!(fraction >= 0 && fraction <= 0.9999))
            return qt_fail(err, QT_E_INPUT, src->path, NULL,
                           "'%s' has an entry that is not a number from 0 to 0.9999", key);
        cfg->cutoffs[i] =
            fraction > 0 ? (float)normal_quantile((double)(float)fraction) : -INFINITY;
    }
done:
    return rc;
}

static int read_gemma3n(struct config *cfg, const struct source *src, struct qt_err *err)
{
    size_t active = 0, width = 256;
    int rc;
    QT_TRY(read_softcap(&cfg->info.logit_softcap, src, "final_logit_softcapping", 30, err));
    QT_TRY(read_per_layer(cfg, src, &width, err));
    if (!width)
        QT_TRY(config_unsupported(src, "hidden_size_per_layer_input", "0", err));
    QT_TRY(read_cutoffs(cfg, src, err));
    cfg->altup = 4;
    cfg->laurel = 64;
    cfg->altup_scaled = true;
    QT_TRY(config_read_size(&cfg->altup, src, "altup_num_inputs", CONFIG_ALTUP, err));
    QT_TRY(config_read_size(&cfg->laurel, src, "laurel_rank", CONFIG_WIDTH, err));
    QT_TRY(qt_json_get_bool(&cfg->altup_scaled, src->json, "altup_correct_scale", src->path, err));
    QT_TRY(qt_json_get_size(&active, src->json, "altup_active_idx", src->path, err));
    if (active)
        QT_TRY(config_unsupported(src, "altup_active_idx", "a number other than 0", err));
    if (cfg->altup < 2)
        QT_TRY(config_unsupported(src, "altup_num_inputs", "1", err));
    cfg->attn_scale = 1;
    cfg->embed_scale = (float)sqrt((double)cfg->info.hidden);
done:
    return rc;
}

const struct arch arch_gemma3n_text = {
    .family = "gemma3n_text",
    DECODER_NAMES,
    .vocab = 262400,
    .max_positions = 32768,
    .heads = 8,
    .kv_heads = 2,
    .head_dim = 256,
    .layer_embed = "embed_tokens_per_layer",
    .layer_project = "per_layer_model_projection",
    .layer_norm = "per_layer_projection_norm",
    .layer_embed_first = true,
    .altup_in = "altup_projections",
    .altup_out = "altup_unembed_projections",
    .parts =
        {GEMMA_PARTS,
         PER_LAYER_PARTS, [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm",
         [ROLE_ALTUP_NORM] = "altup.router_norm", [ROLE_ALTUP_ROUTER] = "altup.modality_router",
         [ROLE_ALTUP_PREDICT] = "altup.prediction_coefs",
         [ROLE_ALTUP_CORRECT] = "altup.correction_coefs",
         [ROLE_ALTUP_SCALE] = "altup.correct_output_scale",
         [ROLE_LAUREL_LEFT] = "laurel.linear_left", [ROLE_LAUREL_RIGHT] = "laurel.linear_right",
         [ROLE_LAUREL_NORM] = "laurel.post_laurel_norm"},
    .value_norm = true,
    .shared_keys = true,
    .shared_layers = 15,
    .eps_key = "rms_norm_eps",
    .act_key = "hidden_activation",
    .act = "gelu_pytorch_tanh",
    .norm = QT_NORM_RMS,
    .theta = 1e6,
    .local_theta = 1e4,
    .local_theta_key = "rope_local_base_freq",
    .window = WINDOW_PATTERN,
    .window_period = 5,
    .window_size = 512,
    .tied = {"tie_word_embeddings", true},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .adapt = adapt_gemma3n,
    .read = read_gemma3n,
};

#define GEMMA4_LIKE                                                                                \
    DECODER_NAMES, .eps_key = "rms_norm_eps", .act_key = "hidden_activation",                      \
                   .act = "gelu_pytorch_tanh", .norm = QT_NORM_RMS, .head_dim = 256,               \
                   .kv_heads = 4, .layer_heads = true, .shared_keys = true, .value_norm = true,    \
                   .last_global = true, .rope_needed = true, .theta = 1e6, .local_theta = 1e4,     \
                   .window = WINDOW_PATTERN, .window_period = 6,                                   \
                   .tied = {"tie_word_embeddings", true}, .qkv_bias = {"attention_bias", false},   \
                   .o_bias = {"attention_bias", false}

#define GEMMA4_PARTS                                                                               \
    GEMMA_COMMON, [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm",          \
                  [ROLE_LAYER_SCALE] = "layer_scalar", PER_LAYER_PARTS

static const struct arch_alias gemma4_keys[] = {{"num_experts_per_tok", "top_k_experts"}, {0}};

static int read_gemma4_unified(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const char *both_ways = "";
    int rc;
    QT_TRY(read_softcap(&cfg->info.logit_softcap, src, "final_logit_softcapping", 0, err));
    QT_TRY(
        qt_json_get_string(&both_ways, src->json, "use_bidirectional_attention", src->path, err));
    if (strcmp(both_ways, "all") == 0)
        QT_TRY(config_unsupported(src, "use_bidirectional_attention", both_ways, err));
    QT_TRY(qt_json_get_bool(&cfg->wide_shared, src->json, "use_double_wide_mlp", src->path, err));
    if (cfg->wide_shared && cfg->info.experts)
        QT_TRY(config_unsupported(src, "use_double_wide_mlp", "true with experts", err));
    cfg->attn_scale = 1;
    cfg->embed_scale = (float)sqrt((double)cfg->info.hidden);
done:
    return rc;
}

static int read_gemma4(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "hidden_size_per_layer_input";
    size_t width = config_null(src->json, key) ? 0 : 256;
    int rc;
    QT_TRY(read_gemma4_unified(cfg, src, err));
    QT_TRY(read_per_layer(cfg, src, &width, err));
done:
    return rc;
}

const struct arch arch_gemma4_text = {
    .family = "gemma4_text",
    GEMMA4_LIKE,
    .aliases = gemma4_keys,
    .window_size = 512,
    .layer_embed = "embed_tokens_per_layer",
    .layer_project = "per_layer_model_projection",
    .layer_norm = "per_layer_projection_norm",
    .parts = {GEMMA4_PARTS, [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj",
              [ROLE_DOWN] = "down_proj", [ROLE_ROUTER] = "router.proj",
              [ROLE_ROUTER_NORM] = "router.scale", [ROLE_EXPERT_SCALE] = "router.per_expert_scale",
              [ROLE_EXPERTS_IN] = "pre_feedforward_layernorm_2",
              [ROLE_EXPERTS_OUT] = "post_feedforward_layernorm_2",
              [ROLE_SHARED_OUT] = "post_feedforward_layernorm_1"},
    .experts_switch = "enable_moe_block",
    .experts = "experts.",
    .shared = "mlp.",
    .dense = "mlp.",
    .intermediate_key = "moe_intermediate_size",
    .shared_key = "intermediate_size",
    .normalize_routing = {NULL, true},
    .read = read_gemma4,
};

const struct arch arch_gemma4_unified_text = {
    .family = "gemma4_unified_text",
    GEMMA4_LIKE,
    .window_size = 1024,
    .parts = {GEMMA4_PARTS, MLP_PARTS},
    .read = read_gemma4_unified,
};
