/* E(q) = sum over rows of (w - q) H (w - q)^T for given values q, by matrix products. */
#include "hessian/hessian.h"

#include <cblas.h>

enum { ROWS = QT_PANEL_ROWS }; /* rows per parallel item */

struct job {
    const struct qt_factor *f;
    const float *w, *q;
    size_t n;
    float *d, *dh; /* w - q in processing order, and (w - q) H. CPU: ROWS rows per thread; backend:
                      all rows */
    double *sums;  /* [n] */
};

static void subtract(float *d, const struct job *s, size_t row)
{
    const float *w = s->w + row * s->f->k, *q = s->q + row * s->f->k;
    for (size_t j = 0; j < s->f->k; j++)
        d[j] = w[s->f->order[j]] - q[s->f->order[j]];
}

static double dot(const float *x, const float *y, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)y[i];
    return sum;
}

static int error_of_panel(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *s = ctx;
    const size_t k = s->f->k, row0 = item * ROWS, rows = qt_min_size(ROWS, s->n - row0);
    float *d = s->d + (size_t)thread * ROWS * k, *dh = s->dh + (size_t)thread * ROWS * k;
    (void)err;
    for (size_t r = 0; r < rows; r++)
        subtract(d + r * k, s, row0 + r);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, (int)k, (int)k, 1, d, (int)k,
                s->f->h, (int)k, 0, dh, (int)k);
    for (size_t r = 0; r < rows; r++)
        s->sums[row0 + r] = dot(d + r * k, dh + r * k, k);
    return QT_OK;
}

static int error_on_cpu(struct job *s, struct qt_err *err)
{
    const size_t rows = (size_t)qt_threads() * ROWS, row_bytes = s->f->k * sizeof *s->d;
    int rc;
    openblas_set_num_threads(1); /* threads work on panels instead */
    QT_TRY(qt_array_new(&s->d, rows, row_bytes, err));
    QT_TRY(qt_array_new(&s->dh, rows, row_bytes, err));
    QT_TRY(qt_parallel(qt_ceil_div(s->n, ROWS), error_of_panel, s, err));
done:
    return rc;
}

static void subtract_row(void *ctx, size_t item)
{
    const struct job *s = ctx;
    subtract(s->d + item * s->f->k, s, item);
}

static void sum_row(void *ctx, size_t item)
{
    const struct job *s = ctx;
    const size_t k = s->f->k;
    s->sums[item] = dot(s->d + item * k, s->dh + item * k, k);
}

static int error_on_backend(struct job *s, struct qt_err *err)
{
    struct qt_backend *be = s->f->backend;
    const size_t k = s->f->k, row_bytes = k * sizeof *s->d, bytes = s->n * row_bytes;
    void *d = NULL, *dh = NULL;
    int rc;
    QT_TRY(qt_array_new(&s->d, s->n, row_bytes, err));
    QT_TRY(qt_array_new(&s->dh, s->n, row_bytes, err));
    qt_parallel_for(s->n, subtract_row, s);
    QT_TRY(be->alloc(be, &d, bytes, err));
    QT_TRY(be->alloc(be, &dh, bytes, err));
    QT_TRY(be->upload(be, d, s->d, bytes, err));
    QT_TRY(be->linear(be, dh, d, s->f->backend_h, NULL, s->n, k, k, err)); /* H is symmetric */
    QT_TRY(be->download(be, s->dh, dh, bytes, err));
    qt_parallel_for(s->n, sum_row, s);
done:
    be->free(be, d);
    be->free(be, dh);
    return rc;
}

int qt_solve_errors(double *out, const struct qt_factor *f, const float *w, const float *q,
                    size_t n, struct qt_err *err)
{
    struct job s = {.f = f, .w = w, .q = q, .n = n};
    int rc;
    QT_TRY(qt_array_new(&s.sums, n, sizeof *s.sums, err));
    QT_TRY(f->backend ? error_on_backend(&s, err) : error_on_cpu(&s, err));
    for (size_t i = 0; i < n; i++)
        out[i / ROWS] = (i % ROWS ? out[i / ROWS] : 0) + s.sums[i];
done:
    qt_free(s.d);
    qt_free(s.dh);
    qt_free(s.sums);
    return rc;
}

int qt_solve_error(double *out, const struct qt_factor *f, const float *w, const float *q, size_t n,
                   struct qt_err *err)
{
    const size_t panels = qt_ceil_div(n, ROWS);
    double *panel = NULL;
    int rc;
    *out = 0;
    QT_TRY(qt_array_new(&panel, panels, sizeof *panel, err));
    QT_TRY(qt_solve_errors(panel, f, w, q, n, err));
    for (size_t i = 0; i < panels; i++)
        *out += panel[i];
done:
    qt_free(panel);
    return rc;
}
