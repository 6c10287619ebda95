/* MiniMax. */
#include "model/config/families/families.h"

static int read_minimax_m2(struct config *cfg, const struct source *src, struct qt_err *err)
{
    size_t shared = 0;
    int rc;
    (void)cfg;
    QT_TRY(config_expect_string(src, "scoring_func", "sigmoid", err));
    QT_TRY(config_expect_string(src, "qk_norm_type", "per_layer", err));
    QT_TRY(qt_json_get_size(&shared, src->json, "shared_intermediate_size", src->path, err));
    if (shared)
        QT_TRY(config_unsupported(src, "shared_intermediate_size", "a number above 0", err));
done:
    return rc;
}

const struct arch arch_minimax_m2 = {
    .family = "minimax_m2",
    .kv_heads = 8,
    .head_dim = 128,
    LLAMA_LIKE,
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm",
              [ROLE_ROUTER] = "block_sparse_moe.gate",
              [ROLE_SELECT_BIAS] = "block_sparse_moe.e_score_correction_bias", [ROLE_GATE] = "w1",
              [ROLE_UP] = "w3", [ROLE_DOWN] = "w2"},
    .norms_of_all_heads = true,
    .theta = 5e6,
    .experts = "block_sparse_moe.experts.",
    .sigmoid_router = true,
    .normalize_routing = {NULL, true},
    .partial_rope = true,
    .rotary_read = true,
    .read = read_minimax_m2,
};

/* Replaces a list of 0 and 1 by the list `key` of the names for 0 and 1, unless there is one. */
static int name_flags(json_t *out, const char *key, const json_t *flags, const char *zero,
                      const char *one, struct qt_err *err)
{
    json_t *names = NULL;
    int rc = QT_OK;
    if (!json_is_array(flags) || config_given(out, key))
        return QT_OK;
    names = json_array();
    for (size_t i = 0; names && i < json_array_size(flags); i++) {
        const bool set = json_integer_value(json_array_get(flags, i)) != 0;
        if (json_array_append_new(names, json_string(set ? one : zero)) < 0) {
            json_decref(names);
            names = NULL;
        }
    }
    if (!names || json_object_set_new(out, key, names) < 0)
        rc = qt_no_memory(err, NULL);
    return rc;
}

static const char sparse_key[] = "sparse_attention_config";

static int adapt_minimax_m3(json_t *out, const struct source *src, struct qt_err *err)
{
    const json_t *sparse = json_object_get(out, sparse_key);
    int rc;
    if (config_no_object(out, sparse_key))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' is not an object", sparse_key);
    QT_TRY(name_flags(out, "mlp_layer_types", json_object_get(out, "moe_layer_freq"), "dense",
                      "sparse", err));
    QT_TRY(name_flags(out, "layer_types", json_object_get(sparse, "sparse_attention_freq"),
                      "full_attention", "minimax_m3_sparse", err));
done:
    return rc;
}

/* Sparse attention to index_topk_blocks blocks of index_block_size keys: shorter sequences are
 * dense. */
static int read_minimax_m3(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const json_t *types = json_object_get(src->json, "layer_types");
    const json_t *nested = json_object_get(src->json, sparse_key);
    const struct source inner = {json_is_object(nested) ? nested : src->json, src->root, src->path};
    size_t block = 128, blocks = 16, rotary = cfg->rope.dim;
    bool sparse = false;
    int rc;
    QT_TRY(config_read_gpt_oss(cfg, src, err));
    QT_TRY(config_read_size(&rotary, src, "rotary_dim", CONFIG_WIDTH, err));
    if (rotary != cfg->rope.dim) /* transformers does not read it */
        QT_TRY(config_unsupported(src, "rotary_dim", "not what partial_rotary_factor gives", err));
    QT_TRY(config_read_size(&block, src, "index_block_size", CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&blocks, src, "index_topk_blocks", CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&block, &inner, "sparse_block_size", CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&blocks, &inner, "sparse_topk_blocks", CONFIG_WIDTH, err));
    for (size_t i = 0; i < cfg->info.layers; i++) {
        const char *type = json_string_value(json_array_get(types, i));
        sparse = sparse || (type && strcmp(type, cfg->arch->sparse_type) == 0);
    }
    if (sparse)
        cfg->info.max_positions = qt_min_size(cfg->info.max_positions, block * blocks);
done:
    return rc;
}

const struct arch arch_minimax_m3_vl_text = {
    .family = "minimax_m3_vl_text",
    DECODER_NAMES,
    .parts = {QWEN3_ATTENTION, [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_ROUTER] = "block_sparse_moe.gate",
              [ROLE_SELECT_BIAS] = "block_sparse_moe.e_score_correction_bias",
              [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
    .routed_parts = {[ROLE_GATE - ROLE_GATE_UP] = "w1",
                     [ROLE_UP - ROLE_GATE_UP] = "w3",
                     [ROLE_DOWN - ROLE_GATE_UP] = "w2"},
    .kv_heads = 4,
    .head_dim = 128,
    .experts = "block_sparse_moe.experts.",
    .shared = "block_sparse_moe.shared_experts.",
    .shared_key = "shared_intermediate_size",
    .dense = "mlp.",
    .dense_key = "dense_intermediate_size",
    .mlp_types = true,
    .sigmoid_router = true,
    .grouped_router = true,
    .routing_scale = 2,
    .normalize_routing = {NULL, true},
    .eps_key = "rms_norm_eps",
    .act = "silu",
    .norm = QT_NORM_RMS,
    .norms_plus_1 = true,
    .theta = 5e6,
    .partial_rope = true,
    .tied = {"tie_word_embeddings", false},
    .sparse_type = "minimax_m3_sparse",
    .adapt = adapt_minimax_m3,
    .read = read_minimax_m3,
};
