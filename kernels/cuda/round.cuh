/* Two results as a word of FP16 or BF16, the first in the low half. */
#ifndef QT_CUDA_ROUND_CUH
#define QT_CUDA_ROUND_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

static __device__ __forceinline__ uint32_t qt_round_two(bool bf16, float x, float y)
{
    __nv_bfloat162 b = __floats2bfloat162_rn(x, y);
    __half2 h = __floats2half2_rn(x, y);
    return bf16 ? *(uint32_t *)&b : *(uint32_t *)&h;
}

#endif
