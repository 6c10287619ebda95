/* Layers of experts: what host and device code share. */
#ifndef QT_KERNELS_CUDA_MOE_MOE_H
#define QT_KERNELS_CUDA_MOE_MOE_H

#include "kernels/cuda/matmul/decode.h"
#include "kernels/cuda/matmul/instances.h"
#include "kernels/include/qtool_moe.h"

#include <cuda_runtime.h>
#include <stdint.h>

/* A matrix in the table of a layer. */
struct alignas(64) qt_moe_matrix {
    const unsigned char *plane[3]; /* U32 [strips][pitch_blocks][32][p] */
    const __half *scale;           /* F16 [strips][pitch_groups][16] */
    const unsigned char *zero;     /* U8 [strips][pitch_groups][2 bits], or NULL */
    const __half *table;           /* LUT: F16 [2^bits]; FPX of up to 4 bits: NULL */
    float factor;                  /* power of two that multiplies every result */
};

enum { QT_MOE_GATE, QT_MOE_UP, QT_MOE_DOWN, QT_MOE_MATRICES };
static_assert(QT_MOE_MATRICES * sizeof(struct qt_moe_matrix) == QTOOL_MOE_TABLE_EXPERT,
              "size of the public header");

/* The product kernel: warps of a thread block, strips of a warp, pipeline stages at most, bytes of
 * a stage's header. Kernels by number of tokens of an expert: FEW tokens share a tile of 16, MANY
 * a tile of 64. */
enum { QT_MOE_WARPS = 8, QT_MOE_STRIPS = 2, QT_MOE_STAGES = 6, QT_MOE_HEADER = 128 };
enum { QT_MOE_FEW, QT_MOE_MANY, QT_MOE_KINDS };
enum { QT_MOE_FEW_TOKENS = 16, QT_MOE_MANY_TOKENS = 64 };

/*
 * Pairs (token t, choice j) have the number t * topk + j. The sort writes the pairs of each expert
 * one after the other, in ascending order; `position` is the place of a pair in this order. A work
 * item is a tile of one expert's pairs.
 */
struct qt_moe_item {
    int expert, first, rows, unused; /* positions first to first + rows - 1 */
};

struct qt_moe_route_args {
    const int *ids;              /* [pairs] */
    int *order;                  /* [pairs]: position to pair */
    int *position;               /* [pairs]: pair to position; -1: not of this layer */
    struct qt_moe_item *item[2]; /* by kind */
    int *items;                  /* [2]: number of items by kind */
    int pairs, experts, first_expert;
    int few_pairs; /* experts with more pairs have items of the kind MANY */
};

struct qt_moe_combine_args {
    const float *partial; /* [pairs][pitch], by position */
    const int *position;  /* [pairs] */
    const float *weights; /* [pairs] */
    void *y;              /* F16 or BF16 [tokens][n] */
    int tokens, topk, n, pitch, bf16;
    int wide; /* n is a multiple of 8 */
};

/* One product: gate and up with the activation, or one matrix. */
struct qt_moe_product_args {
    const struct qt_moe_matrix *table; /* [experts][QT_MOE_MATRICES] */
    const struct qt_moe_item *item;
    const int *items;          /* number of items */
    const int *order;          /* gate, up: X is by token; down: NULL, X is by position */
    const __half *x;           /* F16 [..][x_pitch] */
    const float *token_factor; /* factor of all results of a row of X; NULL: 1 */
    void *y; /* [positions][y_pitch]; after the activation F16 or BF16, else F32 */
    struct qt_decode_args decode; /* without table */
    size_t pitch_blocks, pitch_groups;
    int gated;       /* gate and up in one launch: a warp has the same strip of both */
    int matrix;      /* QT_MOE_GATE with `gated`; else the one matrix */
    const float *up; /* gate alone: the results of up [positions][y_pitch] */
    int topk, bf16;
    float slope, cubic; /* of the activation */
    int x_pitch, k, y_pitch, n;
    int strips, blocks; /* strips of 16 rows, fragment blocks of 64 columns */
    int group_shift;    /* log2(channels per scale); 30 for one scale per row */
    int groups;         /* scales per row */
    int slot_groups;    /* scales per row in 128 columns: 1, 2 or 4 */
    int row_tiles;      /* units of an item: row_tiles thread block tiles of rows */
    int log2_wk;        /* log2(warps along k) */
    int slots;          /* stages of a unit */
    int stages, stage_bytes, warp_bytes; /* of the pipeline; of the weights of a warp in a stage */
    int ring_at, sums_at;                /* offsets in shared memory */
};

/* Host addresses of kernels. */
const void *qt_moe_route_instance(void);
const void *qt_moe_combine_instance(void);
/* NULL if the format has no kernel of this kind; all formats have FEW. */
const void *qt_moe_product_instance(enum qt_format format, int kind);

#endif
