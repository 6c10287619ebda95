/* Instances of the mix24 kernel. */
#include "kernels/cuda/mix24.cuh"
#include "kernels/cuda/mix24.h"

#define DEPTHS(mt, strips)                                                                         \
    {                                                                                              \
        (const void *)qt_mix24_kernel<mt, strips, 2>,                                              \
            (const void *)qt_mix24_kernel<mt, strips, 3>,                                          \
            (const void *)qt_mix24_kernel<mt, strips, 4>                                           \
    }

const void *qt_mix24_instance(int token_tiles, int strips, int depth)
{
    static const void *const kernels[3][2][3] = {
        {DEPTHS(1, 1), DEPTHS(1, 2)}, {DEPTHS(2, 1), DEPTHS(2, 2)}, {DEPTHS(4, 1)}};
    return kernels[token_tiles / 2][strips - 1][depth - 2];
}
