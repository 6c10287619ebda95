/* mma.sync tile kernels for formats with a scale per group: tables of pairs, integers. */
#include "kernels/cuda/mma_tile.cuh"

const void *qt_mma_tile_group_instance(enum qt_format format, int kind)
{
#define KIND(wn, wm, strips, tokens)                                                               \
    (const void *)qt_mma_tile_kernel<QT_TILE_FORMAT, wn, wm, strips, tokens / 8>,
    static const void *const kernels[][QT_MMA_TILE_KINDS] = {
#define QT_TILE_FORMAT qt_decode_pair2
        {QT_MMA_TILE_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_pair3
        {QT_MMA_TILE_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_pair4
        {QT_MMA_TILE_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_int4
        {QT_MMA_TILE_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_int4_zero
        {QT_MMA_TILE_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_int8
        {QT_MMA_TILE_TABLE(KIND)},
    };
    return kernels[format - QT_FORMAT_PAIR2][kind];
}
