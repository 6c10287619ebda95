/*
 * The fragment layout for integer tensor-core products: positions of the bits of 4-bit weight codes
 * that are multiplied by 8-bit or 4-bit activations. The host packer, the kernels and the tests
 * share this definition; no other file repeats it. Its id in containers is "frag16x64/byte".
 *
 * As in layout_frag.h, weights are the A operand, in fragment blocks of 16 rows x 64 columns. A
 * lane of a warp (g = lane / 4, t = lane % 4) has its codes of a fragment block in four words:
 * U32 [N/16][K/64][32 lanes][4]. That is one load of 16 bytes per lane and 512 contiguous bytes per
 * warp. 128 columns share the scale of an activation; the kernels take the second half of a last 64
 * columns as zeros. A fragment block is two k-steps s of 32 columns. In a k-step the A fragment of
 * mma.sync m16n8k32 (s8 or u8; wgmma with A in registers has the same fragment per warp) is four
 * registers of four bytes b = 0..3:
 *
 *                 columns 32 s + ...
 *               4t .. 4t+3   | 16+4t .. 16+4t+3
 *            +---------------+------------------+     row(r)     = g + 8 r
 *   row g    |  register 0   |  register 2      |     col(s,h,b) = 32 s + 16 h + 4 t + b
 *            +---------------+------------------+     register   = r + 2 h
 *   row g+8  |  register 1   |  register 3      |
 *            +---------------+------------------+
 *
 * Word 2 s + r holds row g + 8 r. Its byte b has the code of register r in the low half and the
 * code of register r + 2 in the high half:
 *
 *   word 2s+r   [ h1 b3 | h0 b3 | h1 b2 | h0 b2 | h1 b1 | h0 b1 | h1 b0 | h0 b0 ]     (4 bits each)
 *
 * So one word unpacks to two registers of the same row, and therefore of the same scale:
 *
 *   register r = (x << 4) & 0xf0f0f0f0,   register r + 2 = x & 0xf0f0f0f0
 *
 * These are 16 times the signed values: codes are two's complement. The scale absorbs the 1/16.
 *
 * mma.sync m16n8k64 (s4, u4) uses the same order. Its register r + 2 c has the eight columns
 * 32 c + 8 t .. 32 c + 8 t + 7 of row g + 8 r. Word 2 c + r has the eight codes of columns
 * 32 c + 16 h + 4 t + b instead, at place 2 b + h. The order of columns within a product is free if
 * the activations have the same order. 4-bit activations are stored in this order, too (word c of a
 * lane: token g, place 2 b + h = channel 32 c + 16 h + 4 t + b). m16n8k64 reads them as they are,
 * and m16n8k32 after the same unpacking.
 */
#ifndef QT_FORMATS_LAYOUTS_LAYOUT_FRAG8_H
#define QT_FORMATS_LAYOUTS_LAYOUT_FRAG8_H

#include "formats/layouts/layout_frag.h"

enum { QT_FRAG8_STEPS = 2 /* k-steps of 32 columns in a fragment block */ };

QT_LAYOUT unsigned qt_frag8_row(unsigned lane, unsigned r)
{
    return lane / 4 + 8 * r;
}

QT_LAYOUT unsigned qt_frag8_col(unsigned lane, unsigned s, unsigned h, unsigned b)
{
    return 32 * s + 16 * h + 4 * (lane % 4) + b;
}

/* Word of a code in its lane, and position of its lowest bit in the word. */
QT_LAYOUT unsigned qt_frag8_word(unsigned s, unsigned r)
{
    return 2 * s + r;
}

QT_LAYOUT unsigned qt_frag8_shift(unsigned h, unsigned b)
{
    return 8 * b + 4 * h;
}

#endif
