/*
 * Short convolution (LFM2): a convolution over a few tokens between two gates.
 *
 *   x -- SHORT_IN --> B, C, v     B * v -- causal convolution -- * C -- SHORT_OUT
 */
#include "model/graph/layer.h"

static size_t scratch_floats(const struct config *cfg)
{
    return 7 * cfg->info.hidden;
}

static int run(bool *stop, float *out, const float *x, const struct layer_run *r,
               struct qt_err *err)
{
    struct qt_layer *l = r->layer;
    struct qt_backend *be = l->be;
    const struct config *cfg = &l->model->cfg;
    const size_t n = cfg->info.hidden, count = r->m * n;
    float *all = l->work.scratch; /* [m][B | C | v] */
    float *b = all + 3 * count, *c = b + count, *v = c + count, *convolved = v + count;
    const float *y = convolved;
    int rc;
    QT_TRY(layer_input(&x, stop, r, ROLE_SHORT_IN, err));
    if (*stop)
        goto done;
    QT_TRY(layer_linear(r, ROLE_SHORT_IN, all, x, err));
    QT_TRY(be->copy_columns(be, b, n, all, 3 * n, n, r->m, err));
    QT_TRY(be->copy_columns(be, c, n, all + n, 3 * n, n, r->m, err));
    QT_TRY(be->copy_columns(be, v, n, all + 2 * n, 3 * n, n, r->m, err));
    QT_TRY(be->activate(be, v, b, v, QT_ACT_NONE, count, err));
    QT_TRY(cache_convolve(convolved, v, ROLE_SHORT_CONV, r, err));
    QT_TRY(be->activate(be, convolved, c, convolved, QT_ACT_NONE, count, err));
    QT_TRY(layer_input(&y, stop, r, ROLE_SHORT_OUT, err));
    if (!*stop)
        QT_TRY(layer_linear(r, ROLE_SHORT_OUT, out, y, err));
done:
    return rc;
}

const struct mixer mixer_short = {scratch_floats, run};
