/*
 * The layout of mix24: positions of the bits of a matrix of 2- and 4-bit groups. The host packer,
 * the kernels and the tests share this definition; no other file repeats it.
 *
 * A GROUP is g = 16 (or 8) input channels that are neighbors in storage. Groups are assigned to
 * GROUP SLOTS by section perm, which has the group of each slot (0xffff: none); a kernel reads its
 * activations in chunks of g channels (32 bytes). A UNIT is 128 packed columns: 8 slots (16 for
 * g = 8), all with 2-bit groups (a TWO) or all with 4-bit groups (a FOUR). The two kinds are spread
 * evenly. With U units, F of them FOURs,
 *
 *     unit u is a FOUR  iff  floor((u + 1) F / U) > floor(u F / U)
 *
 * Section stream is U8 [N/16 strips][bytes]. A strip of 16 rows has one RECORD per unit, in the
 * order of units. docs/schemes.md defines the weight: (code - zero-point) * (q + z2) * s2 * 2^-22.
 * Each row of a group has its own q and zero-point (z); g2 rows of a group share u, which has s2
 * and z2. For g = 16, g2 = 16:
 *
 *     TWO,  624 bytes   codes 32 lanes x U32[4]       | q 32 x U16 | z 32 x U8  | u 4 x U32
 *     FOUR, 1168 bytes  codes 2 x (32 lanes x U32[4]) | q 32 x U16 | z 32 x U16 | u 4 x U32
 *
 * A record has two BLOCKS b of 64 columns. Lane l, with G = l / 4 and t = l % 4, holds all of the
 * 16 columns 64 b + 16 t to 64 b + 16 t + 15 in rows G and G + 8 of the strip. So it needs one
 * scale and one zero-point for each row of a block, and no data of other lanes. Step s = 0..3 of a
 * block is an mma m16n8k16 that has the lane's columns 4 s to 4 s + 3 as its part of the A operand
 * (the order of columns within a product is free if the activations have the same order). Register
 * i = 0..3, half h = 0..1 is
 *
 *     row G + 8 (i % 2), column j = 4 s + 2 (i / 2) + h of the 16
 *
 * and its code is the field that starts at bit F0 and extends upward, modulo 32, of
 *
 *     TWO   word 2 b + s / 2 of the lane   F0 = (16 h + 2 + 2 (4 (s % 2) + i)) % 32,  2 bits
 *     FOUR  word s of the lane, block b    F0 = (16 h + 2 + 4 i) % 32,                4 bits
 *
 *     TWO, r = 4 (s % 2) + i      F0   30 28 26 24 22 20 18 | 16 14 12 10  8  6  4  2 |  0
 *                                  r    6  5  4  3  2  1  0 |  7  6  5  4  3  2  1  0 |  7
 *                                  h            1           |            0            |  1
 *
 *     FOUR                        F0   30 (and 0, 1)  26  22  18 | 14  10   6   2
 *                                  i         3         2   1   0 |  3   2   1   0
 *                                  h               1             |       0
 *
 * Unchanged or rotated right by 8, a word has every field in bits 2 to 9 of its half. Masked, that
 * is a pair of FP16 subnormals code * 2^(bit - 24): exact factors of fused multiply-adds.
 *
 * Parameters of lane l's group in block b (t, G as above):
 *
 *     q  U16 of lane l    bit 15     12 11      8 7       4 3       0
 *                            +---------+---------+---------+---------+
 *                            | b=1,G+8 | b=0,G+8 |  b=1,G  |  b=0,G  |
 *                            +---------+---------+---------+---------+
 *     z  TWO: U8          bit 7     6 5     4 3     2 1     0     FOUR: U16, the same in fields of
 *                            +-------+-------+-------+-------+    four bits
 *                            |b=1,G+8| b=1,G |b=0,G+8| b=0,G |
 *                            +-------+-------+-------+-------+
 *     u  U32 number t     bit 31 30          23 22 20 19  16 15 14           7 6   4 3    0
 *                            +--+--------------+-----+------+--+--------------+-----+------+
 *                            |0 |     s2       |  0  |  z2  |0 |     s2       |  0  |  z2  |
 *                            +--+--------------+-----+------+--+--------------+-----+------+
 *                             `----------- block 1 ---------' `----------- block 0 --------'
 *
 * u & 0x7f80 is s2 as FP16. 8 bits of it are stored; in FOURs the lowest two of these are 0.
 *
 * g = 8: lane l's 16 columns are two groups, j < 8 and j >= 8, in slots 2 (4 b + t) and
 * 2 (4 b + t) + 1. The record has q, z and u of the first groups, then q, z and u of the second
 * groups. g2 = 8: u is stored twice, for rows G and for rows G + 8.
 *
 * Padding decodes to 0. Slots without a group have all bits 0. Rows beyond N have q, z and codes 0.
 * Channels beyond K in a group with other channels have the code of the zero-point.
 */
