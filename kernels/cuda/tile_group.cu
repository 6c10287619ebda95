/* Tile kernels for formats with a scale per group: tables of pairs, integers. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/tile.cuh"

const void *qt_tile_group_instance(enum qt_format format, int kind)
{
#define KIND(wgs, tokens, blocks) (const void *)qt_tile_kernel<QT_TILE_FORMAT, wgs, tokens, blocks>,
    static const void *const kernels[][QT_TILE_KINDS] = {
#define QT_TILE_FORMAT qt_decode_wide2
        {QT_TILE_GROUP_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_wide3
        {QT_TILE_GROUP_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_wide4
        {QT_TILE_GROUP_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_int4_wide
        {QT_TILE_GROUP_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_int4_zero
        {QT_TILE_GROUP_TABLE(KIND)},
#undef QT_TILE_FORMAT
#define QT_TILE_FORMAT qt_decode_int8
        {QT_TILE_GROUP_TABLE(KIND)},
    };
    return kernels[format - QT_FORMAT_PAIR2][kind];
}
