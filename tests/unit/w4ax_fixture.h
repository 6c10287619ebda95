/* Quantized activations and products of qtool_w4ax.h in plain C, for simulated GPUs. */
#ifndef QT_TESTS_W4AX_FIXTURE_H
#define QT_TESTS_W4AX_FIXTURE_H

#include "gpu_fixture.h"

#include "formats/layouts/layout_frag.h"
#include "formats/layouts/layout_frag8.h"

#include <math.h>

static inline size_t fake_blocks(uint32_t *words, const uint8_t *bits, size_t count, int packed)
{
    uint32_t at = 0;
    for (size_t i = 0; i < count; i++) {
        bool wide = bits[i] == 8 || !packed;
        words[i] = at * 2 + wide;
        if (wide && bits[i] == 4)
            words[i] |= QTOOL_W4AX_NARROW_VALUES;
        at += wide ? 2 : 1;
    }
    return (size_t)at * 64;
}

static inline bool is_narrow(uint32_t word)
{
    return !(word & QTOOL_W4AX_WIDE_ROWS) || word & QTOOL_W4AX_NARROW_VALUES;
}

static inline uint8_t *byte_of(const struct qtool_w4ax_acts *acts, uint32_t word, size_t m,
                               size_t token, size_t j)
{
    uint8_t *rows =
        (uint8_t *)acts->codes + (size_t)((word & ~QTOOL_W4AX_NARROW_VALUES) >> 1) * 64 * m;
    return word & QTOOL_W4AX_WIDE_ROWS
               ? rows + token * 128 + (j / 16 ^ (token & 7)) * 16 + j % 16
               : rows + token * 64 + (j / 32 ^ (token / 2 & 3)) * 16 + j % 16;
}

static inline void put_code(const struct qtool_w4ax_acts *acts, uint32_t word, size_t m,
                            size_t token, size_t j, int v)
{
    uint8_t *at = byte_of(acts, word, m, token, j);
    if (word & QTOOL_W4AX_WIDE_ROWS)
        *at = (uint8_t)v;
    else if (j % 32 < 16)
        *at = (uint8_t)((*at & 0xf0) | (v & 15));
    else
        *at = (uint8_t)((*at & 0x0f) | (v & 15) << 4);
}

static inline int get_code(const struct qtool_w4ax_acts *acts, uint32_t word, size_t m,
                           size_t token, size_t j)
{
    int v = *byte_of(acts, word, m, token, j);
    if (word & QTOOL_W4AX_WIDE_ROWS)
        return (int8_t)v;
    v = j % 32 < 16 ? v & 15 : v >> 4;
    return v < 8 ? v : v - 16;
}

static inline float most_of(const float *v, size_t n)
{
    float most = 0;
    for (size_t i = 0; i < n; i++)
        most = fmaxf(most, fabsf(v[i]));
    return most;
}

/* v: values of the token, padded to whole channel blocks. */
static inline void quantize_token(const struct qtool_w4ax_acts *out,
                                  const struct qtool_w4ax_input *in, const float *v, size_t m,
                                  size_t token)
{
    size_t blocks = qt_ceil_div(in->k, 128);
    float unit = most_of(v, blocks * 128) * (in->clip8 / 127);
    int sum = 0;
    for (size_t b = 0; b < blocks; b++) {
        bool narrow = is_narrow(in->blocks[b]) && in->scales != QTOOL_W4AX_ROW;
        float most = most_of(v + b * 128, 128), limit = narrow ? 7 : 127, factor = 1, s = unit;
        if (in->scales == QTOOL_W4AX_BLOCK)
            s = most * (narrow ? in->clip4 / 7 : in->clip8 / 127);
        else if (narrow && unit > 0)
            factor = fminf(fmaxf(rintf(most * in->clip4 / (7 * unit)), 1), 18);
        for (size_t j = 0; j < 128; j++) {
            double q = rint((double)v[b * 128 + j] * (1 / (s * factor)));
            int code = s * factor < 0x1p-120f ? 0 : (int)fmin(fmax(q, -limit), limit);
            put_code(out, in->blocks[b], m, token, j, code * (int)factor);
            sum += code * (int)factor;
        }
        if (in->scales == QTOOL_W4AX_BLOCK)
            out->scale[b * qt_round_up(m, 4) + token] = s < 0x1p-120f ? 1 : s;
    }
    if (in->scales != QTOOL_W4AX_BLOCK)
        out->scale[token] = unit;
    if (in->scales == QTOOL_W4AX_INT)
        out->sum[token] = sum;
}

