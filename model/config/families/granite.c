/* Granite. */
#include "model/config/families/families.h"

static int read_multipliers(struct config *cfg, const struct source *src, struct qt_err *err)
{
    double embed = 1, attention = 1, residual = 1, logits = 1;
    int rc;
    QT_TRY(config_read_positive(&embed, src, "embedding_multiplier", err));
    QT_TRY(config_read_positive(&attention, src, "attention_multiplier", err));
    QT_TRY(config_read_positive(&residual, src, "residual_multiplier", err));
    QT_TRY(config_read_positive(&logits, src, "logits_scaling", err));
    cfg->embed_scale = (float)embed;
    cfg->attn_scale = (float)attention;
    cfg->residual_scale = (float)residual;
    cfg->logit_scale = (float)(1 / logits);
done:
    return rc;
}

/* layer_rope_theta lists rope_theta or 0 (no rotary embedding) for each layer. */
static int read_granite_swa(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "layer_rope_theta";
    const json_t *list = json_object_get(src->json, key);
    const json_t *rope = json_object_get(src->json, "rope_parameters");
    double theta = 1e4;
    int rc;
    QT_TRY(read_multipliers(cfg, src, err));
    QT_TRY(config_read_positive(&theta, src, "rope_theta", err));
    if (json_is_object(rope))
        QT_TRY(qt_json_get_real(&theta, rope, "rope_theta", src->path, err));
    if (!config_given(src->json, key))
        goto done;
    if (!json_is_array(list) || json_array_size(list) != cfg->info.layers)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not a list of %zu numbers", key,
                       cfg->info.layers);
    for (size_t i = 0; i < cfg->info.layers; i++) {
        const json_t *entry = json_array_get(list, i);
        const double given = json_is_number(entry) ? json_number_value(entry) : -1;
        cfg->no_rope[i] = given == 0;
        if (given != 0 && given != theta)
            QT_TRY(config_unsupported(src, key, "a value that is neither rope_theta nor 0", err));
    }
done:
    return rc;
}

const struct arch arch_granite_swa = {
    .family = "granite_swa",
    LLAMA_COMMON,
    .kv_heads = 4,
    .parts = {LLAMA_PARTS, [ROLE_SINKS] = "self_attn.sinks"},
    .tied = {"tie_word_embeddings", true},
    .eps = 1e-5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
    .window = WINDOW_PATTERN_FIRST,
    .window_period = 4,
    .window_size = 128,
    .read = read_granite_swa,
};

const struct arch arch_granitemoe = {
    .family = "granitemoe",
    LLAMA_LIKE,
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_ROUTER] = "block_sparse_moe.router.layer", [ROLE_GATE] = "gate_proj",
              [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
    .experts = "block_sparse_moe.experts.",
    .normalize_routing = {NULL, true},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .read = read_multipliers,
};

const struct arch arch_granitemoeshared = {
    .family = "granitemoeshared",
    LLAMA_LIKE,
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_ROUTER] = "block_sparse_moe.router.layer", [ROLE_GATE] = "gate_proj",
              [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
    .experts = "block_sparse_moe.experts.",
    .shared = "shared_mlp.",
    .shared_gate_up = "input_linear",
    .shared_down = "output_linear",
    .shared_key = "shared_intermediate_size",
    .shared_optional = true,
    .normalize_routing = {NULL, true},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .read = read_multipliers,
};

const struct arch arch_granitemoe_swa = {
    .family = "granitemoe_swa",
    LLAMA_COMMON,
    .parts = {ATTENTION_PARTS, [ROLE_SINKS] = "self_attn.sinks",
              [ROLE_MLP_IN] = "post_attention_layernorm", [ROLE_ROUTER] = "block_sparse_moe.router",
              [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
    .experts = "block_sparse_moe.experts.",
    .shared = "shared_mlp.",
    .shared_gate_up = "input_linear",
    .shared_down = "output_linear",
    .shared_key = "shared_intermediate_size",
    .shared_optional = true,
    .normalize_routing = {NULL, true},
    .tied = {"tie_word_embeddings", false},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .window = WINDOW_PATTERN_FIRST,
    .window_period = 4,
    .window_size = 128,
    .read = read_granite_swa,
};

const struct arch arch_granite = {
    .family = "granite",
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
    .read = read_multipliers,
};

static const struct arch_alias granite4_keys[] = {{"layer_types", "layers_block_type"}, {0}};

static int read_granite4(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const char *positions = "nope";
    int rc;
    QT_TRY(read_multipliers(cfg, src, err));
    QT_TRY(qt_json_get_string(&positions, src->json, "position_embedding_type", src->path, err));
    for (size_t i = 0; i < cfg->info.layers && strcmp(positions, "rope") != 0; i++)
        cfg->no_rope[i] = true;
done:
    return rc;
}

const struct arch arch_granitemoehybrid = {
    .family = "granitemoehybrid",
    LLAMA_LIKE,
    .aliases = granite4_keys,
    .parts = {ATTENTION_PARTS, MAMBA_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_ROUTER] = "block_sparse_moe.router.layer", [ROLE_GATE] = "gate_proj",
              [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
    .ssm = SSM_TYPES,
    .ssm_bias = {"mamba_proj_bias", false},
    .experts = "block_sparse_moe.experts.",
    .experts_optional = true,
    .shared = "shared_mlp.",
    .shared_gate_up = "input_linear",
    .shared_down = "output_linear",
    .shared_key = "shared_intermediate_size",
    .dense = "shared_mlp.",
    .dense_key = "shared_intermediate_size",
    .dense_is_shared = true,
    .normalize_routing = {NULL, true},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .read = read_granite4,
};
