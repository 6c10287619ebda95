/* The tensors and options of a decoder, for runtimes that do not run over struct qt_backend. */
#include "model/graph/layer.h"

#include <math.h>

static struct qt_part outer_part(const struct part *p)
{
    return (struct qt_part){.weight = p->weight,
                            .bias = p->bias,
                            .n = p->n,
                            .k = p->k,
                            .rows = p->n,
                            .eps = p->eps,
                            .plus_1 = p->plus_1,
                            .unit = p->unit};
}

static struct qt_part part_of(const struct layer_def *def, size_t i)
{
    const struct part *p = &def->parts[i], *whole = &def->parts[p->whole];
    struct qt_part out = outer_part(whole);
    if (!p->n)
        return (struct qt_part){0};
    out.n = p->n;
    out.first = p->first;
    return out;
}

static int refuse(const char *what, struct qt_err *err)
{
    return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                   "the fused runtime does not support models with %s", what);
}

int qt_model_outer(struct qt_outer *out, const struct qt_model *model, struct qt_err *err)
{
    const struct config *cfg = &model->cfg;
    *out = (struct qt_outer){.embed = outer_part(&model->embed),
                             .positions = outer_part(&model->positions),
                             .project_in = outer_part(&model->project_in),
                             .project_out = outer_part(&model->project_out),
                             .embed_norm = outer_part(&model->embed_norm),
                             .final_norm = outer_part(&model->final_norm),
                             .head = outer_part(model->head.weight ? &model->head : &model->embed),
                             .position_offset = cfg->arch->position_offset,
                             .norm = cfg->arch->norm,
                             .norm_after = cfg->norm_after,
                             .parallel = cfg->parallel,
                             .norm_all_heads = cfg->arch->norms_of_all_heads,
                             .norm_last = cfg->arch->norms_after_rope,
                             .value_norm = cfg->arch->value_norm,
                             .value_eps = cfg->eps,
                             .clip = cfg->clip_qkv,
                             .interleaved = cfg->interleaved};
    const char *part = qt_model_cannot(model, QT_USE_FUSED);
    out->final_norm.eps = out->embed_norm.eps = cfg->eps;
    if (part)
        return refuse(part, err);
    if (model->project_in.weight && !model->positions.weight)
        return refuse("a projection of the embedding, but no positions", err);
    if (out->norm_all_heads && out->norm_last)
        return refuse("a norm of all heads after the rotary embedding", err);
    if (out->norm_all_heads && out->clip > 0)
        return refuse("clipped queries and keys and a norm of all heads", err);
    if (!cfg->per_layer)
        return QT_OK;
    if (cfg->per_layer_vocab < cfg->info.vocab && !cfg->arch->layer_embed_first)
        return refuse("a smaller vocabulary of the inputs of single layers", err);
    out->inputs = outer_part(&model->layer_embed);
    out->inputs_project = outer_part(&model->layer_project);
    out->inputs_norm = outer_part(&model->layer_norm);
    out->inputs_norm.eps = cfg->eps;
    return QT_OK;
}

void qt_model_expert_parts(struct qt_part out[3], const struct qt_model *model, size_t layer,
                           size_t expert)
{
    const struct layer_def *def = &model->layers[layer];
    out[0] = part_of(def, part_at(expert, ROLE_GATE));
    out[1] = part_of(def, part_at(expert, ROLE_UP));
    out[2] = part_of(def, part_at(expert, ROLE_DOWN));
}

static int mixture_of(struct qt_mixture *out, const struct qt_model *model, size_t layer,
                      struct qt_err *err)
{
    const struct config *cfg = &model->cfg;
    const struct layer_def *def = &model->layers[layer];
    const struct part *parts = def->parts;
    struct qt_part expert[3];
    qt_model_expert_parts(expert, model, layer, 0);
    if (cfg->top_groups < cfg->groups)
        return refuse("groups of experts", err);
    if (!expert[0].n)
        return refuse("experts without a gate", err);
    if (def->experts > cfg->routed + 1)
        return refuse("several shared experts", err);
    if (def->experts > cfg->routed && (cfg->parallel || parts[ROLE_MLP_OUT].weight))
        return refuse("a shared expert in front of a norm, or parallel to attention", err);
    *out = (struct qt_mixture){
        .experts = cfg->routed,
        .top_k = cfg->top_k,
        .router = part_of(def, ROLE_ROUTER),
        .select_bias = part_of(def, ROLE_SELECT_BIAS),
        .shared_gate = part_of(def, ROLE_SHARED_GATE),
        .sigmoid = cfg->arch->sigmoid_router,
        .normalize = cfg->normalize_routing,
        .eps = cfg->arch->routing_eps > 0 ? (float)cfg->arch->routing_eps : 1e-20f,
        .scale = (float)cfg->routing_scale,
    };
    return QT_OK;
}

