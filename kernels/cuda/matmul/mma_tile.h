/* The mma.sync tile kernel: arguments and instances. */
#ifndef QT_KERNELS_CUDA_MATMUL_MMA_TILE_H
#define QT_KERNELS_CUDA_MATMUL_MMA_TILE_H

#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/matmul/decode.h"
#include "kernels/cuda/matmul/instances.h"

/* Instances: X(warps along rows, warps along tokens, strips per warp, tokens per warp). */
#define QT_MMA_TILE_TABLE(X)                                                                       \
    X(8, 1, 2, 32)                                                                                 \
    X(8, 1, 2, 64)                                                                                 \
    X(4, 2, 4, 64)
enum { QT_MMA_TILE_KINDS = 3 };

/* Pipeline stages; padding of result rows in shared memory against bank conflicts, in bytes. */
enum { QT_MMA_TILE_STAGES = 3, QT_MMA_TILE_PAD = 16 };

/* Token tiles of a band: thread blocks that run at the same time share weights and X in the L2. */
enum { QT_MMA_TILE_BAND = 8 };

struct qt_mma_tile_args {
    struct qt_decode_args decode;
    const unsigned char *plane[3]; /* U32 [strips][pitch_blocks][32][p] */
    const __half *scale;           /* F16 [strips][pitch_groups][16] */
    const unsigned char *zero;     /* U8 [strips][pitch_groups][2 bits], or NULL */
    const __half *x;               /* F16 [m][blocks * 64], 16-byte aligned */
    const float *token_factor;     /* [m], or NULL: factor of all results of a token */
    void *y;                       /* F16 or BF16 [m][n] */
    float4 *partial;               /* [tiles][splits][accumulators of a thread / 4][threads] */
    unsigned *arrivals;            /* [tiles], 0 between launches */
    size_t pitch_blocks, pitch_groups;
    int m, n, strips, blocks; /* strips of 16 rows, fragment blocks of 64 columns */
    int row_tiles, token_tiles;
    int split_blocks; /* fragment blocks per split-K part */
    int group_shift;  /* log2(channels per scale) */
    int groups;       /* scales per row */
    int stage_groups; /* scales per row in 64 columns: 0, 1 or 2 */
    float factor;     /* power of two that multiplies every result */
    int bf16;         /* y is BF16 */
    int wide_stores;  /* n is a multiple of 8 and y is 16-byte aligned */
    int stage_bytes, ring_at;
};

/* Host address of instance number `kind` of QT_MMA_TILE_TABLE. */
const void *qt_mma_tile_instance(enum qt_format format, int kind);

#endif
