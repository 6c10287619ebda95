/* Corrections of the targets: see qt_factor_correct_input_error in hessian.h. */
#include "hessian/hessian.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

enum { ROWS = 128 }; /* rows per parallel item */

struct job {
    const struct qt_factor *f;
    const float *from;
    float *to;         /* [rows][k] */
    size_t rows;       /* of `from` and `to` */
    float *work;       /* [threads][ROWS][k] */
    double *explained; /* [rows] dot products of `from` and `to` */
    double shrink;
};

static int run(struct job *s, int (*fn)(void *, size_t, int, struct qt_err *), struct qt_err *err)
{
    int rc = QT_OK;
    openblas_set_num_threads(1); /* threads work on rows instead */
    QT_TRY(qt_array_new(&s->work, (size_t)qt_threads() * ROWS, s->f->k * sizeof *s->work, err));
    QT_TRY(qt_parallel(qt_ceil_div(s->rows, ROWS), fn, s, err));
done:
    qt_free(s->work);
    return rc;
}

/* ---- regression on x: C -> C H^-1 ----------------------------------------------------------- */

/* Row r of C into processing order, and row r of C H^-1 back. */
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

/* Solves x h = c for the rows of a panel, that is (x V) V^T = c. */
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

static void explain_row(void *ctx, size_t item)
{
    const struct job *s = ctx;
    const float *from = s->from + item * s->f->k, *to = s->to + item * s->f->k;
    double sum = 0;
    for (size_t i = 0; i < s->f->k; i++)
        sum += (double)from[i] * (double)to[i];
    s->explained[item] = sum;
}

static double shrinkage(const struct qt_factor *f, double explained, double error_energy,
                        size_t tokens)
{
    const double k = (double)f->k, t = (double)tokens;
    if (!(explained > 0) || !isfinite(explained) || !isfinite(error_energy) || t <= k)
        return 0;
    return fmax(0, 1 - 2 * k / (t - k) * fmax(error_energy - explained, 0) / explained);
}

static void shrink_row(void *ctx, size_t item)
{
    const struct job *s = ctx;
    float *to = s->to + item * s->f->k;
    for (size_t i = 0; i < s->f->k; i++)
        to[i] = s->shrink > 0 ? to[i] * (float)s->shrink : 0; /* to[i] may be non-finite */
}

/* *out = C H^-1 times *shrink, for C = cross[rows][k]; *explained = sum of C times C H^-1. */
static int regress_on_host(float **out, double *shrink, double *explained,
                           const struct qt_factor *f, const float *cross, size_t rows,
                           double error_energy, size_t tokens, struct qt_err *err)
{
    struct job s = {.f = f, .from = cross, .rows = rows};
    int rc = qt_array_new(out, rows, f->k * sizeof **out, err);
    if (rc < 0)
        return rc;
    s.to = *out;
    *explained = 0;
    QT_TRY(run(&s, solve_panel, err));
    QT_TRY(qt_array_new(&s.explained, rows, sizeof *s.explained, err));
    qt_parallel_for(rows, explain_row, &s);
    for (size_t i = 0; i < rows; i++)
        *explained += s.explained[i];
    s.shrink = *shrink = shrinkage(f, *explained, error_energy, tokens);
    qt_parallel_for(rows, shrink_row, &s);
done:
    qt_free(s.explained);
    return rc;
}

static int regress_on_backend(float **out, double *shrink, double *explained,
                              const struct qt_factor *f, const float *cross, size_t rows,
                              double error_energy, size_t tokens, struct qt_err *err)
{
    struct qt_backend *be = f->backend;
    const size_t cells = rows * f->k;
    float *uploaded = NULL;
    int rc;
    QT_TRY(be->alloc(be, out, cells * sizeof **out, err));
    if (!f->sums_on_backend) {
        QT_TRY(be->alloc(be, &uploaded, cells * sizeof *uploaded, err));
        QT_TRY(be->upload(be, uploaded, cross, cells * sizeof *uploaded, err));
        cross = uploaded;
    }
    QT_TRY(
        be->regress(be, *out, explained, cross, f->backend_v, f->order, f->scale, rows, f->k, err));
    *shrink = shrinkage(f, *explained, error_energy, tokens);
    QT_TRY(*shrink > 0 ? be->scale(be, *out, (float)*shrink, cells, err)
                       : be->zero(be, *out, cells * sizeof **out, err));
done:
    be->free(be, uploaded);
    return rc;
}

