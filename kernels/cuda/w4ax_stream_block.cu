/* Instances of the stream kernel for scales=block. */
#include "kernels/cuda/w4ax_stream.cuh"
#include "kernels/cuda/w4ax_stream.h"

const void *qt_w4ax_stream_block(int tokens, int strips, int warps, int m, int *smem)
{
    return w4ax_stream_find<QT_W4AX_BLOCK>(tokens, strips, warps, m, smem);
}
