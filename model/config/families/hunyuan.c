/* Hunyuan and HY. */
#include "model/config/families/families.h"

const struct arch arch_hunyuan_v1_dense = {
    .family = "hunyuan_v1_dense",
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS, [ROLE_Q_NORM] = "self_attn.query_layernorm",
              [ROLE_K_NORM] = "self_attn.key_layernorm"},
    .norms_after_rope = true,
    .rope_alpha = true,
    .eps = 1e-5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
};

static const struct arch_alias hunyuan_moe_keys[] = {{"num_experts_per_tok", "moe_topk"}, {0}};

const struct arch arch_hunyuan_v1_moe = {
    .family = "hunyuan_v1_moe",
    .aliases = hunyuan_moe_keys,
    LLAMA_LIKE,
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_Q_NORM] = "self_attn.query_layernorm",
              [ROLE_K_NORM] = "self_attn.key_layernorm", [ROLE_ROUTER] = "mlp.gate.wg",
              [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
    .norms_after_rope = true,
    .rope_alpha = true,
    .experts = "mlp.experts.",
    .shared = "mlp.shared_mlp.",
    .shared_key = "intermediate_size",
    .normalize_routing = {NULL, true},
    .eps = 1e-5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
};

static const struct arch_alias hy_v3_keys[] = {{"n_shared_experts", "num_shared_experts"},
                                               {"routed_scaling_factor", "router_scaling_factor"},
                                               {0}};

static int read_hy_v3(struct config *cfg, const struct source *src, struct qt_err *err)
{
    (void)cfg;
    return config_refuse_flag(src, "mlp_bias", true,
                              err); /* of dense MLPs and the shared expert only */
}

const struct arch arch_hy_v3 = {
    .family = "hy_v3",
    .kv_heads = 8,
    .head_dim = 128,
    .aliases = hy_v3_keys,
    LLAMA_LIKE,
    .intermediate_key = "moe_intermediate_size",
    .parts = {QWEN3_ATTENTION, [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_ROUTER] = "mlp.router.gate", [ROLE_SELECT_BIAS] = "mlp.expert_bias",
              [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
    .experts = "mlp.experts.",
    .shared = "mlp.shared_mlp.",
    .dense = "mlp.",
    .shared_count_key = "n_shared_experts",
    .shared_count = 1,
    .first_dense = 1,
    .mlp_types = true,
    .sigmoid_router = true,
    .grouped_router = true,
    .routing_scale = 2.826,
    .normalize_routing = {NULL, true},
    .eps = 1e-5,
    .theta = 11158840,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .read = read_hy_v3,
};
