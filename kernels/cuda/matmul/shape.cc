/* Weights of LUT, FPX and INT products: checks, slices, tensor maps. */
#include "kernels/cuda/matmul/shape.h"
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/matmul/decode.h"

#include <math.h>
#include <string.h>

static enum qt_format format_of(const struct qtool_matmul_weight *w)
{
    if (w->kind == QTOOL_MATMUL_INT)
        return w->bits == 8 ? QT_FORMAT_INT8 : w->zero ? QT_FORMAT_INT4_ZERO : QT_FORMAT_INT4;
    if (w->bits <= 4)
        return (enum qt_format)(QT_FORMAT_LUT2 + (int)w->bits - 2);
#define FIELDS(name, field_bits, field_exp_bits, decoder)                                          \
    if (w->bits == field_bits && (w->exp_bits == field_exp_bits || field_exp_bits == 0))           \
        return QT_FORMAT_##name;
    QT_FIELD_FORMATS(FIELDS)
#undef FIELDS
    return QT_FORMAT_FP8; /* not reached */
}

static int log2_exact(size_t v)
{
    int n = 0;
    while (n < 30 && (size_t)1 << n < v)
        n++;
    return (size_t)1 << n == v ? n : -1;
}

bool qt_has_zeros(const struct qtool_matmul_weight *w)
{
    return w->kind == QTOOL_MATMUL_INT && w->zero;
}

static const char *weight_fault(const struct qtool_matmul_weight *w)
{
    bool lut = w->kind == QTOOL_MATMUL_LUT, fpx = w->kind == QTOOL_MATMUL_FPX;
    if (!lut && !fpx && w->kind != QTOOL_MATMUL_INT)
        return "unknown kind of weight";
    if (w->kind == QTOOL_MATMUL_INT && w->bits != 4 && w->bits != 8)
        return "INT weights must have 4 or 8 bits";
    if (lut ? w->bits < 2 || w->bits > 4 : w->bits < 3 || w->bits > 8)
        return "bits out of range: LUT has 2..4, FPX 3..8";
    if (fpx && (w->exp_bits < 1 || w->exp_bits > 5 || w->exp_bits >= w->bits))
        return "FPX must have 1..5 exponent bits (FP16 has 5), and fewer than bits";
    if (w->n == 0 || w->k == 0 || w->n > 1 << 26 || w->k > 1 << 26)
        return "n and k must be 1..2^26";
    if (w->group && (w->group < 32 || w->group > 256 || log2_exact(w->group) < 0))
        return "group must be 0, 32, 64, 128 or 256";
    if (fpx && w->group)
        return "FPX must have one scale per row (group 0)";
    if (w->scale_exp2 < -100 || w->scale_exp2 > 100)
        return "scale_exp2 must be -100..100";
    if (!w->scale || (size_t)w->scale % 16 || (lut && (!w->table || (size_t)w->table % 2)))
        return "scale must be 16-byte aligned, table 2-byte aligned, and neither NULL";
    if (w->kind == QTOOL_MATMUL_INT && (size_t)w->zero % 8)
        return "zero must be 8-byte aligned";
    return NULL;
}

const char *qt_shape_of(struct qt_shape *s, const struct qtool_matmul_weight *w)
{
    const char *fault = weight_fault(w);
    if (fault)
        return fault;
    memset(s, 0, sizeof *s);
    unsigned bits = w->bits;
    for (int i = 0; bits; i++) {
        s->width[i] = bits >= 4 ? 4 : bits >= 2 ? 2 : 1;
        bits -= (unsigned)s->width[i];
        if (!w->plane[i] || (size_t)w->plane[i] % 16)
            return "planes must not be NULL and must be 16-byte aligned";
    }
    s->format = format_of(w);
    s->bits = (int)w->bits;
    s->strips = (int)ceil_div(w->n, QT_STRIP_ROWS);
    s->blocks = (int)ceil_div(w->k, QT_BLOCK_COLS);
    s->group_shift = w->group ? log2_exact(w->group) : 30;
    s->groups = w->group ? ceil_div(w->k, w->group) : 1;
    s->pitch_blocks = w->pitch_blocks ? w->pitch_blocks : (size_t)s->blocks;
    s->pitch_groups = w->pitch_groups ? w->pitch_groups : s->groups;
    s->grouped = s->format <= QT_FORMAT_LAST_GROUPED;
    s->zero_bytes = qt_has_zeros(w) ? 2 * (int)w->bits : 0;
    s->zero_boxes = s->zero_bytes == 0 || (s->pitch_groups * (size_t)s->zero_bytes % 16 == 0 &&
                                           (size_t)w->zero % 16 == 0);
    if (s->pitch_blocks < (size_t)s->blocks || s->pitch_groups < s->groups)
        return "pitch_blocks or pitch_groups is smaller than the matrix";
    if (s->pitch_blocks >= (1u << 31) / (size_t)s->strips ||
        s->pitch_groups >= (1u << 27) / (size_t)s->strips)
        return "the matrix is too large for 32-bit offsets";
    return NULL;
}

