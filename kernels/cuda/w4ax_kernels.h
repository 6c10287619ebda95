/* Which kernels there are; the tables are in w4ax_stream_*.cu and w4ax_tile.cu. */
#ifndef QT_CUDA_W4AX_KERNELS_H
#define QT_CUDA_W4AX_KERNELS_H

#include "kernels/cuda/w4ax.cuh"

/* Host address of the stream kernel, and bytes of its shared memory; NULL if there is none. */
const void *qt_w4ax_stream_block(int tokens, int strips, int warps, int m, int *smem);
const void *qt_w4ax_stream_int(int tokens, int strips, int warps, int m, int *smem);
const void *qt_w4ax_stream_row(int tokens, int strips, int warps, int m, int *smem);

/* The tile kernel: 256 rows x 16, 32, 64, 128 tokens at a time, BLOCK 128 x 128; *rows says. */
enum { QT_W4AX_TILE_THREADS = 384 };
const void *qt_w4ax_tile(enum qt_w4ax_scales scales, int tokens, int *rows, int *smem);

#endif
