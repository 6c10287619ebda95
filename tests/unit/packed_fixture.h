/* Weights of packed matrices, read one by one through the kernels' descriptor. */
#ifndef QT_TESTS_PACKED_FIXTURE_H
#define QT_TESTS_PACKED_FIXTURE_H

#include "formats/layouts/layout_frag.h"
#include "kernels/kernels.h"

#include <math.h>

static inline unsigned plane_bits(const struct qtool_matmul_weight *w, enum qt_frag_order order,
                                  size_t row, size_t col)
{
    unsigned y = row % 16, x = col % 64, s = x / 16, i = y / 8 + 2 * (x % 16 / 8), h = x % 2;
    unsigned lane = 4 * (y % 8) + x % 8 / 2, width[QT_FRAG_MAX_PLANES], code = 0;
    size_t pitch = w->pitch_blocks ? w->pitch_blocks : qt_ceil_div(w->k, 64);
    if (w->bits == 8) {
        const uint32_t *words = w->plane[i / 2];
        unsigned at = qt_frag_whole_bit(s, i, h);
        return words[((row / 16 * pitch + col / 64) * 32 + lane) * 4 + at / 32] >> at % 32 & 255;
    }
    int planes = qt_frag_planes(width, w->bits);
    for (int p = 0; p < planes; p++) {
        const uint32_t *words = w->plane[p];
        words += ((row / 16 * pitch + col / 64) * 32 + lane) * width[p];
        code <<= width[p];
        for (unsigned bit = 0; bit < width[p]; bit++) {
            unsigned at = qt_frag_bit(order, width[p], s, i, h, bit);
            code |= (words[at / 32] >> at % 32 & 1) << bit;
        }
    }
    return code;
}

static inline float minifloat(unsigned code, unsigned bits, unsigned e)
{
    int m = (int)(bits - 1 - e), bias = (1 << (e - 1)) - 1;
    int mag = (int)(bits == 8 ? code & 127 : code >> 1);
    int exponent = mag >> m, mantissa = mag & ((1 << m) - 1);
    float v = exponent ? ldexpf((float)(mantissa + (1 << m)), exponent - bias - m)
                       : ldexpf((float)mantissa, 1 - bias - m);
    return (bits == 8 ? code >> 7 : code & 1) ? -v : v;
}

static inline float weight_at(const struct qtool_matmul_weight *w, size_t row, size_t col)
{
    bool lut = w->kind == QTOOL_MATMUL_LUT;
    bool half = w->kind == QTOOL_MATMUL_FPX ? w->bits > 4 : w->kind == QTOOL_MATMUL_INT;
    unsigned code = plane_bits(w, half ? QT_FRAG_HALF : QT_FRAG_NIBBLE, row, col);
    size_t group = w->group ? col / w->group : 0;
    size_t pitch = w->pitch_groups ? w->pitch_groups : w->group ? qt_ceil_div(w->k, w->group) : 1;
    const uint16_t *scales = w->scale, *table = w->table;
    float value = lut                           ? qt_f16_to_f32(table[code])
                  : w->kind == QTOOL_MATMUL_FPX ? minifloat(code, w->bits, w->exp_bits)
                                                : (float)((int)code - (1 << (w->bits - 1)));
    float scale = qt_f16_to_f32(
        scales[(row / 16 * pitch + group) * 16 + qt_frag_scale_slot((unsigned)row % 16)]);
    return ldexpf(scale, w->scale_exp2) * value;
}

#endif
