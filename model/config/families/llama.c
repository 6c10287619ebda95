/* Llama, and models that differ from it in names and defaults. */
#include "model/config/families/families.h"

const struct arch arch_llama = {
    .family = "llama",
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
};

/* The names of the first Yi checkpoints; later ones are "llama". */
const struct arch arch_Yi = {
    .family = "Yi",
    LLAMA_LIKE,
    .parts = {ATTENTION_WITHOUT_NORM, MLP_PARTS, [ROLE_ATTN_IN] = "ln1", [ROLE_MLP_IN] = "ln2"},
};

const struct arch arch_cwm = {
    .family = "cwm",
    .kv_heads = 8,
    .head_dim = 128,
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .eps = 1e-5,
    .theta = 1e6,
    .rope_needed = true,
    .window = WINDOW_PATTERN_FIRST,
    .window_period = 4,
    .window_size = 8192,
};

static int read_iquestcoder(struct config *cfg, const struct source *src, struct qt_err *err)
{
    (void)cfg;
    return config_refuse_flag(src, "use_sliding_window", true, err);
}

const struct arch arch_iquestcoder = {
    .family = "iquestcoder",
    .kv_heads = 8,
    .head_dim = 128,
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .eps = 1e-5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
    .read = read_iquestcoder,
};

const struct arch arch_seed_oss = {
    .family = "seed_oss",
    .kv_heads = 8,
    .head_dim = 128,
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .qkv_bias = {"attention_bias", true},
    .o_bias = {"attention_out_bias", false},
    .mlp_bias = {"mlp_bias", false},
};

const struct arch arch_smollm3 = {
    .family = "smollm3",
    .kv_heads = 4,
    LLAMA_COMMON,
    .parts = {LLAMA_PARTS},
    .theta = 2e6,
    .tied = {"tie_word_embeddings", true},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
    .no_rope = NO_ROPE_LISTED,
};

const struct arch arch_helium = {
    .family = "helium",
    .kv_heads = 20,
    .head_dim = 128,
    LLAMA_LIKE,
    .parts = {LLAMA_PARTS},
    .eps = 1e-8,
    .theta = 1e5,
    .interleaved = true,
    .qkv_bias = {"attention_bias", false},
    .mlp_bias = {"mlp_bias", false},
};
