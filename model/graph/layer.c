/*
 * A block in backend memory, and the steps of its sublayers that forward.c, experts.c and
 * backward.c share.
 */
#include "model/graph/layer.h"

/* ---- backend memory ------------------------------------------------------------------------- */

/* `staging` holds the largest tensor: the one copy beside the backend's. Memory that *out has from
 * another layer is used again. */
static int load_tensor(float **out, const char *name, size_t count, float *staging,
                       const struct qt_weights *w, struct qt_backend *be, struct qt_err *err)
{
    int rc = QT_OK;
    if (!*out)
        QT_TRY(qt_backend_floats(out, be, count, 1, err));
    QT_TRY(w->load(w->ctx, name, staging, err));
    QT_TRY(be->upload(be, *out, staging, count * sizeof **out, err));
done:
    return rc;
}

int layer_load_part(struct loaded *out, const struct part *part, float *staging,
                    const struct qt_weights *w, struct qt_backend *be, struct qt_err *err)
{
    int rc = QT_OK;
    if (part->weight)
        QT_TRY(load_tensor(&out->weight, part->weight, part_count(part), staging, w, be, err));
    if (part->bias)
        QT_TRY(load_tensor(&out->bias, part->bias, part->n, staging, w, be, err));
done:
    return rc;
}

void layer_free_part(struct loaded *l, struct qt_backend *be)
{
    be->free(be, l->weight);
    be->free(be, l->bias);
}

/* ---- block ---------------------------------------------------------------------------------- */

int qt_layer_open(struct qt_layer **out, const struct qt_model *model, size_t layer,
                  const struct qt_weights *w, struct qt_backend *be, struct qt_err *err)
{
    struct qt_layer *b;
    *out = NULL;
    int rc = qt_array_new(&b, 1, sizeof *b, err);
    if (rc < 0)
        return rc;
    *b = (struct qt_layer){.model = model, .be = be};
    rc = qt_array_new(&b->parts, layer_parts(&model->cfg), sizeof *b->parts, err);
    if (rc == QT_OK)
        rc = qt_layer_load(b, layer, w, err);
    if (rc < 0)
        qt_layer_close(b);
    else
        *out = b;
    return rc;
}

const struct qt_linear *layer_linear_of(const struct layer_def *l, size_t part)
{
    return &l->linears[l->parts[part].index];
}

static bool is_linear_of(const struct layer_def *l, size_t part, int input)
{
    return l->parts[part].linear && layer_linear_of(l, part)->input == input;
}

/* Parts that are rows of another one have no memory of their own. */
static void find_rows(struct qt_layer *b)
{
    const struct layer_def *l = b->layer;
    for (size_t i = 0; i < layer_parts(&b->model->cfg); i++) {
        const struct part *part = &l->parts[i];
        const struct loaded *whole = &b->parts[part->whole];
        if (part->whole == i || !part->k)
            continue;
        b->parts[i].weight = whole->weight + part->first * part->k;
        b->parts[i].bias = whole->bias ? whole->bias + part->first : NULL;
    }
}

/* input: of the linears to load; -1: all parts. */
static int load_parts(struct qt_layer *b, int input, const struct qt_weights *w, struct qt_err *err)
{
    const struct layer_def *l = b->layer;
    const size_t parts = layer_parts(&b->model->cfg);
    float *staging = NULL;
    size_t largest = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < parts; i++)
        if (part_count(&l->parts[i]) > largest)
            largest = part_count(&l->parts[i]);
    QT_TRY(qt_array_new(&staging, largest, sizeof *staging, err));
    for (size_t i = 0; i < parts; i++)
        if (input < 0 || is_linear_of(l, i, input))
            QT_TRY(layer_load_part(&b->parts[i], &l->parts[i], staging, w, b->be, err));
    find_rows(b);
done:
    qt_free(staging);
    return rc;
}

static void free_parts(struct qt_layer *b)
{
    for (size_t i = 0; b->parts && b->layer && i < layer_parts(&b->model->cfg); i++) {
        if (b->layer->parts[i].weight)
            layer_free_part(&b->parts[i], b->be);
        b->parts[i] = (struct loaded){0};
    }
}

