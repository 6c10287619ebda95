/*
 * A decoder layer in backend memory, and the steps of its sublayers that forward.c, experts.c and
 * backward.c share.
 */
#include "model/graph/layer.h"

int qt_layer_open(struct qt_layer **out, const struct qt_model *model, size_t layer,
                  const struct qt_weights *w, struct qt_backend *be, struct qt_err *err)
{
    struct qt_layer *l;
    *out = NULL;
    int rc = qt_array_new(&l, 1, sizeof *l, err);
    if (rc < 0)
        return rc;
    *l = (struct qt_layer){.model = model, .be = be};
    rc = qt_array_new(&l->parts, layer_parts(&model->cfg), sizeof *l->parts, err);
    if (rc == QT_OK)
        rc = qt_layer_load(l, layer, w, err);
    if (rc < 0)
        qt_layer_close(l);
    else
        *out = l;
    return rc;
}

static int new_experts(struct qt_layer *l, size_t rows, struct qt_err *err)
{
    const struct qt_model_info *info = &l->model->cfg.info;
    const size_t routed = l->model->cfg.routed;
    struct layer_experts *e = &l->work.experts;
    int rc;
    QT_TRY(qt_backend_floats(&e->in, l->be, rows, info->hidden, err));
    QT_TRY(qt_backend_floats(&e->out, l->be, rows, info->hidden, err));
    QT_TRY(qt_backend_floats(&e->sum, l->be, rows, info->hidden, err));
    if (l->model->cfg.arch->parts[ROLE_EXPERTS_IN])
        QT_TRY(qt_backend_floats(&e->normed, l->be, rows, info->hidden, err));
    QT_TRY(qt_backend_floats(&e->logits, l->be, rows, routed, err));
    QT_TRY(qt_array_new(&e->scores, rows, routed * sizeof *e->scores, err));
    QT_TRY(qt_array_new(&e->select_bias, routed, sizeof *e->select_bias, err));
    QT_TRY(qt_array_new(&e->output_scale, routed, sizeof *e->output_scale, err));
    QT_TRY(qt_array_new(&e->gate, rows, sizeof *e->gate, err));
    QT_TRY(qt_array_new(&e->weights, rows, info->experts * sizeof *e->weights, err));
    QT_TRY(qt_tokens_new(&e->tokens, rows, err));
done:
    return rc;
}

static void free_experts(struct qt_layer *l)
{
    struct layer_experts *e = &l->work.experts;
    l->be->free(l->be, e->in);
    l->be->free(l->be, e->out);
    l->be->free(l->be, e->sum);
    l->be->free(l->be, e->normed);
    l->be->free(l->be, e->logits);
    qt_free(e->scores);
    qt_free(e->select_bias);
    qt_free(e->output_scale);
    qt_free(e->gate);
    qt_free(e->weights);
    qt_tokens_free(&e->tokens);
    *e = (struct layer_experts){0};
}

static void free_rope(struct rope *r, struct qt_backend *be)
{
    be->free(be, r->cos);
    be->free(be, r->sin);
    be->free(be, r->minus_sin);
    *r = (struct rope){0};
}

static void free_work(struct qt_layer *l)
{
    struct qt_backend *be = l->be;
    be->free(be, l->work.x);
    be->free(be, l->work.mixed);
    be->free(be, l->work.hidden);
    be->free(be, l->work.scratch);
    be->free(be, l->work.quantized_input);
    be->free(be, l->work.exact_keys);
    be->free(be, l->work.ones);
    be->free(be, l->work.sums);
    qt_free(l->work.host_sums);
    be->free(be, l->work.bias);
    free_rope(&l->work.rope, be);
    free_rope(&l->work.local_rope, be);
    free_rope(&l->work.query_rope, be);
    free_experts(l);
    altup_free(l);
    l->work = (struct layer_work){0};
}

void qt_layer_close(struct qt_layer *layer)
{
    if (!layer)
        return;
    free_work(layer);
    layer->be->free(layer->be, layer->grad.memory);
    layer->be->free(layer->be, layer->grad.dw);
    layer->be->free(layer->be, layer->grad.kept_memory);
    layer_free_parts(layer);
    qt_free(layer->parts);
    qt_free(layer);
}

