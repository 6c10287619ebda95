/* The stream kernel: arguments. */
#ifndef QT_KERNELS_CUDA_MATMUL_STREAM_H
#define QT_KERNELS_CUDA_MATMUL_STREAM_H

#include "kernels/cuda/matmul/decode.h"

#include <stdint.h>

struct qt_stream_args {
    struct qt_decode_args decode;
    const unsigned char *plane[3]; /* U32 [strips][pitch_blocks][32][p] */
    const __half *scale;           /* F16 [strips][pitch_groups][16] */
    const unsigned char *zero;     /* U8 [strips][pitch_groups][2 bits], or NULL */
    const void *x;                 /* F16 or BF16 [m][k] */
    void *y;                       /* F16 or BF16 [m][n] */
    float *partial;                /* [splits][m][strips * 16] */
    unsigned *arrivals;            /* [row groups], 0 between launches */
    int pitch_blocks, pitch_groups;
    int m, n, k;
    int strips, blocks; /* strips of 16 rows, fragment blocks of 64 columns */
    int group_shift;    /* log2(channels per scale); 30 for one scale per row */
    int groups;         /* scales per row */
    int slot_groups;    /* groups in two fragment blocks: 1, 2 or 4 */
    float factor;       /* power of two that multiplies every result */
    int bf16;           /* x and y are BF16 */
    int warps_k, strips_cta, splits, passes;
    int split_blocks;                /* fragment blocks of k per thread block; whole groups */
    int slice_blocks;                /* fragment blocks of k per warp; whole groups */
    int sums_buffers;                /* buffers for partial sums: 1 or 2 */
    int x_pitch;                     /* bytes of a row of X in shared memory */
    uint32_t slot_bytes, ring_bytes; /* of a stage; of a warp's pipeline */
    int x_at, token_at, scale_at, sums_at, ring_at; /* offsets in shared memory */
};

/* Pipeline stages of a warp: 7 to 9 KB in a warp with two strips and one token tile. With more
 * token tiles X needs the shared memory. */
static constexpr int qt_stream_depth(int bits, int token_tiles)
{
    return token_tiles > 1 ? (bits >= 4 ? 2 : 3) : bits >= 4 ? 3 : bits == 3 ? 4 : 6;
}

#endif
