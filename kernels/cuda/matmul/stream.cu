/* Instances of the stream kernel by code format; those of QT_FORMAT_INT4_ZERO are in int4_zero.cu.

 */
#include "kernels/cuda/matmul/instances.h"
#include "kernels/cuda/matmul/stream.cuh"

template <class Format> static const void *of(int token_tiles, int strips)
{
    return qt_stream_of<Format>(token_tiles, strips);
}
template <> const void *of<qt_decode_int4_zero>(int token_tiles, int strips)
{
    return qt_stream_zero_instance(token_tiles, strips);
}

const void *qt_stream_instance(enum qt_format format, int token_tiles, int strips)
{
#define GROUP(Format)                       of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const formats[])(int, int) = {QT_STREAM_GROUP_FORMATS(GROUP)
                                                           QT_FIELD_FORMATS(FIELD)};
    return formats[format](token_tiles, strips);
#undef FIELD
#undef GROUP
}

int qt_stream_table_bytes(enum qt_format format, int token_tiles)
{
#define BYTES(Format) {Format::TABLE_BYTES, stream_format<Format>::of_many::TABLE_BYTES},
    static const int bytes[][2] = {QT_STREAM_GROUP_FORMATS(BYTES)};
    return format <= QT_FORMAT_LAST_GROUPED ? bytes[format][token_tiles > 1] : 0;
#undef BYTES
}
