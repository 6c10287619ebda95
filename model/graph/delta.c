/*
 * Gated DeltaNet (arXiv 2412.06464, Qwen3-Next): linear attention with a state that decays.
 *
 *   x -- QKV -- causal convolution -- silu --> queries, keys, values --+
 *   x -- B, A -------------------------------> rate, decay ------------+-- delta rule -- NORM -- *
 *   x -- Z ----------------------------------> gate -- silu -------------------------------------+
 *
 * and then DELTA_OUT. Qwen3-Next stores QKV and Z as one tensor, and B and A as another: a row
 * range for each key head, with the rows of its query, key, values and gates (or rates and decays).
 */
#include "model/graph/layer.h"

/* Floats per token of the arrays of this file. */
struct widths {
    size_t keys, values, mixed, heads; /* of all heads; queries, keys and values; value heads */
};

static struct widths widths_of(const struct config *cfg)
{
    const size_t keys = cfg->delta.key_heads * cfg->delta.key_dim;
    const size_t values = cfg->delta.value_heads * cfg->delta.value_dim;
    return (struct widths){keys, values, 2 * keys + values, cfg->delta.value_heads};
}

static size_t scratch_floats(const struct config *cfg)
{
    const struct widths w = widths_of(cfg);
    return 3 * w.mixed + 3 * w.values + 4 * w.heads;
}

struct arrays {
    float *mixed, *convolved; /* [m][queries | keys | values] */
    float *z, *y;             /* [m][values] */
    float *rate, *decay;      /* [m][value heads] */
    float *raw, *raw_ba;      /* of the fused tensors */
};

static struct arrays arrays_of(const struct layer_run *r, const struct widths *w)
{
    struct arrays a;
    a.mixed = r->layer->work.scratch;
    a.convolved = a.mixed + r->m * w->mixed;
    a.z = a.convolved + r->m * w->mixed;
    a.y = a.z + r->m * w->values;
    a.rate = a.y + r->m * w->values;
    a.decay = a.rate + r->m * w->heads;
    a.raw = a.decay + r->m * w->heads;
    a.raw_ba = a.raw + r->m * (w->mixed + w->values);
    return a;
}

/* Copies `n` columns of every key head: from `first` on in rows of `ldx` floats, where heads are
 * `step` floats apart, to y[m][ldy], where they follow each other. */
static int split_heads(float *y, size_t ldy, const float *x, size_t ldx, size_t step, size_t n,
                       const struct layer_run *r, struct qt_err *err)
{
    struct qt_backend *be = r->layer->be;
    int rc = QT_OK;
    for (size_t h = 0; h < r->layer->model->cfg.delta.key_heads; h++)
        QT_TRY(be->copy_columns(be, y + h * n, ldy, x + h * step, ldx, n, r->m, err));
done:
    return rc;
}

/* The outputs of the fused tensors, in the order of Qwen3-Next. */
static int project_fused(const struct arrays *a, const struct widths *w, const float *x,
                         const struct layer_run *r, struct qt_err *err)
{
    const struct config *cfg = &r->layer->model->cfg;
    const size_t kd = cfg->delta.key_dim, per = w->heads / cfg->delta.key_heads;
    const size_t vd = per * cfg->delta.value_dim, step = 2 * kd + 2 * vd;
    const size_t ld = w->mixed + w->values;
    int rc;
    QT_TRY(layer_linear(r, ROLE_DELTA_QKVZ, a->raw, x, err));
    QT_TRY(layer_linear(r, ROLE_DELTA_BA, a->raw_ba, x, err));
    QT_TRY(split_heads(a->mixed, w->mixed, a->raw, ld, step, kd, r, err));
    QT_TRY(split_heads(a->mixed + w->keys, w->mixed, a->raw + kd, ld, step, kd, r, err));
    QT_TRY(split_heads(a->mixed + 2 * w->keys, w->mixed, a->raw + 2 * kd, ld, step, vd, r, err));
    QT_TRY(split_heads(a->z, w->values, a->raw + 2 * kd + vd, ld, step, vd, r, err));
    QT_TRY(split_heads(a->rate, w->heads, a->raw_ba, 2 * w->heads, 2 * per, per, r, err));
    QT_TRY(split_heads(a->decay, w->heads, a->raw_ba + per, 2 * w->heads, 2 * per, per, r, err));
done:
    return rc;
}

static int project(const struct arrays *a, const float *x, const struct layer_run *r,
                   struct qt_err *err)
{
    int rc;
    QT_TRY(layer_linear(r, ROLE_DELTA_QKV, a->mixed, x, err));
    QT_TRY(layer_linear(r, ROLE_DELTA_Z, a->z, x, err));
    QT_TRY(layer_linear(r, ROLE_DELTA_B, a->rate, x, err));
    QT_TRY(layer_linear(r, ROLE_DELTA_A, a->decay, x, err));
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
    const bool fused = l->parts[ROLE_DELTA_QKVZ].weight != NULL;
    const struct qt_delta rule = {.seqlen = r->seqlen,
                                  .key_heads = cfg->delta.key_heads,
                                  .value_heads = cfg->delta.value_heads,
                                  .key_dim = cfg->delta.key_dim,
                                  .value_dim = cfg->delta.value_dim,
                                  .a_log = l->parts[ROLE_A_LOG].weight,
                                  .dt_bias = l->parts[ROLE_DT_BIAS].weight,
                                  .state = r->cache ? r->cache->state : NULL};
    struct qt_backend *be = l->be;
    const float *y = a.y;
    int rc = QT_OK;
    QT_TRY(layer_input(&x, stop, r, fused ? ROLE_DELTA_QKVZ : ROLE_DELTA_QKV, err));
    if (*stop)
        goto done;
    QT_TRY(fused ? project_fused(&a, &w, x, r, err) : project(&a, x, r, err));
    QT_TRY(cache_convolve(a.convolved, a.mixed, ROLE_CONV, r, err));
    QT_TRY(be->activate(be, a.convolved, a.convolved, NULL, cfg->act, r->m * w.mixed, err));
    QT_TRY(be->delta_rule(be, a.y, a.convolved, a.decay, a.rate, r->m, &rule, err));
    QT_TRY(layer_apply_norm(r, ROLE_DELTA_NORM, a.y, a.y, r->m * w.heads, err));
    QT_TRY(be->activate(be, a.y, a.z, a.y, QT_ACT_SILU, r->m * w.values, err));
    QT_TRY(layer_input(&y, stop, r, ROLE_DELTA_OUT, err));
    if (!*stop)
        QT_TRY(layer_linear(r, ROLE_DELTA_OUT, out, y, err));
done:
    return rc;
}

const struct mixer mixer_delta = {scratch_floats, run};
