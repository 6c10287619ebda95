/*
 * lut: codes index a table of 2^b FP16 values in [-1, 1], scaled per group of channels, as in FLUTE
 * (arXiv 2407.10960).
 *
 * nf2 to nf4 use NormalFloat tables. lut2 to lut4 learn one table per tensor: Lloyd's algorithm on
 * the importance-weighted histogram of the normalized weights w / s, alternating with the search
 * for s. (FLUTE learns scales for fixed tables instead.) A scale may be negative: the tables are
 * not symmetric, and mirroring a group costs nothing.
 *
 * int2 and int3 have the integers as table, iq4nl that of GGUF's IQ4_NL, mxfp4 the values of E2M1
 * with scales that are powers of two (OCP Microscaling Formats 1.0): all divided by a power of two,
 * so that they lie in [-1, 1].
 *
 * int2 and int3 with zero-points have no table: w = s (code - z), as in int.c.
 */
#include "pack/schemes/codebook.h"

#include <math.h>
#include <string.h>

enum table { TABLE_NF, TABLE_LEARNED, TABLE_INT, TABLE_IQ4NL, TABLE_MXFP4, TABLE_NVFP4 };
static const char *const tables[] = {"nf", "learned", "int", "iq4nl", "mxfp4", "nvfp4", NULL};

static const char *const zeros[] = {"none", "group", NULL};

static const struct qt_param params[] = {
    {"bits", QT_PARAM_INT, 4, 2, 4, NULL, "bits per weight"},
    {"table", QT_PARAM_CHOICE, TABLE_NF, 0, TABLE_NVFP4, tables,
     "nf: NormalFloat; learned: fitted to each tensor by k-means, without data; int: integers; "
     "iq4nl, mxfp4, nvfp4: those of the formats"},
    {"g", QT_PARAM_INT, 128, 16, 256, NULL, "channels per scale: 32, 64, 128 or 256; nvfp4: 16"},
    {"zero", QT_PARAM_OPTION, 0, 0, 1, zeros,
     "of int3 and int2: none: symmetric; group: a zero-point for every scale"},
    QT_PARAM_METHOD,
    QT_PARAM_LEARN,
    {0},
};

static const struct qt_preset presets[] = {
    {"nf4", "bits=4,table=nf", "NormalFloat, 16 values"},
    {"nf3", "bits=3,table=nf", "NormalFloat, 8 values"},
    {"nf2", "bits=2,table=nf", "NormalFloat, 4 values"},
    {"int3", "bits=3,table=int", "-4 to 3, or 0 to 7 minus a zero-point"},
    {"int2", "bits=2,table=int", "-2 to 1, or 0 to 3 minus a zero-point"},
    {"iq4nl", "bits=4,table=iq4nl,g=32", "the 16 values of GGUF's IQ4_NL"},
    {"mxfp4", "bits=4,table=mxfp4,g=32", "E2M1 with a power-of-two scale per 32 channels (OCP MX)"},
    {"nvfp4", "bits=4,table=nvfp4,g=16", "E2M1 with an E4M3 scale per 16 channels (NVFP4)"},
    {"lut4", "bits=4,table=learned", "16 values fitted to each tensor"},
    {"lut3", "bits=3,table=learned", "8 values fitted to each tensor"},
    {"lut2", "bits=2,table=learned", "4 values fitted to each tensor"},
    {0},
};

static enum table table_of(const struct qt_spec *spec)
{
    return (enum table)qt_spec_value(spec, "table");
}

static bool has_zeros(const struct qt_spec *spec)
{
    return qt_spec_value(spec, "zero") != 0;
}

/* True if a scale is not any FP16 value. */
static bool has_own_scales(enum table table)
{
    return table == TABLE_MXFP4 || table == TABLE_NVFP4;
}

