/* Arguments of the stream kernels of 4-bit integer weights, and which there are. */
#ifndef QT_KERNELS_CUDA_W4AX_STREAM_H
#define QT_KERNELS_CUDA_W4AX_STREAM_H

#include "kernels/include/qtool_w4ax.h"

#include <cuda_fp16.h>
#include <stdint.h>

struct w4ax_args {
    const unsigned char *plane; /* [strips][blocks64][512 bytes] */
    const unsigned char *scale; /* [strips][kblocks] of 32 (BLOCK) or 16 (INT) bytes */
    const __half *row_scale;    /* [strips][16] */
    const uint32_t *blocks;     /* [kblocks] */
    const unsigned char *x;     /* codes */
    const float *x_scale;       /* BLOCK: [kblocks][x_pitch], else [m] */
    const int *x_sum;           /* INT: [m] */
    void *y;                    /* [m][n] of `output` */
    uint32_t *partial;          /* [grid][2][m][rows of a group], float (BLOCK) or int */
    unsigned *arrivals;         /* [row groups], 0 between launches */
    int m, n, strips, kblocks, x_pitch;
    int token0, x_tokens;  /* first token of these m, and how many X has */
    int blocks64;          /* blocks of 64 channels from strip to strip */
    int cta_units, groups; /* groups * kblocks < 2^31 */
    uint32_t nibbles;      /* W4AX_NIBBLES */
    float factor;          /* power of two on every result */
    int output;            /* enum qtool_w4ax_output */
    int dependent;         /* launched before the previous kernel has ended */
};

/* Host address of the stream kernel, and bytes of its shared memory; NULL if there is none. */
const void *qt_w4ax_stream_instance(enum qtool_w4ax_scales scales, int tokens, int strips,
                                    int warps, int m, int *smem);
/* Its part for INT and ROW. */
const void *qt_w4ax_stream_older_instance(enum qtool_w4ax_scales scales, int tokens, int strips,
                                          int warps, int m, int *smem);
/* Compute capability that the kernels are compiled for, on a device of cc: those of INT and ROW for
 * 8.0 alone, so that they do not wait for the launch before. */
static inline int qt_w4ax_stream_cc(enum qtool_w4ax_scales scales, int cc)
{
    return scales == QTOOL_W4AX_BLOCK ? cc : 80;
}

#endif
