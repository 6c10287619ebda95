/* FP32 sums of mma.sync m16n8k16: of STRIPS strips of 16 rows and MT token tiles of 8. */
#ifndef QT_KERNELS_CUDA_COMMON_SUMS_CUH
#define QT_KERNELS_CUDA_COMMON_SUMS_CUH

#include <cuda_fp16.h>
#include <stdint.h>

template <int MT, int STRIPS> struct qt_accumulators {
    float v[STRIPS][MT][4]; /* rows g, g + 8 x tokens 2t, 2t + 1 */
};

/* Those of the first N strips. */
template <int N, int MT, int STRIPS>
static __device__ __forceinline__ qt_accumulators<MT, N> *
qt_sums_first(qt_accumulators<MT, STRIPS> *sums)
{
    static_assert(N <= STRIPS, "of those that there are");
    return (qt_accumulators<MT, N> *)sums;
}

/* total += sums * scale; sums = 0. scales: the lane's words of the group for the first strip, those
 * of the next `pitch` bytes further. */
template <int MT, int STRIPS>
static __device__ __forceinline__ void
qt_sums_flush(qt_accumulators<MT, STRIPS> *total, qt_accumulators<MT, STRIPS> *sums,
              const unsigned char *const scales[STRIPS], int at)
{
#pragma unroll
    for (int u = 0; u < STRIPS; u++) {
        float2 s = __half22float2(*(const __half2 *)(scales[u] + at));
#pragma unroll
        for (int t = 0; t < MT; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                total->v[u][t][i] += sums->v[u][t][i] * (i < 2 ? s.x : s.y);
                sums->v[u][t][i] = 0;
            }
    }
}

/* The scales of a lane's two rows, as units of sums. A scale of 0 counts as 2^-60, which is 0 to
 * FP16 and can be divided by. */
static __device__ __forceinline__ float2 qt_scale_unit(__half2 stored)
{
    float2 s = __half22float2(stored);
    s.x = s.x == 0 ? 0x1p-60f : s.x;
    s.y = s.y == 0 ? 0x1p-60f : s.y;
    return s;
}

/* Bits that are not known before all of the sums are. */
template <int MT, int STRIPS>
static __device__ __forceinline__ uint32_t qt_sums_bits(const qt_accumulators<MT, STRIPS> &sums)
{
    uint32_t bits = 0;
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
#pragma unroll
        for (int t = 0; t < MT; t++)
            bits |= __float_as_uint(sums.v[u][t][3]);
    return bits;
}

/* Sums of a warp into shared memory, at `to`: [m][pitch] of which rows are the last. A pitch of 4
 * more than a multiple of 16 puts the four tokens that a warp writes at a time into different
 * banks. */
template <int MT, int STRIPS>
static __device__ __forceinline__ void qt_sums_put(float *to, int pitch, int m,
                                                   const qt_accumulators<MT, STRIPS> &sums)
{
    const int lane = (int)threadIdx.x % 32, token0 = lane % 4 * 2;
    to += lane / 4;
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int token = t * 8 + token0 + h;
            if (token < m)
#pragma unroll
                for (int u = 0; u < STRIPS; u++) {
                    to[token * pitch + u * 16] = sums.v[u][t][h];
                    to[token * pitch + u * 16 + 8] = sums.v[u][t][2 + h];
                }
        }
}

#endif
