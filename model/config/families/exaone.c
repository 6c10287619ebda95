/* EXAONE. */
#include "model/config/families/families.h"

static const struct arch_alias exaone_keys[] = {{"num_hidden_layers", "num_layers"},
                                                {"rms_norm_eps", "layer_norm_epsilon"},
                                                {"hidden_act", "activation_function"},
                                                {0}};

const struct arch arch_exaone = {
    .family = "exaone",
    .kv_heads = 8,
    .aliases = exaone_keys,
    .layers = "h.",
    .embed = "wte",
    .final_norm = "ln_f",
    .parts = {[ROLE_ATTN_IN] = "ln_1",
              [ROLE_Q] = "attn.attention.q_proj",
              [ROLE_K] = "attn.attention.k_proj",
              [ROLE_V] = "attn.attention.v_proj",
              [ROLE_O] = "attn.attention.out_proj",
              [ROLE_MLP_IN] = "ln_2",
              [ROLE_GATE] = "mlp.c_fc_0",
              [ROLE_UP] = "mlp.c_fc_1",
              [ROLE_DOWN] = "mlp.c_proj"},
    .eps_key = "rms_norm_eps",
    .eps = 1e-5,
    .act_key = "hidden_act",
    .act = "silu",
    .tied = {"tie_word_embeddings", false},
    .rope = true,
    .theta = 5e5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
};

const struct arch arch_exaone4 = {
    .family = "exaone4",
    .kv_heads = 32,
    LLAMA_LIKE,
    .parts = {POST_NORM_PARTS},
    .eps = 1e-5,
    .window = WINDOW_PATTERN,
    .window_period_key = "sliding_window_pattern",
    .window_period = 4,
    .window_optional = true,
    .no_rope = NO_ROPE_GLOBAL,
};

static const struct arch_alias exaone_moe_keys[] = {{"n_shared_experts", "num_shared_experts"},
                                                    {0}};

const struct arch arch_exaone_moe = {
    .family = "exaone_moe",
    .kv_heads = 32,
    .aliases = exaone_moe_keys,
    GLM_MOE_LIKE,
    .parts = {QWEN3_MOE_PARTS, [ROLE_SELECT_BIAS] = "mlp.e_score_correction_bias"},
    .dense = "mlp.",
    .shared_count = 1,
    .first_dense = 1,
    .mlp_types = true,
    .routing_scale = 2.5,
    .normalize_routing = {"norm_topk_prob", true},
    .eps = 1e-5,
    .window = WINDOW_PATTERN,
    .window_period_key = "sliding_window_pattern",
    .window_period = 4,
    .window_optional = true,
    .no_rope = NO_ROPE_GLOBAL,
};