int layer_scale_queries(const struct layer_run *r, float *q, size_t width,
                        float (*growth)(const struct config *cfg, size_t position),
                        struct qt_err *err)
{
    struct qt_backend *be = r->layer->be;
    float *factor = NULL;
    int rc;
    QT_TRY(qt_array_new(&factor, r->m, sizeof *factor, err));
    for (size_t i = 0; i < r->m; i++)
        factor[i] = growth(&r->layer->model->cfg, r->past + i % r->seqlen);
    QT_TRY(be->gather_rows(be, q, q, NULL, factor, r->m, width, err));
done:
    qt_free(factor);
    return rc;
}

float layer_query_growth(const struct config *cfg, size_t position)
{
    return 1 + cfg->query_beta * (float)log1p((double)(position / cfg->query_step));
}

/* Fills the tables; without inv_freq, *out stays empty. */
static int make_rope(struct rope *out, struct qt_layer *l, const struct rotary *rotary,
                     bool queries, size_t seqlen, struct qt_err *err)
{
    const struct config *cfg = &l->model->cfg;
    size_t half = rotary->dim / 2, bytes;
    float *cos_host = NULL, *sin_host = NULL;
    int rc = QT_OK;
    if (!rotary->inv_freq)
        return QT_OK;
    QT_TRY(qt_backend_floats(&out->cos, l->be, seqlen, half, err));
    QT_TRY(qt_backend_floats(&out->sin, l->be, seqlen, half, err));
    QT_TRY(qt_backend_floats(&out->minus_sin, l->be, seqlen, half, err));
    bytes = seqlen * half * sizeof(float); /* fits: qt_backend_floats has checked it */
    QT_TRY(qt_array_new(&cos_host, seqlen * half, sizeof *cos_host, err));
    QT_TRY(qt_array_new(&sin_host, seqlen * half, sizeof *sin_host, err));
    rope_fill(cos_host, sin_host, cfg, rotary, queries, seqlen);
    QT_TRY(l->be->upload(l->be, out->cos, cos_host, bytes, err));
    QT_TRY(l->be->upload(l->be, out->sin, sin_host, bytes, err));
    QT_TRY(l->be->copy(l->be, out->minus_sin, out->sin, bytes, err));
    QT_TRY(l->be->scale(l->be, out->minus_sin, -1.0f, seqlen * half, err));
done:
    qt_free(cos_host);
    qt_free(sin_host);
    return rc;
}

const struct rotary *layer_rotary(const struct qt_layer *l)
{
    const struct config *cfg = &l->model->cfg;
    return cfg->local_rope.inv_freq && l->window ? &cfg->local_rope : &cfg->rope;
}

const struct rope *layer_rope(const struct qt_layer *l, bool queries)
{
    static const struct rope none;
    return l->no_rope                            ? &none
           : queries && l->work.query_rope.cos   ? &l->work.query_rope
           : l->work.local_rope.cos && l->window ? &l->work.local_rope
                                                 : &l->work.rope;
}

static size_t widest_mlp(const struct config *cfg)
{
    return qt_max_size(qt_max_size(cfg->dense_width << cfg->wide_shared, cfg->per_layer),
                       qt_max_size(cfg->expert_width, cfg->shared_width));
}

static size_t widest_input(const struct config *cfg)
{
    const struct qt_model_info *info = &cfg->info;
    const size_t latent = qt_max_size(qt_max_size(cfg->latent.q_rank, cfg->latent.kv_rank),
                                      cfg->delta.value_heads * cfg->delta.value_dim);
    return qt_max_size(qt_max_size(widest_mlp(cfg), qt_max_size(latent, ssm_values(cfg))),
                       qt_max_size(info->hidden, cfg->o_width));
}

static const struct mixer *const mixers[MIXER_KINDS] = {[MIXER_ATTENTION] = &mixer_attention,
                                                        [MIXER_LATENT] = &mixer_latent,
                                                        [MIXER_DELTA] = &mixer_delta,
                                                        [MIXER_SHORT] = &mixer_short,
                                                        [MIXER_SSM] = &mixer_ssm,
                                                        [MIXER_SSM_ATTENTION] =
                                                            &mixer_ssm_attention,
                                                        [MIXER_HEAD_EXPERTS] = &mixer_head_experts};

const struct mixer *mixer_of(const struct qt_layer *l)
{
    return mixers[l->def->mixer];
}

static size_t scratch_floats(const struct config *cfg, bool gated)
{
    size_t most = (gated ? 2 : 1) * widest_mlp(cfg);
    for (size_t i = 0; i < cfg->info.layers; i++)
        if (cfg->mixers[i] != MIXER_NONE)
            most = qt_max_size(most, mixers[cfg->mixers[i]]->scratch_floats(cfg));
    return most;
}

