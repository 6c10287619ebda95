#include "hessian/hessian.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

enum { ROWS = 128 }; /* of a panel, on one thread */

struct job {
    const struct qt_factor *f;
    const float *from;
    float *to;         /* [rows][k] */
    size_t rows;       /* of both */
    float *work;       /* [threads][ROWS][k]; on a backend [rows][k] */
    double *explained; /* [rows]: products of `from` and `to` */
    double shrink;
};

static int run(struct job *s, int (*fn)(void *, size_t, int, struct qt_err *), struct qt_err *err)
{
    int rc = QT_OK;
    openblas_set_num_threads(1); /* panels are the threads */
    QT_TRY(qt_array_new(&s->work, (size_t)qt_threads() * ROWS, s->f->k * sizeof *s->work, err));
    QT_TRY(qt_parallel(qt_ceil_div(s->rows, ROWS), fn, s, err));
done:
    qt_free(s->work);
    return rc;
}

/* ---- regression on x: sums of products -> C H^-1 ----------------------------------------------
 */

/* Row r of C, columns in processing order, and of C H^-1 from such. */
static void gather(float *x, const struct job *s, size_t r)
{
    for (size_t j = 0; j < s->f->k; j++)
        x[j] = (float)((double)s->from[r * s->f->k + s->f->order[j]] * s->f->scale);
}

static void scatter(const float *x, const struct job *s, size_t r)
{
    for (size_t j = 0; j < s->f->k; j++)
        s->to[r * s->f->k + s->f->order[j]] = x[j];
}

/* Rows of the result: x h = c, that is (x V) V^T = c. */
static int solve_panel(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *s = ctx;
    const struct qt_factor *f = s->f;
    size_t k = f->k, row0 = item * ROWS, rows = qt_min_size(ROWS, s->rows - row0);
    float *x = s->work + (size_t)thread * ROWS * k;
    (void)err;
    for (size_t r = 0; r < rows; r++)
        gather(x + r * k, s, row0 + r);
    cblas_strsm(CblasRowMajor, CblasRight, CblasUpper, CblasTrans, CblasNonUnit, (int)rows, (int)k,
                1, f->v, (int)k, x, (int)k);
    cblas_strsm(CblasRowMajor, CblasRight, CblasUpper, CblasNoTrans, CblasNonUnit, (int)rows,
                (int)k, 1, f->v, (int)k, x, (int)k);
    for (size_t r = 0; r < rows; r++)
        scatter(x + r * k, s, row0 + r);
    return QT_OK;
}

static int gather_row(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *s = ctx;
    (void)thread;
    (void)err;
    gather(s->work + item * s->f->k, s, item);
    return QT_OK;
}

static int scatter_row(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *s = ctx;
    (void)thread;
    (void)err;
    scatter(s->work + item * s->f->k, s, item);
    return QT_OK;
}

/* All rows there. */
static int solve_on_backend(struct job *s, struct qt_err *err)
{
    const size_t k = s->f->k, row_bytes = k * sizeof *s->work, bytes = s->rows * row_bytes;
    struct qt_backend *be = s->f->backend;
    void *x = NULL, *v = NULL;
    int rc;
    QT_TRY(qt_array_new(&s->work, s->rows, row_bytes, err));
    QT_TRY(qt_parallel(s->rows, gather_row, s, err));
    QT_TRY(be->alloc(be, &x, bytes, err));
    QT_TRY(be->alloc(be, &v, k * row_bytes, err));
    QT_TRY(be->upload(be, x, s->work, bytes, err));
    QT_TRY(be->upload(be, v, s->f->v, k * row_bytes, err));
    QT_TRY(be->solve_upper(be, x, v, true, s->rows, k, err));
    QT_TRY(be->solve_upper(be, x, v, false, s->rows, k, err));
    QT_TRY(be->download(be, s->work, x, bytes, err));
    QT_TRY(qt_parallel(s->rows, scatter_row, s, err));
done:
    be->free(be, x);
    be->free(be, v);
    qt_free(s->work);
    return rc;
}

static int explain_row(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *s = ctx;
    const float *from = s->from + item * s->f->k, *to = s->to + item * s->f->k;
    double sum = 0;
    (void)thread;
    (void)err;
    for (size_t i = 0; i < s->f->k; i++)
        sum += (double)from[i] * (double)to[i];
    s->explained[item] = sum;
    return QT_OK;
}

