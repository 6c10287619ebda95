/*
 * The fragment layout for integer tensor-core products: where the bits of 4-bit codes are that meet
 * 8-bit or 4-bit activations. Shared by the host packer, the kernels and the tests; this is the
 * only place that says it. Its id in containers is "frag16x64/byte".
 *
 * As in layout_frag.h weights are the A operand, in blocks of 16 rows x 64 columns, and a lane of a
 * warp (g = lane / 4, t = lane % 4) finds its codes of a block in four words: U32 [N/16][K/64][32
 * lanes][4], one load of 16 bytes, 512 contiguous bytes a warp. K is padded to an even number of
 * blocks, 128 columns, which share the scale of an activation. A block is two k-steps s of 32
 * columns. In a k-step the A fragment of mma.sync m16n8k32 (s8 or u8; wgmma with A in registers has
 * the same one per warp) is four registers of four bytes b = 0..3:
 *
 *                 columns 32 s + ...
 *               4t .. 4t+3   | 16+4t .. 16+4t+3
 *            +---------------+------------------+     row(r)     = g + 8 r
 *   row g    |  register 0   |  register 2      |     col(s,h,b) = 32 s + 16 h + 4 t + b
 *            +---------------+------------------+     register   = r + 2 h
 *   row g+8  |  register 1   |  register 3      |
 *            +---------------+------------------+
 *
 * Word 2 s + r holds row g + 8 r: byte b has the code of register r in its low half and that of
 * register r + 2 in its high half:
 *
 *   word 2s+r   [ h1 b3 | h0 b3 | h1 b2 | h0 b2 | h1 b1 | h0 b1 | h1 b0 | h0 b0 ]     (4 bits each)
 *
 * so that one word unpacks into two registers, of one row and therefore of one scale:
 *
 *   register r = (x << 4) & 0xf0f0f0f0,   register r + 2 = x & 0xf0f0f0f0
 *
 * are 16 times the values, signed: codes are two's complement. The 1/16 belongs to the scale.
 *
 * mma.sync m16n8k64 (s4, u4) needs no other order. Its registers hold eight columns of one row,
 * register r + 2 c columns 32 c + 8 t .. 32 c + 8 t + 7 of row g + 8 r; word 2 c + r has the eight
 * codes of columns {32 c + 16 h + 4 t + b} instead, at place 2 b + h. Within a product the columns
 * of a block may stand in any order if the activations stand in the same: 4-bit activations are
 * stored in this order too (word c of a lane: token g, place 2 b + h = channel 32 c + 16 h + 4 t +
 * b), where they serve m16n8k64 as they are and m16n8k32 after the same unpacking.
 */
#ifndef QT_PACK_LAYOUTS_LAYOUT_FRAG8_H
#define QT_PACK_LAYOUTS_LAYOUT_FRAG8_H

#include "pack/layouts/layout_frag.h"

enum { QT_FRAG8_STEPS = 2 /* k-steps of 32 columns in a block */ };

QT_LAYOUT unsigned qt_frag8_row(unsigned lane, unsigned r)
{
    return lane / 4 + 8 * r;
}

QT_LAYOUT unsigned qt_frag8_col(unsigned lane, unsigned s, unsigned h, unsigned b)
{
    return 32 * s + 16 * h + 4 * (lane % 4) + b;
}

/* Word of a lane, and bit in it, of the lowest bit of a code. */
QT_LAYOUT unsigned qt_frag8_word(unsigned s, unsigned r)
{
    return 2 * s + r;
}

QT_LAYOUT unsigned qt_frag8_shift(unsigned h, unsigned b)
{
    return 8 * b + 4 * h;
}

#endif
