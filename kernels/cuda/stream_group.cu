/* Stream kernels for formats with a scale per group: tables of pairs, integers. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/stream.cuh"

#define OF(Format) qt_stream_of<Format>,

const void *qt_stream_group_instance(enum qt_format format, int token_tiles, int strips)
{
    static const void *(*const of[])(int, int) = {QT_GROUP_FORMATS(OF)};
    return of[format - QT_FORMAT_PAIR2](token_tiles, strips);
}
