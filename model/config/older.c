/* Options of families whose config.json is older than the usual keys. */
#include "model/config/config.h"

#include <stdio.h>

/* ---- usual keys ----------------------------------------------------------------------------- */

/* out[key] = value, whose reference is taken over. */
static int put(json_t *out, const char *key, json_t *value, struct qt_err *err)
{
    return value && json_object_set_new(out, key, value) == 0
               ? QT_OK
               : qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
}

/* GPT-BigCode and the old decoder of Falcon have one KV head with multi_query, and else one for each
 * query head. */
int config_adapt_multi_query(json_t *out, const struct source *src, struct qt_err *err)
{
    bool renewed = false, one = true;
    int rc;
    QT_TRY(qt_json_get_bool(&renewed, out, "new_decoder_architecture", src->path, err));
    QT_TRY(qt_json_get_bool(&one, out, "multi_query", src->path, err));
    json_object_del(out, "num_key_value_heads");
    if (renewed && config_given(out, "num_kv_heads"))
        QT_TRY(put(out, "num_key_value_heads", json_incref(json_object_get(out, "num_kv_heads")),
                   err));
    if (!renewed && one)
        QT_TRY(put(out, "num_key_value_heads", json_integer(1), err));
done:
    return rc;
}

/* Options of attention are in an object of their own. clip_qkv 0 means none. */
int config_adapt_mpt(json_t *out, const struct source *src, struct qt_err *err)
{
    json_t *inner = json_object_get(out, "attn_config");
    const json_t *clip = json_object_get(inner, "clip_qkv");
    if (config_no_object(out, "attn_config"))
        return qt_fail(err, QT_E_INPUT, src->path, NULL, "'attn_config' is not an object");
    if (json_is_number(clip) && json_number_value(clip) == 0)
        return QT_OK;
    return config_given(inner, "clip_qkv")
               ? put(out, "clip_qkv", json_incref(json_object_get(inner, "clip_qkv")), err)
               : QT_OK;
}

/* Models with the key max_position_embeddings (7B) have a rotary embedding, others (13B) ALiBi. */
int config_adapt_baichuan(json_t *out, const struct source *src, struct qt_err *err)
{
    return put(out, "alibi", json_boolean(!config_given(src->json, "max_position_embeddings")),
               err);
}

/* intermediate_size is the width of gate and up together. */
int config_adapt_qwen(json_t *out, const struct source *src, struct qt_err *err)
{
    bool unbiased = true;
    size_t both;
    int rc;
    QT_TRY(qt_json_need_size(&both, out, "intermediate_size", src->path, err));
    QT_TRY(put(out, "intermediate_size", json_integer((json_int_t)(both / 2)), err));
    QT_TRY(qt_json_get_bool(&unbiased, out, "no_bias", src->path, err));
    QT_TRY(put(out, "bias", json_boolean(!unbiased), err));
done:
    return rc;
}

/* There are as many queries per key as a token has experts. */
int config_adapt_jetmoe(json_t *out, const struct source *src, struct qt_err *err)
{
    size_t kv_heads = 16, chosen = 2;
    int rc;
    QT_TRY(config_read_size(&kv_heads, src, "num_key_value_heads", CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&chosen, src, "num_experts_per_tok", CONFIG_WIDTH, err));
    QT_TRY(put(out, "num_attention_heads", json_integer((json_int_t)(kv_heads * chosen)), err));
done:
    return rc;
}

int config_adapt_chatglm(json_t *out, const struct source *src, struct qt_err *err)
{
    bool biased = false, qkv_biased = false, groups = false;
    size_t kv_heads = 1;
    double ratio = 1;
    int rc;
    QT_TRY(qt_json_get_bool(&biased, out, "add_bias_linear", src->path, err));
    QT_TRY(qt_json_get_bool(&qkv_biased, out, "add_qkv_bias", src->path, err));
    QT_TRY(put(out, "attention_bias", json_boolean(biased || qkv_biased), err));
    QT_TRY(qt_json_get_bool(&groups, out, "multi_query_attention", src->path, err));
    QT_TRY(qt_json_get_size(&kv_heads, out, "multi_query_group_num", src->path, err));
    if (groups)
        QT_TRY(put(out, "num_key_value_heads", json_integer((json_int_t)kv_heads), err));
    if (config_given(out, "padded_vocab_size"))
        QT_TRY(put(out, "vocab_size", json_incref(json_object_get(out, "padded_vocab_size")), err));
    QT_TRY(config_read_positive(&ratio, src, "rope_ratio", err));
    QT_TRY(put(out, "rope_theta", json_real(1e4 * ratio), err));
done:
    return rc;
}

/* ---- other options -------------------------------------------------------------------------- */

