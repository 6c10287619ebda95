/* Mistral, Ministral and Mixtral. (Mistral 4 is in latent.c.) */
#include "model/config/families/families.h"

const struct arch arch_mistral = {
    .family = "mistral",
    .kv_heads = 8,
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .window = WINDOW_ALL,
};

const struct arch arch_ministral = {
    .family = "ministral",
    .kv_heads = 8,
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .window = WINDOW_LISTED,
};

const struct arch arch_ministral3 = {
    .family = "ministral3",
    .kv_heads = 8,
    .head_dim = 128,
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .eps = 1e-5,
    .window = WINDOW_ALL,
    .window_given = true,
    .query_steps = true,
};

const struct arch arch_mixtral = {
    .family = "mixtral",
    LLAMA_LIKE,
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_ROUTER] = "block_sparse_moe.gate", [ROLE_GATE] = "w1", [ROLE_UP] = "w3",
              [ROLE_DOWN] = "w2"},
    .experts = "block_sparse_moe.experts.",
    .eps = 1e-5,
    .theta = 1e6,
    .normalize_routing = {NULL, true},
    .window = WINDOW_ALL,
    .window_given = true,
};
