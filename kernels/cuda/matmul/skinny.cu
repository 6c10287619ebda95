/* Instances of the skinny kernel by code format. */
#include "kernels/cuda/matmul/instances.h"
#include "kernels/cuda/matmul/skinny.cuh"

const void *qt_skinny_instance(enum qt_format format, int token_tiles, int strips, int last,
                               bool small)
{
#define GROUP(Format)                       qt_skinny_of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const of[])(int, int, int, bool) = {QT_SKINNY_GROUP_FORMATS(GROUP)
                                                                 QT_FIELD_FORMATS(FIELD)};
    return of[format](token_tiles, strips, last, small);
#undef FIELD
#undef GROUP
}

int qt_skinny_table_bytes(enum qt_format format, bool small)
{
#define BYTES(Format) {Format::TABLE_BYTES, skinny_format<Format>::of_small::TABLE_BYTES},
    static const int bytes[][2] = {QT_SKINNY_GROUP_FORMATS(BYTES)};
    return format <= QT_FORMAT_LAST_GROUPED ? bytes[format][small] : 0;
#undef BYTES
}