/* The parts of layers with experts have the same shapes, and those of all others (role_shape). */
int qt_layer_load(struct qt_layer *b, size_t layer, const struct qt_weights *w, struct qt_err *err)
{
    if (b->layer && b->layer->experts != b->model->layers[layer].experts)
        free_parts(b);
    b->layer = &b->model->layers[layer];
    b->dir = w->dir;
    b->runtime = w->runtime;
    b->window = b->model->cfg.windows[layer];
    b->unrotated = b->model->cfg.unrotated[layer];
    return load_parts(b, -1, w, err);
}

int qt_layer_load_linears(struct qt_layer *b, int input, const struct qt_weights *w,
                          struct qt_err *err)
{
    return load_parts(b, input, w, err);
}

static int new_experts(struct qt_layer *b, size_t rows, struct qt_err *err)
{
    const struct qt_model_info *info = &b->model->cfg.info;
    const size_t routed = b->model->cfg.routed;
    struct layer_experts *e = &b->experts;
    int rc;
    QT_TRY(qt_backend_floats(&e->in, b->be, rows, info->hidden, err));
    QT_TRY(qt_backend_floats(&e->out, b->be, rows, info->hidden, err));
    QT_TRY(qt_backend_floats(&e->sum, b->be, rows, info->hidden, err));
    QT_TRY(qt_backend_floats(&e->logits, b->be, rows, routed, err));
    QT_TRY(qt_array_new(&e->scores, rows, routed * sizeof *e->scores, err));
    QT_TRY(qt_array_new(&e->choice, routed, sizeof *e->choice, err));
    QT_TRY(qt_array_new(&e->gate, rows, sizeof *e->gate, err));
    QT_TRY(qt_array_new(&e->share, rows, info->experts * sizeof *e->share, err));
    QT_TRY(qt_tokens_new(&e->tokens, rows, err));
done:
    return rc;
}

