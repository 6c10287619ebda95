/*
 * Tensors of GGUF files: blocks of 32 or 256 weights with their scales, rows of heads in another
 * order, and norms with 1 added. The layouts are those of ggml-common.h. F32 arithmetic, rounded to
 * F16 once; tensors that are no blocks keep their dtype and values.
 *
 * d, m: F16. A number of 6 bits is split in the K types; the drawings of bytes are at the
 * functions.
 */
#include "formats/gguf.h"
#include "formats/encodings/encoding.h"

enum { SMALL = 32, LARGE = 256 };

static float f16(const unsigned char *p)
{
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return qt_f16_to_f32(bits);
}

/* Code i of 4-bit codes: 0 to 15 in the low nibbles, 16 to 31 in the high nibbles. */
static int nibble(const unsigned char *p, size_t i)
{
    return i < SMALL / 2 ? p[i] & 15 : p[i - SMALL / 2] >> 4;
}

/* ---- blocks of 32 --------------------------------------------------------------------------- */

/* d, codes: w = d (code - 8) */
static void decode_q4_0(float *w, const unsigned char *p)
{
    const float d = f16(p);
    for (size_t i = 0; i < SMALL; i++)
        w[i] = (float)(nibble(p + 2, i) - 8) * d;
}

/* d, m, codes: w = d code + m */
static void decode_q4_1(float *w, const unsigned char *p)
{
    const float d = f16(p), m = f16(p + 2);
    for (size_t i = 0; i < SMALL; i++)
        w[i] = (float)nibble(p + 4, i) * d + m;
}

/* Bit 4 of code i is bit i of the word at `high`. */
static int five(const unsigned char *high, const unsigned char *low, size_t i)
{
    return nibble(low, i) | (int)(qt_word(high, 0) >> i & 1) << 4;
}

/* d, high bits, low nibbles: w = d (code - 16) */
static void decode_q5_0(float *w, const unsigned char *p)
{
    const float d = f16(p);
    for (size_t i = 0; i < SMALL; i++)
        w[i] = (float)(five(p + 2, p + 6, i) - 16) * d;
}

/* d, m, high bits, low nibbles: w = d code + m */
static void decode_q5_1(float *w, const unsigned char *p)
{
    const float d = f16(p), m = f16(p + 2);
    for (size_t i = 0; i < SMALL; i++)
        w[i] = (float)five(p + 4, p + 8, i) * d + m;
}

/* d, signed bytes: w = d q */
static void decode_q8_0(float *w, const unsigned char *p)
{
    const float d = f16(p);
    for (size_t i = 0; i < SMALL; i++)
        w[i] = (float)(int8_t)p[2 + i] * d;
}

static const signed char iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                           1,    13,   25,  38,  53,  69,  89,  113};

/* d, codes: w = d table[code] */
static void decode_iq4_nl(float *w, const unsigned char *p)
{
    const float d = f16(p);
    for (size_t i = 0; i < SMALL; i++)
        w[i] = (float)iq4_values[nibble(p + 2, i)] * d;
}

/* E8M0 scale, codes: w = scale E2M1, where code 8 is 0, not -0 */
static void decode_mxfp4(float *w, const unsigned char *p)
{
    const float scale = qt_scale_at(p, QT_F8_E8M0, 0);
    for (size_t i = 0; i < SMALL; i++) {
        const int code = nibble(p + 1, i);
        w[i] = code == 8 ? 0 : qt_fp4_values[code] * scale;
    }
}

/* ---- blocks of 256 -------------------------------------------------------------------------- */