static double shrinkage(const struct job *s, double strayed, size_t tokens)
{
    double explained = 0, k = (double)s->f->k, t = (double)tokens;
    for (size_t i = 0; i < s->rows; i++)
        explained += s->explained[i];
    if (!(explained > 0) || !isfinite(explained) || !isfinite(strayed) || t <= k)
        return 0;
    return fmax(0, 1 - 2 * k / (t - k) * fmax(strayed - explained, 0) / explained);
}

static int shrink_row(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *s = ctx;
    float *to = s->to + item * s->f->k;
    (void)thread;
    (void)err;
    for (size_t i = 0; i < s->f->k; i++)
        to[i] = s->shrink > 0 ? to[i] * (float)s->shrink : 0; /* it may not be finite */
    return QT_OK;
}

/* *out = C H^-1, shrunk; cross[rows][k]: C. */
static int regress(float **out, double *shrink, const struct qt_factor *f, const float *cross,
                   size_t rows, double strayed, size_t tokens, struct qt_err *err)
{
    struct job s = {.f = f, .from = cross, .rows = rows};
    int rc = qt_array_new(out, rows, f->k * sizeof **out, err);
    if (rc < 0)
        return rc;
    s.to = *out;
    QT_TRY(f->backend && f->backend->solve_upper ? solve_on_backend(&s, err)
                                                 : run(&s, solve_panel, err));
    QT_TRY(qt_array_new(&s.explained, rows, sizeof *s.explained, err));
    QT_TRY(qt_parallel(rows, explain_row, &s, err));
    s.shrink = *shrink = shrinkage(&s, strayed, tokens);
    QT_TRY(qt_parallel(rows, shrink_row, &s, err));
done:
    qt_free(s.explained);
    return rc;
}

int qt_factor_correct_input_error(struct qt_factor *f, const float *cross, double strayed,
                                  size_t tokens, struct qt_err *err)
{
    return regress(&f->shift, &f->shift_shrink, f, cross, f->k, strayed, tokens, err);
}

int qt_factor_correct_residual_error(struct qt_factor *f, const float *cross, size_t n,
                                     double strayed, size_t tokens, struct qt_err *err)
{
    return regress(&f->residual, &f->residual_shrink, f, cross, n, strayed, tokens, err);
}

/* ---- targets -------------------------------------------------------------------------------- */

static int shift_panel(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *s = ctx;
    size_t k = s->f->k, row0 = item * ROWS, rows = qt_min_size(ROWS, s->rows - row0);
    float *copy = s->work + (size_t)thread * ROWS * k, *w = s->to + row0 * k;
    (void)err;
    memcpy(copy, w, rows * k * sizeof *copy);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, (int)k, (int)k, 1, copy,
                (int)k, s->f->shift, (int)k, 1, w, (int)k);
    return QT_OK;
}

/* By one product there. */
static int shift_on_backend(float *w, size_t n, const struct qt_factor *f, struct qt_err *err)
{
    struct qt_backend *be = f->backend;
    const size_t k = f->k, bytes = n * k * sizeof *w;
    void *shift = NULL, *from = NULL, *to = NULL;
    int rc;
    QT_TRY(be->alloc(be, &shift, k * k * sizeof *f->shift, err));
    QT_TRY(be->alloc(be, &from, bytes, err));
    QT_TRY(be->alloc(be, &to, bytes, err));
    QT_TRY(be->upload(be, shift, f->shift, k * k * sizeof *f->shift, err));
    QT_TRY(be->upload(be, from, w, bytes, err));
    QT_TRY(be->copy(be, to, from, bytes, err));
    QT_TRY(be->linear_grad_x(be, to, from, shift, true, n, k, k, err));
    QT_TRY(be->download(be, w, to, bytes, err));
done:
    be->free(be, shift);
    be->free(be, from);
    be->free(be, to);
    return rc;
}

static int add_row(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *s = ctx;
    const size_t k = s->f->k;
    (void)thread;
    (void)err;
    for (size_t i = item * k; i < (item + 1) * k; i++)
        s->to[i] += s->from[i];
    return QT_OK;
}

int qt_factor_targets(float *w, size_t n, const struct qt_factor *f, struct qt_err *err)
{
    struct job s = {.f = f, .to = w, .rows = n};
    int rc = QT_OK;
    if (f->shift)
        QT_TRY(f->backend ? shift_on_backend(w, n, f, err) : run(&s, shift_panel, err));
    s.from = f->residual;
    if (f->residual)
        QT_TRY(qt_parallel(n, add_row, &s, err));
done:
    return rc;
}
