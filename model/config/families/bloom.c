/* BLOOM. */
#include "model/config/families/families.h"

static const struct arch_alias bloom_keys[] = {{"hidden_size", "n_embed"},
                                               {"num_hidden_layers", "n_layer"},
                                               {"num_attention_heads", "n_head"},
                                               {"max_position_embeddings", "seq_length"},
                                               {0}};

static int read_bloom(struct config *cfg, const struct source *src, struct qt_err *err)
{
    int rc;
    (void)cfg;
    QT_TRY(config_refuse_flag(src, "apply_residual_connection_post_layernorm", true, err));
    QT_TRY(config_refuse_flag(src, "slow_but_exact", true, err));
done:
    return rc;
}

const struct arch arch_bloom = {
    .family = "bloom",
    .max_positions = 2048,
    .aliases = bloom_keys,
    .layers = "h.",
    .embed = "word_embeddings",
    .embed_norm = "word_embeddings_layernorm",
    .final_norm = "ln_f",
    .parts = {FUSED_UNGATED_PARTS},
    .grouped_qkv = true,
    .grows = true,
    .eps_key = "layer_norm_epsilon",
    .eps = 1e-5,
    .act = "gelu_new",
    .norm = QT_NORM_LAYER,
    .alibi = {NULL, true},
    .qkv_bias = {NULL, true},
    .o_bias = {NULL, true},
    .mlp_bias = {NULL, true},
    .tied = {"tie_word_embeddings", true},
    .read = read_bloom,
};