/* 2-bit code i: each 32 bytes have 128 codes, 32 of them per pair of bits. */
static int two(const unsigned char *p, size_t i)
{
    return p[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}

/* Scale (low nibble) and minimum (high) of 16 weights [16], codes [64], d, m:
 * w = d scale code - m minimum */
static void decode_q2_k(float *w, const unsigned char *p)
{
    const float d = f16(p + 80), m = f16(p + 82);
    for (size_t i = 0; i < LARGE; i++) {
        const unsigned s = p[i / 16];
        w[i] = d * (float)(s & 15) * (float)two(p + 16, i) - m * (float)(s >> 4);
    }
}

/* Scale of 16 weights, of 12 bytes: the low nibbles of scales 0 to 7 are in the low nibbles of
 * bytes 0 to 7, those of scales 8 to 15 in the high ones; bytes 8 to 11 have the high bits. */
static int q3_scale(const unsigned char *s, size_t i)
{
    const int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
    return (low | (s[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
}

/* High bits [32], codes [64], scales [12], d: w = d scale (code - 4 if the high bit is 0) */
static void decode_q3_k(float *w, const unsigned char *p)
{
    const float d = f16(p + 108);
    for (size_t i = 0; i < LARGE; i++) {
        const int high = p[i % 32] >> i / 32 & 1;
        w[i] = d * (float)q3_scale(p + 96, i / 16) * (float)(two(p + 32, i) - (high ? 0 : 4));
    }
}

/* Scale (or minimum, m = 1) of 32 weights, of 12 bytes with 8 scales and 8 minima: those of the
 * first four are the low 6 bits of bytes 0 to 7; the last four have their low nibbles in bytes 8 to
 * 11, and their high bits above those 6 bits. */
static int q4_scale(const unsigned char *s, size_t i, int m)
{
    if (i < 4)
        return s[i + (m ? 4 : 0)] & 63;
    return (m ? s[i + 4] >> 4 : s[i + 4] & 15) | s[i - (m ? 0 : 4)] >> 6 << 4;
}

/* d, m, scales and minima [12], high bits [32] or NULL, nibbles [128]: each 32 bytes have 64 codes,
 * low nibbles first. w = d scale code - m minimum */
static void decode_scaled(float *w, const unsigned char *p, const unsigned char *high,
                          const unsigned char *low)
{
    const float d = f16(p), m = f16(p + 2);
    for (size_t g = 0; g < LARGE / SMALL; g++) {
        const float scale = d * (float)q4_scale(p + 4, g, 0);
        const float minimum = m * (float)q4_scale(p + 4, g, 1);
        for (size_t i = 0; i < SMALL; i++) {
            int code = low[g / 2 * 32 + i] >> g % 2 * 4 & 15;
            code |= high ? (high[i] >> g & 1) << 4 : 0;
            w[g * SMALL + i] = scale * (float)code - minimum;
        }
    }
}

static void decode_q4_k(float *w, const unsigned char *p)
{
    decode_scaled(w, p, NULL, p + 16);
}

static void decode_q5_k(float *w, const unsigned char *p)
{
    decode_scaled(w, p, p + 16, p + 48);
}

/* Low nibbles [128], high bits [64], scales of 16 weights [16], d. Of 128 weights, 32 each have
 * their nibbles in the low and high halves of 2 x 32 bytes, and their bits in a pair of bits of 32
 * bytes. w = d scale (code - 32) */
static void decode_q6_k(float *w, const unsigned char *p)
{
    const float d = f16(p + 208);
    for (size_t i = 0; i < LARGE; i++) {
        const size_t half = i / 128, part = i % 128 / 32, at = i % 32;
        const int low = p[half * 64 + part % 2 * 32 + at] >> part / 2 * 4 & 15;
        const int high = p[128 + half * 32 + at] >> part * 2 & 3;
        const float scale = d * (float)(int8_t)p[192 + i / 16];
        w[i] = scale * (float)((low | high << 4) - 32);
    }
}

/* d, high bits of 8 scales (U16), their low nibbles [4], codes [128] as in IQ4_NL: 32 per scale.
 * w = d (scale - 32) table[code] */
static void decode_iq4_xs(float *w, const unsigned char *p)
{
    const float d = f16(p);
    const unsigned high = p[2] | (unsigned)p[3] << 8;
    for (size_t g = 0; g < LARGE / SMALL; g++) {
        const int low = p[4 + g / 2] >> g % 2 * 4 & 15;
        const float scale = d * (float)((low | (int)(high >> 2 * g & 3) << 4) - 32);
        for (size_t i = 0; i < SMALL; i++)
            w[g * SMALL + i] = scale * (float)iq4_values[nibble(p + 8 + g * 16, i)];
    }
}

static const struct qt_gguf_block blocks[] = {
    {"F32", 0, QT_F32, 1, 4, NULL},
    {"F16", 1, QT_F16, 1, 2, NULL},
    {"BF16", 30, QT_BF16, 1, 2, NULL},
    {"Q4_0", 2, QT_U8, SMALL, 18, decode_q4_0},
    {"Q4_1", 3, QT_U8, SMALL, 20, decode_q4_1},
    {"Q5_0", 6, QT_U8, SMALL, 22, decode_q5_0},
    {"Q5_1", 7, QT_U8, SMALL, 24, decode_q5_1},
    {"Q8_0", 8, QT_U8, SMALL, 34, decode_q8_0},
    {"Q2_K", 10, QT_U8, LARGE, 84, decode_q2_k},
    {"Q3_K", 11, QT_U8, LARGE, 110, decode_q3_k},
    {"Q4_K", 12, QT_U8, LARGE, 144, decode_q4_k},
    {"Q5_K", 13, QT_U8, LARGE, 176, decode_q5_k},
    {"Q6_K", 14, QT_U8, LARGE, 210, decode_q6_k},
    {"IQ4_NL", 20, QT_U8, SMALL, 18, decode_iq4_nl},
    {"IQ4_XS", 23, QT_U8, LARGE, 136, decode_iq4_xs},
    {"MXFP4", 39, QT_U8, SMALL, 17, decode_mxfp4},
};

const struct qt_gguf_block *qt_gguf_block_find(uint32_t id)
{
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        if (blocks[i].id == id)
            return &blocks[i];
    return NULL;
}

/* ---- tensors -------------------------------------------------------------------------------- */

static int find(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err)
{
    const struct qt_gguf_block *block = t->block;
    size_t shape[QT_MAX_DIMS];
    (void)s;
    if ((!block && !t->head && !t->plus_1) || t->info.count == 0)
        return QT_OK;
    const int ndim = t->info.ndim;
    memcpy(shape, t->info.shape, sizeof shape);
    if (block && qt_mul_overflow(&shape[ndim - 1], shape[ndim - 1] / block->bytes, block->count))
        return qt_bad_part(t, t, "the memory", err);
    out->info.ndim = ndim;
    memcpy(out->info.shape, shape, (size_t)ndim * sizeof *shape);
    out->info.dtype = block ? QT_F16 : t->info.dtype;
    out->info.encoding = block ? block->name : NULL;
    if (ndim > 1 || block) {
        out->cols = shape[ndim - 1];
        out->rows = t->info.count / t->info.shape[ndim - 1];
    } else { /* a bias may be reordered like the rows of its matrix */
        out->cols = 1;
        out->rows = t->info.count;
    }
    out->matrix_rows = out->rows;
    *stem = strlen(t->info.name);
    *ending = "";
    *found = true;
    return QT_OK;
}

static void decode(float *w, const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                   size_t row, size_t n)
{
    const struct qt_slot *t = e->part[0];
    const struct qt_gguf_block *block = t->block;
    for (size_t i = row; i < row + n; i++, w += e->cols) {
        const size_t at = qt_gguf_row(i, t->head);
        if (block) {
            const size_t count = e->cols / block->count;
            for (size_t b = 0; b < count; b++)
                block->decode(w + b * block->count, data[0] + (at * count + b) * block->bytes);
        } else {
            const size_t bytes = e->cols * (qt_dtype_bits(t->info.dtype) / 8);
            qt_to_f32(w, data[0] + at * bytes, t->info.dtype, e->cols);
        }
        for (size_t j = 0; t->plus_1 && j < e->cols; j++)
            w[j] -= 1;
    }
}

const struct qt_encoding qt_encoding_gguf = {.find = find, .decode = decode};
