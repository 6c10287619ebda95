/* Instances of the w4ax tile kernel. */
#include "kernels/cuda/w4ax_tile.cuh"

template <enum qt_w4ax_scales SCALES, int WGS, int BM, bool EXISTS>
static const void *w4ax_tile_kernel_of()
{
    if constexpr (EXISTS)
        return (const void *)qt_w4ax_tile_kernel<SCALES, WGS, BM>;
    else
        return NULL;
}

const void *qt_w4ax_tile_instance(enum qt_w4ax_scales scales, int kind)
{
#define BLOCK(warpgroups, tokens, block_us, int_us, row_us)                                        \
    w4ax_tile_kernel_of<QT_W4AX_BLOCK, warpgroups, tokens, (block_us > 0)>(),
#define INT(warpgroups, tokens, block_us, int_us, row_us)                                          \
    w4ax_tile_kernel_of<QT_W4AX_INT, warpgroups, tokens, (int_us > 0)>(),
#define ROW(warpgroups, tokens, block_us, int_us, row_us)                                          \
    w4ax_tile_kernel_of<QT_W4AX_ROW, warpgroups, tokens, (row_us > 0)>(),
    static const void *const kernels[][QT_W4AX_TILE_KINDS] = {
        {QT_W4AX_TILE_TABLE(BLOCK)}, {QT_W4AX_TILE_TABLE(INT)}, {QT_W4AX_TILE_TABLE(ROW)}};
    return kernels[scales][kind];
}
