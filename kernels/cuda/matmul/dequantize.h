/* The dequantize kernel: arguments. */
#ifndef QT_KERNELS_CUDA_MATMUL_DEQUANTIZE_H
#define QT_KERNELS_CUDA_MATMUL_DEQUANTIZE_H

#include "kernels/cuda/matmul/decode.h"

enum { QT_DEQUANTIZE_WARPS = 4 }; /* per thread block; a warp has a 16 x 64 fragment block */

struct qt_dequantize_args {
    struct qt_decode_args decode;
    const unsigned char *plane[3]; /* U32 [strips][pitch_blocks][32][width] */
    const __half *scale;           /* F16 [strips][pitch_groups][16] */
    const unsigned char *zero;     /* U8 [strips][pitch_groups][2 bits], or NULL */
    void *out;                     /* F16 or BF16 [n][k] */
    size_t pitch_blocks, pitch_groups;
    int width[3];
    int n, k;
    int parts;       /* thread blocks per strip */
    int group_shift; /* 30: one scale per row */
    float factor;
    int wide; /* rows of out are 16-byte aligned */
    int bf16;
};

#endif
