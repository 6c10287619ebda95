/*
 * The forward pass of every family, over struct qt_backend: see the drawing in model_internal.h.
 * Callers loop over blocks outside and over windows of text inside, so that one block's weights are
 * in memory at a time.
 */
#include "calib/block.h"

/* ---- backend memory ------------------------------------------------------------------------- */

int block_floats(float **out, struct qt_backend *be, size_t rows, size_t width, struct qt_err *err)
{
    size_t bytes;
    void *p = NULL;
    *out = NULL;
    if (qt_mul_overflow(&bytes, rows, width) || qt_mul_overflow(&bytes, bytes, sizeof(float)))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory (%zu x %zu floats)", rows,
                       width);
    int rc = be->new (be, &p, bytes, err);
    *out = p;
    return rc;
}

/* `staging` holds the largest tensor: the one copy beside the backend's. Memory that *out has from
 * another layer is used again. */
static int load_tensor(float **out, const char *name, size_t count, float *staging,
                       const struct qt_weights *w, struct qt_backend *be, struct qt_err *err)
{
    int rc = QT_OK;
    if (!*out)
        QT_TRY(block_floats(out, be, count, 1, err));
    QT_TRY(w->load(w->ctx, name, staging, err));
    QT_TRY(be->upload(be, *out, staging, count * sizeof **out, err));
done:
    return rc;
}

