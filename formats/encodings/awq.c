/*
 * 4-bit integers of AWQ (version "gemm"), packed along the output channels: word j of a row holds
 * channels 8 j + {0, 2, 4, 6, 1, 3, 5, 7}, the first in the lowest bits.
 *
 *     M.qweight  I32 [K][N / 8]
 *     M.qzeros   I32 [G][N / 8]
 *     M.scales   F16, BF16 or F32 [G][N]
 *     value = (code - zero) * scale
 */
#include "formats/encodings/encoding.h"

enum { CODES, SCALES, ZEROS, BITS = 4, PER_WORD = 8 };

static int find(bool *found, struct qt_encoded *out, size_t *stem, const char **ending,
                const struct qt_stored *s, const struct qt_slot *t, struct qt_err *err)
{
    const struct qt_tensor *w = &t->info;
    const char *version = qt_source_string(s->source, "version");
    if (!qt_name_ends_in(w->name, ".qweight") || w->dtype != QT_I32 || w->ndim != 2 ||
        w->count == 0)
        return QT_OK;
    const size_t size = strlen(w->name) - strlen(".qweight");
    const struct qt_slot *scales = qt_stored_find(s, w->name, size, ".scales");
    const struct qt_slot *zeros = qt_stored_find(s, w->name, size, ".qzeros");
    if (!scales || !zeros)
        return qt_no_part(t, scales ? "qzeros" : "scales", err);
    if (s->source->method && strcmp(s->source->method, "awq") == 0 && version &&
        strcmp(version, "gemm") != 0 && strcmp(version, "GEMM") != 0)
        return qt_fail(err, QT_E_UNSUPPORTED, t->info.file, t->info.name,
                       "cannot be dequantized: version '%s' of AWQ is not supported", version);
    const struct qt_tensor *g = &scales->info, *z = &zeros->info;
    size_t shape[2] = {0, w->shape[0]};
    if (qt_mul_overflow(&shape[0], w->shape[1], PER_WORD))
        return qt_bad_part(t, t, "the memory", err);
    if (!qt_is_scale_dtype(g->dtype) || g->ndim != 2 || g->shape[1] != shape[0] ||
        g->shape[0] == 0 || shape[1] % g->shape[0])
        return qt_bad_part(scales, t, "codes of AWQ or GPTQ", err);
    if (z->dtype != QT_I32 || z->ndim != 2 || z->shape[0] != g->shape[0] ||
        z->shape[1] != w->shape[1])
        return qt_bad_part(zeros, t, "the codes", err);
    qt_encoded_shape(out, 2, shape);
    out->part[SCALES] = scales;
    out->part[ZEROS] = zeros;
    out->group = shape[1] / g->shape[0];
    out->info.encoding = "awq int4";
    *stem = size;
    *ending = ".weight";
    *found = true;
    return QT_OK;
}

static void decode(float *w, const struct qt_encoded *e, const unsigned char *const data[QT_PARTS],
                   size_t row, size_t n)
{
    static const unsigned place[PER_WORD] = {0, 4, 1, 5, 2, 6, 3, 7};
    const enum qt_dtype dtype = e->part[SCALES]->info.dtype;
    const size_t words = e->rows / PER_WORD;
    for (size_t i = 0; i < n; i++, w += e->cols) {
        const size_t word = (row + i) / PER_WORD;
        const unsigned shift = BITS * place[(row + i) % PER_WORD];
        for (size_t g = 0; g < e->cols / e->group; g++) {
            const float scale = qt_scale_at(data[SCALES], dtype, g * e->rows + row + i);
            const float zero = (float)(qt_word(data[ZEROS], g * words + word) >> shift & 15);
            for (size_t k = g * e->group; k < (g + 1) * e->group; k++)
                w[k] =
                    ((float)(qt_word(data[CODES], k * words + word) >> shift & 15) - zero) * scale;
        }
    }
}

const struct qt_encoding qt_encoding_awq = {.find = find, .decode = decode};
