/* Command R. */
#include "model/config/families/families.h"

static int read_cohere(struct config *cfg, const struct source *src, struct qt_err *err)
{
    double scale = 0.0625;
    bool normed = false;
    int rc;
    QT_TRY(config_read_positive(&scale, src, "logit_scale", err));
    QT_TRY(qt_json_get_bool(&normed, src->json, "use_qk_norm", src->path, err));
    if (normed) /* a weight for each channel of each head */
        QT_TRY(config_unsupported(src, "use_qk_norm", "true", err));
    cfg->logit_scale = (float)scale;
    for (size_t i = 0; cfg->arch->window && i < cfg->info.layers; i++)
        cfg->no_rope[i] = !cfg->windows[i];
done:
    return rc;
}

#define COHERE_LIKE                                                                                \
    DECODER_NAMES, .parts = {ATTENTION_PARTS, MLP_PARTS}, .eps_key = "layer_norm_eps",             \
                   .eps = 1e-5, .act_key = "hidden_act", .act = "silu", .norm = QT_NORM_LAYER,     \
                   .norms_unbiased = true, .parallel = {NULL, true}, .interleaved = true,          \
                   .tied = {"tie_word_embeddings", true}, .qkv_bias = {"attention_bias", false},   \
                   .o_bias = {"attention_bias", false}, .read = read_cohere

const struct arch arch_cohere = {
    .family = "cohere",
    COHERE_LIKE,
};

const struct arch arch_cohere2 = {
    .family = "cohere2",
    COHERE_LIKE,
    .window = WINDOW_PATTERN,
    .window_period_key = "sliding_window_pattern",
    .window_period = 4,
};