static int load_part(struct loaded *out, const struct part *part, float *staging,
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

static void free_loaded(struct loaded *l, struct qt_backend *be)
{
    be->free(be, l->weight);
    be->free(be, l->bias);
}

/* ---- block ---------------------------------------------------------------------------------- */

int qt_block_open(struct qt_block **out, const struct qt_model *model, size_t layer,
                  const struct qt_weights *w, struct qt_backend *be, struct qt_err *err)
{
    struct qt_block *b;
    *out = NULL;
    int rc = qt_array_new(&b, 1, sizeof *b, err);
    if (rc < 0)
        return rc;
    *b = (struct qt_block){.model = model, .be = be};
    rc = qt_array_new(&b->parts, layer_parts(&model->cfg), sizeof *b->parts, err);
    if (rc == QT_OK)
        rc = qt_block_load(b, layer, w, err);
    if (rc < 0)
        qt_block_close(b);
    else
        *out = b;
    return rc;
}

static const struct qt_linear *linear_of(const struct layer *l, size_t part)
{
    return &l->linears[l->parts[part].index];
}

static bool is_linear_of(const struct layer *l, size_t part, int input)
{
    return l->parts[part].linear && linear_of(l, part)->input == input;
}

/* input: of the linears to load; -1: all parts. */
static int load_parts(struct qt_block *b, int input, const struct qt_weights *w, struct qt_err *err)
{
    const struct layer *l = b->layer;
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
            QT_TRY(load_part(&b->parts[i], &l->parts[i], staging, w, b->be, err));
done:
    qt_free(staging);
    return rc;
}

/* The parts of all layers have the same shapes (role_shape). */
int qt_block_load(struct qt_block *b, size_t layer, const struct qt_weights *w, struct qt_err *err)
{
    b->layer = &b->model->layers[layer];
    b->runtime = w->runtime;
    b->window = b->model->cfg.windows[layer];
    return load_parts(b, -1, w, err);
}

int qt_block_load_linears(struct qt_block *b, int input, const struct qt_weights *w,
                          struct qt_err *err)
{
    return load_parts(b, input, w, err);
}

static void free_work(struct qt_block *b)
{
    struct qt_backend *be = b->be;
    be->free(be, b->x);
    be->free(be, b->wide);
    be->free(be, b->staged);
    be->free(be, b->cos);
    be->free(be, b->sin);
    b->x = b->wide = b->staged = b->cos = b->sin = NULL;
    experts_free(b);
    b->rows = b->seqlen = 0;
}

void qt_block_close(struct qt_block *block)
{
    if (!block)
        return;
    free_work(block);
    block->be->free(block->be, block->grad.memory);
    for (size_t i = 0; block->parts && i < layer_parts(&block->model->cfg); i++)
        free_loaded(&block->parts[i], block->be);
    qt_free(block->parts);
    qt_free(block);
}

/* cos, sin [seqlen][head_dim/2] of position * inv_freq. The angle is rounded to float first, as in
 * the reference implementation. */
static int make_rope(struct qt_block *b, size_t seqlen, struct qt_err *err)
{
    const struct config *cfg = &b->model->cfg;
    const float *inv_freq = b->local ? cfg->local_inv_freq : cfg->inv_freq;
    size_t half = cfg->info.head_dim / 2, bytes;
    float *cos_host = NULL, *sin_host = NULL;
    int rc = QT_OK;
    QT_TRY(block_floats(&b->cos, b->be, seqlen, half, err));
    QT_TRY(block_floats(&b->sin, b->be, seqlen, half, err));
    bytes = seqlen * half * sizeof(float); /* fits: new_floats has checked it */
    QT_TRY(qt_array_new(&cos_host, seqlen * half, sizeof *cos_host, err));
    QT_TRY(qt_array_new(&sin_host, seqlen * half, sizeof *sin_host, err));
    for (size_t pos = 0; pos < seqlen; pos++)
        for (size_t i = 0; i < half; i++) {
            float angle = (float)pos * inv_freq[i];
            cos_host[pos * half + i] = (float)cos((double)angle);
            sin_host[pos * half + i] = (float)sin((double)angle);
        }
    QT_TRY(b->be->upload(b->be, b->cos, cos_host, bytes, err));
    QT_TRY(b->be->upload(b->be, b->sin, sin_host, bytes, err));
done:
    qt_free(cos_host);
    qt_free(sin_host);
    return rc;
}

static size_t widest_input(const struct layer *l)
{
    size_t widest = 0;
    for (size_t i = 0; i < l->linear_count; i++)
        widest = l->linears[i].k > widest ? l->linears[i].k : widest;
    return widest;
}

int block_prepare(struct qt_block *b, size_t rows, size_t seqlen, struct qt_err *err)
{
    const struct config *cfg = &b->model->cfg;
    const struct qt_model_info *info = &cfg->info;
    size_t attention = 2 * (info->heads + info->kv_heads) * info->head_dim;
    size_t mlp = (b->layer->parts[ROLE_GATE].weight ? 2 : 1) * cfg->intermediate;
    const bool local = cfg->local_inv_freq && b->window;
    int rc = QT_OK;
    if (rows <= b->rows && seqlen == b->seqlen && local == b->local &&
        (!b->runtime.input || b->staged))
        return QT_OK;
    free_work(b);
    b->local = local;
    QT_TRY(block_floats(&b->x, b->be, rows, info->hidden, err));
    QT_TRY(block_floats(&b->wide, b->be, rows, attention > mlp ? attention : mlp, err));
    if (b->runtime.input)
        QT_TRY(block_floats(&b->staged, b->be, rows, widest_input(b->layer), err));
    if (info->experts)
        QT_TRY(experts_prepare(b, rows, err));
    if (cfg->arch->rope)
        QT_TRY(make_rope(b, seqlen, err));
    b->rows = rows;
    b->seqlen = seqlen;
done:
    return rc;
}

int block_linear(const struct block_run *r, size_t part, float *y, const float *x,
                 struct qt_err *err)
{
    const struct part *p = &r->b->layer->parts[part];
    const struct loaded *l = &r->b->parts[part];
    return r->b->be->linear(r->b->be, y, x, l->weight, l->bias, r->m, p->n, p->k, err);
}

int block_norm(const struct block_run *r, enum role role, float *y, const float *x, size_t m,
               struct qt_err *err)
{
    const struct config *cfg = &r->b->model->cfg;
    const struct loaded *l = &r->b->parts[role];
    if (!l->weight)
        return QT_OK;
    return r->b->be->norm(r->b->be, y, x, l->weight, l->bias, cfg->arch->norm, cfg->eps, m,
                          r->b->layer->parts[role].n, err);
}

/* The input of the linear `part` and of those beside it, x[m][k], is complete: through the runtime,
 * past the tap. *stop: that was all. */
static int run_input(const float **x, bool *stop, const struct block_run *r, size_t part,
                     struct qt_err *err)
{
    struct qt_block *b = r->b;
    const struct qt_linear *linear = linear_of(b->layer, part);
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

/* The input of a sublayer: the hidden states, normed in front unless the norm comes behind. */
static int sublayer_input(const float **out, const struct block_run *r, enum role norm,
                          struct qt_err *err)
{
    *out = r->b->model->cfg.norm_after ? r->hidden : r->b->x;
    return *out == r->hidden ? QT_OK : block_norm(r, norm, r->b->x, r->hidden, r->m, err);
}

/* hidden += x, the output of a sublayer. */
static int sublayer_output(const struct block_run *r, enum role norm_in, enum role norm_out,
                           struct qt_err *err)
{
    const struct config *cfg = &r->b->model->cfg;
    struct qt_backend *be = r->b->be;
    int rc = QT_OK;
    QT_TRY(block_norm(r, norm_out, r->b->x, r->b->x, r->m, err));
    QT_TRY(be->add(be, r->hidden, r->b->x, r->m * cfg->info.hidden, err));
    if (cfg->norm_after)
        QT_TRY(block_norm(r, norm_in, r->hidden, r->hidden, r->m, err));
done:
    return rc;
}

/* Norms and rotates queries or keys, [m][heads][head_dim]. */
int block_heads(const struct block_run *r, enum role norm, float *x, size_t heads,
                struct qt_err *err)
{
    const struct qt_block *b = r->b;
    size_t dim = b->model->cfg.info.head_dim;
    int rc = QT_OK;
    QT_TRY(block_norm(r, norm, x, x, r->m * heads, err));
    if (b->cos)
        QT_TRY(b->be->rope(b->be, x, b->cos, b->sin, r->m, r->seqlen, heads, dim, dim, err));
done:
    return rc;
}

struct qt_attention block_attention(const struct block_run *r)
{
    const struct config *cfg = &r->b->model->cfg;
    const struct qt_model_info *info = &cfg->info;
    return (struct qt_attention){r->seqlen,       info->heads,       info->kv_heads, info->head_dim,
                                 cfg->attn_scale, cfg->attn_softcap, r->b->window};
}

static int run_attention(const struct block_run *r, struct qt_err *err)
{
    struct qt_block *b = r->b;
    const struct config *cfg = &b->model->cfg;
    const struct qt_model_info *info = &cfg->info;
    struct qt_attention a = block_attention(r);
    size_t width = info->heads * info->head_dim, kv_width = info->kv_heads * info->head_dim;
    float *q = b->wide, *k = q + r->m * width, *v = k + r->m * kv_width, *y = v + r->m * kv_width;
    const float *x, *attended = y;
    bool stop;
    int rc = QT_OK;
    QT_TRY(sublayer_input(&x, r, ROLE_ATTN_IN, err));
    QT_TRY(run_input(&x, &stop, r, ROLE_Q, err));
    if (stop)
        goto done;
    QT_TRY(block_linear(r, ROLE_Q, q, x, err));
    QT_TRY(block_linear(r, ROLE_K, k, x, err));
    QT_TRY(block_linear(r, ROLE_V, v, x, err));
    QT_TRY(block_heads(r, ROLE_Q_NORM, q, info->heads, err));
    QT_TRY(block_heads(r, ROLE_K_NORM, k, info->kv_heads, err));
    if (b->runtime.cache)
        QT_TRY(b->runtime.cache(b->runtime.cache_ctx, b->be, k, v, linear_of(b->layer, ROLE_K),
                                r->m, &a, err));
    QT_TRY(b->be->attention(b->be, y, q, k, v, r->m, &a, err));
    QT_TRY(run_input(&attended, &stop, r, ROLE_O, err));
    if (stop)
        goto done;
    QT_TRY(block_linear(r, ROLE_O, b->x, attended, err));
    QT_TRY(sublayer_output(r, ROLE_ATTN_IN, ROLE_ATTN_OUT, err));
done:
    return rc;
}

int block_mlp(bool *stop, float *y, const float *x, const struct block_run *r, size_t expert,
              struct qt_err *err)
{
    struct qt_block *b = r->b;
    const struct config *cfg = &b->model->cfg;
    bool gated = b->parts[ROLE_GATE].weight != NULL;
    size_t count = r->m * cfg->intermediate;
    float *up = b->wide, *gate = gated ? up + count : up; /* ungated: act(up) */
    const float *product = gate;
    int rc = QT_OK;
    QT_TRY(run_input(&x, stop, r, part_at(expert, ROLE_UP), err));
    if (*stop)
        goto done;
    if (gated)
        QT_TRY(block_linear(r, part_at(expert, ROLE_GATE), gate, x, err));
    QT_TRY(block_linear(r, part_at(expert, ROLE_UP), up, x, err));
    QT_TRY(b->be->activate(b->be, gate, gate, gated ? up : NULL, cfg->act, count, err));
    QT_TRY(run_input(&product, stop, r, part_at(expert, ROLE_DOWN), err));
    if (!*stop)
        QT_TRY(block_linear(r, part_at(expert, ROLE_DOWN), y, product, err));
done:
    return rc;
}

static int run_mlp(const struct block_run *r, struct qt_err *err)
{
    struct qt_block *b = r->b;
    const float *x;
    bool stop;
    int rc = QT_OK;
    QT_TRY(sublayer_input(&x, r, ROLE_MLP_IN, err));
    QT_TRY(b->model->cfg.info.experts ? experts_run(&stop, b->x, x, r, err)
                                      : block_mlp(&stop, b->x, x, r, 0, err));
    if (!stop)
        QT_TRY(sublayer_output(r, ROLE_MLP_IN, ROLE_MLP_OUT, err));
done:
    return rc;
}

int block_check_length(const struct qt_model *model, size_t m, size_t seqlen, struct qt_err *err)
{
    if (seqlen == 0 || m % seqlen)
        return qt_fail(err, QT_E_INTERNAL, NULL, NULL, "%zu tokens in sequences of %zu", m, seqlen);
    if (seqlen > model->cfg.info.max_positions)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "sequence length %zu, the model has %zu positions", seqlen,
                       model->cfg.info.max_positions);
    return QT_OK;
}

typedef int sublayer(const struct block_run *r, struct qt_err *err);

/* sublayers[2]: NULL for one that is left out. all: how to run, for m tokens, which go in chunks.
 */
static int run_sublayers(sublayer *const sublayers[2], const struct block_run *all,
                         struct qt_err *err)
{
    const size_t width = all->b->model->cfg.info.hidden, m = all->m;
    size_t rows;
    int rc = QT_OK;
    QT_TRY(block_check_length(all->b->model, m, all->seqlen, err));
    rows = block_chunk(m, all->seqlen);
    QT_TRY(block_prepare(all->b, rows, all->seqlen, err));
    for (size_t at = 0; at < m; at += rows) {
        struct block_run r = *all;
        r.hidden += at * width;
        r.m = qt_min_size(rows, m - at);
        r.at = at;
        for (int i = 0; i < 2; i++)
            if (sublayers[i])
                QT_TRY(sublayers[i](&r, err));
    }
done:
    return rc;
}

int qt_block_run(struct qt_block *block, float *hidden, size_t m, size_t seqlen,
                 const struct qt_tap *tap, struct qt_err *err)
{
    return run_sublayers(
        (sublayer *const[]){run_attention, run_mlp},
        &(struct block_run){
            .b = block, .hidden = hidden, .m = m, .seqlen = seqlen, .tap = tap, .stop = -1},
        err);
}

static sublayer *sublayer_of(int input)
{
    return input < 2 ? run_attention : run_mlp;
}

int qt_block_run_sublayer(struct qt_block *block, int input, float *hidden, size_t m, size_t seqlen,
                          const struct qt_tap *tap, struct qt_err *err)
{
    return run_sublayers(
        (sublayer *const[]){sublayer_of(input), NULL},
        &(struct block_run){
            .b = block, .hidden = hidden, .m = m, .seqlen = seqlen, .tap = tap, .stop = -1},
        err);
}

int qt_block_run_to(struct qt_block *block, int input, float *hidden, size_t m, size_t seqlen,
                    const struct qt_tokens *tokens, const struct qt_tap *tap, struct qt_err *err)
{
    return run_sublayers((sublayer *const[]){sublayer_of(input), NULL},
                         &(struct block_run){.b = block,
                                             .hidden = hidden,
                                             .m = m,
                                             .seqlen = seqlen,
                                             .tap = tap,
                                             .stop = input,
                                             .tokens = tokens},
                         err);
}

static int route(const struct block_run *r, struct qt_err *err)
{
    const float *x;
    int rc = sublayer_input(&x, r, ROLE_MLP_IN, err);
    return rc < 0 ? rc : experts_route(r->share + r->at * r->b->model->cfg.info.experts, r, x, err);
}

int qt_block_route(float *share, struct qt_block *block, float *hidden, size_t m, size_t seqlen,
                   struct qt_err *err)
{
    return run_sublayers(
        (sublayer *const[]){route, NULL},
        &(struct block_run){
            .b = block, .hidden = hidden, .m = m, .seqlen = seqlen, .stop = -1, .share = share},
        err);
}

/* ---- embedding and head --------------------------------------------------------------------- */

/* A head beside a tied embedding must be the same: it would be left out without a word. */
static int check_tied_head(const struct qt_model *m, float *staging, const struct qt_weights *w,
                           struct qt_err *err)
{
    static const char head[] = "lm_head.weight";
    const size_t count = m->cfg.info.vocab * m->cfg.embed_dim;
    size_t shape[QT_MAX_DIMS];
    float *embed = NULL;
    bool same = false;
    int ndim, rc = QT_OK;
    if (!m->cfg.tied || !w->shape(w->ctx, head, &ndim, shape))
        return QT_OK;
    if (ndim == 2 && shape[0] == m->cfg.info.vocab && shape[1] == m->cfg.embed_dim) {
        QT_TRY(qt_array_new(&embed, count, sizeof *embed, err));
        QT_TRY(w->load(w->ctx, m->embed.weight, embed, err));
        QT_TRY(w->load(w->ctx, head, staging, err));
        same = memcmp(embed, staging, count * sizeof *embed) == 0;
    }
    if (!same)
        rc = qt_fail(err, QT_E_INPUT, w->dir, head,
                     "differs from the embedding, to which 'tie_word_embeddings' in config.json "
                     "ties it");
done:
    qt_free(embed);
    return rc;
}

static int load_ends(struct qt_ends *e, float *staging, const struct qt_weights *w,
                     struct qt_err *err)
{
    const struct qt_model *m = e->model;
    struct qt_backend *be = e->be;
    int rc = QT_OK;
    QT_TRY(check_tied_head(m, staging, w, err));
    QT_TRY(load_part(&e->embed, &m->embed, staging, w, be, err));
    QT_TRY(load_part(&e->positions, &m->positions, staging, w, be, err));
    QT_TRY(load_part(&e->project_in, &m->project_in, staging, w, be, err));
    QT_TRY(load_part(&e->project_out, &m->project_out, staging, w, be, err));
    QT_TRY(load_part(&e->final_norm, &m->final_norm, staging, w, be, err));
    QT_TRY(load_part(&e->head, &m->head, staging, w, be, err));
    QT_TRY(block_floats(&e->normed, be, ENDS_TOKENS, m->cfg.info.hidden, err));
    QT_TRY(block_floats(&e->narrow, be, ENDS_TOKENS, m->cfg.embed_dim, err));
    QT_TRY(qt_array_new(&e->gathered, ENDS_TOKENS * m->cfg.embed_dim, sizeof *e->gathered, err));
done:
    return rc;
}

int qt_ends_open(struct qt_ends **out, const struct qt_model *model, const struct qt_weights *w,
                 struct qt_backend *be, struct qt_err *err)
{
    const struct part *parts[] = {&model->embed, &model->positions, &model->project_in};
    struct qt_ends *e = NULL;
    float *staging = NULL;
    size_t largest = 0;
    int rc = QT_OK;
    *out = NULL;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) /* the others are no larger */
        if (part_count(parts[i]) > largest)
            largest = part_count(parts[i]);
    QT_TRY(qt_array_new(&staging, largest, sizeof *staging, err));
    QT_TRY(qt_array_new(&e, 1, sizeof *e, err));
    *e = (struct qt_ends){.model = model, .be = be};
    QT_TRY(load_ends(e, staging, w, err));
    *out = e;
done:
    qt_free(staging);
    if (rc < 0)
        qt_ends_close(e);
    return rc;
}

