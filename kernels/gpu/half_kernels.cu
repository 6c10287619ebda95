/* Factors of products in FP16: see gpu_math_to_half in internal.h. */
#include "kernels/gpu/half.cuh"

#include <cuda_runtime.h>

/* Four numbers at a time where rows have no gaps between them. */
static bool by_four(const void *x, const void *z, size_t count, size_t k, size_t ld)
{
    return k == ld && count % 4 == 0 && (uintptr_t)x % 16 == 0 && (uintptr_t)z % 8 == 0;
}

template <bool FOUR>
static __global__ void largest_kernel(uint32_t *largest, const float *x, size_t count, size_t k,
                                      size_t ld)
{
    uint32_t most = 0;
    if (FOUR) {
        FOR_ELEMENTS(i, count / 4)
        {
            const float4 v = ((const float4 *)x)[i];
            most = larger(larger(larger(larger(most, v.x), v.y), v.z), v.w);
        }
    } else {
        FOR_ELEMENTS(i, count)
        most = larger(most, x[k == ld ? i : i / k * ld + i % k]);
    }
    note_largest(largest, most);
}

template <bool FOUR>
static __global__ void to_half_kernel(__half *z, const uint32_t *largest, const float *x,
                                      size_t count, size_t k, size_t ld)
{
    const float scale = half_scale(*largest);
    if (FOUR) {
        FOR_ELEMENTS(i, count / 4)
        {
            const float4 v = ((const float4 *)x)[i];
            const __half2 low = __floats2half2_rn(v.x * scale, v.y * scale);
            const __half2 high = __floats2half2_rn(v.z * scale, v.w * scale);
            ((uint2 *)z)[i] = make_uint2(*(const unsigned *)&low, *(const unsigned *)&high);
        }
    } else {
        FOR_ELEMENTS(i, count)
        z[i] = __float2half_rn(x[k == ld ? i : i / k * ld + i % k] * scale);
    }
}

static __global__ void half_factors_kernel(float *factors, const uint32_t *largest_a,
                                           const uint32_t *largest_b, float alpha, float beta)
{
    factors[0] = alpha / half_scale(*largest_a) / half_scale(*largest_b);
    factors[1] = beta;
}

int gpu_math_largest(uint32_t *largest, const float *x, size_t rows, size_t k, size_t ld,
                     void *stream)
{
    const size_t count = rows * k;
    return by_four(x, x, count, k, ld) ? LAUNCH(largest_kernel<true>, few_blocks_for(count / 4),
                                                THREADS, stream, largest, x, count, k, ld)
                                       : LAUNCH(largest_kernel<false>, few_blocks_for(count),
                                                THREADS, stream, largest, x, count, k, ld);
}

int gpu_math_to_half(void *z, const uint32_t *largest, const float *x, size_t rows, size_t k,
                     size_t ld, void *stream)
{
    const size_t count = rows * k;
    return by_four(x, z, count, k, ld)
               ? LAUNCH(to_half_kernel<true>, blocks_for(count / 4), THREADS, stream, (__half *)z,
                        largest, x, count, k, ld)
               : LAUNCH(to_half_kernel<false>, blocks_for(count), THREADS, stream, (__half *)z,
                        largest, x, count, k, ld);
}

int gpu_math_half_factors(float *factors, const uint32_t *largest_a, const uint32_t *largest_b,
                          float alpha, float beta, void *stream)
{
    return LAUNCH(half_factors_kernel, 1, 1, stream, factors, largest_a, largest_b, alpha, beta);
}
