/*
 * Weights of bitsandbytes.
 *
 * 4 bits (nf4, fp4): codes two in a byte, the first in the high bits, through the flattened matrix.
 *     M.weight                      U8 [ceil(N K / 2)][1]
 *     M.weight.quant_map            F32 [16]: the value of each code
 *     M.weight.absmax               F32, or U8 with a nested scale; a scale per `blocksize` weights
 *     M.weight.nested_absmax        F32 [ceil(blocks / nested_blocksize)]
 *     M.weight.nested_quant_map     F32 [256]
 *     M.weight.quant_state.bitsandbytes__nf4 (or __fp4)
 *                                   U8: JSON with shape, blocksize, dtype and, if the scales are
 *                                   nested, nested_blocksize and nested_offset
 *     scale = absmax, or nested_quant_map[absmax] * nested_absmax + nested_offset
 *     value = quant_map[code] * scale, in the dtype of the JSON
 *
 * 8 bits: M.weight I8 [N][K], M.SCB F32 [N];  value = code * SCB * (1 / 127)
 */
#include "formats/encodings/encoding.h"

enum { CODES, MAP, SCALES, NESTED_SCALES, NESTED_MAP, STATE };
enum { MAX_STATE = 1 << 16 };

/* ---- 4 bits --------------------------------------------------------------------------------- */

static int bad_state(const struct qt_slot *t, struct qt_err *err)
{
    return qt_fail(err, QT_E_INPUT, t->info.file, t->info.name,
                   "cannot be dequantized: its quant_state is invalid");
}

/* Reads shape, block sizes, offset and dtype. */
static int read_json(struct qt_encoded *out, const json_t *state, const struct qt_slot *t,
                     struct qt_err *err)
{
    static const struct {
        const char *name;
        enum qt_dtype dtype;
    } dtypes[] = {{"float16", QT_F16}, {"bfloat16", QT_BF16}, {"float32", QT_F32}};
    const json_t *list = json_object_get(state, "shape");
    const char *dtype = json_string_value(json_object_get(state, "dtype"));
    const json_int_t block = json_integer_value(json_object_get(state, "blocksize"));
    const json_int_t nested = json_integer_value(json_object_get(state, "nested_blocksize"));
    size_t shape[QT_MAX_DIMS], count = 1;
    const size_t ndim = json_array_size(list);
    if (!dtype || block <= 0 || nested < 0 || ndim < 2 || ndim > 3)
        return bad_state(t, err);
    for (size_t d = 0; d < ndim; d++) {
        const json_int_t n = json_integer_value(json_array_get(list, d));
        shape[d] = n > 0 ? (size_t)n : 0;
        if (n <= 0 || qt_mul_overflow(&count, count, (size_t)n))
            return bad_state(t, err);
    }
    if (t->info.count != qt_ceil_div(count, 2))
        return qt_bad_part(t, t, "the shape in its quant_state", err);
    out->group = (size_t)block;
    out->nested = (size_t)nested;
    out->offset = (float)json_number_value(json_object_get(state, "nested_offset"));
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(dtype, dtypes[i].name) == 0)
            out->info.dtype = dtypes[i].dtype;
    qt_encoded_shape(out, (int)ndim, shape);
    return QT_OK;
}

static int read_state(struct qt_encoded *out, const struct qt_slot *slot, const struct qt_slot *t,
                      struct qt_err *err)
{
    struct qt_err ignored = {0};
    struct qt_blob blob;
    json_t *state;
    if (slot->info.dtype != QT_U8 || slot->info.nbytes > MAX_STATE)
        return qt_bad_part(slot, t, "text", err);
    int rc = qt_slot_read(&blob, slot, err);
    if (rc < 0)
        return rc;
    rc = qt_json_parse_lenient(&state, (const char *)blob.data, blob.size, slot->info.file,
                               &ignored);
    qt_blob_free(&blob);
    if (rc < 0)
        return rc == QT_E_RESOURCE
                   ? qt_fail(err, rc, slot->info.file, slot->info.name, "%s", ignored.reason)
                   : bad_state(t, err);
    rc = read_json(out, state, t, err);
    json_decref(state);
    return rc;
}

/* Checks the dtype and number of elements of a part. */
static int check_part(const struct qt_slot *part, enum qt_dtype dtype, size_t count,
                      const struct qt_slot *t, const char *name, struct qt_err *err)
{
    if (!part)
        return qt_no_part(t, name, err);
    return part->info.dtype == dtype && part->info.count == count
               ? QT_OK
               : qt_bad_part(part, t, "its quant_state", err);
}

