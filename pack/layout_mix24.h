/*
 * The packed form of mix24: where the bits of a matrix of 2- and 4-bit groups are. Shared by the
 * host packer, the kernels and the tests; this is the only place that says it.
 *
 * A GROUP is g = 16 (or 8) input channels that are neighbours in storage. The groups stand in
 * SLOTS 0..P-1, P g being K rounded up to 128; section perm says which group is in which slot, so
 * that a kernel reads its activations in chunks of g channels (32 bytes). F of the slots hold 4-bit
 * groups, spread evenly; the others hold 2-bit groups:
 *
 *   slot p holds a 4-bit group ("four")  iff  floor((p + 1) F / P) > floor(p F / P)
 *   it is four number floor(p F / P), or else two number p - floor(p F / P)
 *
 * With F = P/4 that is 2 2 2 4 2 2 2 4 ...: every BLOCK of four slots is alike, two number j is in
 * block j / 3, four number j in block j, and all of the following has fixed offsets per block.
 *
 * The matrix is the A operand of mma m16n8k16 (m16n8k8 for g = 8), fragments as drawn in
 * layout_frag.h: STEP s is 16 columns in slot order, lane l (G = l / 4, t = l % 4) holds rows G and
 * G + 8 of columns 16 s + 2 t + 8 half + h, half and h = 0..1. One group is one step (g = 16), or
 * one half of a step (g = 8), so that each mma's FP32 sums belong to one group, and take its scale.
 *
 * Stream A, section a: U32 [N/16][K/128][32 lanes][4 words]. A UNIT of 16 rows x 8 steps gives each
 * lane 16 bytes. Word 2 (s / 4) + half, its half-word h, of step s (i = s % 4):
 *
 *     bit   15      12 11       8 7        4 3        0
 *          +----------+----------+----------+----------+     in each nibble
 *          |  i = 3   |  i = 2   |  i = 1   |  i = 0   |     of a two:  [ row G+8 | row G ]
 *          +----------+----------+----------+----------+     of a four: [     row G       ]
 *
 * Stream B, section b: U32 [N/16][words][32 lanes], the row G + 8 of the fours. Nibbles are counted
 * through the fours: number e = 2 j + half for g = 16, e = j for g = 8 (j the number of the four).
 * Nibble e is in word e / 4, in its half-word h, again:
 *
 *     bit   15      12 11       8 7        4 3        0
 *          +----------+----------+----------+----------+     so that the two halves of a four are
 *          | e%4 = 3  | e%4 = 1  | e%4 = 2  | e%4 = 0  |     one shift by 8 apart
 *          +----------+----------+----------+----------+
 *
 * Thus a lane's h = 0 and h = 1 are 16 bits apart everywhere: (word & mask) is a pair of FP16
 * subnormals, code * 2^(bit - 24), exact, and ready to be an operand register. Bits 10 to 15 need
 * one shift (by 10, shared by all of a word) to stay below FP16's exponent. The power of two that
 * depends on the bit goes into the scale, with which the kernel multiplies FP32 sums anyway. Both
 * halves of a row are at the same bit, as one sum has one scale.
 *
 * Parameters of a group and row: w = s (code - zero), s = (q + z2) s2. Per row
 *
 *   twos    section meta: U16 [N/16][triples][16 rows], a word for twos 3 i, 3 i + 1, 3 i + 2:
 *
 *     bit   15 14 13 12 11 10 9   7 6   4 3     0
 *          +-----+-----+-----+-----+-----+-------+    q0 has 4 bits, q1 and q2 have 3:
 *          |zero2|zero1|zero0| q2  | q1  |  q0   |    the 4-bit field goes to the group
 *          +-----+-----+-----+-----+-----+-------+    that gains most from it
 *
 *   fours   section meta4: U16 [N/16][pairs][16 rows], a word for fours 2 i and 2 i + 1:
 *
 *     bit   15     12 11      8 7       4 3       0
 *          +---------+---------+---------+---------+
 *          |  zero1  |   q1    |  zero0  |   q0    |
 *          +---------+---------+---------+---------+
 *
 * and per slot and g2 = 16 (or 8) rows, shared by them
 *
 *   section s2: F16 [N/16][P][16/g2],   section z2: U16 [N/16][P/4][16/g2], slot p in nibble p % 4.
 *
 * The 16 rows of a meta word's row index are in the order 0 8 1 9 2 10 ... (qt_frag_scale_slot): a
 * lane reads the words of its rows G and G + 8 as one of 32 bits.
 *
 * Sections without elements (b and meta4 for F = 0, meta for F = P) are left out. Padding: rows
 * beyond N and channels beyond K decode to 0 (code = zero); groups beyond K have s2 = z2 = 0.
 */
