/* The table of model families. Sources: the published checkpoints' config.json files and tensor
 * names, and the behaviour of Hugging Face transformers, against which tests compare. */
#include "calib/model_internal.h"

#define LLAMA_NAMES                                                                                \
    .layers = "layers.", .embed = "embed_tokens", .final_norm = "norm", .eps_key = "rms_norm_eps", \
    .rope = true

#define LLAMA_LIKE                                                                                 \
    LLAMA_NAMES, .act_key = "hidden_act", .act = "silu", .norm = QT_NORM_RMS,                      \
                 .tied = {"tie_word_embeddings", false}

#define GEMMA_LIKE                                                                                 \
    LLAMA_NAMES, .act_key = "hidden_activation", .act = "gelu_pytorch_tanh", .norm = QT_NORM_RMS1, \
                 .tied = {"tie_word_embeddings", true}, .qkv_bias = {"attention_bias", false},     \
                 .o_bias = {"attention_bias", false}, .head_dim = 256, .gemma_scales = true

#define ATTENTION_PARTS                                                                            \
    [ROLE_ATTN_IN] = "input_layernorm", [ROLE_Q] = "self_attn.q_proj",                             \
    [ROLE_K] = "self_attn.k_proj", [ROLE_V] = "self_attn.v_proj", [ROLE_O] = "self_attn.o_proj"

#define LLAMA_PARTS                                                                                \
    ATTENTION_PARTS, [ROLE_GATE] = "mlp.gate_proj", [ROLE_UP] = "mlp.up_proj",                     \
                     [ROLE_DOWN] = "mlp.down_proj"

#define QWEN3_PARTS                                                                                \
    LLAMA_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm", [ROLE_Q_NORM] = "self_attn.q_norm",   \
                 [ROLE_K_NORM] = "self_attn.k_norm"

#define GEMMA_PARTS                                                                                \
    LLAMA_PARTS, [ROLE_ATTN_OUT] = "post_attention_layernorm",                                     \
                 [ROLE_MLP_IN] = "pre_feedforward_layernorm",                                      \
                 [ROLE_MLP_OUT] = "post_feedforward_layernorm"

