/* gpt-oss. */
#include "model/config/families/families.h"

/* The activation of gpt-oss: its constants, which kernels have built in, can be given. */
int config_read_gpt_oss(struct config *cfg, const struct source *src, struct qt_err *err)
{
    double alpha = 1.702, limit = 7;
    int rc;
    QT_TRY(config_read_positive(&alpha, src, "swiglu_alpha", err));
    QT_TRY(config_read_positive(&limit, src, "swiglu_limit", err));
    if (alpha != 1.702)
        QT_TRY(config_unsupported(src, "swiglu_alpha", "a number other than 1.702", err));
    if (limit != 7)
        QT_TRY(config_unsupported(src, "swiglu_limit", "a number other than 7", err));
    cfg->act = QT_ACT_CLAMPED;
done:
    return rc;
}

const struct arch arch_gpt_oss = {
    .family = "gpt_oss",
    .kv_heads = 8,
    .head_dim = 64,
    LLAMA_LIKE,
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_SINKS] = "self_attn.sinks", [ROLE_ROUTER] = "mlp.router",
              [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
    .experts = "mlp.experts.",
    .normalize_routing = {NULL, true},
    .router_bias = true,
    .eps = 1e-5,
    .rope_needed = true,
    .theta = 150000,
    .qkv_bias = {"attention_bias", true},
    .o_bias = {"attention_bias", true},
    .mlp_bias = {NULL, true},
    .window = WINDOW_EVEN,
    .window_size = 128,
    .read = config_read_gpt_oss,
};
