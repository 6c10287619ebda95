/* The parts of a model outside its decoder layers: embedding, final norm and head. */
#include "model/graph/layer.h"

/* Adds the token type 0, which all tokens have, to the positions. */
static int add_type(struct qt_embed_head *e, struct staging *staging, const struct qt_weights *w,
                    struct qt_err *err)
{
    const struct qt_model *m = e->model;
    const size_t n = m->cfg.info.hidden;
    struct loaded types = {0};
    int rc;
    QT_TRY(layer_load_part(&types, &m->types, staging, w, e->be, err));
    for (size_t i = 0; types.weight && i < m->positions.n; i++)
        QT_TRY(e->be->add(e->be, e->positions.weight + i * n, types.weight, n, err));
done:
    layer_free_part(&types, e->be);
    return rc;
}

/* A head that is stored beside a tied embedding is not used, so it must be equal to it. */
static int check_tied_head(const struct qt_model *m, struct staging *staging,
                           const struct qt_weights *w, struct qt_err *err)
{
    const size_t count = m->cfg.info.vocab * m->cfg.embed_dim;
    size_t shape[QT_MAX_DIMS];
    const char *head = m->tied_head;
    float *embed = NULL;
    bool same = false;
    int ndim, rc = QT_OK;
    if (!head || !w->shape(w->ctx, head, &ndim, shape))
        return QT_OK;
    if (ndim == 2 && shape[0] == m->cfg.info.vocab && shape[1] == m->cfg.embed_dim) {
        QT_TRY(qt_array_new(&embed, count, sizeof *embed, err));
        QT_TRY(w->load(w->ctx, m->embed.weight, embed, err));
        QT_TRY(layer_staging(staging, count, err));
        QT_TRY(w->load(w->ctx, head, staging->p, err));
        same = memcmp(embed, staging->p, count * sizeof *embed) == 0;
    }
    if (!same)
        rc = qt_fail(err, QT_E_INPUT, w->dir, head,
                     "differs from the embedding, but 'tie_word_embeddings' in config.json "
                     "requires them to be equal");
done:
    qt_free(embed);
    return rc;
}

static int load_outer_parts(struct qt_embed_head *e, struct staging *staging,
                            const struct qt_weights *w, struct qt_err *err)
{
    const struct qt_model *m = e->model;
    struct qt_backend *be = e->be;
    int rc = QT_OK;
    QT_TRY(check_tied_head(m, staging, w, err));
    QT_TRY(layer_load_part(&e->embed, &m->embed, staging, w, be, err));
    QT_TRY(layer_load_part(&e->embed_norm, &m->embed_norm, staging, w, be, err));
    QT_TRY(layer_load_part(&e->positions, &m->positions, staging, w, be, err));
    QT_TRY(add_type(e, staging, w, err));
    QT_TRY(layer_load_part(&e->transform, &m->transform, staging, w, be, err));
    QT_TRY(layer_load_part(&e->transform_norm, &m->transform_norm, staging, w, be, err));
    QT_TRY(layer_load_part(&e->project_in, &m->project_in, staging, w, be, err));
    QT_TRY(layer_load_part(&e->project_out, &m->project_out, staging, w, be, err));
    QT_TRY(layer_load_part(&e->final_norm, &m->final_norm, staging, w, be, err));
    QT_TRY(layer_load_part(&e->head, &m->head, staging, w, be, err));
    QT_TRY(layer_load_part(&e->layer_embed, &m->layer_embed, staging, w, be, err));
    QT_TRY(layer_load_part(&e->layer_project, &m->layer_project, staging, w, be, err));
    QT_TRY(layer_load_part(&e->layer_norm, &m->layer_norm, staging, w, be, err));
    for (size_t i = 0; m->altup_in && i + 1 < m->cfg.altup; i++) {
        QT_TRY(layer_load_part(&e->altup_in[i], &m->altup_in[i], staging, w, be, err));
        QT_TRY(layer_load_part(&e->altup_out[i], &m->altup_out[i], staging, w, be, err));
    }
    if (m->altup_in)
        QT_TRY(qt_backend_floats(&e->altup_work, be, 2 * e->rows, m->cfg.info.hidden, err));
    if (m->layer_embed.weight)
        QT_TRY(qt_backend_floats(&e->per_layer, be, 2 * HEAD_TOKENS, m->layer_embed.k, err));
    QT_TRY(qt_backend_floats(&e->normed, be, e->rows, m->cfg.info.hidden, err));
    QT_TRY(qt_backend_floats(&e->projected, be, e->rows, m->cfg.embed_dim, err));
done:
    return rc;
}

size_t qt_model_outer_floats(const struct qt_model *m)
{
    const struct part *parts[] = {&m->embed, &m->positions,   &m->project_in,    &m->project_out,
                                  &m->head,  &m->layer_embed, &m->layer_project, &m->transform};
    size_t sum = 0, largest = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i]->weight) {
            sum += part_count(parts[i]);
            largest = qt_max_size(largest, part_count(parts[i]));
        }
    for (size_t i = 0; m->altup_in && i + 1 < m->cfg.altup; i++)
        sum += part_count(&m->altup_in[i]) + part_count(&m->altup_out[i]);
    return sum + largest + 2 * HEAD_TOKENS * m->layer_embed.k;
}