static int regress(float **out, double *shrink, double *explained, const struct qt_factor *f,
                   const float *cross, size_t rows, double error_energy, size_t tokens,
                   struct qt_err *err)
{
    return (f->backend ? regress_on_backend : regress_on_host)(out, shrink, explained, f, cross,
                                                               rows, error_energy, tokens, err);
}

int qt_factor_correct_input_error(struct qt_factor *f, const float *cross, double error_energy,
                                  size_t tokens, struct qt_err *err)
{
    double explained;
    return regress(&f->input_correction, &f->input_shrink, &explained, f, cross, f->k, error_energy,
                   tokens, err);
}

int qt_factor_correct_output_error(struct qt_factor *f, const float *cross, size_t n,
                                   double error_energy, size_t tokens, struct qt_err *err)
{
    return regress(&f->output_correction, &f->output_shrink, &f->output_explained, f, cross, n,
                   error_energy, tokens, err);
}

/* ---- targets -------------------------------------------------------------------------------- */

static int correct_panel(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *s = ctx;
    size_t k = s->f->k, row0 = item * ROWS, rows = qt_min_size(ROWS, s->rows - row0);
    float *copy = s->work + (size_t)thread * ROWS * k, *w = s->to + row0 * k;
    (void)err;
    memcpy(copy, w, rows * k * sizeof *copy);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, (int)k, (int)k, 1, copy,
                (int)k, s->f->input_correction, (int)k, 1, w, (int)k);
    return QT_OK;
}

int qt_factor_targets_on_backend(float *w, size_t n, const struct qt_factor *f, struct qt_err *err)
{
    struct qt_backend *be = f->backend;
    const size_t k = f->k, bytes = n * k * sizeof *w;
    const bool half = be->half;
    float *from = NULL;
    int rc = QT_OK;
    be->half = true; /* the correction is small, and its rounding errors are far smaller */
    if (f->input_correction) {
        QT_TRY(be->alloc(be, &from, bytes, err));
        QT_TRY(be->copy(be, from, w, bytes, err));
        QT_TRY(be->linear_grad_x(be, w, from, f->input_correction, true, n, k, k, err));
    }
    if (f->output_correction)
        QT_TRY(be->add(be, w, f->output_correction, n * k, err));
done:
    be->half = half;
    be->free(be, from);
    return rc;
}

/* Host memory. */
static int correct_on_backend(float *w, size_t n, const struct qt_factor *f, struct qt_err *err)
{
    struct qt_backend *be = f->backend;
    const size_t bytes = n * f->k * sizeof *w;
    float *there = NULL;
    int rc;
    QT_TRY(be->alloc(be, &there, bytes, err));
    QT_TRY(be->upload(be, there, w, bytes, err));
    QT_TRY(qt_factor_targets_on_backend(there, n, f, err));
    QT_TRY(be->download(be, w, there, bytes, err));
done:
    be->free(be, there);
    return rc;
}

static void add_row(void *ctx, size_t item)
{
    const struct job *s = ctx;
    const size_t k = s->f->k;
    for (size_t i = item * k; i < (item + 1) * k; i++)
        s->to[i] += s->from[i];
}

int qt_factor_targets(float *w, size_t n, const struct qt_factor *f, struct qt_err *err)
{
    struct job s = {.f = f, .to = w, .rows = n};
    int rc = QT_OK;
    if (!f->input_correction && !f->output_correction)
        return QT_OK;
    if (f->backend)
        return correct_on_backend(w, n, f, err);
    if (f->input_correction)
        QT_TRY(run(&s, correct_panel, err));
    s.from = f->output_correction;
    if (f->output_correction)
        qt_parallel_for(n, add_row, &s);
done:
    return rc;
}
