/* Codebook schemes: parameters of a group by search, strips of codes <-> packed bytes, learning. */
#include "pack/schemes/codebook.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { F16_ONE = 0x3c00 };

void qt_codebook_set_table(struct qt_codebook *cb, const float *table)
{
    int levels = 1 << cb->bits;
    cb->grid = (struct qt_grid){.levels = levels};
    cb->zero_code = 0;
    for (int i = 0; i < levels; i++) {
        cb->value[i] = cb->grid.value[i] = table[i];
        if (i)
            cb->grid.mid[i - 1] = (table[i - 1] + table[i]) / 2;
        if (fabsf(table[i]) < fabsf(table[cb->zero_code]))
            cb->zero_code = (uint8_t)i;
        cb->grid.max = fmaxf(cb->grid.max, fabsf(table[i]));
    }
}

/* ---- sections ------------------------------------------------------------------------------- */

static const char *const layouts[] = {
    [QT_FRAG_NIBBLE] = "frag16x64/nibble",
    [QT_FRAG_HALF] = "frag16x64/half",
    [QT_FRAG_WHOLE] = "frag16x64/whole",
    [QT_FRAG_BYTE] = "frag16x64/byte",
};
static const char *const plane_names[QT_FRAG_MAX_PLANES] = {"plane0", "plane1", "plane2"};

int qt_codebook_describe(struct qt_packed *p, const struct qt_codebook *cb, struct qt_err *err)
{
    unsigned width[QT_FRAG_MAX_PLANES];
    int planes = qt_frag_planes(width, cb->bits), rc = QT_OK;
    size_t strips = qt_ceil_div(p->n, QT_FRAG_ROWS);
    size_t blocks = qt_round_up(qt_ceil_div(p->k, QT_FRAG_COLS), cb->pairs ? 2 : 1);
    size_t groups = qt_ceil_div(p->k, cb->group);
    for (int i = 0; i < planes && rc == QT_OK; i++)
        rc = qt_packed_add_section(p, plane_names[i], QT_U32, 4,
                                   (size_t[]){strips, blocks, QT_FRAG_LANES, width[i]}, err);
    if (rc == QT_OK)
        rc = qt_packed_add_section(p, "scale", QT_F16, 3,
                                   (size_t[]){strips, cb->multiples ? 1 : groups, QT_FRAG_ROWS},
                                   err);
    if (rc == QT_OK && cb->multiples)
        rc = qt_packed_add_section(p, "sub", QT_U8, 3, (size_t[]){strips, groups, QT_FRAG_ROWS},
                                   err);
    if (rc == QT_OK && cb->asymmetric)
        rc = qt_packed_add_section(p, "zero", QT_U8, 3,
                                   (size_t[]){strips, groups, QT_FRAG_ROWS * cb->bits / 8}, err);
    p->layout = layouts[cb->order];
    return rc;
}

size_t qt_codebook_sections(const struct qt_codebook *cb)
{
    unsigned width[QT_FRAG_MAX_PLANES];
    return (size_t)qt_frag_planes(width, cb->bits) + 1 + (cb->multiples > 0) + cb->asymmetric;
}

void qt_codebook_rows(struct qt_packed *out, const struct qt_packed *p, size_t first, size_t end)
{
    const size_t strips = qt_ceil_div(p->n, QT_FRAG_ROWS);
    *out = *p;
    out->n = end - first;
    for (size_t i = 0; i < qt_packed_divided(p); i++) {
        struct qt_section *s = &out->section[i];
        const size_t strip = s->bytes / strips;
        s->shape[0] = qt_ceil_div(out->n, QT_FRAG_ROWS);
        s->bytes = strip * s->shape[0];
        s->data += first / QT_FRAG_ROWS * strip;
    }
}

int qt_codebook_describe_all(struct qt_packed *p, struct qt_err *err)
{
    struct qt_codebook cb;
    p->spec.scheme->codebook(&cb, p);
    return qt_codebook_describe(p, &cb, err);
}

