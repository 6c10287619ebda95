#include "hessian/panel.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- order ---------------------------------------------------------------------------------- */

struct rank {
    unsigned class;
    double key;
    size_t index;
};

/* Lower class first, then larger key. Ties go by index, so that the order does not depend on the
 * qsort implementation. */
static int by_rank(const void *a, const void *b)
{
    const struct rank *x = a, *y = b;
    if (x->class != y->class)
        return x->class < y->class ? -1 : 1;
    if (x->key != y->key)
        return x->key < y->key ? 1 : -1;
    return (x->index > y->index) - (x->index < y->index);
}

static int order_new(struct qt_factor *f, const double *diag, const struct qt_factor_options *opt,
                     struct qt_err *err)
{
    size_t k = f->k, g = opt->group, groups = qt_ceil_div(k, g), at = 0;
    struct rank *outer = NULL, *inner = NULL;
    int rc = QT_OK;
    QT_TRY(qt_array_new(&outer, groups, sizeof *outer, err));
    QT_TRY(qt_array_new(&inner, qt_min_size(g, k), sizeof *inner, err));
    for (size_t i = 0; i < groups; i++) {
        size_t n = qt_min_size(g, k - i * g);
        outer[i] = (struct rank){opt->class ? opt->class[i] : 0, 0, i};
        for (size_t j = 0; j < n && !opt->storage_order; j++)
            outer[i].key += diag[i * g + j] / (double)n;
    }
    qsort(outer, groups, sizeof *outer, by_rank);
    for (size_t i = 0; i < groups; i++) {
        size_t first = outer[i].index * g, n = qt_min_size(g, k - first);
        for (size_t j = 0; j < n; j++)
            inner[j] = (struct rank){0, opt->storage_order ? 0 : diag[first + j], first + j};
        qsort(inner, n, sizeof *inner, by_rank);
        for (size_t j = 0; j < n; j++, at++) {
            f->order[at] = inner[j].index;
            f->group[at] = outer[i].index;
        }
    }
done:
    qt_free(outer);
    qt_free(inner);
    return rc;
}

/* ---- factor --------------------------------------------------------------------------------- */

static double entry(const double *h, size_t k, size_t i, size_t j)
{
    return i >= j ? h[i * k + j] : h[j * k + i];
}

/* Scales diag[k] to mean 1; *dead += number of zeros in it. Returns the scale, or 0 if the diagonal
 * has a negative or non-finite entry. */
static double scale_diagonal(double *diag, size_t *dead, size_t k)
{
    double sum = 0;
    for (size_t j = 0; j < k; j++) {
        if (!(diag[j] >= 0)) /* negative or NaN */
            return 0;
        *dead += diag[j] == 0;
        sum += diag[j];
    }
    double scale = (double)k / sum;
    if (!isfinite(scale) || !isfinite(sum))
        return 0;
    for (size_t j = 0; j < k; j++)
        diag[j] *= scale;
    return scale;
}

struct reversal {
    struct qt_factor *f;
    double *a;
    double damp;
};

/*
 * H = V V^T with V upper triangular: reverse the rows and columns of H, factor, reverse back. (GPTQ
 * factors H^-1 = U^T U instead; U = V^-1, so that V needs no inverse.)
 */
static void reverse_row(void *ctx, size_t i)
{
    const struct reversal *r = ctx;
    const size_t k = r->f->k;
    for (size_t j = 0; j <= i; j++)
        r->a[i * k + j] = (double)r->f->h[(k - 1 - i) * k + (k - 1 - j)];
    r->a[i * k + i] += r->damp;
}

static void store_row(void *ctx, size_t i)
{
    const struct reversal *r = ctx;
    const size_t k = r->f->k;
    r->f->h[i * k + i] += (float)r->damp;
    for (size_t j = i; j < k; j++)
        r->f->v[i * k + j] = (float)r->a[(k - 1 - i) * k + (k - 1 - j)];
}

/* An attempt to factor uses `a` on the host, where h is in processing order already, or `gram` on a
 * backend. */
struct attempt {
    struct qt_factor *f;
    double *a;          /* host, [k][k] */
    const double *gram; /* backend, [k][k] */
};

static int try_damping(bool *positive, const struct attempt *s, double damp, struct qt_err *err)
{
    struct qt_factor *f = s->f;
    struct reversal r = {f, s->a, damp};
    if (s->gram)
        return f->backend->factor(f->backend, f->backend_h, f->backend_v, positive, s->gram,
                                  f->order, f->scale, damp, f->k, err);
    qt_parallel_for(f->k, reverse_row, &r);
    *positive = qt_cholesky(s->a, f->k);
    if (*positive)
        qt_parallel_for(f->k, store_row, &r);
    return QT_OK;
}

