/* Whole matrices in codebook schemes. Under a Hessian: the callbacks of qt_solve that round a column
 * and set the scale of a group (GPTQ, arXiv 2210.17323, and coordinate descent: hessian/hessian.h),
 * or the function of a backend that does all of it. */
#include "pack/schemes/codebook.h"

#include <math.h>
#include <string.h>

enum { R = QT_PANEL_ROWS };

/* Matrices are [column or group][stride]; stride is n rounded up to whole panels. */
struct solver {
    const struct qt_packed *p;
    struct qt_codebook cb;
    const struct qt_rowops *ops;
    size_t groups, longest;
    struct qt_codebook_codes codes;
    float *scale, *inverse; /* [groups][stride]: codes.scale as numbers, and their inverses */
    float *scratch;         /* per panel: targets of a row and their importance, in storage order,
                             * [2][longest] */
};

static void put_scale(struct solver *s, size_t group, size_t row, uint16_t bits)
{
    const size_t at = group * s->codes.stride + row;
    s->codes.scale[at] = bits;
    s->scale[at] = qt_codebook_scale(&s->cb, bits, s->codes.row_scale[row]);
    s->inverse[at] = qt_codebook_inverse(s->scale[at]);
}

/* Fits the parameters of a group. Targets of a row are R elements apart; the search needs them
 * contiguous. */
static void begin(void *ctx, const struct qt_column_group *group, const float *t, size_t row0,
                  size_t rows)
{
    struct solver *s = ctx;
    float *x = s->scratch + row0 / R * 2 * s->longest, *h = x + s->longest;
    size_t first = group->index * s->cb.group;
    for (size_t i = 0; i < group->n; i++) {
        float v = group->v[i * group->stride + i];
        h[group->col[i] - first] = v * v; /* only the diagonal of V: the search makes many trials */
    }
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < group->n; i++)
            x[group->col[i] - first] = t[i * R + r];
        struct qt_codebook_group best =
            qt_codebook_fit(&s->cb, s->ops, x, h, group->n, s->codes.row_scale[row0 + r]);
        put_scale(s, group->index, row0 + r, best.scale);
        s->codes.zero[group->index * s->codes.stride + row0 + r] = best.zero;
    }
}

/* Rounds a column whose rows have different zero-points, although a grid has one: clamps by row,
 * rounds to integers of any size (modulo 256), and adds the zero-points. */
static void round_asymmetric(uint8_t *code, const struct solver *s, float *y, const uint8_t *zero,
                             size_t rows)
{
    struct qt_grid whole = {.low = -256, .high = 256};
    for (size_t r = 0; r < rows; r++) {
        float low = s->cb.grid.low - (float)zero[r], high = s->cb.grid.high - (float)zero[r];
        y[r] = fminf(fmaxf(y[r], low), high);
    }
    s->ops->round(code, y, rows, 1, &whole);
    for (size_t r = 0; r < rows; r++)
        code[r] = (uint8_t)(code[r] + zero[r]);
}

static void round_column(void *ctx, size_t col, const float *x, float *q, float *unit, size_t row0,
                         size_t rows)
{
    struct solver *s = ctx;
    size_t stride = s->codes.stride, params = col / s->cb.group * stride + row0;
    const float *scale = s->scale + params, *inverse = s->inverse + params;
    const uint8_t *zero = s->codes.zero + params;
    uint8_t *code = s->codes.code + col * stride + row0;
    float y[R] = {0};
    for (size_t r = 0; r < rows; r++)
        y[r] = x[r] * inverse[r];
    if (s->cb.asymmetric)
        round_asymmetric(code, s, y, zero, rows);
    else
        s->ops->round(code, y, rows, 1, &s->cb.grid);
    for (size_t r = 0; r < rows; r++) {
        unit[r] = s->cb.value[code[r]] - (float)zero[r];
        q[r] = scale[r] * unit[r];
    }
}

static void get_scale(void *ctx, size_t group, float *scale, size_t row0, size_t rows)
{
    struct solver *s = ctx;
    memcpy(scale, s->scale + group * s->codes.stride + row0, rows * sizeof *scale);
}

static void set_scale(void *ctx, size_t group, float *scale, size_t row0, size_t rows)
{
    struct solver *s = ctx;
    for (size_t r = 0; r < rows; r++) {
        const size_t at = group * s->codes.stride + row0 + r;
        put_scale(s, group, row0 + r,
                  qt_codebook_nearest_scale(&s->cb, scale[r], s->codes.row_scale[row0 + r],
                                            s->codes.scale[at]));
        scale[r] = s->scale[at];
    }
}

static int store_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct solver *s = ctx;
    size_t row0 = item * QT_FRAG_ROWS, rows = qt_min_size(QT_FRAG_ROWS, s->p->n - row0);
    struct qt_strip strip = {.index = item, .rows = rows};
    (void)thread;
    int rc = qt_array_new(&strip.scratch, 1, qt_codebook_scratch_bytes(s->p), err);
    if (rc < 0)
        return rc;
    struct qt_codebook_codes rows_of = {s->codes.code + row0, s->codes.scale + row0,
                                        s->codes.zero + row0, s->codes.row_scale + row0,
                                        s->codes.stride};
    qt_codebook_store(s->p, &s->cb, &strip, &rows_of);
    qt_free(strip.scratch);
    return QT_OK;
}

