/* State space models (Mamba-2), with attention or alone. (Granite 4 is in granite.c.) */
#include "model/config/families/families.h"

#define BAMBA_LIKE                                                                                 \
    .layers = "layers.", .embed = "embed_tokens", .final_norm = "final_layernorm", .rope = true,   \
    .parts = {ATTENTION_PARTS,                                                                     \
              MAMBA_PARTS,                                                                         \
              [ROLE_MLP_IN] = "pre_ff_layernorm",                                                  \
              [ROLE_GATE] = "feed_forward.gate_proj",                                              \
              [ROLE_UP] = "feed_forward.up_proj",                                                  \
              [ROLE_DOWN] = "feed_forward.down_proj"},                                             \
    .kv_heads = 8, .ssm_bias = {"mamba_proj_bias", false}, .eps_key = "rms_norm_eps", .eps = 1e-5, \
    .act_key = "hidden_act", .act = "silu", .norm = QT_NORM_RMS,                                   \
    .tied = {"tie_word_embeddings", false}, .qkv_bias = {"attention_bias", false},                 \
    .o_bias = {"attention_bias", false}, .mlp_bias = {"mlp_bias", false}

const struct arch arch_bamba = {
    .family = "bamba",
    BAMBA_LIKE,
    .ssm = SSM_UNLISTED,
    .partial_rope = true,
    .rotary_factor = 0.5,
};

/* Reads a list of `count` positive numbers; a missing list leaves out[] unchanged. */
static int read_factors(double *out, size_t count, const struct source *src, const char *key,
                        struct qt_err *err)
{
    const json_t *list = json_object_get(src->json, key);
    if (!config_given(src->json, key))
        return QT_OK;
    if (!json_is_array(list) || json_array_size(list) != count)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not a list of %zu numbers", key,
                       count);
    for (size_t i = 0; i < count; i++) {
        out[i] = json_number_value(json_array_get(list, i));
        if (!(out[i] > 1e-30 && out[i] < 1e30))
            return qt_fail(err, QT_E_INPUT, src->path, NULL,
                           "'%s' has an entry that is no positive number", key);
    }
    return QT_OK;
}

/* Factors of the inputs of linears multiply their outputs here, which have no bias then. */
static int read_input_factor(double *out, const struct source *src, const char *key, bool biased,
                             struct qt_err *err)
{
    int rc = config_read_positive(out, src, key, err);
    return rc == QT_OK && biased && *out != 1
               ? config_unsupported(src, key, "a number other than 1 with a bias", err)
               : rc;
}

static int read_falcon_h1(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const struct arch_flag norm = {"mamba_rms_norm", false},
                           first = {"mamba_norm_before_gate", true};
    const struct arch_flag out_bias = {"projectors_bias", false};
    double embed = 1, head = 1, attn_in = 1, key = 1, attn_out = 1, ssm_in = 1, ssm_out = 1;
    double mlp[2] = {1, 1}, sections[5] = {1, 1, 1, 1, 1};
    float *factors = cfg->output_factors;
    int rc;
    QT_TRY(config_read_flag(&cfg->ssm.norm, src, &norm, err));
    QT_TRY(config_read_flag(&cfg->ssm.norm_first, src, &first, err));
    QT_TRY(config_read_flag(&cfg->ssm.out_bias, src, &out_bias, err));
    QT_TRY(config_read_positive(&embed, src, "embedding_multiplier", err));
    QT_TRY(config_read_positive(&head, src, "lm_head_multiplier", err));
    QT_TRY(read_input_factor(&attn_in, src, "attention_in_multiplier", cfg->qkv_bias, err));
    QT_TRY(config_read_positive(&key, src, "key_multiplier", err));
    QT_TRY(config_read_positive(&attn_out, src, "attention_out_multiplier", err));
    QT_TRY(read_input_factor(&ssm_in, src, "ssm_in_multiplier", cfg->ssm.in_bias, err));
    QT_TRY(config_read_positive(&ssm_out, src, "ssm_out_multiplier", err));
    QT_TRY(read_factors(mlp, 2, src, "mlp_multipliers", err));
    QT_TRY(read_factors(sections, 5, src, "ssm_multipliers", err));
    cfg->embed_scale = (float)embed;
    cfg->logit_scale = (float)head;
    factors[ROLE_Q] = factors[ROLE_V] = (float)attn_in;
    factors[ROLE_K] = (float)(attn_in * key);
    factors[ROLE_O] = (float)attn_out;
    factors[ROLE_SSM_OUT] = (float)ssm_out;
    factors[ROLE_GATE] = (float)mlp[0];
    factors[ROLE_DOWN] = (float)mlp[1];
    for (size_t i = 0; i < 5; i++)
        cfg->ssm.factors[i] = (float)(ssm_in * sections[i]);
done:
    return rc;
}

