/* Records of MIX24 experts: which units have 4-bit groups, and where they are in the stream. */
#ifndef QT_KERNELS_CUDA_MOE_MIX24_RECORD_CUH
#define QT_KERNELS_CUDA_MOE_MIX24_RECORD_CUH

#include "kernels/cuda/moe/mix24.h"

/* Units of 4-bit groups before unit u: floor(u fours / units). The quotient is at most 512, so its
 * rounding error is below 1 / (2 units). */
static __device__ __forceinline__ int moe24_fours_before(const qt_moe_mix24_args &a, int u)
{
    return (int)(((float)(u * a.fours) + .5f) * a.unit_inverse);
}

static __device__ __forceinline__ bool moe24_is_four(const qt_moe_mix24_args &a, int u)
{
    return moe24_fours_before(a, u + 1) > moe24_fours_before(a, u);
}

/* Offset of unit u in a strip. */
static __device__ __forceinline__ uint32_t moe24_record_at(const qt_moe_mix24_args &a, int u)
{
    return (uint32_t)(u * QTOOL_MATMUL_MIX24_TWO +
                      moe24_fours_before(a, u) *
                          (QTOOL_MATMUL_MIX24_FOUR - QTOOL_MATMUL_MIX24_TWO));
}

/* Bytes of X of a chunk of 8 channels from `channel` on; 0 beyond the last. */
static __device__ __forceinline__ uint32_t moe24_chunk_bytes(const qt_moe_mix24_args &a,
                                                             int channel)
{
    return (uint32_t)max(min((a.k - channel) * 2, 16), 0);
}

#endif
