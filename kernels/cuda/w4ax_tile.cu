/* Instances of the w4ax tile kernel. */
#include "kernels/cuda/w4ax_tile.cuh"

const void *qt_w4ax_tile_instance(enum qt_w4ax_scales scales, int kind)
{
#define KIND(scales, warpgroups, tokens)                                                           \
    (const void *)qt_w4ax_tile_kernel<scales, warpgroups, tokens>,
#define BLOCK(warpgroups, tokens, ...) KIND(QT_W4AX_BLOCK, warpgroups, tokens)
#define INT(warpgroups, tokens, ...)   KIND(QT_W4AX_INT, warpgroups, tokens)
#define ROW(warpgroups, tokens, ...)   KIND(QT_W4AX_ROW, warpgroups, tokens)
    static const void *const kernels[][QT_W4AX_TILE_KINDS] = {{QT_W4AX_TILE_TABLE(BLOCK)},
                                                              {QT_W4AX_TILE_INTEGER_TABLE(INT)},
                                                              {QT_W4AX_TILE_INTEGER_TABLE(ROW)}};
    return kernels[scales][kind];
}
