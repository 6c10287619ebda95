/*
 * Packed codes -> A operand of mma.sync m16n8k16: one struct per code format. The layout is drawn
 * in pack/layouts/layout_frag.h; here is what each format does with the words of a lane.
 *
 *     WIDTH0..2     bits of its planes, 0 where there is none
 *     LUT           codes are looked up, not computed:
 *     VALUES        in registers of the lane
 *     TABLE_BYTES   in a table in shared memory, of so many bytes; 0: there is none
 *     LINE_BYTES    of an entry for all lanes
 *     LANE_BYTES    of it, that a lane reads
 *     SINGLE        an entry is one code's value, not two codes'
 *     TILE4         see qt_decode_tile4
 *     STEPS         a table of steps
 *     code          of a nibble; step_code, with a table of steps, of one of an even or odd step
 *     GROUPED       a scale per group; else per row
 *     load          the words of one 16 x 64 block from global memory: src[i] is the lane's part of
 *                   plane i
 *     ZEROS         bytes of the zero points of 16 rows and a group; 0: it has none
 *     set_zeros     at the beginning of a group, qt_lane_zeros of it
 *     fragment      operand registers of k-step s as FP16x2
 *     ROUND_EXP2    fragments times 2^ROUND_EXP2 and a stored scale, below 2^15, are within the
 *                   range of FP16 and use it well: of those with a scale per group
 *     RARE          only as many kernels as it takes to be no slower than without: each takes a
 *                   second to compile
 *
 * Values may come out as the true ones times a power of two (qt_result_factor).
 */
#ifndef QT_KERNELS_CUDA_MATMUL_DECODE_FORMAT_CUH
#define QT_KERNELS_CUDA_MATMUL_DECODE_FORMAT_CUH

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/matmul/decode.h"

/* Bits of plane p. */
template <class Format> static __device__ __forceinline__ constexpr int qt_plane_width(int p)
{
    return p == 0 ? Format::WIDTH0 : p == 1 ? Format::WIDTH1 : Format::WIDTH2;
}

/* Bytes of a lane's words of plane p, of a 16 x 64 block. */
template <class Format> static __device__ __forceinline__ constexpr int qt_lane_width(int p)
{
    return 4 * qt_plane_width<Format>(p);
}

/* The zero points of the lane's two rows g and g + 8, as they stand in those of a group. */
template <class Format>
static __device__ __forceinline__ uint32_t qt_lane_zeros(const qt_decode_args &d,
                                                         const unsigned char *group)
{
    const unsigned g = threadIdx.x % 32 / 4;
    if (Format::ZEROS == 8)
        return group[g];
    return d.zeros ? ((const uint16_t *)group)[g] : 0x8080u;
}

/* What a lane has besides its words. */
struct qt_lane {
    uint32_t bytes;           /* where in a line of the table its copy is */
    uint32_t low[2], high[2]; /* halves of the values of up to eight nibbles, a byte each */
};

/* What formats without a table or without zero points have of these. */
struct qt_decode_plain {
    enum { LUT = 0, VALUES = 0, TABLE_BYTES = 0, LANE_BYTES = 4, LINE_BYTES = 0, TILE4 = 0 };
    enum { SINGLE = 0, STEPS = 0, ZEROS = 0, ROUND_EXP2 = 0, RARE = 0 };

    __device__ __forceinline__ void set_zeros(uint32_t)
    {
    }
};

/* The table is at the start of dynamic shared memory: loads then need no base register. */
extern __shared__ __align__(1024) unsigned char qt_smem[];

#endif
