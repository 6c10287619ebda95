/*
 * humming: minifloats and integers for the kernels of Humming, which vLLM and SGLang call. For a
 * module M of N rows and K channels in groups of g:
 *
 *     M.weight        I32 [N][K b / 32]  codes along K, dense bit string
 *     M.weight_scale  F16 [N][K / g]
 *     M.zero_point    I32 [N b / 32][K / g]  codes along N; integers with zero-points
 *
 * The code of a minifloat has its sign in the highest bit; that of an integer is q + 2^(b-1).
 */
#include "pack/export/bits.h"
#include "pack/export/export.h"

#include <stdio.h>
#include <string.h>

enum { WEIGHT, SCALE, ZERO, TYPE_TEXT = 24, PART = 256 };

static bool is_float(const struct qt_spec *spec)
{
    return qt_export_is(spec, "fpx");
}

static enum qt_export_fit fit(const char **why, const struct qt_spec *spec)
{
    if (qt_export_is_integer(spec))
        return QT_EXPORT_EXACT;
    *why = "it has minifloats and integers only; fp6 or int4 fit";
    if (!is_float(spec))
        return QT_EXPORT_NO;
    const double bits = qt_spec_value(spec, "bits"), e = qt_spec_value(spec, "e");
    *why = "it has at most 5 exponent bits";
    if (e > 5)
        return QT_EXPORT_NO;
    *why = "the code of 480 is NaN in E4M3FN; fp8:max=448 fits";
    return bits == 8 && e == 4 && qt_spec_value(spec, "max") != 448 ? QT_EXPORT_NO
                                                                    : QT_EXPORT_EXACT;
}

static int describe(struct qt_export_matrix *m, struct qt_err *err)
{
    const size_t groups = m->codes.groups;
    const unsigned bits = m->codes.bits;
    if (m->head)
        return qt_fail(
            err, QT_E_UNSUPPORTED, NULL, NULL,
            "vLLM takes no quantized head in this format; a rule 'lm_head=none' leaves it "
            "as it is");
    int rc = qt_export_check_shape(m, 32, 1, err);
    if (rc < 0)
        return rc;
    qt_export_add(m, ".weight", QT_I32, m->n, qt_bits_words(m->k, bits));
    qt_export_add(m, ".weight_scale", m->scale_dtype, m->n, groups);
    if (m->codes.asymmetric)
        qt_export_add(m, ".zero_point", QT_I32, qt_bits_words(m->n, bits), groups);
    return QT_OK;
}

/* Minifloats of up to 7 bits have their sign last in the container. */
static void pack_signs_first(uint32_t *word, const uint8_t *code, size_t count, unsigned bits)
{
    uint8_t part[PART];
    for (size_t k = 0; k < count; k += PART, word += PART / 32 * bits) {
        const size_t n = qt_min_size(PART, count - k);
        for (size_t i = 0; i < n; i++)
            part[i] = (uint8_t)(code[k + i] >> 1 | (code[k + i] & 1) << (bits - 1));
        qt_bits_pack(word, part, n, bits);
    }
}

static void convert(const struct qt_export_matrix *m, const struct qt_export_panel *panel)
{
    const struct qt_code_info *c = &m->codes;
    const size_t words = m->tensor[WEIGHT].shape[1];
    const bool sign_last = is_float(m->spec) && c->bits < 8;
    for (size_t r = 0; r < panel->rows; r++) {
        uint32_t *dst = (uint32_t *)(void *)m->tensor[WEIGHT].data + (panel->row0 + r) * words;
        (sign_last ? pack_signs_first : qt_bits_pack)(dst, panel->code + r * m->k, m->k, c->bits);
    }
    qt_export_floats(&m->tensor[SCALE], panel->row0 * c->groups, panel->scale,
                     panel->rows * c->groups);
    for (size_t r = 0; c->asymmetric && r < panel->rows; r++)
        for (size_t g = 0; g < c->groups; g++)
            qt_bits_put((uint32_t *)(void *)m->tensor[ZERO].data + g, c->groups, panel->row0 + r,
                        c->bits, panel->zero[r * c->groups + g]);
}

/* ---- config.json ---------------------------------------------------------------------------- */

