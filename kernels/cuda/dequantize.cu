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

/* What a lane has of a 16 x 64 block: packed words, and the scales of its two rows of the first and
 * the last 32 channels. */
template <class Format> struct dequantize_block {
    Format words;
    __half2 scale[2];
    uint32_t zeros[2]; /* likewise */

    __device__ __forceinline__ void load(const qt_dequantize_args &a, int strip, int block)
    {
        const int lane = (int)threadIdx.x % 32;
        const unsigned char *src[3];
#pragma unroll
        for (int i = 0; i < 3; i++)
            src[i] = a.plane[i] + ((size_t)strip * a.pitch_blocks + block) * 128 * a.width[i] +
                     lane * 4 * a.width[i];
        words.load(src, a.decode);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int channel = block * 64 + (block * 64 + i * 32 < a.k ? i * 32 : 0);
            const size_t group = (size_t)strip * a.pitch_groups + (channel >> a.group_shift);
            scale[i] = ((const __half2 *)a.scale)[group * 8 + lane / 4];
            if (Format::ZEROS)
                zeros[i] = qt_lane_zeros<Format>(a.decode, a.zero + group * Format::ZEROS);
        }
    }
};

/* The next block is under way while one is written. */
template <class Format>
__global__ void __launch_bounds__(WARPS * 32)
    dequantize_kernel(const __grid_constant__ qt_dequantize_args a)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, step = gridDim.x * WARPS;
    const unsigned blocks = (unsigned)(a.k + 63) / 64, total = (unsigned)(a.n + 15) / 16 * blocks;
    uint32_t *stage = (uint32_t *)(qt_smem + Format::TABLE_BYTES) + warp * 16 * LINE;
    unsigned item = blockIdx.x * WARPS + warp;
    dequantize_block<Format> now, next;
    if (item < total)
        next.load(a, (int)(item / blocks), (int)(item % blocks));
    const qt_lane values = qt_lane_start<Format>(qt_lane_value<Format>(&a.decode), (int)blockDim.x);
    __syncthreads();
    for (; item < total; item += step) {
        now = next;
        if (item + step < total)
            next.load(a, (int)((item + step) / blocks), (int)((item + step) % blocks));
#pragma unroll
        for (int s = 0; s < 4; s++) {
            uint32_t frag[4];
            const float2 scale = __half22float2(now.scale[s / 2]);
            now.words.set_zeros(now.zeros[s / 2]);
            now.words.fragment(frag, s, values);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = lane / 4 + 8 * (i % 2), col = 16 * s + 2 * (lane % 4) + 8 * (i / 2);
                stage[row * LINE + col / 2] =
                    round_pair(a, frag[i], (i % 2 ? scale.y : scale.x) * a.factor);
            }
        }
        __syncwarp();
        put_block(a, stage, (int)(item / blocks), (int)(item % blocks));
        __syncwarp();
    }
}

const void *qt_dequantize_instance(enum qt_format format)
{
#define KERNEL(Format)                       (const void *)dequantize_kernel<Format>,
#define FIELDS(name, bits, exp_bits, Format) KERNEL(Format)
    static const void *const kernels[] = {QT_GROUP_FORMATS(KERNEL) QT_FIELD_FORMATS(FIELDS)};
    return kernels[format];
#undef FIELDS
#undef KERNEL
}

int qt_table_bytes(enum qt_format format)
{
    static const int bytes[] = {QT_GROUP_FORMATS(QT_TABLE_BYTES)};
    return format <= QT_FORMAT_LAST_GROUPED ? bytes[format] : 0;
}
