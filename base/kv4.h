/*
 * The arithmetic of 4-bit KV caches, all of it FP32. Keys that share a scale are stored as codes
 * 0..15, the scale and their minimum as FP16:
 *
 *     scale = F16((high - low) / 15), or 1 if that is 0        minimum = F16(low)
 *     code  = clamp(rint((x - minimum) * (1 / scale)), 0, 15)  x ~ code * scale + minimum
 *
 * QT_KV_CHANNELS adjacent channels of a value share one FP16 number, the scale, whose low six bits
 * are 4 * zero. low and high: the range of the channels, widened to include 0.
 *
 *     zero  = rint(-60 * low / (high - low)) / 4, or 0 if low and high are 0
 *     scale = the positive FP16 number nearest to F16((high - low) / 15) that ends in these bits,
 *             the larger of two at equal distance; 1 if that is 0
 *     code  = clamp(rint(x * (1 / scale) + zero), 0, 15)       x ~ (code - zero) * scale
 *
 * rint rounds ties to even. Numbers are clamped to the range of FP16 first.
 */
#ifndef QT_BASE_KV4_H
#define QT_BASE_KV4_H

#include "base/num.h"

/*
 * KV groups: tokens of a sequence whose keys share a scale and a minimum per KV head and channel.
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
    float scale, minimum;
};

/* NaN becomes the lowest number. */
static inline float qt_kv4_clamp(float x)
{
    return fminf(fmaxf(x, -65504), 65504);
}

/* The grid of numbers from low to high. */
static inline struct qt_kv4_grid qt_kv4_grid(float low, float high)
{
    float scale = qt_f16_to_f32(qt_f32_to_f16((high - low) / 15));
    return (struct qt_kv4_grid){scale == 0 ? 1 : scale, qt_f16_to_f32(qt_f32_to_f16(low))};
}

static inline float qt_kv4_code(float q)
{
    return fminf(fmaxf(rintf(q), 0), 15);
}

/* The FP16 number of value channels from low <= 0 to high >= 0. */
static inline uint16_t qt_kv4_value_param(float low, float high)
{
    const float range = high - low;
    const int zero = range == 0 ? 0 : (int)rintf(low * -60 / range);
    const int bits = (qt_f32_to_f16(range / 15) + 32 - zero) & ~63;
    const int param = (bits < 0 ? 0 : bits) + zero;
    return (uint16_t)(param == 0 ? 0x3c00 : param);
}

/* x after quantization and dequantization, as a value. */
static inline float qt_kv4_round_value(float x, uint16_t param)
{
    const float scale = qt_f16_to_f32(param), zero = (float)(param & 63) / 4;
    return (qt_kv4_code(x * (1 / scale) + zero) - zero) * scale;
}

/* x after quantization and dequantization, as a key. */
static inline float qt_kv4_round(float x, struct qt_kv4_grid g)
{
    return qt_kv4_code((x - g.minimum) * (1 / g.scale)) * g.scale + g.minimum;
}

#endif
