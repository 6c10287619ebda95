/* Stream kernels for minifloats of 5 to 8 bits. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/stream.cuh"

#define OF(name, bits, exp_bits, Format) qt_stream_of<Format>,

const void *qt_stream_fpx_instance(enum qt_format format, int token_tiles, int strips)
{
    static const void *(*const of[])(int, int) = {QT_FIELD_FORMATS(OF) qt_stream_of<qt_decode_any>};
    return of[format - QT_FORMAT_FP5_E2](token_tiles, strips);
}