static const struct arch table[] = {
    {
        .family = "llama",
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm"},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .mlp_bias = {"mlp_bias", false},
    },
    {
        .family = "mistral",
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm"},
        .window = WINDOW_ALL,
    },
    {
        .family = "qwen2",
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm"},
        .qkv_bias = {NULL, true},
        .window = WINDOW_FROM_LAYER,
    },
    {
        .family = "qwen2_5_vl_text",
        LLAMA_LIKE,
        .parts = {LLAMA_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm"},
        .eps = 1e-5,
        .theta = 1e6,
        .mrope = true,
        .qkv_bias = {NULL, true},
        .window = WINDOW_FROM_LAYER,
    },
    {
        .family = "qwen3",
        .head_dim = 128,
        LLAMA_LIKE,
        .parts = {QWEN3_PARTS},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .window = WINDOW_FROM_LAYER,
    },
    {
        .family = "qwen3_vl_text",
        .head_dim = 128,
        LLAMA_LIKE,
        .parts = {QWEN3_PARTS},
        .theta = 5e5,
        .mrope = true,
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
    },
    {
        .family = "qwen3_moe",
        LLAMA_LIKE,
        .intermediate_key = "moe_intermediate_size",
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm",
                  [ROLE_ROUTER] = "mlp.gate", [ROLE_GATE] = "gate_proj", [ROLE_UP] = "up_proj",
                  [ROLE_DOWN] = "down_proj"},
        .experts = "mlp.experts.",
        .shares_of_one = {"norm_topk_prob", false},
        .qkv_bias = {"attention_bias", false},
        .o_bias = {"attention_bias", false},
        .window = WINDOW_IF_USED,
    },
    {
        .family = "mixtral",
        LLAMA_LIKE,
        .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_ROUTER] = "block_sparse_moe.gate", [ROLE_GATE] = "w1", [ROLE_UP] = "w3",
                  [ROLE_DOWN] = "w2"},
        .experts = "block_sparse_moe.experts.",
        .eps = 1e-5,
        .theta = 1e6,
        .shares_of_one = {NULL, true},
        .window = WINDOW_ALL,
        .window_given = true,
    },
    {
        .family = "phi3",
        LLAMA_LIKE,
        .parts = {[ROLE_ATTN_IN] = "input_layernorm",
                  [ROLE_QKV] = "self_attn.qkv_proj",
                  [ROLE_O] = "self_attn.o_proj",
                  [ROLE_MLP_IN] = "post_attention_layernorm",
                  [ROLE_GATE_UP] = "mlp.gate_up_proj",
                  [ROLE_DOWN] = "mlp.down_proj"},
        .eps = 1e-5,
        .window = WINDOW_ALL,
        .window_given = true,
        .partial_rope = true,
        .original_positions = 4096,
    },
    {
        .family = "gemma2",
        GEMMA_LIKE,
        .parts = {GEMMA_PARTS},
        .window = WINDOW_EVEN,
        .attn_softcap = 50,
        .logit_softcap = 30,
    },
    {
        .family = "gemma3_text",
        GEMMA_LIKE,
        .vocab = 262208,
        .max_positions = 131072,
        .heads = 8,
        .kv_heads = 4,
        .theta = 1e6,
        .local_theta = 1e4,
        .parts =
            {GEMMA_PARTS, [ROLE_Q_NORM] = "self_attn.q_norm", [ROLE_K_NORM] = "self_attn.k_norm"},
        .window = WINDOW_PATTERN,
    },
    {
        .family = "opt",
        .layers = "decoder.layers.",
        .embed = "decoder.embed_tokens",
        .positions = "decoder.embed_positions",
        .position_offset = 2,
        .final_norm = "decoder.final_layer_norm",
        .project_in = "decoder.project_in",
        .project_out = "decoder.project_out",
        .parts = {[ROLE_ATTN_IN] = "self_attn_layer_norm",
                  [ROLE_Q] = "self_attn.q_proj",
                  [ROLE_K] = "self_attn.k_proj",
                  [ROLE_V] = "self_attn.v_proj",
                  [ROLE_O] = "self_attn.out_proj",
                  [ROLE_MLP_IN] = "final_layer_norm",
                  [ROLE_UP] = "fc1",
                  [ROLE_DOWN] = "fc2"},
        .intermediate_key = "ffn_dim",
        .act_key = "activation_function",
        .act = "relu",
        .norm = QT_NORM_LAYER,
        .qkv_bias = {"enable_bias", true},
        .o_bias = {"enable_bias", true},
        .mlp_bias = {"enable_bias", true},
        .tied = {"tie_word_embeddings", true},
        .opt_layout = true,
    },
};

enum { FAMILIES = sizeof table / sizeof *table };

static const struct {
    const char *type, *flat; /* arch_is_wrapper */
} wrappers[] = {
    {"gemma3", NULL},
    {"mistral3", NULL},
    {"qwen2_5_vl", "qwen2_5_vl_text"},
    {"qwen3_vl", NULL},
};

/* All of both tables; a test compares. */
static const char *const types[] = {
    "llama",     "mistral",  "qwen2",      "qwen2_5_vl_text", "qwen3",       "qwen3_vl_text",
    "qwen3_moe", "mixtral",  "phi3",       "gemma2",          "gemma3_text", "opt",
    "gemma3",    "mistral3", "qwen2_5_vl", "qwen3_vl",        NULL};

bool arch_is_wrapper(const char **flat, const char *type)
{
    *flat = NULL;
    for (size_t i = 0; i < sizeof wrappers / sizeof *wrappers; i++)
        if (strcmp(wrappers[i].type, type) == 0) {
            *flat = wrappers[i].flat;
            return true;
        }
    return false;
}

const struct arch *arch_find(const char *family)
{
    for (size_t i = 0; i < FAMILIES; i++)
        if (strcmp(table[i].family, family) == 0)
            return &table[i];
    return NULL;
}

const char *const *qt_model_types(void)
{
    return types;
}
