/* mma.sync tile kernels for formats with a scale per group: tables of pairs, integers. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/mma_tile.cuh"

#define OF(Format) qt_mma_tile_of<Format>,

const void *qt_mma_tile_group_instance(enum qt_format format, int kind)
{
    static const void *(*const of[])(int) = {QT_GROUP_FORMATS(OF)};
    return of[format - QT_FORMAT_PAIR2](kind);
}
