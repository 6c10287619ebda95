/*
 * w4ax: INT4 weights for activations of 4 and 8 bits, after FMPQ, the fine-grained mixed-precision
 * quantization of COMET (arXiv 2410.12168). The channels of an input are permuted so that those
 * with outliers share channel blocks; each channel block of 128 has 4 or 8 bits. Weights are w = s
 * * q, q from -8 to 7, with one scale per row and channel block, or per row. Sections of their own
 * hold the channel order and the precisions (activations/arrange.c, activations/act.c).
 */
#include "pack/schemes/codebook.h"

#include <string.h>

/* In the order of enum qt_act_scales. */
static const char *const scales[] = {"block", "int", "row", NULL};
static const char *const orders[] = {"none", "outliers", NULL};
static const char *const rotations[] = {"none", "hadamard", NULL};

enum { CHOICE_PARAMS = 2 }; /* the first parameters, which choose the 8-bit channel blocks */

static const struct qt_param params[] = {
    {"a8max", QT_PARAM_REAL, 0.2, 0, 1, NULL,
     "largest fraction of multiply-accumulates with 8-bit activations"},
    {"bound", QT_PARAM_REAL, 0, 0, 1e6, NULL,
     "stop choosing 8-bit channel blocks at this estimated KL divergence (nats)"},
    {"order", QT_PARAM_CHOICE, 1, 0, 1, orders,
     "outliers: sort the channels of inputs with 8-bit blocks by their 99.9 % quantile; none: "
     "source order"},
    {"smooth", QT_PARAM_REAL, 1, 0, 1e6, NULL,
     "where it lowers the error, divide channels by a power of two near sqrt(RMS of activations / "
     "RMS of weights), if that exceeds this multiple of the median or is below the median divided "
     "by it, and multiply their weights by it; 0: never"},
    {"scales", QT_PARAM_CHOICE, 0, 0, 2, scales,
     "scales of weights and activations. block: one per 128 channels of a row or token; int: small "
     "integers times one scale per row or token; row: one per row or token, 8-bit activations"},
    QT_PARAM_METHOD,
    {"rotate", QT_PARAM_CHOICE, 1, 0, 1, rotations,
     "hadamard: multiply the channels of each block by a Hadamard matrix, in the weights and, "
     "during inference, in the activations; none: do not"},
    {0},
};

static const struct qt_preset presets[] = {
    {"w4ax", "", "INT4 weights, INT4 and INT8 activations"},
    {0},
};

static int check_spec(const struct qt_spec *spec, struct qt_err *err)
{
    double smooth = qt_spec_value(spec, "smooth");
    if (smooth != 0 && smooth < 1)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "smooth=%g: must be 0, or at least 1", smooth);
    return QT_OK;
}

/* With scales=row there are no channel blocks to choose. */
static int check_unused(const struct qt_spec *spec, struct qt_err *err)
{
    if (qt_spec_value(spec, "scales") != QT_ACT_SCALES_ROW)
        return QT_OK;
    for (size_t i = 0; i < CHOICE_PARAMS; i++)
        if (spec->value[i] != params[i].initial)
            return qt_fail(err, QT_E_USAGE, NULL, NULL,
                           "%s=%g: with scales=row all activations have 8 bits", params[i].key,
                           spec->value[i]);
    return QT_OK;
}

enum { MULTIPLES = 15 }; /* of a row's scale; a multiple times a code fits 8 bits */

static enum qt_act_scales scales_of(const struct qt_packed *p)
{
    return (enum qt_act_scales)qt_spec_value(&p->spec, "scales");
}

static size_t group(const struct qt_packed *p)
{
    return scales_of(p) == QT_ACT_SCALES_ROW ? p->k : QT_ACT_BLOCK;
}

static void codebook(struct qt_codebook *out, const struct qt_packed *p)
{
    *out = (struct qt_codebook){
        .bits = 4,
        .group = group(p),
        .multiples = scales_of(p) == QT_ACT_SCALES_INT ? MULTIPLES : 0,
        .order = QT_FRAG_BYTE,
        .pairs = qt_spec_value(&p->spec, "rotate") == QT_PARAM_ABSENT,
        .search = qt_spec_method(&p->spec) != QT_METHOD_RTN,
        .zero_code = 8,
        .grid = {.low = -8, .high = 7, .max = 7},
    };
    for (int code = 0; code < 16; code++)
        out->value[code] = (float)(code - 8);
}