static int factor_with_damping_retry(const struct attempt *s, double first, struct qt_err *err)
{
    int rc;
    for (double damp = first;; damp = fmin(damp > 0 ? damp * 10 : 1e-6, 1)) {
        bool positive;
        QT_TRY(try_damping(&positive, s, damp, err));
        if (!positive && damp >= 1)
            break;
        if (positive) {
            s->f->damp = damp;
            s->f->damping = damp == first ? QT_DAMP_PLAIN : QT_DAMP_RAISED;
            return QT_OK;
        }
    }
    s->f->damping = QT_DAMP_FAILED;
    rc = qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                 "the Hessian cannot be factored, even with its mean diagonal as damping");
done:
    return rc;
}

struct gather {
    struct qt_factor *f;
    const double *h;
};

/* Row i of H in processing order, scaled. */
static int gather_row(void *ctx, size_t i, int thread, struct qt_err *err)
{
    const struct gather *g = ctx;
    const struct qt_factor *f = g->f;
    const size_t k = f->k;
    (void)thread;
    for (size_t j = 0; j < k; j++) {
        float value = (float)(entry(g->h, k, f->order[i], f->order[j]) * f->scale);
        if (!isfinite(value))
            return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "the Hessian is not finite");
        f->h[i * k + j] = value;
    }
    return QT_OK;
}

static int factor_on_host(struct qt_factor *f, const double *h, double damp, struct qt_err *err)
{
    const size_t cells = f->k * f->k;
    double *a = NULL;
    int rc;
    QT_TRY(qt_array_new(&f->h, cells, sizeof *f->h, err));
    QT_TRY(qt_array_new(&f->v, cells, sizeof *f->v, err));
    QT_TRY(qt_array_new(&a, cells, sizeof *a, err));
    QT_TRY(qt_parallel(f->k, gather_row, &(struct gather){f, h}, err));
    QT_TRY(factor_with_damping_retry(&(struct attempt){.f = f, .a = a}, damp, err));
done:
    qt_free(a);
    return rc;
}

static int factor_on_backend(struct qt_factor *f, const double *h, double damp, struct qt_err *err)
{
    struct qt_backend *be = f->backend;
    const size_t cells = f->k * f->k;
    double *gram = NULL;
    int rc;
    QT_TRY(be->alloc(be, &f->backend_h, cells * sizeof *f->backend_h, err));
    QT_TRY(be->alloc(be, &f->backend_v, cells * sizeof *f->backend_v, err));
    if (!f->sums_on_backend) {
        QT_TRY(be->alloc(be, &gram, cells * sizeof *gram, err));
        QT_TRY(be->upload(be, gram, h, cells * sizeof *gram, err));
    }
    QT_TRY(
        factor_with_damping_retry(&(struct attempt){.f = f, .gram = gram ? gram : h}, damp, err));
done:
    be->free(be, gram);
    return rc;
}

int qt_factor_fetch(struct qt_factor *f, struct qt_err *err)
{
    struct qt_backend *be = f->backend;
    const size_t cells = f->k * f->k;
    int rc = QT_OK;
    if (f->v)
        return QT_OK;
    QT_TRY(qt_array_new(&f->h, cells, sizeof *f->h, err));
    QT_TRY(qt_array_new(&f->v, cells, sizeof *f->v, err));
    QT_TRY(be->download(be, f->h, f->backend_h, cells * sizeof *f->h, err));
    QT_TRY(be->download(be, f->v, f->backend_v, cells * sizeof *f->v, err));
done:
    return rc;
}

/* diag[k] = diagonal of h[k][k]. */
static int diagonal(double *diag, const struct qt_factor *f, const double *h, struct qt_err *err)
{
    enum { FLOATS = sizeof *h / sizeof(float) };
    struct qt_backend *be = f->backend;
    const size_t k = f->k;
    float *packed = NULL;
    int rc;
    for (size_t j = 0; j < k && !f->sums_on_backend; j++)
        diag[j] = h[j * k + j];
    if (!f->sums_on_backend)
        return QT_OK;
    QT_TRY(be->alloc(be, &packed, k * sizeof *diag, err));
    QT_TRY(be->copy_columns(be, packed, FLOATS, (const float *)(const void *)h, FLOATS * (k + 1),
                            FLOATS, k, err));
    QT_TRY(be->download(be, diag, packed, k * sizeof *diag, err));
done:
    be->free(be, packed);
    return rc;
}

