/* Whole matrices in codebook schemes. Under a Hessian: the callbacks of qt_solve that round a
 * column and set the scale of a group (GPTQ, arXiv 2210.17323, and coordinate descent:
 * hessian/hessian.h), or the function of a backend that does all of it. */
#include "pack/schemes/codebook.h"

#include <math.h>
#include <string.h>

enum { R = QT_PANEL_ROWS };

/* Matrices are [column or group][stride]; stride is n rounded up to whole panels. */
struct solver {
    struct qt_codebook cb;
    const struct qt_rowops *ops;
    size_t groups, longest;
    struct qt_codes codes;
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

/* ---- codes of a matrix ---------------------------------------------------------------------- */

static int codes_new(struct qt_codes *c, const struct qt_packed *p, struct qt_err *err)
{
    const size_t groups = qt_ceil_div(p->k, p->spec.scheme->group(p));
    int rc;
    c->stride = qt_round_up(p->n, R);
    QT_TRY(qt_array_new(&c->code, p->k, c->stride, err));
    QT_TRY(qt_array_new(&c->scale, groups, c->stride * sizeof *c->scale, err));
    QT_TRY(qt_array_new(&c->zero, groups, c->stride, err));
done:
    return rc;
}

static void codes_free(struct qt_codes *c)
{
    qt_free(c->code);
    qt_free(c->scale);
    qt_free(c->zero);
    qt_free(c->row_scale);
    qt_free(c->shared);
}

int qt_codes_new(struct qt_codes **out, const struct qt_packed *p, struct qt_err *err)
{
    int rc;
    QT_TRY(qt_array_new(out, 1, sizeof **out, err));
    QT_TRY(codes_new(*out, p, err));
done:
    return rc;
}

void qt_codes_free(struct qt_codes *codes)
{
    if (codes)
        codes_free(codes);
    qt_free(codes);
}

struct packing {
    const struct qt_packed *p;
    struct qt_codebook cb;
    const struct qt_codes *codes;
};

static int pack_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct packing *s = ctx;
    size_t row0 = item * QT_FRAG_ROWS, rows = qt_min_size(QT_FRAG_ROWS, s->p->n - row0);
    struct qt_strip strip = {.index = item, .rows = rows};
    (void)thread;
    int rc = qt_array_new(&strip.scratch, 1, qt_codebook_scratch_bytes(s->p), err);
    if (rc < 0)
        return rc;
    const struct qt_codes rows_of = {.code = s->codes->code + row0,
                                     .scale = s->codes->scale + row0,
                                     .zero = s->codes->zero + row0,
                                     .row_scale = s->codes->row_scale + row0,
                                     .stride = s->codes->stride};
    qt_codebook_store(s->p, &s->cb, &strip, &rows_of);
    qt_free(strip.scratch);
    return QT_OK;
}

int qt_codebook_pack(struct qt_packed *p, const struct qt_codes *codes, struct qt_err *err)
{
    struct packing s = {.p = p, .codes = codes};
    p->spec.scheme->codebook(&s.cb, p);
    return qt_parallel(qt_ceil_div(p->n, QT_FRAG_ROWS), pack_strip, &s, err);
}

/* ---- solving -------------------------------------------------------------------------------- */

static int solver_new(struct solver *s, struct qt_packed *p, struct qt_err *err)
{
    int rc;
    *s = (struct solver){.ops = qt_rowops_best()};
    p->spec.scheme->codebook(&s->cb, p);
    s->groups = qt_ceil_div(p->k, s->cb.group);
    s->longest = qt_min_size(s->cb.group, p->k);
    QT_TRY(codes_new(&s->codes, p, err));
    QT_TRY(qt_array_new(&s->codes.row_scale, s->codes.stride, sizeof *s->codes.row_scale, err));
    QT_TRY(qt_array_new(&s->scale, s->groups, s->codes.stride * sizeof *s->scale, err));
    QT_TRY(qt_array_new(&s->inverse, s->groups, s->codes.stride * sizeof *s->inverse, err));
    QT_TRY(
        qt_array_new(&s->scratch, s->codes.stride / R, 2 * s->longest * sizeof *s->scratch, err));
done:
    return rc;
}

static void solver_free(struct solver *s)
{
    codes_free(&s->codes);
    qt_free(s->scale);
    qt_free(s->inverse);
    qt_free(s->scratch);
}

int qt_codebook_solve(struct qt_solve_report *out, struct qt_packed *p, const float *w,
                      const struct qt_factor *f, const struct qt_solve_options *opt,
                      struct qt_err *err)
{
    struct solver s;
    const struct qt_rounder rounder = {
        .ctx = &s, .begin = begin, .round = round_column, .scale = get_scale, .rescale = set_scale};
    int rc;
    QT_TRY(solver_new(&s, p, err));
    for (size_t i = 0; i < p->n; i++)
        s.codes.row_scale[i] = qt_codebook_row_scale(&s.cb, s.ops, w + i * p->k, p->k);
    QT_TRY(qt_solve(out, f, w, p->n, &rounder, opt, err));
    QT_TRY(qt_codebook_pack(p, &s.codes, err));
done:
    solver_free(&s);
    return rc;
}

/* ---- on a backend --------------------------------------------------------------------------- */

bool qt_codebook_rounds_on(const struct qt_packed *p)
{
    struct qt_codebook cb;
    p->spec.scheme->codebook(&cb, p);
    return !cb.multiples;
}

/* A job of the backend points to these: the backend reads `values` and fills `scale`. */
struct backend_job {
    struct qt_round_values values;
    float *scale; /* [params]; NULL: only the rounded weights are wanted */
    size_t params;
};

static int codes_of_job_new(struct backend_job *s, struct qt_packed *p, struct qt_round *job,
                            struct qt_err *err)
{
    int rc;
    QT_TRY(qt_codes_new(&p->codes, p, err));
    QT_TRY(qt_array_new(&p->codes->row_scale, p->codes->stride, sizeof *p->codes->row_scale, err));
    s->params = qt_ceil_div(p->k, job->group) * p->codes->stride;
    QT_TRY(qt_array_new(&s->scale, s->params, sizeof *s->scale, err));
    job->stride = p->codes->stride;
    job->code = p->codes->code;
    job->scale = s->scale;
    job->zero = p->codes->zero;
done:
    return rc;
}

int qt_codebook_round_begin(void **state, struct qt_packed *p, const struct qt_factor *f,
                            struct qt_round *job, struct qt_err *err)
{
    struct backend_job *s;
    struct qt_codebook cb;
    int rc;
    (void)f;
    QT_TRY(qt_array_new(&s, 1, sizeof *s, err));
    *state = s;
    p->spec.scheme->codebook(&cb, p);
    qt_codebook_round_values(&s->values, &cb, job->h || job->importance);
    job->group = cb.group;
    job->values = &s->values;
    if (!job->only_rounded)
        QT_TRY(codes_of_job_new(s, p, job, err));
done:
    return rc;
}

void qt_codebook_round_end(void *state, struct qt_packed *p, bool done)
{
    struct backend_job *s = state;
    if (!s)
        return;
    for (size_t i = 0; done && s->scale && i < s->params; i++)
        p->codes->scale[i] = qt_f32_to_f16(s->scale[i]);
    qt_free(s->scale);
    qt_free(s);
}
