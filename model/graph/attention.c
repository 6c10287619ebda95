/* Attention with keys and values of their own; the output may have gates (Qwen3-Next). */
#include "model/graph/layer.h"

static size_t scratch_floats(const struct config *cfg)
{
    const size_t q = cfg->info.heads * cfg->info.head_dim;
    const size_t kv = cfg->info.kv_heads * cfg->info.head_dim;
    return 2 * (q + kv) + (cfg->arch->gated                   ? 3 * q
                           : cfg->arch->grouped_qkv           ? q + 2 * kv
                           : cfg->arch->parts[ROLE_ATTN_GATE] ? q
                           : cfg->value_dim                   ? q
                                                              : 0);
}

/* Queries q[m][heads][head_dim] of x; with gates, [m][heads][query | gate] is stored in both[], and
 * the gates are copied to gate[m][heads][head_dim]. */
static int make_queries(float *q, float *gate, float *both, const float *x,
                        const struct layer_run *r, struct qt_err *err)
{
    const struct config *cfg = &r->layer->model->cfg;
    struct qt_backend *be = r->layer->be;
    const size_t rows = r->m * cfg->info.heads, dim = cfg->info.head_dim;
    int rc;
    if (!cfg->arch->gated)
        return layer_linear(r, ROLE_Q, q, x, err);
    QT_TRY(layer_linear(r, ROLE_Q, both, x, err));
    QT_TRY(be->copy_columns(be, q, dim, both, 2 * dim, dim, rows, err));
    QT_TRY(be->copy_columns(be, gate, dim, both + dim, 2 * dim, dim, rows, err));
done:
    return rc;
}

/* Copies between all[m], which is [KV heads][queries | key | value] or [shards][queries | values |
 * keys], and q, k, v. split: from all[m]. */
static int copy_grouped(float *q, float *k, float *v, float *all, bool split,
                        const struct layer_run *r, struct qt_err *err)
{
    const struct heads *heads = &r->layer->def->heads;
    struct qt_backend *be = r->layer->be;
    const size_t shards = r->layer->model->cfg.arch->qkv_shards;
    const size_t groups = shards ? shards : heads->kv, rows = r->m * groups;
    const size_t n = r->layer->model->cfg.info.heads * heads->dim / groups;
    const size_t kv = heads->kv * heads->dim / groups, ld = n + 2 * kv;
    float *parts[] = {q, shards ? v : k, shards ? k : v};
    int rc = QT_OK;
    for (int i = 0; i < 3; i++) {
        const size_t width = i ? kv : n;
        QT_TRY(split ? be->copy_columns(be, parts[i], width, all, ld, width, rows, err)
                     : be->copy_columns(be, all, ld, parts[i], width, width, rows, err));
        all += width;
    }
done:
    return rc;
}

int layer_grouped(float *q, float *k, float *v, float *all, const float *x,
                  const struct layer_run *r, struct qt_err *err)
{
    int rc = layer_linear(r, ROLE_QKV, all, x, err);
    return rc < 0 ? rc : copy_grouped(q, k, v, all, true, r, err);
}

int layer_group(float *all, float *q, float *k, float *v, const struct layer_run *r,
                struct qt_err *err)
{
    return copy_grouped(q, k, v, all, false, r, err);
}

/* Copies the keys, then the values, [m][width] each, to the state of the tokens, or back. */
static int copy_kept(float *k, float *v, size_t width, bool back, const struct layer_run *r,
                     struct qt_err *err)
{
    const struct qt_layer *l = r->layer;
    const size_t state = l->model->cfg.info.state;
    float *const part[] = {k, v};
    int rc = QT_OK;
    for (size_t i = 0; i < 2 && rc == QT_OK; i++) {
        float *kept = r->state + l->def->heads.kept + i * width;
        rc = back ? l->be->copy_columns(l->be, part[i], width, kept, state, width, r->m, err)
                  : l->be->copy_columns(l->be, kept, state, part[i], width, width, r->m, err);
    }
    return rc;
}

/* Values that are narrower than keys, with zeros behind them. narrow: [m][KV heads][value_dim]. */
static int make_values(float *v, float *narrow, const float *x, const struct layer_run *r,
                       struct qt_err *err)
{
    const struct heads *heads = &r->layer->def->heads;
    const size_t n = r->layer->model->cfg.value_dim, rows = r->m * heads->kv;
    struct qt_backend *be = r->layer->be;
    int rc;
    QT_TRY(layer_linear(r, ROLE_V, narrow, x, err));
    QT_TRY(be->zero(be, v, rows * heads->dim * sizeof *v, err));
    QT_TRY(be->copy_columns(be, v, heads->dim, narrow, n, n, rows, err));
done:
    return rc;
}

