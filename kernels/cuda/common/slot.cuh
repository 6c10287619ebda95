/* Products of a slot: 128 columns of k, two 16 x 64 blocks of each of STRIPS strips, by one warp.
 */
#ifndef QT_KERNELS_CUDA_COMMON_SLOT_CUH
#define QT_KERNELS_CUDA_COMMON_SLOT_CUH

#include "kernels/cuda/common/accumulators.cuh"
#include "kernels/cuda/matmul/decode.cuh"

/*
 * words(src, u, b) sets where the lane's words of block b of strip u are, by plane; x(t, b, half)
 * is the address for ldmatrix of 32 columns of token tile t; scales those of the slot's first
 * group, in lines of 32 bytes, zeros(u, group) qt_lane_zeros; slot_groups groups in a slot: 1 (or
 * part of one), 2 or 4. two: both blocks.
 */
template <class Format, int MT, int STRIPS, class Words, class X, class Zeros>
static __device__ __forceinline__ void
qt_slot_multiply(qt_accumulators<MT, STRIPS> *total, const qt_decode_args &decode, Words words_at,
                 X x_at, const unsigned char *const scales[STRIPS], Zeros zeros, int slot_groups,
                 bool two, const qt_lane &lane)
{
    qt_accumulators<MT, STRIPS> group = {}, *sums = Format::GROUPED ? &group : total;
#pragma unroll
    for (int b = 0; b < 2; b++) {
        if (b == 1 && !two)
            break;
        Format words[STRIPS];
#pragma unroll
        for (int u = 0; u < STRIPS; u++) {
            const unsigned char *src[3];
            words_at(src, u, b);
            words[u].load(src, decode);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (Format::ZEROS && (half == 0 || slot_groups == 4))
#pragma unroll
                for (int u = 0; u < STRIPS; u++)
                    words[u].set_zeros(zeros(u, slot_groups == 4   ? 2 * b + half
                                                : slot_groups == 2 ? b
                                                                   : 0));
            uint32_t x[MT][4];
#pragma unroll
            for (int t = 0; t < MT; t++)
                ptx_ldmatrix_x4(x[t], x_at(t, b, half));
#pragma unroll
            for (int s = 0; s < 2; s++)
#pragma unroll
                for (int u = 0; u < STRIPS; u++) {
                    uint32_t frag[4];
                    words[u].fragment(frag, 2 * half + s, lane);
#pragma unroll
                    for (int t = 0; t < MT; t++)
                        ptx_mma_f16(sums->v[u][t], frag, x[t][2 * s], x[t][2 * s + 1]);
                }
            if (Format::GROUPED && half == 0 && slot_groups == 4)
                qt_sums_flush<MT, STRIPS>(total, sums, scales, 64 * b);
        }
        if (Format::GROUPED && b == 0 && slot_groups >= 2)
            qt_sums_flush<MT, STRIPS>(total, sums, scales, slot_groups == 4 ? 32 : 0);
    }
    if (Format::GROUPED)
        qt_sums_flush<MT, STRIPS>(total, sums, scales, 32 * (slot_groups - 1));
}

#endif
