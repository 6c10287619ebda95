/*
 * The arithmetic of 4-bit KV caches, all of it FP32. Numbers that share a scale are stored as codes
 * 0..15 and one FP16 number, the parameter. Its magnitude is the scale, and its low six bits hold
 * the zero-point.
 *
 *     code = clamp(rint(x * (1 / scale) + zero), 0, 15)        x ~ (code - zero) * scale
 *
 * Values: QT_KV_CHANNELS adjacent channels share a parameter. Its low six bits are 4 * zero. low
 * and high: the range of the channels, widened to include 0.
 *
 *     zero  = rint(-60 * low / (high - low)) / 4, or 0 if low and high are 0
 *     scale = the positive FP16 number nearest to F16((high - low) / 15) that ends in these bits,
 *             the larger of two at equal distance; 1 if that is 0
 *
 * Keys of a channel may all be far from 0. So their zero-point is an integer from -63 to 63: the
 * low six bits are its magnitude, and the sign of the parameter is its sign. With the range of the
 * keys and middle = (low + high) / 2:
 *
 *     want  = F16(max(high - low, |middle| * 9 / 32) / 15), at least 96 * 2^-24
 *     z(s)  = clamp(rint(7.5 - middle * (1 / s)), -63, 63)
 *     near  = the FP16 number nearest to want whose low six bits are |z(want)|, the larger of two
 *             at equal distance
 *     zero  = z(near)                            scale = near with |zero| as its low six bits
 *
 * The lower limit of the scale keeps |7.5 - middle / scale| below 63.5.
 *
 * rint rounds ties to even. Numbers are clamped to the range of FP16 first.
 */
#ifndef QT_BASE_KV4_H
#define QT_BASE_KV4_H

#include "base/num.h"

#include <stdlib.h>

/*
 * KV groups: tokens of a sequence whose keys share a parameter per KV head and channel.
 * KV group g is the tokens 64 g to 64 g + 63, without token 0, which belongs to no group: in most
 * models its keys differ strongly from all others, and all queries attend to it, so the cache holds
 * them in FP16. Returns the first token of the KV group of token i; 0 if i is 0.
 */
enum { QT_KV_GROUP = 64, QT_KV_CHANNELS = 16 };
static inline size_t qt_kv4_group(size_t i)
{
    return i == 0 ? 0 : i < QT_KV_GROUP ? 1 : i / QT_KV_GROUP * QT_KV_GROUP;
}

struct qt_kv4_grid {
    float scale, zero;
};

/* NaN becomes the lowest number. */
static inline float qt_kv4_clamp(float x)
{
    return fminf(fmaxf(x, -65504), 65504);
}

static inline float qt_kv4_code(float q)
{
    return fminf(fmaxf(rintf(q), 0), 15);
}

/* The parameter of value channels from low <= 0 to high >= 0. */
static inline uint16_t qt_kv4_value_param(float low, float high)
{
    const float range = high - low;
    const int zero = range == 0 ? 0 : (int)rintf(low * -60 / range);
    const int bits = (qt_f32_to_f16(range / 15) + 32 - zero) & ~63;
    const int param = (bits < 0 ? 0 : bits) + zero;
    return (uint16_t)(param == 0 ? 0x3c00 : param);
}

static inline struct qt_kv4_grid qt_kv4_value_grid(uint16_t param)
{
    return (struct qt_kv4_grid){qt_f16_to_f32(param), (float)(param & 63) / 4};
}

/* z(s) of a scale with the given bits. */
static inline int qt_kv4_key_zero(float middle, int scale)
{
    const float zero = rintf(7.5f - middle * (1 / qt_f16_to_f32((uint16_t)scale)));
    return (int)fminf(fmaxf(zero, -63), 63);
}

/* The parameter of keys from low to high. */
static inline uint16_t qt_kv4_key_param(float low, float high)
{
    const float middle = (low + high) / 2;
    const float range = fmaxf(high - low, fabsf(middle) * (9.f / 32));
    const int bits = qt_f32_to_f16(range / 15), want = bits < 96 ? 96 : bits;
    int zero = qt_kv4_key_zero(middle, want);
    const int base = (want + 32 - abs(zero)) & ~63;
    zero = qt_kv4_key_zero(middle, base + abs(zero));
    return (uint16_t)((zero < 0 ? 0x8000 : 0) + base + abs(zero));
}

static inline struct qt_kv4_grid qt_kv4_key_grid(uint16_t param)
{
    const float zero = (float)(param & 63);
    return (struct qt_kv4_grid){qt_f16_to_f32(param & 0x7fff), param & 0x8000 ? -zero : zero};
}

/* x after quantization and dequantization. */
static inline float qt_kv4_round(float x, struct qt_kv4_grid g)
{
    return (qt_kv4_code(x * (1 / g.scale) + g.zero) - g.zero) * g.scale;
}

#endif
