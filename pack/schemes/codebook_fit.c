/* The scale and the zero-point of a group of a codebook scheme. */
#include "pack/schemes/codebook.h"

#include <math.h>
#include <stdlib.h>

enum { F16_ONE = 0x3c00 };

struct fit {
    const struct qt_codebook *cb;
    const struct qt_rowops *ops;
    const float *w, *h;
    size_t n;
    uint16_t row_scale;
    struct qt_grid grid;
    float error;                   /* of `best` */
    struct qt_codebook_group best; /* its zero-point is that of `grid` */
};

struct qt_grid qt_codebook_grid(const struct qt_codebook *cb, uint8_t zero)
{
    struct qt_grid grid = cb->grid;
    grid.low -= (float)zero;
    grid.high -= (float)zero;
    return grid;
}

float qt_codebook_inverse(float scale)
{
    return scale != 0 ? 1 / scale : 0;
}

float qt_codebook_scale(const struct qt_codebook *cb, uint16_t scale, uint16_t row_scale)
{
    return cb->multiples ? (float)scale * qt_f16_to_f32(row_scale) : qt_f16_to_f32(scale);
}

float qt_nearest_e4m3(float s)
{
    enum { MIN_EXPONENT = -6, MANTISSA = 3, LARGEST = 448 };
    int exponent;
    frexpf(s, &exponent);
    exponent = exponent - 1 > MIN_EXPONENT ? exponent - 1 : MIN_EXPONENT;
    const float step = ldexpf(1, exponent - MANTISSA);
    return fminf(rintf(s / step) * step, LARGEST);
}

/* The power of two whose ratio to s > 0 is nearest to 1. */
static float nearest_power(float s)
{
    int exponent;
    const float fraction = frexpf(s, &exponent); /* in [1/2, 1) */
    return ldexpf(1, fraction < 0.70710678f ? exponent - 1 : exponent);
}

uint16_t qt_codebook_nearest_scale(const struct qt_codebook *cb, float s, uint16_t row_scale,
                                   uint16_t instead)
{
    if (cb->multiples)
        return (uint16_t)fminf(fmaxf(rintf(s * qt_codebook_inverse(qt_f16_to_f32(row_scale))), 1),
                               (float)cb->multiples);
    if (cb->scales != QT_SCALES_F16 && !(s > 0))
        return instead;
    uint16_t bits = qt_f32_to_f16(cb->scales == QT_SCALES_POWERS ? nearest_power(s)
                                  : cb->scales == QT_SCALES_E4M3 ? 8 * qt_nearest_e4m3(s / 8)
                                                                 : s);
    return (bits & 0x7fff) < 0x7c00 ? bits : instead;
}

uint16_t qt_codebook_row_scale(const struct qt_codebook *cb, const struct qt_rowops *ops,
                               const float *w, size_t k)
{
    float top = cb->multiples ? ops->absmax(w, k) : 0;
    uint16_t bits = qt_f32_to_f16(top / cb->grid.max / (float)(cb->multiples ? cb->multiples : 1));
    return bits ? bits : F16_ONE;
}

/* Tries scale s, as it will be stored. Returns true if it lowers the error. */
static bool fit_try(struct fit *f, float s)
{
    uint16_t bits = qt_codebook_nearest_scale(f->cb, s, f->row_scale, 0);
    if ((bits & 0x7fff) == 0 || (bits == f->best.scale && f->error < INFINITY))
        return false;
    float stored = qt_codebook_scale(f->cb, bits, f->row_scale);
    float error = f->ops->error(f->w, f->h, f->n, qt_codebook_inverse(stored), stored, &f->grid);
    if (!(error < f->error))
        return false;
    f->error = error;
    f->best.scale = bits;
    return true;
}

/* Replaces the scale by the least-squares scale for its codes, as long as that lowers the error. */
static void fit_refine(struct fit *f)
{
    for (int round = 0; round < 4; round++) {
        float xq, qq;
        float inv = qt_codebook_inverse(qt_codebook_scale(f->cb, f->best.scale, f->row_scale));
        f->ops->moments(&xq, &qq, f->w, f->h, f->n, inv, &f->grid);
        if (!(qq > 0) || !fit_try(f, xq / qq))
            return;
    }
}

struct search {
    float from, to; /* first and last factor */
    int steps;
    bool mirrored; /* negative scales, too */
};

/*
 * The search tries multiples of the nominal scale, which maps the largest weight to the largest
 * value.
 *
 * Tables and integers: a smaller scale clips the largest weights and resolves the others better. A
 * factor below 1/2 never helps. A factor slightly above 1 helps if the two ends of the range
 * differ. Of scales that are powers of two, the next one above the nominal scale must be tried:
 * with it, values that were rounded to the table before stay as they are. A negative scale mirrors
 * the range, for weights that reach further on one side; a zero-point covers that case itself.
 *
 * Minifloats: a scale serves a whole row and the error is a rugged function of it, so the steps are
 * finer: 60 steps instead of 20 lower the squared error of E3M2 by 2.6 % (tables gain 0.4 % from 12
 * to 60). Without importance the search does not clip. Clipping would lower the squared error (by 6
 * % for fp4), but the few largest weights of a row matter more than that. Perplexity of the model
 * of docs/accuracy.md, with clipping / without: fp4 45.67 / 44.92, fp6 43.18 / 43.11; rtn 45.21,
 * 43.28.
 */
