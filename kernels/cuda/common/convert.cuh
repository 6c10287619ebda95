/* FP16 and BF16 to FP32 and back, rounding to nearest even. Inline PTX, because including
 * cuda_bf16.h costs a third of a second of compile time per file. */
#ifndef QT_KERNELS_CUDA_COMMON_CONVERT_CUH
#define QT_KERNELS_CUDA_COMMON_CONVERT_CUH

#include <cuda_fp16.h>
#include <stdint.h>

static __device__ __forceinline__ float qt_widen(bool bf16, uint16_t bits)
{
    return bf16 ? __int_as_float(bits << 16) : __half2float(__ushort_as_half(bits));
}

/* Converts two results to 16 bits; x is in the low half of the word. */
static __device__ __forceinline__ uint32_t qt_round_two(bool bf16, float x, float y)
{
    uint32_t two;
    asm("{\n"
        ".reg .pred bf16;\n"
        ".reg .b32 f, b;\n"
        "setp.ne.u32 bf16, %3, 0;\n"
        "cvt.rn.f16x2.f32 f, %1, %2;\n"
        "cvt.rn.bf16x2.f32 b, %1, %2;\n"
        "selp.b32 %0, b, f, bf16;\n"
        "}"
        : "=r"(two)
        : "f"(y), "f"(x), "r"((uint32_t)bf16));
    return two;
}

/* y[at] = v, where y is FP16 or BF16. */
static __device__ __forceinline__ void qt_put_rounded(void *y, size_t at, float v, bool bf16)
{
    uint16_t b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(v));
    ((uint16_t *)y)[at] = bf16 ? b : __half_as_ushort(__float2half(v));
}

/* The values of a word of two. */
static __device__ __forceinline__ float2 qt_float_two(bool bf16, uint32_t two)
{
    if (bf16)
        return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000));
    return __half22float2(*(const __half2 *)&two);
}

#endif
