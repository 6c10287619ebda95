/* Instances of the skinny mix24 kernel. */
#include "kernels/cuda/mix24_skinny.cuh"

#define KERNEL(mt, strips) (const void *)qt_mix24_skinny_kernel<mt, strips>

const void *qt_mix24_skinny_instance(int token_tiles, int strips)
{
    static const void *const kernels[2][3] = {{KERNEL(1, 1), KERNEL(1, 2), KERNEL(1, 4)},
                                              {KERNEL(2, 1), KERNEL(2, 2), KERNEL(2, 4)}};
    return kernels[token_tiles - 1][strips / 2];
}
