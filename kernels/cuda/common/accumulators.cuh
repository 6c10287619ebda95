/* FP32 accumulators of mma.sync m16n8k16 for a warp tile of STRIPS strips (16 rows each) and MT
 * token tiles (8 tokens each). Used by all kernels that multiply with mma.sync. */
#ifndef QT_KERNELS_CUDA_COMMON_ACCUMULATORS_CUH
#define QT_KERNELS_CUDA_COMMON_ACCUMULATORS_CUH

#include <cuda_fp16.h>
#include <stdint.h>

template <int MT, int STRIPS> struct qt_accumulators {
    float v[STRIPS][MT][4]; /* rows g, g + 8 x tokens 2t, 2t + 1 */
};

/* The accumulators of the first N strips. */
template <int N, int MT, int STRIPS>
static __device__ __forceinline__ qt_accumulators<MT, N> *
qt_accumulators_first(qt_accumulators<MT, STRIPS> *sums)
{
    static_assert(N <= STRIPS, "N exceeds STRIPS");
    return (qt_accumulators<MT, N> *)sums;
}

/* total += sums * scale; sums = 0. scales[u] points to the lane's scale words of strip u; `at` is
 * the byte offset of the group in them. */
template <int MT, int STRIPS>
static __device__ __forceinline__ void
qt_accumulators_flush(qt_accumulators<MT, STRIPS> *total, qt_accumulators<MT, STRIPS> *sums,
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

/* The scales of the lane's two rows. A scale of 0 is replaced by 2^-60, which FP16 rounds to 0 and
 * by which the kernels can divide. */
static __device__ __forceinline__ float2 qt_scale_unit(__half2 stored)
{
    float2 s = __half22float2(stored);
    s.x = s.x == 0 ? 0x1p-60f : s.x;
    s.y = s.y == 0 ? 0x1p-60f : s.y;
    return s;
}

/* Bits that depend on every accumulator. A value computed from them cannot be moved before the last
 * mma.sync. */
template <int MT, int STRIPS>
static __device__ __forceinline__ uint32_t
qt_accumulators_bits(const qt_accumulators<MT, STRIPS> &sums)
{
    uint32_t bits = 0;
#pragma unroll
    for (int u = 0; u < STRIPS; u++)
#pragma unroll
        for (int t = 0; t < MT; t++)
            bits |= __float_as_uint(sums.v[u][t][3]);
    return bits;
}

/* Stores the accumulators of a warp to shared memory as [m][pitch], rows fastest. A pitch of 16 i +
 * 4 words puts the four tokens that a warp stores at a time into different banks. */
template <int MT, int STRIPS>
static __device__ __forceinline__ void
qt_accumulators_store(float *to, int pitch, int m, const qt_accumulators<MT, STRIPS> &sums)
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
