/* The kernel of 4-bit integer weights for up to 32 tokens: its arguments, and its plans. */
#ifndef QT_KERNELS_CUDA_W4AX_SKINNY_H
#define QT_KERNELS_CUDA_W4AX_SKINNY_H

#include "kernels/cuda/matmul/skinny.h"
#include "kernels/cuda/w4ax/plan.h"

/* Blocks of 128 channels of a slot. To what the skinny kernels share, a block of 128 bytes of X is
 * one of 64 columns of FP16. */
enum { QT_W4AX_SLOT_BLOCKS = QT_SKINNY_BLOCKS / QT_SKINNY_SLOTS };

/* Warps of a block that multiply, at most: with those that copy 16, for which there are 128
 * registers a thread. */
enum { QT_W4AX_SKINNY_TOKENS = 32, QT_W4AX_SKINNY_WARPS = 14 };

struct qt_w4ax_skinny_args : qt_skinny_base { /* x: U64 [blocks][m][16], boxes of a stage */
    CUtensorMap token_scales;                 /* BLOCK: U64 [blocks][pitch / 2], boxes of a stage */
    CUtensorMap codes;                        /* U64 [strips][128 a block], boxes of a slot */
    CUtensorMap scales;      /* BLOCK, INT: U64 [strips][4 or 2 a block], boxes of a stage */
    const __half *row_scale; /* INT, ROW: [strips][16] */
    const int *x_sum;        /* INT: [m] */
    uint32_t nibbles;        /* W4AX_NIBBLES */
    int slot_bytes;          /* of codes, from slot to slot of a stage */
    int token_scales_at, token_pitch; /* in a stage; bytes of a block's */
    int f32;                          /* y is FP32 */
};

/* token_tiles 1 to 4; NULL: there is none of so many strips. */
const void *qt_w4ax_skinny_instance(enum qtool_w4ax_scales scales, int token_tiles, int strips);

/* Sets p->config. False: not for this device or so many tokens, or tiles are faster. */
bool qt_w4ax_skinny_choose(struct qtool_w4ax_plan *p);
/* Checks p->config and sets what follows from it. */
int qt_w4ax_skinny_check(struct qtool_w4ax_plan *p);
int qt_w4ax_skinny_run(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                       const struct qtool_w4ax_acts *acts, void *y, void *stream);

#endif
