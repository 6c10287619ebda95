/* OLMo. */
#include "model/config/families/families.h"

const struct arch arch_olmoe = {
    .family = "olmoe",
    LLAMA_LIKE,
    .parts = {QWEN3_MOE_PARTS},
    .norms_of_all_heads = true,
    .experts = "mlp.experts.",
    .normalize_routing = {"norm_topk_prob", false},
    .eps = 1e-5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
};

const struct arch arch_flex_olmo = {
    .family = "flex_olmo",
    LLAMA_LIKE,
    .parts = {ATTENTION_WITHOUT_NORM, EXPERT_PARTS, [ROLE_ATTN_OUT] = "post_attention_layernorm",
              [ROLE_MLP_OUT] = "post_feedforward_layernorm", [ROLE_Q_NORM] = "self_attn.q_norm",
              [ROLE_K_NORM] = "self_attn.k_norm"},
    .norms_of_all_heads = true,
    .experts = "mlp.experts.",
    .normalize_routing = {"norm_topk_prob", false},
    .theta = 5e5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
};

const struct arch arch_olmo2 = {
    .family = "olmo2",
    LLAMA_LIKE,
    .parts = {POST_NORM_PARTS},
    .norms_of_all_heads = true,
    .eps = 1e-5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
};

const struct arch arch_olmo3 = {
    .family = "olmo3",
    LLAMA_LIKE,
    .parts = {POST_NORM_PARTS},
    .norms_of_all_heads = true,
    .eps = 1e-5,
    .theta = 5e5,
    .local_theta = 5e5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .window = WINDOW_PATTERN,
    .window_period = 4,
};
