/*
 * E2M1 numbers, two in a byte, the first in the low bits, with a scale per group of a row: E8M0 for
 * 32 columns (mxfp4), or E4M3 for 16 columns and an FP32 scale of the tensor (nvfp4).
 *
 *     gpt-oss             M_blocks U8 [..][R][C / 32][16], M_scales U8 [..][R][C / 32]
 *     compressed-tensors  M.weight_packed U8 [R][C / 2], M.weight_scale U8 [R][C / 32], or F8_E4M3
 *                         [R][C / 16] and M.weight_global_scale F32, which divides
 *     ModelOpt            M.weight U8 [R][C / 2], M.weight_scale F8_E4M3 [R][C / 16] and
 *                         M.weight_scale_2 F32, which multiplies
 *     DeepSeek            M.weight I8 or U8 [R][C / 2], M.scale F8_E8M0 [R][C / 32]
 *
 * value = number * (scale * scale of the tensor), in FP32.
 */
#include "formats/encodings/encoding.h"

enum { CODES, SCALES, GLOBAL };
enum { MX_GROUP = 32, NV_GROUP = 16 };

static bool is_e8m0(const struct qt_tensor *t)
{
    return t->dtype == QT_F8_E8M0 || t->dtype == QT_U8;
}

static int find_blocks(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                       const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err)
{
    const struct qt_tensor *w = &t->info;
    const size_t size = strlen(w->name) - strlen("_blocks");
    size_t shape[QT_MAX_DIMS], span;
    const struct qt_slot *scales = qt_stored_find(s, w->name, size, "_scales");
    if (w->dtype != QT_U8 || w->ndim < 3 || w->ndim > 4 || w->count == 0)
        return QT_OK;
    if (!scales)
        return qt_fail(err, QT_E_INPUT, w->file, w->name,
                       "cannot be dequantized: there is no _scales beside it");
    const int ndim = w->ndim - 1;
    if (w->shape[ndim] != MX_GROUP / 2)
        return qt_bad_part(t, t, "groups of 32", err);
    if (!is_e8m0(&scales->info) || scales->info.ndim != ndim ||
        memcmp(scales->info.shape, w->shape, (size_t)ndim * sizeof *shape) != 0)
        return qt_bad_part(scales, t, "the groups of 32", err);
    memcpy(shape, w->shape, sizeof shape);
    if (qt_mul_overflow(&span, w->count, 2)) /* values of the tensor */
        return qt_bad_part(t, t, "the memory", err);
    shape[ndim - 1] *= MX_GROUP;
    qt_encoded_shape(out, ndim, shape);
    out->part[SCALES] = scales;
    out->group = MX_GROUP;
    out->info.encoding = "mxfp4";
    *stem = size;
    *ending = "";
    *found = true;
    return QT_OK;
}

static const struct qt_slot *find_scales(const struct qt_stored *s, const char *name, size_t stem)
{
    static const char *const names[] = {".weight_scale", ".weight_scale_inv", ".scale"};
    const struct qt_slot *found = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && !found; i++)
        found = qt_stored_find(s, name, stem, names[i]);
    return found;
}

static int find(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err)
{
    const struct qt_tensor *w = &t->info;
    const bool packed = qt_name_ends_in(w->name, ".weight_packed");
    if (qt_name_ends_in(w->name, "_blocks"))
        return find_blocks(found, out, stem, ending, s, t, err);
    if ((w->dtype != QT_U8 && w->dtype != QT_I8) || w->ndim != 2 || w->count == 0 ||
        (!packed && !qt_name_ends_in(w->name, ".weight")))
        return QT_OK;
    const size_t size = strlen(w->name) - strlen(packed ? ".weight_packed" : ".weight");
    const struct qt_slot *scales = find_scales(s, w->name, size);
    if (!scales)
        return packed ? qt_no_part(t, "weight_scale", err) : QT_OK;
    const struct qt_tensor *g = &scales->info;
    size_t shape[2] = {w->shape[0], w->shape[1]};
    if (qt_mul_overflow(&shape[1], shape[1], 2))
        return qt_bad_part(t, t, "the memory", err);
    const bool nv = g->dtype == QT_F8_E4M3;
    if (!nv && (!is_e8m0(g) || (w->dtype == QT_I8 && g->dtype != QT_F8_E8M0)))
        return packed ? qt_bad_part(scales, t, "mxfp4 or nvfp4", err) : QT_OK;
    out->group = nv ? NV_GROUP : MX_GROUP;
    if (g->ndim != 2 || g->shape[0] != shape[0] || g->shape[1] != shape[1] / out->group ||
        shape[1] % out->group)
        return qt_bad_part(scales, t, nv ? "groups of 16 weights" : "groups of 32 weights", err);
    if (nv) {
        const char *name = packed ? ".weight_global_scale" : ".weight_scale_2";
        const struct qt_slot *global = qt_stored_find(s, w->name, size, name);
        if (!global)
            return qt_no_part(t, name + 1, err);
        if (global->info.dtype != QT_F32 || global->info.count != 1)
            return qt_bad_part(global, t, "one FP32 number", err);
        out->part[GLOBAL] = global;
        out->divides = packed;
    }
    qt_encoded_shape(out, 2, shape);
    out->part[SCALES] = scales;
    out->info.encoding = nv ? "nvfp4" : "mxfp4";
    *stem = size;
    *ending = ".weight";
    *found = true;
    return QT_OK;
}

static void decode(float *w, const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                   size_t row, size_t n)
{
    const size_t groups = e->cols / e->group;
    const float global = e->part[GLOBAL] ? qt_scale_at(data[GLOBAL], QT_F32, 0) : 1.0f;
    for (size_t i = row * groups; i < (row + n) * groups; i++) {
        const unsigned char *codes = data[CODES] + i * (e->group / 2);
        float scale = qt_scale_at(data[SCALES], e->part[SCALES]->info.dtype, i);
        if (e->part[GLOBAL])
            scale = e->divides ? scale / global : scale * global;
        for (size_t j = 0; j < e->group / 2; j++) {
            *w++ = qt_fp4_values[codes[j] & 15] * scale;
            *w++ = qt_fp4_values[codes[j] >> 4] * scale;
        }
    }
}

const struct qt_encoding qt_encoding_fp4 = {.find = find, .decode = decode};