float qt_result_factor(const struct qtool_matmul_weight *w)
{
    int exp2 = w->kind == QTOOL_MATMUL_FPX                   ? qt_minifloat_exp2(w->exp_bits)
               : w->kind == QTOOL_MATMUL_INT && w->bits == 4 ? QT_INT4_EXP2
                                                             : 0;
    return ldexpf(1, w->scale_exp2 + exp2);
}

struct qt_decode_args qt_decode_args_of(const struct qtool_matmul_weight *w)
{
    struct qt_decode_args d = {NULL, w->bits, w->exp_bits, qt_has_zeros(w)};
    if (w->kind == QTOOL_MATMUL_LUT)
        d.table = (const __half *)w->table;
    return d;
}

int qt_shape_slice(struct qtool_matmul_weight *out, const struct qtool_matmul_weight *w, size_t n0,
                   size_t n, size_t k0, size_t k)
{
    struct qt_shape s;
    if (qt_shape_of(&s, w) || n0 % QT_STRIP_ROWS || k0 % QT_BLOCK_COLS ||
        (w->group && k0 % w->group) || n == 0 || k == 0 || n0 > w->n || n > w->n - n0 ||
        k0 > w->k || k > w->k - k0)
        return QTOOL_UNSUPPORTED;
    size_t block = n0 / QT_STRIP_ROWS * s.pitch_blocks + k0 / QT_BLOCK_COLS;
    size_t group = n0 / QT_STRIP_ROWS * s.pitch_groups + (w->group ? k0 / w->group : 0);
    *out = *w;
    for (int i = 0; i < 3 && s.width[i]; i++)
        out->plane[i] = (const char *)w->plane[i] + block * 128 * (size_t)s.width[i];
    out->scale = (const char *)w->scale + group * QT_STRIP_ROWS * 2;
    out->zero = s.zero_bytes ? (const char *)w->zero + group * (size_t)s.zero_bytes : NULL;
    out->n = n;
    out->k = k;
    out->pitch_blocks = s.pitch_blocks;
    out->pitch_groups = s.pitch_groups;
    return QTOOL_OK;
}

/* A section of `columns` words of 8 bytes per strip, `pitch` bytes from strip to strip. */
static struct qt_tensor section_of(const struct qtool_matmul_plan *p, const struct qt_shape *s,
                                   const void *base, size_t columns, size_t pitch, int box_columns,
                                   int box_strips)
{
    const size_t strips = (size_t)s->strips;
    if (p->options.gated)
        return {base,
                3,
                {columns, 2, strips / 2},
                {strips / 2 * pitch, pitch},
                {box_columns, 2, box_strips / 2},
                false};
    return {base, 2, {columns, strips}, {pitch}, {box_columns, box_strips}, false};
}

bool qt_weight_maps(const struct qtool_matmul_plan *p, CUtensorMap plane[3], CUtensorMap *scales,
                    CUtensorMap *zeros, const struct qt_shape *s,
                    const struct qtool_matmul_weight *w, int box_strips, int box_blocks,
                    int box_groups)
{
    bool ok = true;
    for (int i = 0; i < 3 && s->width[i] && ok; i++) {
        const size_t block = 16 * (size_t)s->width[i];
        const struct qt_tensor t =
            section_of(p, s, w->plane[i], (size_t)s->blocks * block, s->pitch_blocks * block * 8,
                       box_blocks * (int)block, box_strips);
        ok = qt_tensor_map(p, &plane[i], &t);
    }
    const struct qt_tensor t =
        section_of(p, s, w->scale, s->groups * 4, s->pitch_groups * 32, box_groups * 4, box_strips);
    ok = ok && (!s->grouped || qt_tensor_map(p, scales, &t));
    if (!ok || !s->zero_bytes)
        return ok;
    const size_t bytes = (size_t)s->zero_bytes;
    const struct qt_tensor z =
        section_of(p, s, w->zero, s->groups * bytes / 8, s->pitch_groups * bytes,
                   qt_zero_pitch(s, box_groups) / 8, box_strips);
    return qt_tensor_map(p, zeros, &z);
}
