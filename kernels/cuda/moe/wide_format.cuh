/*
 * Decoders of the grouped product by wgmma, where they differ from those of the tile kernel, and
 * the multiplication of fragments by their scales.
 *
 * For 4-bit integers one instruction of four per register is saved: fragments are the integers
 * themselves, not 2^-QT_INT4_EXP2 of them, so that one multiplication by 2^SCALE_EXP2 * scale
 * rounds to the same units as QT_INT4_ROUND_EXP2 does. A nibble in the low bits of FP16 1024 adds
 * to it (one in bits 4 to 7 adds to 64, after the division by 16); one instruction subtracts that
 * and the zero-point.
 */
#ifndef QT_KERNELS_CUDA_MOE_WIDE_FORMAT_CUH
#define QT_KERNELS_CUDA_MOE_WIDE_FORMAT_CUH

#include "kernels/cuda/matmul/tile.cuh"

struct wide_int4 : qt_decode_int4 {
    enum { SCALE_EXP2 = QT_INT4_ROUND_EXP2 - QT_INT4_EXP2 };

    static __device__ __forceinline__ uint32_t nibbles(uint32_t v, uint32_t mask, uint32_t magic)
    {
        uint32_t d;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(v), "r"(mask), "r"(magic));
        return d;
    }
    /* minus[0]: minus 1024 and the zero-point, of rows g; minus[1]: minus 64 and it, rows g + 8 */
    __device__ __forceinline__ void integers(uint32_t a[4], int s, const uint32_t minus[2]) const
    {
        uint32_t magic = 0x64006400; /* in a register: LOP3 takes one constant */
        asm("" : "+r"(magic));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t v = i < 2 ? w[s] : w[s] >> 8;
            a[i] = i & 1 ? ptx_fma_half2(nibbles(v, 0x00f000f0, magic), 0x2c002c00, minus[1])
                         : ptx_add_half2(nibbles(v, 0x000f000f, magic), minus[0]);
        }
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t minus[2] = {0xe408e408, 0xd480d480}; /* -1032, -72 */
        integers(a, s, minus);
    }
};

struct wide_int4_zero : wide_int4 {
    enum { ZEROS = 8 };
    uint32_t minus[2];

    __device__ __forceinline__ void set_zeros(uint32_t zeros)
    {
        minus[0] = 0xe400e400 + (zeros & 15) * 0x00010001;
        minus[1] = 0xd400d400 + (zeros >> 4) * 0x00100010;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        integers(a, s, minus);
    }
};

/* The exponent by which scales are multiplied instead of fragments. */
template <class Format> static __device__ __forceinline__ constexpr int wide_scale_exp2()
{
    return 0;
}
template <> __device__ __forceinline__ constexpr int wide_scale_exp2<wide_int4>()
{
    return wide_int4::SCALE_EXP2;
}
template <> __device__ __forceinline__ constexpr int wide_scale_exp2<wide_int4_zero>()
{
    return wide_int4::SCALE_EXP2;
}

/* Multiplies the fragment of a k-step by the scales of rows g and g + 8 as tile_scale_weights does.

 */
template <class Format>
static __device__ __forceinline__ void wide_scale(uint32_t (&f)[1][4], __half2 scale)
{
    if constexpr (wide_scale_exp2<Format>() == 0) {
        const __half2 both[2] = {scale, scale};
        tile_scale_weights<Format, 1>(f, both);
    } else {
        const __half2 of_rows = __hmul2(scale, tile_power(wide_scale_exp2<Format>()));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const __half2 v = __hmul2(*(const __half2 *)&f[0][i],
                                      i % 2 ? __high2half2(of_rows) : __low2half2(of_rows));
            f[0][i] = *(const uint32_t *)&v;
        }
    }
}

#endif
