/*
 * For kernel authors: the cost of other instructions beside Hopper's wgmma, whose accumulators are
 * in the registers that these instructions read and write. One thread block per multiprocessor, all
 * operands in shared memory; clocks of the slowest thread block. Weights are A operands from
 * registers, as in kernels/cuda/matmul/tile.cuh.
 *
 * usage: bench_tensor
 */
#include "kernels/cuda/common/ptx_sm90.cuh"
#include "kernels/cuda/common/ptx_wgmma.cuh"
#include "kernels/cuda/matmul/decode.cuh"
#include "tests/gpu/reference.h"

#include <algorithm>
#include <stdio.h>
#include <vector>

enum { SMEM = 96 << 10, X_AT = 64 << 10, BLOCKS = 132 };
enum instruction { NONE, PRMT, LOP3, SHF, IMAD, HFMA2, FMUL, LDS };
static const char *const names[] = {"-", "PRMT", "LOP3", "SHF", "IMAD", "HFMA2", "FMUL", "LDS"};

static __device__ void fill()
{
    for (int i = (int)threadIdx.x; i < SMEM / 4; i += (int)blockDim.x)
        ((uint32_t *)qt_smem)[i] = 0x3c003c00u ^ ((uint32_t)i * 2654435761u & 0x83ff83ff);
    __syncthreads();
}

template <int N> static __device__ float settle(float d[N / 2])
{
    float s = 0;
    ptx_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
        s += d[i];
    }
    return s;
}

static __device__ __forceinline__ uint32_t read_shared(uint32_t addr)
{
    uint32_t v;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr));
    return v;
}

/* ---- one instruction ------------------------------------------------------------------------ */

/* Two warpgroups multiply, `products` times 4 k-steps; two run `others` times 64 instructions of a
 * kind. */
template <int N, int OP>
static __global__ void __launch_bounds__(512, 1)
    beside_kernel(int products, int others, long long *clocks, float *sink)
{
    fill();
    const int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0);
    const long long start = clock64();
    float s = 0;
    if (group < 2) {
        uint32_t a[4][4];
        float d[N / 2] = {};
        for (int i = 0; i < 16; i++)
            a[i / 4][i % 4] = 0x3c003c00 + threadIdx.x * 77 + i;
        const uint32_t b = ptx_wgmma_b(ptx_shared(qt_smem) + X_AT);
#pragma unroll 1
        for (int i = 0; i < products; i++) {
            ptx_wgmma_fence();
            ptx_wgmma<N>::run(d, a, b);
            ptx_wgmma_commit();
            ptx_wgmma_wait<1>();
        }
        s = settle<N>(d);
    } else {
        uint32_t x[8];
        float y[8];
        for (int i = 0; i < 8; i++)
            x[i] = ptx_shared(qt_smem) + threadIdx.x * 4 + i * 128, y[i] = threadIdx.x + i;
#pragma unroll 1
        for (int i = 0; i < others; i++)
#pragma unroll
            for (int q = 0; q < 64; q++) {
                uint32_t &v = x[q % 8];
                if (OP == PRMT)
                    asm volatile("prmt.b32 %0, %0, 0x64646464, 0x4120;" : "+r"(v));
                if (OP == LOP3)
                    asm volatile("lop3.b32 %0, %0, 0xfff0ff0f, 0x12345678, 0x6a;" : "+r"(v));
                if (OP == SHF)
                    asm volatile("shf.l.wrap.b32 %0, %0, %0, 7;" : "+r"(v));
                if (OP == IMAD)
                    asm volatile("mad.lo.u32 %0, %0, 12345, 0x777;" : "+r"(v));
                if (OP == HFMA2)
                    v = ptx_fma_half2(v, 0x2c003c00, 0xd480e408);
                if (OP == FMUL)
                    asm volatile("mul.f32 %0, %0, 0f3f800001;" : "+f"(y[q % 8]));
                if (OP == LDS)
                    s += __uint_as_float(read_shared(v));
            }
        for (int i = 0; i < 8; i++)
            s += x[i] + y[i];
    }
    if (threadIdx.x % 256 == 0)
        clocks[blockIdx.x * 2 + threadIdx.x / 256] = clock64() - start;
    if (s == 12345.678f)
        *sink = s;
}

static long long *clocks;
static float *sink;

static void slowest(double out[2])
{
    std::vector<long long> h(BLOCKS * 2);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(h.data(), clocks, h.size() * 8, cudaMemcpyDeviceToHost));
    out[0] = out[1] = 0;
    for (int i = 0; i < BLOCKS * 2; i++)
        out[i % 2] = std::max(out[i % 2], (double)h[i]);
}