/* The options of a matrix: "float6e3m2" or "uint4". */
static json_t *options(const struct qt_export_matrix *m)
{
    const unsigned bits = m->codes.bits;
    const bool rows = qt_export_has_rows(m);
    char type[TYPE_TEXT];
    if (is_float(m->spec)) {
        const unsigned e = (unsigned)qt_spec_value(m->spec, "e");
        snprintf(type, sizeof type, "float%ue%um%u", bits, e, bits - 1 - e);
    } else {
        snprintf(type, sizeof type, "uint%u", bits);
    }
    return json_pack("{s:s, s:i, s:s, s:b}", "b_dtype", type, "weight_scale_group_size",
                     rows ? 0 : (int)m->codes.group, "weight_scale_type",
                     rows ? "channel" : "group", "has_zero_point", m->codes.asymmetric);
}

/* The layer that vLLM makes of this module and its neighbours, and whose name it looks up. */
static const char *fused_name(const char *last)
{
    static const char *const fused[][2] = {{"q_proj", "qkv_proj"},
                                           {"k_proj", "qkv_proj"},
                                           {"v_proj", "qkv_proj"},
                                           {"gate_proj", "gate_up_proj"},
                                           {"up_proj", "gate_up_proj"}};
    for (size_t i = 0; i < sizeof fused / sizeof *fused; i++)
        if (strcmp(last, fused[i][0]) == 0)
            return fused[i][1];
    return NULL;
}

/* A regular expression that matches the module, and the fused one, from the start of the runtime's
 * name. */
static int add_override(json_t *dynamic, const struct qt_export *x,
                        const struct qt_export_matrix *m, json_t *value)
{
    char key[2 * QT_TENSOR_NAME_MAX + 32], *to = key;
    const char *module = m->module, *prefix = qt_export_any_prefix(&module, x);
    const char *dot = strrchr(module, '.'), *last = dot ? dot + 1 : module;
    const char *fused = fused_name(last);
    to += sprintf(to, "+:%s", prefix);
    for (const char *c = module; c < last; c++) {
        if (*c == '.')
            *to++ = '\\';
        *to++ = *c;
    }
    sprintf(to, fused ? "(%s|%s)$" : "%s$", last, fused);
    return json_object_set_new(dynamic, key, value);
}

/* A matrix with the options that most matrices have. */
static const struct qt_export_matrix *most_common(const struct qt_export *x)
{
    const struct qt_export_matrix *best = &x->matrix[0];
    size_t most = 0;
    for (size_t i = 0; i < x->count && most <= x->count - i; i++) {
        size_t same = 0;
        for (size_t j = i; j < x->count; j++)
            same += strcmp(x->matrix[i].spec->text, x->matrix[j].spec->text) == 0;
        if (same > most) {
            most = same;
            best = &x->matrix[i];
        }
    }
    return best;
}

static int config(json_t **out, const struct qt_export *x, struct qt_err *err)
{
    json_t *left = NULL, *dynamic = json_object(), *base = options(most_common(x)), *own = NULL;
    bool failed = !dynamic || !base;
    int rc = qt_export_left(&left, x, err);
    for (size_t i = 0; rc == QT_OK && !failed && i < x->count; i++) {
        own = options(&x->matrix[i]);
        failed = !own || (!json_equal(own, base) &&
                          add_override(dynamic, x, &x->matrix[i], json_incref(own)) < 0);
        json_decref(own);
    }
    if (rc == QT_OK && !failed) {
        *out = json_pack("{s:s, s:O}", "quant_method", "humming", "ignore", left);
        failed = !*out || json_object_update(*out, base) < 0;
        if (!failed && json_object_size(dynamic))
            failed = json_object_set(*out, "dynamic", dynamic) < 0;
    }
    json_decref(left);
    json_decref(dynamic);
    json_decref(base);
    return rc < 0 ? rc : failed ? qt_no_memory(err, NULL) : QT_OK;
}

const struct qt_export_format qt_export_humming = {
    .name = "humming",
    .help = "minifloats of up to 8 bits, integers",
    .runtimes = "vLLM 0.33 and later, SGLang",
    .fused = true,
    .scale_dtype = QT_F16,
    .fit = fit,
    .describe = describe,
    .convert = convert,
    .config = config,
};
