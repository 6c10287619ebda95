/* The table of encodings, and what they share. */
#include "formats/encodings/encoding.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static const struct qt_encoding *const encodings[] = {
    &qt_encoding_gguf, &qt_encoding_packed_int, &qt_encoding_fp4,  &qt_encoding_scaled,
    &qt_encoding_gptq, &qt_encoding_awq,        &qt_encoding_bnb4, &qt_encoding_bnb8,
};

int qt_encoding_find(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                     const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err)
{
    int rc = QT_OK;
    *found = false;
    for (size_t i = 0; i < sizeof encodings / sizeof *encodings && rc == QT_OK && !*found; i++) {
        *out = (struct qt_encoded){.encoding = encodings[i], .part = {t}};
        out->info.dtype = s->source->dtype;
        rc = encodings[i]->find(found, out, stem, ending, s, t, err);
    }
    return rc;
}

static int compare_name(const void *key, const void *slot)
{
    return strcmp(key, (*(const struct qt_slot *const *)slot)->info.name);
}

const struct qt_slot *qt_stored_find(const struct qt_stored *s, const char *stem, size_t size,
                                     const char *ending)
{
    char name[2 * QT_TENSOR_NAME_MAX];
    if (size + strlen(ending) > QT_TENSOR_NAME_MAX)
        return NULL;
    snprintf(name, sizeof name, "%.*s%s", (int)size, stem, ending);
    const struct qt_slot *const *found =
        bsearch(name, s->by_name, s->count, sizeof *s->by_name, compare_name);
    return found ? *found : NULL;
}

bool qt_is_scale_dtype(enum qt_dtype t)
{
    return t == QT_F16 || t == QT_BF16 || t == QT_F32;
}

/* An E4M3 number has no infinities, and one NaN per sign. */
static float e4m3(unsigned code)
{
    const unsigned exponent = code >> 3 & 15, mantissa = code & 7;
    const float sign = code & 0x80 ? -1.0f : 1.0f;
    if (exponent == 15 && mantissa == 7)
        return NAN;
    return exponent ? sign * ldexpf(1.0f + (float)mantissa / 8, (int)exponent - 7)
                    : sign * ldexpf((float)mantissa, -9);
}

static float e8m0(unsigned code)
{
    return code == 255 ? NAN : ldexpf(1.0f, (int)code - 127);
}

float qt_scale_at(const unsigned char *data, enum qt_dtype t, size_t i)
{
    float f;
    if (t == QT_F8_E4M3)
        return e4m3(data[i]);
    if (t == QT_F8_E8M0 || t == QT_U8)
        return e8m0(data[i]);
    qt_to_f32(&f, data + i * (qt_dtype_bits(t) / 8), t, 1);
    return f;
}

static float byte_values[3][256];

static void make_byte_values(void)
{
    for (unsigned code = 0; code < 256; code++) {
        byte_values[0][code] = e4m3(code);
        byte_values[1][code] = qt_f16_to_f32((uint16_t)(code << 8)); /* E5M2 */
        byte_values[2][code] = (float)(int8_t)code;
    }
}

const float *qt_byte_values(enum qt_dtype t)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_byte_values);
    return byte_values[t == QT_F8_E4M3 ? 0 : t == QT_F8_E5M2 ? 1 : 2];
}

const float qt_fp4_values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

void qt_encoded_shape(struct qt_encoded *out, int ndim, const size_t *shape)
{
    out->info.ndim = ndim;
    memcpy(out->info.shape, shape, (size_t)ndim * sizeof *shape);
    out->cols = shape[ndim - 1];
    out->matrix_rows = shape[ndim - 2];
    out->rows = 1; /* fits, because the stored tensor has at least as many elements */
    for (int d = 0; d + 1 < ndim; d++)
        out->rows *= shape[d];
}

int qt_bad_part(const struct qt_slot *part, const struct qt_slot *t, const char *fits,
                struct qt_err *err)
{
    char shape[128] = "";
    size_t at = 0;
    for (int d = 0; d < part->info.ndim && at < sizeof shape - 1; d++)
        at += (size_t)snprintf(shape + at, sizeof shape - at, "%s%zu", d ? ", " : "",
                               part->info.shape[d]);
    return qt_fail(err, QT_E_INPUT, t->info.file, t->info.name,
                   "cannot be dequantized: %s has dtype %s and shape [%s], which does not fit %s",
                   part == t ? "it" : part->info.name, qt_dtype_name(part->info.dtype), shape,
                   fits);
}

int qt_no_part(const struct qt_slot *t, const char *name, struct qt_err *err)
{
    return qt_fail(err, QT_E_INPUT, t->info.file, t->info.name,
                   "cannot be dequantized: there is no %s beside it", name);
}

int qt_check_groups(const struct qt_encoded *e, const struct qt_slot *groups,
                    const unsigned char *data, struct qt_err *err)
{
    const size_t count = qt_ceil_div(e->cols, e->group);
    for (size_t i = 0; i < e->cols; i++)
        if (qt_word(data, i) >= count)
            return qt_fail(err, QT_E_INPUT, groups->info.file, groups->info.name,
                           "channel %zu has group %d, but there are %zu groups", i,
                           (int)qt_word(data, i), count);
    return QT_OK;
}