static int describe(struct qt_packed *p, struct qt_err *err)
{
    struct qt_codebook cb;
    size_t blocks = qt_ceil_div(p->k, QT_ACT_BLOCK), one = 1;
    int rc = QT_OK;
    codebook(&cb, p);
    QT_TRY(qt_codebook_describe(p, &cb, err));
    QT_TRY(qt_packed_add_section(p, "bits", QT_U8, 1, &blocks, err));
    QT_TRY(qt_packed_add_section(p, "clip", QT_F32, 1, &one, err));
    QT_TRY(qt_arrange_describe(p, err));
done:
    return rc;
}

static int prepare(struct qt_packed *p, const struct qt_matrix *w, const struct qt_copy *on,
                   const float *importance, struct qt_err *err)
{
    const struct qt_section *bits = qt_packed_section(p, "bits");
    const struct qt_act *input = p->spec.arrange ? p->spec.arrange->input : NULL;
    const float clip = input ? input->clip : 1;
    (void)w;
    (void)on;
    (void)importance;
    (void)err;
    if (input)
        memcpy(bits->data, input->bits, bits->bytes);
    else
        memset(bits->data, 8, bits->bytes);
    memcpy(qt_packed_section(p, "clip")->data, &clip, sizeof clip);
    return QT_OK;
}

static double unit_scale(const struct qt_packed *p)
{
    return 1.0 / (7 * (scales_of(p) == QT_ACT_SCALES_INT ? MULTIPLES : 1));
}

/* Multiples are 1 to MULTIPLES, except in padding rows. */
static int check_multiples(const struct qt_packed *p, struct qt_err *err)
{
    const struct qt_section *sub = qt_packed_section(p, "sub");
    for (size_t r = 0; sub && r < p->n; r++)
        for (size_t b = 0; b < sub->shape[1]; b++) {
            size_t at = (r / QT_FRAG_ROWS * sub->shape[1] + b) * QT_FRAG_ROWS;
            unsigned multiple = sub->data[at + qt_frag_scale_slot((unsigned)(r % QT_FRAG_ROWS))];
            if (multiple < 1 || multiple > MULTIPLES)
                return qt_fail(err, QT_E_INPUT, NULL, NULL,
                               "scale multiple of row %zu, channel block %zu is %u, not 1 to %d", r,
                               b, multiple, MULTIPLES);
        }
    return QT_OK;
}

static int check_values(const struct qt_packed *p, struct qt_err *err)
{
    const struct qt_section *bits = qt_packed_section(p, "bits");
    float clip;
    for (size_t b = 0; b < bits->bytes; b++)
        if (bits->data[b] != 4 && bits->data[b] != 8)
            return qt_fail(err, QT_E_INPUT, NULL, NULL, "channel block %zu has %u bits, not 4 or 8",
                           b, bits->data[b]);
    memcpy(&clip, qt_packed_section(p, "clip")->data, sizeof clip);
    if (!(clip > 0 && clip <= 1))
        return qt_fail(err, QT_E_INPUT, NULL, NULL, "the clip ratio %g is outside (0, 1]",
                       (double)clip);
    int rc = check_multiples(p, err);
    if (rc == QT_OK)
        rc = qt_arrange_check(p, err);
    return rc < 0 ? rc : qt_codebook_check_values(p, err);
}

const struct qt_scheme qt_scheme_w4ax = {
    .name = "w4ax",
    .help = "INT4 weights, activations of 4 and 8 bits in blocks of channels (COMET)",
    .presets = presets,
    .params = params,
    .added_param = "rotate",
    .needs_data = true,
    .check_spec = check_spec,
    .check_unused = check_unused,
    .describe = describe,
    .codebook = codebook,
    .group = group,
    .unit_scale = unit_scale,
    .prepare = prepare,
    QT_CODEBOOK_STRIPS,
    .check_values = check_values,
};
