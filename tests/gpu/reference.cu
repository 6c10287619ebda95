/* Products in FP64 and comparisons, for the GPU tests. */
#include "tests/gpu/reference.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static __device__ double to_double(const void *x, size_t i, int bf16)
{
    return bf16 ? (double)__bfloat162float(((const __nv_bfloat16 *)x)[i])
                : (double)__half2float(((const __half *)x)[i]);
}

static __device__ double rounded(double v, int bf16)
{
    return bf16 ? (double)__bfloat162float(__double2bfloat16(v))
                : (double)__half2float(__double2half(v));
}

static __global__ void reference_kernel(double *y, const void *x, const float *w, int n, int k,
                                        size_t pitch, int bf16, struct gpu_rounding weights)
{
    int row = (int)(blockIdx.x * blockDim.x + threadIdx.x), token = (int)blockIdx.y;
    if (row >= n)
        return;
    double sum = 0;
    for (int i = 0; i < k; i++) {
        const double v = w[row * pitch + i];
        sum += to_double(x, (size_t)token * k + i, bf16) *
               (weights.unit ? rounded(v / weights.unit, weights.bf16) * weights.unit : v);
    }
    y[(size_t)token * n + row] = sum;
}

/* Adds squares to sums: of a - reference, of the rounding errors of the reference, of the
 * reference. */
static __global__ void compare_kernel(double *sums, const void *a, const double *reference,
                                      size_t count, int bf16)
{
    double d2 = 0, rounding2 = 0, r2 = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        const double r = reference[i], d = to_double(a, i, bf16) - r, own = rounded(r, bf16) - r;
        d2 += d * d;
        rounding2 += own * own;
        r2 += r * r;
    }
    atomicAdd(&sums[0], d2);
    atomicAdd(&sums[1], rounding2);
    atomicAdd(&sums[2], r2);
}

void *gpu_alloc(size_t bytes)
{
    void *p = NULL;
    CHECK(cudaMalloc(&p, bytes ? bytes : 1));
    return p;
}

void gpu_reference(double *y, const void *x, const float *w, size_t m, size_t n, size_t k,
                   size_t pitch, int bf16, struct gpu_rounding weights)
{
    dim3 grid((unsigned)((n + 63) / 64), (unsigned)m);
    reference_kernel<<<grid, 64>>>(y, x, w, (int)n, (int)k, pitch, bf16, weights);
    CHECK(cudaGetLastError());
}

static __global__ void dense_kernel(uint16_t *y, size_t ldy, const uint16_t *x, const uint16_t *w,
                                    size_t n, size_t k, int bf16)
{
    size_t row = blockIdx.x * (size_t)blockDim.x + threadIdx.x, token = blockIdx.y;
    float sum = 0;
    if (row >= n)
        return;
    for (size_t i = 0; i < k; i++)
        sum += (float)(to_double(x, token * k + i, bf16) * to_double(w, row * k + i, bf16));
    y[token * ldy + row] =
        bf16 ? __bfloat16_as_ushort(__float2bfloat16(sum)) : __half_as_ushort(__float2half(sum));
}

int gpu_dense(void *, void *y, size_t ldy, const void *x, const void *w, size_t m, size_t n,
              size_t k, enum qtool_dtype dtype, void *stream)
{
    dim3 grid((unsigned)((n + 63) / 64), (unsigned)m);
    dense_kernel<<<grid, 64, 0, (cudaStream_t)stream>>>(
        (uint16_t *)y, ldy, (const uint16_t *)x, (const uint16_t *)w, n, k, dtype == QTOOL_BF16);
    return cudaGetLastError() != cudaSuccess;
}

static __global__ void all_are_kernel(int *others, uint32_t word, const uint32_t *p, size_t words)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < words;
         i += (size_t)gridDim.x * blockDim.x)
        if (p[i] != word)
            *others = 1;
}

bool gpu_all_are(uint32_t word, const void *p, size_t words)
{
    static int *device = NULL;
    int others = 0;
    if (!device)
        device = (int *)gpu_alloc(sizeof *device);
    CHECK(cudaMemcpy(device, &others, sizeof others, cudaMemcpyHostToDevice));
    all_are_kernel<<<64, 256>>>(device, word, (const uint32_t *)p, words);
    CHECK(cudaMemcpy(&others, device, sizeof others, cudaMemcpyDeviceToHost));
    return !others;
}

/* Launched with few thread blocks, so that those of the next kernel fit beside them. */
static __global__ void write_late_kernel(uint16_t *to, const uint16_t *x, size_t count)
{
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    const long long begin = clock64();
    while (clock64() - begin < 60000) /* 30 us, in which the next kernel starts */
        ;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x)
        to[i] = x[i];
}

void gpu_write_late(uint16_t *to, const uint16_t *x, size_t count)
{
    write_late_kernel<<<8, 256>>>(to, x, count);
    CHECK(cudaGetLastError());
}

struct gpu_error gpu_error_of(const void *y, const double *reference, size_t count, int bf16)
{
    static double *device = NULL;
    double sums[3] = {0, 0, 0};
    if (!device)
        device = (double *)gpu_alloc(sizeof sums);
    CHECK(cudaMemcpy(device, sums, sizeof sums, cudaMemcpyHostToDevice));
    compare_kernel<<<64, 256>>>(device, y, reference, count, bf16);
    CHECK(cudaMemcpy(sums, device, sizeof sums, cudaMemcpyDeviceToHost));
    if (sums[0] == 0)
        return gpu_error{0, 0};
    if (!(sums[0] / sums[2] >= 0 &&
          sums[1] / sums[2] < INFINITY)) /* NaN, or a reference beyond the range of the type */
        return gpu_error{INFINITY, 0};
    return gpu_error{sqrt(sums[0] / sums[2]), sqrt(sums[1] / sums[2])};
}