/* The rows of queries, keys and values with grouped_qkv (internal.h). */
static void grouped_parts(struct qt_block *out, const struct qt_model *model,
                          const struct layer_def *def)
{
    const size_t shards = model->cfg.arch->qkv_shards, groups = shards ? shards : def->heads.kv;
    const size_t q = model->cfg.info.heads * def->heads.dim / groups;
    const size_t kv = def->heads.kv * def->heads.dim / groups;
    struct qt_part *const parts[] = {&out->q, shards ? &out->v : &out->k,
                                     shards ? &out->k : &out->v};
    size_t first = 0;
    for (int i = 0; i < 3; i++) {
        *parts[i] = outer_part(&def->parts[ROLE_QKV]);
        parts[i]->run = i ? kv : q;
        parts[i]->pitch = q + 2 * kv;
        parts[i]->n = groups * parts[i]->run;
        parts[i]->first = first;
        first += parts[i]->run;
    }
}

/* The layer whose keys and values a layer attends to. */
static size_t keys_of(const struct qt_model *model, size_t layer)
{
    const struct heads *heads = &model->layers[layer].heads;
    size_t of = layer;
    while (heads->shared &&
           (model->layers[of].heads.shared || model->layers[of].heads.kept != heads->kept))
        of--;
    return of;
}

int qt_model_block(struct qt_block *out, const struct qt_model *model, size_t layer,
                   struct qt_err *err)
{
    const struct config *cfg = &model->cfg;
    const struct layer_def *def = &model->layers[layer];
    *out = (struct qt_block){0};
    if (cfg->bare_norms)
        return refuse("norms without weights", err);
    if (cfg->floor_beta > 0)
        return refuse("queries that are scaled by their position after the rotary embedding", err);
    *out = (struct qt_block){
        .attn_in = part_of(def, ROLE_ATTN_IN),
        .q = part_of(def, ROLE_Q),
        .k = part_of(def, ROLE_K),
        .v = part_of(def, ROLE_V),
        .q_norm = part_of(def, ROLE_Q_NORM),
        .k_norm = part_of(def, ROLE_K_NORM),
        .sinks = part_of(def, ROLE_SINKS),
        .o = part_of(def, ROLE_O),
        .attn_out = part_of(def, ROLE_ATTN_OUT),
        .mlp_in = part_of(def, ROLE_MLP_IN),
        .mlp_out = part_of(def, ROLE_MLP_OUT),
        .input_gate = part_of(def, ROLE_PER_LAYER_GATE),
        .input_out = part_of(def, ROLE_PER_LAYER_OUT),
        .input_norm = part_of(def, ROLE_PER_LAYER_NORM),
        .scale = part_of(def, ROLE_LAYER_SCALE),
        .kv_heads = def->heads.kv,
        .head_dim = def->heads.dim,
        .keys_of = keys_of(model, layer),
        .keys_are_values = def->heads.keys_are_values,
        .window = cfg->windows[layer],
        .rope = cfg->no_rope[layer] || !cfg->rope.inv_freq        ? QT_ROPE_NONE
                : cfg->windows[layer] && cfg->local_rope.inv_freq ? QT_ROPE_LOCAL
                                                                  : QT_ROPE_FULL,
    };
    if (cfg->arch->grouped_qkv)
        grouped_parts(out, model, def);
    const size_t dense = def->experts ? cfg->routed : 0; /* number of the MLP or shared expert */
    if (!def->experts || def->experts > cfg->routed) {
        out->gate = part_of(def, part_at(dense, ROLE_GATE));
        out->up = part_of(def, part_at(dense, ROLE_UP));
        out->down = part_of(def, part_at(dense, ROLE_DOWN));
    }
    return def->experts ? mixture_of(&out->mixture, model, layer, err) : QT_OK;
}

bool qt_model_slopes(float *slopes, float *factor, const struct qt_model *model)
{
    const struct config *cfg = &model->cfg;
    const size_t heads = cfg->info.heads;
    for (size_t i = 0; cfg->alibi && i < heads; i++) {
        const float slope = layer_slope(i, heads);
        slopes[i] = cfg->arch->alibi_scaled ? qt_bf16_to_f32(qt_f32_to_bf16(slope)) : slope;
    }
    *factor = cfg->arch->alibi_scaled ? cfg->attn_scale : 0;
    return cfg->alibi;
}

void rope_fill(float *cos_out, float *sin_out, const struct config *cfg,
               const struct rotary *rotary, bool queries, size_t positions)
{
    const float *inv_freq = rotary->long_inv_freq && positions > rotary->long_from
                                ? rotary->long_inv_freq
                                : rotary->inv_freq;
    const size_t half = rotary->dim / 2;
    for (size_t pos = 0; pos < positions; pos++) {
        const float scale = rotary->scale * (queries ? layer_query_growth(cfg, pos) : 1);
        for (size_t i = 0; i < half; i++) {
            const float angle = (float)pos * inv_freq[i];
            cos_out[pos * half + i] = (float)cos((double)angle) * scale;
            sin_out[pos * half + i] = (float)sin((double)angle) * scale;
        }
    }
}

size_t qt_model_rope(float *cos_out, float *sin_out, const struct qt_model *model,
                     enum qt_rope_kind kind, bool queries, size_t positions)
{
    const struct config *cfg = &model->cfg;
    const struct rotary *rotary = kind == QT_ROPE_LOCAL ? &cfg->local_rope : &cfg->rope;
    if (kind == QT_ROPE_NONE || !rotary->inv_freq ||
        (queries && (kind != QT_ROPE_FULL || !(cfg->query_beta > 0))))
        return 0;
    if (cos_out)
        rope_fill(cos_out, sin_out, cfg, rotary, queries, positions);
    return rotary->dim;
}
