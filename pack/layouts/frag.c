/* See frag.h. */
#include "pack/layouts/frag.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/*
 * In each instance `order` and p are constants, so that after unrolling every code is one shift and
 * one OR. Only the 2-bit plane of QT_FRAG_HALF has its two bits in separate places.
 */
INLINE uint32_t insert_codes(uint32_t field, enum qt_frag_order order, unsigned p, unsigned s,
                             unsigned i, unsigned h)
{
    unsigned at = qt_frag_bit(order, p, s, i, h, 0) & 31;
    if (order == QT_FRAG_HALF && p == 2)
        return (field & 1) << at | (field >> 1) << (qt_frag_bit(order, p, s, i, h, 1) & 31);
    return field << at;
}

INLINE uint32_t extract_codes(uint32_t word, enum qt_frag_order order, unsigned p, unsigned s,
                              unsigned i, unsigned h)
{
    unsigned at = qt_frag_bit(order, p, s, i, h, 0) & 31;
    if (order == QT_FRAG_HALF && p == 2)
        return (word >> at & 1) | (word >> (qt_frag_bit(order, p, s, i, h, 1) & 31) & 1) << 1;
    return word >> at & ((1u << p) - 1);
}

INLINE void pack_as(uint32_t *words, const uint8_t *code, size_t stride, unsigned shift,
                    enum qt_frag_order order, unsigned p)
{
    for (unsigned lane = 0; lane < QT_FRAG_LANES; lane++) {
        uint32_t w[4] = {0};
#pragma GCC unroll 4
        for (unsigned s = 0; s < QT_FRAG_STEPS; s++)
#pragma GCC unroll 4
            for (unsigned i = 0; i < 4; i++) {
                const uint8_t *c =
                    code + qt_frag_row(lane, i) * stride + qt_frag_col(lane, s, i, 0);
                unsigned word = qt_frag_bit(order, p, s, i, 0, 0) / 32;
#pragma GCC unroll 2
                for (unsigned h = 0; h < 2; h++)
                    w[word] |= insert_codes(c[h] >> shift & ((1u << p) - 1), order, p, s, i, h);
            }
        memcpy(words + lane * p, w, p * sizeof *w);
    }
}

INLINE void unpack_as(uint8_t *code, const uint32_t *words, size_t stride, unsigned shift,
                      enum qt_frag_order order, unsigned p)
{
    for (unsigned lane = 0; lane < QT_FRAG_LANES; lane++) {
        const uint32_t *w = words + lane * p;
#pragma GCC unroll 4
        for (unsigned s = 0; s < QT_FRAG_STEPS; s++)
#pragma GCC unroll 4
            for (unsigned i = 0; i < 4; i++) {
                uint8_t *c = code + qt_frag_row(lane, i) * stride + qt_frag_col(lane, s, i, 0);
                unsigned word = qt_frag_bit(order, p, s, i, 0, 0) / 32;
#pragma GCC unroll 2
                for (unsigned h = 0; h < 2; h++)
                    c[h] |= (uint8_t)(extract_codes(w[word], order, p, s, i, h) << shift);
            }
    }
}

static void pack_whole(uint32_t *words, const uint8_t *code, size_t stride, unsigned plane)
{
    for (unsigned lane = 0; lane < QT_FRAG_LANES; lane++)
        for (unsigned s = 0; s < QT_FRAG_STEPS; s++) {
            uint32_t word = 0;
            for (unsigned i = 2 * plane; i < 2 * plane + 2; i++)
                for (unsigned h = 0; h < 2; h++)
                    word |=
                        (uint32_t)code[qt_frag_row(lane, i) * stride + qt_frag_col(lane, s, i, h)]
                        << qt_frag_whole_bit(0, i, h);
            words[4 * lane + s] = word;
        }
}

static void unpack_whole(uint8_t *code, const uint32_t *words, size_t stride, unsigned plane)
{
    for (unsigned lane = 0; lane < QT_FRAG_LANES; lane++)
        for (unsigned s = 0; s < QT_FRAG_STEPS; s++)
            for (unsigned i = 2 * plane; i < 2 * plane + 2; i++)
                for (unsigned h = 0; h < 2; h++)
                    code[qt_frag_row(lane, i) * stride + qt_frag_col(lane, s, i, h)] =
                        (uint8_t)(words[4 * lane + s] >> qt_frag_whole_bit(0, i, h));
}

/* A word of a lane holds two runs of four codes of a row, 16 columns apart. Codes are offset by 8
 * and stored in two's complement, which differs in the sign bit only. */
