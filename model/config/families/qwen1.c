/* Qwen (1). */
#include "model/config/families/families.h"

static const struct arch_alias qwen_keys[] = {{"head_dim", "kv_channels"},
                                              {"rope_theta", "rotary_emb_base"},
                                              {"partial_rotary_factor", "rotary_pct"},
                                              {0}};

/* intermediate_size is the width of gate and up together. */
static int adapt_qwen(json_t *out, const struct source *src, struct qt_err *err)
{
    bool unbiased = true;
    size_t both;
    int rc;
    QT_TRY(qt_json_need_size(&both, out, "intermediate_size", src->path, err));
    QT_TRY(config_put(out, "intermediate_size", json_integer((json_int_t)(both / 2)), err));
    QT_TRY(qt_json_get_bool(&unbiased, out, "no_bias", src->path, err));
    QT_TRY(config_put(out, "bias", json_boolean(!unbiased), err));
done:
    return rc;
}

/* use_dynamic_ntk and use_logn_attn change nothing in sequences of at most seq_length tokens. */
static int read_qwen(struct config *cfg, const struct source *src, struct qt_err *err)
{
    (void)cfg;
    return config_refuse_flag(src, "scale_attn_weights", false, err);
}

const struct arch arch_qwen = {
    .family = "qwen",
    .max_positions = 8192,
    .aliases = qwen_keys,
    .layers = "h.",
    .embed = "wte",
    .final_norm = "ln_f",
    .rope = true,
    .parts = {[ROLE_ATTN_IN] = "ln_1",
              [ROLE_QKV] = "attn.c_attn",
              [ROLE_O] = "attn.c_proj",
              [ROLE_MLP_IN] = "ln_2",
              [ROLE_GATE] = "mlp.w2",
              [ROLE_UP] = "mlp.w1",
              [ROLE_DOWN] = "mlp.c_proj"},
    .positions_key = "seq_length",
    .positions_most = 8192,
    .eps_key = "layer_norm_epsilon",
    .act = "silu",
    .norm = QT_NORM_RMS,
    .partial_rope = true,
    .qkv_bias = {NULL, true},
    .o_bias = {"bias", false},
    .mlp_bias = {"bias", false},
    .tied = {"tie_word_embeddings", false},
    .adapt = adapt_qwen,
    .read = read_qwen,
};
