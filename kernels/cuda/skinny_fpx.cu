/* Skinny kernels for minifloats of 5 to 8 bits. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/skinny.cuh"

#define OF(name, bits, exp_bits, Format) qt_skinny_of<Format>,

const void *qt_skinny_fpx_instance(enum qt_format format, int token_tiles, int strips)
{
    static const void *(*const of[])(int, int) = {QT_FIELD_FORMATS(OF)};
    return of[format - QT_FORMAT_FP5_E2](token_tiles, strips);
}
