/* Models with latent attention. */
#include "model/config/families/families.h"

#define LATENT_PARTS                                                                               \
    [ROLE_ATTN_IN] = "input_layernorm", [ROLE_Q] = "self_attn.q_proj",                             \
    [ROLE_Q_A] = "self_attn.q_a_proj", [ROLE_KV_A] = "self_attn.kv_a_proj_with_mqa",               \
    [ROLE_Q_A_NORM] = "self_attn.q_a_layernorm", [ROLE_Q_B] = "self_attn.q_b_proj",                \
    [ROLE_KV_A_NORM] = "self_attn.kv_a_layernorm", [ROLE_KV_B] = "self_attn.kv_b_proj",            \
    [ROLE_O] = "self_attn.o_proj", [ROLE_MLP_IN] = "post_attention_layernorm"

#define LATENT_LIKE                                                                                \
    DECODER_NAMES, .eps_key = "rms_norm_eps", .act_key = "hidden_act", .act = "silu",              \
                   .latent = true, .qkv_bias = {"attention_bias", false},                          \
                   .o_bias = {"attention_bias", false}

#define LATENT_MOE_LIKE                                                                            \
    LATENT_LIKE, .intermediate_key = "moe_intermediate_size", .experts = "mlp.experts.",           \
                 .shared = "mlp.shared_experts.", .dense = "mlp.", .grouped_router = true,         \
                 .shared_count_key = "n_shared_experts", .interleaved = true,                      \
                 .tied = {"tie_word_embeddings", false}

/* moe_layer_freq, which transformers ignores. */
static int expect_all_layers(const struct source *src, struct qt_err *err)
{
    size_t step = 1;
    int rc = qt_json_get_size(&step, src->json, "moe_layer_freq", src->path, err);
    return rc < 0 || step == 1 ? rc : config_unsupported(src, "moe_layer_freq", "not 1", err);
}

static int read_deepseek_v2(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const char *method = "greedy";
    bool normalize = false;
    int rc;
    QT_TRY(expect_all_layers(src, err));
    QT_TRY(config_expect_string(src, "scoring_func", "softmax", err));
    QT_TRY(qt_json_get_bool(&normalize, src->json, "norm_topk_prob", src->path, err));
    if (normalize) /* transformers ignores it, the authors' code does not */
        QT_TRY(config_unsupported(src, "norm_topk_prob", "true", err));
    QT_TRY(qt_json_get_string(&method, src->json, "topk_method", src->path, err));
    if (strcmp(method, "greedy") == 0)
        cfg->groups = cfg->top_groups = 1;
    else if (strcmp(method, "group_limited_greedy") != 0)
        rc = config_unsupported(src, "topk_method", method, err);
done:
    return rc;
}

const struct arch arch_deepseek_v2 = {
    .family = "deepseek_v2",
    LATENT_MOE_LIKE,
    .parts = {LATENT_PARTS, EXPERT_PARTS},
    .value_dim = 128,
    .shared_count = 2,
    .group_best = true,
    .read = read_deepseek_v2,
};

#define DEEPSEEK_V3_LIKE DEEPSEEK_V32_LIKE, .interleave_read = true

static int read_deepseek_v3(struct config *cfg, const struct source *src, struct qt_err *err)
{
    int rc;
    (void)cfg;
    QT_TRY(expect_all_layers(src, err));
    QT_TRY(config_expect_string(src, "scoring_func", "sigmoid", err));
    QT_TRY(config_expect_string(src, "topk_method", "noaux_tc", err));
done:
    return rc;
}

#define DEEPSEEK_V32_LIKE                                                                          \
    LATENT_MOE_LIKE,                                                                               \
        .parts = {LATENT_PARTS,                                                                    \
                  EXPERT_PARTS, [ROLE_SELECT_BIAS] = "mlp.gate.e_score_correction_bias"},          \
        .sigmoid_router = true, .normalize_routing = {"norm_topk_prob", true}, .shared_count = 1,  \
        .read = read_deepseek_v3

const struct arch arch_deepseek_v3 = {
    .family = "deepseek_v3",
    DEEPSEEK_V3_LIKE,
    .value_dim = 128,
    .first_dense = 3,
    .groups = 8,
    .top_groups = 4,
    .routing_scale = 2.5,
};

/* Sparse attention over index_topk tokens: shorter sequences are dense. */
const struct arch arch_deepseek_v32 = {
    .family = "deepseek_v32",
    DEEPSEEK_V32_LIKE,
    .value_dim = 128,
    .mlp_types = true,
    .first_dense = 3,
    .groups = 8,
    .top_groups = 4,
    .routing_scale = 2.5,
    .positions_key = "index_topk",
    .positions_most = 2048,
};

const struct arch arch_glm_moe_dsa = {
    .family = "glm_moe_dsa",
    DEEPSEEK_V32_LIKE,
    .value_dim = 256,
    .eps = 1e-5,
    .mlp_types = true,
    .first_dense = 3,
    .routing_scale = 2.5,
    .positions_key = "index_topk",
    .positions_most = 2048,
};

const struct arch arch_glm4_moe_lite = {
    .family = "glm4_moe_lite",
    DEEPSEEK_V3_LIKE,
    .value_dim = 256,
    .eps = 1e-5,
    .mlp_types = true,
    .first_dense = 1,
    .routing_scale = 1.8,
};

static const struct arch_alias sarvam_keys[] = {
    {"n_shared_experts", "num_shared_experts"}, {"attention_bias", "use_qkv_bias"}, {0}};

const struct arch arch_sarvam_mla = {
    .family = "sarvam_mla",
    .aliases = sarvam_keys,
    DEEPSEEK_V3_LIKE,
    .value_dim = 128,
    .first_dense = 1,
    .routing_scale = 2.5,
};

const struct arch arch_mistral4 = {
    .family = "mistral4",
    LATENT_MOE_LIKE,
    .parts = {LATENT_PARTS, EXPERT_PARTS},
    .value_dim = 128,
    .shared_count = 1,
    .normalize_routing = {"norm_topk_prob", true},
    .interleave_read = true,
    .partial_rope = true,
    .rope_needed = true,
    .query_steps = true,
};

const struct arch arch_youtu = {
    .family = "youtu",
    LATENT_LIKE,
    .parts = {LATENT_PARTS, MLP_PARTS},
    .value_dim = 128,
    .interleaved = true,
    .interleave_read = true,
    .tied = {"tie_word_embeddings", true},
};

static int read_minicpm3(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const double root = sqrt((double)cfg->info.layers);
    double embed = 12, depth = config_null(src->json, "scale_depth") ? root : 1.4;
    size_t base = config_null(src->json, "dim_model_base") ? cfg->info.hidden : 256;
    int rc;
    QT_TRY(config_read_positive(&embed, src, "scale_emb", err));
    QT_TRY(config_read_positive(&depth, src, "scale_depth", err));
    QT_TRY(config_read_size(&base, src, "dim_model_base", CONFIG_WIDTH, err));
    cfg->embed_scale = (float)embed;
    cfg->residual_scale = (float)(depth / root);
    cfg->logit_scale = (float)((double)base / (double)cfg->info.hidden);
done:
    return rc;
}

const struct arch arch_minicpm3 = {
    .family = "minicpm3",
    LATENT_LIKE,
    .parts = {LATENT_PARTS, MLP_PARTS},
    .eps = 1e-5,
    .tied = {"tie_word_embeddings", true},
    .read = read_minicpm3,
};