static int solver_new(struct solver *s, struct qt_packed *p, struct qt_err *err)
{
    const size_t stride = qt_round_up(p->n, R);
    int rc;
    *s = (struct solver){.p = p, .ops = qt_rowops_best()};
    p->spec.scheme->codebook(&s->cb, p);
    s->codes.stride = stride;
    s->groups = qt_ceil_div(p->k, s->cb.group);
    s->longest = qt_min_size(s->cb.group, p->k);
    QT_TRY(qt_array_new(&s->codes.code, p->k, stride, err));
    QT_TRY(qt_array_new(&s->codes.scale, s->groups, stride * sizeof *s->codes.scale, err));
    QT_TRY(qt_array_new(&s->scale, s->groups, stride * sizeof *s->scale, err));
    QT_TRY(qt_array_new(&s->codes.zero, s->groups, stride, err));
    QT_TRY(qt_array_new(&s->codes.row_scale, stride, sizeof *s->codes.row_scale, err));
done:
    return rc;
}

static void solver_free(struct solver *s)
{
    qt_free(s->codes.code);
    qt_free(s->codes.scale);
    qt_free(s->scale);
    qt_free(s->inverse);
    qt_free(s->codes.zero);
    qt_free(s->codes.row_scale);
    qt_free(s->scratch);
}

static int store(struct solver *s, struct qt_err *err)
{
    return qt_parallel(qt_ceil_div(s->p->n, QT_FRAG_ROWS), store_strip, s, err);
}

/* ---- on the host ---------------------------------------------------------------------------- */

static int solve_on_host(struct qt_solve_report *out, struct solver *s, const float *w,
                         const struct qt_factor *f, const struct qt_solve_options *opt,
                         struct qt_err *err)
{
    const size_t stride = s->codes.stride, k = s->p->k;
    const struct qt_rounder rounder = {
        .ctx = s, .begin = begin, .round = round_column, .scale = get_scale, .rescale = set_scale};
    int rc;
    QT_TRY(qt_array_new(&s->inverse, s->groups, stride * sizeof *s->inverse, err));
    for (size_t i = 0; i < s->p->n; i++)
        s->codes.row_scale[i] = qt_codebook_row_scale(&s->cb, s->ops, w + i * k, k);
    QT_TRY(qt_array_new(&s->scratch, stride / R, 2 * s->longest * sizeof *s->scratch, err));
    QT_TRY(qt_solve(out, f, w, s->p->n, &rounder, opt, err));
done:
    return rc;
}

/* ---- on a backend --------------------------------------------------------------------------- */

/* Completes the job and runs it. weighted: squared errors have weights. */
static int round_on(struct qt_backend *be, struct qt_round *job, struct solver *s, bool weighted,
                    struct qt_err *err)
{
    struct qt_round_values values;
    qt_codebook_round_values(&values, &s->cb, weighted);
    job->n = s->p->n;
    job->k = s->p->k;
    job->group = s->cb.group;
    job->values = &values;
    job->stride = s->codes.stride;
    job->code = s->codes.code;
    job->scale = s->scale;
    job->zero = s->codes.zero;
    int rc = be->round(be, job, err);
    job->values = NULL;
    for (size_t i = 0; i < s->groups * s->codes.stride; i++)
        s->codes.scale[i] = qt_f32_to_f16(s->scale[i]);
    return rc;
}

static int solve_on_backend(struct qt_solve_report *out, struct solver *s, const float *w,
                            const struct qt_factor *f, const struct qt_solve_options *opt,
                            struct qt_err *err)
{
    struct qt_round job = {
        .w = w,
        .h = f->backend_h,
        .v = f->backend_v,
        .order = f->order,
        .group_at = f->group,
        .descent_rounds = opt->descent_rounds,
        .min_gain = QT_SOLVE_MIN_GAIN,
    };
    int rc = round_on(f->backend, &job, s, true, err);
    *out = (struct qt_solve_report){job.before, job.after_compensation, job.after_descent};
    return rc;
}

/* ---- a matrix ------------------------------------------------------------------------------- */

int qt_codebook_solve(struct qt_solve_report *out, struct qt_packed *p, const float *w,
                      const struct qt_factor *f, const struct qt_solve_options *opt,
                      struct qt_err *err)
{
    struct solver s;
    int rc;
    QT_TRY(solver_new(&s, p, err));
    QT_TRY(qt_packed_rounds_on(p, f->backend) ? solve_on_backend(out, &s, w, f, opt, err)
                                              : solve_on_host(out, &s, w, f, opt, err));
    QT_TRY(store(&s, err));
done:
    solver_free(&s);
    return rc;
}

int qt_codebook_quantize_on(struct qt_backend *be, struct qt_packed *p, const float *w,
                            const float *importance, struct qt_err *err)
{
    struct qt_round job = {.w = w, .importance = importance};
    struct solver s;
    int rc;
    QT_TRY(solver_new(&s, p, err));
    QT_TRY(round_on(be, &job, &s, importance != NULL, err));
    QT_TRY(store(&s, err));
done:
    solver_free(&s);
    return rc;
}
