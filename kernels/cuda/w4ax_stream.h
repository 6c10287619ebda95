/* Which stream kernels there are; the tables are in w4ax_stream_*.cu. */
#ifndef QT_CUDA_W4AX_STREAM_H
#define QT_CUDA_W4AX_STREAM_H

#include "kernels/cuda/w4ax.cuh"

/* Host address of the stream kernel, and bytes of its shared memory; NULL if there is none. */
const void *qt_w4ax_stream_block(int tokens, int strips, int warps, int m, int *smem);
const void *qt_w4ax_stream_int(int tokens, int strips, int warps, int m, int *smem);
const void *qt_w4ax_stream_row(int tokens, int strips, int warps, int m, int *smem);

#endif
