/*
 * Integers of GPTQ, packed in words of 32 bits along the input channels (codes) or the output
 * channels (zero-points), the first in the lowest bits.
 *
 *     M.qweight  I32 [K b / 32][N]
 *     M.qzeros   I32 [G][N b / 32]; checkpoint_format "gptq" stores the zero-point minus 1
 *     M.scales   F16, BF16 or F32 [G][N]
 *     M.g_idx    I32 [K]: group of each input channel; absent: channels in order
 *     value = (code - zero) * scale
 */
#include "formats/encodings/encoding.h"

enum { CODES, SCALES, ZEROS, GROUPS, WORD = 32, STRIP = 16 };

/* Sets what has to be added to a word of zero-points. */
static int read_format(uint32_t *add, const struct qt_encoded *e, const struct qt_stored *s,
                       const struct qt_slot *t, struct qt_err *err)
{
    const char *format = qt_source_string(s->source, "checkpoint_format");
    if (!format)
        format = qt_source_string(s->source, "format");
    if (format && strcmp(format, "gptq") != 0 && strcmp(format, "gptq_v2") != 0)
        return qt_fail(err, QT_E_UNSUPPORTED, t->info.file, t->info.name,
                       "cannot be dequantized: checkpoint_format '%s' of GPTQ is not supported",
                       format);
    *add = 0; /* 1 in each field; a zero-point of 0 has borrowed from the next field */
    for (unsigned at = 0; at < WORD && !(format && strcmp(format, "gptq_v2") == 0); at += e->bits)
        *add |= 1u << at;
    return QT_OK;
}

static int find(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err)
{
    const struct qt_tensor *w = &t->info;
    if (!qt_name_ends_in(w->name, ".qweight") || w->dtype != QT_I32 || w->ndim != 2 ||
        w->count == 0)
        return QT_OK;
    const size_t size = strlen(w->name) - strlen(".qweight");
    const struct qt_slot *scales = qt_stored_find(s, w->name, size, ".scales");
    const struct qt_slot *zeros = qt_stored_find(s, w->name, size, ".qzeros");
    const struct qt_slot *groups = qt_stored_find(s, w->name, size, ".g_idx");
    if (!scales || !zeros)
        return qt_no_part(t, scales ? "qzeros" : "scales", err);
    const struct qt_tensor *g = &scales->info, *z = &zeros->info;
    if (g->ndim != 2 || g->shape[1] != w->shape[1]) /* AWQ */
        return QT_OK;
    const size_t n = w->shape[1], per_column = g->shape[0];
    size_t shape[2] = {n, 0}, bits = 0;
    if (z->ndim == 2 && z->dtype == QT_I32 && z->shape[0] == per_column &&
        z->shape[1] < SIZE_MAX / WORD)
        bits = z->shape[1] * WORD / n;
    if ((bits != 2 && bits != 4 && bits != 8) || bits * n != z->shape[1] * WORD)
        return qt_bad_part(zeros, t, "codes of 2, 4 or 8 bits", err);
    if (qt_mul_overflow(&shape[1], w->shape[0], WORD / bits))
        return qt_bad_part(t, t, "the memory", err);
    if (!qt_is_scale_dtype(g->dtype) || per_column == 0 || (!groups && shape[1] % per_column))
        return qt_bad_part(scales, t, "the codes", err);
    if (groups && (groups->info.dtype != QT_I32 || groups->info.count != shape[1]))
        return qt_bad_part(groups, t, "the codes", err);
    qt_encoded_shape(out, 2, shape);
    out->bits = (unsigned)bits;
    int rc = read_format(&out->zero_add, out, s, t, err);
    if (rc < 0)
        return rc;
    out->part[SCALES] = scales;
    out->part[ZEROS] = zeros;
    out->part[GROUPS] = groups;
    out->group = qt_ceil_div(shape[1], per_column);
    out->info.encoding = bits == 8 ? "gptq int8" : bits == 4 ? "gptq int4" : "gptq int2";
    *stem = size;
    *ending = ".weight";
    *found = true;
    return QT_OK;
}

static int check(const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                 struct qt_err *err)
{
    return e->part[GROUPS] ? qt_check_groups(e, e->part[GROUPS], data[GROUPS], err) : QT_OK;
}

/* Strips of output channels, so that consecutive words are read together. */
static void decode_strip(float *w, const struct qt_encoded *e,
                         const unsigned char *const data[QT_PARTS], size_t row, size_t n)
{
    const unsigned bits = e->bits, mask = (1u << bits) - 1, per_word = WORD / bits;
    const enum qt_dtype dtype = e->part[SCALES]->info.dtype;
    const size_t zero_words = e->part[ZEROS]->info.shape[1];
    float scale[STRIP] = {0}, zero[STRIP] = {0};
    size_t before = SIZE_MAX;
    for (size_t k = 0; k < e->cols; k++) {
        const size_t g = e->part[GROUPS] ? qt_word(data[GROUPS], k) : k / e->group;
        for (size_t i = 0; i < n && g != before; i++) {
            const size_t at = (row + i) * bits;
            const uint32_t word = qt_word(data[ZEROS], g * zero_words + at / WORD) + e->zero_add;
            scale[i] = qt_scale_at(data[SCALES], dtype, g * e->rows + row + i);
            zero[i] = (float)(word >> at % WORD & mask);
        }
        before = g;
        for (size_t i = 0; i < n; i++) {
            const uint32_t word = qt_word(data[CODES], k / per_word * e->rows + row + i);
            w[i * e->cols + k] = ((float)(word >> k % per_word * bits & mask) - zero[i]) * scale[i];
        }
    }
}

static void decode(float *w, const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                   size_t row, size_t n)
{
    for (size_t i = 0; i < n; i += STRIP)
        decode_strip(w + i * e->cols, e, data, row + i, qt_min_size(STRIP, n - i));
}

const struct qt_encoding qt_encoding_gptq = {.find = find, .check = check, .decode = decode};
