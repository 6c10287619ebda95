/*
 * Dequantize: out[n][k] = value of each code times its scale, rounded once.
 *
 *   grid      blocks of 4 warps; a warp turns one 16 x 64 block at a time into rows of `out`
 *   smem      [ look-up table | a block of each warp ]: so that rows are written in whole lines
 *   Moves     packed bytes once, 2 n k bytes out
 *   Oracle    qt_packed_decode, rounded: equal bit for bit
 */
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/dequantize.h"
#include "kernels/cuda/instances.h"
#include "kernels/cuda/round.cuh"

/* LINE: words of a row of 64 values in shared memory, by 4 of which rows lie in other banks. */
enum { WARPS = QT_DEQUANTIZE_WARPS, LINE = QT_DEQUANTIZE_LINE };

static __device__ __forceinline__ float scale_at(const qt_dequantize_args &a, int row, int col)
{
    size_t group = a.group_shift == 30 ? 0 : (size_t)(col >> a.group_shift);
    int slot = 2 * (row % 8) + row / 8 % 2;
    return __half2float(a.scale[((size_t)(row / 16) * a.pitch_groups + group) * 16 + slot]);
}

static __device__ __forceinline__ uint32_t round_pair(const qt_dequantize_args &a, uint32_t pair,
                                                      float scale)
{
    float2 v = __half22float2(*(__half2 *)&pair);
    return qt_round_two(a.bf16, v.x * scale, v.y * scale);
}

/* The warp's 16 x 64 values, in shared memory in lines of LINE words, to memory. */
static __device__ __forceinline__ void put_block(const qt_dequantize_args &a, const uint32_t *from,
                                                 int strip, int block)
{
    const int lane = (int)threadIdx.x % 32;
    for (int i = 0; i < 16; i += 4) {
        const int row = strip * 16 + i + lane / 8, col = block * 64 + lane % 8 * 8;
        const uint4 v = *(const uint4 *)(from + (i + lane / 8) * LINE + lane % 8 * 4);
        if (row >= a.n || col >= a.k)
            continue;
        uint16_t *to = (uint16_t *)a.out + (size_t)row * a.k + col;
        if (a.wide) {
            *(uint4 *)to = v;
            continue;
        }
        const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
        for (int j = 0; j < 8 && col + j < a.k; j++)
            to[j] = (uint16_t)(pair[j / 2] >> 16 * (j % 2));
    }
}

template <class Format>
__global__ void __launch_bounds__(WARPS * 32)
    dequantize_kernel(const __grid_constant__ qt_dequantize_args a)
{
    Format::fill_table(&a.decode, qt_lane_value(&a.decode), (int)blockDim.x);
    __syncthreads();
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, blocks = (a.k + 63) / 64;
    const size_t total = (size_t)((a.n + 15) / 16) * blocks;
    uint32_t *stage = (uint32_t *)(qt_smem + Format::TABLE_BYTES) + warp * 16 * LINE;
    for (size_t item = blockIdx.x * WARPS + warp; item < total; item += gridDim.x * WARPS) {
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
                int row = lane / 4 + 8 * (i % 2), col = 16 * s + 2 * (lane % 4) + 8 * (i / 2);
                int channel = block * 64 + col;
                float scale = scale_at(a, strip * 16 + row, channel < a.k ? channel : 0) * a.factor;
                stage[row * LINE + col / 2] = round_pair(a, frag[i], scale);
            }
        }
        __syncwarp();
        put_block(a, stage, strip, block);
        __syncwarp();
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