static struct search search_of(const struct qt_codebook *cb, bool weighted)
{
    const bool table = cb->grid.exp_bits == 0;
    return (struct search){
        .from = table      ? cb->scales == QT_SCALES_POWERS ? 1.5f : 1.05f
                : weighted ? 1.3f
                           : 1.5f,
        .to = table      ? 0.5f
              : weighted ? 0.4f
                         : 1.0f,
        .steps = table ? 12 : 60,
        .mirrored = table && !cb->asymmetric && !cb->multiples,
    };
}

static void fit_search(struct fit *f, float nominal)
{
    const struct search search = search_of(f->cb, f->h);
    for (int i = 0; i <= search.steps; i++) {
        float s =
            nominal * (search.from + (search.to - search.from) * (float)i / (float)search.steps);
        fit_try(f, s);
        if (search.mirrored)
            fit_try(f, -s);
    }
    fit_refine(f);
}

/* Finds the best scale for a fixed zero-point. */
static void fit_scale(struct fit *f, float nominal)
{
    if (!f->cb->search) {
        uint16_t bits = qt_codebook_nearest_scale(f->cb, nominal, f->row_scale, 0);
        f->best.scale = (bits & 0x7fff) ? bits : f->best.scale;
        return;
    }
    fit_try(f, nominal);
    fit_search(f, nominal);
}

/*
 * Asymmetric: the range covers the weights and 0. Clipping both ends by the same factor keeps the
 * zero-point, so the search tries the zero-points around it, each with its own scales.
 */
static void fit_zero(struct fit *f)
{
    const struct fit start = *f;
    float low = 0, high = 0, levels = f->cb->grid.max;
    for (size_t i = 0; i < f->n; i++) {
        low = fminf(low, f->w[i]);
        high = fmaxf(high, f->w[i]);
    }
    float nominal = (high - low) / levels;
    int middle = (int)rintf(-low / (high - low) * levels), reach = f->cb->search ? 2 : 0;
    for (int zero = middle - reach; zero <= middle + reach; zero++) {
        struct fit one = start;
        if (zero < 0 || zero > (int)levels)
            continue;
        one.grid = qt_codebook_grid(f->cb, (uint8_t)zero);
        one.best.zero = (uint8_t)zero;
        fit_scale(&one, nominal);
        if (!f->cb->search || one.error < f->error)
            *f = one;
    }
}

struct qt_codebook_group qt_codebook_fit(const struct qt_codebook *cb, const struct qt_rowops *ops,
                                         const float *w, const float *h, size_t n,
                                         uint16_t row_scale)
{
    float amax = ops->absmax(w, n);
    struct fit f = {cb, ops, w, h, n, row_scale, cb->grid, INFINITY, {0, 0}};
    if (!cb->multiples) /* any multiple may be the best one, also the first */
        f.best.scale = cb->value[cb->zero_code] == 0 ? F16_ONE : 0;
    if (amax > 0 && cb->asymmetric)
        fit_zero(&f);
    else if (amax > 0)
        fit_scale(&f, amax / cb->grid.max);
    if (cb->multiples && f.best.scale == 0)
        f.best.scale = 1;
    return f.best;
}

static int by_value(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Code of a value; of 0 the one without a sign. */
static uint8_t code_of(const struct qt_codebook *cb, float value)
{
    unsigned code = 0;
    while (cb->value[code] != value || (value == 0 && signbit(cb->value[code])))
        code++;
    return (uint8_t)code;
}

enum { WHOLE = 8 }; /* `least` and `bits` of integers: multiples of 1 below 2^(WHOLE + 1) */

void qt_codebook_round_values(struct qt_round_values *out, const struct qt_codebook *cb,
                              bool weighted)
{
    const struct search search = search_of(cb, weighted);
    const int e = cb->grid.exp_bits;
    *out = (struct qt_round_values){
        .floats = !cb->grid.levels,
        .least = e ? 2 - (1 << (e - 1)) : WHOLE,
        .bits = e ? cb->grid.man_bits : WHOLE,
        .largest = cb->grid.max,
        .scales = cb->scales,
        .zeros = cb->asymmetric,
        .first_scale = cb->value[cb->zero_code] == 0,
        .steps = cb->search ? (unsigned)search.steps : 0,
        .from = search.from,
        .to = search.to,
        .mirrored = search.mirrored,
    };
    for (unsigned i = 0; i < 1u << cb->bits; i++) /* codes of infinity are not used */
        if (isfinite(cb->value[i]) && !(cb->value[i] == 0 && signbit(cb->value[i])))
            out->value[out->count++] = cb->value[i];
    qsort(out->value, out->count, sizeof *out->value, by_value);
    for (unsigned i = 0; i < out->count; i++)
        out->code[i] = code_of(cb, out->value[i]);
}
