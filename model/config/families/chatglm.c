/* ChatGLM 2 to 4. */
#include "model/config/families/families.h"

static const struct arch_alias chatglm_keys[] = {{"num_hidden_layers", "num_layers"},
                                                 {"intermediate_size", "ffn_hidden_size"},
                                                 {"head_dim", "kv_channels"},
                                                 {"max_position_embeddings", "seq_length"},
                                                 {0}};

static int adapt_chatglm(json_t *out, const struct source *src, struct qt_err *err)
{
    bool biased = false, qkv_biased = false, groups = false;
    size_t kv_heads = 1;
    double ratio = 1;
    int rc;
    QT_TRY(qt_json_get_bool(&biased, out, "add_bias_linear", src->path, err));
    QT_TRY(qt_json_get_bool(&qkv_biased, out, "add_qkv_bias", src->path, err));
    QT_TRY(config_put(out, "attention_bias", json_boolean(biased || qkv_biased), err));
    QT_TRY(qt_json_get_bool(&groups, out, "multi_query_attention", src->path, err));
    QT_TRY(qt_json_get_size(&kv_heads, out, "multi_query_group_num", src->path, err));
    if (groups)
        QT_TRY(config_put(out, "num_key_value_heads", json_integer((json_int_t)kv_heads), err));
    if (config_given(out, "padded_vocab_size"))
        QT_TRY(config_put(out, "vocab_size", json_incref(json_object_get(out, "padded_vocab_size")),
                          err));
    QT_TRY(config_read_positive(&ratio, src, "rope_ratio", err));
    QT_TRY(config_put(out, "rope_theta", json_real(1e4 * ratio), err));
done:
    return rc;
}

/* ChatGLM2-32K divides positions by rope_ratio (4), the later models multiply rope_theta by it (50
 * and more): values in between are ambiguous. */
static int read_chatglm(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char *const others[] = {"position_encoding_2d", "inner_hidden_size",
                                         "pre_seq_len"};
    double ratio = 1;
    int rc = QT_OK;
    (void)cfg;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (config_given(src->json, others[i])) /* of ChatGLM 1, and of tuned prefixes */
            QT_TRY(config_unsupported(src, others[i], "a value", err));
    QT_TRY(config_refuse_flag(src, "rmsnorm", false, err));
    QT_TRY(config_refuse_flag(src, "post_layer_norm", false, err));
    QT_TRY(config_refuse_flag(src, "apply_residual_connection_post_layernorm", true, err));
    QT_TRY(config_read_positive(&ratio, src, "rope_ratio", err));
    if (ratio != 1 && ratio < 10)
        QT_TRY(config_unsupported(src, "rope_ratio", "a number below 10 other than 1", err));
done:
    return rc;
}

/* ChatGLM2, ChatGLM3 and GLM-4, as their authors store them. */
const struct arch arch_chatglm = {
    .family = "chatglm",
    .aliases = chatglm_keys,
    .layers = "encoder.layers.",
    .embed = "embedding.word_embeddings",
    .final_norm = "encoder.final_layernorm",
    .head = "transformer.output_layer",
    .rope = true,
    .parts = {[ROLE_ATTN_IN] = "input_layernorm",
              [ROLE_QKV] = "self_attention.query_key_value",
              [ROLE_O] = "self_attention.dense",
              [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_GATE_UP] = "mlp.dense_h_to_4h",
              [ROLE_DOWN] = "mlp.dense_4h_to_h"},
    .eps_key = "layernorm_epsilon",
    .eps = 1e-5,
    .act = "silu",
    .norm = QT_NORM_RMS,
    .partial_rope = true,
    .rotary_factor = 0.5,
    .interleaved = true,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"add_bias_linear", false},
    .mlp_bias = {"add_bias_linear", false},
    .tied = {"tie_word_embeddings", false},
    .adapt = adapt_chatglm,
    .read = read_chatglm,
};
