/*
 * The fragment layout: positions of the bits of packed weight codes. The host packer, the kernels
 * and the tests share this definition; no other file repeats it.
 *
 * Weights W[N][K] are the A operand of tensor-core products (rows = output channels), so that
 * packed words go from global memory to the registers of mma.sync m16n8k16 (sm_80+), and of wgmma
 * with A in registers (sm_90a), without exchange between lanes. The matrix is padded to whole
 * FRAGMENT BLOCKS of 16 rows x 64 columns, four k-steps of 16 columns. In k-step s, lane l
 * (g = l / 4, t = l % 4) of a warp holds eight codes: two values h = 0..1 in each of four 32-bit
 * operand registers i = 0..3:
 *
 *                 columns 16 s + ...
 *               2t   2t+1  |  2t+8  2t+9
 *            +-------------+-------------+      row(i)    = g + 8 (i % 2)
 *   row g    | i=0,h=0  h=1| i=2,h=0  h=1|      col(s,i,h) = 16 s + 2 t + 8 (i / 2) + h
 *            +-------------+-------------+
 *   row g+8  | i=1,h=0  h=1| i=3,h=0  h=1|
 *            +-------------+-------------+
 *
 * A b-bit code is divided, from its top bits down, into PLANES of 4, 2 and 1 bits (7 = 4+2+1,
 * 6 = 4+2, 5 = 4+1, 4 = 4, 3 = 2+1, 2 = 2). A plane of p bits has p words (32 codes of p bits) per
 * lane and fragment block. Codes of 8 bits are not divided, but are also stored as two planes of
 * p = 4 words (QT_FRAG_WHOLE).
 *
 * The memory of a plane is U32 [N/16][K/64][32 lanes][p words]. A warp reads 128 p contiguous,
 * aligned bytes per fragment block; a lane reads 4 p contiguous bytes (16 for p = 4). Fragment
 * blocks of 16 rows are contiguous along K, so a slice of N (16 rows) or of K (64 columns) is index
 * arithmetic.
 *
 * The bit order in a lane's p words is chosen for dequantization. There are three orders.
 *
 * QT_FRAG_NIBBLE: byte i of a word belongs to register i, nibble h of the byte to value h. A byte
 * can index a table of pairs, and a nibble that holds a code of up to three bits is a byte selector
 * of PRMT. The k-steps of a word w fill a nibble from the lowest bit up:
 *
 *   p = 4  word s          nibble = [ s ]
 *   p = 2  word s / 2      nibble = [ step 2w+1 | step 2w ]
 *   p = 1  word 0          nibble = [ step 3 | 2 | 1 | 0 ]
 *
 * QT_FRAG_HALF: half-word h of a word holds the codes of value h, in bit slots of p bits from the
 * lowest bit up. Bit slots have the numbers 4 s + i, and the numbers continue from word to word. A
 * shift and a mask align the two values of a register with the fields of FP16x2:
 *
 *   p = 4  word s          half h = [ i3 | i2 | i1 | i0 ]
 *   p = 2  word s / 2      half h = [ slot 7 | ... | slot 0 ], see below
 *   p = 1  word 0          half h = [ slot 15 | ... | slot 0 ]
 *
 * In the 2-bit plane of QT_FRAG_HALF, bit 0 of slot j is at 16 h + 2 j + 1, and bit 1 is 7 places
 * below it (modulo 32). Bit 0 is the sign of a minifloat and bit 1 its last mantissa bit. One
 * rotation by 14 - 2 j moves the sign to bit 15 and the mantissa bit to bit 8 of both halves, their
 * FP16 positions for E3M2. Positions never collide: 7 is odd and slots are 2 apart.
 *
 * QT_FRAG_WHOLE, 8 bits: plane 0 has registers 0 and 1, plane 1 has registers 2 and 3, one byte per
 * code:
 *
 *   word s of plane i / 2  half h = [ i odd | i even ]
 *
 * One byte permutation moves the bytes of a register to either end of its halves.
 */
#ifndef QT_FORMATS_LAYOUTS_LAYOUT_FRAG_H
#define QT_FORMATS_LAYOUTS_LAYOUT_FRAG_H

#ifdef __CUDACC__
#define QT_LAYOUT static __host__ __device__ inline
#else
#define QT_LAYOUT static inline
#endif

enum {
    QT_FRAG_ROWS = 16,
    QT_FRAG_COLS = 64,
    QT_FRAG_LANES = 32,
    QT_FRAG_STEPS = 4,      /* k-steps in a fragment block */
    QT_FRAG_MAX_PLANES = 3, /* 7 = 4+2+1 */
};

/* layout_frag8.h defines QT_FRAG_BYTE. */
enum qt_frag_order { QT_FRAG_NIBBLE, QT_FRAG_HALF, QT_FRAG_WHOLE, QT_FRAG_BYTE };

QT_LAYOUT unsigned qt_frag_row(unsigned lane, unsigned i)
{
    return lane / 4 + 8 * (i % 2);
}

QT_LAYOUT unsigned qt_frag_col(unsigned lane, unsigned s, unsigned i, unsigned h)
{
    return 16 * s + 2 * (lane % 4) + 8 * (i / 2) + h;
}

/* Position of bit `bit` of code (s, i, h) in the lane's p words: 32 * word + bit in the word. For
 * QT_FRAG_NIBBLE and QT_FRAG_HALF. */
QT_LAYOUT unsigned qt_frag_bit(enum qt_frag_order order, unsigned p, unsigned s, unsigned i,
                               unsigned h, unsigned bit)
{
    if (order == QT_FRAG_NIBBLE)
        return 32 * (p * s / 4) + 8 * i + 4 * h + p * s % 4 + bit;
    unsigned slot = 4 * s + i, per_word = 16 / p, word = slot / per_word, j = slot % per_word;
    if (p == 2)
        return 32 * word + ((16 * h + 2 * j + 1 + 25 * bit) & 31); /* 25 = -7 mod 32 */
    return 32 * word + 16 * h + p * j + bit;
}

/* Same for the code's lowest bit in plane i / 2 of QT_FRAG_WHOLE. */
QT_LAYOUT unsigned qt_frag_whole_bit(unsigned s, unsigned i, unsigned h)
{
    return 32 * s + 16 * h + 8 * (i % 2);
}

/* Planes of a b-bit code, 2 <= b <= 8: widths from the top to width[]; returns their number. */
QT_LAYOUT int qt_frag_planes(unsigned width[QT_FRAG_MAX_PLANES], unsigned bits)
{
    int n = 0;
    while (bits) {
        unsigned p = bits >= 4 ? 4 : bits >= 2 ? 2 : 1;
        width[n++] = p;
        bits -= p;
    }
    return n;
}

/* Position of a row's scale. Group scales are FP16 [N/16][groups][16], the 16 rows in the order
 * 0 8 1 9 2 10 ..., so that a lane reads the scales of its rows g and g + 8 as one 32-bit word. */
QT_LAYOUT unsigned qt_frag_scale_slot(unsigned row)
{
    return 2 * (row % 8) + row / 8 % 2;
}

#endif
