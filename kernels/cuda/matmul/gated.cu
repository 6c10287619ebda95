/* Instances of the skinny and the tile kernel for gated products. They are instances of their own
 * because other products would become slower with a second epilogue in their code. With 6-bit
 * minifloats a decode step of one sequence gains nothing; other formats are rare. */
#include "kernels/cuda/matmul/instances.h"
#include "kernels/cuda/matmul/skinny.cuh"
#include "kernels/cuda/matmul/tile.cuh"

const void *qt_skinny_gated_instance(enum qt_format format, int token_tiles, int strips, int last)
{
    switch (format) {
    case QT_FORMAT_LUT3:
        return qt_skinny_gated_of<qt_decode_steps3>(token_tiles, strips, last);
    case QT_FORMAT_LUT4:
        return qt_skinny_gated_of<qt_decode_wide4>(token_tiles, strips, last);
    case QT_FORMAT_INT4:
        return qt_skinny_gated_of<qt_decode_int4>(token_tiles, strips, last);
    case QT_FORMAT_INT4_ZERO:
        return qt_skinny_gated_of<qt_decode_int4_zero>(token_tiles, strips, last);
    default:
        return NULL;
    }
}

const void *qt_tile_gated_instance(enum qt_format format, int kind)
{
    switch (format) {
    case QT_FORMAT_LUT3:
        return qt_tile_of<qt_decode_mixed3, true>(kind);
    case QT_FORMAT_LUT4:
        return qt_tile_of<qt_decode_tile4, true>(kind);
    case QT_FORMAT_INT4:
        return qt_tile_of<qt_decode_int4, true>(kind);
    case QT_FORMAT_INT4_ZERO:
        return qt_tile_of<qt_decode_int4_zero, true>(kind);
    default:
        return NULL;
    }
}
