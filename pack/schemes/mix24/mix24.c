/*
 * The scheme mix24: 2- and 4-bit groups in one weight matrix, and FP16 outliers (Li et al.,
 * "2/4/16-bit in a weight matrix with asynchronous dequantization", arXiv 2311.16442, below "the
 * paper").
 *
 * Groups of 16 channels have 2-bit codes; a quarter of the groups, where 4 bits lower the error
 * most, have 4-bit codes. Each row and group has a scale and a zero-point. Scales are quantized as
 * well, 16 rows together.
 */
#include "pack/schemes/mix24/mix24.h"

#include <math.h>
#include <string.h>

static const char *const senses[] = {"gain", "obs", "paper", NULL};
static const char *const orders[] = {"twos", "activity", "natural", "none", NULL};
static const char *const criteria[] = {"gain", "abs", NULL};
static const char *const fits[] = {"search", "minmax", NULL};

static const struct qt_param params[] = {
    {"four", QT_PARAM_REAL, 0.25, 0, 1, NULL,
     "fraction of the groups with 4 bits, rounded to whole units of 128 channels"},
    {"g", QT_PARAM_INT, 16, 8, 16, NULL, "channels per group: 8 or 16"},
    {"g2", QT_PARAM_INT, 16, 8, 16, NULL,
     "rows that share a second-order scale (the scale of the 4-bit scales): 8 or 16"},
    {"sens", QT_PARAM_CHOICE, 0, 0, 2, senses,
     "which groups get 4 bits. gain: those whose error 4 bits lower most; obs: those with the "
     "largest error at 2 bits; paper: equation 9 of the paper (arXiv 2311.16442)"},
    {"order", QT_PARAM_CHOICE, 0, 0, 3, orders,
     "order of error compensation. twos: 2-bit groups first; activity: most active groups first; "
     "natural: as stored; none: no compensation"},
    {"local", QT_PARAM_INT, 0, 0, 1, NULL, "1: one 4-bit group in every four neighbors"},
    {"outliers", QT_PARAM_REAL, 0.002, 0, 0.03, NULL,
     "fraction of the weights that are stored as FP16"},
    {"ocrit", QT_PARAM_CHOICE, 0, 0, 1, criteria,
     "which weights are outliers. gain: those whose removal lowers the group's error most; abs: "
     "the largest"},
    {"fit", QT_PARAM_CHOICE, 0, 0, 1, fits,
     "scales and zero-points. search: least error; minmax: from the range of the group"},
    {"polish", QT_PARAM_INT, 6, 0, 100, NULL,
     "rounds of coordinate descent after error compensation"},
    {"paper", QT_PARAM_INT, 0, 0, 1, NULL,
     "1: the paper's recipe: sens=paper, order=natural, ocrit=abs, fit=minmax, polish=0"},
    QT_PARAM_LEARN,
    QT_PARAM_METHOD,
    {0},
};

static const struct qt_preset presets[] = {
    {"mix24", "", "2- and 4-bit groups of 16 channels, FP16 outliers"},
    {0},
};

static int check_spec(const struct qt_spec *spec, struct qt_err *err)
{
    int g = (int)qt_spec_value(spec, "g"), g2 = (int)qt_spec_value(spec, "g2");
    if ((g != 8 && g != 16) || (g2 != 8 && g2 != 16))
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "%s=%d: must be 8 or 16",
                       g != 8 && g != 16 ? "g" : "g2", g != 8 && g != 16 ? g : g2);
    if (qt_spec_value(spec, "local") != 0 && qt_spec_value(spec, "four") != 0.25)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "local=1 needs four=0.25");
    return QT_OK;
}

static int descent_rounds(const struct qt_spec *spec)
{
    return qt_mix24_recipe(spec).descent_rounds;
}

/* ---- sections ------------------------------------------------------------------------------- */

static int describe(struct qt_packed *p, struct qt_err *err)
{
    struct qt_mix24 m;
    int rc = QT_OK;
    p->layout = "mix16x128";
    if (p->k / (size_t)qt_spec_value(&p->spec, "g") >= QT_MIX24_NO_GROUP || p->n > UINT32_MAX / 2)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "%zu x %zu is too large for mix24", p->n,
                       p->k);
    qt_mix24_open(&m, p);
    if (m.outliers > UINT32_MAX)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "%zu outliers are too many", m.outliers);
