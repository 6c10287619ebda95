/* JetMoE: mixtures of attention heads. */
#include "model/config/families/families.h"

static const struct arch_alias jetmoe_keys[] = {
    {"head_dim", "kv_channels"}, {"hidden_act", "activation_function"}, {0}};

/* There are as many queries per key as a token has experts. */
static int adapt_jetmoe(json_t *out, const struct source *src, struct qt_err *err)
{
    size_t kv_heads = 16, chosen = 2;
    int rc;
    QT_TRY(config_read_size(&kv_heads, src, "num_key_value_heads", CONFIG_WIDTH, err));
    QT_TRY(config_read_size(&chosen, src, "num_experts_per_tok", CONFIG_WIDTH, err));
    QT_TRY(
        config_put(out, "num_attention_heads", json_integer((json_int_t)(kv_heads * chosen)), err));
done:
    return rc;
}

const struct arch arch_jetmoe = {
    .family = "jetmoe",
    .aliases = jetmoe_keys,
    LLAMA_COMMON,
    .vocab = 32000,
    .max_positions = 4096,
    .kv_heads = 16,
    .head_dim = 128,
    .parts = {[ROLE_ATTN_IN] = "input_layernorm",
              [ROLE_QKV] = "self_attention.kv_proj",
              [ROLE_HEADS_ROUTER] = "self_attention.experts.router.layer",
              [ROLE_HEADS_BIAS] = "self_attention.experts.bias",
              [ROLE_EXPERT_Q] = "q_proj",
              [ROLE_EXPERT_O] = "o_proj",
              [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_ROUTER] = "mlp.router.layer",
              [ROLE_EXPERTS_BIAS] = "mlp.bias",
              [ROLE_GATE] = "gate_proj",
              [ROLE_UP] = "up_proj",
              [ROLE_DOWN] = "down_proj"},
    .experts = "mlp.experts.",
    .head_experts = "self_attention.experts.",
    .normalize_routing = {NULL, true},
    .tied = {"tie_word_embeddings", true},
    .layer_eps = 1e-6f,
    .adapt = adapt_jetmoe,
};