static inline int weight_code(const struct qtool_w4ax_weight *w, size_t row, size_t col)
{
    const uint32_t *plane = w->plane;
    unsigned y = row % 16, x = col % 64, s = x / 32, h = x % 32 / 16, b = x % 4;
    unsigned lane = y % 8 * 4 + x % 16 / 4, r = y / 8;
    if (col / 64 >= w->pitch_blocks) /* the second half of a short channel block is not stored */
        return 0;
    plane += (row / 16 * w->pitch_blocks + col / 64) * 128 + lane * 4;
    assert_int_equal(qt_frag8_row(lane, r), y);
    assert_int_equal(qt_frag8_col(lane, s, h, b), x);
    int v = plane[qt_frag8_word(s, r)] >> qt_frag8_shift(h, b) & 15;
    return v < 8 ? v : v - 16;
}

static inline double weight_scale(const struct qtool_w4ax_weight *w, size_t row, size_t block)
{
    size_t slot = qt_frag_scale_slot((unsigned)row % 16);
    size_t at = (row / 16 * qt_ceil_div(w->k, 128) + block) * 16 + slot;
    double unit =
        w->scales == QTOOL_W4AX_BLOCK
            ? 1
            : (double)qt_f16_to_f32(((const uint16_t *)w->row_scale)[row / 16 * 16 + slot]);
    if (w->scales == QTOOL_W4AX_BLOCK)
        unit = (double)qt_f16_to_f32(((const uint16_t *)w->scale)[at]);
    else if (w->scales == QTOOL_W4AX_INT)
        unit *= ((const uint8_t *)w->scale)[at];
    return ldexp(unit, w->scale_exp2);
}

/* All codes of the weights, [n][blocks * 128], or of the activations, [m][blocks * 128]. */
static inline int8_t *all_codes(const struct qtool_w4ax_weight *w,
                                const struct qtool_w4ax_acts *acts, size_t m)
{
    size_t width = qt_ceil_div(w->k, 128) * 128, rows = acts ? m : w->n;
    int8_t *out = malloc(rows * width);
    assert_non_null(out);
    for (size_t i = 0; i < rows * width; i++) {
        size_t row = i / width, at = i % width;
        out[i] = (int8_t)(acts ? get_code(acts, w->blocks[at / 128], m, row, at % 128)
                               : weight_code(w, row, at));
    }
    return out;
}

static inline double w4ax_product(const struct qtool_w4ax_weight *w,
                                  const struct qtool_w4ax_acts *acts, size_t m, size_t token,
                                  size_t row, const int8_t *x, const int8_t *codes)
{
    double y = 0;
    for (size_t b = 0; b < qt_ceil_div(w->k, 128); b++) {
        int sum = 0;
        for (size_t j = b * 128; j < b * 128 + 128; j++)
            sum += x[j] * codes[j];
        size_t at = w->scales == QTOOL_W4AX_BLOCK ? b * qt_round_up(m, 4) + token : token;
        y += sum * weight_scale(w, row, b) * (double)acts->scale[at];
    }
    return y;
}

static inline void put_output(void *y, size_t at, double v, enum qtool_w4ax_output output)
{
    if (output == QTOOL_W4AX_F32)
        ((float *)y)[at] = (float)v;
    else
        ((uint16_t *)y)[at] = to_bits((float)v, output == QTOOL_W4AX_BF16 ? QTOOL_BF16 : QTOOL_F16);
}

#endif
