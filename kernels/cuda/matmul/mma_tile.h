/* Arguments of the mma.sync tile kernel, and the kernels there are. */
#ifndef QT_KERNELS_CUDA_MATMUL_MMA_TILE_H
#define QT_KERNELS_CUDA_MATMUL_MMA_TILE_H

#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/matmul/decode.h"

/* X(warps along rows, along tokens; strips of 16 rows of a warp, tokens of a warp). */
#define QT_MMA_TILE_TABLE(X)                                                                       \
    X(8, 1, 2, 32)                                                                                 \
    X(8, 1, 2, 64)                                                                                 \
    X(4, 2, 4, 64)
enum { QT_MMA_TILE_KINDS = 3 };

/* Stages of the ring; bytes between rows of results in shared memory, against bank conflicts. */
enum { QT_MMA_TILE_STAGES = 3, QT_MMA_TILE_PAD = 16 };

/* Token tiles of a band: what runs at the same time shares weights and activations in the L2. */
enum { QT_MMA_TILE_BAND = 8 };

struct qt_mma_tile_args {
    struct qt_decode_args decode;
    const unsigned char *plane[3]; /* U32 [strips][pitch_blocks][32][p] */
    const __half *scale;           /* F16 [strips][pitch_groups][16] */
    const unsigned char *zero;     /* U8 [strips][pitch_groups][2 bits], or NULL */
    const __half *x;               /* F16 [m][blocks * 64], 16-byte aligned */
    const float *token_factor;     /* [m], or NULL: on every result of a token */
    void *y;                       /* F16 or BF16 [m][n] */
    float4 *partial;               /* [tiles][splits][sums of a thread / 4][threads] */
    unsigned *arrivals;            /* [tiles], 0 between launches */
    size_t pitch_blocks, pitch_groups;
    int m, n, strips, blocks; /* of the matrix: 16 rows, 64 columns */
    int row_tiles, token_tiles;
    int split_blocks; /* of k, a split's */
    int group_shift;  /* log2(channels per scale) */
    int groups;       /* scales of a row */
    int stage_groups; /* scales of a row in 64 columns: 0, 1 or 2 */
    float factor;     /* power of two on every result */
    int bf16;         /* y is BF16 */
    int wide_stores;  /* 8 rows of y at a multiple of 8 are 16-byte aligned */
    int stage_bytes, ring_at;
};

const void *qt_mma_tile_instance(enum qt_format format, int kind);

#endif
