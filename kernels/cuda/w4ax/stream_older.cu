/* Stream kernels of 4-bit integer weights with scales of INT and ROW. */
#include "kernels/cuda/w4ax/stream.cuh"

const void *qt_w4ax_stream_older_instance(enum qtool_w4ax_scales scales, int tokens, int strips,
                                          int warps, int m, int *smem)
{
    return scales == QTOOL_W4AX_INT
               ? w4ax_stream_find<QTOOL_W4AX_INT>(tokens, strips, warps, m, smem)
               : w4ax_stream_find<QTOOL_W4AX_ROW>(tokens, strips, warps, m, smem);
}
