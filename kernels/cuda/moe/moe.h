/* Layers of experts: what host and device code share. */
#ifndef QT_KERNELS_CUDA_MOE_MOE_H
#define QT_KERNELS_CUDA_MOE_MOE_H

#include "kernels/cuda/matmul/decode.h"
#include "kernels/cuda/matmul/instances.h"
#include "kernels/include/qtool_moe.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

/* A matrix in the table of a layer. */
struct alignas(64) qt_moe_matrix {
    const unsigned char *plane[3]; /* U32 [strips][pitch_blocks][32][p] */
    const __half *scale;           /* F16 [strips][pitch_groups][16] */
    const unsigned char *zero;     /* U8 [strips][pitch_groups][2 bits], or NULL */
    const __half *table;           /* LUT: F16 [2^bits]; FPX of up to 4 bits: NULL */
    float factor;                  /* power of two that multiplies every result */
    const float *bias;             /* [n], or NULL */
};

enum { QT_MOE_GATE, QT_MOE_UP, QT_MOE_DOWN, QT_MOE_MATRICES };
static_assert(QT_MOE_MATRICES * sizeof(struct qt_moe_matrix) == QTOOL_MOE_TABLE_EXPERT,
              "size of the public header");

/* The product kernel: warps of a thread block, strips of a warp, pipeline stages at most, bytes of
 * a stage's header. Kernels by number of tokens of an expert: FEW tokens share a tile of 16, MANY
 * a tile of 64; with wgmma (wide.cuh) one of up to 256. */
enum { QT_MOE_WARPS = 8, QT_MOE_STRIPS = 2, QT_MOE_STAGES = 6, QT_MOE_HEADER = 128 };
/* Threads of the kernel for few tokens on 9.0: two further warps copy. */
enum { QT_MOE_FEW_THREADS = (QT_MOE_WARPS + 2) * 32 };
enum { QT_MOE_FEW, QT_MOE_MANY, QT_MOE_KINDS };
enum { QT_MOE_FEW_TOKENS = 16, QT_MOE_MANY_TOKENS = 64, QT_MOE_WIDE_TOKENS = 256 };
/* The kernel by wgmma: threads; tokens of a TMA box of X; bytes of what the epilogue of a unit
 * needs, of the results of all warps that are transposed at a time, and of what warps exchange. */
enum { QT_MOE_WIDE_THREADS = 384, QT_MOE_WIDE_BOX = 32, QT_MOE_UNIT_BYTES = 1408 };
enum { QT_MOE_RESULT_BYTES = QT_MOE_WARPS * 512, QT_MOE_EXCHANGE_BYTES = 4 * 256 * 16 };
/* The sort: what it scans; thread blocks of the cluster that sorts many pairs. */
enum { QT_MOE_ROUTE_KINDS = 2 + QT_MOE_WIDE_TOKENS / 32, QT_MOE_ROUTE_BLOCKS = 8 };

/*
 * Pairs (token t, choice j) have the number t * topk + j. The sort writes the pairs of each expert
 * one after the other, in ascending order; `position` is the place of a pair in this order. Where
 * the positions of an expert begin at a multiple of 8, some before them belong to no pair. A work
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
    int few_pairs;   /* experts with more pairs have items of the kind MANY */
    int many_tokens; /* of these items at most */
    int align;       /* the positions of an expert begin at a multiple of it */
};

/*
 * Few pairs are not sorted: pair i has the position i, and is an item. `ids` then is not NULL and
 * stands for order, position and items.
 */
struct qt_moe_direct {
    const int *ids; /* [pairs]; NULL: the pairs were sorted */
    int pairs, experts, first_expert;
};

struct qt_moe_combine_args {
    const void *partial; /* F32 or, if `rounded`, as y: [pairs][pitch], by position */
    const int *position; /* [pairs] */
    struct qt_moe_direct direct;
    const float *weights; /* [pairs] */
    void *y;              /* F16 or BF16 [tokens][n] */
    int tokens, topk, n, pitch, bf16, rounded;
    int wide; /* n is a multiple of 8 */
};

