/* The stream kernels of 4-bit integer weights by granularity; those that Hopper runs, with packed
 * activations, are here, the others in w4ax_stream_older.cu. */
#include "kernels/cuda/w4ax/stream.cuh"

const void *qt_w4ax_stream_instance(enum qtool_w4ax_scales scales, int tokens, int strips,
                                    int warps, int m, int *smem)
{
    return scales == QTOOL_W4AX_BLOCK
               ? w4ax_stream_find<QTOOL_W4AX_BLOCK>(tokens, strips, warps, m, smem)
               : qt_w4ax_stream_older_instance(scales, tokens, strips, warps, m, smem);
}
