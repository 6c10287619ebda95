/*
 * Minifloats of 5 to 8 bits, e of them of the exponent. The 4-bit plane holds the top four
 * magnitude bits, the small planes what is left and the sign. Both halves of a register move
 * together: a shift puts the magnitude under FP16's exponent and mantissa, a turn (below) the sign
 * on bit 15, and two LOP3 take what is wanted of each.
 *
 * E: the exponent bits, or 0 where the kernel has them as an argument: for all those that have no
 * kernels of their own, which are up to a sixth faster.
 */
#ifndef QT_KERNELS_CUDA_MATMUL_DECODE_FIELD_CUH
#define QT_KERNELS_CUDA_MATMUL_DECODE_FIELD_CUH

#include "kernels/cuda/matmul/decode_int.cuh"

template <int E> struct qt_decode_field : qt_decode_plain {
    enum { GROUPED = 0, RARE = E == 0 };
};

/* Register i's nibbles of w, lowest bit at 6 + e of each half; other bits are anything. */
template <int E> static __device__ __forceinline__ uint32_t move_nibble(uint32_t w, int i, int e)
{
    const int left = 6 + e - 4 * i;
    if (E == 0 && i == 2) /* -1 to 3; what is transposed around is not wanted */
        return __funnelshift_l(w, w, left);
    return (E ? left >= 0 : i < 2) ? w << left : w >> -left;
}

/*
 * `bits` of w transposed left by n. A shift where none of them comes around: a rotation is for the pipe
 * of integers alone, which is what tiles of few tokens wait for, a shift may be a multiplication.
 */
static __device__ __forceinline__ uint32_t turn(uint32_t w, int n, uint32_t bits)
{
    return ((bits & ((1u << n) - 1)) == 0 ? w << n : __funnelshift_l(w, w, n)) & bits;
}

/* 5 bits: the small plane is the sign. */
template <int E> struct qt_decode_fp5 : qt_decode_field<E> {
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
            uint32_t sign = turn(w1, 15 - (4 * s + i), 0x80008000);
            a[i] = (move_nibble<E>(w4[s], i, e) & magnitude) | sign;
        }
    }
};

/* 6 bits. */
template <int E> struct qt_decode_fp6 : qt_decode_field<E> {
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
     * The plane keeps the mantissa bit 7 below the sign, as E3M2 wants it: bits 8 and 15. E2M3
     * wants 8 below. Moved by one it would land on other slots' signs, so slots 0..3 and 4..7 of a
     * word go into words of their own: a rotation and two LOP3 for eight registers. Other exponents
     * take a turn for the sign and one for the mantissa bit.
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
            const int left = 14 - 2 * (4 * (s & 1) + i);
            a[i] = (move_nibble<E>(w4[s], i, e) & high) | turn(w2[s], left, E ? low | sign : sign);
            if (E == 0)
                a[i] |= __funnelshift_l(w2[s], w2[s], left + e - 3) & low;
        }
    }
};

/* 7 bits: the 2-bit plane holds mantissa bits, the 1-bit plane the sign. The mantissa bits of a
 * code are 7 places apart; moving the lower ones of a word by 8, to where other codes' were, puts
 * those of a code side by side. */
template <int E> struct qt_decode_fp7 : qt_decode_field<E> {
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
            uint32_t low = turn(w, 11 + e - 2 * (4 * (s & 1) + i), middle);
            uint32_t sign = turn(w1, 15 - (4 * s + i), 0x80008000);
            a[i] = (move_nibble<E>(w4[s], i, e) & high) | low | sign;
        }
    }
};

/* 8 bits: bytes at the top of both halves, else zeros. */
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
