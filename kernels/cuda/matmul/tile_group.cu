/* Instances of the tile kernel for formats with a scale per group: look-up tables and integers. */
#include "kernels/cuda/matmul/instances.h"
#include "kernels/cuda/matmul/tile.cuh"

#define OF(Format) qt_tile_of<Format, false>,

const void *qt_tile_group_instance(enum qt_format format, int kind)
{
    static const void *(*const of[])(int) = {QT_TILE_GROUP_FORMATS(OF)};
    return of[format - QT_FORMAT_LUT2](kind);
}

int qt_tile_table_bytes(enum qt_format format)
{
    static const int bytes[] = {QT_TILE_GROUP_FORMATS(QT_TABLE_BYTES)};
    return format <= QT_FORMAT_LAST_GROUPED ? bytes[format] : 0;
}
