/*
 * Number formats of checkpoints and conversions between them. Conversions to FP16 and BF16 round to
 * nearest, ties to even; conversions from FP16 and BF16 are exact.
 */
#ifndef QT_BASE_NUM_H
#define QT_BASE_NUM_H

#include "base/status.h"
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The dtypes of the safetensors format; qt_dtype_name gives the safetensors name ("BF16"). */
enum qt_dtype {
    QT_BOOL,
    QT_F4,      /* E2M1, two per byte */
    QT_F6_E2M3, /* four in three bytes */
    QT_F6_E3M2,
    QT_U8,
    QT_I8,
    QT_F8_E5M2,
    QT_F8_E4M3,
    QT_F8_E8M0,
    QT_F8_E4M3FNUZ,
    QT_F8_E5M2FNUZ,
    QT_I16,
    QT_U16,
    QT_F16,
    QT_BF16,
    QT_I32,
    QT_U32,
    QT_F32,
    QT_C64,
    QT_F64,
    QT_I64,
    QT_U64,
    QT_DTYPE_COUNT
};

/* "BF16"; "?" for a value out of range. */
const char *qt_dtype_name(enum qt_dtype t);
/* False if the name is unknown. */
bool qt_dtype_parse(enum qt_dtype *out, const char *name);
/* Bits of one element: a multiple of 8 except for F4 (4) and F6 (6). */
unsigned qt_dtype_bits(enum qt_dtype t);
/* True for the dtypes that can be read as weights: F16, BF16, F32, F64. */
bool qt_dtype_is_weight(enum qt_dtype t);

/* Converts n elements of the weight dtype t to FP32; F64 rounds to nearest. src may be unaligned.
 * Uses all threads for large n. */
void qt_to_f32(float *dst, const void *src, enum qt_dtype t, size_t n);

static inline uint32_t qt_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}
static inline float qt_bits_f32(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). */
#define QT_SPLITMIX64_STEP 0x9e3779b97f4a7c15u
static inline uint64_t qt_splitmix64(uint64_t *state)
{
    uint64_t z = *state += QT_SPLITMIX64_STEP;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline float qt_bf16_to_f32(uint16_t h)
{
    return qt_bits_f32((uint32_t)h << 16);
}

/* Exact for every FP16 value, infinities and NaN included. */
static inline float qt_f16_to_f32(uint16_t h)
{
    /* Put exponent and mantissa into FP32 position, then multiply by 2^112 to re-bias: the
     * multiplication also normalizes subnormals. A result >= 65536 is an FP16 inf or NaN. */
    float mag = qt_bits_f32((uint32_t)(h & 0x7fff) << 13) * 0x1p112f;
    uint32_t u = qt_f32_bits(mag);
    u = mag >= 65536.0f ? u | 0x7f800000u : u;
    return qt_bits_f32(u | (uint32_t)(h & 0x8000) << 16);
}

uint16_t qt_f32_to_f16(float f);
uint16_t qt_f32_to_bf16(float f);

/* Index of the first element that is inf or NaN, or n. Uses all threads for large n. */
size_t qt_find_nonfinite(const float *x, size_t n);
/* Number of elements of any dtype that are inf or NaN (of C64: halves). src may be unaligned. Uses
 * all threads for large n. */
size_t qt_count_nonfinite(const void *src, enum qt_dtype t, size_t n);

#endif
