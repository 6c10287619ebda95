/* MPT. */
#include "model/config/families/families.h"

static const struct arch_alias mpt_keys[] = {{"hidden_size", "d_model"},
                                             {"num_hidden_layers", "n_layers"},
                                             {"num_attention_heads", "n_heads"},
                                             {"max_position_embeddings", "max_seq_len"},
                                             {0}};

/* Options of attention are in an object of their own. clip_qkv 0 means none. */
static int adapt_mpt(json_t *out, const struct source *src, struct qt_err *err)
{
    json_t *inner = json_object_get(out, "attn_config");
    const json_t *clip = json_object_get(inner, "clip_qkv");
    if (config_no_object(out, "attn_config"))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'attn_config' is not an object");
    if (json_is_number(clip) && json_number_value(clip) == 0)
        return QT_OK;
    return config_given(inner, "clip_qkv")
               ? config_put(out, "clip_qkv", json_incref(json_object_get(inner, "clip_qkv")), err)
               : QT_OK;
}

/* Refuses any number but `only`. */
static int expect_number(const struct source *src, const char *key, double only, struct qt_err *err)
{
    double value = only;
    char text[64];
    int rc = qt_json_get_real(&value, src->json, key, src->path, err);
    if (rc < 0 || value == only)
        return rc;
    snprintf(text, sizeof text, "a number other than %g", only);
    return config_unsupported(src, key, text, err);
}

/* transformers ignores these options, the authors' code does not. */
static int read_mpt(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const struct source attention = {json_object_get(src->json, "attn_config"), src->root,
                                     src->path};
    const char *norm = "low_precision_layernorm";
    double scale = (double)cfg->attn_scale;
    int rc;
    QT_TRY(config_refuse_flag(&attention, "alibi", false, err));
    QT_TRY(config_refuse_flag(&attention, "qk_ln", true, err));
    QT_TRY(config_refuse_flag(&attention, "prefix_lm", true, err));
    QT_TRY(config_refuse_flag(src, "no_bias", false, err));
    QT_TRY(expect_number(&attention, "alibi_bias_max", 8, err));
    QT_TRY(expect_number(src, "expansion_ratio", 4, err));
    if (config_given(src->json, "logit_scale"))
        QT_TRY(config_unsupported(src, "logit_scale", "a value", err));
    QT_TRY(qt_json_get_string(&norm, src->json, "norm_type", src->path, err));
    if (strcmp(norm, "low_precision_layernorm") != 0 && strcmp(norm, "layernorm") != 0)
        QT_TRY(config_unsupported(src, "norm_type", norm, err));
    QT_TRY(config_read_positive(&scale, &attention, "softmax_scale", err));
    cfg->attn_scale = (float)scale;
done:
    return rc;
}

const struct arch arch_mpt = {
    .family = "mpt",
    .max_positions = 2048,
    .aliases = mpt_keys,
    .layers = "blocks.",
    .embed = "wte",
    .final_norm = "norm_f",
    .parts = {[ROLE_ATTN_IN] = "norm_1",
              [ROLE_QKV] = "attn.Wqkv",
              [ROLE_O] = "attn.out_proj",
              [ROLE_MLP_IN] = "norm_2",
              [ROLE_UP] = "ffn.up_proj",
              [ROLE_DOWN] = "ffn.down_proj"},
    .grows = true,
    .clips = true,
    .eps_key = "layer_norm_epsilon",
    .eps = 1e-5,
    .act = "gelu",
    .norm = QT_NORM_LAYER,
    .norms_unbiased = true,
    .alibi = {NULL, true},
    .tied = {"tie_word_embeddings", true},
    .adapt = adapt_mpt,
    .read = read_mpt,
};