size_t qt_model_working_floats(const struct qt_model *model)
{
    const struct config *cfg = &model->cfg;
    return scratch_floats(cfg, true) + (cfg->parallel ? 2 : 1) * cfg->info.hidden +
           (cfg->info.state > cfg->info.hidden ? cfg->info.hidden : 0);
}

static int make_ones(struct qt_layer *l, size_t count, struct qt_err *err)
{
    float *ones = NULL;
    int rc;
    QT_TRY(qt_array_new(&ones, count, sizeof *ones, err));
    for (size_t i = 0; i < count; i++)
        ones[i] = 1;
    QT_TRY(qt_backend_floats(&l->work.ones, l->be, count, 1, err));
    QT_TRY(l->be->upload(l->be, l->work.ones, ones, count * sizeof *ones, err));
done:
    qt_free(ones);
    return rc;
}

static float to_bf16(float x)
{
    return qt_bf16_to_f32(qt_f32_to_bf16(x));
}

float layer_slope(size_t head, size_t heads)
{
    size_t n = 1;
    while (2 * n <= heads)
        n *= 2;
    return (float)(head < n ? exp2(-8.0 * (double)(head + 1) / (double)n)
                            : exp2(-4.0 * (double)(2 * (head - n) + 1) / (double)n));
}

static int make_bias(struct qt_layer *l, size_t positions, struct qt_err *err)
{
    const struct config *cfg = &l->model->cfg;
    const size_t heads = cfg->info.heads;
    float *bias = NULL;
    int rc;
    QT_TRY(qt_array_new(&bias, heads, positions * sizeof *bias, err));
    for (size_t h = 0; h < heads; h++) {
        const float slope = layer_slope(h, heads);
        for (size_t j = 0; j < positions; j++)
            bias[h * positions + j] = cfg->arch->alibi_scaled
                                          ? to_bf16(to_bf16(slope) * (float)j) * cfg->attn_scale
                                          : slope * (float)j;
    }
    QT_TRY(qt_backend_floats(&l->work.bias, l->be, heads, positions, err));
    QT_TRY(l->be->upload(l->be, l->work.bias, bias, heads * positions * sizeof *bias, err));
done:
    qt_free(bias);
    return rc;
}

int layer_prepare(struct qt_layer *l, size_t rows, size_t seqlen, struct qt_err *err)
{
    const struct config *cfg = &l->model->cfg;
    const struct qt_model_info *info = &cfg->info;
    int rc = QT_OK;
    if (rows <= l->work.rows && seqlen == l->work.seqlen &&
        (!l->fake_quant.input || l->work.quantized_input) &&
        (!l->fake_quant.cache || l->work.exact_keys))
        return QT_OK;
    free_work(l);
    QT_TRY(qt_backend_floats(&l->work.x, l->be, rows, info->hidden, err));
    if (cfg->parallel)
        QT_TRY(qt_backend_floats(&l->work.mixed, l->be, rows, info->hidden, err));
    if (info->state > info->hidden)
        QT_TRY(qt_backend_floats(&l->work.hidden, l->be, rows, info->hidden, err));
    QT_TRY(qt_backend_floats(&l->work.scratch, l->be, rows,
                             scratch_floats(cfg, l->parts[ROLE_GATE].weight), err));
    if (l->fake_quant.input)
        QT_TRY(qt_backend_floats(&l->work.quantized_input, l->be, rows, widest_input(cfg), err));
    if (l->fake_quant.cache)
        QT_TRY(qt_backend_floats(&l->work.exact_keys, l->be, rows, info->kv_heads * info->head_dim,
                                 err));
    if (info->experts)
        QT_TRY(new_experts(l, rows, err));
    if (cfg->arch->value_norm || cfg->bare_norms)
        QT_TRY(make_ones(l, qt_max_size(info->head_dim, cfg->cutoffs ? widest_mlp(cfg) : 0), err));
    if (cfg->cutoffs) {
        QT_TRY(qt_backend_floats(&l->work.sums, l->be, 2, rows, err));
        QT_TRY(qt_array_new(&l->work.host_sums, 2 * rows, sizeof *l->work.host_sums, err));
    }
    if (cfg->altup)
        QT_TRY(altup_prepare(l, rows, err));
    if (cfg->alibi)
        QT_TRY(make_bias(l, seqlen, err));
    QT_TRY(make_rope(&l->work.rope, l, &cfg->rope, false, seqlen, err));
    if (cfg->query_beta > 0)
        QT_TRY(make_rope(&l->work.query_rope, l, &cfg->rope, true, seqlen, err));
    QT_TRY(make_rope(&l->work.local_rope, l, &cfg->local_rope, false, seqlen, err));
    l->work.rows = rows;
    l->work.seqlen = seqlen;
done:
    return rc;
}

