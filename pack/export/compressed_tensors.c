/*
 * compressed-tensors: "pack-quantized" integers and "float-quantized" FP8, as vLLM, transformers
 * and SGLang load them (package compressed-tensors, quantization/ and compressors/pack_quantized).
 *
 * For a module M of N rows and K channels in groups of g:
 *
 *     M.weight_packed      I32 [N][K b / 32]      codes along K, bit string, code = q + 2^(b-1)
 *     M.weight_scale       F16 [N][K / g]
 *     M.weight_zero_point  I32 [N b / 32][K / g]  asymmetric: codes along N
 *     M.weight_shape       I64 [2]
 *
 *     M.weight             F8_E4M3 [N][K],  M.weight_scale F32 [N][1]
 *
 * Without input_activations in config.json, runtimes multiply these with 16-bit inputs (W8A16);
 * with dynamic FP8 inputs, they round each token's inputs (W8A8).
 *
 * MXFP4: even channels in the low nibble; sign, then the index of the magnitude; scale 2^(e - 127):
 *
 *     M.weight_packed      U8 [N][K / 2],  M.weight_scale U8 [N][K / 32]
 *
 * NVFP4: codes as in MXFP4; w = value * weight_scale / weight_global_scale:
 *
 *     M.weight_scale       F8_E4M3 [N][K / 16],  M.weight_global_scale F32 [1]
 */
#include "pack/export/bits.h"
#include "pack/export/export.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PACKED, SCALE, SHAPE, ZERO, GLOBAL = SHAPE };

static bool is_float(const struct qt_spec *spec)
{
    return qt_export_is(spec, "fpx");
}

static bool is_mxfp4(const struct qt_spec *spec)
{
    return qt_export_has_table(spec, "mxfp4");
}

static bool is_nvfp4(const struct qt_spec *spec)
{
    return qt_export_has_table(spec, "nvfp4");
}

static const char *format_of(const struct qt_export_matrix *m)
{
    return is_float(m->spec)   ? "float-quantized"
           : is_mxfp4(m->spec) ? "mxfp4-pack-quantized"
           : is_nvfp4(m->spec) ? "nvfp4-pack-quantized"
                               : "pack-quantized";
}

static enum qt_export_fit fit(const char **why, const struct qt_spec *spec)
{
    if (qt_export_is_integer(spec) || is_mxfp4(spec) || is_nvfp4(spec))
        return QT_EXPORT_EXACT;
    const bool e4m3 =
        is_float(spec) && qt_spec_value(spec, "bits") == 8 && qt_spec_value(spec, "e") == 4;
    if (e4m3 && qt_spec_value(spec, "max") == 448)
        return QT_EXPORT_EXACT;
    *why =
        e4m3 ? "the code of 480 is NaN in E4M3FN; fp8:max=448 fits"
             : "it has integers, E4M3FN, MXFP4 and NVFP4 only; int4, int8, fp8:max=448, mxfp4 and "
               "nvfp4 fit";
    return QT_EXPORT_NO;
}

static int describe(struct qt_export_matrix *m, struct qt_err *err)
{
    const size_t groups = m->codes.groups;
    const unsigned bits = m->codes.bits;
    int rc = qt_export_check_groups(m, err);
    if (rc < 0)
        return rc;
    if (is_float(m->spec)) {
        qt_export_add(m, ".weight", QT_F8_E4M3, m->n, m->k);
        qt_export_add(m, ".weight_scale", QT_F32, m->n, 1);
        return QT_OK;
    }
    if (is_nvfp4(m->spec)) {
        qt_export_add(m, ".weight_packed", QT_U8, m->n, m->k / 2);
        qt_export_add(m, ".weight_scale", QT_F8_E4M3, m->n, groups);
        qt_export_add_vector(m, ".weight_global_scale", QT_F32, 1);
        return QT_OK;
    }
    if (is_mxfp4(m->spec) && abs(m->entry->scale_exp2) > 80)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "scales are outside the range of E8M0");
    if (is_mxfp4(m->spec)) {
        qt_export_add(m, ".weight_packed", QT_U8, m->n, m->k / 2);
        qt_export_add(m, ".weight_scale", QT_U8, m->n, groups);
        return QT_OK;
    }
    qt_export_add(m, ".weight_packed", QT_I32, m->n, qt_bits_words(m->k, bits));
    qt_export_add(m, ".weight_scale", m->scale_dtype, m->n, groups);
    qt_export_add_vector(m, ".weight_shape", QT_I64, 2);
    if (m->codes.asymmetric)
        qt_export_add(m, ".weight_zero_point", QT_I32, qt_bits_words(m->n, bits), groups);
    return QT_OK;
}

static void convert_float(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    memcpy(m->tensor[0].data + panel->row0 * m->k, panel->code, panel->rows * m->k);
    qt_export_floats(&m->tensor[1], panel->row0, panel->scale, panel->rows);
}

static void put_e2m1(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    unsigned char *codes = m->tensor[PACKED].data + panel->row0 * m->k / 2;
    for (size_t i = 0; i < panel->rows * m->k / 2; i++)
        codes[i] =
            (unsigned char)(qt_e2m1(panel->code[2 * i]) | qt_e2m1(panel->code[2 * i + 1]) << 4);
}

