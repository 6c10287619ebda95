/*
 * Prepares X for kernels that do not convert it: BF16 to FP16 (token_scale.cuh), rows padded with
 * zeros to a multiple of 64 columns.
 *
 *   grid       one thread block of 256 threads per token
 *   Used by    skinny, tile and mma tile kernels if X is BF16 or k is not a multiple of 64 (few
 *              tokens: the skinny kernel converts BF16 X itself); mix24: skinny and tile kernels if
 *              X is BF16
 *   Traffic    X once or twice (BF16: the second time from L1 or L2), 2 m k bytes out; 16 bytes per
 *              thread if rows are aligned
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/common/prepare.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/token_scale.cuh"

struct prepare_args {
    const void *x;       /* F16 or BF16 [m][k] */
    __half *out;         /* [m][pitch], zero beyond k */
    float *token_factor; /* [m], BF16 only */
    int m, k, pitch;
    int bf16;
    int wide; /* rows of x are 16-byte aligned */
};

/* The maximum of `top` over the warps of the thread block. */
static __device__ __forceinline__ int block_max(int top)
{
    __shared__ int most[8];
    if (threadIdx.x % 32 == 0)
        most[threadIdx.x / 32] = top;
    __syncthreads();
    for (int i = 0; i < 8; i++)
        top = max(top, most[i]);
    return top;
}

static __global__ void __launch_bounds__(256) prepare_kernel(prepare_args a)
{
    const uint16_t *x = (const uint16_t *)a.x + (size_t)blockIdx.x * a.k;
    __half *out = a.out + (size_t)blockIdx.x * a.pitch;
    const uint4 *wide = (const uint4 *)x;
    const int chunks = a.wide ? a.k / 8 : 0; /* 16-byte chunks */
    int up = 0;
    ptx_launch_dependents();
    ptx_wait_previous();
    if (a.bf16) {
        uint32_t tops = 0;
#pragma unroll 4
        for (int i = (int)threadIdx.x; i < chunks; i += 256)
            tops = qt_token_tops(tops, wide[i]);
        for (int i = chunks * 8 + (int)threadIdx.x; i < a.k; i += 256)
            tops = qt_token_tops(tops, x[i]);
        up = qt_token_shift(block_max(qt_token_top(tops)));
    }
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < chunks; i += 256)
        ((uint4 *)out)[i] = a.bf16 ? qt_token_halves(wide[i], up) : wide[i];
    for (int i = chunks * 8 + (int)threadIdx.x; i < a.pitch; i += 256)
        out[i] = i >= a.k ? __ushort_as_half(0)
                 : a.bf16 ? qt_token_half(x[i], up)
                          : __ushort_as_half(x[i]);
    if (a.bf16 && threadIdx.x == 0)
        a.token_factor[blockIdx.x] = qt_token_factor(up);
}

const void *qt_prepare_instance(void)
{
    return (const void *)prepare_kernel;
}

bool qt_prepare_needed(const struct qtool_matmul_plan *p)
{
    return p->options.dtype == QTOOL_BF16 || p->k % QT_BLOCK_COLS;
}

static size_t x_bytes(const struct qtool_matmul_plan *p)
{
    return round_up(p->m * round_up(p->k, QT_BLOCK_COLS) * 2, 256);
}

size_t qt_prepare_bytes(const struct qtool_matmul_plan *p)
{
    return qt_prepare_needed(p) ? x_bytes(p) + p->m * 4 : 0;
}

int qt_prepare_run(const struct qtool_matmul_plan *p, const void **x, const float **token_factor,
                   void *workspace, void *stream)
{
    struct prepare_args a = {};
    struct qt_kernel_launch launch = {};
    *token_factor = NULL;
    if (!qt_prepare_needed(p))
        return QTOOL_OK;
    a.x = *x;
    a.out = (__half *)workspace;
    a.token_factor = (float *)((char *)workspace + x_bytes(p));
    a.m = (int)p->m;
    a.k = (int)p->k;
    a.pitch = (int)round_up(p->k, QT_BLOCK_COLS);
    a.bf16 = p->options.dtype == QTOOL_BF16;
    a.wide = p->k % 8 == 0 && (size_t)a.x % 16 == 0;
    launch.kernel = (const void *)prepare_kernel;
    launch.grid = dim3((unsigned)p->m);
    launch.threads = 256;
    launch.most_smem =
        p->config.path == QTOOL_MATMUL_TILE && p->m > 32; /* tiles of 48 tokens and more */
    launch.dependent = p->options.dependent_launch && qt_state(p)->cc == 90;
    *x = workspace;
    *token_factor = a.bf16 ? a.token_factor : NULL;
    return qt_launch_kernel(&launch, &a, stream);
}
