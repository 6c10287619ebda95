/* FP16 or BF16 as FP32, and FP32 as these, to nearest. (By instructions: cuda_bf16.h is a third of
 * a second to compile, in each file.) */
#ifndef QT_CUDA_ROUND_CUH
#define QT_CUDA_ROUND_CUH

#include <cuda_fp16.h>
#include <stdint.h>

static __device__ __forceinline__ float qt_widen(bool bf16, uint16_t bits)
{
    return bf16 ? __int_as_float(bits << 16) : __half2float(__ushort_as_half(bits));
}

/* Two results as a word, the first in the low half. */
static __device__ __forceinline__ uint32_t qt_round_two(bool bf16, float x, float y)
{
    uint32_t b;
    __half2 h = __floats2half2_rn(x, y);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(b) : "f"(y), "f"(x));
    return bf16 ? b : *(uint32_t *)&h;
}

/* y[at] = v; y: FP16 or BF16. */
static __device__ __forceinline__ void qt_put_rounded(void *y, size_t at, float v, bool bf16)
{
    uint16_t b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(v));
    ((uint16_t *)y)[at] = bf16 ? b : __half_as_ushort(__float2half(v));
}

#endif