double qt_codebook_unit_scale(const struct qt_packed *p)
{
    struct qt_codebook cb;
    p->spec.scheme->codebook(&cb, p);
    return 1 / (double)cb.grid.max;
}

/* ---- parameters of one group ---------------------------------------------------------------- */

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
 * differ. A negative scale mirrors the range, for weights that reach further on one side; a
 * zero-point covers that case itself.
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
        .from = table      ? 1.05f
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

void qt_codebook_round_values(struct qt_round_values *out, const struct qt_codebook *cb,
                              bool weighted)
{
    const struct search search = search_of(cb, weighted);
    *out = (struct qt_round_values){
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

/* ---- strips --------------------------------------------------------------------------------- */

/* Codes and parameters of a strip, with padding to full fragment blocks. */
struct strip_codes {
    uint8_t *code;       /* [16][stride] */
    size_t stride;       /* k with padding */
    uint16_t *scale;     /* [groups][16], in stored order */
    uint8_t *zero;       /* same; all 0 unless asymmetric */
    uint16_t *row_scale; /* [16], in stored order; for multiples */
    size_t groups;
};

static size_t padded_k(const struct qt_packed *p)
{
    return qt_packed_section(p, plane_names[0])->shape[1] * QT_FRAG_COLS;
}

static size_t codes_bytes(const struct qt_packed *p)
{
    return QT_FRAG_ROWS * padded_k(p);
}

static size_t strip_bytes(const struct qt_section *s)
{
    return s->bytes / s->shape[0];
}

static size_t group_count(const struct qt_packed *p)
{
    const struct qt_section *sub = qt_packed_section(p, "sub");
    return (sub ? sub : qt_packed_section(p, "scale"))->shape[1];
}

/* Bytes of scales, zero-points and row scales, each aligned to 64. */
static size_t params_bytes(const struct qt_packed *p)
{
    size_t count = group_count(p) * QT_FRAG_ROWS;
    return qt_round_up(count * sizeof(uint16_t), 64) + qt_round_up(count, 64) + 64;
}

size_t qt_codebook_scratch_bytes(const struct qt_packed *p)
{
    size_t bytes = codes_bytes(p) + params_bytes(p);
    for (size_t i = 0; i < p->nsections; i++) /* a second copy of the planes for repack_equal */
        if (p->section[i].dtype == QT_U32)
            bytes += strip_bytes(&p->section[i]);
    return bytes;
}

/* Initializes a strip to padding: codes of value 0, scales 0. */
static struct strip_codes strip_new(const struct qt_packed *p, const struct qt_codebook *cb,
                                    const struct qt_strip *strip)
{
    struct strip_codes c;
    c.code = strip->scratch;
    c.stride = padded_k(p);
    c.groups = qt_ceil_div(p->k, cb->group);
    c.scale = (uint16_t *)(void *)(c.code + codes_bytes(p));
    c.zero = (uint8_t *)c.scale + qt_round_up(c.groups * QT_FRAG_ROWS * sizeof *c.scale, 64);
    c.row_scale = (uint16_t *)(void *)((uint8_t *)c.scale + params_bytes(p) - 64);
    memset(c.code, cb->zero_code, codes_bytes(p));
    memset(c.scale, 0, params_bytes(p));
    return c;
}

static void set_group(struct strip_codes *c, size_t row, size_t g, struct qt_codebook_group group)
{
    size_t at = g * QT_FRAG_ROWS + qt_frag_scale_slot((unsigned)row);
    c->scale[at] = group.scale;
    c->zero[at] = group.zero;
}

static struct qt_codebook_group get_group(const struct strip_codes *c, size_t row, size_t g)
{
    size_t at = g * QT_FRAG_ROWS + qt_frag_scale_slot((unsigned)row);
    return (struct qt_codebook_group){c->scale[at], c->zero[at]};
}

/* Sets the codes of padding channels to the zero-point of the last group, or the code nearest to
 * 0. */
static void pad_row(struct strip_codes *c, const struct qt_packed *p, const struct qt_codebook *cb,
                    size_t row)
{
    uint8_t zero = cb->asymmetric ? get_group(c, row, c->groups - 1).zero : cb->zero_code;
    memset(c->code + row * c->stride + p->k, zero, c->stride - p->k);
}

static size_t group_size(const struct qt_packed *p, const struct qt_codebook *cb, size_t g)
{
    return qt_min_size(cb->group, p->k - g * cb->group);
}

/* words: output for the planes of the strip, one after the other; NULL: the packed matrix
 * itself. */
static void pack_planes(const struct qt_packed *p, const struct qt_codebook *cb,
                        const struct qt_strip *strip, const struct strip_codes *c, uint32_t *words)
{
    unsigned width[QT_FRAG_MAX_PLANES], shift = cb->bits;
    int planes = qt_frag_planes(width, cb->bits);
    size_t blocks = c->stride / QT_FRAG_COLS;
    for (int i = 0; i < planes; i++) {
        size_t per_strip = strip_bytes(&p->section[i]);
        uint32_t *dst = words;
        if (!words)
            dst = (uint32_t *)(void *)(p->section[i].data + strip->index * per_strip);
        else
            words += per_strip / sizeof *words;
        shift -= width[i];
        for (size_t b = 0; b < blocks; b++)
            qt_frag_pack(dst + b * QT_FRAG_LANES * width[i], c->code + b * QT_FRAG_COLS, c->stride,
                         cb->order, width[i], shift);
    }
}

static void unpack_planes(struct strip_codes *c, const struct qt_packed *p,
                          const struct qt_codebook *cb, const struct qt_strip *strip)
{
    unsigned width[QT_FRAG_MAX_PLANES], shift = cb->bits;
    int planes = qt_frag_planes(width, cb->bits);
    size_t blocks = c->stride / QT_FRAG_COLS;
    memset(c->code, 0, codes_bytes(p));
    for (int i = 0; i < planes; i++) {
        const unsigned char *data = p->section[i].data + strip->index * strip_bytes(&p->section[i]);
        const uint32_t *src = (const uint32_t *)(const void *)data;
        shift -= width[i];
        for (size_t b = 0; b < blocks; b++)
            qt_frag_unpack(c->code + b * QT_FRAG_COLS, src + b * QT_FRAG_LANES * width[i],
                           c->stride, cb->order, width[i], shift);
    }
}

static unsigned char *strip_data(const struct qt_packed *p, const struct qt_strip *strip,
                                 const char *section)
{
    const struct qt_section *s = qt_packed_section(p, section);
    return s->data + strip->index * strip_bytes(s);
}

/* Zero-points are a bit string in the order of scales, lowest bits first. */
static void pack_zeros(const struct qt_packed *p, const struct qt_codebook *cb,
                       const struct qt_strip *strip, const struct strip_codes *c)
{
    unsigned char *dst = strip_data(p, strip, "zero");
    memset(dst, 0, strip_bytes(qt_packed_section(p, "zero")));
    for (size_t i = 0, bit = 0; i < c->groups * QT_FRAG_ROWS; i++, bit += cb->bits) {
        const unsigned value = (unsigned)c->zero[i] << bit % 8;
        dst[bit / 8] |= (unsigned char)value;
        if (value >> 8)
            dst[bit / 8 + 1] |= (unsigned char)(value >> 8);
    }
}

static void unpack_zeros(struct strip_codes *c, const struct qt_packed *p,
                         const struct qt_codebook *cb, const struct qt_strip *strip)
{
    const unsigned char *src = strip_data(p, strip, "zero");
    for (size_t i = 0, bit = 0; i < c->groups * QT_FRAG_ROWS; i++, bit += cb->bits) {
        unsigned value = src[bit / 8];
        if (bit % 8 + cb->bits > 8)
            value |= (unsigned)src[bit / 8 + 1] << 8;
        c->zero[i] = (uint8_t)(value >> bit % 8 & ((1u << cb->bits) - 1));
    }
}

static void unpack_params(struct strip_codes *c, const struct qt_packed *p,
                          const struct qt_codebook *cb, const struct qt_strip *strip)
{
    size_t count = c->groups * QT_FRAG_ROWS;
    if (cb->multiples)
        memcpy(c->row_scale, strip_data(p, strip, "scale"), QT_FRAG_ROWS * sizeof *c->row_scale);
    else
        memcpy(c->scale, strip_data(p, strip, "scale"), count * sizeof *c->scale);
    for (size_t i = 0; cb->multiples && i < count; i++)
        c->scale[i] = strip_data(p, strip, "sub")[i];
    if (cb->asymmetric)
        unpack_zeros(c, p, cb, strip);
}

static void store(const struct qt_packed *p, const struct qt_codebook *cb,
                  const struct qt_strip *strip, const struct strip_codes *c)
{
    pack_planes(p, cb, strip, c, NULL);
    size_t count = c->groups * QT_FRAG_ROWS;
    if (cb->multiples)
        memcpy(strip_data(p, strip, "scale"), c->row_scale, QT_FRAG_ROWS * sizeof *c->row_scale);
    else
        memcpy(strip_data(p, strip, "scale"), c->scale, count * sizeof *c->scale);
    for (size_t i = 0; cb->multiples && i < count; i++)
        strip_data(p, strip, "sub")[i] = (unsigned char)c->scale[i];
    if (cb->asymmetric)
        pack_zeros(p, cb, strip, c);
}

void qt_codebook_store(const struct qt_packed *p, const struct qt_codebook *cb,
                       const struct qt_strip *strip, const struct qt_codes *codes)
{
    struct strip_codes c = strip_new(p, cb, strip);
    for (size_t r = 0; r < strip->rows; r++) {
        for (size_t i = 0; i < p->k; i++)
            c.code[r * c.stride + i] = codes->code[i * codes->stride + r];
        for (size_t g = 0; g < c.groups; g++) {
            size_t at = g * codes->stride + r;
            set_group(&c, r, g, (struct qt_codebook_group){codes->scale[at], codes->zero[at]});
        }
        c.row_scale[qt_frag_scale_slot((unsigned)r)] = cb->multiples ? codes->row_scale[r] : 0;
        pad_row(&c, p, cb, r);
    }
    store(p, cb, strip, &c);
}

void qt_codebook_quantize(const struct qt_packed *p, const struct qt_strip *strip, const float *w,
                          const float *importance)
{
    struct qt_codebook cb;
    const struct qt_rowops *ops = qt_rowops_best();
    p->spec.scheme->codebook(&cb, p);
    struct strip_codes c = strip_new(p, &cb, strip);
    for (size_t r = 0; r < strip->rows; r++) {
        uint16_t row_scale = qt_codebook_row_scale(&cb, ops, w + r * p->k, p->k);
        c.row_scale[qt_frag_scale_slot((unsigned)r)] = row_scale;
        for (size_t g = 0; g < c.groups; g++) {
            size_t k0 = g * cb.group, n = group_size(p, &cb, g);
            const float *x = w + r * p->k + k0, *h = importance ? importance + k0 : NULL;
            struct qt_codebook_group best = qt_codebook_fit(&cb, ops, x, h, n, row_scale);
            struct qt_grid grid = qt_codebook_grid(&cb, best.zero);
            set_group(&c, r, g, best);
            float s = qt_codebook_scale(&cb, best.scale, row_scale);
            ops->round(c.code + r * c.stride + k0, x, n, qt_codebook_inverse(s), &grid);
        }
        pad_row(&c, p, &cb, r);
    }
    store(p, &cb, strip, &c);
}

void qt_codebook_decode(float *w, const struct qt_packed *p, const struct qt_strip *strip)
{
    struct qt_codebook cb;
    p->spec.scheme->codebook(&cb, p);
    struct strip_codes c = strip_new(p, &cb, strip);
    unpack_params(&c, p, &cb, strip);
    unpack_planes(&c, p, &cb, strip);
    for (size_t r = 0; r < strip->rows; r++)
        for (size_t g = 0; g < c.groups; g++) {
            struct qt_codebook_group group = get_group(&c, r, g);
            uint16_t row_scale = c.row_scale[qt_frag_scale_slot((unsigned)r)];
            float s = ldexpf(qt_codebook_scale(&cb, group.scale, row_scale), p->scale_exp2);
            const uint8_t *code = c.code + r * c.stride + g * cb.group;
            float *dst = w + r * p->k + g * cb.group;
            for (size_t i = 0, n = group_size(p, &cb, g); i < n; i++)
                dst[i] = s * (cb.value[code[i]] - (float)group.zero);
        }
}

bool qt_codebook_repack_equal(const struct qt_packed *p, const struct qt_strip *strip)
{
    struct qt_codebook cb;
    p->spec.scheme->codebook(&cb, p);
    struct strip_codes c = strip_new(p, &cb, strip);
    uint32_t *words = (uint32_t *)(void *)((unsigned char *)c.scale + params_bytes(p));
    unpack_params(&c, p, &cb, strip);
    unpack_planes(&c, p, &cb, strip);
    for (size_t r = 0; r < strip->rows; r++)
        pad_row(&c, p, &cb, r);
    for (size_t r = strip->rows; r < QT_FRAG_ROWS; r++) {
        memset(c.code + r * c.stride, cb.zero_code, c.stride);
        if (c.row_scale[qt_frag_scale_slot((unsigned)r)] != 0)
            return false;
        for (size_t g = 0; g < c.groups; g++)
            if (get_group(&c, r, g).scale != 0 || get_group(&c, r, g).zero != 0)
                return false;
    }
    pack_planes(p, &cb, strip, &c, words);
    for (size_t i = 0; i < p->nsections && p->section[i].dtype == QT_U32; i++) {
        size_t bytes = strip_bytes(&p->section[i]);
        if (memcmp(words, p->section[i].data + strip->index * bytes, bytes) != 0)
            return false;
        words += bytes / sizeof *words;
    }
    return true;
}

int qt_codebook_check_values(const struct qt_packed *p, struct qt_err *err)
{
    const struct qt_section *s = qt_packed_section(p, "scale");
    const uint16_t *scale = (const uint16_t *)(const void *)s->data;
    for (size_t i = 0; i < s->bytes / sizeof *scale; i++)
        if ((scale[i] & 0x7c00) == 0x7c00)
            return qt_fail(err, QT_E_INPUT, NULL, NULL, "scale %zu is not finite", i);
    return QT_OK;
}

/* ---- codes for other formats ---------------------------------------------------------------- */

bool qt_packed_code_info(struct qt_code_info *out, const struct qt_packed *p)
{
    struct qt_codebook cb;
    if (!p->spec.scheme->codebook || qt_is_arranged(p))
        return false;
    p->spec.scheme->codebook(&cb, p);
    if (cb.multiples)
        return false;
    *out = (struct qt_code_info){
        .bits = cb.bits,
        .group = cb.group,
        .groups = qt_ceil_div(p->k, cb.group),
        .asymmetric = cb.asymmetric,
    };
    memcpy(out->value, cb.value, sizeof out->value);
    return true;
}

void qt_packed_codes(struct qt_code_rows *out, const struct qt_packed *p, size_t row0, size_t rows,
                     unsigned char *scratch)
{
    struct qt_codebook cb;
    p->spec.scheme->codebook(&cb, p);
    for (size_t r = 0; r < rows; r += QT_FRAG_ROWS) {
        struct qt_strip strip = {
            .index = (row0 + r) / QT_FRAG_ROWS,
            .rows = qt_min_size(QT_FRAG_ROWS, rows - r),
            .scratch = scratch,
        };
        struct strip_codes c = strip_new(p, &cb, &strip);
        unpack_params(&c, p, &cb, &strip);
        unpack_planes(&c, p, &cb, &strip);
        for (size_t i = 0; i < strip.rows; i++) {
            memcpy(out->code + (r + i) * p->k, c.code + i * c.stride, p->k);
            for (size_t g = 0; g < c.groups; g++) {
                struct qt_codebook_group group = get_group(&c, i, g);
                out->scale[(r + i) * c.groups + g] = group.scale;
                out->zero[(r + i) * c.groups + g] = group.zero;
            }
        }
    }
}

/* ---- learning ------------------------------------------------------------------------------- */

static size_t learn_count(const struct qt_packed *p)
{
    return qt_packed_section(p, "scale")->shape[1] * QT_FRAG_ROWS;
}

static void learn_get(float *value, float *unit, const struct qt_packed *p,
                      const struct qt_strip *strip)
{
    const uint16_t *scale = (const uint16_t *)(const void *)strip_data(p, strip, "scale");
    for (size_t i = 0; i < learn_count(p); i++) {
        value[i] = qt_f16_to_f32(scale[i]);
        unit[i] = fabsf(value[i]);
    }
}

/* Scales keep their sign and do not become 0. They depend on `value` alone, because a resumed run
 * restores them in another order. */
static void learn_put(const struct qt_packed *p, const struct qt_strip *strip, const float *value)
{
    uint16_t *scale = (uint16_t *)(void *)strip_data(p, strip, "scale");
    for (size_t i = 0; i < learn_count(p); i++) {
        uint16_t sign = scale[i] & 0x8000;
        float size = fminf(fmaxf(sign ? -value[i] : value[i], 0x1p-24f), 65504);
        if (scale[i] & 0x7fff)
            scale[i] = sign | qt_f32_to_f16(size);
    }
}

static size_t learn_scale_at(size_t row, size_t group)
{
    return group * QT_FRAG_ROWS + qt_frag_scale_slot((unsigned)row);
}

/* dL/ds = sum of dL/dw * (value - zero-point) over the group. */
static void learn_grad(float *grad, const struct qt_packed *p, const struct qt_strip *strip,
                       const float *dw)
{
    struct qt_codebook cb;
    p->spec.scheme->codebook(&cb, p);
    struct strip_codes c = strip_new(p, &cb, strip);
    unpack_params(&c, p, &cb, strip);
    unpack_planes(&c, p, &cb, strip);
    memset(grad, 0, learn_count(p) * sizeof *grad);
    for (size_t r = 0; r < strip->rows; r++)
        for (size_t g = 0; g < c.groups; g++) {
            const uint8_t *code = c.code + r * c.stride + g * cb.group;
            const float *d = dw + r * p->k + g * cb.group;
            float zero = (float)get_group(&c, r, g).zero;
            double sum = 0;
            for (size_t i = 0, n = group_size(p, &cb, g); i < n; i++)
                sum += (double)(d[i] * (cb.value[code[i]] - zero));
            grad[learn_scale_at(r, g)] = (float)ldexp(sum, p->scale_exp2);
        }
}

static void learn_recode(const struct qt_packed *p, const struct qt_strip *strip, const float *w)
{
    struct qt_codebook cb;
    const struct qt_rowops *ops = qt_rowops_best();
    p->spec.scheme->codebook(&cb, p);
    struct strip_codes c = strip_new(p, &cb, strip);
    unpack_params(&c, p, &cb, strip);
    for (size_t r = 0; r < strip->rows; r++) {
        for (size_t g = 0; g < c.groups; g++) {
            struct qt_codebook_group group = get_group(&c, r, g);
            struct qt_grid grid = qt_codebook_grid(&cb, group.zero);
            size_t k0 = g * cb.group;
            ops->round(c.code + r * c.stride + k0, w + r * p->k + k0, group_size(p, &cb, g),
                       qt_codebook_inverse(qt_f16_to_f32(group.scale)), &grid);
        }
        pad_row(&c, p, &cb, r);
    }
    store(p, &cb, strip, &c);
}

const struct qt_learnable qt_codebook_learnable = {
    .count = learn_count,
    .get = learn_get,
    .put = learn_put,
    .grad = learn_grad,
    .recode = learn_recode,
    .scale_at = learn_scale_at,
};
