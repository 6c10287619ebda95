/*
 * mlx: affine integers as MLX stores them. For a module M of N rows and K channels in groups of g:
 *
 *     M.weight  U32 [N][K b / 32]  codes along K, dense bit string
 *     M.scales  F16 [N][K / g]
 *     M.biases  F16 [N][K / g]     w = code * scale + bias
 *
 * The bias is -zero * scale, rounded to FP16: exact if symmetric (zero is a power of two),
 * otherwise one rounding.
 */
#include "pack/export/bits.h"
#include "pack/export/export.h"

#include <string.h>

enum { WEIGHT, SCALES, BIASES };

static enum qt_export_fit fit(const char **why, const struct qt_spec *spec)
{
    if (!qt_export_is_integer(spec)) {
        *why = "it has integers only; int4 and int8 fit";
        return QT_EXPORT_NO;
    }
    const double g = qt_spec_value(spec, "g");
    if (g != 32 && g != 64 && g != 128) {
        *why = "it has groups of 32, 64 and 128 only; g=128 fits";
        return QT_EXPORT_NO;
    }
    *why = "zero-points become biases of 16 bits";
    return qt_export_has_zeros(spec) ? QT_EXPORT_NEAR : QT_EXPORT_EXACT;
}

static int describe(struct qt_export_matrix *m, struct qt_err *err)
{
    const size_t groups = m->codes.groups;
    int rc = qt_export_check_groups(m, err);
    if (rc < 0)
        return rc;
    qt_export_add(m, ".weight", QT_U32, m->n, qt_bits_words(m->k, m->codes.bits));
    qt_export_add(m, ".scales", m->scale_dtype, m->n, groups);
    qt_export_add(m, ".biases", m->scale_dtype, m->n, groups);
    return QT_OK;
}

static void convert(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    const struct qt_code_info *c = &m->codes;
    const size_t words = m->tensor[WEIGHT].shape[1];
    const float middle = (float)(1 << (c->bits - 1));
    for (size_t r = 0; r < panel->rows; r++) {
        uint32_t *dst = (uint32_t *)(void *)m->tensor[WEIGHT].data + (panel->row0 + r) * words;
        qt_bits_pack(dst, panel->code + r * m->k, m->k, c->bits);
    }
    qt_export_floats(&m->tensor[SCALES], panel->row0 * c->groups, panel->scale,
                     panel->rows * c->groups);
    for (size_t i = 0; i < panel->rows * c->groups; i++) {
        const float zero = c->asymmetric ? (float)panel->zero[i] : middle;
        const size_t at = panel->row0 * c->groups + i;
        const float bias = -zero * panel->scale[i];
        qt_export_floats(&m->tensor[BIASES], at, &bias, 1);
        if (!panel->decoded)
            continue;
        float stored;
        qt_to_f32(&stored, m->tensor[BIASES].data + at * sizeof(uint16_t), m->scale_dtype, 1);
        const size_t r = i / c->groups, first = r * m->k + i % c->groups * c->group;
        for (size_t k = first; k < first + c->group; k++)
            panel->decoded[k] = (float)panel->code[k] * panel->scale[i] + stored;
    }
}

static json_t *quantization(const struct qt_export *x)
{
    const struct qt_code_info *c = &x->matrix[0].codes;
    return json_pack("{s:i, s:i, s:s}", "group_size", (int)c->group, "bits", (int)c->bits, "mode",
                     "affine");
}

static int config(json_t **out, const struct qt_export *x, struct qt_err *err)
{
    *out = quantization(x);
    return *out ? QT_OK : qt_no_memory(err, NULL);
}

const struct qt_export_format qt_export_mlx = {
    .name = "mlx",
    .help = "affine integers in groups of 32 to 128",
    .runtimes = "MLX",
    .embeddings = true,
    .scale_dtype = QT_F16,
    .fit = fit,
    .describe = describe,
    .check = qt_export_check_uniform,
    .convert = convert,
    .config = config,
    .config_copy = "quantization",
};
