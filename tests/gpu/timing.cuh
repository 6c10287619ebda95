/* Random data, timing of kernels with cold caches, and the read floor. */
#ifndef QT_TESTS_GPU_TIMING_CUH
#define QT_TESTS_GPU_TIMING_CUH

#include "tests/gpu/reference.h"

#include <algorithm>
#include <chrono>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>
#include <vector>

static __global__ void fill_bits_kernel(uint32_t *p, size_t n, uint64_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] = gpu_hash(i * 2654435761u + seed);
}

static __global__ void fill_half_kernel(__half *p, size_t n, uint64_t seed, float lo, float hi)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] = __float2half(lo + (hi - lo) * (gpu_hash(i * 2654435761u + seed) * 0x1p-32f));
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

struct timing {
    cudaStream_t stream;
    int replays, sms;
    size_t cold_bytes; /* size of all copies of the data */
    mutable std::chrono::steady_clock::time_point
        rested; /* time when the GPU clock has recovered */
};

static inline struct timing timing_new(const cudaDeviceProp &device)
{
    struct timing t = {};
    t.replays = 11;
    t.sms = device.multiProcessorCount;
    t.cold_bytes = (size_t)device.l2CacheSize * 4;
    CHECK(cudaStreamCreate(&t.stream));
    return t;
}

static inline int copies_of(const struct timing &t, size_t bytes)
{
    size_t c = t.cold_bytes / bytes + 1;
    return (int)(c < 2 ? 2 : c > 128 ? 128 : c);
}

/* Returns the microseconds per launch. launch(copy) only enqueues on t.stream. Launches over all
 * copies are captured into one CUDA graph; the result is the median of its replays. */
template <class F> static double time_us(const struct timing &t, int copies, F launch)
{
    int rounds = copies < 8 ? (8 + copies - 1) / copies * copies : copies;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    std::vector<float> us;
    launch(0);
    CHECK(cudaStreamSynchronize(t.stream));
    CHECK(cudaStreamBeginCapture(t.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < rounds; i++)
        launch(i % copies);
    CHECK(cudaStreamEndCapture(t.stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::this_thread::sleep_until(t.rested);
    double busy_ms = 0;
    for (int i = 0; i < t.replays + 2; i++) {
        float ms;
        CHECK(cudaEventRecord(begin, t.stream));
        CHECK(cudaGraphLaunch(exec, t.stream));
        CHECK(cudaEventRecord(end, t.stream));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        busy_ms += ms;
        if (i >= 2)
            us.push_back(ms * 1000 / (float)rounds);
        if (i == 0 && ms > 60) /* long enough for a single measurement */
            i = t.replays - 1;
    }
    /* Long products lower the clock: wait as kernels/gpu/cuda.c does. */
    t.rested = std::chrono::steady_clock::now() +
               std::chrono::milliseconds((int)std::min(3 * busy_ms, 150.));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

template <int UNROLL>
static __global__ void __launch_bounds__(512) read_kernel(const uint4 *p, size_t n, uint32_t *out)
{
    size_t stride = (size_t)gridDim.x * blockDim.x;
    uint32_t sum = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += stride * UNROLL) {
        uint4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            v[u] = i + u * stride < n ? __ldcs(p + i + u * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    if (sum == 0x12345679)
        *out = sum;
}

/* Returns the read floor: the time of reading `bytes` of each copy, of the fastest of some grids.
 */
static inline double read_floor(const struct timing &t, const char *base, size_t bytes, int copies)
{
    static uint32_t *out = (uint32_t *)gpu_alloc(64);
    double best = 1e30;
    for (int per_sm = 1; per_sm <= 4; per_sm *= 2)
        best = std::min(best, time_us(t, copies, [&](int c) {
                            read_kernel<16><<<t.sms * per_sm, 512, 0, t.stream>>>(
                                (const uint4 *)(base + (size_t)c * bytes), bytes / 16, out);
                        }));
    return best;
}

#endif
