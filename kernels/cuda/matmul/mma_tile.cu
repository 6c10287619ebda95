/* Instances of the mma.sync tile kernel by code format; those of QT_FORMAT_INT4_ZERO are in
 * int4_zero.cu. */
#include "kernels/cuda/matmul/instances.h"
#include "kernels/cuda/matmul/mma_tile.cuh"

template <class Format> static const void *of(int kind)
{
    return qt_mma_tile_of<Format>(kind);
}
template <> const void *of<qt_decode_int4_zero>(int kind)
{
    return qt_mma_tile_zero_instance(kind);
}

const void *qt_mma_tile_instance(enum qt_format format, int kind)
{
#define GROUP(Format)                       of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const formats[])(int) = {QT_MMA_TILE_GROUP_FORMATS(GROUP)
                                                      QT_FIELD_FORMATS(FIELD)};
    return formats[format](kind);
#undef FIELD
#undef GROUP
}

int qt_mma_tile_table_bytes(enum qt_format format)
{
    static const int bytes[] = {QT_MMA_TILE_GROUP_FORMATS(QT_TABLE_BYTES)};
    return format <= QT_FORMAT_LAST_GROUPED ? bytes[format] : 0;
}
