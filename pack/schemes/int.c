/*
 * int: integers with a scale per group of channels or per row.
 *
 * Symmetric: w = s * q with q from -2^(b-1) to 2^(b-1) - 1, stored as q + 2^(b-1). A negative scale
 * moves the longer side of the range to where the weights need it. Asymmetric: w = s * (code - z),
 * with a zero-point z of b bits per row and group.
 */
#include "pack/schemes/codebook.h"

static const char *const zeros[] = {"none", "group", NULL};

static const struct qt_param params[] = {
    {"bits", QT_PARAM_INT, 4, 4, 8, NULL, "bits per weight: 4 or 8"},
    {"g", QT_PARAM_INT, 128, 0, 256, NULL,
     "channels per scale: 32, 64, 128 or 256; 0: one scale per row"},
    {"zero", QT_PARAM_CHOICE, 0, 0, 1, zeros,
     "none: symmetric; group: a zero-point for every scale"},
    QT_PARAM_METHOD,
    QT_PARAM_LEARN,
    {0},
};

static const struct qt_preset presets[] = {
    {"int4", "bits=4", "-8 to 7, or 0 to 15 minus a zero-point"},
    {"int8", "bits=8,g=0", "-128 to 127, or 0 to 255 minus a zero-point; one scale per row"},
    {0},
};

static int check_spec(const struct qt_spec *spec, struct qt_err *err)
{
    unsigned g = (unsigned)qt_spec_value(spec, "g");
    if (g & (g - 1) || (g && g < 32))
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "g=%u: must be 0, 32, 64, 128 or 256", g);
    return QT_OK;
}

static size_t group(const struct qt_packed *p)
{
    size_t g = (size_t)qt_spec_value(&p->spec, "g");
    return g ? g : p->k;
}

static void codebook(struct qt_codebook *out, const struct qt_packed *p)
{
    unsigned bits = (unsigned)qt_spec_value(&p->spec, "bits");
    bool asymmetric = qt_spec_value(&p->spec, "zero") != 0;
    /* A mask and a multiplication turn nibbles at the same place of two half-words into numbers. */
    enum qt_frag_order order = bits == 4 ? QT_FRAG_HALF : QT_FRAG_WHOLE;
    int levels = 1 << bits, zero = asymmetric ? 0 : levels / 2;
    *out = (struct qt_codebook){
        .bits = bits,
        .group = group(p),
        .order = order,
        .search = qt_spec_method(&p->spec) != QT_METHOD_RTN,
        .asymmetric = asymmetric,
        .zero_code = (uint8_t)zero,
        .grid = {.low = (float)-zero, .high = (float)(levels - 1 - zero)},
    };
    out->grid.max = out->grid.high;
    for (int code = 0; code < levels; code++)
        out->value[code] = (float)(code - zero);
}

const struct qt_scheme qt_scheme_int = {
    .name = "int",
    .help = "integers in groups or rows, symmetric or with zero-points",
    .presets = presets,
    .params = params,
    .check_spec = check_spec,
    .describe = qt_codebook_describe_all,
    .codebook = codebook,
    .group = group,
    .unit_scale = qt_codebook_unit_scale,
    QT_CODEBOOK_STRIPS,
    .check_values = qt_codebook_check_values,
    .learnable = &qt_codebook_learnable,
};