static int find4(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                 const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err)
{
    const struct qt_tensor *w = &t->info;
    const size_t size = strlen(w->name);
    int rc;
    if (w->dtype != QT_U8 || w->count == 0)
        return QT_OK;
    const struct qt_slot *nf4 = qt_stored_find(s, w->name, size, ".quant_state.bitsandbytes__nf4");
    const struct qt_slot *fp4 = qt_stored_find(s, w->name, size, ".quant_state.bitsandbytes__fp4");
    if (!nf4 && !fp4)
        return QT_OK;
    const struct qt_slot *absmax = qt_stored_find(s, w->name, size, ".absmax");
    out->part[STATE] = nf4 ? nf4 : fp4;
    QT_TRY(read_state(out, out->part[STATE], t, err));
    out->part[MAP] = qt_stored_find(s, w->name, size, ".quant_map");
    out->part[SCALES] = absmax;
    const size_t blocks = qt_ceil_div(out->rows * out->cols, out->group);
    QT_TRY(check_part(out->part[MAP], QT_F32, 16, t, "quant_map", err));
    QT_TRY(check_part(absmax, out->nested ? QT_U8 : QT_F32, blocks, t, "absmax", err));
    if (out->nested) {
        out->part[NESTED_SCALES] = qt_stored_find(s, w->name, size, ".nested_absmax");
        out->part[NESTED_MAP] = qt_stored_find(s, w->name, size, ".nested_quant_map");
        QT_TRY(check_part(out->part[NESTED_SCALES], QT_F32, qt_ceil_div(blocks, out->nested), t,
                          "nested_absmax", err));
        QT_TRY(check_part(out->part[NESTED_MAP], QT_F32, 256, t, "nested_quant_map", err));
    }
    out->info.encoding = nf4 ? "bitsandbytes nf4" : "bitsandbytes fp4";
    *stem = size;
    *ending = "";
    *found = true;
done:
    return rc;
}

static float scale4(const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                    size_t block)
{
    if (!e->nested)
        return qt_scale_at(data[SCALES], QT_F32, block);
    return qt_scale_at(data[NESTED_MAP], QT_F32, data[SCALES][block]) *
               qt_scale_at(data[NESTED_SCALES], QT_F32, block / e->nested) +
           e->offset;
}

static void decode4(float *w, const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                    size_t row, size_t n)
{
    const size_t end = (row + n) * e->cols;
    float map[16], scale = 0;
    for (size_t i = 0; i < 16; i++)
        map[i] = qt_scale_at(data[MAP], QT_F32, i);
    for (size_t i = row * e->cols; i < end; i++) {
        if (i == row * e->cols || i % e->group == 0)
            scale = scale4(e, data, i / e->group);
        *w++ = map[data[CODES][i / 2] >> (i % 2 ? 0 : 4) & 15] * scale;
    }
}

const struct qt_encoding qt_encoding_bnb4 = {.find = find4, .decode = decode4};

/* ---- 8 bits --------------------------------------------------------------------------------- */

static int find8(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                 const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err)
{
    const struct qt_tensor *w = &t->info;
    if (w->dtype != QT_I8 || w->ndim != 2 || w->count == 0 || !qt_name_ends_in(w->name, ".weight"))
        return QT_OK;
    const struct qt_slot *scales =
        qt_stored_find(s, w->name, strlen(w->name) - strlen("weight"), "SCB");
    if (!scales)
        return QT_OK;
    if (scales->info.dtype != QT_F32 || scales->info.count != w->shape[0])
        return qt_bad_part(scales, t, "the rows", err);
    qt_encoded_shape(out, 2, w->shape);
    out->part[SCALES] = scales;
    out->info.encoding = "bitsandbytes int8";
    *stem = strlen(w->name);
    *ending = "";
    *found = true;
    return QT_OK;
}

static void decode8(float *w, const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                    size_t row, size_t n)
{
    static const float reciprocal = 7.874015718698502e-3f; /* of 127 */
    for (size_t i = row; i < row + n; i++) {
        const float scale = qt_scale_at(data[SCALES], QT_F32, i);
        for (size_t j = 0; j < e->cols; j++)
            *w++ = (float)(int8_t)data[CODES][i * e->cols + j] * scale * reciprocal;
    }
}

const struct qt_encoding qt_encoding_bnb8 = {.find = find8, .decode = decode8};
