/*
 * The error of an input's linears after error compensation, estimated for an arrangement.
 *
 * Let z be a token in stored order, scale and rotation, H = sum of z^T z, and q = z + e what its
 * rounding leaves. The rounding errors e of a channel block are taken for white noise that does not
 * depend on z: N = sum of e^T e is diagonal, with one value per block. Under Hq = H + N the targets
 * W' = W - W N Hq^-1 minimize the error of q W'^T, and the weights Q are rounded for them as later
 * for the model. The estimate is
 *
 *     trace(W N W^T) - trace(W N Hq^-1 N W^T)     of the activations
 *     + trace((W' - Q) Hq (W' - Q)^T)             of the weights
 *
 * for a sample of rows of W, and of wide inputs for a sample of channels, as if there were no
 * others.
 *
 * Rounding to nearest would not do for the last term: compensation removes most of the error that
 * channels of different sizes cause, so that factors gain little for the weights, or nothing.
 */
#include "hessian/hessian.h"
#include "pack/activations/planner.h"
#include "pack/sequential.h"

#include <math.h>

struct qt_act_judge {
    const struct qt_act_planner *p;
    size_t all, stride, k; /* channels; every stride-th is judged; so many are */
    size_t rows, row_stride, tokens;
    float *w;       /* [rows][k] every row_stride-th row of the linears */
    float *w_there; /* the same in backend memory */
    float *root; /* backend, [k][k] R with R^T R = H in source order: k tokens that stand for all */
};

void qt_act_judge_free(struct qt_act_judge *j)
{
    if (!j)
        return;
    qt_free(j->w);
    j->p->be->free(j->p->be, j->w_there);
    j->p->be->free(j->p->be, j->root);
    qt_free(j);
}

/* out[k][k] = matrix with `diagonal` in host memory on its diagonal, else 0. */
static int upload_diagonal(float *out, struct qt_backend *be, const float *diagonal, size_t k,
                           struct qt_err *err)
{
    float *there = NULL;
    int rc;
    QT_TRY(be->alloc(be, &there, k * sizeof *there, err));
    QT_TRY(be->upload(be, there, diagonal, k * sizeof *there, err));
    QT_TRY(be->copy_columns(be, out, k + 1, there, 1, 1, k, err));
done:
    be->free(be, there);
    return rc;
}

/* R = V^T with H = V V^T: the product of the unit matrix with V^T. */
static int make_root(struct qt_act_judge *j, const double *gram, struct qt_err *err)
{
    struct qt_backend *be = j->p->be;
    const size_t k = j->k;
    const struct qt_factor_options opt = {
        .damp = 1e-6, .group = k, .storage_order = true, .backend = be, .sums_on_backend = true};
    struct qt_factor f = {0};
    float *unit = NULL, *diagonal = NULL;
    int rc;
    QT_TRY(qt_factor_new(&f, gram, k, &opt, err));
    QT_TRY(qt_array_new(&diagonal, k, sizeof *diagonal, err));
    for (size_t c = 0; c < k; c++)
        diagonal[c] = (float)(1 / sqrt(f.scale));
    QT_TRY(qt_backend_floats(&unit, be, k, k, err));
    QT_TRY(upload_diagonal(unit, be, diagonal, k, err));
    QT_TRY(qt_backend_floats(&j->root, be, k, k, err));
    QT_TRY(be->linear(be, j->root, unit, f.backend_v ? f.backend_v : f.v, NULL, k, k, k, err));
done:
    be->free(be, unit);
    qt_free(diagonal);
    qt_factor_free(&f);
    return rc;
}

