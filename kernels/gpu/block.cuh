/* The kernels of the CUDA backend share these loops, reductions of a thread block, and launches. */
#ifndef QT_KERNELS_GPU_BLOCK_CUH
#define QT_KERNELS_GPU_BLOCK_CUH

#include <cuda_runtime.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

enum { THREADS = 256, WARPS = THREADS / 32 };

static unsigned blocks_for(size_t count)
{
    const size_t blocks = (count + THREADS - 1) / THREADS;
    return (unsigned)(blocks < 1 << 20 ? blocks : 1 << 20);
}

/* Thread blocks of a kernel whose warps end with more work than a few elements. */
static unsigned few_blocks_for(size_t count)
{
    const unsigned blocks = blocks_for(count);
    return blocks < 4096 ? blocks : 4096;
}

/* Grid-stride loop over `count` elements. */
#define FOR_ELEMENTS(i, count)                                                                     \
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < (count);                       \
         i += (size_t)gridDim.x * THREADS)

/* ---- thread block reductions ---------------------------------------------------------------- */

struct largest {
    float value;
    int index;
};

static __device__ __forceinline__ double join(double a, double b)
{
    return a + b;
}

/* Maximum; the lowest index of equal values. */
static __device__ __forceinline__ largest join(largest a, largest b)
{
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

static __device__ __forceinline__ double from_lane(double v, int mask)
{
    return __shfl_xor_sync(~0u, v, mask);
}

static __device__ __forceinline__ largest from_lane(largest v, int mask)
{
    return {__shfl_xor_sync(~0u, v.value, mask), __shfl_xor_sync(~0u, v.index, mask)};
}

/* Reduces v over the thread block; all threads get the result. */
template <class T> static __device__ __forceinline__ T block_join(T v)
{
    __shared__ T part[WARPS];
    for (int mask = 16; mask; mask /= 2)
        v = join(v, from_lane(v, mask));
    __syncthreads(); /* the previous result has been read */
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    v = part[0];
    for (int i = 1; i < WARPS; i++)
        v = join(v, part[i]);
    return v;
}

/* ---- largest magnitudes --------------------------------------------------------------------- */

/* The larger magnitude, as its bits, which compare like it. Infinities and NaN count as well. */
static __device__ __forceinline__ uint32_t larger(uint32_t most, float x)
{
    return max(most, __float_as_uint(x) & 0x7fffffff);
}

/* Raises *to to the largest of the warp; to: NULL, or device memory. All lanes call it. */
static __device__ __forceinline__ void note_largest(uint32_t *to, uint32_t most)
{
    if (!to)
        return;
    for (int mask = 16; mask; mask /= 2)
        most = max(most, __shfl_xor_sync(~0u, most, mask));
    if (threadIdx.x % 32 == 0 && most > *to)
        atomicMax(to, most);
}

/* ---- rows of scores and logits -------------------------------------------------------------- */

static __device__ __forceinline__ float capped(float x, float softcap)
{
    return softcap > 0 ? softcap * tanhf(x / softcap) : x;
}

struct row_stats {
    largest top;
    double lse;
};

static __device__ row_stats stats_of(const float *row, float softcap, size_t vocab)
{
    row_stats s = {{-INFINITY, 0}, 0};
    double sum = 0;
    for (size_t i = threadIdx.x; i < vocab; i += THREADS)
        s.top = join(s.top, largest{capped(row[i], softcap), (int)i});
    s.top = block_join(s.top);
    for (size_t i = threadIdx.x; i < vocab; i += THREADS)
        sum += (double)expf(capped(row[i], softcap) - s.top.value);
    s.lse = (double)s.top.value + log(block_join(sum));
    return s;
}

/* ---- launches ------------------------------------------------------------------------------- */

#define LAUNCH(kernel, blocks, threads, stream, ...)                                               \
    (kernel<<<(blocks), (threads), 0, (cudaStream_t)(stream)>>>(__VA_ARGS__),                      \
     (int)cudaGetLastError())

#endif
