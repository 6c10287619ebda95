/* Instances of the mix24 ring kernel. */
#include "kernels/cuda/mix24/ring.cuh"

const void *qt_mix24_ring_instance(int token_tiles, int strips)
{
#define KERNEL(mt, strips) (const void *)qt_mix24_kernel<mt, strips>
    /* With four strips and four token tiles, the accumulators exceed the registers; four strips and
     * two token tiles are hardly ever planned. */
    static const void *const kernels[3][3] = {{KERNEL(1, 1), KERNEL(1, 2), KERNEL(1, 4)},
                                              {KERNEL(2, 1), KERNEL(2, 2)},
                                              {KERNEL(4, 1), KERNEL(4, 2)}};
    return kernels[token_tiles / 2][strips / 2];
#undef KERNEL
}
