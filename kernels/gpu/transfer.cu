/*
 * Measures the memory bandwidth for the read floor of benchmarks: reads every byte of an array once
 * with 16-byte streaming loads, and writes it to another array in the copy variant.
 *
 *   src    16-byte aligned; the size is a multiple of 16 bytes
 *   dst    the copy; for reads a U32 that is written only in a case that does not occur, so that
 *          the compiler keeps the loads
 *   grid   1, 2 or 4 thread blocks per SM of 256 or 512 threads, 8 or 16 loads in flight per
 *          thread; the caller measures all and takes the fastest
 */
#include "kernels/gpu/internal.h"

#include <cuda_runtime.h>
#include <stdint.h>

template <int UNROLL, bool COPY>
static __global__ void __launch_bounds__(512) transfer_kernel(void *dst, const uint4 *src, size_t n)
{
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    uint32_t sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += stride * UNROLL) {
        uint4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            v[u] = i + u * stride < n ? __ldcs(src + i + u * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (!COPY)
                sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
            else if (i + u * stride < n)
                __stcs((uint4 *)dst + i + u * stride, v[u]);
    }
    if (!COPY && sum == 0x12345679)
        *(uint32_t *)dst = sum;
}

/* shape: bit 0 selects 16 loads, bit 1 512 threads; shape / 4 is log2 of the thread blocks per
 * SM. */
int gpu_transfer_launch(void *dst, const void *src, size_t bytes, bool copy, int shape, int sms,
                        void *stream)
{
    static const void *const kernels[] = {
        (const void *)transfer_kernel<8, false>,
        (const void *)transfer_kernel<16, false>,
        (const void *)transfer_kernel<8, true>,
        (const void *)transfer_kernel<16, true>,
    };
    const unsigned blocks = (unsigned)(sms << shape / 4), threads = shape % 4 / 2 ? 512 : 256;
    size_t n = bytes / 16;
    void *args[] = {&dst, &src, &n};
    return (int)cudaLaunchKernel(kernels[2 * copy + shape % 2], dim3(blocks), dim3(threads), args,
                                 0, (cudaStream_t)stream);
}
