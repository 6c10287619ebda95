/* Instances of the w4ax stream kernel with INT and ROW scales, compiled for compute capability 8.0
 * only: Hopper has other kernels for these scales. */
#include "kernels/cuda/w4ax/stream.cuh"

const void *qt_w4ax_stream_sm80_instance(enum qtool_w4ax_scales scales, int tokens, int strips,
                                         int warps, int m, int *smem)
{
    return scales == QTOOL_W4AX_INT
               ? w4ax_stream_find<QTOOL_W4AX_INT>(tokens, strips, warps, m, smem)
               : w4ax_stream_find<QTOOL_W4AX_ROW>(tokens, strips, warps, m, smem);
}
