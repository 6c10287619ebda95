#include "pack/codebook.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { F16_ONE = 0x3c00 };

void qt_codebook_set_table(struct qt_codebook *cb, const float *table)
{
    int levels = 1 << cb->bits;
    cb->grid = (struct qt_grid){.levels = levels};
    cb->zero = 0;
    for (int i = 0; i < levels; i++) {
        cb->value[i] = cb->grid.value[i] = table[i];
        if (i)
            cb->grid.mid[i - 1] = (table[i - 1] + table[i]) / 2;
        if (fabsf(table[i]) < fabsf(table[cb->zero]))
            cb->zero = (uint8_t)i;
        cb->grid.max = fmaxf(cb->grid.max, fabsf(table[i]));
    }
}

/* ---- sections ------------------------------------------------------------------------------- */

static const char *const plane_names[QT_FRAG_MAX_PLANES] = {"plane0", "plane1", "plane2"};

int qt_codebook_describe(struct qt_packed *p, unsigned bits, size_t group, enum qt_frag_order order,
                         struct qt_err *err)
{
    unsigned width[QT_FRAG_MAX_PLANES];
    int planes = qt_frag_planes(width, bits), rc = QT_OK;
    size_t strips = qt_ceil_div(p->n, QT_FRAG_ROWS), blocks = qt_ceil_div(p->k, QT_FRAG_COLS);
    for (int i = 0; i < planes && rc == QT_OK; i++)
        rc = qt_packed_add_section(p, plane_names[i], QT_U32, 4,
                                   (size_t[]){strips, blocks, QT_FRAG_LANES, width[i]}, err);
    if (rc == QT_OK)
        rc = qt_packed_add_section(p, "scale", QT_F16, 3,
                                   (size_t[]){strips, qt_ceil_div(p->k, group), QT_FRAG_ROWS}, err);
    p->layout = order == QT_FRAG_PAIR ? "frag16x64/pair" : "frag16x64/half";
    return rc;
}

/* ---- one group's scale ---------------------------------------------------------------------- */

struct fit {
    const struct qt_codebook *cb;
    const struct qt_rowops *ops;
    const float *w, *h;
    size_t n;
    float error;   /* of the best scale so far */
    uint16_t bits; /* the best scale */
};

float qt_codebook_inverse(uint16_t scale)
{
    float s = qt_f16_to_f32(scale);
    return s != 0 ? 1 / s : 0;
}

/* Judges the scale as it will be stored, that is, after rounding to FP16. */
static bool fit_try(struct fit *f, float s)
{
    uint16_t bits = qt_f32_to_f16(s);
    if (bits == f->bits || (bits & 0x7fff) >= 0x7c00 || (bits & 0x7fff) == 0)
        return false;
    float error = f->ops->error(f->w, f->h, f->n, qt_codebook_inverse(bits), qt_f16_to_f32(bits),
                                &f->cb->grid);
    if (!(error < f->error))
        return false;
    f->error = error;
    f->bits = bits;
    return true;
}

/* Least squares for the codes that the best scale gives, repeated while it helps. */
static void fit_refine(struct fit *f)
{
    for (int round = 0; round < 4; round++) {
        float xq, qq, inv = qt_codebook_inverse(f->bits);
        f->ops->moments(&xq, &qq, f->w, f->h, f->n, inv, &f->cb->grid);
        if (!(qq > 0) || !fit_try(f, xq / qq))
            return;
    }
}

/*
 * Tables: shrinking the scale clips the largest weights and resolves the rest more finely; past a
 * half it never pays, slightly above 1 helps ends that are not equally far out, and a negative
 * scale mirrors an asymmetric table.
 *
 * Minifloats: a scale serves a whole row and its error is a rugged function of it, so the grid is
 * finer (60 steps for 20: 2.6 % less squared error at E3M2; tables gain 0.4 % from 12 to 60).
 * Without importance they do not clip: squared error would (6 % less of it at fp4), but a row's few
 * largest weights matter more than it knows. Perplexity of the model of docs/accuracy.md, clipping
 * / not: fp4 45.67 / 44.92, fp6 43.18 / 43.11, rtn 45.21 and 43.28.
 */
static void fit_search(struct fit *f, float unit)
{
    bool table = f->cb->grid.levels != 0;
    const float from = table ? 1.05f : f->h ? 1.3f : 1.5f;
    const float to = table ? 0.5f : f->h ? 0.4f : 1.0f;
    const int steps = table ? 12 : 60;
    for (int i = 0; i <= steps; i++) {
        float s = unit * (from + (to - from) * (float)i / (float)steps);
        fit_try(f, s);
        if (table)
            fit_try(f, -s);
    }
    fit_refine(f);
}

uint16_t qt_codebook_fit(const struct qt_codebook *cb, const struct qt_rowops *ops, const float *w,
                         const float *h, size_t n)
{
    float amax = ops->absmax(w, n);
    uint16_t nothing = cb->value[cb->zero] == 0 ? F16_ONE : 0;
    if (amax == 0)
        return nothing;
    float unit = amax / cb->grid.max;
    if (!cb->search) {
        uint16_t bits = qt_f32_to_f16(unit);
        return (bits & 0x7fff) ? bits : nothing;
    }
    struct fit f = {cb, ops, w, h, n, INFINITY, nothing};
    fit_try(&f, unit);
    fit_search(&f, unit);
    return f.bits;
}

/* ---- strips --------------------------------------------------------------------------------- */

