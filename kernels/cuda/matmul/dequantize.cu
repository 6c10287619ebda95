/*
 * Dequantize: out[n][k] = value of each code times its scale, rounded once to FP16 or BF16.
 *
 *   grid       (strips x column parts): 16 rows x WARPS * 64 columns per thread block
 *   warp       one fragment block of 16 x 64 weights
 *   smem       [ look-up table | rows of each warp ]: rows are staged for full-line stores
 *   Used by    qtool_matmul_dequantize, and matrix products by cuBLAS (dense.cc)
 *   Traffic    packed bytes once, 2 n k bytes out
 *   Reference  qt_packed_decode, rounded: equal bit for bit
 */
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/matmul/decode.cuh"
#include "kernels/cuda/matmul/dequantize.h"
#include "kernels/cuda/matmul/instances.h"

/* LINE: words per row of 64 values in shared memory; the 4 words of padding avoid bank conflicts.

 */
enum { WARPS = QT_DEQUANTIZE_WARPS, LINE = 36, ROW_BYTES = WARPS * 16 * LINE * 4 };

static __device__ __forceinline__ uint32_t round_pair(const qt_dequantize_args &a, uint32_t pair,
                                                      float scale)
{
    float2 v = __half22float2(*(__half2 *)&pair);
    return qt_round_two(a.bf16, v.x * scale, v.y * scale);
}

/* Stores the warp's 16 x 64 values from shared memory, in lines of LINE words, to `out`. */
static __device__ __forceinline__ void put_block(const qt_dequantize_args &a, const uint32_t *from,
                                                 int strip, int block)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
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

/* The lane's part of a fragment block: packed words, scales and zero-points of its two rows for the
 * first and the last 32 columns. */
template <class Format> struct dequantize_block {
    Format words;
    __half2 scale[2];
    uint32_t zeros[2]; /* as scale */

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

template <class Format>
__global__ void __launch_bounds__(WARPS * 32)
    dequantize_kernel(const __grid_constant__ qt_dequantize_args a)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int strip = (int)blockIdx.x / a.parts, block = (int)blockIdx.x % a.parts * WARPS + warp;
    uint32_t *const rows = (uint32_t *)(qt_smem + Format::TABLE_BYTES) + warp * 16 * LINE;
    dequantize_block<Format> of;
    if (block * 64 < a.k)
        of.load(a, strip, block);
    const qt_lane values = qt_lane_start<Format>(qt_lane_value<Format>(&a.decode), WARPS * 32);
    if (Format::TABLE_BYTES)
        __syncthreads();
    if (block * 64 >= a.k)
        return;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        uint32_t frag[4];
        const float2 scale = __half22float2(of.scale[s / 2]);
        of.words.set_zeros(of.zeros[s / 2]);
        of.words.fragment(frag, s, values);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + 8 * (i % 2), col = 16 * s + 2 * (lane % 4) + 8 * (i / 2);
            rows[row * LINE + col / 2] =
                round_pair(a, frag[i], (i % 2 ? scale.y : scale.x) * a.factor);
        }
    }
    __syncwarp();
    put_block(a, rows, strip, block);
}

const void *qt_dequantize_instance(enum qt_format format)
{
#define KERNEL(Format)                       (const void *)dequantize_kernel<Format>,
#define FIELDS(name, bits, exp_bits, Format) KERNEL(Format)
    static const void *const kernels[] = {QT_DEQUANTIZE_GROUP_FORMATS(KERNEL)
                                              QT_FIELD_FORMATS(FIELDS)};
    return kernels[format];
#undef FIELDS
#undef KERNEL
}

int qt_dequantize_smem(enum qt_format format)
{
    static const int bytes[] = {QT_DEQUANTIZE_GROUP_FORMATS(QT_TABLE_BYTES)};
    return ROW_BYTES + (format <= QT_FORMAT_LAST_GROUPED ? bytes[format] : 0);
}