static void convert_mxfp4(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    unsigned char *scales = m->tensor[SCALE].data + panel->row0 * m->codes.groups;
    put_e2m1(m, panel);
    for (size_t i = 0; i < panel->rows * m->codes.groups; i++)
        scales[i] = qt_e8m0(panel->scale[i]);
}

static void convert_nvfp4(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    const struct qt_entry *shared = m->own;
    const int exp2 = shared->scale_exp2;
    const float global = ldexpf(1, -exp2);
    unsigned char *scales = m->tensor[SCALE].data + panel->row0 * m->codes.groups;
    put_e2m1(m, panel);
    for (size_t i = 0; i < panel->rows * m->codes.groups; i++)
        scales[i] = qt_e4m3(ldexpf(panel->scale[i], -exp2));
    if (panel->row0 == 0)
        qt_export_floats(&m->tensor[GLOBAL], 0, &global, 1);
}

static void convert(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    const struct qt_code_info *c = &m->codes;
    if (is_float(m->spec)) {
        convert_float(m, panel);
        return;
    }
    if (is_mxfp4(m->spec)) {
        convert_mxfp4(m, panel);
        return;
    }
    if (is_nvfp4(m->spec)) {
        convert_nvfp4(m, panel);
        return;
    }
    const size_t words = m->tensor[PACKED].shape[1];
    for (size_t r = 0; r < panel->rows; r++) {
        uint32_t *dst = (uint32_t *)(void *)m->tensor[PACKED].data + (panel->row0 + r) * words;
        qt_bits_pack(dst, panel->code + r * m->k, m->k, c->bits);
    }
    qt_export_floats(&m->tensor[SCALE], panel->row0 * c->groups, panel->scale,
                     panel->rows * c->groups);
    for (size_t r = 0; c->asymmetric && r < panel->rows; r++)
        for (size_t g = 0; g < c->groups; g++)
            qt_bits_put((uint32_t *)(void *)m->tensor[ZERO].data + g, c->groups, panel->row0 + r,
                        c->bits, panel->zero[r * c->groups + g]);
    if (panel->row0 == 0) {
        const int64_t shape[] = {(int64_t)m->n, (int64_t)m->k};
        memcpy(m->tensor[SHAPE].data, shape, sizeof shape);
    }
}

/* ---- config.json ---------------------------------------------------------------------------- */

/* QT_E_UNSUPPORTED if a block scale of the matrix has no E4M3 code under the tensor scale 2^exp2,
 * which is not less than its own. */
static int check_scales(const struct qt_export *x, const struct qt_export_matrix *m, int exp2,
                        struct qt_err *err)
{
    struct qt_packed p;
    bool fit = true;
    int rc = qt_export_packed(&p, x, m, err);
    if (rc < 0)
        return rc;
    const struct qt_section *s = qt_packed_section(&p, "scale");
    const uint16_t *scale = (const uint16_t *)(const void *)s->data;
    for (size_t i = 0; i < s->bytes / sizeof *scale && fit; i++) {
        const float v =
            ldexpf(qt_f16_to_f32(scale[i]), m->entry->scale_exp2 + m->scale_shift - exp2);
        fit = v >= 0x1p-6f || ldexpf(v, 9) == truncf(ldexpf(v, 9));
    }
    qt_packed_free(&p);
    return fit ? QT_OK
               : qt_fail(err, QT_E_UNSUPPORTED, qt_container_dir(x->container), m->entry->name,
                         "compressed-tensors cannot hold nvfp4: runtimes take one tensor scale for "
                         "this matrix and those that they fuse with it, with which scales of its "
                         "blocks are too small for E4M3; int4 fits");
}

/* Sets own of NVFP4 matrices: the entry whose tensor scale is stored, the largest of those that are
 * fused. */
static int share_scales(const struct qt_export *x, struct qt_err *err)
{
    json_t *largest = json_object(); /* index of a matrix, by what is fused */
    int rc = largest ? QT_OK : qt_no_memory(err, NULL);
    for (size_t pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < x->count && rc == QT_OK; i++) {
            struct qt_export_matrix *m = &x->matrix[i];
            char key[QT_TENSOR_NAME_MAX + 16];
            const char *dot = strrchr(m->module, '.');
            const int as = qt_export_fused_as(m->module);
            if (!is_nvfp4(m->spec))
                continue;
            snprintf(key, sizeof key, "%.*s %d",
                     (int)(as && dot ? (size_t)(dot - m->module) : strlen(m->module)), m->module,
                     as);
            const json_t *found = json_object_get(largest, key);
            const struct qt_entry *best =
                found ? x->matrix[json_integer_value(found)].entry : m->entry;
            if (pass == 0 && (!found || m->entry->scale_exp2 > best->scale_exp2) &&
                json_object_set_new(largest, key, json_integer((json_int_t)i)) < 0)
                rc = qt_no_memory(err, NULL);
            m->own = best;
            if (pass == 1 && best->scale_exp2 != m->entry->scale_exp2)
                rc = check_scales(x, m, best->scale_exp2, err);
        }
    json_decref(largest);
    return rc;
}

