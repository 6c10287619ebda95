/*
 * Integers of compressed-tensors (pack-quantized): the codes of a row are a string of bits in words
 * of 32, the first in the lowest bits.
 *
 *     M.weight_packed      I32 [N][ceil(K b / 32)]
 *     M.weight_shape       I64 or I32 [2] = {N, K}
 *     M.weight_scale       F16, BF16 or F32 [N][G] or [N]
 *     M.weight_zero_point  I32 [ceil(N b / 32)][G], packed along N; absent: 2^(b-1)
 *     M.weight_g_idx       I32 [K]: group of each column; absent: columns in order
 *     value = (code - zero) * scale
 */
#include "formats/encodings/encoding.h"

enum { CODES, SCALES, ZEROS, GROUPS, WORD = 32 };

/* Reads M.weight_shape. */
static int read_shape(size_t shape[2], const struct qt_slot *slot, const struct qt_slot *t,
                      struct qt_err *err)
{
    struct qt_blob blob;
    const struct qt_tensor *s = &slot->info;
    if ((s->dtype != QT_I64 && s->dtype != QT_I32) || s->count != 2)
        return qt_bad_part(slot, t, "two integers", err);
    int rc = qt_slot_read(&blob, slot, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < 2; i++) {
        int64_t n = 0;
        int32_t small;
        if (s->dtype == QT_I64) {
            memcpy(&n, blob.data + i * sizeof n, sizeof n);
        } else {
            memcpy(&small, blob.data + i * sizeof small, sizeof small);
            n = small;
        }
        shape[i] = n > 0 && (uint64_t)n < SIZE_MAX / WORD ? (size_t)n : 0;
    }
    qt_blob_free(&blob);
    return shape[0] && shape[1] ? QT_OK
                                : qt_fail(err, QT_E_INPUT, t->info.file, t->info.name,
                                          "cannot be dequantized: weight_shape is invalid");
}

/* Finds the bits of a code from the words that a row takes. */
static int find_bits(unsigned *bits, const struct qt_slot *t, size_t cols, struct qt_err *err)
{
    static const unsigned supported[] = {2, 4, 8};
    *bits = 0;
    for (size_t i = 0; i < sizeof supported / sizeof *supported; i++)
        if (qt_ceil_div(cols * supported[i], WORD) == t->info.shape[1]) {
            if (*bits)
                return qt_fail(err, QT_E_UNSUPPORTED, t->info.file, t->info.name,
                               "cannot be dequantized: with %zu columns, the number of bits is "
                               "not clear",
                               cols);
            *bits = supported[i];
        }
    return *bits
               ? QT_OK
               : qt_fail(err, QT_E_UNSUPPORTED, t->info.file, t->info.name,
                         "cannot be dequantized: %zu words for a row of %zu are not codes of 2, 4 "
                         "or 8 bits",
                         t->info.shape[1], cols);
}

static int find(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err)
{
    const struct qt_tensor *w = &t->info;
    size_t shape[2];
    int rc;
    if (!qt_name_ends_in(w->name, ".weight_packed") || w->dtype != QT_I32)
        return QT_OK;
    const size_t size = strlen(w->name) - strlen(".weight_packed");
    const struct qt_slot *of_shape = qt_stored_find(s, w->name, size, ".weight_shape");
    const struct qt_slot *scales = qt_stored_find(s, w->name, size, ".weight_scale");
    const struct qt_slot *zeros = qt_stored_find(s, w->name, size, ".weight_zero_point");
    const struct qt_slot *groups = qt_stored_find(s, w->name, size, ".weight_g_idx");
    if (!of_shape || !scales)
        return qt_no_part(t, of_shape ? "weight_scale" : "weight_shape", err);
    QT_TRY(read_shape(shape, of_shape, t, err));
    if (w->ndim != 2 || w->shape[0] != shape[0])
        return qt_bad_part(t, t, "weight_shape", err);
    QT_TRY(find_bits(&out->bits, t, shape[1], err));
    const struct qt_tensor *g = &scales->info;
    const size_t per_row = g->ndim == 2 ? g->shape[1] : 1;
    if (!qt_is_scale_dtype(g->dtype) || g->ndim < 1 || g->ndim > 2 || g->shape[0] != shape[0] ||
        per_row == 0 || shape[1] % per_row)
        return qt_bad_part(scales, t, "weight_shape", err);
    if (zeros && (zeros->info.dtype != QT_I32 || zeros->info.ndim != 2 ||
                  zeros->info.shape[0] != qt_ceil_div(shape[0] * out->bits, WORD) ||
                  zeros->info.shape[1] != per_row))
        return qt_bad_part(zeros, t, "weight_shape and weight_scale", err);
    if (groups && (groups->info.dtype != QT_I32 || groups->info.count != shape[1]))
        return qt_bad_part(groups, t, "weight_shape", err);
    qt_encoded_shape(out, 2, shape);
    out->part[SCALES] = scales;
    out->part[ZEROS] = zeros;
    out->part[GROUPS] = groups;
    out->part[GROUPS + 1] = of_shape;
    out->group = shape[1] / per_row;
    out->info.encoding = out->bits == 8 ? "int8" : out->bits == 4 ? "int4" : "int2";
    *stem = size;
    *ending = ".weight";
    *found = true;
done:
    return rc;
}

static int check(const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                 struct qt_err *err)
{
    return e->part[GROUPS] ? qt_check_groups(e, e->part[GROUPS], data[GROUPS], err) : QT_OK;
}

static void decode(float *w, const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                   size_t row, size_t n)
{
    const unsigned bits = e->bits, mask = (1u << bits) - 1;
    const size_t words = e->part[CODES]->info.shape[1], groups = e->cols / e->group;
    const enum qt_dtype dtype = e->part[SCALES]->info.dtype;
    for (size_t i = row; i < row + n; i++, w += e->cols) {
        size_t before = SIZE_MAX;
        float scale = 0, zero = (float)(1u << (bits - 1));
        for (size_t j = 0; j < e->cols; j++) {
            const size_t g = e->part[GROUPS] ? qt_word(data[GROUPS], j) : j / e->group;
            const size_t at = j * bits;
            if (g != before) {
                scale = qt_scale_at(data[SCALES], dtype, i * groups + g);
                if (e->part[ZEROS])
                    zero = (float)(qt_word(data[ZEROS], i * bits / WORD * groups + g) >>
                                       i * bits % WORD &
                                   mask);
                before = g;
            }
            const uint32_t word = qt_word(data[CODES], i * words + at / WORD);
            w[j] = ((float)(word >> at % WORD & mask) - zero) * scale;
        }
    }
}

const struct qt_encoding qt_encoding_packed_int = {.find = find, .check = check, .decode = decode};
