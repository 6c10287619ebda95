/* The w4ax tile kernel: instances, arguments and plan. */
#ifndef QT_KERNELS_CUDA_W4AX_TILE_H
#define QT_KERNELS_CUDA_W4AX_TILE_H

#include "kernels/cuda/matmul/tile.h"
#include "kernels/cuda/w4ax/plan.h"

/* Instances: X(consumer warpgroups, tokens per tile, column_us of struct qt_tile_kind for BLOCK,
 * INT, ROW). column_us is for a channel block of 128 here; 0: no instance. BLOCK has two sets of
 * accumulators and not enough registers for the largest tiles; other missing instances would gain
 * 0.1 %. Fitted to sweeps of twelve shapes and 16 to 1024 tokens (bench_w4ax -t -a): the planned
 * configuration takes on average 0.1 to 0.2 % longer than the fastest. */
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

/* Returns the channel blocks per stage. Two halve the number of barriers. But tiles of 256 tokens
 * would have only two stages; with BLOCK and 128 tokens the assembler moves the scaling of a block
 * between the products of the next; and ROW, which only unpacks, loses 1 %. */
static __host__ __device__ constexpr int qt_w4ax_stage_blocks(enum qtool_w4ax_scales scales,
                                                              int tokens)
{
    return tokens <= (scales == QTOOL_W4AX_INT ? 128 : 64) ? 2 : 1;
}

/* Returns the bytes of token scales in a stage, after X (BLOCK). */
static __host__ __device__ constexpr int qt_w4ax_token_bytes(enum qtool_w4ax_scales scales,
                                                             int tokens)
{
    return scales == QTOOL_W4AX_BLOCK
               ? (qt_w4ax_stage_blocks(scales, tokens) * tokens * 4 + 127) / 128 * 128
               : 0;
}

struct qt_w4ax_tile_args : qt_tile_base { /* x: U64 [blocks][m][16], boxes of a stage */
    CUtensorMap token_scales;             /* BLOCK: U64 [blocks][pitch / 2] */
    CUtensorMap codes;                    /* U64 [strips][128 per block] */
    CUtensorMap scales;                   /* BLOCK, INT: U64 [strips][4 or 2 per block] */
    const __half *row_scale;              /* INT, ROW: [strips][16] */
    const int *x_sum;                     /* INT: [m] */
    int f32;                              /* y is FP32 */
    uint32_t zero;                        /* 0, unknown to the compiler */
    uint32_t nibbles;                     /* W4AX_NIBBLES */
};

/* Host address of instance number `kind` of QT_W4AX_TILE_TABLE, or NULL. For sm_90a. */
const void *qt_w4ax_tile_instance(enum qtool_w4ax_scales scales, int kind);

/* Sets p->config, and *us to the estimated time. Returns false if there is no kernel. */
bool qt_w4ax_tile_choose(struct qtool_w4ax_plan *p, double *us);
/* Validates p->config and sets the rest of the plan. */
int qt_w4ax_tile_check(struct qtool_w4ax_plan *p);
int qt_w4ax_tile_run(const struct qtool_w4ax_plan *p, const struct qtool_w4ax_weight *w,
                     const struct qtool_w4ax_acts *acts, void *y, void *workspace, void *stream);

#endif