static void free_experts(struct qt_layer *b)
{
    struct layer_experts *e = &b->experts;
    b->be->free(b->be, e->in);
    b->be->free(b->be, e->out);
    b->be->free(b->be, e->sum);
    b->be->free(b->be, e->logits);
    qt_free(e->scores);
    qt_free(e->choice);
    qt_free(e->gate);
    qt_free(e->share);
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

static void free_work(struct qt_layer *b)
{
    struct qt_backend *be = b->be;
    be->free(be, b->x);
    be->free(be, b->wide);
    be->free(be, b->staged);
    free_rope(&b->rope, be);
    free_rope(&b->local_rope, be);
    free_rope(&b->query_rope, be);
    b->x = b->wide = b->staged = NULL;
    free_experts(b);
    b->rows = b->seqlen = 0;
}

void qt_layer_close(struct qt_layer *block)
{
    if (!block)
        return;
    free_work(block);
    block->be->free(block->be, block->grad.memory);
    free_parts(block);
    qt_free(block->parts);
    qt_free(block);
}

static float query_growth(const struct config *cfg, size_t position)
{
    return 1 + cfg->query_beta * (float)log1p((double)(position / cfg->query_step));
}

/* cos, sin of position * inv_freq; none: nothing. The angle is rounded to float first, as in the
 * reference implementation. */
static int make_rope(struct rope *out, struct qt_layer *b, const struct rotary *rotary,
                     bool queries, size_t seqlen, struct qt_err *err)
{
    const struct config *cfg = &b->model->cfg;
    const float *inv_freq = rotary->long_inv_freq && seqlen > rotary->long_from
                                ? rotary->long_inv_freq
                                : rotary->inv_freq;
    size_t half = cfg->rotated / 2, bytes;
    float *cos_host = NULL, *sin_host = NULL;
    int rc = QT_OK;
    if (!inv_freq)
        return QT_OK;
    QT_TRY(qt_backend_floats(&out->cos, b->be, seqlen, half, err));
    QT_TRY(qt_backend_floats(&out->sin, b->be, seqlen, half, err));
    QT_TRY(qt_backend_floats(&out->minus_sin, b->be, seqlen, half, err));
    bytes = seqlen * half * sizeof(float); /* fits: qt_backend_floats has checked it */
    QT_TRY(qt_array_new(&cos_host, seqlen * half, sizeof *cos_host, err));
    QT_TRY(qt_array_new(&sin_host, seqlen * half, sizeof *sin_host, err));
    for (size_t pos = 0; pos < seqlen; pos++) {
        const float scale = rotary->scale * (queries ? query_growth(cfg, pos) : 1);
        for (size_t i = 0; i < half; i++) {
            float angle = (float)pos * inv_freq[i];
            cos_host[pos * half + i] = (float)cos((double)angle) * scale;
            sin_host[pos * half + i] = (float)sin((double)angle) * scale;
        }
    }
    QT_TRY(b->be->upload(b->be, out->cos, cos_host, bytes, err));
    QT_TRY(b->be->upload(b->be, out->sin, sin_host, bytes, err));
    QT_TRY(b->be->copy(b->be, out->minus_sin, out->sin, bytes, err));
    QT_TRY(b->be->scale(b->be, out->minus_sin, -1.0f, seqlen * half, err));
done:
    qt_free(cos_host);
    qt_free(sin_host);
    return rc;
}

const struct rope *layer_rope(const struct qt_layer *b, bool queries)
{
    static const struct rope none;
    return b->unrotated                     ? &none
           : queries && b->query_rope.cos   ? &b->query_rope
           : b->local_rope.cos && b->window ? &b->local_rope
                                            : &b->rope;
}

static size_t widest_mlp(const struct config *cfg)
{
    return qt_max_size(cfg->dense_width, qt_max_size(cfg->expert_width, cfg->shared_width));
}

/* Of the inputs of linears. */
static size_t widest_input(const struct config *cfg)
{
    const struct qt_model_info *info = &cfg->info;
    return qt_max_size(widest_mlp(cfg), qt_max_size(info->hidden, info->heads * info->head_dim));
}

int layer_prepare(struct qt_layer *b, size_t rows, size_t seqlen, struct qt_err *err)
{
    const struct config *cfg = &b->model->cfg;
    const struct qt_model_info *info = &cfg->info;
    size_t attention = 2 * (info->heads + info->kv_heads) * info->head_dim;
    size_t mlp = (b->parts[ROLE_GATE].weight ? 2 : 1) * widest_mlp(cfg);
    int rc = QT_OK;
    if (rows <= b->rows && seqlen == b->seqlen && (!b->runtime.input || b->staged))
        return QT_OK;
    free_work(b);
    QT_TRY(qt_backend_floats(&b->x, b->be, rows, info->hidden, err));
    QT_TRY(qt_backend_floats(&b->wide, b->be, rows, qt_max_size(attention, mlp), err));
    if (b->runtime.input)
        QT_TRY(qt_backend_floats(&b->staged, b->be, rows, widest_input(cfg), err));
    if (info->experts)
        QT_TRY(new_experts(b, rows, err));
    QT_TRY(make_rope(&b->rope, b, &cfg->rope, false, seqlen, err));
    if (cfg->query_beta > 0)
        QT_TRY(make_rope(&b->query_rope, b, &cfg->rope, true, seqlen, err));
    QT_TRY(make_rope(&b->local_rope, b, &cfg->local_rope, false, seqlen, err));
    b->rows = rows;
    b->seqlen = seqlen;
done:
    return rc;
}

int layer_linear(const struct layer_run *r, size_t part, float *y, const float *x,
                 struct qt_err *err)
{
    const struct part *p = &r->b->layer->parts[part];
    const struct loaded *l = &r->b->parts[part];
    return r->b->be->linear(r->b->be, y, x, l->weight, l->bias, r->m, p->n, p->k, err);
}

int layer_apply_norm(const struct layer_run *r, enum role role, float *y, const float *x, size_t m,
                     struct qt_err *err)
{
    const struct config *cfg = &r->b->model->cfg;
    const struct loaded *l = &r->b->parts[role];
    if (!l->weight)
        return QT_OK;
    return r->b->be->norm(r->b->be, y, x, l->weight, l->bias, cfg->arch->norm, cfg->eps, m,
                          r->b->layer->parts[role].n, err);
}

bool layer_norm_in_front(const struct qt_layer *b, enum role norm)
{
    return b->parts[norm].weight && !b->model->cfg.norm_after;
}

int layer_scale_residual(const struct layer_run *r, float *x, struct qt_err *err)
{
    const struct config *cfg = &r->b->model->cfg;
    return cfg->residual_scale == 1
               ? QT_OK
               : r->b->be->scale(r->b->be, x, cfg->residual_scale, r->m * cfg->info.hidden, err);
}

size_t layer_head_rows(const struct layer_run *r, size_t heads)
{
    return r->b->model->cfg.arch->norms_of_all_heads ? r->m : r->m * heads;
}

int layer_heads(const struct layer_run *r, enum role norm, float *x, size_t heads,
                struct qt_err *err)
{
    const struct qt_layer *b = r->b;
    const struct config *cfg = &b->model->cfg;
    const struct rope *rope = layer_rope(b, norm == ROLE_Q_NORM);
    int rc = QT_OK;
    QT_TRY(layer_apply_norm(r, norm, x, x, layer_head_rows(r, heads), err));
    if (rope->cos)
        QT_TRY(b->be->rope(b->be, x, rope->cos, rope->sin, r->m, r->seqlen, heads,
                           cfg->info.head_dim, cfg->rotated, cfg->arch->interleaved, err));
done:
    return rc;
}

struct qt_attention layer_attention(const struct layer_run *r)
{
    const struct config *cfg = &r->b->model->cfg;
    const struct qt_model_info *info = &cfg->info;
    return (struct qt_attention){r->seqlen,       info->heads,       info->kv_heads, info->head_dim,
                                 cfg->attn_scale, cfg->attn_softcap, r->b->window};
}

int layer_input(const float **x, bool *stop, const struct layer_run *r, size_t part,
                struct qt_err *err)
{
    struct qt_layer *b = r->b;
    const struct qt_linear *linear = layer_linear_of(b->layer, part);
    int rc = QT_OK;
    *stop = linear->input == r->stop;
    if (b->runtime.input) {
        QT_TRY(
            b->runtime.input(b->runtime.ctx, b->be, b->staged, *x, linear, r->m, linear->k, err));
        *x = b->staged;
    }
    if (r->tap && (r->stop < 0 || *stop))
        QT_TRY(r->tap->fn(r->tap->ctx, linear->input, *x, r->m, linear->k, err));
done:
    return rc;
}

int layer_mlp(bool *stop, float *y, const float *x, const struct layer_run *r, size_t expert,
              struct qt_err *err)
{
    struct qt_layer *b = r->b;
    const struct config *cfg = &b->model->cfg;
    bool gated = b->parts[part_at(expert, ROLE_GATE)].weight != NULL;
    size_t count = r->m * b->layer->parts[part_at(expert, ROLE_UP)].n;
    float *up = b->wide, *gate = gated ? up + count : up; /* ungated: act(up) */
    const float *product = gate;
    int rc = QT_OK;
    QT_TRY(layer_input(&x, stop, r, part_at(expert, ROLE_UP), err));
    if (*stop)
        goto done;
    if (gated)
        QT_TRY(layer_linear(r, part_at(expert, ROLE_GATE), gate, x, err));
    QT_TRY(layer_linear(r, part_at(expert, ROLE_UP), up, x, err));
    QT_TRY(b->be->activate(b->be, gate, gate, gated ? up : NULL, cfg->act, count, err));
    QT_TRY(layer_input(&product, stop, r, part_at(expert, ROLE_DOWN), err));
    if (!*stop)
        QT_TRY(layer_linear(r, part_at(expert, ROLE_DOWN), y, product, err));
done:
    return rc;
}

int layer_check_length(const struct qt_model *model, size_t m, size_t seqlen, struct qt_err *err)
{
    if (seqlen == 0 || m % seqlen)
        return qt_fail(err, QT_E_INTERNAL, NULL, NULL, "%zu tokens in sequences of %zu", m, seqlen);
    if (seqlen > model->cfg.info.max_positions)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "sequence length %zu, the model has %zu positions", seqlen,
                       model->cfg.info.max_positions);
    return QT_OK;
}
