/* Stream kernels for minifloats of 5 to 8 bits. */
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

const void *qt_stream_fpx_instance(enum qt_format format, int token_tiles, int strips)
{
    static const void *const kernels[3][3][2] = {
        FORMAT(qt_decode_fp5, 5), FORMAT(qt_decode_fp6<2>, 6), FORMAT(qt_decode_fp6<3>, 6)};
    /* Slow anyway: one strip. */
    static const void *const any[3] = {KERNEL(qt_decode_any, 8, 1, 1),
                                       KERNEL(qt_decode_any, 8, 2, 1),
                                       KERNEL(qt_decode_any, 8, 4, 1)};
    if (format == QT_FORMAT_ANY)
        return strips == 1 ? any[token_tiles / 2] : 0;
    return kernels[format - QT_FORMAT_FP5_E2][token_tiles / 2][strips - 1];
}
