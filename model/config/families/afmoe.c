/* AFMoE. */
#include "model/config/families/families.h"

static const struct arch_alias afmoe_keys[] = {{"n_shared_experts", "num_shared_experts"},
                                               {"routed_scaling_factor", "route_scale"},
                                               {"first_k_dense_replace", "num_dense_layers"},
                                               {0}};

static int read_afmoe(struct config *cfg, const struct source *src, struct qt_err *err)
{
    bool scaled = false;
    int rc = qt_json_get_bool(&scaled, src->json, "mup_enabled", src->path, err);
    if (scaled)
        cfg->embed_scale = (float)sqrt((double)cfg->info.hidden);
    return rc;
}

const struct arch arch_afmoe = {
    .family = "afmoe",
    .head_dim = 128,
    .aliases = afmoe_keys,
    GLM_MOE_LIKE,
    .parts = {QWEN3_ATTENTION, [ROLE_ATTN_GATE] = "self_attn.gate_proj",
              [ROLE_ATTN_OUT] = "post_attention_layernorm", [ROLE_MLP_IN] = "pre_mlp_layernorm",
              [ROLE_MLP_OUT] = "post_mlp_layernorm", [ROLE_ROUTER] = "mlp.router.gate",
              [ROLE_SELECT_BIAS] = "mlp.expert_bias", [ROLE_GATE] = "gate_proj",
              [ROLE_UP] = "up_proj", [ROLE_DOWN] = "down_proj"},
    .dense = "mlp.",
    .shared_count = 2,
    .first_dense = 1,
    .normalize_routing = {NULL, true},
    .eps = 1e-5,
    .qkv_bias = {"attention_bias", false},
    .o_bias = {"attention_bias", false},
    .window = WINDOW_PATTERN,
    .window_period_key = "global_attn_every_n_layers",
    .window_period = 4,
    .window_size = 1024,
    .no_rope = NO_ROPE_GLOBAL,
    .read = read_afmoe,
};