/* Rows 0, row_stride, 2 row_stride, ... of all linears with this input, one after the other. */
static int sample_rows(struct qt_act_judge *j, size_t layer, int i, const struct qt_layer *handle,
                       struct qt_err *err)
{
    struct qt_backend *be = j->p->be;
    const struct qt_linear *linear;
    const size_t count = qt_model_linears(&linear, j->p->model, layer);
    size_t n_all = 0, seen = 0, at = 0;
    float *whole = NULL;
    int rc;
    for (size_t l = 0; l < count; l++)
        n_all += qt_act_pooled(linear[l].input) == i ? linear[l].n : 0;
    j->row_stride = qt_ceil_div(n_all, QT_ACT_JUDGE_ROWS);
    j->rows = qt_ceil_div(n_all, j->row_stride);
    QT_TRY(qt_array_new(&j->w, j->rows, j->k * sizeof *j->w, err));
    QT_TRY(qt_backend_floats(&j->w_there, be, j->rows, j->k, err));
    QT_TRY(qt_backend_floats(&whole, be, j->rows, j->all, err));
    for (size_t l = 0; l < count; l++) {
        if (qt_act_pooled(linear[l].input) != i)
            continue;
        const size_t first = at * j->row_stride - seen;
        const size_t n = linear[l].n > first ? qt_ceil_div(linear[l].n - first, j->row_stride) : 0;
        if (n)
            QT_TRY(be->copy_columns(be, whole + at * j->all, j->all,
                                    qt_layer_weight(handle, linear[l].weight) + first * j->all,
                                    j->row_stride * j->all, j->all, n, err));
        at += n;
        seen += linear[l].n;
    }
    QT_TRY(be->copy_columns(be, j->w_there, 1, whole, j->stride, 1, j->rows * j->k, err));
    QT_TRY(be->download(be, j->w, j->w_there, j->rows * j->k * sizeof *j->w, err));
done:
    be->free(be, whole);
    return rc;
}

int qt_act_judge_new(struct qt_act_judge **out, const struct qt_act_planner *p, size_t layer, int i,
                     const struct qt_layer *handle, struct qt_err *err)
{
    const size_t all = qt_act_input_at(p, layer, i)->k, stride = qt_act_judge_stride(all);
    struct qt_act_judge *j;
    struct qt_err inner = {0};
    int rc = qt_array_new(&j, 1, sizeof *j, err);
    *out = NULL;
    if (rc < 0)
        return rc;
    *j = (struct qt_act_judge){
        .p = p, .all = all, .stride = stride, .k = all / stride, .tokens = p->seen[i]};
    QT_TRY(make_root(j, p->gram[i], &inner));
    QT_TRY(sample_rows(j, layer, i, handle, &inner));
    *out = j;
    return QT_OK;
done:
    qt_act_judge_free(j);
    return rc == QT_E_UNSUPPORTED ? QT_OK : qt_fail(err, rc, NULL, NULL, "%s", inner.reason);
}

/* h[k][k], backend memory: adds `noise` to the diagonal. */
static int add_noise(double *h, struct qt_backend *be, const double *noise, size_t k,
                     struct qt_err *err)
{
    enum { FLOATS = sizeof *h / sizeof(float) };
    float *packed = NULL, *cells = (float *)(void *)h;
    double *diagonal = NULL;
    int rc;
    QT_TRY(qt_array_new(&diagonal, k, sizeof *diagonal, err));
    QT_TRY(be->alloc(be, &packed, k * sizeof *diagonal, err));
    QT_TRY(be->copy_columns(be, packed, FLOATS, cells, FLOATS * (k + 1), FLOATS, k, err));
    QT_TRY(be->download(be, diagonal, packed, k * sizeof *diagonal, err));
    for (size_t c = 0; c < k; c++)
        diagonal[c] += noise[c];
    QT_TRY(be->upload(be, packed, diagonal, k * sizeof *diagonal, err));
    QT_TRY(be->copy_columns(be, cells, FLOATS * (k + 1), packed, FLOATS, FLOATS, k, err));
done:
    be->free(be, packed);
    qt_free(diagonal);
    return rc;
}

/* Factors Hq. */
static int make_factor(struct qt_factor *f, const struct qt_act_judge *j, const struct qt_act *act,
                       const double *noise, size_t group, struct qt_err *err)
{
    struct qt_backend *be = j->p->be;
    const size_t k = j->k;
    const struct qt_factor_options opt = {
        .damp = QT_OBSERVED_DAMP, .group = group, .backend = be, .sums_on_backend = true};
    float *tokens = NULL;
    double *h = NULL;
    int rc;
    QT_TRY(qt_backend_floats(&tokens, be, k, k, err));
    QT_TRY(qt_act_arrange_on(be, tokens, j->root, k, act, err));
    QT_TRY(be->alloc(be, &h, k * k * sizeof *h, err));
    QT_TRY(be->gram(be, h, tokens, k, k, err));
    QT_TRY(add_noise(h, be, noise, k, err));
    QT_TRY(qt_factor_new(f, h, k, &opt, err));
done:
    be->free(be, tokens);
    be->free(be, h);
    return rc;
}