static const uint32_t SIGNS = 0x88888888;

static void pack_byte(uint32_t *words, const uint8_t *code, size_t stride, unsigned shift)
{
    for (unsigned lane = 0; lane < QT_FRAG_LANES; lane++)
        for (unsigned s = 0; s < QT_FRAG8_STEPS; s++)
            for (unsigned r = 0; r < 2; r++) {
                const uint8_t *c = code + qt_frag8_row(lane, r) * stride;
                uint32_t word = 0;
                for (unsigned h = 0; h < 2; h++)
                    for (unsigned b = 0; b < 4; b++)
                        word |= (uint32_t)(c[qt_frag8_col(lane, s, h, b)] >> shift & 15)
                                << qt_frag8_shift(h, b);
                words[4 * lane + qt_frag8_word(s, r)] = word ^ SIGNS;
            }
}

static void unpack_byte(uint8_t *code, const uint32_t *words, size_t stride, unsigned shift)
{
    for (unsigned lane = 0; lane < QT_FRAG_LANES; lane++)
        for (unsigned s = 0; s < QT_FRAG8_STEPS; s++)
            for (unsigned r = 0; r < 2; r++) {
                uint8_t *c = code + qt_frag8_row(lane, r) * stride;
                uint32_t word = words[4 * lane + qt_frag8_word(s, r)] ^ SIGNS;
                for (unsigned h = 0; h < 2; h++)
                    for (unsigned b = 0; b < 4; b++)
                        c[qt_frag8_col(lane, s, h, b)] |=
                            (uint8_t)((word >> qt_frag8_shift(h, b) & 15) << shift);
            }
}

#define BY_LAYOUT(fn, ...)                                                                         \
    do {                                                                                           \
        if (order == QT_FRAG_NIBBLE && p == 4)                                                     \
            fn(__VA_ARGS__, QT_FRAG_NIBBLE, 4);                                                    \
        else if (order == QT_FRAG_NIBBLE && p == 2)                                                \
            fn(__VA_ARGS__, QT_FRAG_NIBBLE, 2);                                                    \
        else if (order == QT_FRAG_NIBBLE)                                                          \
            fn(__VA_ARGS__, QT_FRAG_NIBBLE, 1);                                                    \
        else if (p == 4)                                                                           \
            fn(__VA_ARGS__, QT_FRAG_HALF, 4);                                                      \
        else if (p == 2)                                                                           \
            fn(__VA_ARGS__, QT_FRAG_HALF, 2);                                                      \
        else                                                                                       \
            fn(__VA_ARGS__, QT_FRAG_HALF, 1);                                                      \
    } while (0)

void qt_frag_pack(uint32_t *words, const uint8_t *code, size_t stride, enum qt_frag_order order,
                  unsigned p, unsigned shift)
{
    if (order == QT_FRAG_BYTE)
        pack_byte(words, code, stride, shift);
    else if (order == QT_FRAG_WHOLE)
        pack_whole(words, code, stride, shift == 0);
    else
        BY_LAYOUT(pack_as, words, code, stride, shift);
}

void qt_frag_unpack(uint8_t *code, const uint32_t *words, size_t stride, enum qt_frag_order order,
                    unsigned p, unsigned shift)
{
    if (order == QT_FRAG_BYTE)
        unpack_byte(code, words, stride, shift);
    else if (order == QT_FRAG_WHOLE)
        unpack_whole(code, words, stride, shift == 0);
    else
        BY_LAYOUT(unpack_as, code, words, stride, shift);
}

void qt_frag_pack_reference(uint32_t *words, const uint8_t *code, size_t stride,
                            enum qt_frag_order order, unsigned p, unsigned shift)
{
    memset(words, 0, QT_FRAG_LANES * p * sizeof *words);
    for (unsigned lane = 0; lane < QT_FRAG_LANES; lane++)
        for (unsigned s = 0; s < QT_FRAG_STEPS; s++)
            for (unsigned i = 0; i < 4; i++)
                for (unsigned h = 0; h < 2; h++)
                    for (unsigned bit = 0; bit < p; bit++) {
                        unsigned row = qt_frag_row(lane, i), col = qt_frag_col(lane, s, i, h);
                        uint32_t value = code[row * stride + col] >> (shift + bit) & 1;
                        unsigned at = qt_frag_bit(order, p, s, i, h, bit);
                        words[lane * p + at / 32] |= value << at % 32;
                    }
}
