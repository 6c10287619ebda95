/* Instances of the w4ax skinny and tile kernels, compiled for compute capability 9.0 only. The
 * plans look them up (skinny_plan.cc, tile_plan.cc). */
#include "kernels/cuda/w4ax/skinny.cuh"
#include "kernels/cuda/w4ax/tile.cuh"

template <enum qtool_w4ax_scales SCALES>
static const void *w4ax_skinny_kernel_of(int token_tiles, int strips)
{
#define KERNEL(mt, strips) (const void *)qt_w4ax_skinny_kernel<SCALES, mt, strips>
    static const void *const kernels[QT_W4AX_SKINNY_TOKENS / 8][2] = {{KERNEL(1, 1), KERNEL(1, 2)},
                                                                      {KERNEL(2, 1), KERNEL(2, 2)},
                                                                      {KERNEL(3, 1), NULL},
                                                                      {KERNEL(4, 1), NULL}};
#undef KERNEL
    return strips <= 2 ? kernels[token_tiles - 1][strips - 1] : NULL;
}

const void *qt_w4ax_skinny_instance(enum qtool_w4ax_scales scales, int token_tiles, int strips)
{
    return scales == QTOOL_W4AX_BLOCK ? w4ax_skinny_kernel_of<QTOOL_W4AX_BLOCK>(token_tiles, strips)
           : scales == QTOOL_W4AX_INT ? w4ax_skinny_kernel_of<QTOOL_W4AX_INT>(token_tiles, strips)
                                      : w4ax_skinny_kernel_of<QTOOL_W4AX_ROW>(token_tiles, strips);
}

template <enum qtool_w4ax_scales SCALES, int WGS, int BM, bool EXISTS>
static const void *w4ax_tile_kernel_of()
{
    if constexpr (EXISTS)
        return (const void *)qt_w4ax_tile_kernel<SCALES, WGS, BM>;
    else
        return NULL;
}

const void *qt_w4ax_tile_instance(enum qtool_w4ax_scales scales, int kind)
{
#define BLOCK(warpgroups, tokens, block_us, int_us, row_us)                                        \
    w4ax_tile_kernel_of<QTOOL_W4AX_BLOCK, warpgroups, tokens, (block_us > 0)>(),
#define INT(warpgroups, tokens, block_us, int_us, row_us)                                          \
    w4ax_tile_kernel_of<QTOOL_W4AX_INT, warpgroups, tokens, (int_us > 0)>(),
#define ROW(warpgroups, tokens, block_us, int_us, row_us)                                          \
    w4ax_tile_kernel_of<QTOOL_W4AX_ROW, warpgroups, tokens, (row_us > 0)>(),
    static const void *const kernels[][QT_W4AX_TILE_KINDS] = {
        {QT_W4AX_TILE_TABLE(BLOCK)}, {QT_W4AX_TILE_TABLE(INT)}, {QT_W4AX_TILE_TABLE(ROW)}};
    return kernels[scales][kind];
}