#ifndef QT_PACK_LAYOUT_MIX24_H
#define QT_PACK_LAYOUT_MIX24_H

#include "pack/layout_frag.h"
#include <stdint.h>

enum {
    QT_MIX24_UNIT = 128,   /* columns of a unit of stream A */
    QT_MIX24_A_WORDS = 4,  /* of a lane in a unit */
    QT_MIX24_META = 3,     /* twos per meta word */
    QT_MIX24_META4 = 2,    /* fours per meta4 word */
    QT_MIX24_Z2_SLOTS = 4, /* slots per z2 word */
};

/* Slots, and how many of them hold 4-bit groups. */
struct qt_mix24_slots {
    uint32_t slots, fours;
};

/* Fours before slot p: the number of the four in it, if there is one. */
QT_LAYOUT uint32_t qt_mix24_four(struct qt_mix24_slots s, uint32_t p)
{
    return (uint32_t)((uint64_t)p * s.fours / s.slots);
}

QT_LAYOUT int qt_mix24_is_four(struct qt_mix24_slots s, uint32_t p)
{
    return qt_mix24_four(s, p + 1) > qt_mix24_four(s, p);
}

/* Twos before slot p: the number of the two in it, if there is one. */
QT_LAYOUT uint32_t qt_mix24_two(struct qt_mix24_slots s, uint32_t p)
{
    return p - qt_mix24_four(s, p);
}

/* Where a code is, in the words of one lane of one strip of 16 rows. */
struct qt_mix24_place {
    unsigned lane;
    int in_b;      /* stream B instead of A */
    uint32_t word; /* A: unit * 4 + word of the lane in it; B: word */
    unsigned shift;
};

/* The code of row `row` (0..15) and channel `c` (0..g-1) of the group in slot p. */
QT_LAYOUT struct qt_mix24_place qt_mix24_place(struct qt_mix24_slots s, unsigned g, uint32_t p,
                                               unsigned row, unsigned c)
{
    struct qt_mix24_place at;
    uint32_t col = p * g + c, step = col / 16;
    unsigned half = col % 16 / 8, h = col % 2, upper = row / 8;
    at.lane = 4 * (row % 8) + col % 8 / 2;
    at.in_b = qt_mix24_is_four(s, p) && upper;
    if (at.in_b) {
        uint32_t e = g == 16 ? 2 * qt_mix24_four(s, p) + half : qt_mix24_four(s, p);
        at.word = e / 4;
        at.shift = 16 * h + 4 * (e % 4 / 2 + 2 * (e % 2));
    } else {
        at.word = QT_MIX24_A_WORDS * (step / 8) + 2 * (step % 8 / 4) + half;
        at.shift = 16 * h + 4 * (step % 4) + 2 * upper;
    }
    return at;
}

/* Words of stream B per lane and strip. */
QT_LAYOUT uint32_t qt_mix24_b_words(struct qt_mix24_slots s, unsigned g)
{
    uint32_t nibbles = g == 16 ? 2 * s.fours : s.fours;
    return (nibbles + 3) / 4;
}

/* Fields of a meta word: scale code q and zero of its two number f = 0..2. */
QT_LAYOUT unsigned qt_mix24_q_bits(unsigned f)
{
    return f == 0 ? 4 : 3;
}

QT_LAYOUT unsigned qt_mix24_q_shift(unsigned f)
{
    return f == 0 ? 0 : 1 + 3 * f;
}

QT_LAYOUT unsigned qt_mix24_zero_shift(unsigned f)
{
    return 10 + 2 * f;
}

#endif
