/* Dequantization parameters that host and device code share (decode.cuh). */
#ifndef QT_KERNELS_CUDA_MATMUL_DECODE_H
#define QT_KERNELS_CUDA_MATMUL_DECODE_H

#include <cuda_fp16.h>

/* Parameters of a format besides the codes. */
struct qt_decode_args {
    const __half *table; /* LUT: [2^bits] */
    unsigned bits, exp_bits;
    int zeros; /* the weight has zero-points */
};

/* Minifloats are dequantized by moving their magnitude bits into an FP16 number, with the exponent
 * field at the low end of FP16's. That number is the value times 2^(bias - 15), also for
 * subnormals. Returns the exponent that corrects for it. */
static inline int qt_minifloat_exp2(unsigned exp_bits)
{
    return 15 - ((1 << (exp_bits - 1)) - 1);
}

/* 4-bit integers are dequantized to 2^-QT_INT4_EXP2 of their values. ROUND_EXP2:
 * decode_format.cuh. */
enum { QT_INT4_EXP2 = 9, QT_INT4_ROUND_EXP2 = 6, QT_INT8_ROUND_EXP2 = -7 };

#endif
