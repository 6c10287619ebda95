/*
 * Numbers of 8 bits with scales: E4M3 and E5M2 numbers (fp8) and integers (int8) with a scale for
 * the tensor, for each row or for each block of rows and columns, and E4M3 numbers with an E8M0
 * scale for each group of a row (mxfp8). Written by Hugging Face transformers ("fp8",
 * "fbgemm_fp8"), compressed-tensors (float-quantized, int-quantized, mxfp8) and ModelOpt.
 *
 *     M.weight  F8_E4M3, F8_E5M2 or I8 [R][C], or [E][R][C] for stacked experts
 *     M.weight_scale_inv, M.weight_scale or M.scale
 *               F32, BF16, F16, F8_E8M0, or U8 as E8M0; 1 element, [R], [R][1], or
 *               [ceil(R / block)][ceil(C / block)], after [E] if there is one
 *     value = number * scale
 */
#include "formats/encodings/encoding.h"

enum { CODES, SCALES };

/* *wanted = name of the scales that a module needs, or NULL. */
static const struct qt_slot *find_scales(const struct qt_stored *s, const struct qt_slot *t,
                                         const char **wanted)
{
    static const char *const of_module[] = {".weight_scale_inv", ".weight_scale", ".scale", NULL};
    static const char *const of_tensor[] = {"_scale_inv", "_scale", NULL};
    const bool is_module = qt_name_ends_in(t->info.name, ".weight");
    const size_t stem = strlen(t->info.name) - (is_module ? strlen(".weight") : 0);
    const char *const *ending = is_module ? of_module : of_tensor;
    *wanted = is_module ? "weight_scale_inv" : NULL;
    for (; *ending; ending++) {
        const struct qt_slot *found = qt_stored_find(s, t->info.name, stem, *ending);
        if (found)
            return found;
    }
    return NULL;
}

/* Rows or columns that share a scale; 0: the number of scales does not fit. */
static size_t block_size(size_t n, size_t scales, size_t configured)
{
    if (scales == 1)
        return n;
    if (qt_ceil_div(n, configured) == scales)
        return configured;
    return scales && n % scales == 0 ? n / scales : 0;
}

static int find(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err)
{
    const struct qt_tensor *w = &t->info;
    const bool fp8 = w->dtype == QT_F8_E4M3 || w->dtype == QT_F8_E5M2;
    const char *wanted;
    if ((!fp8 && w->dtype != QT_I8) || w->ndim < 2 || w->ndim > 3 || w->count == 0)
        return QT_OK;
    const struct qt_slot *scales = find_scales(s, t, &wanted);
    if (!scales)
        return fp8 && wanted ? qt_no_part(t, wanted, err) : QT_OK;
    const struct qt_tensor *g = &scales->info;
    const size_t rows = w->shape[w->ndim - 2], cols = w->shape[w->ndim - 1];
    size_t grid[2] = {1, 1};
    const bool e8m0 = g->dtype == QT_F8_E8M0 || g->dtype == QT_U8;
    bool fits = qt_is_scale_dtype(g->dtype) || (fp8 && e8m0);
    if (g->ndim == w->ndim) {
        fits = fits && (w->ndim == 2 || g->shape[0] == w->shape[0]);
        grid[0] = g->shape[g->ndim - 2];
        grid[1] = g->shape[g->ndim - 1];
    } else if (g->count != 1) {
        fits = fits && w->ndim == 2 && g->ndim == 1 && g->shape[0] == rows;
        grid[0] = rows;
    }
    qt_encoded_shape(out, w->ndim, w->shape);
    out->block_rows = grid[0] == rows ? 1 : block_size(rows, grid[0], s->source->block[0]);
    out->group = grid[1] == cols ? 1 : block_size(cols, grid[1], s->source->block[1]);
    if (!fits || !out->block_rows || !out->group)
        return qt_bad_part(scales, t, "the weights", err);
    out->part[SCALES] = scales;
    out->info.encoding = !fp8                                          ? "int8"
                         : e8m0 && out->block_rows == 1 && grid[1] > 1 ? "mxfp8"
                                                                       : "fp8";
    *stem = strlen(w->name);
    *ending = "";
    *found = true;
    return QT_OK;
}

static void decode(float *w, const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                   size_t row, size_t n)
{
    const struct qt_tensor *scales = &e->part[SCALES]->info;
    const enum qt_dtype dtype = e->part[CODES]->info.dtype;
    const size_t down = qt_ceil_div(e->matrix_rows, e->block_rows);
    const size_t across = qt_ceil_div(e->cols, e->group);
    const float *const table = qt_byte_values(dtype);
    for (size_t i = row; i < row + n; i++, w += e->cols) {
        const unsigned char *codes = data[CODES] + i * e->cols;
        const size_t matrix = i / e->matrix_rows, in_matrix = i % e->matrix_rows;
        const size_t first =
            scales->count == 1 ? 0 : (matrix * down + in_matrix / e->block_rows) * across;
        for (size_t b = 0; b < across; b++) {
            const float scale = qt_scale_at(data[SCALES], scales->dtype, first + b);
            const size_t end = qt_min_size((b + 1) * e->group, e->cols);
            for (size_t j = b * e->group; j < end; j++)
                w[j] = table[codes[j]] * scale;
        }
    }
}

const struct qt_encoding qt_encoding_scaled = {.find = find, .decode = decode};
