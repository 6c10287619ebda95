/* InternLM 2 and 3. */
#include "model/config/families/families.h"

const struct arch arch_internlm2 = {
    .family = "internlm2",
    .layers = "layers.",
    .embed = "tok_embeddings",
    .final_norm = "norm",
    .head = "output",
    .rope = true,
    .parts = {[ROLE_ATTN_IN] = "attention_norm",
              [ROLE_QKV] = "attention.wqkv",
              [ROLE_O] = "attention.wo",
              [ROLE_MLP_IN] = "ffn_norm",
              [ROLE_GATE] = "feed_forward.w1",
              [ROLE_UP] = "feed_forward.w3",
              [ROLE_DOWN] = "feed_forward.w2"},
    .grouped_qkv = true,
    .eps_key = "rms_norm_eps",
    .act_key = "hidden_act",
    .act = "silu",
    .norm = QT_NORM_RMS,
    .qkv_bias = {"bias", true},
    .o_bias = {"bias", true},
    .tied = {"tie_word_embeddings", false},
};

static const struct arch_alias internlm3_keys[] = {
    {"attention_bias", "qkv_bias"}, {"mlp_bias", "bias"}, {0}};

const struct arch arch_internlm3 = {
    .family = "internlm3",
    .kv_heads = 2,
    .head_dim = 128,
    .aliases = internlm3_keys,
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .eps = 1e-5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"mlp_bias", false},
    .mlp_bias = {"mlp_bias", false},
};