/* Refuses fp8_inputs if no matrix takes them. */
static int check(const struct qt_export *x, struct qt_err *err)
{
    int rc = share_scales(x, err);
    if (rc < 0)
        return rc;
    bool any = !x->opt->fp8_inputs;
    for (size_t i = 0; i < x->count && !any; i++)
        any = is_float(x->matrix[i].spec);
    return any ? QT_OK
               : qt_fail(err, QT_E_USAGE, NULL, NULL,
                         "--fp8-inputs: no matrix of the container has fp8 weights");
}

/* QuantizationArgs of inputs: rounded when they are known, with one scale per token. */
static json_t *fp8_inputs(void)
{
    return json_pack("{s:i, s:s, s:b, s:s, s:b}", "num_bits", 8, "type", "float", "symmetric", 1,
                     "strategy", "token", "dynamic", 1);
}

/* QuantizationScheme of a matrix: matrices with equal schemes share a group. */
static json_t *scheme_json(const struct qt_export *x, const struct qt_export_matrix *m)
{
    const bool round_inputs = x->opt->fp8_inputs && is_float(m->spec);
    const bool rows = qt_export_has_rows(m);
    json_t *weights = json_pack(
        "{s:i, s:s, s:b, s:s, s:o*, s:b}", "num_bits", (int)m->codes.bits, "type",
        m->integer ? "int" : "float", "symmetric", !m->codes.asymmetric, "strategy",
        rows                ? "channel"
        : is_nvfp4(m->spec) ? "tensor_group"
                            : "group",
        "group_size", rows ? NULL : json_integer((json_int_t)m->codes.group), "dynamic", 0);
    return json_pack("{s:[], s:s, s:o, s:o, s:n}", "targets", "format", format_of(m), "weights",
                     weights, "input_activations", round_inputs ? fp8_inputs() : json_null(),
                     "output_activations");
}

/* Adds the matrix to the group of its scheme. */
static int add_to_group(json_t *groups, const struct qt_export *x, const struct qt_export_matrix *m,
                        struct qt_err *err)
{
    static const char *const compared[] = {"format", "weights"};
    json_t *scheme = scheme_json(x, m), *group, *found = NULL;
    const char *key;
    char name[32];
    json_object_foreach (groups, key, group) {
        bool same = true;
        for (size_t i = 0; i < sizeof compared / sizeof *compared; i++)
            same = same && json_equal(json_object_get(group, compared[i]),
                                      json_object_get(scheme, compared[i]));
        found = same ? group : found;
    }
    snprintf(name, sizeof name, "group_%zu", json_object_size(groups));
    bool failed = !scheme || (!found && json_object_set(groups, name, scheme) < 0);
    failed = failed || json_array_append_new(json_object_get(found ? found : scheme, "targets"),
                                             qt_export_module_json(x, m->module)) < 0;
    json_decref(scheme);
    return failed ? qt_no_memory(err, NULL) : QT_OK;
}

/* One group can name the class instead of all modules. */
static void name_class(json_t *groups)
{
    json_t *only = json_object_get(groups, "group_0"), *targets = json_object_get(only, "targets");
    if (json_object_size(groups) != 1)
        return;
    json_array_clear(targets);
    json_array_append_new(targets, json_string("Linear"));
}

static int config(json_t **out, const struct qt_export *x, struct qt_err *err)
{
    json_t *groups = json_object(), *ignore = NULL;
    bool mixed = false;
    int rc = groups ? QT_OK : qt_no_memory(err, NULL);
    for (size_t i = 0; i < x->count && rc == QT_OK; i++) {
        rc = add_to_group(groups, x, &x->matrix[i], err);
        mixed = mixed || strcmp(format_of(&x->matrix[i]), format_of(&x->matrix[0])) != 0;
    }
    if (rc == QT_OK)
        rc = qt_export_ignored(&ignore, x, err);
    if (rc == QT_OK) {
        name_class(groups);
        *out = json_pack(
            "{s:s, s:s, s:s, s:n, s:n, s:O, s:s, s:O}", "quant_method", "compressed-tensors",
            "format", mixed || x->count == 0 ? "mixed-precision" : format_of(&x->matrix[0]),
            "quantization_status", "compressed", "global_compression_ratio", "kv_cache_scheme",
            "ignore", ignore, "version", "0.15.0", "config_groups", groups);
        rc = *out ? QT_OK : qt_no_memory(err, NULL);
    }
    json_decref(groups);
    json_decref(ignore);
    return rc;
}

const struct qt_export_format qt_export_compressed_tensors = {
    .name = "compressed-tensors",
    .help = "integers and FP8",
    .runtimes = "vLLM, transformers, SGLang",
    .fp8_inputs = true,
    .fused = true,
    .scale_dtype = QT_F16,
    .fit = fit,
    .describe = describe,
    .check = check,
    .convert = convert,
    .config = config,
};