/* cross = -W N for the stored weights w, in place. Returns trace(W N W^T). */
static double make_cross(float *w, size_t rows, size_t k, const double *noise)
{
    double energy = 0;
    for (size_t r = 0; r < rows; r++, w += k)
        for (size_t c = 0; c < k; c++) {
            energy += noise[c] * (double)w[c] * (double)w[c];
            w[c] = -(float)(noise[c] * (double)w[c]);
        }
    return energy;
}

static bool compensates(const struct qt_act_judge *j)
{
    return qt_spec_method(j->p->spec) == QT_METHOD_GPTQ;
}

/* *error = that of the activations. Corrects the targets of f, unless weights are rounded without
 * H. */
static int correct(double *error, struct qt_factor *f, const struct qt_act_judge *j,
                   const struct qt_act *act, const double *noise, struct qt_err *err)
{
    struct qt_backend *be = j->p->be;
    const size_t k = j->k, cells = j->rows * k;
    struct qt_act inverse = {.k = k, .order = act->order, .rotate = act->rotate};
    float *cross = NULL, *there = NULL;
    int rc;
    QT_TRY(qt_array_new(&inverse.factor, k, sizeof *inverse.factor, err));
    for (size_t c = 0; c < k; c++)
        inverse.factor[c] = 1 / act->factor[c];
    QT_TRY(qt_array_new(&cross, cells, sizeof *cross, err));
    QT_TRY(qt_act_arrange(cross, j->w, j->rows, &inverse, err));
    const double energy = make_cross(cross, j->rows, k, noise);
    *error = energy;
    if (!compensates(j))
        goto done;
    QT_TRY(be->alloc(be, &there, cells * sizeof *there, err));
    QT_TRY(be->upload(be, there, cross, cells * sizeof *there, err));
    QT_TRY(qt_factor_correct_output_error(f, there, j->rows, energy,
                                          j->p->data->samples * j->p->data->seqlen, err));
    if (f->output_shrink > 0) /* else output_explained may not be finite */
        *error -= (2 - f->output_shrink) * f->output_shrink * f->output_explained;
done:
    qt_free(inverse.factor);
    qt_free(cross);
    be->free(be, there);
    return rc;
}

/* *out = `act` for the channels that are judged, in the same order; noise[j->k]: that of each, from
 * the mean squared rounding errors of a token in each channel block. */
static int sample_channels(struct qt_act *out, double *noise, const struct qt_act_judge *j,
                           const struct qt_act *act, const double *energy, struct qt_err *err)
{
    const int rc = qt_act_new(out, j->k, 4, err);
    if (rc < 0)
        return rc;
    out->rotate = act->rotate;
    out->scales = act->scales;
    for (size_t p = 0, at = 0; p < j->all; p++) {
        const size_t block = p / QT_ACT_BLOCK, first = block * QT_ACT_BLOCK;
        if (act->order[p] % j->stride)
            continue;
        out->order[at] = act->order[p] / (uint32_t)j->stride;
        out->factor[at] = act->factor[p];
        noise[at++] =
            energy[block] * (double)j->tokens / (double)qt_min_size(QT_ACT_BLOCK, j->all - first);
    }
    return QT_OK;
}

int qt_act_judge_error(double *error, const struct qt_act_judge *j, const struct qt_act *act,
                       const double *energy, struct qt_err *err)
{
    struct qt_act some = {0};
    const struct qt_arrange arrange = {.input = &some};
    const struct qt_matrix matrix = {
        .data = j->w, .dtype = QT_F32, .n = j->rows, .k = j->k, .file = j->p->source.dir};
    const struct qt_place place = {.w = j->w_there, .only_rounded = true, .only_compensated = true};
    struct qt_spec spec = *j->p->spec;
    struct qt_packed packed = {0};
    struct qt_solve_report report;
    struct qt_factor f = {0};
    double *noise = NULL;
    int rc;
    spec.arrange = &arrange;
    QT_TRY(qt_array_new(&noise, j->k, sizeof *noise, err));
    QT_TRY(sample_channels(&some, noise, j, act, energy, err));
    QT_TRY(qt_packed_describe(&packed, &spec, j->rows, j->k, err));
    QT_TRY(make_factor(&f, j, &some, noise, qt_packed_group(&packed), err));
    QT_TRY(correct(error, &f, j, &some, noise, err));
    QT_TRY(qt_packed_round(&packed, &spec, &matrix, &f, j->p->be, &place, NULL, &report, err));
    *error += (compensates(j) ? report.after_descent : report.before) / f.scale;
done:
    qt_packed_free(&packed);
    qt_factor_free(&f);
    qt_act_free(&some);
    qt_free(noise);
    return rc;
}