int qt_embed_head_open(struct qt_embed_head **out, const struct qt_model *model,
                       const struct qt_weights *w, struct qt_backend *be, struct qt_err *err)
{
    struct qt_embed_head *e = NULL;
    struct staging staging = {0};
    int rc = QT_OK;
    *out = NULL;
    QT_TRY(qt_array_new(&e, 1, sizeof *e, err));
    *e = (struct qt_embed_head){
        .model = model, .be = be, .rows = be->host ? HEAD_TOKENS : HEAD_TOKENS_APART};
    if (model->altup_in) {
        QT_TRY(qt_array_new(&e->altup_in, model->cfg.altup, sizeof *e->altup_in, err));
        QT_TRY(qt_array_new(&e->altup_out, model->cfg.altup, sizeof *e->altup_out, err));
    }
    QT_TRY(load_outer_parts(e, &staging, w, err));
    *out = e;
done:
    qt_free(staging.p);
    if (rc < 0)
        qt_embed_head_close(e);
    return rc;
}

void qt_embed_head_close(struct qt_embed_head *e)
{
    if (!e)
        return;
    struct qt_backend *be = e->be;
    layer_free_part(&e->embed, be);
    layer_free_part(&e->embed_norm, be);
    layer_free_part(&e->positions, be);
    layer_free_part(&e->project_in, be);
    layer_free_part(&e->project_out, be);
    layer_free_part(&e->final_norm, be);
    layer_free_part(&e->head, be);
    layer_free_part(&e->transform, be);
    layer_free_part(&e->transform_norm, be);
    layer_free_part(&e->layer_embed, be);
    layer_free_part(&e->layer_project, be);
    layer_free_part(&e->layer_norm, be);
    for (size_t i = 0; e->altup_out && i < e->model->cfg.altup; i++) {
        layer_free_part(&e->altup_in[i], be);
        layer_free_part(&e->altup_out[i], be);
    }
    qt_free(e->altup_in);
    qt_free(e->altup_out);
    be->free(be, e->altup_work);
    be->free(be, e->per_layer);
    be->free(be, e->normed);
    be->free(be, e->projected);
    be->free(be, e->logits);
    be->free(be, e->ref_logits);
    qt_free(e);
}

int qt_head_set_norm(struct qt_embed_head *e, const float *w, struct qt_err *err)
{
    const struct part *norm = &e->model->final_norm;
    float *sum = NULL;
    int rc = QT_OK;
    QT_TRY(qt_array_new(&sum, norm->n, sizeof *sum, err));
    for (size_t i = 0; i < norm->n; i++)
        sum[i] = norm->plus_1 ? w[i] + 1 : w[i];
    QT_TRY(e->be->upload(e->be, e->final_norm.weight, sum, norm->n * sizeof *sum, err));
done:
    qt_free(sum);
    return rc;
}

/* state[m][info.state] = embedding of ids[m], without positions; m <= HEAD_TOKENS. */
static int embed_chunk(struct qt_embed_head *e, float *state, const uint32_t *ids, size_t m,
                       struct qt_err *err)
{
    const struct config *cfg = &e->model->cfg;
    struct qt_backend *be = e->be;
    size_t width = cfg->embed_dim, n = cfg->info.hidden;
    bool project = e->project_in.weight != NULL;
    float *hidden = cfg->info.state > n ? e->normed : state;
    int rc = QT_OK;
    for (size_t i = 0; i < m; i++)
        if (ids[i] >= cfg->info.vocab)
            return qt_fail(err, QT_E_INPUT, NULL, NULL,
                           "token id %u is outside the vocabulary of %zu tokens", (unsigned)ids[i],
                           cfg->info.vocab);
    QT_TRY(be->gather_rows(be, project ? e->projected : hidden, e->embed.weight, ids, NULL, m,
                           width, err));
    if (project)
        QT_TRY(be->linear(be, hidden, e->projected, e->project_in.weight, NULL, m, n, width, err));
    if (cfg->embed_scale != 1.0f)
        QT_TRY(be->scale(be, hidden, cfg->embed_scale, m * n, err));
    if (hidden != state)
        QT_TRY(be->copy_columns(be, state, cfg->info.state, hidden, n, n, m, err));
    if (cfg->altup)
        QT_TRY(altup_embed(e, state, hidden, m, err));
    if (cfg->per_layer)
        QT_TRY(per_layer_embed(e, state, hidden, ids, m, err));
done:
    return rc;
}

