/* mma.sync products of a warp over a mix24 unit (128 columns), for the vector, skinny and ring
 * kernels. */
#ifndef QT_KERNELS_CUDA_MIX24_WARP_MMA_CUH
#define QT_KERNELS_CUDA_MIX24_WARP_MMA_CUH

#include "kernels/cuda/common/accumulators.cuh"
#include "kernels/cuda/mix24/decode.cuh"

/* sums += products of a unit for STRIPS strips. record: shared addresses, by strip. x_of.load(v, b,
 * half): loads what the lane needs of block b for each token tile, 8 of the 16 columns of its
 * group. */
template <bool FOUR, int MT, int STRIPS, class X>
static __device__ __forceinline__ void mix24_unit_mma(qt_accumulators<MT, STRIPS> *sums,
                                                      const uint32_t record[STRIPS], const X &x_of,
                                                      int lane)
{
    mix24_meta meta[STRIPS];
    uint4 two[STRIPS];
#pragma unroll
    for (int u = 0; u < STRIPS; u++) {
        meta[u] = mix24_shared_meta<FOUR>(record[u], lane);
        if (!FOUR)
            two[u] = ptx_load_16(record[u] + lane * 16);
    }
#pragma unroll
    for (int b = 0; b < 2; b++) {
        mix24_group group[STRIPS];
        uint32_t words[STRIPS][4];
#pragma unroll
        for (int u = 0; u < STRIPS; u++) {
            group[u] = b ? mix24_open_group<FOUR, 1>(meta[u]) : mix24_open_group<FOUR, 0>(meta[u]);
            uint4 v = FOUR ? ptx_load_16(record[u] + b * 512 + lane * 16)
                      : b  ? make_uint4(two[u].z, two[u].w, 0, 0)
                           : two[u];
            words[u][0] = v.x;
            words[u][1] = v.y;
            words[u][2] = v.z;
            words[u][3] = v.w;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 x[MT];
            x_of.load(x, b, half);
#pragma unroll
            for (int s = 0; s < 2; s++)
#pragma unroll
                for (int u = 0; u < STRIPS; u++) {
                    uint32_t frag[4];
                    mix24_fragment<FOUR>(frag, words[u], 2 * half + s, group[u]);
#pragma unroll
                    for (int t = 0; t < MT; t++)
                        ptx_mma_f16(sums->v[u][t], frag, s ? x[t].z : x[t].x, s ? x[t].w : x[t].y);
                }
        }
    }
}

#endif
