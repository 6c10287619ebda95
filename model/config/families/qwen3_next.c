/* Qwen3-Next and Qwen 3.5: gated DeltaNet and gated attention. */
#include "model/config/families/families.h"

#define DELTA_COMMON                                                                               \
    [ROLE_CONV] = "linear_attn.conv1d", [ROLE_A_LOG] = "linear_attn.A_log",                        \
    [ROLE_DT_BIAS] = "linear_attn.dt_bias", [ROLE_DELTA_NORM] = "linear_attn.norm",                \
    [ROLE_DELTA_OUT] = "linear_attn.out_proj"

#define DELTA_LIKE                                                                                 \
    LLAMA_LIKE, .delta = true, .gated = true, .head_dim = 256, .norms_plus_1 = true,               \
                .partial_rope = true, .rotary_factor = 0.25, .mrope = true,                        \
                .qkv_bias = {"attention_bias", false}, .o_bias = {"attention_bias", false}

#define DELTA_MOE_LIKE                                                                             \
    DELTA_LIKE, .intermediate_key = "moe_intermediate_size", .experts = "mlp.experts.",            \
                .shared = "mlp.shared_expert.", .shared_key = "shared_expert_intermediate_size"

const struct arch arch_qwen3_next = {
    .family = "qwen3_next",
    .kv_heads = 2,
    DELTA_MOE_LIKE,
    .parts =
        {QWEN3_MOE_PARTS, DELTA_COMMON, [ROLE_DELTA_QKVZ] = "linear_attn.in_proj_qkvz",
         [ROLE_DELTA_BA] = "linear_attn.in_proj_ba", [ROLE_SHARED_GATE] = "mlp.shared_expert_gate"},
    .dense = "mlp.",
    .normalize_routing = {"norm_topk_prob", true},
};

#define DELTA_PARTS                                                                                \
    DELTA_COMMON,                                                                                  \
        [ROLE_DELTA_QKV] = "linear_attn.in_proj_qkv", [ROLE_DELTA_Z] = "linear_attn.in_proj_z",    \
        [ROLE_DELTA_B] = "linear_attn.in_proj_b", [ROLE_DELTA_A] = "linear_attn.in_proj_a"

const struct arch arch_qwen3_5_text = {
    .family = "qwen3_5_text",
    .kv_heads = 4,
    DELTA_LIKE,
    .parts = {QWEN3_PARTS, DELTA_PARTS},
};

const struct arch arch_qwen3_5_moe_text = {
    .family = "qwen3_5_moe_text",
    .kv_heads = 2,
    DELTA_MOE_LIKE,
    .parts = {QWEN3_MOE_PARTS, DELTA_PARTS, [ROLE_SHARED_GATE] = "mlp.shared_expert_gate"},
    .normalize_routing = {NULL, true},
};