int embed_tokens_at(struct qt_embed_head *e, float *hidden, const uint32_t *ids, size_t m,
                    size_t seqlen, size_t past, struct qt_err *err)
{
    const struct config *cfg = &e->model->cfg;
    struct qt_backend *be = e->be;
    size_t n = cfg->info.hidden;
    int rc = QT_OK;
    QT_TRY(layer_check_length(e->model, m, seqlen, err));
    for (size_t at = 0; at < m; at += HEAD_TOKENS)
        QT_TRY(embed_chunk(e, hidden + at * cfg->info.state, ids + at,
                           qt_min_size(HEAD_TOKENS, m - at), err));
    for (size_t at = 0; e->positions.weight && at < m; at += seqlen)
        QT_TRY(be->add(be, hidden + at * n,
                       e->positions.weight + (cfg->arch->position_offset + past) * n, seqlen * n,
                       err));
    if (e->embed_norm.weight)
        QT_TRY(be->norm(be, hidden, hidden, e->embed_norm.weight, e->embed_norm.bias,
                        cfg->arch->norm, cfg->eps, m, n, err));
done:
    return rc;
}

int qt_embed_tokens(struct qt_embed_head *e, float *hidden, const uint32_t *ids, size_t m,
                    size_t seqlen, struct qt_err *err)
{
    return embed_tokens_at(e, hidden, ids, m, seqlen, 0, err);
}

int qt_model_embed(float *hidden, const struct qt_model *model, const struct qt_weights *w,
                   struct qt_backend *be, const uint32_t *ids, size_t m, size_t seqlen,
                   struct qt_err *err)
{
    struct qt_embed_head *e = NULL;
    int rc;
    QT_TRY(qt_embed_head_open(&e, model, w, be, err));
    QT_TRY(qt_embed_tokens(e, hidden, ids, m, seqlen, err));
done:
    qt_embed_head_close(e);
    return rc;
}

/* *out = the final hidden states of hidden[m][state], in e->normed or as they are; m <= e->rows. */
static int final_states(struct qt_embed_head *e, const float **out, const float *hidden, size_t m,
                        struct qt_err *err)
{
    const struct config *cfg = &e->model->cfg;
    struct qt_backend *be = e->be;
    const size_t n = cfg->info.hidden;
    const bool apart = cfg->info.state > n;
    int rc = QT_OK;
    *out = apart || e->final_norm.weight ? e->normed : hidden;
    if (apart)
        QT_TRY(cfg->altup ? altup_join(e, e->normed, hidden, m, err)
                          : be->copy_columns(be, e->normed, n, hidden, cfg->info.state, n, m, err));
    if (e->final_norm.weight)
        QT_TRY(be->norm(be, e->normed, apart ? e->normed : hidden, e->final_norm.weight,
                        e->final_norm.bias, cfg->arch->norm, cfg->eps, m, n, err));
done:
    return rc;
}

int qt_head_hidden(struct qt_embed_head *e, float *out, const float *hidden, size_t m,
                   struct qt_err *err)
{
    const struct qt_model_info *info = &e->model->cfg.info;
    const float *x;
    int rc = QT_OK;
    for (size_t at = 0, rows; at < m; at += rows) {
        rows = qt_min_size(e->rows, m - at);
        QT_TRY(final_states(e, &x, hidden + at * info->state, rows, err));
        QT_TRY(
            e->be->copy(e->be, out + at * info->hidden, x, rows * info->hidden * sizeof *out, err));
    }
done:
    return rc;
}

static int logits_chunk(struct qt_embed_head *e, float *logits, const float *hidden, size_t m,
                        struct qt_err *err)
{
    const struct config *cfg = &e->model->cfg;
    struct qt_backend *be = e->be;
    const float *x, *head = e->head.weight ? e->head.weight : e->embed.weight;
    const size_t n = cfg->info.hidden;
    int rc;
    QT_TRY(final_states(e, &x, hidden, m, err));
    if (e->transform.weight) {
        QT_TRY(
            be->linear(be, e->projected, x, e->transform.weight, e->transform.bias, m, n, n, err));
        QT_TRY(be->activate(be, e->projected, e->projected, NULL, cfg->transform_act, m * n, err));
        QT_TRY(be->norm(be, e->projected, e->projected, e->transform_norm.weight,
                        e->transform_norm.bias, cfg->arch->norm, cfg->eps, m, n, err));
        x = e->projected;
    }
    if (e->project_out.weight) {
        QT_TRY(be->linear(be, e->projected, x, e->project_out.weight, NULL, m, cfg->embed_dim,
                          cfg->info.hidden, err));
        x = e->projected;
    }
    QT_TRY(be->linear(be, logits, x, head, e->head.bias, m, cfg->info.vocab, cfg->embed_dim, err));
    if (cfg->logit_scale != 1)
        QT_TRY(be->scale(be, logits, cfg->logit_scale, m * cfg->info.vocab, err));
done:
    return rc;
}

int qt_head_logits(struct qt_embed_head *e, float *logits, const float *hidden, size_t m,
                   struct qt_err *err)
{
    const struct config *cfg = &e->model->cfg;
    int rc = QT_OK;
    if (cfg->info.predicts == QT_PREDICTS_NOTHING)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "the checkpoint has no masked-language-model head (%s)",
                       cfg->arch->transform);
    for (size_t at = 0; at < m; at += e->rows)
        QT_TRY(logits_chunk(e, logits + at * cfg->info.vocab, hidden + at * cfg->info.state,
                            qt_min_size(e->rows, m - at), err));
done:
    return rc;
}
