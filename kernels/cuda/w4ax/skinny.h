/* The w4ax skinny kernel, for up to 32 tokens: arguments and plan. */
#ifndef QT_KERNELS_CUDA_W4AX_SKINNY_H
#define QT_KERNELS_CUDA_W4AX_SKINNY_H

#include "kernels/cuda/matmul/skinny.h"
#include "kernels/cuda/w4ax/plan.h"

/* Channel blocks per slot. The shared code of the skinny kernels treats the 128 bytes of X of a
 * channel block as a fragment block of 64 FP16 columns. */
enum { QT_W4AX_SLOT_BLOCKS = QT_SKINNY_BLOCKS / QT_SKINNY_SLOTS };

/* Maximum tokens, and maximum consumer warps: with the producers there are 16 warps of 128
 * registers per thread. */
enum { QT_W4AX_SKINNY_TOKENS = 32, QT_W4AX_SKINNY_WARPS = 14 };

struct qt_w4ax_skinny_args : qt_skinny_base { /* x: U64 [blocks][m][16], boxes of a stage */
    CUtensorMap token_scales;                 /* BLOCK: U64 [blocks][pitch / 2], boxes of a stage */
    CUtensorMap codes;                        /* U64 [strips][128 per block], boxes of a slot */
    CUtensorMap scales;      /* BLOCK, INT: U64 [strips][4 or 2 per block], boxes of a stage */
    const __half *row_scale; /* INT, ROW: [strips][16] */
    const int *x_sum;        /* INT: [m] */
    uint32_t nibbles;        /* W4AX_NIBBLES */
    int slot_bytes;          /* bytes of codes per slot of a stage */
    int token_scales_at, token_pitch; /* offset in a stage; bytes per channel block */
    int f32;                          /* y is FP32 */
};

/* Host address of a kernel, or NULL if it does not exist. token_tiles 1 to 4. For sm_90a. */
const void *qt_w4ax_skinny_instance(enum qtool_w4ax_scales scales, int token_tiles, int strips);

/* Sets p->config. Returns false if the kernel does not support the device or m, or if the tile
 * kernel is faster. */
bool qt_w4ax_skinny_choose(struct qtool_w4ax_plan *p);
/* Validates p->config and sets the rest of the plan. */
int qt_w4ax_skinny_check(struct qtool_w4ax_plan *p);
int qt_w4ax_skinny_run(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                       const struct qtool_w4ax_acts *acts, void *y, void *stream);

#endif
