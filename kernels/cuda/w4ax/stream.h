/* The w4ax stream kernel: arguments, instances and plan. */
#ifndef QT_KERNELS_CUDA_W4AX_STREAM_H
#define QT_KERNELS_CUDA_W4AX_STREAM_H

#include "kernels/cuda/w4ax/plan.h"

#include <cuda_fp16.h>
#include <stdint.h>

struct w4ax_args {
    const unsigned char *plane; /* [strips][blocks64][512 bytes] */
    const unsigned char *scale; /* [strips][kblocks] of 32 (BLOCK) or 16 (INT) bytes */
    const __half *row_scale;    /* [strips][16] */
    const uint32_t *blocks;     /* [kblocks]: block words */
    const unsigned char *x;     /* codes */
    const float *x_scale;       /* BLOCK: [kblocks][x_pitch], else [m] */
    const int *x_sum;           /* INT: [m] */
    void *y;                    /* [m][n] of `output` */
    uint32_t *partial;          /* [grid][2][m][rows of a row group], float (BLOCK) or int */
    unsigned *arrivals;         /* [row groups], 0 between launches */
    int m, n, strips, kblocks, x_pitch;
    int token0, x_tokens;  /* first token of this pass; tokens of X */
    int blocks64, pitch64; /* fragment blocks of 64 channels: number, and from strip to strip */
    int cta_units, groups; /* work units per thread block; row groups; groups * kblocks < 2^31 */
    uint32_t nibbles;      /* W4AX_NIBBLES */
    float factor;          /* power of two that multiplies every result */
    int output;            /* enum qtool_w4ax_output */
    int dependent;         /* launched as a dependent launch */
};

/* Returns the host address of a kernel and sets *smem to its shared memory in bytes; NULL if it
 * does not exist. */
const void *qt_w4ax_stream_instance(enum qtool_w4ax_scales scales, int tokens, int strips,
                                    int warps, int m, int *smem);
/* The part of qt_w4ax_stream_instance for INT and ROW. */
const void *qt_w4ax_stream_sm80_instance(enum qtool_w4ax_scales scales, int tokens, int strips,
                                         int warps, int m, int *smem);
/* Returns the architecture that the kernels are compiled for, on a device of architecture cc. The
 * kernels of INT and ROW are compiled for 8.0 only, so they do not support dependent launches. */
static inline int qt_w4ax_stream_cc(enum qtool_w4ax_scales scales, int cc)
{
    return scales == QTOOL_W4AX_BLOCK ? cc : 80;
}

/* Sets p->config. */
void qt_w4ax_stream_choose(struct qtool_w4ax_plan *p);
/* Validates p->config and sets the rest of the plan. */
int qt_w4ax_stream_check(struct qtool_w4ax_plan *p);
int qt_w4ax_stream_run(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                       const struct qtool_w4ax_acts *acts, void *y, void *workspace, void *stream);

#endif
