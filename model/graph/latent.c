/*
 * Latent attention (MLA, arXiv 2405.04434): keys and values are computed from one latent state per
 * token, queries from another one or directly. The rotary embedding applies to `rope` channels of a
 * query head and to a key that all heads share.
 *
 *   x -- Q_A -- Q_A_NORM -- Q_B ---------------------> queries [heads][nope | rope]
 *   x -- KV_A --+-- KV_A_NORM -- KV_B ---------------> keys [heads][nope], values [heads][v]
 *               +------------------------------------> shared key [rope]
 *
 * Attention needs keys and values of equal width: heads have `dim` = info.head_dim channels in
 * memory, the rotated ones first, and the rest is zero.
 */
#include "model/graph/layer.h"

/* Floats per token of the arrays of this file. */
struct widths {
    size_t qk, v, dim, heads; /* of a head; all heads in memory */
    size_t latent, kv_a, raw; /* raw: linear outputs and inputs of all heads, as they are stored */
};

static struct widths widths_of(const struct config *cfg)
{
    const size_t heads = cfg->info.heads, nope = cfg->latent.nope, v = cfg->latent.v;
    const size_t qk = nope + cfg->latent.rope;
    return (struct widths){.qk = qk,
                           .v = v,
                           .dim = cfg->info.head_dim,
                           .heads = heads * cfg->info.head_dim,
                           .latent = qt_max_size(cfg->latent.q_rank, cfg->latent.kv_rank),
                           .kv_a = cfg->latent.kv_rank + cfg->latent.rope,
                           .raw = heads * qt_max_size(qk, nope + v)};
}

static size_t scratch_floats(const struct config *cfg)
{
    const struct widths w = widths_of(cfg);
    return 4 * w.heads + w.latent + w.kv_a + w.raw + cfg->latent.rope;
}

/* Scratch memory. */
struct arrays {
    float *q, *k, *v, *y;             /* [m][heads][dim] */
    float *latent, *kv_a, *raw, *key; /* key: [m][rope] */
};

static struct arrays arrays_of(const struct layer_run *r, const struct widths *w)
{
    struct arrays a;
    a.q = r->layer->work.scratch;
    a.k = a.q + r->m * w->heads;
    a.v = a.k + r->m * w->heads;
    a.y = a.v + r->m * w->heads;
    a.latent = a.y + r->m * w->heads;
    a.kv_a = a.latent + r->m * w->latent;
    a.raw = a.kv_a + r->m * w->kv_a;
    a.key = a.raw + r->m * w->raw;
    return a;
}

static int rotate(const struct layer_run *r, float *x, size_t heads, size_t dim, struct qt_err *err)
{
    const struct config *cfg = &r->layer->model->cfg;
    const struct rope *rope = layer_rope(r->layer, false);
    return r->layer->be->rope(r->layer->be, x, layer_rope_from(r, rope->cos),
                              layer_rope_from(r, rope->sin), r->m, r->seqlen, heads, dim,
                              cfg->rope.dim, cfg->interleaved, err);
}

/* a->q from the linear output a->raw[m][heads][nope | rope]. */
static int make_queries(const struct layer_run *r, const struct arrays *a, const struct widths *w,
                        struct qt_err *err)
{
    const struct config *cfg = &r->layer->model->cfg;
    struct qt_backend *be = r->layer->be;
    const size_t rows = r->m * cfg->info.heads, nope = cfg->latent.nope, rope = cfg->latent.rope;
    int rc = QT_OK;
    if (w->dim > w->qk)
        QT_TRY(be->zero(be, a->q, r->m * w->heads * sizeof *a->q, err));
    QT_TRY(be->copy_columns(be, a->q, w->dim, a->raw + nope, w->qk, rope, rows, err));
    QT_TRY(be->copy_columns(be, a->q + rope, w->dim, a->raw, w->qk, nope, rows, err));
    QT_TRY(rotate(r, a->q, cfg->info.heads, w->dim, err));
    if (cfg->query_beta > 0)
        QT_TRY(layer_scale_queries(r, a->q, w->heads, layer_query_growth, err));
done:
    return rc;
}

