/*
 * Dequantize: out[n][k] = value of each code times its scale, rounded once.
 *
 *   grid      blocks of 4 warps; a warp turns one 16 x 64 block into rows of `out`
 *   smem      look-up table
 *   Moves     packed bytes once, 2 n k bytes out
 *   Oracle    qt_packed_decode, rounded: equal bit for bit
 */
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/dequantize.h"
#include "kernels/cuda/instances.h"

#include <cuda_bf16.h>

static __device__ __forceinline__ void put(const qt_dequantize_args &a, int row, int col, float v)
{
    if (row >= a.n || col >= a.k)
        return;
    size_t at = (size_t)row * a.k + col;
    if (a.bf16)
        ((__nv_bfloat16 *)a.out)[at] = __float2bfloat16(v);
    else
        ((__half *)a.out)[at] = __float2half(v);
}

static __device__ __forceinline__ float scale_at(const qt_dequantize_args &a, int row, int col)
{
    size_t group = a.group_shift == 30 ? 0 : (size_t)(col >> a.group_shift);
    int slot = 2 * (row % 8) + row / 8 % 2;
    return __half2float(a.scale[((size_t)(row / 16) * a.pitch_groups + group) * 16 + slot]);
}

template <class Format>
__global__ void __launch_bounds__(128)
    dequantize_kernel(const __grid_constant__ qt_dequantize_args a)
{
    Format::fill_table(&a.decode, qt_lane_value(&a.decode), (int)blockDim.x);
    __syncthreads();
    const int lane = (int)threadIdx.x % 32, blocks = (a.k + 63) / 64;
    const size_t total = (size_t)((a.n + 15) / 16) * blocks;
    for (size_t item = blockIdx.x * 4 + threadIdx.x / 32; item < total; item += gridDim.x * 4) {
        int strip = (int)(item / blocks), block = (int)(item % blocks);
        Format words;
        const unsigned char *src[3];
        for (int i = 0; i < 3; i++)
            src[i] = a.plane[i] + ((size_t)strip * a.pitch_blocks + block) * 128 * a.width[i] +
                     lane * 4 * a.width[i];
        words.load(src, a.decode);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint32_t frag[4];
            words.fragment(frag, s, (uint32_t)lane * 4);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = strip * 16 + lane / 4 + 8 * (i % 2);
                int col = block * 64 + 16 * s + 2 * (lane % 4) + 8 * (i / 2);
                float2 v = __half22float2(*(__half2 *)&frag[i]);
                float scale = scale_at(a, row, col < a.k ? col : 0) * a.factor;
                put(a, row, col, v.x * scale);
                put(a, row, col + 1, v.y * scale);
            }
        }
    }
}

const void *qt_dequantize_instance(enum qt_format format)
{
    static const void *const kernels[] = {
        (const void *)dequantize_kernel<qt_decode_pair2>,
        (const void *)dequantize_kernel<qt_decode_pair3>,
        (const void *)dequantize_kernel<qt_decode_pair4>,
        (const void *)dequantize_kernel<qt_decode_int4>,
        (const void *)dequantize_kernel<qt_decode_fp5>,
        (const void *)dequantize_kernel<qt_decode_fp6<2>>,
        (const void *)dequantize_kernel<qt_decode_fp6<3>>,
        (const void *)dequantize_kernel<qt_decode_any>,
    };
    return kernels[format];
}
