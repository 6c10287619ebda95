/* ERNIE 4.5. */
#include "model/config/families/families.h"

const struct arch arch_ernie4_5 = {
    .family = "ernie4_5",
    .kv_heads = 2,
    .head_dim = 128,
    LLAMA_COMMON,
    .parts = {LLAMA_PARTS},
    .eps = 1e-5,
    .theta = 5e5,
    .interleaved = true,
    .tied = {"tie_word_embeddings", true},
    .qkv_bias = {"use_bias", false},
    .o_bias = {"use_bias", false},
    .mlp_bias = {"use_bias", false},
};

const struct arch arch_ernie4_5_moe = {
    .family = "ernie4_5_moe",
    .kv_heads = 4,
    LLAMA_COMMON,
    .intermediate_key = "moe_intermediate_size",
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              EXPERT_PARTS, [ROLE_SELECT_BIAS] = "mlp.moe_statics.e_score_correction_bias"},
    .select_bias_row = true,
    .experts = "mlp.experts.",
    .shared = "mlp.shared_experts.",
    .shared_count_key = "moe_num_shared_experts",
    .shared_count = 2,
    .dense = "mlp.",
    .normalize_routing = {NULL, true},
    .first_dense = 1,
    .moe_layers = true,
    .eps = 1e-5,
    .theta = 5e5,
    .interleaved = true,
    .tied = {"tie_word_embeddings", true},
};