/* a->k and a->v from the linear output a->raw[m][heads][nope | v] and the shared key in a->kv_a. */
static int make_keys(const struct layer_run *r, const struct arrays *a, const struct widths *w,
                     struct qt_err *err)
{
    const struct config *cfg = &r->layer->model->cfg;
    struct qt_backend *be = r->layer->be;
    const size_t rows = r->m * cfg->info.heads, nope = cfg->latent.nope, rope = cfg->latent.rope;
    const size_t all = r->m * w->heads * sizeof *a->k;
    int rc = QT_OK;
    if (w->dim > w->qk)
        QT_TRY(be->zero(be, a->k, all, err));
    if (w->dim > w->v)
        QT_TRY(be->zero(be, a->v, all, err));
    QT_TRY(be->copy_columns(be, a->key, rope, a->kv_a + cfg->latent.kv_rank, w->kv_a, rope, r->m,
                            err));
    QT_TRY(rotate(r, a->key, 1, rope, err));
    for (size_t h = 0; h < cfg->info.heads; h++)
        QT_TRY(be->copy_columns(be, a->k + h * w->dim, w->heads, a->key, rope, rope, r->m, err));
    QT_TRY(be->copy_columns(be, a->k + rope, w->dim, a->raw, nope + w->v, nope, rows, err));
    QT_TRY(be->copy_columns(be, a->v, w->dim, a->raw + nope, nope + w->v, w->v, rows, err));
done:
    return rc;
}

static int run(bool *stop, float *out, const float *x, const struct layer_run *r,
               struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const struct config *cfg = &l->model->cfg;
    const struct widths w = widths_of(cfg);
    const struct arrays a = arrays_of(r, &w);
    struct qt_attention attention = layer_attention(r);
    const float *keys, *values;
    const bool direct = cfg->latent.q_rank == 0; /* queries have no latent state */
    const float *in = a.latent;
    int rc = QT_OK;
    QT_TRY(layer_input(&x, stop, r, direct ? ROLE_Q : ROLE_Q_A, err));
    if (*stop)
        goto done;
    QT_TRY(layer_linear(r, ROLE_KV_A, a.kv_a, x, err));
    QT_TRY(layer_linear(r, direct ? ROLE_Q : ROLE_Q_A, direct ? a.raw : a.latent, x, err));
    if (!direct) {
        QT_TRY(layer_apply_norm(r, ROLE_Q_A_NORM, a.latent, a.latent, r->m, err));
        QT_TRY(layer_input(&in, stop, r, ROLE_Q_B, err));
        if (*stop)
            goto done;
        QT_TRY(layer_linear(r, ROLE_Q_B, a.raw, in, err));
    }
    QT_TRY(make_queries(r, &a, &w, err));
    in = a.latent;
    QT_TRY(l->be->copy_columns(l->be, a.latent, cfg->latent.kv_rank, a.kv_a, w.kv_a,
                               cfg->latent.kv_rank, r->m, err));
    QT_TRY(layer_apply_norm(r, ROLE_KV_A_NORM, a.latent, a.latent, r->m, err));
    QT_TRY(layer_input(&in, stop, r, ROLE_KV_B, err));
    if (*stop)
        goto done;
    QT_TRY(layer_linear(r, ROLE_KV_B, a.raw, in, err));
    QT_TRY(make_keys(r, &a, &w, err));
    QT_TRY(cache_keys(&keys, &values, &attention, a.k, a.v, r, err));
    QT_TRY(l->be->attention(l->be, a.y, a.q, keys, values, r->m, &attention, err));
    QT_TRY(l->be->copy_columns(l->be, a.raw, w.v, a.y, w.dim, w.v, r->m * cfg->info.heads, err));
    in = a.raw;
    QT_TRY(layer_input(&in, stop, r, ROLE_O, err));
    if (!*stop)
        QT_TRY(layer_linear(r, ROLE_O, out, in, err));
done:
    return rc;
}

const struct mixer mixer_latent = {scratch_floats, run};
