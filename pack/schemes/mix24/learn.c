/*
 * The continuous parameters of mix24 for learning, which is the last step of the paper as well:
 * scale and zero-point of each group and row, and the outliers. A second-order scale only
 * determines the grid of its rows' scales and stays. Stored is the nearest value on a parameter's
 * grid.
 *
 * Parameters of a strip: scales [slot][16 rows], zero-points [slot][16 rows], outliers panel by
 * panel and row by row.
 */
#include "pack/schemes/mix24/mix24.h"

#include <math.h>
#include <string.h>

enum { ROWS = QT_FRAG_ROWS };

struct tuned {
    struct qt_mix24 m;
    struct qt_mix24_group *groups; /* [slots] of the strip */
    const struct qt_strip *strip;
    size_t scales; /* number of scales, and of zero-points */
};

static struct tuned open_strip(const struct qt_packed *p, const struct qt_strip *strip)
{
    struct tuned t = {.groups = strip->scratch, .strip = strip};
    qt_mix24_open(&t.m, p);
    t.scales = t.m.slots * ROWS;
    qt_mix24_unpack(t.groups, &t.m, qt_mix24_strip(&t.m, strip->index));
    return t;
}

/* Every strip has parameters for twice the average number of outliers. Outliers beyond them are not
 * tuned. */
static size_t outlier_places(const struct qt_mix24 *m)
{
    return 2 * qt_ceil_div(m->outliers, m->strips);
}

static size_t learn_count(const struct qt_packed *p)
{
    struct qt_mix24 m;
    qt_mix24_open(&m, p);
    return 2 * m.slots * ROWS + outlier_places(&m);
}

/* Number of channels of a slot's group, 0 for padding; *first: the first channel. */
static size_t channels_of(size_t *first, const struct qt_mix24 *m, size_t slot)
{
    if (m->perm[slot] == QT_MIX24_NO_GROUP)
        return 0;
    *first = m->perm[slot] * m->g;
    return qt_min_size(m->g, m->k - *first);
}

/* Calls fn for each outlier of the strip, numbered from 0. */
static void each_outlier(const struct tuned *t, void *ctx,
                         void (*fn)(void *ctx, size_t number, size_t entry, size_t row, size_t col))
{
    size_t number = 0;
    for (size_t panel = 0; t->m.csr_ptr && panel < t->m.panels; panel++)
        for (size_t r = 0; r < t->strip->rows; r++) {
            size_t i, end;
            qt_mix24_row(&i, &end, &t->m, panel, t->strip->index * ROWS + r);
            for (; i < end; i++)
                fn(ctx, number++, i, r, panel * QT_MIX24_PANEL + t->m.csr_col[i]);
        }
}

/* ---- get ------------------------------------------------------------------------------------ */

struct getting {
    const struct tuned *t;
    float *value, *unit; /* of outliers */
};

static void get_outlier(void *ctx, size_t number, size_t entry, size_t row, size_t col)
{
    const struct getting *g = ctx;
    (void)row, (void)col;
    if (number >= outlier_places(&g->t->m))
        return;
    g->value[number] = qt_f16_to_f32(g->t->m.csr_val[entry]);
    g->unit[number] = fabsf(g->value[number]);
}

static void learn_get(float *value, float *unit, const struct qt_packed *p,
                      const struct qt_strip *strip)
{
    struct tuned t = open_strip(p, strip);
    size_t count = learn_count(p), first;
    memset(value, 0, count * sizeof *value);
    memset(unit, 0, count * sizeof *unit);
    for (size_t slot = 0; slot < t.m.slots; slot++)
        for (size_t r = 0; r < strip->rows && channels_of(&first, &t.m, slot); r++) {
            size_t at = slot * ROWS + r;
            value[at] = qt_mix24_scale(&t.groups[slot], r);
            unit[at] = value[at];
            value[t.scales + at] = t.groups[slot].zero[r];
            unit[t.scales + at] = 1;
        }
    struct getting outliers = {&t, value + 2 * t.scales, unit + 2 * t.scales};
    each_outlier(&t, &outliers, get_outlier);
}

/* ---- put ------------------------------------------------------------------------------------ */

/* Sets q for the scale nearest to s, with q + z2 at least 1 and a scale that fits FP16. */
static void put_scale(struct qt_mix24_group *group, size_t r, float s)
{
    float z2 = group->z2[r / 8], s2 = qt_f16_to_f32(group->s2[r / 8]);
    float least = z2 > 0 ? 0.0f : 1.0f, most = floorf(QT_MIX24_SIGMA_MAX / s2) - z2;
    float q = rintf(s / (s2 * QT_MIX24_S2_UNIT)) - z2;
    if (isfinite(q))
        group->q[r] = (uint8_t)fmaxf(fminf(q, fminf(most, QT_MIX24_Q_MAX)), least);
}

static void put_zero(struct qt_mix24_group *group, size_t r, unsigned bits, float zero,
                     const uint16_t *outlier_rows)
{
    if (!isfinite(zero))
        return;
    group->zero[r] = (uint8_t)fmaxf(fminf(rintf(zero), (float)((1 << bits) - 1)), 0);
    for (int c = 0; c < 16; c++)
        if (outlier_rows[c] >> r & 1)
            group->code[c][r] = group->zero[r];
}

struct marking {
    const struct tuned *t;
    uint16_t *outlier_rows;
};

static void mark_outlier(void *ctx, size_t number, size_t entry, size_t row, size_t col)
{
    const struct marking *m = ctx;
    size_t g = m->t->m.g;
    (void)number, (void)entry;
    m->outlier_rows[col / g * 16 + col % g] |= (uint16_t)(1u << row);
}

