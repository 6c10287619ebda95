/* Models whose MLP is that of the squared rectifier, without a gate. */
#include "model/config/families/families.h"

#define UNGATED_PARTS                                                                              \
    ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm", [ROLE_UP] = "mlp.up_proj",        \
                     [ROLE_DOWN] = "mlp.down_proj"

/* MLP of the squared rectifier, without a gate. */
#define RELU2_LIKE                                                                                 \
    DECODER_NAMES, .act_key = "hidden_act", .act = "relu2", .eps = 1e-5,                           \
                   .tied = {"tie_word_embeddings", false}

const struct arch arch_arcee = {
    .family = "arcee",
    RELU2_LIKE,
    .parts = {UNGATED_PARTS},
    .eps_key = "rms_norm_eps",
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
};

const struct arch arch_jais2 = {
    .family = "jais2",
    RELU2_LIKE,
    .parts = {UNGATED_PARTS},
    .eps_key = "layer_norm_eps",
    .norm = QT_NORM_LAYER,
    .qkv_bias = {"attention_bias", true},
    .o_bias = {"attention_bias", true},
    .mlp_bias = {"mlp_bias", true},
};

const struct arch arch_nemotron = {
    .family = "nemotron",
    RELU2_LIKE,
    .parts = {UNGATED_PARTS},
    .eps_key = "norm_eps",
    .norm = QT_NORM_LAYER,
    .norms_plus_1 = true,
    .partial_rope = true,
    .rotary_factor = 0.5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
};