/* Refuses a flag that is set, or one that is not. */
static int refuse_flag(const struct source *src, const char *key, bool refused, struct qt_err *err)
{
    bool value = !refused;
    int rc = qt_json_get_bool(&value, src->json, key, src->path, err);
    return rc == QT_OK && value == refused
               ? config_unsupported(src, key, refused ? "true" : "false", err)
               : rc;
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

int config_read_codegen(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const size_t shards = cfg->arch->qkv_shards, width = cfg->info.heads * cfg->info.head_dim;
    return width % shards ? qt_fail(err, QT_E_INPUT, src->path, NULL,
                                    "'n_embd' %zu is not a multiple of the %zu shards of attention",
                                    width, shards)
                          : config_read_gptj(cfg, src, err);
}

/* The new decoder is always parallel, and has two norms unless num_ln_in_parallel_attn is 1. */
int config_read_falcon(struct config *cfg, const struct source *src, struct qt_err *err)
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

/* Baichuan 2 divides each row of the head by its norm. Its options are those of Baichuan 1, but for
 * the vocabulary and z_loss_weight. */
int config_read_baichuan(struct config *cfg, const struct source *src, struct qt_err *err)
{
    cfg->unit_head = cfg->info.vocab == 125696 || config_given(src->json, "z_loss_weight");
    return cfg->unit_head && cfg->tied
               ? config_unsupported(src, "tie_word_embeddings", "true in Baichuan 2", err)
               : QT_OK;
}

/* use_dynamic_ntk and use_logn_attn change nothing in sequences of at most seq_length tokens. */
int config_read_qwen(struct config *cfg, const struct source *src, struct qt_err *err)
{
    (void)cfg;
    return refuse_flag(src, "scale_attn_weights", false, err);
}

/* ChatGLM2-32K divides positions by rope_ratio (4), the later models multiply rope_theta by it (50
 * and more): values in between are ambiguous. */
int config_read_chatglm(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char *const others[] = {"position_encoding_2d", "inner_hidden_size",
                                         "pre_seq_len"};
    double ratio = 1;
    int rc = QT_OK;
    (void)cfg;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (config_given(src->json, others[i])) /* of ChatGLM 1, and of tuned prefixes */
            QT_TRY(config_unsupported(src, others[i], "a value", err));
    QT_TRY(refuse_flag(src, "rmsnorm", false, err));
    QT_TRY(refuse_flag(src, "post_layer_norm", false, err));
    QT_TRY(refuse_flag(src, "apply_residual_connection_post_layernorm", true, err));
    QT_TRY(config_read_positive(&ratio, src, "rope_ratio", err));
    if (ratio != 1 && ratio < 10)
        QT_TRY(config_unsupported(src, "rope_ratio", "a number below 10 other than 1", err));
done:
    return rc;
}

/* attention_types lists pairs of names of layer types and the number of repetitions. */
int config_read_gpt_neo(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "attention_types";
    const json_t *types = json_object_get(src->json, key);
    size_t window = 256, layer = 0;
    int rc;
    cfg->attn_scale = 1;
    QT_TRY(config_read_size(&window, src, "window_size", CONFIG_POSITIONS, err));
    for (; !config_given(src->json, key) && layer < cfg->info.layers; layer++)
        cfg->windows[layer] = layer % 2 ? window : 0;
    for (size_t i = 0; i < json_array_size(types); i++) {
        const json_t *pair = json_array_get(types, i), *names = json_array_get(pair, 0);
        const json_int_t times = json_integer_value(json_array_get(pair, 1));
        for (json_int_t t = 0; t < times && json_array_size(names); t++)
            for (size_t n = 0; n < json_array_size(names); n++, layer++) {
                const char *name = json_string_value(json_array_get(names, n));
                if (!name || (strcmp(name, "global") != 0 && strcmp(name, "local") != 0))
                    QT_TRY(config_unsupported(src, key, name ? name : "no name of a type", err));
                if (layer < cfg->info.layers)
                    cfg->windows[layer] = strcmp(name, "local") == 0 ? window : 0;
                else
                    t = times;
            }
    }
    if (layer != cfg->info.layers)
        rc = qt_fail(err, QT_E_INPUT, src->path, NULL, "'%s' does not list %zu layers", key,
                     cfg->info.layers);
done:
    return rc;
}

int config_read_bloom(struct config *cfg, const struct source *src, struct qt_err *err)
{
    int rc;
    (void)cfg;
    QT_TRY(refuse_flag(src, "apply_residual_connection_post_layernorm", true, err));
    QT_TRY(refuse_flag(src, "slow_but_exact", true, err));
done:
    return rc;
}

/* transformers ignores these options, the authors' code does not. */
int config_read_mpt(struct config *cfg, const struct source *src, struct qt_err *err)
{
    const struct source attention = {json_object_get(src->json, "attn_config"), src->root,
                                     src->path};
    const char *norm = "low_precision_layernorm";
    double scale = (double)cfg->attn_scale;
    int rc;
    QT_TRY(refuse_flag(&attention, "alibi", false, err));
    QT_TRY(refuse_flag(&attention, "qk_ln", true, err));
    QT_TRY(refuse_flag(&attention, "prefix_lm", true, err));
    QT_TRY(refuse_flag(src, "no_bias", false, err));
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
