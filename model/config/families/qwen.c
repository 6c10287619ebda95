/* Qwen 2 and 3, their decoders in multimodal models, and Mellum. */
#include "model/config/families/families.h"

const struct arch arch_qwen2 = {
    .family = "qwen2",
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .qkv_bias = {NULL, true},
    .window = WINDOW_FROM_LAYER,
    .window_switch = true,
};

const struct arch arch_qwen2_vl_text = {
    .family = "qwen2_vl_text",
    .kv_heads = 8,
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .eps = 1e-5,
    .theta = 1e6,
    .mrope = true,
    .qkv_bias = {NULL, true},
    .window = WINDOW_FROM_LAYER,
    .window_switch = true,
    .window_from = 80,
};

const struct arch arch_qwen2_5_omni_text = {
    .family = "qwen2_5_omni_text",
    .kv_heads = 4,
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .theta = 1e6,
    .mrope = true,
    .qkv_bias = {NULL, true},
    .window = WINDOW_FROM_LAYER,
    .window_switch = true,
    .window_size = 32768,
};

const struct arch arch_qwen2_5_vl_text = {
    .family = "qwen2_5_vl_text",
    .kv_heads = 8,
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .eps = 1e-5,
    .theta = 1e6,
    .mrope = true,
    .qkv_bias = {NULL, true},
    .window = WINDOW_FROM_LAYER,
    .window_switch = true,
    .window_from = 80,
};

const struct arch arch_qwen3 = {
    .family = "qwen3",
    .head_dim = 128,
    LLAMA_LIKE,
    .parts = {QWEN3_PARTS},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .window = WINDOW_FROM_LAYER,
    .window_switch = true,
};

const struct arch arch_qwen3_vl_text = {
    .family = "qwen3_vl_text",
    .head_dim = 128,
    LLAMA_LIKE,
    .parts = {QWEN3_PARTS},
    .theta = 5e5,
    .mrope = true,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
};

const struct arch arch_qwen3_moe = {
    .family = "qwen3_moe",
    LLAMA_LIKE,
    .intermediate_key = "moe_intermediate_size",
    .parts = {QWEN3_MOE_PARTS},
    .experts = "mlp.experts.",
    .dense = "mlp.",
    .normalize_routing = {"norm_topk_prob", false},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .window = WINDOW_ALL,
    .window_switch = true,
};

const struct arch arch_mellum = {
    .family = "mellum",
    .kv_heads = 4,
    .head_dim = 128,
    LLAMA_LIKE,
    .intermediate_key = "moe_intermediate_size",
    .parts = {QWEN3_MOE_PARTS},
    .experts = "mlp.experts.",
    .dense = "mlp.",
    .mlp_types = true,
    .normalize_routing = {"norm_topk_prob", true},
    .theta = 5e5,
    .local_theta = 1e4,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .window = WINDOW_FROM_LAYER,
    .window_from = CONFIG_LAYERS, /* only layer_types gives layers a window */
    .window_size = 1024,
};

const struct arch arch_qwen2_moe = {
    .family = "qwen2_moe",
    LLAMA_LIKE,
    .intermediate_key = "moe_intermediate_size",
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              EXPERT_PARTS, [ROLE_SHARED_GATE] = "mlp.shared_expert_gate"},
    .experts = "mlp.experts.",
    .shared = "mlp.shared_expert.",
    .shared_key = "shared_expert_intermediate_size",
    .dense = "mlp.",
    .normalize_routing = {"norm_topk_prob", false},
    .qkv_bias = {"qkv_bias", true},
    .window = WINDOW_EVEN_TO_LAYER,
    .window_switch = true,
};

const struct arch arch_qwen3_omni_moe_text = {
    .family = "qwen3_omni_moe_text",
    .kv_heads = 4,
    LLAMA_LIKE,
    .intermediate_key = "moe_intermediate_size",
    .parts = {QWEN3_MOE_PARTS},
    .theta = 1e6,
    .mrope = true,
    .experts = "mlp.experts.",
    .dense = "mlp.",
    .normalize_routing = {"norm_topk_prob", true},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
};

const struct arch arch_qwen3_vl_moe_text = {
    .family = "qwen3_vl_moe_text",
    .kv_heads = 16,
    LLAMA_LIKE,
    .intermediate_key = "moe_intermediate_size",
    .parts = {QWEN3_MOE_PARTS},
    .theta = 5e5,
    .mrope = true,
    .experts = "mlp.experts.",
    .dense = "mlp.",
    .normalize_routing = {NULL, true},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
};
