/*
 * bnb: NF4 as bitsandbytes stores it (functional.py, QuantState.as_dict). A weight [N][K] is one
 * sequence of N K codes in blocks of g, so K must be a multiple of g:
 *
 *     M.weight                                 U8 [N K / 2][1]   even elements in the high nibble
 *     M.weight.absmax                          F32 [N K / g]
 *     M.weight.quant_map                       F32 [16]
 *     M.weight.quant_state.bitsandbytes__nf4   U8                JSON text
 *
 * The kernels of bitsandbytes have the table in FP32 as constants, the container's is rounded to
 * FP16: weights differ by at most 2^-11 of their magnitude.
 */
#include "pack/export/export.h"

#include <stdio.h>
#include <string.h>

enum { CODES, ABSMAX, QUANT_MAP, STATE, LEVELS = 16 };

/* NF4 (QLoRA, arXiv 2305.14314, appendix E), as bitsandbytes rounds it. */
static const float nf4[LEVELS] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

static enum qt_export_fit fit(const char **why, const struct qt_spec *spec)
{
    if (qt_export_is(spec, "lut") && qt_spec_value(spec, "bits") == 4 &&
        qt_spec_value(spec, "table") == 0)
        return QT_EXPORT_EXACT; /* but for the table */
    *why = "it has NormalFloat of 4 bits only; nf4 fits";
    return QT_EXPORT_NO;
}

static int state_text(char *out, size_t size, const struct qt_export_matrix *m)
{
    return snprintf(out, size,
                    "{\"quant_type\": \"nf4\", \"blocksize\": %zu, \"dtype\": \"float16\", "
                    "\"shape\": [%zu, %zu]}",
                    m->codes.group, m->n, m->k);
}

static int describe(struct qt_export_matrix *m, struct qt_err *err)
{
    char text[160];
    int rc = qt_export_check_groups(m, err);
    if (rc < 0)
        return rc;
    qt_export_add(m, ".weight", QT_U8, m->n * m->k / 2, 1);
    qt_export_add_vector(m, ".weight.absmax", QT_F32, m->n * m->codes.groups);
    qt_export_add_vector(m, ".weight.quant_map", QT_F32, LEVELS);
    qt_export_add_vector(m, ".weight.quant_state.bitsandbytes__nf4", QT_U8,
                         (size_t)state_text(text, sizeof text, m));
    return QT_OK;
}

static void convert(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    const size_t first = panel->row0 * m->k / 2, pairs = panel->rows * m->k / 2;
    char text[160];
    for (size_t i = 0; i < pairs; i++)
        m->tensor[CODES].data[first + i] =
            (unsigned char)(panel->code[2 * i] << 4 | panel->code[2 * i + 1]);
    qt_export_floats(&m->tensor[ABSMAX], panel->row0 * m->codes.groups, panel->scale,
                     panel->rows * m->codes.groups);
    if (panel->row0 > 0)
        return;
    memcpy(m->tensor[QUANT_MAP].data, nf4, sizeof nf4);
    const int size = state_text(text, sizeof text, m);
    memcpy(m->tensor[STATE].data, text, (size_t)size);
}

static int config(json_t **out, const struct qt_export *x, struct qt_err *err)
{
    json_t *left = NULL;
    int rc = qt_export_left(&left, x, err);
    if (rc < 0)
        return rc;
    *out = json_pack(
        "{s:s, s:b, s:b, s:b, s:b, s:s, s:b, s:s, s:s, s:b, s:b, s:o, s:f}", "quant_method",
        "bitsandbytes", "_load_in_4bit", 1, "_load_in_8bit", 0, "load_in_4bit", 1, "load_in_8bit",
        0, "bnb_4bit_quant_type", "nf4", "bnb_4bit_use_double_quant", 0, "bnb_4bit_compute_dtype",
        "float16", "bnb_4bit_quant_storage", "uint8", "llm_int8_enable_fp32_cpu_offload", 0,
        "llm_int8_has_fp16_weight", 0, "llm_int8_skip_modules", left, "llm_int8_threshold", 6.0);
    return *out ? QT_OK : qt_no_memory(err, NULL);
}

const struct qt_export_format qt_export_bnb = {
    .name = "bnb",
    .help = "NF4 of bitsandbytes; its table is FP32, the container's FP16",
    .runtimes = "transformers, vLLM (plugin)",
    .experts =
        "transformers 5 cannot load experts that are quantized in this format: leave them as "
        "they are (quantize --tensor 'experts=none'), or use int4 and compressed-tensors",
    .rounds = true,
    .scale_dtype = QT_F32,
    .table = nf4,
    .fit = fit,
    .describe = describe,
    .convert = convert,
    .config = config,
};
