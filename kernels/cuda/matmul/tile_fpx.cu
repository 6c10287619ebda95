/* Instances of the tile kernel for minifloats of 5 to 8 bits. */
#include "kernels/cuda/matmul/instances.h"
#include "kernels/cuda/matmul/tile.cuh"

#define OF(name, bits, exp_bits, Format) qt_tile_of<Format, false>,

const void *qt_tile_fpx_instance(enum qt_format format, int kind)
{
    static const void *(*const of[])(int) = {QT_FIELD_FORMATS(OF)};
    return of[format - QT_FORMAT_FP5_E2](kind);
}
