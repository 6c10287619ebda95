/*
 * Prepares X for the tile kernel: BF16 to FP16, rows padded to whole 16 bytes.
 *
 * BF16 has less precision and more range than FP16: each token is scaled by the power of two that
 * brings its largest value to 2^14, which is exact but for values 2^-38 of the largest;
 * token_factor scales the results back.
 *
 *   grid      one block of 256 threads a token
 *   Moves     X once or twice (BF16; from L1 or L2 the second time), 2 m k bytes out
 */
#include "kernels/cuda/tile.h"
#include "kernels/cuda/token_scale.cuh"

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

static __global__ void __launch_bounds__(256) prepare_kernel(qt_prepare_args a)
{
    const uint16_t *x = (const uint16_t *)a.x + (size_t)blockIdx.x * a.k;
    __half *out = a.out + (size_t)blockIdx.x * a.pitch;
    int top = 0, up = 0;
    ptx_launch_dependents();
    ptx_wait_previous();
    if (a.bf16) {
        for (int i = (int)threadIdx.x; i < a.k; i += 256)
            top = max(top, x[i] & 0x7fff);
        up = qt_token_shift(block_max(top));
    }
    for (int i = (int)threadIdx.x; i < a.pitch; i += 256) {
        uint16_t v = i < a.k ? x[i] : (uint16_t)0;
        out[i] = a.bf16 ? qt_token_half(v, up) : __ushort_as_half(v);
    }
    if (a.bf16 && threadIdx.x == 0)
        a.token_factor[blockIdx.x] = qt_pow2(-(up / 2)) * qt_pow2(-(up - up / 2));
}

const void *qt_prepare_instance(void)
{
    return (const void *)prepare_kernel;
}
