/*
 * Dequantization of packed codes to the A operand of mma.sync m16n8k16: one struct per code format.
 * formats/layouts/layout_frag.h defines the layout. A format struct has these members:
 *
 *     WIDTH0..2     bits of its planes; 0: no such plane
 *     LUT           codes are looked up, not computed
 *     VALUES        look-up in registers of the lane (qt_lane)
 *     TABLE_BYTES   size of the look-up table in shared memory; 0: no table
 *     LINE_BYTES    bytes of a table entry, with the copies for all lanes
 *     LANE_BYTES    bytes of an entry that one lane reads
 *     SINGLE        an entry holds the value of one code, not of two
 *     TILE4         see qt_decode_tile4
 *     STEPS         the table has separate entries for even and odd k-steps
 *     code          maps a nibble to a code; step_code does so with STEPS
 *     GROUPED       a scale per group; else one scale per row
 *     load          loads the words of one fragment block (16 x 64); src[i]: the lane's words of
 *                   plane i
 *     ZEROS         bytes of the zero-points of 16 rows and a group; 0: no zero-points
 *     set_zeros     sets the zero-points at the start of a group, from qt_lane_zeros
 *     fragment      computes the A registers of k-step s as FP16x2
 *     ROUND_EXP2    for GROUPED formats: with stored scales of at most 2^15,
 *                   fragment * 2^ROUND_EXP2 * stored scale neither overflows nor becomes subnormal
 *                   in FP16
 *     RARE          has few specialized kernels, because each kernel takes a second to compile
 *
 * Fragments may be scaled by a power of two, which qt_result_factor corrects.
 */
#ifndef QT_KERNELS_CUDA_MATMUL_DECODE_FORMAT_CUH
#define QT_KERNELS_CUDA_MATMUL_DECODE_FORMAT_CUH

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/smem.cuh"
#include "kernels/cuda/matmul/decode.h"

/* Bits per code of plane p. */
template <class Format> static __device__ __forceinline__ constexpr int qt_plane_width(int p)
{
    return p == 0 ? Format::WIDTH0 : p == 1 ? Format::WIDTH1 : Format::WIDTH2;
}

/* Bytes of the lane's words of plane p in a fragment block (16 x 64). */
template <class Format> static __device__ __forceinline__ constexpr int qt_lane_width(int p)
{
    return 4 * qt_plane_width<Format>(p);
}

/* The stored zero-points of the lane's two rows g and g + 8; group: the zero-points of the strip
 * for one group. */
template <class Format>
static __device__ __forceinline__ uint32_t qt_lane_zeros(const qt_decode_args &d,
                                                         const unsigned char *group)
{
    const unsigned g = threadIdx.x % 32 / 4;
    if (Format::ZEROS == 8)
        return group[g];
    return d.zeros ? ((const uint16_t *)group)[g] : 0x8080u;
}

/* Per-lane state of the look-ups. */
struct qt_lane {
    uint32_t bytes;           /* byte offset of the lane's copy in a table entry */
    uint32_t low[2], high[2]; /* low and high bytes of up to eight FP16 values */
};

/* Default members for formats without a table or without zero-points. */
struct qt_decode_plain {
    enum { LUT = 0, VALUES = 0, TABLE_BYTES = 0, LANE_BYTES = 4, LINE_BYTES = 0, TILE4 = 0 };
    enum { SINGLE = 0, STEPS = 0, ZEROS = 0, ROUND_EXP2 = 0, RARE = 0 };

    __device__ __forceinline__ void set_zeros(uint32_t)
    {
    }
};

#endif
