/* Quantized activations of w4ax linears: the reference in plain C, and reading from containers. */
#include "pack/activations/plan.h"
#include "pack/schemes/scheme.h"

#include <math.h>
#include <string.h>

enum { TOKENS = 16 }; /* per item of a parallel loop */

/* ---- description ---------------------------------------------------------------------------- */

int qt_act_new(struct qt_act *out, size_t k, unsigned bits, struct qt_err *err)
{
    size_t blocks = qt_ceil_div(k, QT_ACT_BLOCK);
    int rc = QT_OK;
    *out = (struct qt_act){.k = k, .clip = 1};
    QT_TRY(qt_array_new(&out->order, k, sizeof *out->order, err));
    QT_TRY(qt_array_new(&out->factor, k, sizeof *out->factor, err));
    QT_TRY(qt_array_new(&out->bits, blocks, 1, err));
    for (size_t i = 0; i < k; i++) {
        out->order[i] = (uint32_t)i;
        out->factor[i] = 1;
    }
    memset(out->bits, (int)bits, blocks);
done:
    if (rc < 0)
        qt_act_free(out);
    return rc;
}

void qt_act_set_spec(struct qt_act *a, const struct qt_spec *spec)
{
    a->scales = (enum qt_act_scales)qt_spec_value(spec, "scales");
    a->rotate = qt_spec_value(spec, "rotate") > 0;
}

void qt_act_free(struct qt_act *a)
{
    qt_free(a->order);
    qt_free(a->factor);
    qt_free(a->bits);
    *a = (struct qt_act){0};
}

/* ---- tokens --------------------------------------------------------------------------------- */

/* Returns NaN if any x is NaN, so that a NaN is never rounded to a number. */
static float absmax(const float *x, size_t n)
{
    float top = 0;
    for (size_t i = 0; i < n; i++)
        top = isnan(top) || fabsf(x[i]) <= top ? top : fabsf(x[i]);
    return top;
}

/* The product in double is exact; adding 1.5 * 2^52 rounds to an integer, ties to even. */
static void round_block(float *x, size_t n, float s, float limit)
{
    bool zero = s < 0x1p-120f;
    float inverse = zero ? 0 : 1 / s;
    for (size_t i = 0; i < n; i++) {
        double q = (double)x[i] * inverse;
        q = q < -limit ? -limit : q > limit ? limit : q;
        x[i] = zero ? 0 : s * (float)((q + 0x1.8p52) - 0x1.8p52);
    }
}

static float block_scale(const struct qt_act *a, unsigned bits, float top, float token_top)
{
    float unit = token_top * (float)(1.0 / 127);
    if (a->scales == QT_ACT_SCALES_BLOCK)
        return bits == 4 ? top * (float)((double)a->clip / 7) : top * (float)(1.0 / 127);
    if (a->scales == QT_ACT_SCALES_ROW || bits == 8 || unit == 0)
        return unit;
    return unit * fminf(fmaxf(rintf(top * a->clip / (7 * unit)), 1), 18);
}

/* Rounds a token x[k] whose channels are in packed order and scale. */
static void round_token(float *x, const struct qt_act *a)
{
    float token_top = absmax(x, a->k);
    for (size_t b = 0, at = 0; at < a->k; b++, at += QT_ACT_BLOCK) {
        size_t n = qt_min_size(QT_ACT_BLOCK, a->k - at);
        float s = block_scale(a, a->bits[b], absmax(x + at, n), token_top);
        round_block(x + at, n, s, a->bits[b] == 4 ? 7 : 127);
    }
}

/* Bring a token from source order x[k] to packed order, scale and rotation t[k], and back. t is
 * changed. */
static void arrange_token(float *t, const float *x, const struct qt_act *a)
{
    for (size_t p = 0; p < a->k; p++)
        t[p] = x[a->order[p]] * a->factor[p];
    if (a->rotate)
        qt_rotate(t, a->k);
}

static void restore_token(float *x, float *t, const struct qt_act *a)
{
    if (a->rotate)
        qt_rotate(t, a->k);
    for (size_t p = 0; p < a->k; p++)
        x[a->order[p]] = t[p] / a->factor[p];
}

