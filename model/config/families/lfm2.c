/* LFM 2: short convolutions. */
#include "model/config/families/families.h"

#define LFM2_LIKE                                                                                  \
    .layers = "layers.", .embed = "embed_tokens", .final_norm = "embedding_norm", .rope = true,    \
    .kv_heads = 8, .short_conv = true, .eps_key = "norm_eps", .eps = 1e-5, .theta = 1e6,           \
    .act = "silu", .norm = QT_NORM_RMS, .tied = {"tie_word_embeddings", true}

#define LFM2_PARTS                                                                                 \
    [ROLE_ATTN_IN] = "operator_norm", [ROLE_Q] = "self_attn.q_proj",                               \
    [ROLE_K] = "self_attn.k_proj", [ROLE_V] = "self_attn.v_proj", [ROLE_O] = "self_attn.out_proj", \
    [ROLE_Q_NORM] = "self_attn.q_layernorm", [ROLE_K_NORM] = "self_attn.k_layernorm",              \
    [ROLE_SHORT_IN] = "conv.in_proj", [ROLE_SHORT_CONV] = "conv.conv",                             \
    [ROLE_SHORT_OUT] = "conv.out_proj", [ROLE_MLP_IN] = "ffn_norm"

static const struct arch_alias lfm2_keys[] = {{"tie_word_embeddings", "tie_embedding"},
                                              {"intermediate_size", "block_ff_dim"},
                                              {"first_k_dense_replace", "num_dense_layers"},
                                              {0}};

static int read_lfm2_moe(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char *const biases[] = {"conv_bias", "use_expert_bias"};
    int rc = QT_OK;
    for (size_t i = 0; i < (cfg->arch->experts ? 2 : 1); i++) {
        bool set = i == 1;
        QT_TRY(qt_json_get_bool(&set, src->json, biases[i], src->path, err));
        if (set != (i == 1))
            QT_TRY(config_unsupported(src, biases[i], set ? "true" : "false", err));
    }
done:
    return rc;
}

/* The width of the MLP is two thirds of the given one, times a factor, rounded up to a multiple. */
static int read_lfm2(struct config *cfg, const struct source *src, struct qt_err *err)
{
    bool adjust = true;
    double factor = 1;
    size_t multiple = 256;
    int rc;
    QT_TRY(read_lfm2_moe(cfg, src, err));
    QT_TRY(qt_json_get_bool(&adjust, src->json, "block_auto_adjust_ff_dim", src->path, err));
    QT_TRY(config_read_positive(&factor, src, "block_ffn_dim_multiplier", err));
    QT_TRY(config_read_size(&multiple, src, "block_multiple_of", CONFIG_WIDTH, err));
    if (!adjust)
        goto done;
    cfg->dense_width = 2 * cfg->dense_width / 3;
    if (!config_null(src->json, "block_ffn_dim_multiplier")) {
        if (factor > 1e6)
            QT_TRY(config_unsupported(src, "block_ffn_dim_multiplier", "a value above 1e6", err));
        cfg->dense_width = qt_round_up((size_t)(factor * (double)cfg->dense_width), multiple);
    }
    if (cfg->dense_width == 0 || cfg->dense_width > CONFIG_WIDTH)
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "the width of the MLP is %zu",
                       cfg->dense_width);
done:
    return rc;
}

const struct arch arch_lfm2 = {
    .family = "lfm2",
    .aliases = lfm2_keys,
    LFM2_LIKE,
    .parts = {LFM2_PARTS, [ROLE_GATE] = "feed_forward.w1", [ROLE_UP] = "feed_forward.w3",
              [ROLE_DOWN] = "feed_forward.w2"},
    .read = read_lfm2,
};

const struct arch arch_lfm2_moe = {
    .family = "lfm2_moe",
    .aliases = lfm2_keys,
    LFM2_LIKE,
    .parts = {LFM2_PARTS, [ROLE_ROUTER] = "feed_forward.gate",
              [ROLE_SELECT_BIAS] = "feed_forward.expert_bias", [ROLE_GATE] = "w1", [ROLE_UP] = "w3",
              [ROLE_DOWN] = "w2"},
    .intermediate_key = "moe_intermediate_size",
    .experts = "feed_forward.experts.",
    .dense = "feed_forward.",
    .sigmoid_router = true,
    .grouped_router = true,
    .first_dense = 2,
    .routing_eps = 1e-6,
    .normalize_routing = {"norm_topk_prob", true},
    .read = read_lfm2_moe,
};
