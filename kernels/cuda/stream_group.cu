/* Stream kernels for formats with a scale per group: tables of pairs, integers. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/stream.cuh"

#define KERNEL(Format, bits, mt, strips)                                                           \
    (const void *)qt_stream_kernel<Format, mt, strips, qt_stream_depth(bits, mt)>
#define FORMAT(Format, bits)                                                                       \
    {                                                                                              \
        {KERNEL(Format, bits, 1, 1), KERNEL(Format, bits, 1, 2)},                                  \
            {KERNEL(Format, bits, 2, 1), KERNEL(Format, bits, 2, 2)},                              \
        {                                                                                          \
            KERNEL(Format, bits, 4, 1)                                                             \
        }                                                                                          \
    }

const void *qt_stream_group_instance(enum qt_format format, int token_tiles, int strips)
{
    static const void *const kernels[][3][2] = {
        FORMAT(qt_decode_pair2, 2), FORMAT(qt_decode_pair3, 3),     FORMAT(qt_decode_pair4, 4),
        FORMAT(qt_decode_int4, 4),  FORMAT(qt_decode_int4_zero, 4), FORMAT(qt_decode_int8, 8)};
    return kernels[format - QT_FORMAT_PAIR2][token_tiles / 2][strips - 1];
}
