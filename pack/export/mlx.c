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

#include <stdio.h>
#include <stdlib.h>
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

/* ---- experts --------------------------------------------------------------------------------- */

static const char experts_part[] = "experts.";

/* mlx_lm reads the experts of a layer in one tensor, as its own converter writes them. */
static bool stack(struct qt_stack *out, const char *model_type, const char *name)
{
    static const char *const kept[] = {"afmoe", "dots1", "gpt_oss", "llama4", "llama4_text"};
    static const char *const names[][2] = {
        {"w1", "gate_proj"}, {"w3", "up_proj"}, {"w2", "down_proj"}};
    const char *at = strstr(name, experts_part), *module = "switch_mlp", *matrix, *dot;
    char *end;
    if (!at || !model_type)
        return false;
    *out = (struct qt_stack){.expert = strtoul(at + strlen(experts_part), &end, 10), .parts = 1};
    if (end == at + strlen(experts_part) || *end != '.' || !(dot = strchr(end + 1, '.')))
        return false;
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        if (strcmp(kept[i], model_type) == 0)
            module = "experts";
    matrix = end + 1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(matrix, names[i][0], (size_t)(dot - matrix)) == 0)
            return snprintf(out->name, sizeof out->name, "%.*s%s.%s%s", (int)(at - name), name,
                            module, names[i][1], dot) < (int)sizeof out->name;
    return snprintf(out->name, sizeof out->name, "%.*s%s.%s", (int)(at - name), name, module,
                    matrix) < (int)sizeof out->name;
}

static bool is_expert(const struct qt_export_matrix *m)
{
    struct qt_stack unused;
    return stack(&unused, "", m->entry->name);
}

/* ---- options --------------------------------------------------------------------------------- */

/* The matrix whose options are those of the model: an expert, if there is one. */
static const struct qt_export_matrix *base(const struct qt_export *x)
{
    for (size_t i = 0; i < x->count; i++)
        if (is_expert(&x->matrix[i]))
            return &x->matrix[i];
    return &x->matrix[0];
}

static bool same_options(const struct qt_export_matrix *a, const struct qt_export_matrix *b)
{
    return a->codes.bits == b->codes.bits && a->codes.group == b->codes.group;
}

/* Modules may have options of their own, but the experts of a layer are one module. Those of
 * multimodal models have other names in programs. */
static int check(const struct qt_export *x, struct qt_err *err)
{
    /* mlx_lm would load these files without a message and compute other logits. It takes files
     * with quantized experts for its own, in which convolutions are turned. */
    static const char *const refused[][2] = {
        {"qwen3_next", "mlx_lm stores convolutions and norms of qwen3_next in another form"},
        {"ernie4_5_moe", "mlx_lm ignores the bias of the router of ernie4_5_moe"},
    };
    const struct qt_export_matrix *first = base(x);
    for (size_t i = 0; x->model_type && i < sizeof refused / sizeof *refused; i++)
        if (strcmp(x->model_type, refused[i][0]) == 0)
            return qt_fail(err, QT_E_UNSUPPORTED, qt_container_dir(x->container), NULL, "mlx: %s",
                           refused[i][1]);
    if (json_object_get(x->config, "text_config"))
        return qt_export_check_uniform(x, err);
    for (size_t i = 0; i < x->count; i++)
        if (is_expert(&x->matrix[i]) && !same_options(&x->matrix[i], first))
            return qt_fail(err, QT_E_UNSUPPORTED, qt_container_dir(x->container),
                           x->matrix[i].entry->name,
                           "mlx needs one scheme for all experts, but this one is %s and %s is %s",
                           x->matrix[i].spec->text, first->entry->name, first->spec->text);
    return QT_OK;
}

static json_t *options_of(const struct qt_export_matrix *m)
{
    return json_pack("{s:i, s:i, s:s}", "group_size", (int)m->codes.group, "bits",
                     (int)m->codes.bits, "mode", "affine");
}

static int config(json_t **out, const struct qt_export *x, struct qt_err *err)
{
    const struct qt_export_matrix *first = base(x);
    bool failed = !(*out = options_of(first));
    for (size_t i = 0; i < x->count && !failed; i++)
        if (!same_options(&x->matrix[i], first))
            failed = json_object_set_new(*out, x->matrix[i].module, options_of(&x->matrix[i])) < 0;
    return failed ? qt_no_memory(err, NULL) : QT_OK;
}

const struct qt_export_format qt_export_mlx = {
    .name = "mlx",
    .help = "affine integers in groups of 32 to 128",
    .runtimes = "MLX",
    .embeddings = true,
    .scale_dtype = QT_F16,
    .fit = fit,
    .describe = describe,
    .stack = stack,
    .check = check,
    .convert = convert,
    .config = config,
    .config_copy = "quantization",
};
