/* Instances of the stream kernel for scales=int. */
#include "kernels/cuda/w4ax_stream.cuh"
#include "kernels/cuda/w4ax_stream.h"

const void *qt_w4ax_stream_int(int tokens, int strips, int warps, int m, int *smem)
{
    return w4ax_stream_find<QT_W4AX_INT>(tokens, strips, warps, m, smem);
}
