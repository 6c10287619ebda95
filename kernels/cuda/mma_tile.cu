/* mma.sync tile kernels by code format. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/mma_tile.cuh"

const void *qt_mma_tile_instance(enum qt_format format, int kind)
{
#define GROUP(Format)                       qt_mma_tile_of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const of[])(int) = {QT_GROUP_FORMATS(GROUP) QT_FIELD_FORMATS(FIELD)};
    return of[format](kind);
#undef FIELD
#undef GROUP
}