#ifndef QT_FORMATS_LAYOUTS_LAYOUT_MIX24_H
#define QT_FORMATS_LAYOUTS_LAYOUT_MIX24_H

#include "formats/layouts/layout_frag.h"
#include <stdint.h>

enum {
    QT_MIX24_UNIT = 128, /* columns of a unit */
    QT_MIX24_CHUNK = 16, /* columns of a lane in a block */
    QT_MIX24_LANES = 32,
    QT_MIX24_TWO_CODES = 512, /* bytes of codes in a record */
    QT_MIX24_FOUR_CODES = 1024,
    QT_MIX24_Q_BYTES = 64,
    QT_MIX24_U_BYTES = 16,
    QT_MIX24_NO_GROUP = 0xffff, /* in perm: group slot without group */
};

/* Shape of the units of a matrix. */
struct qt_mix24_units {
    uint32_t units, fours;
    uint32_t parts, halves; /* 16 / g, 16 / g2 */
};

/* Number of FOURs before unit u. */
QT_LAYOUT uint32_t qt_mix24_fours_before(const struct qt_mix24_units *x, uint32_t u)
{
    return (uint32_t)((uint64_t)u * x->fours / x->units);
}

QT_LAYOUT int qt_mix24_is_four(const struct qt_mix24_units *x, uint32_t u)
{
    return qt_mix24_fours_before(x, u + 1) > qt_mix24_fours_before(x, u);
}

/* Bytes of q, z and u of one part; a record has one part for g = 16 and two for g = 8. */
QT_LAYOUT uint32_t qt_mix24_param_bytes(const struct qt_mix24_units *x, int four)
{
    uint32_t z_bytes = four ? 2 * QT_MIX24_LANES : QT_MIX24_LANES;
    return QT_MIX24_Q_BYTES + z_bytes + x->halves * QT_MIX24_U_BYTES;
}

QT_LAYOUT uint32_t qt_mix24_record_bytes(const struct qt_mix24_units *x, int four)
{
    return (four ? QT_MIX24_FOUR_CODES : QT_MIX24_TWO_CODES) +
           x->parts * qt_mix24_param_bytes(x, four);
}

/* Offset of the record of unit u in a strip; for u = U the bytes of a strip. */
QT_LAYOUT uint64_t qt_mix24_record(const struct qt_mix24_units *x, uint32_t u)
{
    uint64_t fours = qt_mix24_fours_before(x, u);
    return fours * qt_mix24_record_bytes(x, 1) + (u - fours) * qt_mix24_record_bytes(x, 0);
}

/* Position of a code in a record: word, and lowest bit of the field, which wraps modulo 32. */
struct qt_mix24_place {
    unsigned word, bit;
};

/* Position of row 0..15, column 0..127 in a record. Rows 0..7 have the same bit, in words that are
 * QT_MIX24_ROW_WORDS apart, and so have rows 8..15. */
enum { QT_MIX24_ROW_WORDS = 16 };
QT_LAYOUT struct qt_mix24_place qt_mix24_place(int four, unsigned row, unsigned col)
{
    struct qt_mix24_place at;
    unsigned b = col / 64, lane = 4 * (row % 8) + col % 64 / QT_MIX24_CHUNK;
    unsigned j = col % QT_MIX24_CHUNK, s = j / 4, i = 2 * (j % 4 / 2) + row / 8, h = j % 2;
    at.word = four ? QT_MIX24_LANES * 4 * b + 4 * lane + s : 4 * lane + 2 * b + s / 2;
    at.bit = (16 * h + 2 + (four ? 4 * i : 2 * (4 * (s % 2) + i))) % 32;
    return at;
}

/* Lowest bit of q in its lane's U16, and of the zero-point in its lane's U16 (FOUR) or U8. */
QT_LAYOUT unsigned qt_mix24_q_bit(unsigned row, unsigned b)
{
    return 8 * (row / 8) + 4 * b;
}

QT_LAYOUT unsigned qt_mix24_z_bit(int four, unsigned row, unsigned b)
{
    return (four ? 4 : 2) * (2 * b + row / 8);
}

#endif
