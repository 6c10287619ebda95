/*
 * Gemma 3n: alternating updates (AltUp, arXiv 2301.13310) and learned augmented residual layers
 * (LAuReL, arXiv 2411.07501).
 *
 * A token has n = cfg.altup hidden states, of which a decoder layer runs on the first. Its state
 * begins with them; behind them is the prediction of the first, between the sublayers of a layer:
 *
 *   [first | others: n - 1 | prediction of the first | inputs of single layers | keys and values]
 *
 * In front of the mixer, prediction i = state i + sum over j of p[i][j] state j. The layer computes
 * an update of prediction 0; behind the MLP, state i = prediction i + (1 + c[i]) (update -
 * prediction 0). p and c are linear in t, where x is state 0 or the update:
 *
 *   t = tanh(ALTUP_ROUTER ALTUP_NORM(x) / hidden),   p = ALTUP_PREDICT t,   c = ALTUP_CORRECT t
 *
 * The third sublayer (per_layer.c) reads state 0 times ALTUP_SCALE, and its output is added to the
 * other states. LAuReL adds to the output of the mixer, for its normalized input x, x +
 * LAUREL_NORM(LAUREL_RIGHT LAUREL_LEFT x); this sum is divided by sqrt(2).
 */
#include "model/graph/layer.h"

#include <math.h>

/* Most hidden states of a token. */
enum { MOST = CONFIG_ALTUP };

int altup_prepare(struct qt_layer *l, size_t rows, struct qt_err *err)
{
    const struct config *cfg = &l->model->cfg;
    struct layer_altup *a = &l->work.altup;
    int rc;
    QT_TRY(qt_backend_floats(&a->states, l->be, cfg->altup * rows, cfg->info.hidden, err));
    QT_TRY(qt_backend_floats(&a->mixed, l->be, rows, cfg->info.hidden, err));
    QT_TRY(qt_backend_floats(&a->laurel, l->be, rows, cfg->info.hidden, err));
    QT_TRY(qt_backend_floats(&a->low, l->be, rows, cfg->laurel, err));
    QT_TRY(qt_backend_floats(&a->logits, l->be, rows, cfg->altup, err));
    QT_TRY(qt_array_new(&a->modes, rows, cfg->altup * sizeof *a->modes, err));
    QT_TRY(qt_array_new(&a->factors, rows, sizeof *a->factors, err));
done:
    return rc;
}

void altup_free(struct qt_layer *l)
{
    struct layer_altup *a = &l->work.altup;
    l->be->free(l->be, a->states);
    l->be->free(l->be, a->mixed);
    l->be->free(l->be, a->laurel);
    l->be->free(l->be, a->low);
    l->be->free(l->be, a->logits);
    qt_free(a->modes);
    qt_free(a->factors);
    *a = (struct layer_altup){0};
}

/* modes[m][n] = t of x[m][hidden]. */
static int compute_modes(const struct layer_run *r, const float *x, struct qt_err *err)
{
    const struct config *cfg = &r->layer->model->cfg;
    struct layer_altup *a = &r->layer->work.altup;
    struct qt_backend *be = r->layer->be;
    const size_t count = r->m * cfg->altup;
    int rc;
    QT_TRY(layer_apply_norm(r, ROLE_ALTUP_NORM, a->mixed, x, r->m, err));
    QT_TRY(be->scale(be, a->mixed, 1 / (float)cfg->info.hidden, r->m * cfg->info.hidden, err));
    QT_TRY(layer_linear(r, ROLE_ALTUP_ROUTER, a->logits, a->mixed, err));
    QT_TRY(be->download(be, a->modes, a->logits, count * sizeof *a->modes, err));
    for (size_t i = 0; i < count; i++)
        a->modes[i] = tanhf(a->modes[i]);
done:
    return rc;
}

/* y[m][hidden] += x[m][hidden] * (plus + w t), w[n]: the factor of each token. */
static int add_scaled(const struct layer_run *r, float *y, const float *x, const float *w,
                      float plus, struct qt_err *err)
{
    const struct config *cfg = &r->layer->model->cfg;
    struct layer_altup *a = &r->layer->work.altup;
    for (size_t t = 0; t < r->m; t++) {
        a->factors[t] = plus;
        for (size_t i = 0; i < cfg->altup; i++)
            a->factors[t] += w[i] * a->modes[t * cfg->altup + i];
    }
    return r->layer->be->scatter_rows(r->layer->be, y, x, NULL, a->factors, r->m, cfg->info.hidden,
                                      err);
}