template <int N, int OP> static void beside()
{
    const auto kernel = beside_kernel<N, OP>;
    double alone[2], others[2], products[2];
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
    kernel<<<BLOCKS, 512, SMEM>>>(0, 200, clocks, sink);
    slowest(alone);
    kernel<<<BLOCKS, 512, SMEM>>>(200 * 64 * 64 / N, 200, clocks, sink); /* these end first */
    slowest(others);
    kernel<<<BLOCKS, 512, SMEM>>>(200, 64 * N, clocks, sink); /* the products end first */
    slowest(products);
    const double count = 200. * 64 * 2; /* two warpgroups, per scheduler */
    printf("%-6s %4d %8.2f %8.2f %8.2f\n", names[OP], N, count / alone[1], count / others[1],
           200. * 4 * N / 2 * 2 / products[0]);
}

/* ---- a loop like that of the tile kernel ---------------------------------------------------- */

/* WGS warpgroups: fragments of 4 k-steps are looked up while the previous ones are multiplied. All
 * accumulators are scaled every 8 k-steps. */
template <int N, int WGS, bool LOOK_UP, bool SCALE>
static __global__ void __launch_bounds__(WGS * 128, 1)
    loop_kernel(int batches, long long *clocks, float *sink)
{
    fill();
    const uint32_t lane_bytes = threadIdx.x % 32 * 4, base = ptx_shared(qt_smem);
    const uint32_t b = ptx_wgmma_b(base + X_AT);
    uint32_t a[2][4][4];
    float d[N / 2] = {};
    for (int i = 0; i < 32; i++)
        a[i / 16][i / 4 % 4][i % 4] = 0x3c003c00 + threadIdx.x * 77 + i;
    uint32_t word = threadIdx.x * 2654435761u;
    const long long start = clock64();
#pragma unroll 1
    for (int i = 0; i < batches; i += 2)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (LOOK_UP)
#pragma unroll
                for (int k = 0; k < 16; k++)
                    a[h][k / 4][k % 4] =
                        read_shared(base + __byte_perm(word, lane_bytes, 0x5504 | k % 4 << 4));
            if (SCALE && h) {
                ptx_wgmma_wait<0>();
#pragma unroll
                for (int k = 0; k < N / 2; k++) {
                    asm volatile("" : "+f"(d[k])::"memory");
                    d[k] *= k & 2 ? 1.0001f : .9999f;
                }
            }
            ptx_wgmma_fence();
            ptx_wgmma<N>::run(d, a[h], b);
            ptx_wgmma_commit();
            word = read_shared(base + threadIdx.x * 4 + (i & 7) * 2048);
            ptx_wgmma_wait<1>();
#pragma unroll
            for (int k = 0; k < 16; k++)
                asm volatile("" ::"r"(a[h ^ 1][k / 4][k % 4]));
        }
    const float s = settle<N>(d);
    if (threadIdx.x == 0)
        clocks[blockIdx.x * 2] = clocks[blockIdx.x * 2 + 1] = clock64() - start;
    if (s == 12345.678f)
        *sink = s + (float)a[0][0][0];
}

template <int N, int WGS, bool LOOK_UP, bool SCALE> static double loop()
{
    const auto kernel = loop_kernel<N, WGS, LOOK_UP, SCALE>;
    double c[2];
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SMEM));
    kernel<<<BLOCKS, WGS * 128, SMEM>>>(400, clocks, sink);
    slowest(c);
    return c[0] / (400 * 4);
}

template <int N, int WGS> static void loops()
{
    printf("%4d %4d %8.0f %8.0f %8.0f %8.0f\n", N, WGS, N / 2. * WGS, loop<N, WGS, false, false>(),
           loop<N, WGS, true, false>(), loop<N, WGS, true, true>());
}

template <int OP> static void all()
{
    beside<32, OP>();
    beside<64, OP>();
    beside<128, OP>();
}

int main()
{
    int count = 0, major = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0 ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess ||
        major != 9) {
        printf("SKIP: no GPU of compute capability 9.0\n");
        return 0;
    }
    CHECK(cudaMalloc(&clocks, BLOCKS * 2 * 8));
    CHECK(cudaMalloc(&sink, 4));
    printf(
        "Instructions a clock and scheduler, alone and beside products of N tokens; the share of "
        "their\nfull rate that the products have meanwhile\n");
    printf("%-6s %4s %8s %8s %8s\n", "", "N", "alone", "beside", "products");
    all<PRMT>();
    all<LOP3>();
    all<SHF>();
    all<IMAD>();
    all<HFMA2>();
    all<FMUL>();
    all<LDS>();
    printf("Clocks a k-step of WGS warpgroups\n");
    printf("%4s %4s %8s %8s %8s %8s\n", "N", "WGS", "least", "products", "look-up", "+ scale");
    loops<32, 2>();
    loops<32, 4>();
    loops<64, 2>();
    loops<64, 4>();
    loops<128, 2>();
    loops<128, 3>();
    loops<256, 2>();
    return 0;
}
