/* Skinny kernels by code format. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/skinny.cuh"

const void *qt_skinny_instance(enum qt_format format, int token_tiles, int strips, int last)
{
#define GROUP(Format)                       qt_skinny_of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const of[])(int, int, int) = {QT_SKINNY_GROUP_FORMATS(GROUP)
                                                           QT_FIELD_FORMATS(FIELD)};
    return of[format](token_tiles, strips, last);
#undef FIELD
#undef GROUP
}

int qt_skinny_table_bytes(enum qt_format format)
{
    static const int bytes[] = {QT_SKINNY_GROUP_FORMATS(QT_TABLE_BYTES)};
    return format <= QT_FORMAT_LAST_GROUPED ? bytes[format] : 0;
}
