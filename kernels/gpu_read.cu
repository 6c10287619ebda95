/*
 * The read floor: every byte of an array into registers once, by plain 16-byte streaming loads.
 *
 *   src    any bytes, 16-byte aligned, a multiple of 16
 *   sink   U32 [1], written only in a case that does not happen, so that loads are not dropped
 *   grid   1, 2 or 4 blocks per SM of 256 or 512 threads, 8 or 16 loads in flight per thread:
 *          the caller takes the fastest
 */
#include "kernels/gpu_internal.h"

#include <cuda_runtime.h>
#include <stdint.h>

template <int UNROLL>
static __global__ void __launch_bounds__(512) read_kernel(const uint4 *src, size_t n, uint32_t *sink)
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
            sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    if (sum == 0x12345679)
        *sink = sum;
}

int gpu_read_launch(void *sink, const void *src, size_t bytes, int shape, int sms, void *stream)
{
    const unsigned blocks = (unsigned)(sms << shape / 4), threads = shape % 4 / 2 ? 512 : 256;
    const uint4 *from = (const uint4 *)src;
    if (shape % 2)
        read_kernel<16><<<blocks, threads, 0, (cudaStream_t)stream>>>(from, bytes / 16,
                                                                      (uint32_t *)sink);
    else
        read_kernel<8><<<blocks, threads, 0, (cudaStream_t)stream>>>(from, bytes / 16,
                                                                     (uint32_t *)sink);
    return (int)cudaGetLastError();
}