void qt_ends_close(struct qt_ends *ends)
{
    if (!ends)
        return;
    struct qt_backend *be = ends->be;
    free_loaded(&ends->embed, be);
    free_loaded(&ends->positions, be);
    free_loaded(&ends->project_in, be);
    free_loaded(&ends->project_out, be);
    free_loaded(&ends->final_norm, be);
    free_loaded(&ends->head, be);
    be->free(be, ends->normed);
    be->free(be, ends->narrow);
    be->free(be, ends->logits);
    be->free(be, ends->ref_logits);
    qt_free(ends->gathered);
    qt_free(ends);
}

int qt_ends_set_norm(struct qt_ends *ends, const float *w, struct qt_err *err)
{
    return ends->be->upload(ends->be, ends->final_norm.weight, w,
                            ends->model->final_norm.n * sizeof *w, err);
}

/* Rows of the table -> hidden[m][hidden], m <= ENDS_TOKENS. The table is only in backend memory (a
 * tied head needs it there), so rows come by download: on the CPU that is a copy. */
static int embed_chunk(struct qt_ends *e, float *hidden, const uint32_t *ids, size_t m,
                       struct qt_err *err)
{
    const struct config *cfg = &e->model->cfg;
    struct qt_backend *be = e->be;
    size_t width = cfg->embed_dim, row = width * sizeof(float), n = cfg->info.hidden;
    bool project = e->project_in.weight != NULL;
    int rc = QT_OK;
    for (size_t i = 0; i < m; i++) {
        if (ids[i] >= cfg->info.vocab)
            return qt_fail(err, QT_E_INPUT, NULL, NULL, "token %u, vocabulary is %zu",
                           (unsigned)ids[i], cfg->info.vocab);
        QT_TRY(
            be->download(be, e->gathered + i * width, e->embed.weight + ids[i] * width, row, err));
    }
    QT_TRY(be->upload(be, project ? e->narrow : hidden, e->gathered, m * row, err));
    if (project)
        QT_TRY(be->linear(be, hidden, e->narrow, e->project_in.weight, NULL, m, n, width, err));
    if (cfg->embed_scale != 1.0f)
        QT_TRY(be->scale(be, hidden, cfg->embed_scale, m * n, err));
done:
    return rc;
}