static int check_spec(const struct qt_spec *spec, struct qt_err *err)
{
    unsigned g = (unsigned)qt_spec_value(spec, "g");
    const enum table table = table_of(spec);
    const unsigned fixed = table == TABLE_IQ4NL || table == TABLE_MXFP4 ? 32
                           : table == TABLE_NVFP4                       ? 16
                                                                        : 0;
    if (fixed && g != fixed)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "g=%u: the format has groups of %u", g, fixed);
    if (!fixed && (g & (g - 1) || g < 32))
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "g=%u: must be 32, 64, 128 or 256", g);
    if (has_zeros(spec) && table != TABLE_INT)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "zero=group: only int2, int3, int4 and int8 have zero-points");
    if (has_own_scales(table) && qt_spec_value(spec, "learn") != 0)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "learn=1: the scales of mxfp4 and nvfp4 cannot be learned");
    return QT_OK;
}

/* ---- NormalFloat ---------------------------------------------------------------------------- */

/* Inverse of the standard normal distribution function by Newton's method; 0 < p < 1. */
static double normal_quantile(double p)
{
    const double sqrt_2pi = 2.5066282746310002;
    double x = 0;
    for (int i = 0; i < 60; i++) {
        double cdf = 0.5 * erfc(-x * 0.70710678118654752);
        double step = (cdf - p) * sqrt_2pi * exp(x * x / 2);
        /* Limited, because the first steps toward a tail overshoot. */
        x -= fmax(-0.5, fmin(0.5, step));
    }
    return x;
}

/* Quantiles of 2^(b-1) evenly spaced probabilities on [delta, 1/2] and 2^(b-1) + 1 on [1/2, 1 -
 * delta], with 1/2 once, divided by the last quantile (QLoRA, arXiv 2305.14314, appendix E,
 * generalized as in FLUTE, section 3). */
static void normal_float(float *table, unsigned bits)
{
    const double delta = (1.0 / 30 + 1.0 / 32) / 2;
    int half = 1 << (bits - 1);
    double end = normal_quantile(1 - delta);
    for (int i = 0; i < half; i++) {
        double low = delta + (0.5 - delta) * i / (half - 1);
        double high = 0.5 + (0.5 - delta) * (i + 1) / half;
        table[i] = i == half - 1 ? 0 : (float)(normal_quantile(low) / end);
        table[half + i] = (float)(normal_quantile(high) / end);
    }
}

/* ---- tables of other formats ---------------------------------------------------------------- */

static void integers(float *table, unsigned bits)
{
    const int half = 1 << (bits - 1);
    for (int i = 0; i < 2 * half; i++)
        table[i] = (float)(i - half) / (float)half;
}

