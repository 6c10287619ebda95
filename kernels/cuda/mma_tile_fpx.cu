/* mma.sync tile kernels for minifloats of 5 to 8 bits. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/mma_tile.cuh"

#define OF(name, bits, exp_bits, Format) qt_mma_tile_of<Format>,

const void *qt_mma_tile_fpx_instance(enum qt_format format, int kind)
{
    static const void *(*const of[])(int) = {QT_FIELD_FORMATS(OF) qt_mma_tile_of<qt_decode_any>};
    return of[format - QT_FORMAT_FP5_E2](kind);
}