int qt_ends_embed(struct qt_ends *ends, float *hidden, const uint32_t *ids, size_t m, size_t seqlen,
                  struct qt_err *err)
{
    const struct config *cfg = &ends->model->cfg;
    struct qt_backend *be = ends->be;
    size_t n = cfg->info.hidden;
    int rc = QT_OK;
    QT_TRY(block_check_length(ends->model, m, seqlen, err));
    for (size_t at = 0; at < m; at += ENDS_TOKENS)
        QT_TRY(embed_chunk(ends, hidden + at * n, ids + at, qt_min_size(ENDS_TOKENS, m - at), err));
    for (size_t at = 0; ends->positions.weight && at < m; at += seqlen)
        QT_TRY(be->add(be, hidden + at * n, ends->positions.weight + cfg->arch->position_offset * n,
                       seqlen * n, err));
done:
    return rc;
}

int qt_model_embed(float *hidden, const struct qt_model *model, const struct qt_weights *w,
                   struct qt_backend *be, const uint32_t *ids, size_t m, size_t seqlen,
                   struct qt_err *err)
{
    struct qt_ends *ends = NULL;
    int rc;
    QT_TRY(qt_ends_open(&ends, model, w, be, err));
    QT_TRY(qt_ends_embed(ends, hidden, ids, m, seqlen, err));
done:
    qt_ends_close(ends);
    return rc;
}

