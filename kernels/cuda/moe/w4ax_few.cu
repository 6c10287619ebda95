/* Instances of the grouped product of w4ax experts of few tokens, in tiles of 16. */
#include "kernels/cuda/moe/w4ax_product.cuh"

const void *qt_moe_w4ax_few_instance(enum qtool_w4ax_scales scales)
{
    enum { TILES = QT_MOE_FEW_TOKENS / 8 };
    return scales == QTOOL_W4AX_BLOCK ? (const void *)qt_moe_w4ax_kernel<QTOOL_W4AX_BLOCK, TILES>
           : scales == QTOOL_W4AX_INT ? (const void *)qt_moe_w4ax_kernel<QTOOL_W4AX_INT, TILES>
                                      : (const void *)qt_moe_w4ax_kernel<QTOOL_W4AX_ROW, TILES>;
}