int layer_linear(const struct layer_run *r, size_t part, float *y, const float *x,
                 struct qt_err *err)
{
    const struct part *p = &r->layer->def->parts[part];
    const struct loaded *loaded = &r->layer->parts[part];
    struct qt_backend *be = r->layer->be;
    int rc = be->linear(be, y, x, loaded->weight, loaded->bias, r->m, p->n, p->k, err);
    return rc == QT_OK && p->factor != 0 ? be->scale(be, y, p->factor, r->m * p->n, err) : rc;
}

int layer_apply_norm(const struct layer_run *r, enum role role, float *y, const float *x, size_t m,
                     struct qt_err *err)
{
    const struct config *cfg = &r->layer->model->cfg;
    const struct loaded *loaded = &r->layer->parts[role];
    if (!loaded->weight)
        return QT_OK;
    return r->layer->be->norm(r->layer->be, y, x, loaded->weight, loaded->bias, cfg->arch->norm,
                              r->layer->def->parts[role].eps, m, r->layer->def->parts[role].n, err);
}

bool layer_norm_in_front(const struct qt_layer *l, enum role norm)
{
    return l->parts[norm].weight && !l->model->cfg.norm_after;
}

int layer_scale_residual(const struct layer_run *r, float *x, struct qt_err *err)
{
    const struct config *cfg = &r->layer->model->cfg;
    return cfg->residual_scale == 1 ? QT_OK
                                    : r->layer->be->scale(r->layer->be, x, cfg->residual_scale,
                                                          r->m * cfg->info.hidden, err);
}

size_t layer_head_rows(const struct layer_run *r, size_t heads)
{
    return r->layer->model->cfg.arch->norms_of_all_heads ? r->m : r->m * heads;
}

static int keep_heads(const struct layer_run *r, const float *x, float *raw, size_t heads,
                      struct qt_err *err)
{
    const size_t count = r->m * heads * r->layer->def->heads.dim;
    return raw == x ? QT_OK : r->layer->be->copy(r->layer->be, raw, x, count * sizeof *x, err);
}

static int norm_heads(const struct layer_run *r, enum role norm, float *x, float *raw, size_t heads,
                      struct qt_err *err)
{
    int rc = QT_OK;
    QT_TRY(keep_heads(r, x, raw, heads, err));
    QT_TRY(layer_apply_norm(r, norm, x, x, layer_head_rows(r, heads), err));
done:
    return rc;
}

const float *layer_rope_from(const struct layer_run *r, const float *table)
{
    return table + r->past * (layer_rotary(r->layer)->dim / 2);
}

int layer_heads(const struct layer_run *r, enum role norm, float *x, float *raw, size_t heads,
                struct qt_err *err)
{
    const struct qt_layer *l = r->layer;
    const struct config *cfg = &l->model->cfg;
    const struct rope *rope = layer_rope(l, norm == ROLE_Q_NORM);
    const bool norm_last = cfg->arch->norms_after_rope;
    int rc = QT_OK;
    if (!norm_last)
        QT_TRY(norm_heads(r, norm, x, raw, heads, err));
    if (rope->cos)
        QT_TRY(l->be->rope(l->be, x, layer_rope_from(r, rope->cos), layer_rope_from(r, rope->sin),
                           r->m, r->seqlen, heads, l->def->heads.dim, layer_rotary(l)->dim,
                           cfg->interleaved, err));
    if (norm_last)
        QT_TRY(norm_heads(r, norm, x, raw, heads, err));
    if (cfg->bare_norms && rope->cos) {
        QT_TRY(keep_heads(r, x, raw, heads, err));
        QT_TRY(l->be->norm(l->be, x, x, l->work.ones, NULL, QT_NORM_RMS, cfg->eps, r->m * heads,
                           l->def->heads.dim, err));
    }
done:
    return rc;
}

struct qt_attention layer_attention(const struct layer_run *r)
{
    const struct config *cfg = &r->layer->model->cfg;
    const struct qt_model_info *info = &cfg->info;
    return (struct qt_attention){.seqlen = r->seqlen,
                                 .heads = info->heads,
                                 .kv_heads = r->layer->def->heads.kv,
                                 .head_dim = r->layer->def->heads.dim,
                                 .scale = cfg->attn_scale,
                                 .softcap = cfg->attn_softcap,
                                 .sinks = r->layer->parts[ROLE_SINKS].weight,
                                 .window = r->layer->window,
                                 .both_ways = cfg->arch->both_ways,
                                 .past = r->past,
                                 .bias = r->layer->work.bias,
                                 .bias_step = r->layer->work.seqlen};
}