int qt_factor_new(struct qt_factor *out, const double *h, size_t k,
                  const struct qt_factor_options *opt, struct qt_err *err)
{
    double *diag = NULL;
    size_t cells;
    int rc = QT_OK;
    *out = (struct qt_factor){0};
    if (qt_mul_overflow(&cells, k, k) || k > INT32_MAX)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "%zu channels are too many", k);
    *out = (struct qt_factor){.k = k, .group_size = opt->group};
    if (opt->backend && !opt->backend->host)
        out->backend = opt->backend;
    out->sums_on_backend = out->backend && opt->sums_on_backend;
    QT_TRY(qt_array_new(&diag, k, sizeof *diag, err));
    QT_TRY(qt_array_new(&out->order, k, sizeof *out->order, err));
    QT_TRY(qt_array_new(&out->group, k, sizeof *out->group, err));
    QT_TRY(qt_array_new(&out->diagonal, k, sizeof *out->diagonal, err));
    QT_TRY(diagonal(diag, out, h, err));
    double scale = scale_diagonal(diag, &out->dead, k);
    if (out->dead == k) { /* H would consist of the damping alone */
        rc = qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "no channel of the input was ever active");
        goto done;
    }
    if (scale == 0) {
        rc = qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                     "the Hessian's diagonal is negative or not finite");
        goto done;
    }
    out->scale = scale;
    QT_TRY(order_new(out, diag, opt, err));
    QT_TRY(out->backend ? factor_on_backend(out, h, opt->damp, err)
                        : factor_on_host(out, h, opt->damp, err));
    for (size_t i = 0; i < k; i++)
        out->diagonal[i] = (float)diag[out->order[i]] + (float)out->damp;
done:
    qt_free(diag);
    if (rc < 0)
        qt_factor_free(out);
    return rc;
}

static int factor_again(struct qt_factor *out, const struct qt_factor *f, struct qt_err *err)
{
    struct qt_backend *be = f->backend;
    const size_t k = f->k, bytes = k * k * sizeof *f->backend_h;
    size_t *at = NULL, *from = NULL; /* position of a column in f; position in f by that in out */
    bool positive;
    int rc;
    QT_TRY(qt_array_new(&at, k, sizeof *at, err));
    QT_TRY(qt_array_new(&from, k, sizeof *from, err));
    for (size_t p = 0; p < k; p++)
        at[f->order[p]] = p;
    for (size_t p = 0; p < k; p++) {
        from[p] = at[out->order[p]];
        out->diagonal[p] = f->diagonal[from[p]];
    }
    QT_TRY(be->alloc(be, &out->backend_h, bytes, err));
    QT_TRY(be->alloc(be, &out->backend_v, bytes, err));
    QT_TRY(be->factor_again(be, out->backend_h, out->backend_v, &positive, f->backend_h, from, k,
                            err));
    if (!positive)
        rc = qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                     "the Hessian cannot be factored in another order");
done:
    qt_free(at);
    qt_free(from);
    return rc;
}

static int reorder_on_backend(struct qt_factor *out, const struct qt_factor *f,
                              const struct qt_factor_options *opt, struct qt_err *err)
{
    const size_t k = f->k;
    double *diag = NULL;
    int rc;
    *out = (struct qt_factor){.k = k,
                              .group_size = f->group_size,
                              .scale = f->scale,
                              .damp = f->damp,
                              .dead = f->dead,
                              .backend = f->backend,
                              .damping = f->damping};
    QT_TRY(qt_array_new(&diag, k, sizeof *diag, err));
    QT_TRY(qt_array_new(&out->order, k, sizeof *out->order, err));
    QT_TRY(qt_array_new(&out->group, k, sizeof *out->group, err));
    QT_TRY(qt_array_new(&out->diagonal, k, sizeof *out->diagonal, err));
    for (size_t p = 0; p < k; p++)
        diag[f->order[p]] = (double)f->diagonal[p] - (double)(float)f->damp;
    QT_TRY(order_new(out, diag, opt, err));
    QT_TRY(factor_again(out, f, err));
done:
    qt_free(diag);
    if (rc < 0)
        qt_factor_free(out);
    return rc;
}

int qt_factor_reorder(struct qt_factor *out, const struct qt_factor *f,
                      const struct qt_factor_options *opt, struct qt_err *err)
{
    struct qt_factor_options full = *opt;
    size_t k = f->k;
    double *h;
    int rc;
    full.damp = f->damp;
    full.group = f->group_size;
    full.backend = f->backend;
    if (f->backend && !f->v)
        return reorder_on_backend(out, f, &full, err);
    rc = qt_array_new(&h, k, k * sizeof *h, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < k; j++)
            h[f->order[i] * k + f->order[j]] =
                (double)f->h[i * k + j] - (i == j ? (double)(float)f->damp : 0);
    rc = qt_factor_new(out, h, k, &full, err);
    if (rc == QT_OK)
        rc = qt_factor_fetch(out, err);
    qt_free(h);
    return rc;
}

