/*
 * Prepares X for all kernels but the stream kernel: BF16 to FP16, rows padded.
 *
 * BF16 has less precision and more range than FP16: each token is scaled by the power of two that
 * brings its largest value to 2^14, which is exact but for values 2^-38 of the largest;
 * token_factor scales the results back.
 *
 *   grid      one block of 256 threads a token
 *   Moves     X once or twice (BF16; from L1 or L2 the second time), 2 m k bytes out; 16 bytes a
 *             thread where rows are aligned
 */
#include "kernels/cuda/plan.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/token_scale.cuh"

struct prepare_args {
    const void *x;       /* F16 or BF16 [m][k] */
    __half *out;         /* [m][pitch], zero beyond k */
    float *token_factor; /* [m], BF16 only */
    int m, k, pitch;
    int bf16;
    int wide; /* rows of x are 16-byte aligned */
};

static __device__ __forceinline__ int block_max(int v)
{
    __shared__ int most[8];
    v = __reduce_max_sync(~0u, v);
    if (threadIdx.x % 32 == 0)
        most[threadIdx.x / 32] = v;
    __syncthreads();
    for (int i = 0; i < 8; i++)
        v = max(v, most[i]);
    return v;
}

/* The larger of the magnitudes of both halves, and so far. */
static __device__ __forceinline__ uint32_t top_of_two(uint32_t top, uint32_t two)
{
    return __vmaxu2(top, two & 0x7fff7fff);
}

static __device__ __forceinline__ uint32_t prepare_two(uint32_t two, bool bf16, int up)
{
    if (!bf16)
        return two;
    const uint32_t low = __half_as_ushort(qt_token_half((uint16_t)two, up));
    return low | (uint32_t)__half_as_ushort(qt_token_half((uint16_t)(two >> 16), up)) << 16;
}

static __global__ void __launch_bounds__(256) prepare_kernel(prepare_args a)
{
    const uint16_t *x = (const uint16_t *)a.x + (size_t)blockIdx.x * a.k;
    __half *out = a.out + (size_t)blockIdx.x * a.pitch;
    const uint4 *wide = (const uint4 *)x;
    const int chunks = a.wide ? a.k / 8 : 0; /* of 16 bytes */
    int up = 0;
    ptx_launch_dependents();
    ptx_wait_previous();
    if (a.bf16) {
        uint32_t top = 0;
#pragma unroll 4
        for (int i = (int)threadIdx.x; i < chunks; i += 256) {
            const uint4 v = wide[i];
            top = top_of_two(top_of_two(top_of_two(top_of_two(top, v.x), v.y), v.z), v.w);
        }
        for (int i = chunks * 8 + (int)threadIdx.x; i < a.k; i += 256)
            top = top_of_two(top, x[i]);
        up = qt_token_shift(block_max(max((int)(top & 0xffff), (int)(top >> 16))));
    }
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < chunks; i += 256) {
        const uint4 v = wide[i];
        ((uint4 *)out)[i] = make_uint4(prepare_two(v.x, a.bf16, up), prepare_two(v.y, a.bf16, up),
                                       prepare_two(v.z, a.bf16, up), prepare_two(v.w, a.bf16, up));
    }
    for (int i = chunks * 8 + (int)threadIdx.x; i < a.pitch; i += 256)
        out[i] = __ushort_as_half((uint16_t)(i < a.k ? prepare_two(x[i], a.bf16, up) : 0));
    if (a.bf16 && threadIdx.x == 0)
        a.token_factor[blockIdx.x] = qt_pow2(-(up / 2)) * qt_pow2(-(up - up / 2));
}

bool qt_prepare_needed(const struct qt_matmul_plan *p)
{
    return p->options.dtype == QT_MATMUL_BF16 || p->k % QT_BLOCK_COLS;
}

static size_t x_bytes(const struct qt_matmul_plan *p)
{
    return round_up(p->m * round_up(p->k, QT_BLOCK_COLS) * 2, 256);
}

size_t qt_prepare_bytes(const struct qt_matmul_plan *p)
{
    return qt_prepare_needed(p) ? x_bytes(p) + p->m * 4 : 0;
}

int qt_prepare_run(const struct qt_matmul_plan *p, const void **x, const float **token_factor,
                   void *workspace, void *stream)
{
    struct prepare_args a = {};
    struct qt_matmul_plan launch = *p;
    *token_factor = NULL;
    if (!qt_prepare_needed(p))
        return QT_MATMUL_OK;
    a.x = *x;
    a.out = (__half *)workspace;
    a.token_factor = (float *)((char *)workspace + x_bytes(p));
    a.m = (int)p->m;
    a.k = (int)p->k;
    a.pitch = (int)round_up(p->k, QT_BLOCK_COLS);
    a.bf16 = p->options.dtype == QT_MATMUL_BF16;
    a.wide = p->k % 8 == 0 && (size_t)a.x % 16 == 0;
    launch.kernel = (const void *)prepare_kernel;
    launch.grid_x = (int)p->m;
    launch.grid_y = 1;
    launch.smem_bytes = 0;
    *x = workspace;
    *token_factor = a.bf16 ? a.token_factor : NULL;
    return qt_launch(&launch, &a, 256, p->options.dependent_launch, stream);
}
