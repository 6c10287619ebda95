/*
 * Dequantization of minifloats of 5 to 8 bits with e exponent bits, without tables (the planes and
 * bit shifts follow FP6-LLM, arXiv 2401.14112). The 4-bit plane holds the top four magnitude bits;
 * the 1- and 2-bit planes hold the remaining mantissa bits and the sign. Both 16-bit halves of a
 * register are processed together: a shift aligns the magnitude with FP16's exponent and mantissa,
 * a rotation moves the sign to bit 15, and two LOP3 select the bits.
 *
 * E: the number of exponent bits, or 0 if it is a kernel argument. Common formats have kernels of
 * their own, which are up to a sixth faster than those with E = 0.
 */
#ifndef QT_KERNELS_CUDA_MATMUL_DECODE_FPX_CUH
#define QT_KERNELS_CUDA_MATMUL_DECODE_FPX_CUH

#include "kernels/cuda/matmul/decode_int.cuh"

template <int E> struct qt_decode_fpx_base : qt_decode_plain {
    enum { GROUPED = 0, RARE = E == 0 };
};

/* Moves the nibbles of register i of w so that their lowest bit is at bit 6 + e of each half. The
 * other bits are undefined. */
template <int E> static __device__ __forceinline__ uint32_t move_nibble(uint32_t w, int i, int e)
{
    const int shift = 6 + e - 4 * i;
    if (E == 0 && i == 2) /* -1 to 3: a rotation serves for both directions */
        return __funnelshift_l(w, w, shift);
    return (E ? shift >= 0 : i < 2) ? w << shift : w >> -shift;
}

/*
 * Rotates w left by n and selects `bits`. If no selected bit wraps around, a shift is used: shifts
 * can run as multiplications, while rotations run only on the integer pipe, which limits tiles of
 * few tokens.
 */
static __device__ __forceinline__ uint32_t rotate_bits(uint32_t w, int n, uint32_t bits)
{
    return ((bits & ((1u << n) - 1)) == 0 ? w << n : __funnelshift_l(w, w, n)) & bits;
}

/* 5 bits: the 1-bit plane holds the sign. */
template <int E> struct qt_decode_fp5 : qt_decode_fpx_base<E> {
    enum { WIDTH0 = 4, WIDTH1 = 1, WIDTH2 = 0 };
    uint32_t w4[4], w1;
    int e;

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &d)
    {
        *(uint4 *)w4 = *(const uint4 *)src[0];
        w1 = *(const uint32_t *)src[1];
        e = E ? E : (int)d.exp_bits;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t magnitude = 0x000f000fu << (6 + e);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t sign = rotate_bits(w1, 15 - (4 * s + i), 0x80008000);
            a[i] = (move_nibble<E>(w4[s], i, e) & magnitude) | sign;
        }
    }
};

/* 6 bits: the 2-bit plane holds the sign and the lowest mantissa bit. */
template <int E> struct qt_decode_fp6 : qt_decode_fpx_base<E> {
    enum { WIDTH0 = 4, WIDTH1 = 2, WIDTH2 = 0 };
    uint32_t w4[4], w2[4];
    int e;

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &d)
    {
        *(uint4 *)w4 = *(const uint4 *)src[0];
        uint2 v = *(const uint2 *)src[1];
        split_small(v.x, &w2[0]);
        split_small(v.y, &w2[2]);
        e = E ? E : (int)d.exp_bits;
    }
    /*
     * The plane stores the mantissa bit 7 below the sign, as E3M2 needs it (bits 8 and 15); E2M3
     * needs it 8 below. Moved by one bit, it would overlap the signs of other slots. Therefore
     * slots 0 to 3 and 4 to 7 of a word go into separate words: one rotation and two LOP3 for eight
     * registers. Other exponent widths use one rotation for the sign and one for the mantissa bit.
     */
    static __device__ __forceinline__ void split_small(uint32_t v, uint32_t out[2])
    {
        uint32_t moved = __funnelshift_r(v, v, 1);
        out[0] = E != 2 ? v : (v & 0x00ff00ff) | (moved & 0xff00ff00);
        out[1] = E != 2 ? v : (v & 0xff00ff00) | (moved & 0x00ff00ff);
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t high = 0x000f000fu << (6 + e), low = 0x00010001u << (5 + e);
        const uint32_t sign = 0x80008000;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int shift = 14 - 2 * (4 * (s & 1) + i);
            a[i] = (move_nibble<E>(w4[s], i, e) & high) |
                   rotate_bits(w2[s], shift, E ? low | sign : sign);
            if (E == 0)
                a[i] |= __funnelshift_l(w2[s], w2[s], shift + e - 3) & low;
        }
    }
};

/* 7 bits: the 2-bit plane holds mantissa bits, the 1-bit plane the sign. The two mantissa bits of a
 * code are 7 bits apart; rotating the lower ones by 8 makes the two bits of each code adjacent. */
template <int E> struct qt_decode_fp7 : qt_decode_fpx_base<E> {
    enum { WIDTH0 = 4, WIDTH1 = 2, WIDTH2 = 1 };
    uint32_t w4[4], w2[2], w1;
    int e;

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &d)
    {
        *(uint4 *)w4 = *(const uint4 *)src[0];
        uint2 v = *(const uint2 *)src[1];
        w2[0] = (v.x & 0x55555555) | (__funnelshift_r(v.x, v.x, 8) & 0xaaaaaaaa);
        w2[1] = (v.y & 0x55555555) | (__funnelshift_r(v.y, v.y, 8) & 0xaaaaaaaa);
        w1 = *(const uint32_t *)src[2];
        e = E ? E : (int)d.exp_bits;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t high = 0x000f000fu << (6 + e), middle = 0x00030003u << (4 + e);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t w = w2[s / 2];
            uint32_t low = rotate_bits(w, 11 + e - 2 * (4 * (s & 1) + i), middle);
            uint32_t sign = rotate_bits(w1, 15 - (4 * s + i), 0x80008000);
            a[i] = (move_nibble<E>(w4[s], i, e) & high) | low | sign;
        }
    }
};

/* 8 bits: a code is moved to the top byte of each half; the low byte is zero. */
template <int E> struct qt_decode_fp8 : qt_decode_bytes {
    enum { GROUPED = 0, RARE = E == 0 };
    int e;

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &d)
    {
        qt_decode_bytes::load(src, d);
        e = E ? E : (int)d.exp_bits;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t sign = 0x80008000, magnitude = 0x007f007fu << (3 + e);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t word = w[i / 2][s];
            const uint32_t v = i & 1 ? word & 0xff00ff00 : __byte_perm(word, 0, 0x2404);
            a[i] = E == 5 ? v : (v >> (5 - e) & magnitude) | (v & sign);
        }
    }
};

#endif
