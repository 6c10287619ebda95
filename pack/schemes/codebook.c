/* Codebook schemes: sections, strips of codes <-> packed bytes, learning. */
#include "pack/schemes/codebook.h"

#include <math.h>
#include <string.h>

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
