/* FP16 numbers that are scaled by a power of two. */
#ifndef QT_KERNELS_GPU_HALF_CUH
#define QT_KERNELS_GPU_HALF_CUH

#include "kernels/gpu/block.cuh"
#include "kernels/gpu/internal.h"

#include <cuda_fp16.h>
#include <math.h>

/* The power of two that brings a magnitude below 2^15; 1 for 0, tiny numbers, infinity and NaN. */
static __device__ __forceinline__ float half_scale(uint32_t largest)
{
    const int exponent = (int)(largest >> 23) - 127;
    return exponent > -100 && exponent < 128 ? ldexpf(1, 14 - exponent) : 1;
}

#endif
