/* Shared by the programs of tests/gpu: random data on the device. */
#ifndef QT_TESTS_GPU_CUH
#define QT_TESTS_GPU_CUH

#include "tests/gpu/reference.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __host__ __device__ inline uint32_t hash32(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    x ^= x >> 33;
    return (uint32_t)x;
}

static __global__ void fill_bits_kernel(uint32_t *p, size_t n, uint64_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] = hash32(i * 2654435761u + seed);
}

static __global__ void fill_half_kernel(__half *p, size_t n, uint64_t seed, float lo, float hi)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] = __float2half(lo + (hi - lo) * (hash32(i * 2654435761u + seed) * 0x1p-32f));
}

static inline void fill_bits(void *p, size_t bytes, uint64_t seed)
{
    fill_bits_kernel<<<1024, 256>>>((uint32_t *)p, bytes / 4, seed);
    CHECK(cudaGetLastError());
}

static inline void fill_half(void *p, size_t n, uint64_t seed, float lo, float hi)
{
    fill_half_kernel<<<1024, 256>>>((__half *)p, n, seed, lo, hi);
    CHECK(cudaGetLastError());
}

#endif
