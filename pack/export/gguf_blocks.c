/* Types of GGUF tensors, and the table of the schemes that they hold. */
#include "pack/export/bits.h"
#include "pack/export/gguf.h"

#include <string.h>

static void put_f16(unsigned char *dst, float v)
{
    const uint16_t bits = qt_f32_to_f16(v);
    memcpy(dst, &bits, sizeof bits);
}

/* Weights 0 to 15 in the low nibbles, 16 to 31 in the high nibbles. */
static void put_nibbles(unsigned char *dst, const uint8_t *code)
{
    for (size_t i = 0; i < QT_GGUF_BLOCK / 2; i++)
        dst[i] = (unsigned char)(code[i] | code[i + QT_GGUF_BLOCK / 2] << 4);
}

/* F16 d, 16 bytes: w = d (code - 8) */
static void encode_q4_0(unsigned char *dst, const uint8_t *code, float scale, float zero,
                        float *decoded)
{
    (void)zero, (void)decoded;
    put_f16(dst, scale);
    put_nibbles(dst + 2, code);
}

/* F16 d, F16 m, 16 bytes: w = d code + m. m = -d zero is rounded. */
static void encode_q4_1(unsigned char *dst, const uint8_t *code, float scale, float zero,
                        float *decoded)
{
    const float offset = qt_f16_to_f32(qt_f32_to_f16(-zero * scale));
    put_f16(dst, scale);
    put_f16(dst + 2, offset);
    put_nibbles(dst + 4, code);
    for (size_t i = 0; decoded && i < QT_GGUF_BLOCK; i++)
        decoded[i] = (float)code[i] * scale + offset;
}

/* F16 d, 32 signed bytes: w = d q */
static void encode_q8_0(unsigned char *dst, const uint8_t *code, float scale, float zero,
                        float *decoded)
{
    (void)zero, (void)decoded;
    put_f16(dst, scale);
    for (size_t i = 0; i < QT_GGUF_BLOCK; i++)
        dst[2 + i] = (unsigned char)(code[i] ^ 0x80);
}

/* U8 e, 16 bytes: w = 2^(e - 127) v, v being the value of E2M1 */
static void encode_mxfp4(unsigned char *dst, const uint8_t *code, float scale, float zero,
                         float *decoded)
{
    uint8_t e2m1[QT_GGUF_BLOCK];
    (void)zero, (void)decoded;
    for (size_t i = 0; i < QT_GGUF_BLOCK; i++)
        e2m1[i] = (uint8_t)qt_e2m1(code[i]);
    dst[0] = qt_e8m0(scale);
    put_nibbles(dst + 1, e2m1);
}

static const struct qt_gguf_type q4_0 = {"Q4_0", 2, 2, QT_GGUF_BLOCK, 18, encode_q4_0};
static const struct qt_gguf_type q4_1 = {"Q4_1", 3, 3, QT_GGUF_BLOCK, 20, encode_q4_1};
static const struct qt_gguf_type q8_0 = {"Q8_0", 8, 7, QT_GGUF_BLOCK, 34, encode_q8_0};

/* F16 d, 16 bytes: w = d T[code], T being the table of iq4nl. Same bytes as Q4_0. */
static const struct qt_gguf_type iq4_nl = {"IQ4_NL", 20, 25, QT_GGUF_BLOCK, 18, encode_q4_0};
static const struct qt_gguf_type mxfp4 = {"MXFP4", 39, 38, QT_GGUF_BLOCK, 17, encode_mxfp4};

/* Schemes, or tables of lut; bits, zero: values of the parameters, -1: any. */
static const struct held {
    const char *scheme;
    int bits, zero;
    const struct qt_gguf_type *type;
    enum qt_export_fit fit;
    const char *why;
} table[] = {
    {"int", 4, 0, &q4_0, QT_EXPORT_EXACT, NULL},
    {"int", 4, 1, &q4_1, QT_EXPORT_NEAR, "zero-points become offsets of 16 bits"},
    {"int", 8, 0, &q8_0, QT_EXPORT_EXACT, NULL},
    {"iq4nl", 4, -1, &iq4_nl, QT_EXPORT_EXACT, NULL},
    {"mxfp4", 4, -1, &mxfp4, QT_EXPORT_EXACT, NULL},
};

const struct qt_gguf_type *qt_gguf_type_of(enum qt_export_fit *fit, const char **why,
                                           const struct qt_spec *spec)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const struct held *h = &table[i];
        if ((!qt_export_is(spec, h->scheme) && !qt_export_has_table(spec, h->scheme)) ||
            (h->bits >= 0 && qt_spec_value(spec, "bits") != h->bits) ||
            (h->zero >= 0 && qt_spec_value(spec, "zero") != h->zero))
            continue;
        *fit = h->fit;
        *why = h->why;
        return h->type;
    }
    *fit = QT_EXPORT_NO;
    *why = qt_export_is(spec, "int") && qt_spec_value(spec, "bits") == 8
               ? "it has no zero-points of 8 bits; int8 without them fits"
               : "it has no such type; int4, int8, iq4nl and mxfp4 fit";
    return NULL;
}

const struct qt_gguf_type *qt_gguf_type_plain(enum qt_dtype dtype)
{
    static const struct qt_gguf_type f32 = {"F32", 0, 0, 1, 4, NULL};
    static const struct qt_gguf_type f16 = {"F16", 1, 1, 1, 2, NULL};
    static const struct qt_gguf_type bf16 = {"BF16", 30, 32, 1, 2, NULL};
    return dtype == QT_F32 ? &f32 : dtype == QT_F16 ? &f16 : dtype == QT_BF16 ? &bf16 : NULL;
}
