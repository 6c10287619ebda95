/* Skinny kernels for formats with a scale per group: tables of pairs, integers. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/skinny.cuh"

#define OF(Format) qt_skinny_of<Format>,

const void *qt_skinny_group_instance(enum qt_format format, int token_tiles, int strips)
{
    static const void *(*const of[])(int, int) = {QT_WIDE_GROUP_FORMATS(OF)};
    return of[format - QT_FORMAT_PAIR2](token_tiles, strips);
}