static int logits_chunk(struct qt_ends *e, float *logits, const float *hidden, size_t m,
                        struct qt_err *err)
{
    const struct config *cfg = &e->model->cfg;
    struct qt_backend *be = e->be;
    const float *x = hidden, *head = e->head.weight ? e->head.weight : e->embed.weight;
    int rc = QT_OK;
    if (e->final_norm.weight) {
        QT_TRY(be->norm(be, e->normed, x, e->final_norm.weight, e->final_norm.bias, cfg->arch->norm,
                        cfg->eps, m, cfg->info.hidden, err));
        x = e->normed;
    }
    if (e->project_out.weight) {
        QT_TRY(be->linear(be, e->narrow, x, e->project_out.weight, NULL, m, cfg->embed_dim,
                          cfg->info.hidden, err));
        x = e->narrow;
    }
    QT_TRY(be->linear(be, logits, x, head, NULL, m, cfg->info.vocab, cfg->embed_dim, err));
done:
    return rc;
}

int qt_ends_logits(struct qt_ends *ends, float *logits, const float *hidden, size_t m,
                   struct qt_err *err)
{
    const struct config *cfg = &ends->model->cfg;
    int rc = QT_OK;
    for (size_t at = 0; at < m; at += ENDS_TOKENS)
        QT_TRY(logits_chunk(ends, logits + at * cfg->info.vocab, hidden + at * cfg->info.hidden,
                            qt_min_size(ENDS_TOKENS, m - at), err));
done:
    return rc;
}