int layer_input(const float **x, bool *stop, const struct layer_run *r, size_t part,
                struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const struct qt_linear *linear = layer_linear_of(l->def, part);
    int rc = QT_OK;
    *stop = linear->input == r->stop;
    if (l->fake_quant.input) {
        QT_TRY(l->fake_quant.input(l->fake_quant.ctx, l->be, l->work.quantized_input, *x, linear,
                                   r->m, linear->k, err));
        *x = l->work.quantized_input;
    }
    if (r->hook && (r->stop < 0 || *stop))
        QT_TRY(r->hook->fn(r->hook->ctx, linear->input, *x, r->m, linear->k, err));
done:
    return rc;
}

/* Subtracts the limit of each token from gates[m][n], see the drawing; the activation sets the
 * others to 0. temporary: [m][n]. */
static int cut_off(const struct layer_run *r, float *gates, float *temporary, size_t n,
                   struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const double cutoff = (double)l->model->cfg.cutoffs[l->index];
    float *sums = l->work.sums, *squares = sums + r->m, *limits = l->work.host_sums;
    struct qt_backend *be = l->be;
    int rc;
    QT_TRY(be->linear(be, sums, gates, l->work.ones, NULL, r->m, 1, n, err));
    QT_TRY(be->activate(be, temporary, gates, gates, QT_ACT_NONE, r->m * n, err));
    QT_TRY(be->linear(be, squares, temporary, l->work.ones, NULL, r->m, 1, n, err));
    QT_TRY(be->download(be, limits, sums, 2 * r->m * sizeof *limits, err));
    for (size_t i = 0; i < r->m; i++) {
        const double mean = (double)limits[i] / (double)n;
        const double variance = (double)limits[r->m + i] / (double)n - mean * mean;
        limits[i] = -(float)(mean + cutoff * sqrt(fmax(variance, 0)));
    }
    QT_TRY(be->upload(be, sums, limits, r->m * sizeof *limits, err));
    QT_TRY(be->linear(be, temporary, sums, l->work.ones, NULL, r->m, n, 1, err));
    QT_TRY(be->add(be, gates, temporary, r->m * n, err));
    QT_TRY(be->activate(be, gates, gates, NULL, QT_ACT_RELU, r->m * n, err));
done:
    return rc;
}

int layer_mlp(bool *stop, float *y, const float *x, const struct layer_run *r, size_t expert,
              struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const struct config *cfg = &l->model->cfg;
    bool gated = l->parts[part_at(expert, ROLE_GATE)].weight != NULL;
    size_t count = r->m * l->def->parts[part_at(expert, ROLE_UP)].n;
    float *up = l->work.scratch, *gate = gated ? up + count : up; /* ungated: act(up) */
    const float *product = gate;
    int rc = QT_OK;
    QT_TRY(layer_input(&x, stop, r, part_at(expert, ROLE_UP), err));
    if (*stop)
        goto done;
    if (gated)
        QT_TRY(layer_linear(r, part_at(expert, ROLE_GATE), gate, x, err));
    if (cfg->cutoffs && cfg->cutoffs[l->index] > -INFINITY)
        QT_TRY(cut_off(r, gate, up, l->def->parts[part_at(expert, ROLE_UP)].n, err));
    QT_TRY(layer_linear(r, part_at(expert, ROLE_UP), up, x, err));
    QT_TRY(l->be->activate(l->be, gate, gate, gated ? up : NULL, cfg->act, count, err));
    QT_TRY(layer_input(&product, stop, r, part_at(expert, ROLE_DOWN), err));
    if (!*stop)
        QT_TRY(layer_linear(r, part_at(expert, ROLE_DOWN), y, product, err));
done:
    return rc;
}

int layer_check_length(const struct qt_model *model, size_t m, size_t seqlen, struct qt_err *err)
{
    if (seqlen == 0 || m % seqlen)
        return qt_fail(err, QT_E_INTERNAL, NULL, NULL,
                       "%zu tokens are not a multiple of the sequence length %zu", m, seqlen);
    if (seqlen > model->cfg.info.max_positions)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "sequence length %zu, but the model has %zu positions", seqlen,
                       model->cfg.info.max_positions);
    return QT_OK;
}
