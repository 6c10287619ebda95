/* wgmma with both operands in shared memory, compute capability 9.0a. */
#ifndef QT_KERNELS_CUDA_COMMON_PTX_WGMMA_SHARED_CUH
#define QT_KERNELS_CUDA_COMMON_PTX_WGMMA_SHARED_CUH

#include "kernels/cuda/common/ptx_wgmma.cuh"

/* d[64 x N] += a[64 x 64] b[64 x N], as ptx_wgmma with A in shared memory: 64 rows in the layout of
 * ptx_wgmma_b, which gives both addresses. */
template <int N> struct ptx_wgmma_shared;

#define PTX_WGMMA_SHARED_STEP(N)                                                                   \
    "mov.b64 a, {la, " PTX_WGMMA_B_HIGH "};\n"                                                     \
    "mov.b64 b, {lb, " PTX_WGMMA_B_HIGH "};\n"                                                     \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" PTX_ACC_##N                         \
        "}, a, b, 1, 1, 1, 0, 0;\n"                                                                \
        "add.u32 la, la, 2;\n"                                                                     \
        "add.u32 lb, lb, 2;\n"
#define PTX_WGMMA_SHARED(N, A, B)                                                                  \
    template <> struct ptx_wgmma_shared<N> {                                                       \
        PTX void run(float d[N / 2], uint32_t a, uint32_t b)                                       \
        {                                                                                          \
            asm volatile("{.reg .b64 a, b; .reg .b32 la, lb; mov.b32 la, " A "; mov.b32 lb, " B    \
                         ";\n" PTX_WGMMA_SHARED_STEP(N) PTX_WGMMA_SHARED_STEP(N)                   \
                             PTX_WGMMA_SHARED_STEP(N) PTX_WGMMA_SHARED_STEP(N) "}"                 \
                         : PTX_D_##N("+f")                                                         \
                         : "r"(a), "r"(b));                                                        \
        }                                                                                          \
    };
PTX_WGMMA_SHARED(64, "%32", "%33")
PTX_WGMMA_SHARED(128, "%64", "%65")
#undef PTX_WGMMA_SHARED

#endif