#define ADD(name, dtype, ...)                                                                      \
    QT_TRY(qt_packed_add_section(p, name, dtype,                                                   \
                                 (int)(sizeof((size_t[]){__VA_ARGS__}) / sizeof(size_t)),          \
                                 (size_t[]){__VA_ARGS__}, err))
    ADD("stream", QT_U8, m.strips, m.strip_bytes);
    ADD("perm", QT_U16, m.slots);
    if (m.outliers) {
        ADD("csr_ptr", QT_U32, m.panels, m.n + 1);
        ADD("csr_col", QT_U16, m.outliers);
        ADD("csr_val", QT_F16, m.outliers);
    }
#undef ADD
done:
    return rc;
}

static size_t group(const struct qt_packed *p)
{
    return (size_t)qt_spec_value(&p->spec, "g");
}

/* Placeholder until prepare chooses scale_exp2. */
static double unit_scale(const struct qt_packed *p)
{
    (void)p;
    return 1;
}

/* Equation 10 of the paper, plus 16 bits each for the value and the column of an outlier. It omits
 * scales and zero-points of 4-bit groups, row pointers, permutation and padding. */
static double paper_bpw(const struct qt_packed *p)
{
    struct qt_mix24 m;
    qt_mix24_open(&m, p);
    double four = (double)m.units.fours / m.units.units, g = (double)m.g;
    double two_bits = 2 + (2 + 4) / g + (16 + 4) / (g * QT_FRAG_ROWS / m.units.halves);
    return (1 - four) * two_bits + 4 * four + 32 * qt_spec_value(&p->spec, "outliers");
}

/* ---- dequantization ------------------------------------------------------------------------- */

static void decode_outliers(float *w, const struct qt_mix24 *m, const struct qt_strip *strip,
                            int exp2)
{
    for (size_t panel = 0; panel < m->panels; panel++)
        for (size_t r = 0; r < strip->rows; r++) {
            size_t first, end;
            qt_mix24_row(&first, &end, m, panel, strip->index * QT_FRAG_ROWS + r);
            for (size_t i = first; i < end; i++) {
                size_t channel = qt_mix24_channel(m, panel * QT_MIX24_PANEL + m->csr_col[i]);
                w[r * m->k + channel] = ldexpf(qt_f16_to_f32(m->csr_val[i]), exp2);
            }
        }
}

static void decode(float *w, const struct qt_packed *p, const struct qt_strip *strip)
{
    struct qt_mix24_group *groups = strip->scratch;
    struct qt_mix24 m;
    qt_mix24_open(&m, p);
    qt_mix24_unpack(groups, &m, qt_mix24_strip(&m, strip->index));
    for (size_t slot = 0; slot < m.slots; slot++) {
        const struct qt_mix24_group *group = &groups[slot];
        if (m.perm[slot] == QT_MIX24_NO_GROUP)
            continue;
        size_t first = m.perm[slot] * m.g, channels = qt_min_size(m.g, m.k - first);
        for (size_t r = 0; r < strip->rows; r++) {
            float s = qt_mix24_scale(group, r), zero = (float)group->zero[r], value[16];
            for (int c = 0; c < 16; c++)
                value[c] = ldexpf(qt_mix24_value((float)c, zero, s), p->scale_exp2);
            for (size_t c = 0; c < channels; c++)
                w[r * m.k + first + c] = value[group->code[c][r]];
        }
    }
    if (m.csr_ptr)
        decode_outliers(w, &m, strip, p->scale_exp2);
}

const struct qt_scheme qt_scheme_mix24 = {
    .name = "mix24",
    .help = "2- and 4-bit groups by sensitivity; second-order scales; FP16 outliers",
    .presets = presets,
    .params = params,
    .check_spec = check_spec,
    .describe = describe,
    .group = group,
    .unit_scale = unit_scale,
    .conditional = true,
    .descent_rounds = descent_rounds,
    .prepare = qt_mix24_prepare,
    .prepare_bytes = qt_mix24_prepare_bytes,
    .scratch_bytes = qt_mix24_scratch_bytes,
    .paper_bpw = paper_bpw,
    .quantize = qt_mix24_quantize,
    .solve = qt_mix24_solve,
    .rounds_on = qt_mix24_rounds_on,
    .round_begin = qt_mix24_round_begin,
    .round_end = qt_mix24_round_end,
    .pack = qt_mix24_pack_codes,
    .decode = decode,
    .repack_equal = qt_mix24_repack_equal,
    .check_values = qt_mix24_check_values,
    .learnable = &qt_mix24_learnable,
};