/* Keys and values of x, with norms and rotary embedding. narrow: of make_values. */
static int make_keys(float *k, float *v, float *narrow, const float *x, bool grouped,
                     const struct layer_run *r, struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const struct heads *heads = &l->def->heads;
    const size_t width = heads->kv * heads->dim;
    int rc = QT_OK;
    if (heads->shared)
        return copy_kept(k, v, width, true, r, err);
    if (!grouped)
        QT_TRY(layer_linear(r, ROLE_K, k, x, err));
    if (heads->keys_are_values)
        QT_TRY(l->be->copy(l->be, v, k, r->m * width * sizeof *v, err));
    else if (!grouped)
        QT_TRY(l->model->cfg.value_dim ? make_values(v, narrow, x, r, err)
                                       : layer_linear(r, ROLE_V, v, x, err));
    if (l->model->cfg.clip_qkv > 0) /* v follows k */
        QT_TRY(l->be->clip(l->be, k, l->model->cfg.clip_qkv, 2 * r->m * width, err));
    if (l->model->cfg.arch->value_norm)
        QT_TRY(l->be->norm(l->be, v, v, l->work.ones, NULL, QT_NORM_RMS, l->model->cfg.eps,
                           r->m * heads->kv, heads->dim, err));
    QT_TRY(layer_heads(r, ROLE_K_NORM, k, k, heads->kv, err));
    if (heads->kept && r->stop < 0)
        QT_TRY(copy_kept(k, v, width, false, r, err));
done:
    return rc;
}

/* See config.floor_beta. */
static float floor_growth(const struct config *cfg, size_t position)
{
    return 1 + cfg->floor_beta * (float)log1p((double)((position + 1) / cfg->floor_step));
}

int layer_floor_queries(const struct layer_run *r, float *q, struct qt_err *err)
{
    const struct qt_layer *l = r->layer;
    const size_t width = l->model->cfg.info.heads * l->def->heads.dim;
    return l->no_rope && l->model->cfg.floor_beta > 0
               ? layer_scale_queries(r, q, width, floor_growth, err)
               : QT_OK;
}

int layer_attend(float *y, const float *q, const float *keys, const float *values,
                 const struct qt_attention *a, const struct layer_run *r, struct qt_err *err)
{
    struct qt_backend *be = r->layer->be;
    const size_t chunk = r->layer->chunk, all = r->past + r->seqlen;
    const size_t width = a->heads * a->head_dim, kv_width = a->kv_heads * a->head_dim;
    struct qt_attention part = *a;
    int rc = QT_OK;
    if (!chunk || all <= chunk)
        return be->attention(be, y, q, keys, values, r->m, a, err);
    if (a->exact_keys)
        return qt_fail(err, QT_E_UNSUPPORTED, r->layer->dir, NULL,
                       "4-bit caches of sequences of %zu tokens, but 'attention_chunk_size' is %zu",
                       all, chunk);
    for (size_t i = 0; i < r->m / r->seqlen; i++)
        for (size_t from = r->past, to; from < all; from = to) {
            const size_t first = from / chunk * chunk;
            const size_t query = i * r->seqlen + from - r->past, key = i * all + first;
            to = qt_min_size(all, first + chunk);
            part.seqlen = to - from;
            part.past = from - first;
            QT_TRY(be->attention(be, y + query * width, q + query * width, keys + key * kv_width,
                                 values + key * kv_width, to - from, &part, err));
        }
done:
    return rc;
}

int attention_run(bool *stop, float *out, const float *x, const struct layer_run *r,
                  struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    const struct qt_model_info *info = &l->model->cfg.info;
    const struct heads *heads = &l->def->heads;
    struct qt_attention a = layer_attention(r);
    const size_t width = info->heads * heads->dim, kv_width = heads->kv * heads->dim;
    float *q = l->work.scratch, *k = q + r->m * width, *v = k + r->m * kv_width;
    float *y = v + r->m * kv_width, *gate = y + r->m * width, *both = gate + r->m * width;
    const bool grouped = l->model->cfg.arch->grouped_qkv;
    const bool gate_apart = l->parts[ROLE_ATTN_GATE].weight != NULL;
    const bool gated = l->model->cfg.arch->gated || gate_apart;
    const float *attended = y, *keys, *values;
    int rc = QT_OK;
    if (gate_apart)
        QT_TRY(layer_linear(r, ROLE_ATTN_GATE, gate, x, err));
    QT_TRY(grouped ? layer_grouped(q, k, v, gate, x, r, err)
                   : make_queries(q, gate, both, x, r, err));
    if (l->model->cfg.clip_qkv > 0)
        QT_TRY(l->be->clip(l->be, q, l->model->cfg.clip_qkv, r->m * width, err));
    QT_TRY(make_keys(k, v, gate, x, grouped, r, err));
    QT_TRY(layer_heads(r, ROLE_Q_NORM, q, q, info->heads, err));
    QT_TRY(layer_floor_queries(r, q, err));
    QT_TRY(cache_keys(&keys, &values, &a, k, v, r, err));
    QT_TRY(layer_attend(y, q, keys, values, &a, r, err));
    if (gated)
        QT_TRY(l->be->activate(l->be, y, gate, y, QT_ACT_SIGMOID, r->m * width, err));
    if (l->model->cfg.value_dim) {
        QT_TRY(l->be->copy_columns(l->be, gate, l->model->cfg.value_dim, y, heads->dim,
                                   l->model->cfg.value_dim, r->m * info->heads, err));
        attended = gate;
    }
    QT_TRY(layer_input(&attended, stop, r, ROLE_O, err));
    if (!*stop)
        QT_TRY(layer_linear(r, ROLE_O, out, attended, err));
done:
    return rc;
}

static int run(bool *stop, float *out, const float *x, const struct layer_run *r,
               struct qt_err *err)
{
    const bool grouped = r->layer->model->cfg.arch->grouped_qkv;
    int rc = layer_input(&x, stop, r, grouped ? ROLE_QKV : ROLE_Q, err);
    return rc == QT_OK && !*stop ? attention_run(stop, out, x, r, err) : rc;
}

const struct mixer mixer_attention = {scratch_floats, run};
