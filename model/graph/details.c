#include "model/graph/internal.h"

/* The p of which every p-th layer has attention, and no other; 0: there is none. */
static size_t delta_period(const struct config *cfg)
{
    size_t p = 1;
    while (p <= cfg->info.layers && cfg->mixers[p - 1] == MIXER_DELTA)
        p++;
    for (size_t i = 0; i < cfg->info.layers; i++)
        if ((cfg->mixers[i] != MIXER_DELTA) != ((i + 1) % p == 0))
            return 0;
    return p;
}

void qt_model_details(struct qt_model_details *out, const struct qt_model *model)
{
    const struct config *cfg = &model->cfg;
    *out = (struct qt_model_details){
        .dense_width = cfg->dense_width,
        .expert_width = cfg->expert_width,
        .shared_width = cfg->shared_width,
        .routed = cfg->routed,
        .top_k = cfg->top_k,
        .normalize_routing = cfg->normalize_routing,
        .dense = cfg->dense,
        .sigmoid_routing = cfg->arch->sigmoid_router,
        .routing_groups = cfg->groups,
        .routing_top = cfg->top_groups,
        .routing_by_best = cfg->arch->group_best,
        .routing_scale = (float)cfg->routing_scale,
        .delta_key_heads = cfg->delta.key_heads,
        .delta_value_heads = cfg->delta.value_heads,
        .delta_key_dim = cfg->delta.key_dim,
        .delta_value_dim = cfg->delta.value_dim,
        .delta_kernel = cfg->delta.kernel,
        .delta_period = delta_period(cfg),
        .q_rank = cfg->latent.q_rank,
        .kv_rank = cfg->latent.kv_rank,
        .nope = cfg->latent.nope,
        .rope = cfg->latent.rope,
        .value_dim = cfg->latent.v,
        .interleaved = cfg->interleaved,
        .query_beta = cfg->query_beta,
        .query_step = cfg->query_step,
        .short_kernel = cfg->short_kernel,
        .chunks = cfg->chunks,
        .bare_norms = cfg->bare_norms,
        .floor_beta = cfg->floor_beta,
        .floor_step = cfg->floor_step,
        .windows = cfg->windows,
        .no_rope = cfg->no_rope,
        .rotary_dim = cfg->rope.dim,
        .inv_freq = cfg->rope.inv_freq,
        .long_inv_freq = cfg->rope.long_inv_freq,
        .local_inv_freq = cfg->local_rope.inv_freq,
        .long_from = cfg->rope.long_from,
        .rope_scale = cfg->rope.scale,
        .eps = cfg->eps,
        .attn_scale = cfg->attn_scale,
        .embed_scale = cfg->embed_scale,
        .residual_scale = cfg->residual_scale,
        .logit_scale = cfg->logit_scale,
        .attn_softcap = cfg->attn_softcap,
        .act = cfg->act,
        .tied = !model->head.weight,
        .prefix = model->prefix,
        .head = model->head_name,
    };
    for (size_t i = 0; cfg->dense && i < cfg->info.layers; i++)
        out->some_dense = out->some_dense || cfg->dense[i];
}
