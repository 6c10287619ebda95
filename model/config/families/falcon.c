/* Falcon. */
#include "model/config/families/families.h"

static const struct arch_alias falcon_keys[] = {
    {"hidden_size", "n_embed"}, {"intermediate_size", "ffn_hidden_size"}, {0}};

/* The new decoder is always parallel, and has two norms unless num_ln_in_parallel_attn is 1. */
static int read_falcon(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char norms_key[] = "num_ln_in_parallel_attn";
    bool renewed = false;
    size_t norms;
    int rc;
    QT_TRY(qt_json_get_bool(&renewed, src->json, "new_decoder_architecture", src->path, err));
    norms = renewed ? 2 : 1;
    QT_TRY(config_read_size(&norms, src, norms_key, 2, err));
    if (renewed && !cfg->parallel)
        QT_TRY(config_unsupported(src, "parallel_attn", "false in the new decoder", err));
    if (!renewed && norms == 2)
        QT_TRY(config_unsupported(src, norms_key, "2 in the old decoder", err));
    cfg->parallel_norms = norms == 2;
done:
    return rc;
}

const struct arch arch_falcon = {
    .family = "falcon",
    .max_positions = 2048,
    .aliases = falcon_keys,
    .layers = "h.",
    .embed = "word_embeddings",
    .final_norm = "ln_f",
    .rope = true,
    .parts = {FUSED_UNGATED_PARTS},
    .grouped_qkv = true,
    .parallel_attn_in = "ln_attn",
    .parallel_mlp_in = "ln_mlp",
    .grows = true,
    .eps_key = "layer_norm_epsilon",
    .eps = 1e-5,
    .act_key = "activation",
    .act = "gelu",
    .norm = QT_NORM_LAYER,
    .parallel = {"parallel_attn", true},
    .alibi = {"alibi", false},
    .alibi_scaled = true,
    .qkv_bias = {"bias", false},
    .o_bias = {"bias", false},
    .mlp_bias = {"bias", false},
    .tied = {"tie_word_embeddings", true},
    .adapt = config_adapt_multi_query,
    .read = read_falcon,
};
