/* Instances of the w4ax stream kernel with BLOCK scales, which Hopper runs for packed activations.
 * Those with INT and ROW scales are in stream_sm80.cu. */
#include "kernels/cuda/w4ax/stream.cuh"

const void *qt_w4ax_stream_instance(enum qtool_w4ax_scales scales, int tokens, int strips,
                                    int warps, int m, int *smem)
{
    return scales == QTOOL_W4AX_BLOCK
               ? w4ax_stream_find<QTOOL_W4AX_BLOCK>(tokens, strips, warps, m, smem)
               : qt_w4ax_stream_sm80_instance(scales, tokens, strips, warps, m, smem);
}
