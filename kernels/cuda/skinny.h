/* Arguments of the skinny kernel. */
#ifndef QT_CUDA_SKINNY_H
#define QT_CUDA_SKINNY_H

#include "kernels/cuda/decode.cuh"

#include <cuda.h>

/* Blocks of 64 columns of a stage, and slots of 128, each of which one warp of those along k takes.
 */
enum { QT_SKINNY_BLOCKS = 4, QT_SKINNY_SLOTS = 2 };

struct qt_skinny_args {
    CUtensorMap x;        /* F16 [k / 64][m][64]; boxes of a stage's blocks, 8 MT tokens */
    CUtensorMap plane[3]; /* U64 [strips][blocks * 16 * width]; boxes of a stage's blocks */
    CUtensorMap scales;   /* U64 [strips][groups * 4]; grouped formats */
    struct qt_decode_args decode;
    const __half *scale;       /* F16 [strips][pitch_groups][16]: for row scales */
    const float *token_factor; /* [m], or NULL: on every result of a token */
    void *y;                   /* F16 or BF16 [m][n] */
    size_t pitch_groups;
    int alias;
    int m, n, strips;
    int token0;                         /* of X; token_factor and y begin there */
    int strips_cta, tile_strips, tiles; /* of a block: strips = tiles * tile_strips */
    int warps_k;                        /* power of two; warps = warps_n * warps_k */
    int k_stages;
    int group_shift;               /* log2(channels per scale) */
    int slot_groups, stage_groups; /* scales of a row in a slot (at least 1), in a stage */
    float factor;                  /* power of two on every result */
    int bf16;                      /* y is BF16 */
    int dependent;                 /* launched before the previous kernel has ended */
    int stages, stage_bytes, stage_tx, ring_at, scale_at, sums_at, barriers_at;
    int planes_at[3], scales_at; /* in a stage */
};

#endif
