/* StarCoder 2. */
#include "model/config/families/families.h"

const struct arch arch_starcoder2 = {
    .family = "starcoder2",
    .kv_heads = 2,
    DECODER_NAMES,
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm", [ROLE_UP] = "mlp.c_fc",
              [ROLE_DOWN] = "mlp.c_proj"},
    .eps_key = "norm_epsilon",
    .eps = 1e-5,
    .act_key = "hidden_act",
    .act = "gelu_pytorch_tanh",
    .norm = QT_NORM_LAYER,
    .qkv_bias = {"use_bias", true},
    .o_bias = {"use_bias", true},
    .mlp_bias = {"use_bias", true},
    .tied = {"tie_word_embeddings", true},
    .window = WINDOW_ALL,
    .window_given = true,
};