/* A strip between weights and packed bytes: full blocks, padding included. */
struct strip_codes {
    uint8_t *code;   /* [16][stride] */
    size_t stride;   /* k rounded up to blocks */
    uint16_t *scale; /* [groups][16], in stored order */
    size_t groups;
};

static size_t codes_bytes(const struct qt_packed *p)
{
    return QT_FRAG_ROWS * qt_round_up(p->k, QT_FRAG_COLS);
}

static size_t strip_bytes(const struct qt_section *s)
{
    return s->bytes / s->shape[0];
}

size_t qt_codebook_scratch_bytes(const struct qt_packed *p)
{
    size_t bytes = codes_bytes(p) + qt_round_up(strip_bytes(qt_packed_section(p, "scale")), 64);
    for (size_t i = 0; i < p->nsections; i++) /* a second copy of the planes: repack_equal */
        if (p->section[i].dtype == QT_U32)
            bytes += strip_bytes(&p->section[i]);
    return bytes;
}

/* All codes zero-valued, all scales 0: the padding as it must be. */
static struct strip_codes strip_new(const struct qt_packed *p, const struct qt_codebook *cb,
                                    const struct qt_strip *strip)
{
    struct strip_codes c;
    c.code = strip->scratch;
    c.stride = qt_round_up(p->k, QT_FRAG_COLS);
    c.groups = qt_ceil_div(p->k, cb->group);
    c.scale = (uint16_t *)(void *)(c.code + codes_bytes(p));
    memset(c.code, cb->zero, codes_bytes(p));
    memset(c.scale, 0, strip_bytes(qt_packed_section(p, "scale")));
    return c;
}

static size_t group_size(const struct qt_packed *p, const struct qt_codebook *cb, size_t g)
{
    return qt_min_size(cb->group, p->k - g * cb->group);
}

/* words: planes of the strip one after the other, or NULL for the packed matrix itself. */
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

static uint16_t *strip_scales(const struct qt_packed *p, const struct qt_strip *strip)
{
    const struct qt_section *s = qt_packed_section(p, "scale");
    return (uint16_t *)(void *)(s->data + strip->index * strip_bytes(s));
}

static void store(const struct qt_packed *p, const struct qt_codebook *cb,
                  const struct qt_strip *strip, const struct strip_codes *c)
{
    pack_planes(p, cb, strip, c, NULL);
    memcpy(strip_scales(p, strip), c->scale, c->groups * QT_FRAG_ROWS * sizeof *c->scale);
}

void qt_codebook_store(const struct qt_packed *p, const struct qt_codebook *cb,
                       const struct qt_strip *strip, const uint8_t *code, const uint16_t *scale,
                       size_t stride)
{
    struct strip_codes c = strip_new(p, cb, strip);
    for (size_t r = 0; r < strip->rows; r++) {
        for (size_t i = 0; i < p->k; i++)
            c.code[r * c.stride + i] = code[i * stride + r];
        for (size_t g = 0; g < c.groups; g++)
            c.scale[g * QT_FRAG_ROWS + qt_frag_scale_slot((unsigned)r)] = scale[g * stride + r];
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
    for (size_t r = 0; r < strip->rows; r++)
        for (size_t g = 0; g < c.groups; g++) {
            size_t k0 = g * cb.group, n = group_size(p, &cb, g);
            const float *x = w + r * p->k + k0, *h = importance ? importance + k0 : NULL;
            uint16_t bits = qt_codebook_fit(&cb, ops, x, h, n);
            c.scale[g * QT_FRAG_ROWS + qt_frag_scale_slot((unsigned)r)] = bits;
            ops->round(c.code + r * c.stride + k0, x, n, qt_codebook_inverse(bits), &cb.grid);
        }
    store(p, &cb, strip, &c);
}

void qt_codebook_decode(float *w, const struct qt_packed *p, const struct qt_strip *strip)
{
    struct qt_codebook cb;
    p->spec.scheme->codebook(&cb, p);
    struct strip_codes c = strip_new(p, &cb, strip);
    const uint16_t *scale = strip_scales(p, strip);
    unpack_planes(&c, p, &cb, strip);
    for (size_t r = 0; r < strip->rows; r++)
        for (size_t g = 0; g < c.groups; g++) {
            uint16_t bits = scale[g * QT_FRAG_ROWS + qt_frag_scale_slot((unsigned)r)];
            float s = ldexpf(qt_f16_to_f32(bits), p->scale_exp2);
            const uint8_t *code = c.code + r * c.stride + g * cb.group;
            float *dst = w + r * p->k + g * cb.group;
            for (size_t i = 0, n = group_size(p, &cb, g); i < n; i++)
                dst[i] = s * cb.value[code[i]];
        }
}

bool qt_codebook_repack_equal(const struct qt_packed *p, const struct qt_strip *strip)
{
    struct qt_codebook cb;
    p->spec.scheme->codebook(&cb, p);
    struct strip_codes c = strip_new(p, &cb, strip);
    const uint16_t *scale = strip_scales(p, strip);
    uint32_t *words =
        (uint32_t *)(void *)((unsigned char *)c.scale +
                             qt_round_up(strip_bytes(qt_packed_section(p, "scale")), 64));
    unpack_planes(&c, p, &cb, strip);
    for (size_t r = 0; r < QT_FRAG_ROWS; r++) {
        size_t used = r < strip->rows ? p->k : 0;
        memset(c.code + r * c.stride + used, cb.zero, c.stride - used);
        for (size_t g = 0; r >= strip->rows && g < c.groups; g++)
            if (scale[g * QT_FRAG_ROWS + qt_frag_scale_slot((unsigned)r)] != 0)
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