/* One product, whatever the kind of weights: gate and up with the activation, or one matrix. */
struct qt_moe_unit_args {
    const struct qt_moe_item *item;
    const int *items; /* number of items */
    const int *order; /* [positions] */
    struct qt_moe_direct direct;
    int by_token; /* X is by token, not by position */
    int early;    /* the sort has ended when this kernel starts: weights may be copied */
    void *y;      /* [positions][y_pitch]; F16 or BF16 if `rounded`, else F32 */
    int gated;    /* gate and up in one launch: a warp has the same strip of both */
    int matrix;   /* QT_MOE_GATE with `gated`; else the one matrix */
    int topk, bf16, rounded;
    float slope, cubic, limit, offset; /* of the activation: moe_gated */
    int k, y_pitch, n;
    int strips;              /* of 16 rows */
    int row_tiles;           /* units of an item: row_tiles thread block tiles of rows */
    int log2_wk;             /* log2(warps along k) */
    int slots;               /* stages of a unit */
    int stages, stage_bytes; /* of the pipeline */
    int ring_at, sums_at;    /* offsets in shared memory */
    int results_at, exchange_at, units_at, barriers_at; /* the same, of the kernel by wgmma */
    int whole_stores; /* rows of y are 16-byte aligned, and n is a multiple of 8 */
};

/* A product whose X is FP16. */
struct qt_moe_half_args : qt_moe_unit_args {
    const __half *x;           /* [..][x_pitch] */
    const float *token_factor; /* factor of all results of a row of X; NULL: 1 */
    const void *up;            /* gate alone: the results of up [positions][up_pitch] */
    int up_pitch;              /* of F32; of the kernel by wgmma, of the 16-bit values */
    int x_pitch;
};

/* LUT, FPX and INT weights. */
struct qt_moe_product_args : qt_moe_half_args {
    const struct qt_moe_matrix *table; /* [experts][QT_MOE_MATRICES] */
    struct qt_decode_args decode;      /* without table */
    size_t pitch_blocks, pitch_groups;
    int blocks;      /* fragment blocks of 64 columns */
    int group_shift; /* log2(channels per scale); 30 for one scale per row */
    int groups;      /* scales per row */
    int slot_groups; /* scales per row in the columns of a stage: 1, 2 or 4 */
    int warp_bytes;  /* of the weights of a warp in a stage */
};

/* The same by wgmma. X and token_factor are by position; stage_bytes are those of weights. */
struct qt_moe_wide_args : qt_moe_product_args {
    CUtensorMap x_map; /* F16 [positions][k], boxes of QT_MOE_WIDE_BOX x 64 */
    int x_bytes;       /* of X in a stage */
    int units;         /* of which the thread block keeps what their epilogues need */
    int weights_at;    /* as ring_at, which is that of X */
};

/* Copies rows of X to the positions of their pairs, unless there are no items of the kind MANY. */
struct qt_moe_gather_args {
    const int *items;    /* of the kind MANY */
    const int *position; /* [tokens][topk] */
    int tokens, topk;
    int pitch;                 /* of rows, in chunks of 16 bytes */
    const uint4 *x;            /* [tokens][pitch] */
    const float *token_factor; /* [tokens], or NULL */
    uint4 *out;                /* [positions][pitch] */
    float *out_factor;         /* [positions] */
};

/* Host addresses of kernels. */
const void *qt_moe_route_instance(void);
const void *qt_moe_gather_instance(void);
const void *qt_moe_combine_instance(void);
const void *qt_moe_few_instance(enum qt_format format);      /* for 9.0a */
const void *qt_moe_few_sm80_instance(enum qt_format format); /* for 8.0 */
/* NULL if the format has no such kernel. */
const void *qt_moe_many_instance(enum qt_format format); /* for 8.0 */
const void *qt_moe_wide_instance(enum qt_format format); /* for 9.0a */
int qt_moe_wide_table_bytes(enum qt_format format);

#endif
