/* The tile kernel of 4-bit integer weights: which there are, its arguments, and its plans. */
#ifndef QT_KERNELS_CUDA_W4AX_TILE_H
#define QT_KERNELS_CUDA_W4AX_TILE_H

#include "kernels/cuda/matmul/tile.h"
#include "kernels/cuda/w4ax/plan.h"

/* The kernels there are: X(warpgroups, tokens, microseconds of struct qt_tile_kind, here of a block
 * of 128 channels, for BLOCK, INT, ROW; 0: there is none. BLOCK, which has two sets of sums, has no
 * registers for the largest; the others that there are not would save a tenth of a percent. Fitted
 * to sweeps of twelve shapes and 16 to 1024 tokens (bench_w4ax -t -a): what is planned takes on
 * average 0.1 to 0.2 % longer than the fastest. */
#define QT_W4AX_TILE_TABLE(X)                                                                      \
    X(2, 16, .215f, .250f, .195f)                                                                  \
    X(2, 32, .256f, .266f, .203f)                                                                  \
    X(2, 48, .311f, .291f, 0)                                                                      \
    X(2, 64, .376f, .312f, .246f)                                                                  \
    X(2, 96, .543f, .363f, .352f)                                                                  \
    X(2, 128, .627f, .432f, .418f)                                                                 \
    X(3, 128, 0, .607f, .585f)                                                                     \
    X(4, 128, 0, .808f, .786f)                                                                     \
    X(2, 160, .779f, .501f, .488f)                                                                 \
    X(2, 192, 0, .612f, 0)                                                                         \
    X(2, 224, 0, .682f, .665f)
enum { QT_W4AX_TILE_KINDS = 11 };

/* Blocks of 128 channels in a stage. Two spare half of the barriers, but tiles of 256 tokens would
 * have two stages, with BLOCK and 128 tokens the assembler puts a block's scaling between the
 * products of the next, and ROW, which has nothing to do but unpack, loses 1 %. */
static __host__ __device__ constexpr int qt_w4ax_stage_blocks(enum qtool_w4ax_scales scales,
                                                              int tokens)
{
    return tokens <= (scales == QTOOL_W4AX_INT ? 128 : 64) ? 2 : 1;
}

/* Of a stage behind X: scales of the tokens (BLOCK). */
static __host__ __device__ constexpr int qt_w4ax_token_bytes(enum qtool_w4ax_scales scales,
                                                             int tokens)
{
    return scales == QTOOL_W4AX_BLOCK
               ? (qt_w4ax_stage_blocks(scales, tokens) * tokens * 4 + 127) / 128 * 128
               : 0;
}

struct qt_w4ax_tile_args : qt_tile_base { /* x: U64 [blocks][m][16], boxes of a stage */
    CUtensorMap token_scales;             /* BLOCK: U64 [blocks][pitch / 2] */
    CUtensorMap codes;                    /* U64 [strips][128 a block] */
    CUtensorMap scales;                   /* BLOCK, INT: U64 [strips][4 or 2 a block] */
    const __half *row_scale;              /* INT, ROW: [strips][16] */
    const int *x_sum;                     /* INT: [m] */
    int f32;                              /* y is FP32 */
    uint32_t zero;                        /* 0, which the compiler does not know */
    uint32_t nibbles;                     /* W4AX_NIBBLES */
};

/* Kernel number `kind` of QT_W4AX_TILE_INTEGER_TABLE; sm_90a. */
const void *qt_w4ax_tile_instance(enum qtool_w4ax_scales scales, int kind);

/* Sets p->config; us: about how long it will take. False: there is no kernel. */
bool qt_w4ax_tile_choose(struct qtool_w4ax_plan *p, double *us);
/* Checks p->config and sets what follows from it. */
int qt_w4ax_tile_check(struct qtool_w4ax_plan *p);
int qt_w4ax_tile_run(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                     const struct qtool_w4ax_acts *acts, void *y, void *workspace, void *stream);

#endif
