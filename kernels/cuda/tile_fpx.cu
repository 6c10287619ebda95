/* Tile kernels for minifloats of 5 to 8 bits. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/tile.cuh"

const void *qt_tile_fpx_instance(enum qt_format format, int kind)
{
#define KIND(wgs, tokens, blocks) (const void *)qt_tile_kernel<QT_TILE_FORMAT, wgs, tokens, blocks>,
    static const void *const kernels[][QT_TILE_FPX_KINDS] = {
#define QT_TILE_FORMAT qt_decode_fp5
        {QT_TILE_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_fp6<2>
        {QT_TILE_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_fp6<3>
        {QT_TILE_TABLE(KIND)},
    };
    return kind < QT_TILE_FPX_KINDS ? kernels[format - QT_FORMAT_FP5_E2][kind] : NULL;
}
