/* What the host knows of how codes are decoded (decode.cuh). */
#ifndef QT_KERNELS_CUDA_MATMUL_DECODE_H
#define QT_KERNELS_CUDA_MATMUL_DECODE_H

#include <cuda_fp16.h>

/* What a format has to know besides the codes. */
struct qt_decode_args {
    const __half *table; /* LUT: [2^bits] */
    unsigned bits, exp_bits;
    int zeros; /* there is a section of zero points */
};

/* 16-bit magnitudes of minifloats: with the exponent field at the low end of FP16's, a code reads
 * as its value times 2^(bias - 15), subnormals included. */
static inline int qt_minifloat_exp2(unsigned exp_bits)
{
    return 15 - ((1 << (exp_bits - 1)) - 1);
}

/* Integers of 4 bits come out as 2^-QT_INT4_EXP2 of themselves. ROUND_EXP2: decode_format.cuh. */
enum { QT_INT4_EXP2 = 9, QT_INT4_ROUND_EXP2 = 6, QT_INT8_ROUND_EXP2 = -7 };

#endif
