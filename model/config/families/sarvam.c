/* Sarvam. (sarvam_mla is in latent.c.) */
#include "model/config/families/families.h"

static const struct arch_alias sarvam_keys[] = {
    {"n_shared_experts", "num_shared_experts"}, {"attention_bias", "use_qkv_bias"}, {0}};

static int read_sarvam_moe(struct config *cfg, const struct source *src, struct qt_err *err)
{
    static const char key[] = "use_qk_norm";
    bool normed = true;
    int rc = qt_json_get_bool(&normed, src->json, key, src->path, err);
    (void)cfg;
    return rc == QT_OK && !normed ? config_unsupported(src, key, "false", err) : rc;
}

const struct arch arch_sarvam_moe = {
    .family = "sarvam_moe",
    .kv_heads = 4,
    .head_dim = 64,
    .aliases = sarvam_keys,
    .layers = "layers.",
    .embed = "word_embeddings",
    .final_norm = "norm",
    .rope = true,
    .parts = {[ROLE_ATTN_IN] = "input_layernorm",
              [ROLE_QKV] = "attention.query_key_value",
              [ROLE_O] = "attention.dense",
              [ROLE_Q_NORM] = "attention.query_layernorm",
              [ROLE_K_NORM] = "attention.key_layernorm",
              [ROLE_MLP_IN] = "post_attention_layernorm",
              EXPERT_PARTS,
              [ROLE_SELECT_BIAS] = "mlp.gate.expert_bias"},
    .intermediate_key = "moe_intermediate_size",
    .experts = "mlp.experts.",
    .shared = "mlp.shared_experts.",
    .dense = "mlp.",
    .shared_count_key = "n_shared_experts",
    .shared_count = 1,
    .first_dense = 1,
    .sigmoid_router = true,
    .grouped_router = true,
    .routing_scale = 2.5,
    .normalize_routing = {"norm_topk_prob", true},
    .eps_key = "rms_norm_eps",
    .act_key = "hidden_act",
    .act = "silu",
    .norm = QT_NORM_RMS,
    .theta = 8e6,
    .partial_rope = true,
    .tied = {"tie_word_embeddings", false},
    .qkv_bias = {"attention_bias", false},
    .read = read_sarvam_moe,
};