/* Copies hidden state `i` of the tokens from r->state to y[m][hidden], or x[m][hidden] to it. */
static int get_state(const struct layer_run *r, float *y, size_t i, struct qt_err *err)
{
    const struct qt_model_info *info = &r->layer->model->cfg.info;
    return r->layer->be->copy_columns(r->layer->be, y, info->hidden, r->state + i * info->hidden,
                                      info->state, info->hidden, r->m, err);
}

static int set_state(const struct layer_run *r, size_t i, const float *x, struct qt_err *err)
{
    const struct qt_model_info *info = &r->layer->model->cfg.info;
    return r->layer->be->copy_columns(r->layer->be, r->state + i * info->hidden, info->state, x,
                                      info->hidden, info->hidden, r->m, err);
}

int altup_predict(const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const size_t n = l->model->cfg.altup, count = r->m * l->model->cfg.info.hidden;
    const size_t predicted = r->stop < 0 ? n : 1;
    struct layer_altup *a = &l->work.altup;
    float w[MOST * MOST * MOST];
    int rc;
    QT_TRY(compute_modes(r, r->hidden, err));
    QT_TRY(
        l->be->download(l->be, w, l->parts[ROLE_ALTUP_PREDICT].weight, n * n * n * sizeof *w, err));
    for (size_t i = 0; i < n; i++)
        QT_TRY(get_state(r, a->states + i * count, i, err));
    for (size_t i = predicted; i-- > 0;) { /* the last one stays in a->mixed */
        QT_TRY(l->be->copy(l->be, a->mixed, a->states + i * count, count * sizeof *a->mixed, err));
        for (size_t j = 0; j < n; j++)
            QT_TRY(add_scaled(r, a->mixed, a->states + j * count, w + (i * n + j) * n, 0, err));
        if (r->stop < 0)
            QT_TRY(set_state(r, i ? i : n, a->mixed, err));
    }
    QT_TRY(l->be->copy(l->be, r->hidden, a->mixed, count * sizeof *a->mixed, err));
done:
    return rc;
}

int altup_laurel(const struct layer_run *r, const float *x, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    struct layer_altup *a = &l->work.altup;
    int rc;
    QT_TRY(layer_linear(r, ROLE_LAUREL_LEFT, a->low, x, err));
    QT_TRY(layer_linear(r, ROLE_LAUREL_RIGHT, a->laurel, a->low, err));
    QT_TRY(layer_apply_norm(r, ROLE_LAUREL_NORM, a->laurel, a->laurel, r->m, err));
    QT_TRY(l->be->add(l->be, a->laurel, x, r->m * l->model->cfg.info.hidden, err));
done:
    return rc;
}

int altup_add_laurel(const struct layer_run *r, struct qt_err *err)
{
    struct qt_backend *be = r->layer->be;
    const size_t count = r->m * r->layer->model->cfg.info.hidden;
    int rc = be->add(be, r->hidden, r->layer->work.altup.laurel, count, err);
    return rc < 0 ? rc : be->scale(be, r->hidden, (float)M_SQRT1_2, count, err);
}

/* a->states = the corrected states; r->hidden is the update. */
static int correct(const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const size_t n = l->model->cfg.altup, count = r->m * l->model->cfg.info.hidden;
    struct layer_altup *a = &l->work.altup;
    float w[MOST * MOST];
    int rc;
    QT_TRY(compute_modes(r, r->hidden, err));
    QT_TRY(l->be->download(l->be, w, l->parts[ROLE_ALTUP_CORRECT].weight, n * n * sizeof *w, err));
    for (size_t i = 0; i < n; i++)
        QT_TRY(get_state(r, a->states + i * count, i ? i : n, err));
    QT_TRY(l->be->copy(l->be, a->mixed, a->states, count * sizeof *a->mixed, err));
    QT_TRY(l->be->scale(l->be, a->mixed, -1, count, err));
    QT_TRY(l->be->add(l->be, a->mixed, r->hidden, count, err));
    for (size_t i = 0; i < n; i++)
        QT_TRY(add_scaled(r, a->states + i * count, a->mixed, w + i * n, 1, err));
done:
    return rc;
}

