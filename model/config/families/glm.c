/* GLM 4, and models with the experts of GLM 4.5. (Those with latent attention are in latent.c.) */
#include "model/config/families/families.h"

const struct arch arch_glm4_moe = {
    .family = "glm4_moe",
    GLM_MOE_LIKE,
    .parts = {QWEN3_MOE_PARTS, [ROLE_SELECT_BIAS] = "mlp.gate.e_score_correction_bias"},
    .dense = "mlp.",
    .shared_count = 1,
    .first_dense = 1,
    .head_norms_key = "use_qk_norm",
    .partial_rope = true,
    .rotary_factor = 0.5,
    .eps = 1e-5,
    .normalize_routing = {"norm_topk_prob", true},
    .qkv_bias = {"attention_bias", false},
};

const struct arch arch_glm4v_moe_text = {
    .family = "glm4v_moe_text",
    .kv_heads = 8,
    GLM_MOE_LIKE,
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              EXPERT_PARTS, [ROLE_SELECT_BIAS] = "mlp.gate.e_score_correction_bias"},
    .dense = "mlp.",
    .shared_count = 1,
    .first_dense = 1,
    .partial_rope = true,
    .rotary_factor = 0.5,
    .mrope = true,
    .qkv_bias = {"attention_bias", true},
    .eps = 1e-5,
    .normalize_routing = {"norm_topk_prob", true},
};

const struct arch arch_solar_open = {
    .family = "solar_open",
    .kv_heads = 8,
    .head_dim = 128,
    GLM_MOE_LIKE,
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              EXPERT_PARTS, [ROLE_SELECT_BIAS] = "mlp.gate.e_score_correction_bias"},
    .shared_count = 1,
    .theta = 1e6,
    .eps = 1e-5,
    .normalize_routing = {"norm_topk_prob", true},
    .qkv_bias = {"attention_bias", false},
};

const struct arch arch_dots1 = {
    .family = "dots1",
    .kv_heads = 32,
    GLM_MOE_LIKE,
    .parts = {QWEN3_MOE_PARTS, [ROLE_SELECT_BIAS] = "mlp.gate.e_score_correction_bias"},
    .dense = "mlp.",
    .normalize_routing = {"norm_topk_prob", false},
    .eps = 1e-6,
    .o_bias = {"attention_bias", false},
    .window = WINDOW_FROM_LAYER,
    .window_from = 62,
    .qkv_bias = {"attention_bias", false},
};

#define GLM_LIKE                                                                                   \
    LLAMA_LIKE, .kv_heads = 2, .head_dim = 128, .eps = 1.5625e-7, .partial_rope = true,            \
                .rotary_factor = 0.5, .interleaved = true, .qkv_bias = {"attention_bias", true}

#define GLM_PARTS ATTENTION_PARTS, FUSED_MLP_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm"

const struct arch arch_glm = {
    .family = "glm",
    GLM_LIKE,
    .parts = {GLM_PARTS},
};

const struct arch arch_glm4 = {
    .family = "glm4",
    GLM_LIKE,
    .parts = {GLM_PARTS, [ROLE_ATTN_OUT] = "post_self_attn_layernorm",
              [ROLE_MLP_OUT] = "post_mlp_layernorm"},
};

const struct arch arch_glm4v_text = {
    .family = "glm4v_text",
    .kv_heads = 2,
    LLAMA_LIKE,
    .parts = {GLM_PARTS, [ROLE_ATTN_OUT] = "post_self_attn_layernorm",
              [ROLE_MLP_OUT] = "post_mlp_layernorm"},
    .eps = 1e-5,
    .partial_rope = true,
    .interleaved = true,
    .mrope = true,
    .qkv_bias = {NULL, true},
};
