/* Phi, and StableLM. */
#include "model/config/families/families.h"

static int read_phimoe(struct config *cfg, const struct source *src, struct qt_err *err)
{
    double jitter = 0.01;
    int rc;
    QT_TRY(qt_json_get_real(&jitter, src->json, "router_jitter_noise", src->path, err));
    if (!(jitter >= 0 && jitter < 1e6))
        return qt_fail(err, QT_E_INPUT, src->path, NULL,
                       "'router_jitter_noise' is %g, not a positive number", jitter);
    if (cfg->top_k != 2)
        QT_TRY(config_unsupported(src, "num_experts_per_tok", "a number other than 2", err));
    cfg->jitter = (float)jitter;
done:
    return rc;
}

const struct arch arch_phimoe = {
    .family = "phimoe",
    .kv_heads = 8,
    DECODER_NAMES,
    .eps_key = "rms_norm_eps",
    .act_key = "hidden_act",
    .act = "silu",
    .norm = QT_NORM_LAYER,
    .tied = {"tie_word_embeddings", false},
    .parts = {ATTENTION_PARTS, [ROLE_MLP_IN] = "post_attention_layernorm",
              [ROLE_ROUTER] = "block_sparse_moe.gate", [ROLE_GATE] = "w1", [ROLE_UP] = "w3",
              [ROLE_DOWN] = "w2"},
    .experts = "block_sparse_moe.experts.",
    .sparse_mixer = true,
    .rope_mscale = true,
    .eps = 1e-5,
    .theta = 1e6,
    .head_bias = {"lm_head_bias", false},
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .window = WINDOW_ALL,
    .window_given = true,
    .read = read_phimoe,
};

#define PHI3_PARTS                                                                                 \
    [ROLE_ATTN_IN] = "input_layernorm", [ROLE_QKV] = "self_attn.qkv_proj",                         \
    [ROLE_O] = "self_attn.o_proj", [ROLE_MLP_IN] = "post_attention_layernorm", FUSED_MLP_PARTS

const struct arch arch_phi3 = {
    .family = "phi3",
    LLAMA_LIKE,
    .parts = {PHI3_PARTS},
    .eps = 1e-5,
    .window = WINDOW_ALL,
    .window_given = true,
    .partial_rope = true,
    .original_positions = 4096,
};

/* The adapters of images and speech, which text does not use, are beside the base weights. */
const struct arch arch_phi4_multimodal = {
    .family = "phi4_multimodal",
    .kv_heads = 8,
    LLAMA_LIKE,
    .parts = {PHI3_PARTS},
    .eps = 1e-5,
    .window = WINDOW_ALL,
    .window_given = true,
    .partial_rope = true,
    .original_positions = 4096,
};

static int read_stablelm(struct config *cfg, const struct source *src, struct qt_err *err)
{
    (void)cfg;
    return config_refuse_flag(src, "qk_layernorm", true, err); /* a norm for each head */
}

const struct arch arch_stablelm = {
    .family = "stablelm",
    .kv_heads = 32,
    DECODER_NAMES,
    .parts = {LLAMA_PARTS},
    .eps_key = "layer_norm_eps",
    .eps = 1e-5,
    .act_key = "hidden_act",
    .act = "silu",
    .norm = QT_NORM_LAYER,
    .parallel = {"use_parallel_residual", false},
    .partial_rope = true,
    .rotary_factor = 0.25,
    .qkv_bias = {"use_qkv_bias", false},
    .tied = {"tie_word_embeddings", false},
    .read = read_stablelm,
};

const struct arch arch_phi = {
    .family = "phi",
    .layers = "layers.",
    .embed = "embed_tokens",
    .final_norm = "final_layernorm",
    .rope = true,
    .parts = {[ROLE_ATTN_IN] = "input_layernorm",
              [ROLE_Q] = "self_attn.q_proj",
              [ROLE_K] = "self_attn.k_proj",
              [ROLE_V] = "self_attn.v_proj",
              [ROLE_O] = "self_attn.dense",
              [ROLE_UP] = "mlp.fc1",
              [ROLE_DOWN] = "mlp.fc2"},
    .eps_key = "layer_norm_eps",
    .eps = 1e-5,
    .act_key = "hidden_act",
    .act = "gelu_new",
    .norm = QT_NORM_LAYER,
    .parallel = {NULL, true},
    .head_bias = {NULL, true},
    .partial_rope = true,
    .rotary_factor = 0.5,
    .qkv_bias = {NULL, true},
    .o_bias = {NULL, true},
    .mlp_bias = {NULL, true},
    .tied = {"tie_word_embeddings", false},
    .read = read_stablelm,
};
