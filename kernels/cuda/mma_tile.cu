/* mma.sync tile kernels by code format. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/mma_tile.cuh"

const void *qt_mma_tile_instance(enum qt_format format, int kind)
{
#define GROUP(Format)                       qt_mma_tile_of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const of[])(int) = {QT_MMA_TILE_GROUP_FORMATS(GROUP)
                                                 QT_FIELD_FORMATS(FIELD)};
    return of[format](kind);
#undef FIELD
#undef GROUP
}

int qt_mma_tile_table_bytes(enum qt_format format)
{
    static const int bytes[] = {QT_MMA_TILE_GROUP_FORMATS(QT_TABLE_BYTES)};
    return format <= QT_FORMAT_LAST_GROUPED ? bytes[format] : 0;
}
