/* Reference packer of mix24: a record for groups of 16, written bit by bit. Group t of 64-column
 * block blk; see formats/layouts/layout_mix24.h. */
#ifndef QT_TESTS_MIX24_BITS_H
#define QT_TESTS_MIX24_BITS_H

#include <stdbool.h>
#include <stdint.h>

static inline void mix24_put_bits(uint8_t *at, unsigned bit, unsigned width, unsigned v)
{
    for (unsigned i = 0; i < width; i++)
        at[(bit + i) / 8] |= (uint8_t)((v >> i & 1) << (bit + i) % 8);
}

static inline void mix24_put_code(uint8_t *record, bool four, unsigned blk, unsigned t,
                                  unsigned row, unsigned j, unsigned c)
{
    unsigned lane = row % 8 * 4 + t, s = j / 4, i = j % 4 / 2 * 2 + row / 8, h = j % 2;
    unsigned width = four ? 4 : 2;
    unsigned word = four ? blk * 128 + lane * 4 + s : lane * 4 + blk * 2 + s / 2;
    unsigned low = four ? 16 * h + 2 + 4 * i : 16 * h + 2 + 2 * (4 * (s % 2) + i);
    for (unsigned k = 0; k < width; k++)
        mix24_put_bits(record + 4 * word, (low + k) % 32, 1, c >> k & 1);
}

static inline void mix24_put_params(uint8_t *record, bool four, unsigned blk, unsigned t,
                                    unsigned row, unsigned q, unsigned z)
{
    unsigned lane = row % 8 * 4 + t, upper = row / 8, codes = four ? 1024 : 512;
    mix24_put_bits(record + codes + 2 * lane, 8 * upper + 4 * blk, 4, q);
    if (four)
        mix24_put_bits(record + codes + 64 + 2 * lane, 8 * blk + 4 * upper, 4, z);
    else
        mix24_put_bits(record + codes + 64 + lane, 4 * blk + 2 * upper, 2, z);
}

static inline void mix24_put_u(uint8_t *record, bool four, unsigned blk, unsigned t, unsigned u)
{
    mix24_put_bits(record + (four ? 1152 : 608) + 4 * t, 16 * blk, 16, u);
}

#endif