enum step { ARRANGE = 1, ROUND = 2, RESTORE = 4 };

struct job {
    const struct qt_act *a;
    int steps;
    float *y;
    const float *x;
    size_t m;
    float *scratch; /* [threads][k] */
};

static int act_item(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *job = ctx;
    const size_t end = qt_min_size((item + 1) * TOKENS, job->m), k = job->a->k;
    float *t = job->scratch + (size_t)thread * k;
    (void)err;
    for (size_t i = item * TOKENS; i < end; i++) {
        const float *x = job->x + i * k;
        if (job->steps & ARRANGE)
            arrange_token(t, x, job->a);
        else
            memcpy(t, x, k * sizeof *t);
        if (job->steps & ROUND)
            round_token(t, job->a);
        if (job->steps & RESTORE)
            restore_token(job->y + i * k, t, job->a);
        else
            memcpy(job->y + i * k, t, k * sizeof *t);
    }
    return QT_OK;
}

static int run(int steps, float *y, const float *x, size_t m, const struct qt_act *a,
               struct qt_err *err)
{
    struct job job = {.a = a, .steps = steps, .y = y, .x = x, .m = m};
    int rc;
    QT_TRY(qt_array_new(&job.scratch, (size_t)qt_threads(), a->k * sizeof *job.scratch, err));
    QT_TRY(qt_parallel(qt_ceil_div(m, TOKENS), act_item, &job, err));
done:
    qt_free(job.scratch);
    return rc;
}

int qt_act_apply(float *y, const float *x, size_t m, const struct qt_act *a, struct qt_err *err)
{
    return run(ARRANGE | ROUND | RESTORE, y, x, m, a, err);
}

int qt_act_apply_stored(float *y, const float *x, size_t m, const struct qt_act *a,
                        struct qt_err *err)
{
    return run(ARRANGE | ROUND, y, x, m, a, err);
}

int qt_act_arrange(float *y, const float *x, size_t m, const struct qt_act *a, struct qt_err *err)
{
    return run(ARRANGE, y, x, m, a, err);
}

int qt_act_round(float *y, const float *x, size_t m, const struct qt_act *a, struct qt_err *err)
{
    return run(ROUND, y, x, m, a, err);
}

int qt_act_apply_on(struct qt_backend *be, float *y, const float *x, size_t m,
                    const struct qt_act *a, struct qt_err *err)
{
    return be->round_inputs ? be->round_inputs(be, y, x, m, a, err) : qt_act_apply(y, x, m, a, err);
}

int qt_act_arrange_on(struct qt_backend *be, float *y, const float *x, size_t m,
                      const struct qt_act *a, struct qt_err *err)
{
    return be->arrange_inputs ? be->arrange_inputs(be, y, x, m, a, err)
                              : qt_act_arrange(y, x, m, a, err);
}

/* ---- containers ----------------------------------------------------------------------------- */

static const struct qt_tensor *find_section(const struct qt_entry *e, const char *name)
{
    for (size_t i = 0; i < e->nsections; i++)
        if (strcmp(e->section[i].name, name) == 0)
            return e->section[i].tensor;
    return NULL;
}

int qt_act_section(void *dst, size_t bytes, const struct qt_container *c, const struct qt_entry *e,
                   const char *name, struct qt_err *err)
{
    const struct qt_tensor *section = find_section(e, name);
    struct qt_blob blob;
    if (!section)
        return qt_fail(err, QT_E_INPUT, qt_container_dir(c), e->name, "has no section '%s'", name);
    int rc = qt_ckpt_read(&blob, qt_container_ckpt(c), section, err);
    if (rc == QT_OK && blob.size != bytes)
        rc = qt_fail(err, QT_E_INPUT, qt_container_dir(c), e->name,
                     "section '%s' has %zu bytes, expected %zu", name, blob.size, bytes);
    if (rc == QT_OK)
        memcpy(dst, blob.data, bytes);
    qt_blob_free(&blob);
    return rc;
}

