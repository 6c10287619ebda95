/* Stream kernels by code format. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/stream.cuh"

const void *qt_stream_instance(enum qt_format format, int token_tiles, int strips)
{
#define GROUP(Format)                       qt_stream_of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const of[])(int, int) = {QT_GROUP_FORMATS(GROUP) QT_FIELD_FORMATS(FIELD)};
    return of[format](token_tiles, strips);
#undef FIELD
#undef GROUP
}