const struct arch arch_falcon_h1 = {
    .family = "falcon_h1",
    BAMBA_LIKE,
    .ssm = SSM_BESIDE,
    .read = read_falcon_h1,
};

#define BLOCK_LIKE                                                                                 \
    .layers = "layers.", .embed = "embeddings", .final_norm = "norm_f", .ssm = SSM_BLOCKS,         \
    .ssm_groups = 8, .ssm_state = 128, .ssm_dim = 64, .ssm_bias = {"use_bias", false},             \
    .eps_key = "layer_norm_epsilon", .eps = 1e-5, .norm = QT_NORM_RMS,                             \
    .tied = {"tie_word_embeddings", false}

#define BLOCK_PARTS                                                                                \
    [ROLE_ATTN_IN] = "norm", [ROLE_SSM_IN] = "mixer.in_proj", [ROLE_CONV] = "mixer.conv1d",        \
    [ROLE_A_LOG] = "mixer.A_log", [ROLE_DT_BIAS] = "mixer.dt_bias", [ROLE_SSM_D] = "mixer.D",      \
    [ROLE_SSM_NORM] = "mixer.norm", [ROLE_SSM_OUT] = "mixer.out_proj"

#define BLOCK_KEYS                                                                                 \
    {"mamba_n_groups", "n_groups"}, {"mamba_d_conv", "conv_kernel"},                               \
        {"mamba_conv_bias", "use_conv_bias"},                                                      \
    {                                                                                              \
        0                                                                                          \
    }

static const struct arch_alias nemotron_h_keys[] = {
    {"layer_types", "layers_block_type"}, {"mamba_n_heads", "mamba_num_heads"},
    {"mamba_d_head", "mamba_head_dim"},   {"mamba_d_state", "ssm_state_size"},
    {"time_step_min", "mamba_dt_min"},    BLOCK_KEYS};

static int read_nemotron_h(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const char *act = "silu";
    int rc;
    QT_TRY(qt_json_get_string(&act, src->json, "mamba_hidden_act", src->path, err));
    if (strcmp(act, "silu") != 0)
        QT_TRY(config_unsupported(src, "mamba_hidden_act", act, err));
    if (cfg->info.experts && config_given(src->json, "moe_latent_size"))
        QT_TRY(config_unsupported(src, "moe_latent_size", "a number", err));
    if (cfg->info.experts && cfg->mlp_bias) /* experts have none, the shared expert has */
        QT_TRY(config_unsupported(src, "mlp_bias", "true", err));
    cfg->ssm.act = QT_ACT_SILU;
done:
    return rc;
}

const struct arch arch_nemotron_h = {
    .family = "nemotron_h",
    .aliases = nemotron_h_keys,
    .kv_heads = 8,
    .head_dim = 128,
    BLOCK_LIKE,
    .parts =
        {BLOCK_PARTS, [ROLE_Q] = "mixer.q_proj", [ROLE_K] = "mixer.k_proj",
         [ROLE_V] = "mixer.v_proj", [ROLE_O] = "mixer.o_proj", [ROLE_MLP_IN] = "norm",
         [ROLE_ROUTER] = "mixer.gate", [ROLE_SELECT_BIAS] = "mixer.gate.e_score_correction_bias",
         [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
    .ssm_step_min = true,
    .intermediate_key = "moe_intermediate_size",
    .experts = "mixer.experts.",
    .shared = "mixer.shared_experts.",
    .shared_key = "moe_shared_expert_intermediate_size",
    .dense = "mixer.",
    .sigmoid_router = true,
    .grouped_router = true,
    .normalize_routing = {"norm_topk_prob", true},
    .act_key = "mlp_hidden_act",
    .act = "relu2",
    .mlp_bias = {"mlp_bias", false},
    .read = read_nemotron_h,
};

static const struct arch_alias mamba2_keys[] = {{"mamba_n_heads", "num_heads"},
                                                {"mamba_d_head", "head_dim"},
                                                {"mamba_d_state", "state_size"},
                                                BLOCK_KEYS};

const struct arch arch_mamba2 = {
    .family = "mamba2",
    .aliases = mamba2_keys,
    .heads = 1,
    .max_positions = CONFIG_POSITIONS, /* there is no limit */
    BLOCK_LIKE,
    .parts = {BLOCK_PARTS},
    .act_key = "hidden_act",
    .act = "silu",
};