/* outlier_rows[slots][16 channels], in the second half of the scratch memory: bit r is set if row r
 * has no code of its own but the code of its zero-point. */
static const uint16_t *mark_outlier_rows(const struct tuned *t)
{
    struct marking mark = {t, (uint16_t *)(void *)(t->groups + t->m.slots)};
    memset(mark.outlier_rows, 0, t->m.slots * 16 * sizeof *mark.outlier_rows);
    for (size_t slot = 0; slot < t->m.slots; slot++) {
        size_t first;
        for (size_t c = channels_of(&first, &t->m, slot); c < 16; c++)
            mark.outlier_rows[slot * 16 + c] = 0xffff;
    }
    each_outlier(t, &mark, mark_outlier);
    return mark.outlier_rows;
}

struct putting {
    const struct tuned *t;
    const float *value; /* of outliers */
};

static void put_outlier(void *ctx, size_t number, size_t entry, size_t row, size_t col)
{
    const struct putting *p = ctx;
    (void)row, (void)col;
    if (number >= outlier_places(&p->t->m))
        return;
    p->t->m.csr_val[entry] = qt_f32_to_f16(fminf(fmaxf(p->value[number], -65504), 65504));
}

static void learn_put(const struct qt_packed *p, const struct qt_strip *strip, const float *value)
{
    struct tuned t = open_strip(p, strip);
    const uint16_t *outlier_rows = mark_outlier_rows(&t);
    struct putting outliers = {&t, value + 2 * t.scales};
    size_t first;
    each_outlier(&t, &outliers, put_outlier);
    for (size_t slot = 0; slot < t.m.slots; slot++)
        for (size_t r = 0; r < strip->rows && channels_of(&first, &t.m, slot); r++) {
            size_t at = slot * ROWS + r;
            put_scale(&t.groups[slot], r, value[at]);
            put_zero(&t.groups[slot], r, qt_mix24_bits(&t.m, slot), value[t.scales + at],
                     outlier_rows + slot * 16);
        }
    qt_mix24_pack(qt_mix24_strip(&t.m, strip->index), &t.m, t.groups);
}

/* ---- gradients ------------------------------------------------------------------------------ */

struct deriving {
    const struct tuned *t;
    const float *dw;
    float *grad; /* of outliers */
    int exp2;
};

static void grad_outlier(void *ctx, size_t number, size_t entry, size_t row, size_t col)
{
    const struct deriving *d = ctx;
    (void)entry;
    if (number < outlier_places(&d->t->m))
        d->grad[number] = ldexpf(d->dw[row * d->t->m.k + qt_mix24_channel(&d->t->m, col)], d->exp2);
}

/*
 * Gradients of w = s (code - zero):
 *
 *     dL/ds = sum of dL/dw (code - zero)
 *     dL/dzero = -s * sum of dL/dw
 *
 * Weights without a code of their own contribute nothing, because code - zero is always 0.
 */
static void grad_group(float *ds, float *dzero, const struct tuned *t, size_t slot,
                       const uint16_t *outlier_rows, const float *dw, int exp2)
{
    const struct qt_mix24_group *group = &t->groups[slot];
    size_t first, channels = channels_of(&first, &t->m, slot);
    for (size_t r = 0; r < t->strip->rows && channels; r++) {
        double by_scale = 0, by_zero = 0;
        for (size_t c = 0; c < channels; c++) {
            double d = outlier_rows[c] >> r & 1 ? 0 : (double)dw[r * t->m.k + first + c];
            by_scale += d * (group->code[c][r] - group->zero[r]);
            by_zero -= d * (double)qt_mix24_scale(group, r);
        }
        ds[r] = (float)ldexp(by_scale, exp2);
        dzero[r] = (float)ldexp(by_zero, exp2);
    }
}

static void learn_grad(float *grad, const struct qt_packed *p, const struct qt_strip *strip,
                       const float *dw)
{
    struct tuned t = open_strip(p, strip);
    const uint16_t *outlier_rows = mark_outlier_rows(&t);
    struct deriving outliers = {&t, dw, grad + 2 * t.scales, p->scale_exp2};
    memset(grad, 0, learn_count(p) * sizeof *grad);
    each_outlier(&t, &outliers, grad_outlier);
    for (size_t slot = 0; slot < t.m.slots; slot++)
        grad_group(grad + slot * ROWS, grad + t.scales + slot * ROWS, &t, slot,
                   outlier_rows + slot * 16, dw, p->scale_exp2);
}

/* ---- codes ---------------------------------------------------------------------------------- */

static void learn_recode(const struct qt_packed *p, const struct qt_strip *strip, const float *w)
{
    struct tuned t = open_strip(p, strip);
    const uint16_t *outlier_rows = mark_outlier_rows(&t);
    for (size_t slot = 0; slot < t.m.slots; slot++) {
        struct qt_mix24_group *group = &t.groups[slot];
        size_t first, channels = channels_of(&first, &t.m, slot);
        float most = (float)((1 << qt_mix24_bits(&t.m, slot)) - 1);
        for (size_t r = 0; r < strip->rows; r++)
            for (size_t c = 0; c < channels; c++) {
                float x = w[r * t.m.k + first + c] / qt_mix24_scale(group, r);
                if (!(outlier_rows[slot * 16 + c] >> r & 1))
                    group->code[c][r] =
                        (uint8_t)fmaxf(fminf(rintf(x) + (float)group->zero[r], most), 0);
            }
    }
    qt_mix24_pack(qt_mix24_strip(&t.m, strip->index), &t.m, t.groups);
}

const struct qt_learnable qt_mix24_learnable = {
    .count = learn_count,
    .get = learn_get,
    .put = learn_put,
    .grad = learn_grad,
    .recode = learn_recode,
};