enum { COLUMNS = 128 }; /* columns of V^-1 per parallel item */

struct inverse {
    const struct qt_factor *f;
    float *out, *work; /* [k]; [threads][k][COLUMNS] */
};

/* H^-1 = (V^-1)^T V^-1: its diagonal is the sums of squares of the columns of V^-1. */
static int invert_columns(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct inverse *v = ctx;
    const size_t k = v->f->k, first = item * COLUMNS, end = qt_min_size(first + COLUMNS, k);
    float *x = v->work + (size_t)thread * k * COLUMNS;
    double sum[COLUMNS] = {0};
    (void)err;
    memset(x, 0, end * COLUMNS * sizeof *x);
    for (size_t j = first; j < end; j++)
        x[j * COLUMNS + j - first] = 1;
    cblas_strsm(CblasRowMajor, CblasLeft, CblasUpper, CblasNoTrans, CblasNonUnit, (int)end, COLUMNS,
                1, v->f->v, (int)k, x, COLUMNS);
    for (size_t i = 0; i < end * COLUMNS; i++)
        sum[i % COLUMNS] += (double)x[i] * (double)x[i];
    for (size_t j = first; j < end; j++)
        v->out[v->f->order[j]] = (float)sum[j - first];
    return QT_OK;
}

/* The same on the backend: H^-1 of some rows of the identity at a time. */
static int inverse_diagonal_on_backend(float *out, const struct qt_factor *f, struct qt_err *err)
{
    enum { ROWS = 2048 };
    struct qt_backend *be = f->backend;
    const size_t k = f->k, most = qt_min_size(ROWS, k);
    float *unit = NULL, *rows = NULL, *ones = NULL;
    double explained;
    int rc;
    QT_TRY(be->alloc(be, &unit, most * k * sizeof *unit, err));
    QT_TRY(be->alloc(be, &rows, most * k * sizeof *rows, err));
    QT_TRY(be->alloc(be, &ones, most * sizeof *ones, err));
    for (size_t i = 0; i < most; i++)
        out[i] = 1;
    QT_TRY(be->upload(be, ones, out, most * sizeof *ones, err));
    for (size_t first = 0; first < k; first += most) {
        const size_t m = qt_min_size(most, k - first);
        QT_TRY(be->zero(be, unit, most * k * sizeof *unit, err));
        QT_TRY(be->copy_columns(be, unit + first, k + 1, ones, 1, 1, m, err));
        QT_TRY(be->regress(be, rows, &explained, unit, f->backend_v, f->order, 1, m, k, err));
        QT_TRY(be->copy_columns(be, unit, 1, rows + first, k + 1, 1, m, err));
        QT_TRY(be->download(be, out + first, unit, m * sizeof *out, err));
    }
done:
    be->free(be, unit);
    be->free(be, rows);
    be->free(be, ones);
    return rc;
}

static int inverse_diagonal_on_host(float *out, const struct qt_factor *f, struct qt_err *err)
{
    struct inverse v = {.f = f, .out = out};
    int rc;
    openblas_set_num_threads(1);
    QT_TRY(qt_array_new(&v.work, (size_t)qt_threads() * COLUMNS, f->k * sizeof *v.work, err));
    QT_TRY(qt_parallel(qt_ceil_div(f->k, COLUMNS), invert_columns, &v, err));
done:
    qt_free(v.work);
    return rc;
}

int qt_factor_invert_diagonal(struct qt_factor *f, struct qt_err *err)
{
    float *out = NULL;
    int rc;
    if (f->inverse_diagonal)
        return QT_OK;
    QT_TRY(qt_array_new(&out, f->k, sizeof *out, err));
    QT_TRY(f->backend && !f->v ? inverse_diagonal_on_backend(out, f, err)
                               : inverse_diagonal_on_host(out, f, err));
    f->inverse_diagonal = out;
    out = NULL;
done:
    qt_free(out);
    return rc;
}

void qt_factor_free(struct qt_factor *f)
{
    float *const on_backend[] = {f->backend_h, f->backend_v, f->input_correction,
                                 f->output_correction};
    qt_free(f->order);
    qt_free(f->group);
    qt_free(f->diagonal);
    qt_free(f->inverse_diagonal);
    qt_free(f->h);
    qt_free(f->v);
    for (size_t i = 0; i < sizeof on_backend / sizeof *on_backend; i++)
        if (f->backend)
            f->backend->free(f->backend, on_backend[i]);
        else
            qt_free(on_backend[i]);
    *f = (struct qt_factor){0};
}

size_t qt_factor_group_end(const struct qt_factor *f, size_t at)
{
    size_t end = at + 1;
    while (end < f->k && f->group[end] == f->group[at])
        end++;
    return end;
}
