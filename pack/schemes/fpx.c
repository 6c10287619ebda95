/*
 * fpx: minifloats ExMy with one FP16 scale per output row, as in FP6-LLM (arXiv 2401.14112).
 *
 * Bias 2^(E-1) - 1, subnormals, no infinities or NaN: E3M2 reaches 28, E2M3 7.5, E2M2 7, E2M1 6.
 * With five exponent bits, as many as FP16 has, the largest exponent is unused, because FP16 and
 * OCP's E5M2 use it for infinities and NaN: E5M2 reaches 57344.
 *
 * A code is (magnitude bits << 1) | sign. With the sign last, the 4-bit plane of a 5- or 6-bit code
 * holds magnitude bits only. A shift and a mask move these into the exponent and mantissa fields of
 * FP16; the difference in exponent bias is a power of two in the epilogue. Codes of up to 4 bits
 * index a table of pairs, like those of lut. Codes of 8 bits are stored whole and have the sign
 * first, as OCP formats do.
 */
#include "pack/schemes/codebook.h"

#include <math.h>

enum { F16_EXP_BITS = 5, E4M3FN_MAX = 448 };

static const struct qt_param params[] = {
    {"bits", QT_PARAM_INT, 6, 3, 8, NULL,
     "bits per weight: 1 sign + e exponent + the rest mantissa"},
    {"e", QT_PARAM_INT, 3, 1, 6, NULL, "exponent bits"},
    {"max", QT_PARAM_OPTION, 0, 0, E4M3FN_MAX, NULL,
     "448: leave out the code of 480 in E4M3, which is NaN in E4M3FN; 0: use all codes"},
    QT_PARAM_METHOD,
    QT_PARAM_LEARN,
    {0},
};

static const struct qt_preset presets[] = {
    {"fp8", "bits=8,e=4", "E4M3 without NaN; e=5 is OCP's E5M2"},
    {"fp7", "bits=7,e=3", "E3M3"},
    {"fp6", "bits=6,e=3", "E3M2 as in the FP6-LLM paper; e=2 (E2M3) is better on dense weights"},
    {"fp5", "bits=5,e=2", "E2M2"},
    {"fp4", "bits=4,e=2", "E2M1"},
    {"fpx", "", "any ExMy of 3 to 8 bits"},
    {0},
};

static unsigned spec_bits(const struct qt_spec *spec)
{
    return (unsigned)qt_spec_value(spec, "bits");
}

static enum qt_frag_order order_of(unsigned bits)
{
    return bits <= 4 ? QT_FRAG_NIBBLE : bits < 8 ? QT_FRAG_HALF : QT_FRAG_WHOLE;
}

static int check_spec(const struct qt_spec *spec, struct qt_err *err)
{
    unsigned bits = spec_bits(spec), e = (unsigned)qt_spec_value(spec, "e");
    if (e + 1 > bits)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "%u exponent bits do not fit into %u bits with a sign", e, bits);
    const unsigned max = (unsigned)qt_spec_value(spec, "max");
    if (max != 0 && (max != E4M3FN_MAX || bits != 8 || e != 4))
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "max=%u: must be 0, or 448 with bits=8, e=4",
                       max);
    return QT_OK;
}

static void codebook(struct qt_codebook *out, const struct qt_packed *p)
{
    unsigned bits = spec_bits(&p->spec), e = (unsigned)qt_spec_value(&p->spec, "e");
    const float max = (float)qt_spec_value(&p->spec, "max");
    int m = (int)(bits - 1 - e), bias = (1 << (e - 1)) - 1;
    *out = (struct qt_codebook){
        .bits = bits,
        .group = p->k,
        .order = order_of(bits),
        .search = qt_spec_method(&p->spec) != QT_METHOD_RTN,
    };
    unsigned magnitudes = 1u << (bits - 1), sign_bit = bits == 8 ? 7 : 0;
    for (unsigned mag = 0; mag < magnitudes; mag++) {
        int exponent = (int)mag >> m, mantissa = (int)mag & ((1 << m) - 1);
        float v = exponent ? ldexpf((float)(mantissa + (1 << m)), exponent - bias - m)
                           : ldexpf((float)mantissa, 1 - bias - m);
        if ((e == F16_EXP_BITS && exponent == (1 << F16_EXP_BITS) - 1) || (max > 0 && v > max))
            v = INFINITY; /* never used */
        else
            out->grid.max = v;
        unsigned code = mag << (sign_bit == 0);
        out->value[code] = v;
        out->value[code | 1u << sign_bit] = -v;
    }
    out->grid.exp_bits = (int)e;
    out->grid.man_bits = m;
    out->grid.sign_bit = (int)sign_bit;
}

static size_t group(const struct qt_packed *p)
{
    return p->k;
}

const struct qt_scheme qt_scheme_fpx = {
    .name = "fpx",
    .help = "minifloat weights, one scale per output row (FP6-LLM)",
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
