/* Instances of the mix24 tile kernel. */
#include "kernels/cuda/mix24_tile.cuh"

const void *qt_mix24_tile_instance(int kind)
{
#define KIND(warpgroups, tokens, us, outlier_us)                                                   \
    (const void *)qt_mix24_tile_kernel<warpgroups, tokens>,
    static const void *const kernels[QT_MIX24_TILE_KINDS] = {QT_MIX24_TILE_TABLE(KIND)};
    return kernels[kind];
}