int qt_act_check(const struct qt_act *a, const char *file, const char *tensor, struct qt_err *err)
{
    for (size_t i = 0; i < a->k; i++)
        if (a->order[i] >= a->k)
            return qt_fail(err, QT_E_INPUT, file, tensor,
                           "col_order: entry %zu is %u, but there are %zu channels", i, a->order[i],
                           a->k);
    for (size_t i = 0; i < a->k; i++)
        if (!(a->factor[i] > 0) || !isfinite(a->factor[i]))
            return qt_fail(err, QT_E_INPUT, file, tensor,
                           "channel %zu has the factor %g, which is not positive and finite", i,
                           (double)a->factor[i]);
    for (size_t b = 0; b < qt_ceil_div(a->k, QT_ACT_BLOCK); b++)
        if (a->bits[b] != 4 && a->bits[b] != 8)
            return qt_fail(err, QT_E_INPUT, file, tensor,
                           "channel block %zu has %u bits, not 4 or 8", b, a->bits[b]);
    return a->clip > 0 && a->clip <= 1
               ? QT_OK
               : qt_fail(err, QT_E_INPUT, file, tensor, "the clip ratio %g is not in (0, 1]",
                         (double)a->clip);
}

int qt_act_row_factors(float *factor, const struct qt_container *c, const char *weight,
                       size_t first, size_t n, struct qt_err *err)
{
    const struct qt_entry *e = qt_container_find(c, weight);
    uint32_t *order = NULL;
    int8_t *exp2 = NULL;
    int rc = QT_OK;
    for (size_t i = 0; i < n; i++)
        factor[i] = 1;
    if (!e || !find_section(e, "row_exp2"))
        return QT_OK;
    if (first > e->n || n > e->n - first)
        return qt_fail(err, QT_E_INTERNAL, qt_container_dir(c), e->name, "has no rows %zu to %zu",
                       first, first + n);
    QT_TRY(qt_array_new(&order, e->n, sizeof *order, err));
    QT_TRY(qt_array_new(&exp2, e->n, sizeof *exp2, err));
    QT_TRY(qt_act_section(order, e->n * sizeof *order, c, e, "row_order", err));
    QT_TRY(qt_act_section(exp2, e->n, c, e, "row_exp2", err));
    for (size_t r = first; r < first + n; r++) {
        if (order[r] < first || order[r] - first >= n) {
            rc = qt_fail(err, QT_E_INPUT, qt_container_dir(c), e->name,
                         "row_order: entry %zu is %u, outside rows %zu to %zu", r, order[r], first,
                         first + n - 1);
            goto done;
        }
        factor[order[r] - first] = ldexpf(1, exp2[r]);
    }
done:
    qt_free(order);
    qt_free(exp2);
    return rc;
}

int qt_act_open(struct qt_act *out, const struct qt_container *c, const struct qt_entry *e,
                struct qt_err *err)
{
    struct qt_spec spec;
    int8_t *exp2 = NULL;
    size_t k = e->k;
    int rc = qt_act_new(out, k, 8, err);
    if (rc < 0)
        return rc;
    QT_TRY(qt_spec_read(&spec, e->spec, err));
    qt_act_set_spec(out, &spec);
    QT_TRY(qt_array_new(&exp2, k, sizeof *exp2, err));
    QT_TRY(qt_act_section(out->order, k * sizeof *out->order, c, e, "col_order", err));
    QT_TRY(qt_act_section(exp2, k, c, e, "col_exp2", err));
    for (size_t i = 0; i < k; i++)
        out->factor[i] = ldexpf(1, -exp2[i]);
    QT_TRY(qt_act_section(out->bits, qt_ceil_div(k, QT_ACT_BLOCK), c, e, "bits", err));
    QT_TRY(qt_act_section(&out->clip, sizeof out->clip, c, e, "clip", err));
    QT_TRY(qt_act_check(out, qt_container_dir(c), e->name, err));
done:
    qt_free(exp2);
    if (rc < 0)
        qt_act_free(out);
    return rc;
}
