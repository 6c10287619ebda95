/* mma.sync tile kernels for minifloats of 5 to 8 bits. */
#include "kernels/cuda/mma_tile.cuh"

const void *qt_mma_tile_fpx_instance(enum qt_format format, int kind)
{
#define KIND(wn, wm, strips, tokens)                                                               \
    (const void *)qt_mma_tile_kernel<QT_TILE_FORMAT, wn, wm, strips, tokens / 8>,
    static const void *const kernels[][QT_MMA_TILE_KINDS] = {
#define QT_TILE_FORMAT qt_decode_fp5
        {QT_MMA_TILE_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_fp6<2>
        {QT_MMA_TILE_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_fp6<3>
        {QT_MMA_TILE_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_any
        {QT_MMA_TILE_TABLE(KIND)},
    };
    return kernels[format - QT_FORMAT_FP5_E2][kind];
}
