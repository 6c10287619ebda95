/* mma.sync products of a warp over 128 columns of k: two fragment blocks (16 x 64) of each of
 * STRIPS strips. Used by the skinny and stream kernels. */
#ifndef QT_KERNELS_CUDA_MATMUL_WARP_MMA_CUH
#define QT_KERNELS_CUDA_MATMUL_WARP_MMA_CUH

#include "kernels/cuda/common/accumulators.cuh"
#include "kernels/cuda/matmul/decode.cuh"

/*
 * total += products of the 128 columns.
 *
 *     words_at(src, u, b)    sets src[p] to the lane's words of plane p in block b of strip u
 *     x_at(t, b, half)       ldmatrix address of 32 columns of token tile t
 *     scales[u]              the lane's scales of the first group of strip u; groups are 32 bytes
 *                            apart
 *     zeros(u, group)        qt_lane_zeros of a group of strip u
 *     slot_groups            groups in the 128 columns: 1 (or part of one), 2 or 4
 *     two                    false: only the first fragment block exists
 */
template <class Format, int MT, int STRIPS, class Words, class X, class Zeros>
static __device__ __forceinline__ void
qt_warp_mma(qt_accumulators<MT, STRIPS> *total, const qt_decode_args &decode, Words words_at,
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
                qt_accumulators_flush<MT, STRIPS>(total, sums, scales, 64 * b);
        }
        if (Format::GROUPED && b == 0 && slot_groups >= 2)
            qt_accumulators_flush<MT, STRIPS>(total, sums, scales, slot_groups == 4 ? 32 : 0);
    }
    if (Format::GROUPED)
        qt_accumulators_flush<MT, STRIPS>(total, sums, scales, 32 * (slot_groups - 1));
}

#endif
