/* Instances of the ring mix24 kernel. */
#include "kernels/cuda/mix24_ring.cuh"

#define KERNEL(mt, strips, depth) (const void *)qt_mix24_kernel<mt, strips, depth>
#define DEPTHS(mt, strips)                                                                         \
    {                                                                                              \
        KERNEL(mt, strips, 2), KERNEL(mt, strips, 3), KERNEL(mt, strips, 4)                        \
    }

const void *qt_mix24_ring_instance(int token_tiles, int strips, int depth)
{
    /* Four strips are fastest with two slots, and, like four token tiles, have no room for more
     * sums in registers. */
    static const void *const kernels[3][3][3] = {{DEPTHS(1, 1), DEPTHS(1, 2), {KERNEL(1, 4, 2)}},
                                                 {DEPTHS(2, 1), DEPTHS(2, 2), {KERNEL(2, 4, 2)}},
                                                 {DEPTHS(4, 1), {KERNEL(4, 2, 2)}}};
    return kernels[token_tiles / 2][strips / 2][depth - 2];
}
