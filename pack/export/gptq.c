/*
 * gptq: integers as AutoGPTQ and GPTQModel store them. For a module M of N rows and K channels in
 * groups of g, with codes of b bits:
 *
 *     M.qweight  I32 [K b / 32][N]      codes along K, dense bit string per column
 *     M.qzeros   I32 [K / g][N b / 32]  zero-points along N, dense bit string per row
 *     M.scales   F16 [K / g][N]
 *     M.g_idx    I32 [K]                k / g
 *
 *     w[n][k] = scales[k / g][n] (code - zero)
 *
 * checkpoint_format "gptq" (v1) stores zero - 1, "gptq_v2" stores zero. v1 is written if all
 * matrices are symmetric: it is what most readers take. A zero-point of 0 cannot be stored in v1.
 */
#include "pack/export/bits.h"
#include "pack/export/export.h"

#include <string.h>

enum { QWEIGHT, QZEROS, SCALES, G_IDX };

static enum qt_export_fit fit(const char **why, const struct qt_spec *spec)
{
    if (qt_export_is_integer(spec))
        return QT_EXPORT_EXACT;
    *why = "it has integers only; int4 and int8 fit";
    return QT_EXPORT_NO;
}

static int describe(struct qt_export_matrix *m, struct qt_err *err)
{
    const unsigned bits = m->codes.bits;
    const size_t groups = m->codes.groups;
    int rc = qt_export_check_shape(m, 32, 32, err);
    if (rc < 0)
        return rc;
    qt_export_add(m, ".qweight", QT_I32, qt_bits_words(m->k, bits), m->n);
    qt_export_add(m, ".qzeros", QT_I32, groups, qt_bits_words(m->n, bits));
    qt_export_add(m, ".scales", m->scale_dtype, groups, m->n);
    qt_export_add_vector(m, ".g_idx", QT_I32, m->k);
    return QT_OK;
}

/* The zero-point as v2 stores it; v1 stores one less. */
static unsigned zero_point(const struct qt_export_matrix *m, uint8_t zero)
{
    return m->codes.asymmetric ? zero : (1u << (m->codes.bits - 1)) - 1;
}

static void convert(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    const struct qt_code_info *c = &m->codes;
    uint32_t *qweight = (uint32_t *)(void *)m->tensor[QWEIGHT].data;
    uint32_t *qzeros = (uint32_t *)(void *)m->tensor[QZEROS].data;
    const size_t zero_words = m->tensor[QZEROS].shape[1];
    /* Pieces of 32 channels: the words of neighbouring rows are adjacent. */
    for (size_t k0 = 0; k0 < m->k; k0 += 32)
        for (size_t r = 0; r < panel->rows; r++)
            for (size_t k = k0; k < k0 + 32; k++)
                qt_bits_put(qweight + panel->row0 + r, m->n, k, c->bits, panel->code[r * m->k + k]);
    for (size_t r = 0; r < panel->rows; r++)
        for (size_t g = 0; g < c->groups; g++) {
            const size_t row = panel->row0 + r;
            qt_export_floats(&m->tensor[SCALES], g * m->n + row, &panel->scale[r * c->groups + g],
                             1);
            qt_bits_put(qzeros + g * zero_words, 1, row, c->bits,
                        zero_point(m, panel->zero[r * c->groups + g]));
        }
    int32_t *g_idx = (int32_t *)(void *)m->tensor[G_IDX].data;
    for (size_t k = 0; panel->row0 == 0 && k < m->k; k++)
        g_idx[k] = (int32_t)(k / c->group);
}

static int config(json_t **out, const struct qt_export *x, struct qt_err *err)
{
    const struct qt_code_info *c = &x->matrix[0].codes;
    const char *format = c->asymmetric ? "gptq_v2" : "gptq";
    *out = json_pack(
        "{s:s, s:i, s:i, s:b, s:b, s:b, s:s, s:s, s:s, s:{s:[s]}}", "quant_method", "gptq", "bits",
        (int)c->bits, "group_size", qt_export_has_rows(&x->matrix[0]) ? -1 : (int)c->group,
        "desc_act", 0, "sym", !c->asymmetric, "lm_head", qt_export_has_head(x), "checkpoint_format",
        format, "format", format, "pack_dtype", "int32", "meta", "quantizer", "qtool:" QT_VERSION);
    return *out ? QT_OK : qt_no_memory(err, NULL);
}

static int extra(const struct qt_export *x, const json_t *quantization, struct qt_err *err)
{
    return qt_output_json(x->out, "quantize_config.json", quantization, err);
}

const struct qt_export_format qt_export_gptq = {
    .name = "gptq",
    .help = "integers of one bit width and group size",
    .runtimes = "vLLM, SGLang, transformers, ExLlama",
    .fused = true,
    .scale_dtype = QT_F16,
    .fit = fit,
    .describe = describe,
    .check = qt_export_check_uniform,
    .convert = convert,
    .config = config,
    .extra = extra,
};
