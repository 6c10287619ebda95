/*
 * Dequantization of 4- and 8-bit integers, with and without zero-points.
 *
 * A nibble in the lowest bits of an FP16 value is a subnormal, the code times 2^-24; four bits
 * higher it is the code times 2^-20. One fused multiply-add scales either to 2^-QT_INT4_EXP2 times
 * the code and subtracts the zero-point, exactly.
 */
#ifndef QT_KERNELS_CUDA_MATMUL_DECODE_INT_CUH
#define QT_KERNELS_CUDA_MATMUL_DECODE_INT_CUH

#include "kernels/cuda/matmul/decode_format.cuh"

struct qt_decode_int4 : qt_decode_plain {
    enum { WIDTH0 = 4, WIDTH1 = 0, WIDTH2 = 0, GROUPED = 1, ROUND_EXP2 = QT_INT4_ROUND_EXP2 };
    uint32_t w[4];

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &)
    {
        *(uint4 *)w = *(const uint4 *)src[0];
    }
    /* offset: added to the values of rows g and g + 8. */
    __device__ __forceinline__ void fragment_of(uint32_t a[4], int s,
                                                const uint32_t offset[2]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t v = i < 2 ? w[s] : w[s] >> 8;
            a[i] = i & 1 ? ptx_fma_half2(v & 0x00f000f0, 0x68006800, offset[1])  /* 2^11 */
                         : ptx_fma_half2(v & 0x000f000f, 0x78007800, offset[0]); /* 2^15 */
        }
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        const uint32_t offset[2] = {0xa400a400, 0xa400a400}; /* -8 * 2^-9 */
        fragment_of(a, s, offset);
    }
};

/* 4-bit integers with zero-points. */
struct qt_decode_int4_zero : qt_decode_int4 {
    enum { ZEROS = 8 };
    uint32_t offset[2];

    __device__ __forceinline__ void set_zeros(uint32_t zeros)
    {
        const uint32_t none = 0x80008000, minus = 0xf800f800; /* -0; -2^15 */
        offset[0] = ptx_fma_half2((zeros & 15) * 0x00010001, minus, none);
        offset[1] = ptx_fma_half2((zeros >> 4) * 0x00010001, minus, none);
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
        fragment_of(a, s, offset);
    }
};

/* 8-bit codes: plane p holds one byte of registers 2 p and 2 p + 1 in each half of a word. */
struct qt_decode_bytes : qt_decode_plain {
    enum { WIDTH0 = 4, WIDTH1 = 4, WIDTH2 = 0 };
    uint32_t w[2][4];

    __device__ __forceinline__ void load(const unsigned char *const src[3],
                                         const struct qt_decode_args &)
    {
        *(uint4 *)w[0] = *(const uint4 *)src[0];
        *(uint4 *)w[1] = *(const uint4 *)src[1];
    }
};

/* 8-bit integers, with and without zero-points. FP16 0x6400 | v is 1024 + v; one addition subtracts
 * 1024 and the zero-point. */
struct qt_decode_int8 : qt_decode_bytes {
    enum { GROUPED = 1, ZEROS = 16, ROUND_EXP2 = QT_INT8_ROUND_EXP2 };
    uint32_t offset[2];

    __device__ __forceinline__ void set_zeros(uint32_t zeros)
    {
        offset[0] = 0xe400e400 + (zeros & 255) * 0x00010001;
        offset[1] = 0xe400e400 + (zeros >> 8) * 0x00010001;
    }
    __device__ __forceinline__ void fragment(uint32_t a[4], int s, const qt_lane &) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t selector = i & 1 ? 0x4341 : 0x4240;
            a[i] = ptx_add_half2(__byte_perm(w[i / 2][s], 0x64, selector), offset[i & 1]);
        }
    }
};

#endif
