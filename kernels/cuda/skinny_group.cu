/* Skinny kernels for formats with a scale per group: tables of pairs, integers. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/skinny.cuh"

#define KERNEL(Format, mt, strips) (const void *)qt_skinny_kernel<Format, mt, strips>
#define FORMAT(Format)                                                                             \
    {                                                                                              \
        {KERNEL(Format, 1, 1), KERNEL(Format, 1, 2), KERNEL(Format, 1, 4)},                        \
        {                                                                                          \
            KERNEL(Format, 2, 1), KERNEL(Format, 2, 2), KERNEL(Format, 2, 4)                       \
        }                                                                                          \
    }

const void *qt_skinny_group_instance(enum qt_format format, int token_tiles, int strips)
{
    static const void *const kernels[][2][3] = {
        FORMAT(qt_decode_wide2),     FORMAT(qt_decode_wide3),     FORMAT(qt_decode_wide4),
        FORMAT(qt_decode_int4_wide), FORMAT(qt_decode_int4_zero), FORMAT(qt_decode_int8)};
    return kernels[format - QT_FORMAT_PAIR2][token_tiles - 1][strips / 2];
}
