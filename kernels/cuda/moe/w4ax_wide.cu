/* Instances of the grouped product of w4ax experts by wgmma. */
#include "kernels/cuda/moe/w4ax_wide.cuh"

const void *qt_moe_w4ax_wide_instance(enum qtool_w4ax_scales scales)
{
    return scales == QTOOL_W4AX_BLOCK ? (const void *)qt_moe_w4ax_wide_kernel<QTOOL_W4AX_BLOCK>
           : scales == QTOOL_W4AX_INT ? (const void *)qt_moe_w4ax_wide_kernel<QTOOL_W4AX_INT>
                                      : (const void *)qt_moe_w4ax_wide_kernel<QTOOL_W4AX_ROW>;
}
