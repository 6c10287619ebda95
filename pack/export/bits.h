/*
 * Codes as several formats pack them.
 *
 * Dense little-endian bit strings: value i takes bits [i b, (i + 1) b); bit j is bit j % 32 of word
 * j / 32. Values of b bits, b <= 8, may straddle words.
 */
#ifndef QT_PACK_EXPORT_BITS_H
#define QT_PACK_EXPORT_BITS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

/* 32-bit words of `count` values. */
static inline size_t qt_bits_words(size_t count, unsigned bits)
{
    return count / 32 * bits + (count % 32 * bits + 31) / 32;
}

/* Adds value i; the bits are zero before. word i of the string is word[i * stride]. */
static inline void qt_bits_put(uint32_t *word, size_t stride, size_t i, unsigned bits,
                               unsigned value)
{
    size_t bit = i * bits, at = bit / 32 * stride;
    unsigned shift = bit % 32;
    word[at] |= (uint32_t)value << shift;
    if (shift + bits > 32)
        word[at + stride] |= (uint32_t)value >> (32 - shift);
}

/* Writes all words of `count` values. */
static inline void qt_bits_pack(uint32_t *word, const uint8_t *value, size_t count, unsigned bits)
{
    uint64_t pending = 0;
    unsigned filled = 0;
    for (size_t i = 0; i < count; i++) {
        pending |= (uint64_t)value[i] << filled;
        filled += bits;
        if (filled >= 32) {
            *word++ = (uint32_t)pending;
            pending >>= 32;
            filled -= 32;
        }
    }
    if (filled)
        *word = (uint32_t)pending;
}

/* The code of E2M1, sign and index of the magnitude, of an entry of the ascending table of
 * mxfp4. */
static inline unsigned qt_e2m1(unsigned entry)
{
    return entry >= 8 ? entry - 8 : entry == 7 ? 0 : 8 | (7 - entry);
}

/* The code e of a power of two, 2^(e - 127); 0 for a scale 0, which only groups of zeros have. */
static inline uint8_t qt_e8m0(float scale)
{
    int exponent = -126;
    if (scale > 0)
        frexpf(scale, &exponent);
    return (uint8_t)(exponent + 126);
}

/* The code of a positive value of E4M3FN. */
static inline uint8_t qt_e4m3(float value)
{
    int exponent;
    const float fraction = frexpf(value, &exponent); /* in [1/2, 1) */
    if (exponent - 1 < -6)
        return (uint8_t)ldexpf(value, 9);
    return (uint8_t)((exponent - 1 + 7) << 3 | ((int)ldexpf(fraction, 4) - 8));
}

#endif