/* ggml-common.h, kvalues_iq4nl. */
static void iq4nl(float *table)
{
    static const float values[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        table[i] = values[i] / 128;
}

static void e2m1(float *table)
{
    static const float magnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    enum { COUNT = sizeof magnitudes / sizeof *magnitudes };
    for (int i = 0; i < COUNT; i++) {
        table[COUNT + i] = magnitudes[i] / 8;
        table[COUNT - 1 - i] = i ? -magnitudes[i] / 8 : 0;
    }
}

/* The table of the spec; for learned tables, where learning starts. */
static void first_table(float *table, const struct qt_spec *spec)
{
    const unsigned bits = (unsigned)qt_spec_value(spec, "bits");
    switch (table_of(spec)) {
    case TABLE_INT:
        integers(table, bits);
        break;
    case TABLE_IQ4NL:
        iq4nl(table);
        break;
    case TABLE_MXFP4:
    case TABLE_NVFP4:
        e2m1(table);
        break;
    default:
        normal_float(table, bits);
    }
}

static void store_table(struct qt_packed *p, const float *table)
{
    uint16_t *dst = (uint16_t *)(void *)qt_packed_section(p, "table")->data;
    for (size_t i = 0; i < (size_t)1 << (unsigned)qt_spec_value(&p->spec, "bits"); i++)
        dst[i] = qt_f32_to_f16(table[i]);
}

static enum qt_scales scales_of(enum table table)
{
    return table == TABLE_MXFP4   ? QT_SCALES_POWERS
           : table == TABLE_NVFP4 ? QT_SCALES_E4M3
                                  : QT_SCALES_F16;
}

/* Codes are integers from 0, less the zero-point of their group. */
static void set_integers(struct qt_codebook *cb)
{
    const int levels = 1 << cb->bits;
    cb->asymmetric = true;
    cb->grid.high = cb->grid.max = (float)(levels - 1);
    for (int code = 0; code < levels; code++)
        cb->value[code] = (float)code;
}

static void codebook(struct qt_codebook *out, const struct qt_packed *p)
{
    const unsigned bits = (unsigned)qt_spec_value(&p->spec, "bits");
    float table[QT_GRID_MAX];
    *out = (struct qt_codebook){
        .bits = bits,
        .group = (size_t)qt_spec_value(&p->spec, "g"),
        .order = QT_FRAG_NIBBLE,
        .search = qt_spec_method(&p->spec) != QT_METHOD_RTN,
        .scales = scales_of(table_of(&p->spec)),
    };
    if (has_zeros(&p->spec)) {
        set_integers(out);
        return;
    }
    const uint16_t *stored = (const uint16_t *)(const void *)qt_packed_section(p, "table")->data;
    for (int i = 0; i < 1 << bits; i++)
        table[i] = stored ? qt_f16_to_f32(stored[i]) : 0; /* described, without data */
    qt_codebook_set_table(out, table);
}

/* ---- learned tables ------------------------------------------------------------------------- */

enum {
    BINS = 2048,            /* of the histogram of w / s over [-SPAN, SPAN] */
    PARTS = 32,             /* of the sample, at most; evenly spread over the matrix */
    PART_WEIGHTS = 1 << 14, /* of a part, at least; it consists of whole rows */
    ROUNDS = 3,             /* rounds of scales, then table */
};
static const float SPAN = 1.25f;

struct histogram {
    double weight[BINS], moment[BINS]; /* sum of h s^2, and sum of h s^2 (w / s) */
    double error;                      /* error under the table that the histogram was made with */
};

struct learner {
    const struct qt_packed *p;
    const struct qt_rowops *ops;
    const struct qt_matrix *w; /* all rows, or only those of the sample */
    bool sampled;
    const float *importance;
    struct qt_codebook cb;
    size_t nparts, part_rows; /* of the sample */
    struct histogram *parts;  /* [nparts] */
    float *rows;              /* [threads][part_rows][k] */
};

static void histogram_add(struct histogram *hist, const struct learner *l, const float *w,
                          const float *h, size_t n)
{
    uint16_t bits = qt_codebook_fit(&l->cb, l->ops, w, h, n, 0).scale;
    float s = qt_f16_to_f32(bits), inv = qt_codebook_inverse(s);
    if (l->ops->absmax(w, n) == 0)
        return;
    hist->error += (double)l->ops->error(w, h, n, inv, s, &l->cb.grid);
    for (size_t i = 0; i < n; i++) {
        float x = w[i] * inv;
        int bin = (int)((x + SPAN) * (BINS / (2 * SPAN)));
        double weight = (h ? (double)h[i] : 1) * (double)s * (double)s;
        bin = bin < 0 ? 0 : bin >= BINS ? BINS - 1 : bin;
        hist->weight[bin] += weight;
        hist->moment[bin] += weight * (double)x;
    }
}

/* The first row of a part. */
static size_t first_row(const struct learner *l, size_t item)
{
    return item * qt_ceil_div(l->p->n, l->part_rows) / l->nparts * l->part_rows;
}

static int learn_part(void *ctx, size_t item, int thread, struct qt_err *err)
{
    struct learner *l = ctx;
    const size_t k = l->p->k, row0 = first_row(l, item);
    const size_t count = qt_min_size(l->part_rows, l->p->n - row0);
    float *rows = l->rows + (size_t)thread * l->part_rows * k;
    (void)err;
    qt_matrix_rows(rows, l->w, l->sampled ? item * l->part_rows : row0, count, -l->p->scale_exp2);
    memset(&l->parts[item], 0, sizeof l->parts[item]);
    for (size_t r = 0; r < count; r++)
        for (size_t k0 = 0; k0 < k; k0 += l->cb.group)
            histogram_add(&l->parts[item], l, rows + r * k + k0,
                          l->importance ? l->importance + k0 : NULL,
                          qt_min_size(l->cb.group, k - k0));
    return QT_OK;
}

/* Adds the histograms of all parts, in their order, into parts[0]. */
static int learn_histogram(struct learner *l, struct qt_err *err)
{
    int rc = qt_parallel(l->nparts, learn_part, l, err);
    for (size_t i = 1; i < l->nparts && rc == QT_OK; i++) {
        for (int b = 0; b < BINS; b++) {
            l->parts[0].weight[b] += l->parts[i].weight[b];
            l->parts[0].moment[b] += l->parts[i].moment[b];
        }
        l->parts[0].error += l->parts[i].error;
    }
    return rc;
}

/* One step of Lloyd's algorithm: every value moves to the centroid of the bins nearest to it. */
static void lloyd_step(float *table, int levels, const struct histogram *hist)
{
    double weight[QT_GRID_MAX] = {0}, moment[QT_GRID_MAX] = {0};
    int level = 0;
    for (int b = 0; b < BINS; b++) {
        float x = ((float)b + 0.5f) * (2 * SPAN / BINS) - SPAN;
        while (level + 1 < levels && x > (table[level] + table[level + 1]) / 2)
            level++;
        weight[level] += hist->weight[b];
        moment[level] += hist->moment[b];
    }
    for (int i = 0; i < levels; i++)
        if (weight[i] > 0)
            table[i] = (float)(moment[i] / weight[i]);
}

/* Scales the table to largest magnitude 1 and rounds it to FP16; the scales absorb the factor. */
static void normalize(float *table, int levels)
{
    float top = fmaxf(fabsf(table[0]), fabsf(table[levels - 1]));
    for (int i = 0; i < levels && top > 0; i++)
        table[i] = qt_f16_to_f32(qt_f32_to_f16(table[i] / top));
}

static int learn_table(struct learner *l, struct qt_err *err)
{
    int levels = 1 << l->cb.bits, rc = QT_OK;
    float best[QT_GRID_MAX], table[QT_GRID_MAX];
    double best_error = INFINITY;
    memcpy(table, l->cb.grid.value, sizeof table);
    memcpy(best, table, sizeof best);
    for (int round = 0; round <= ROUNDS; round++) {
        qt_codebook_set_table(&l->cb, table);
        QT_TRY(learn_histogram(l, err));
        if (!(l->parts[0].error < best_error))
            break;
        best_error = l->parts[0].error;
        memcpy(best, table, sizeof best);
        for (int i = 0; i < 40; i++)
            lloyd_step(table, levels, &l->parts[0]);
        normalize(table, levels);
    }
    qt_codebook_set_table(&l->cb, best);
done:
    return rc;
}

/* Copies the rows of the sample to sample, whose data are the caller's. */
static int fetch_sample(struct qt_matrix *sample, const struct learner *l, const struct qt_copy *on,
                        struct qt_err *err)
{
    const size_t k = l->p->k, part = l->part_rows * k;
    float *rows = NULL;
    int rc = qt_array_new(&rows, l->nparts, part * sizeof *rows, err);
    *sample =
        (struct qt_matrix){.data = rows, .dtype = QT_F32, .n = l->nparts * l->part_rows, .k = k};
    for (size_t item = 0; item < l->nparts && rc == QT_OK; item++) {
        const size_t row0 = first_row(l, item);
        rc = on->be->download(on->be, rows + item * part, on->w + row0 * k,
                              qt_min_size(l->part_rows, l->p->n - row0) * k * sizeof *rows, err);
    }
    return rc;
}

static int prepare(struct qt_packed *p, const struct qt_matrix *w, const struct qt_copy *on,
                   const float *importance, struct qt_err *err)
{
    struct learner l = {
        .p = p, .ops = qt_rowops_best(), .w = w, .sampled = on != NULL, .importance = importance};
    struct qt_matrix sample = {0};
    float table[QT_GRID_MAX];
    int rc = QT_OK;
    if (has_zeros(&p->spec))
        return QT_OK;
    first_table(table, &p->spec);
    store_table(p, table);
    if (table_of(&p->spec) != TABLE_LEARNED)
        return QT_OK;
    codebook(&l.cb, p);
    l.part_rows = qt_ceil_div(PART_WEIGHTS, w->k);
    l.nparts = qt_min_size(PARTS, qt_ceil_div(w->n, l.part_rows));
    if (on) {
        l.w = &sample;
        QT_TRY(fetch_sample(&sample, &l, on, err));
    }
    QT_TRY(qt_array_new(&l.parts, l.nparts, sizeof *l.parts, err));
    QT_TRY(qt_array_new(&l.rows, (size_t)qt_threads() * l.part_rows * w->k, sizeof *l.rows, err));
    QT_TRY(learn_table(&l, err));
    store_table(p, l.cb.grid.value);
done:
    qt_free((void *)(uintptr_t)sample.data);
    qt_free(l.parts);
    qt_free(l.rows);
    return rc;
}

/* ---- the scheme ----------------------------------------------------------------------------- */

static int describe(struct qt_packed *p, struct qt_err *err)
{
    const struct qt_codebook cb = {
        .bits = (unsigned)qt_spec_value(&p->spec, "bits"),
        .group = (size_t)qt_spec_value(&p->spec, "g"),
        .order = QT_FRAG_NIBBLE,
        .asymmetric = has_zeros(&p->spec),
    };
    int rc = qt_codebook_describe(p, &cb, err);
    if (rc < 0 || cb.asymmetric)
        return rc;
    return qt_packed_add_section(p, "table", QT_F16, 1, (size_t[]){(size_t)1 << cb.bits}, err);
}

static size_t group(const struct qt_packed *p)
{
    return (size_t)qt_spec_value(&p->spec, "g");
}

static double unit_scale(const struct qt_packed *p)
{
    return has_zeros(&p->spec) ? qt_codebook_unit_scale(p) : 1;
}

/* Scales must be those that qt_codebook_nearest_scale gives; 0 in padding. */
static int check_scales(const struct qt_packed *p, struct qt_err *err)
{
    const struct qt_section *s = qt_packed_section(p, "scale");
    const uint16_t *scale = (const uint16_t *)(const void *)s->data;
    const struct qt_codebook cb = {.scales = scales_of(table_of(&p->spec))};
    for (size_t i = 0; i < s->bytes / sizeof *scale; i++)
        if (scale[i] && qt_codebook_nearest_scale(&cb, qt_f16_to_f32(scale[i]), 0, 0) != scale[i])
            return qt_fail(err, QT_E_INPUT, NULL, NULL, "scale %zu is not one of the format", i);
    return QT_OK;
}

/* The largest nominal scale of NVFP4, 8 amax / 6, then is below 8 * 448, as the search tries no
 * more than 1.05 times as much. */
static int scale_exponent(const struct qt_packed *p)
{
    return table_of(&p->spec) == TABLE_NVFP4 ? 11 : 0;
}

static int check_values(const struct qt_packed *p, struct qt_err *err)
{
    if (has_zeros(&p->spec))
        return qt_codebook_check_values(p, err);
    const struct qt_section *s = qt_packed_section(p, "table");
    const uint16_t *table = (const uint16_t *)(const void *)s->data;
    const enum table kind = table_of(&p->spec);
    const bool fixed = kind != TABLE_NF && kind != TABLE_LEARNED;
    float first[QT_GRID_MAX];
    first_table(first, &p->spec);
    if (has_own_scales(kind)) {
        int rc = check_scales(p, err);
        if (rc < 0)
            return rc;
    }
    for (size_t i = 0; i < s->shape[0]; i++) {
        float v = qt_f16_to_f32(table[i]);
        if (fixed && v != first[i])
            return qt_fail(err, QT_E_INPUT, NULL, NULL, "table entry %zu is not that of the scheme",
                           i);
        if (!(fabsf(v) <= 1))
            return qt_fail(err, QT_E_INPUT, NULL, NULL, "table entry %zu is outside [-1, 1]", i);
        if (i && v < qt_f16_to_f32(table[i - 1]))
            return qt_fail(err, QT_E_INPUT, NULL, NULL, "table entry %zu is out of order", i);
    }
    return qt_codebook_check_values(p, err);
}

const struct qt_scheme qt_scheme_lut = {
    .name = "lut",
    .help = "table look-up weights in groups: NormalFloat, fitted or fixed tables (FLUTE)",
    .presets = presets,
    .params = params,
    .check_spec = check_spec,
    .describe = describe,
    .codebook = codebook,
    .group = group,
    .unit_scale = unit_scale,
    .scale_exponent = scale_exponent,
    .prepare = prepare,
    QT_CODEBOOK_STRIPS,
    .check_values = check_values,
    .learnable = &qt_codebook_learnable,
};