int altup_correct(bool *stop, const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const size_t hidden = l->model->cfg.info.hidden, count = r->m * hidden;
    struct layer_altup *a = &l->work.altup;
    const float *scale = l->parts[ROLE_ALTUP_SCALE].weight;
    int rc;
    QT_TRY(correct(r, err));
    QT_TRY(scale ? l->be->convolve(l->be, r->hidden, a->states, scale, NULL, r->m, r->m, hidden, 1,
                                   err)
                 : l->be->copy(l->be, r->hidden, a->states, count * sizeof *a->states, err));
    QT_TRY(per_layer_run(stop, l->work.x, r, err));
    if (*stop)
        goto done;
    QT_TRY(layer_apply_norm(r, ROLE_PER_LAYER_NORM, l->work.x, l->work.x, r->m, err));
    for (size_t i = 1; i < l->model->cfg.altup; i++) {
        QT_TRY(l->be->add(l->be, a->states + i * count, l->work.x, count, err));
        QT_TRY(set_state(r, i, a->states + i * count, err));
    }
    QT_TRY(l->be->copy(l->be, r->hidden, a->states, count * sizeof *a->states, err));
done:
    return rc;
}

/* ---- in front of the first decoder layer, and behind the last ------------------------------- */

static double mean_square(const float *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sum / (double)n;
}

/* Gives the rows of y[m][n] the root mean squares of those of x. */
static int match_rows(struct qt_backend *be, float *y, const float *x, size_t m, size_t n,
                      struct qt_err *err)
{
    float *host = NULL, *factors = NULL;
    int rc;
    QT_TRY(qt_array_new(&host, 2 * m, n * sizeof *host, err));
    QT_TRY(qt_array_new(&factors, m, sizeof *factors, err));
    QT_TRY(be->download(be, host, x, m * n * sizeof *host, err));
    QT_TRY(be->download(be, host + m * n, y, m * n * sizeof *host, err));
    for (size_t i = 0; i < m; i++) /* the limit is that of transformers */
        factors[i] = (float)sqrt(mean_square(host + i * n, n) /
                                 fmax(mean_square(host + (m + i) * n, n), 1e-5));
    QT_TRY(be->gather_rows(be, y, y, NULL, factors, m, n, err));
done:
    qt_free(host);
    qt_free(factors);
    return rc;
}

int altup_embed(struct qt_embed_head *e, float *state, const float *embedded, size_t m,
                struct qt_err *err)
{
    const struct qt_model_info *info = &e->model->cfg.info;
    const size_t n = info->hidden;
    int rc = QT_OK;
    for (size_t i = 1; i < e->model->cfg.altup; i++) {
        QT_TRY(e->be->linear(e->be, e->projected, embedded, e->altup_in[i - 1].weight, NULL, m, n,
                             n, err));
        QT_TRY(match_rows(e->be, e->projected, embedded, m, n, err));
        QT_TRY(e->be->copy_columns(e->be, state + i * n, info->state, e->projected, n, n, m, err));
    }
done:
    return rc;
}

int altup_join(struct qt_embed_head *e, float *out, const float *state, size_t m,
               struct qt_err *err)
{
    const struct qt_model_info *info = &e->model->cfg.info;
    const size_t n = info->hidden;
    struct qt_backend *be = e->be;
    float *other = e->altup_work, *first = other + e->rows * n;
    int rc;
    QT_TRY(be->copy_columns(be, first, n, state, info->state, n, m, err));
    QT_TRY(be->copy(be, out, first, m * n * sizeof *out, err));
    for (size_t i = 1; i < e->model->cfg.altup; i++) {
        QT_TRY(be->copy_columns(be, other, n, state + i * n, info->state, n, m, err));
        QT_TRY(be->linear(be, e->projected, other, e->altup_out[i - 1].weight, NULL, m, n, n, err));
        QT_TRY(match_rows(be, e->projected, first, m, n, err));
        QT_TRY(be->add(be, out, e->projected, m * n, err));
    }
    QT_TRY(be->scale(be, out, 1 / (float)e->model->cfg.altup, m * n, err));
done:
    return rc;
}
