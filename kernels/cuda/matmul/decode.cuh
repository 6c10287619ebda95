/* Dequantization of packed codes of all formats to the A operand of mma.sync m16n8k16 (see
 * decode_format.cuh), and the look-up tables in shared memory. */
#ifndef QT_KERNELS_CUDA_MATMUL_DECODE_CUH
#define QT_KERNELS_CUDA_MATMUL_DECODE_CUH

#include "kernels/cuda/matmul/decode_fpx.cuh"
#include "kernels/cuda/matmul/decode_int.cuh"
#include "kernels/cuda/matmul/decode_lut.cuh"

/* The value of one minifloat code as FP16, without the power of two of qt_minifloat_exp2 (the host
 * applies it to the results). Fills tables for formats of up to 4 bits. */
static __device__ inline __half qt_minifloat_half(unsigned code, unsigned bits, unsigned exp_bits)
{
    int m = (int)(bits - 1 - exp_bits), mag = (int)(code >> 1), e = mag >> m;
    int mantissa = (mag & ((1 << m) - 1)) + (e ? 1 << m : 0);
    int exp2 = (e ? e : 1) - m - 15;
    float v = ldexpf((float)mantissa, exp2);
    return __float2half(code & 1 ? -v : v);
}

/* For formats with a table: the value of code number `lane`, from the table section or computed as
 * a minifloat. */
template <class Format>
static __device__ __forceinline__ __half qt_lane_value(const struct qt_decode_args *d)
{
    if (!Format::LUT)
        return __half();
    unsigned code = threadIdx.x % 32 & ((1u << d->bits) - 1);
    return d->table ? d->table[code] : qt_minifloat_half(code, d->bits, d->exp_bits);
}

/* Fills the look-up table, by the first `threads` threads of the thread block; value: qt_lane_value
 * of each lane. The caller synchronizes before look-ups. */
template <class Format>
static __device__ __forceinline__ qt_lane qt_lane_start(__half value, int threads)
{
    qt_lane lane = {threadIdx.x % 32 * Format::LANE_BYTES, {}, {}};
    if constexpr (Format::VALUES)
        value_start<Format>(&lane, value);
    if constexpr (Format::SINGLE)
        single_fill<Format>(value, threads);
    else if constexpr (Format::STEPS)
        steps_fill<Format>(value, threads);
    else if constexpr (Format::TABLE_BYTES > 0 && Format::LANE_BYTES == 4)
        pair_fill<Format>(value, threads);
    if constexpr (Format::TABLE_BYTES > 0 && Format::LANE_BYTES == 8)
        quad_fill<Format>(lane, threads);
    return lane;
}

#endif
