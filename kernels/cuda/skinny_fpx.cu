/* Skinny kernels for minifloats of 5 and 6 bits. */
#include "kernels/cuda/instances.h"
#include "kernels/cuda/skinny.cuh"

#define KERNEL(Format, mt, strips) (const void *)qt_skinny_kernel<Format, mt, strips>
#define FORMAT(...)                                                                                \
    {                                                                                              \
        {KERNEL(__VA_ARGS__, 1, 1), KERNEL(__VA_ARGS__, 1, 2), KERNEL(__VA_ARGS__, 1, 4)},         \
        {                                                                                          \
            KERNEL(__VA_ARGS__, 2, 1), KERNEL(__VA_ARGS__, 2, 2), KERNEL(__VA_ARGS__, 2, 4)        \
        }                                                                                          \
    }

const void *qt_skinny_fpx_instance(enum qt_format format, int token_tiles, int strips)
{
    static const void *const kernels[3][2][3] = {FORMAT(qt_decode_fp5), FORMAT(qt_decode_fp6<2>),
                                                 FORMAT(qt_decode_fp6<3>)};
    return kernels[format - QT_FORMAT_FP5_E2][token_tiles - 1][strips / 2];
}
