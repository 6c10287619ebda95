/*
 * awq: INT4 as AutoAWQ's GEMM kernels store it. For a module M of N rows and K channels in groups
 * of g:
 *
 *     M.qweight  I32 [K][N / 8]      codes along N, eight a word
 *     M.qzeros   I32 [K / g][N / 8]  zero-points, likewise; 8 if symmetric
 *     M.scales   F16 [K / g][N]
 *
 * Bits 4p to 4p + 3 of word j belong to row 8 j + order[p].
 * w[n][k] = scales[k / g][n] (code - zero).
 */
#include "pack/export/export.h"

#include <string.h>

enum { QWEIGHT, QZEROS, SCALES, PER_WORD = 8, SYMMETRIC_ZERO = 8, TILE = 64 };
static const unsigned order[PER_WORD] = {0, 2, 4, 6, 1, 3, 5, 7};

static enum qt_export_fit fit(const char **why, const struct qt_spec *spec)
{
    if (qt_export_is_integer(spec) && qt_spec_value(spec, "bits") == 4)
        return QT_EXPORT_EXACT;
    *why = "it has integers of 4 bits only; int4 fits";
    return QT_EXPORT_NO;
}

static int describe(struct qt_export_matrix *m, struct qt_err *err)
{
    const size_t groups = m->codes.groups;
    int rc = qt_export_check_shape(m, 1, PER_WORD, err);
    if (rc < 0)
        return rc;
    qt_export_add(m, ".qweight", QT_I32, m->k, m->n / PER_WORD);
    qt_export_add(m, ".qzeros", QT_I32, groups, m->n / PER_WORD);
    qt_export_add(m, ".scales", m->scale_dtype, groups, m->n);
    return QT_OK;
}

/* Words of 8 rows and `count` channels. */
static void pack_words(uint32_t word[TILE], const uint8_t *code, size_t stride, size_t count)
{
    memset(word, 0, TILE * sizeof *word);
    for (unsigned p = 0; p < PER_WORD; p++) {
        const uint8_t *row = code + order[p] * stride;
        for (size_t k = 0; k < count; k++)
            word[k] |= (uint32_t)row[k] << 4 * p;
    }
}

/* Tiles of channels: the words of a channel are adjacent, those of a row are not. */
static void put_codes(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    uint32_t word[QT_EXPORT_PANEL / PER_WORD][TILE];
    const size_t words = m->n / PER_WORD, rows = panel->rows / PER_WORD;
    uint32_t *dst = (uint32_t *)(void *)m->tensor[QWEIGHT].data + panel->row0 / PER_WORD;
    for (size_t k0 = 0; k0 < m->k; k0 += TILE) {
        const size_t count = qt_min_size(TILE, m->k - k0);
        for (size_t r = 0; r < rows; r++)
            pack_words(word[r], panel->code + r * PER_WORD * m->k + k0, m->k, count);
        for (size_t k = 0; k < count; k++)
            for (size_t r = 0; r < rows; r++)
                dst[(k0 + k) * words + r] = word[r][k];
    }
}

static void convert(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    const struct qt_code_info *c = &m->codes;
    const size_t words = m->n / PER_WORD;
    uint32_t *qzeros = (uint32_t *)(void *)m->tensor[QZEROS].data;
    put_codes(m, panel);
    for (size_t r = 0; r < panel->rows; r += PER_WORD) {
        const size_t word = (panel->row0 + r) / PER_WORD;
        for (unsigned p = 0; p < PER_WORD; p++) {
            const size_t row = r + order[p];
            for (size_t g = 0; g < c->groups; g++) {
                const uint32_t zero =
                    c->asymmetric ? panel->zero[row * c->groups + g] : SYMMETRIC_ZERO;
                qzeros[g * words + word] |= zero << 4 * p;
            }
        }
    }
    for (size_t g = 0; g < c->groups; g++)
        for (size_t r = 0; r < panel->rows; r++)
            qt_export_floats(&m->tensor[SCALES], g * m->n + panel->row0 + r,
                             &panel->scale[r * c->groups + g], 1);
}

static int config(json_t **out, const struct qt_export *x, struct qt_err *err)
{
    const struct qt_code_info *c = &x->matrix[0].codes;
    json_t *left = NULL;
    int rc = qt_export_left(&left, x, err);
    if (rc < 0)
        return rc;
    *out = json_pack("{s:s, s:s, s:i, s:i, s:b, s:o, s:b}", "quant_method", "awq", "version",
                     "gemm", "bits", 4, "group_size",
                     qt_export_has_rows(&x->matrix[0]) ? -1 : (int)c->group, "zero_point", 1,
                     "modules_to_not_convert", left, "lm_head", qt_export_has_head(x));
    return *out ? QT_OK : qt_no_memory(err, NULL);
}

const struct qt_export_format qt_export_awq = {
    .name = "awq",
    .help = "INT4 of one group size (GEMM)",
    .runtimes = "vLLM, SGLang, transformers",
    .fused = true,
    .scale_dtype = QT_F16,
    .fit = fit,
    .describe = describe,
    .check = qt_export_check_uniform,
    .convert = convert,
    .config = config,
};
