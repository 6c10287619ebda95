/* Instances of the mix24 kernels for compute capability 9.0 (sm_90a). */
#include "kernels/cuda/mix24/skinny.cuh"
#include "kernels/cuda/mix24/tile.cuh"
#include "kernels/cuda/mix24/vector.cuh"

const void *qt_mix24_vector_instance(int strips, bool many)
{
    static const void *const kernels[2][QT_MIX24_VECTOR_STRIPS] = {
        {(const void *)qt_mix24_vector_kernel<1>, (const void *)qt_mix24_vector_kernel<2>,
         (const void *)qt_mix24_vector_kernel<3>},
        {(const void *)qt_mix24_vector_many_kernel<1>, (const void *)qt_mix24_vector_many_kernel<2>,
         (const void *)qt_mix24_vector_many_kernel<3>}};
    return kernels[many][strips - 1];
}

#define KERNEL(mt, strips, last) (const void *)qt_mix24_skinny_kernel<mt, strips, last>

const void *qt_mix24_skinny_instance(int token_tiles, int strips, int last)
{
    static const void *const kernels[2][3] = {{KERNEL(1, 1, 1), KERNEL(1, 2, 2), KERNEL(1, 4, 4)},
                                              {KERNEL(2, 1, 1), KERNEL(2, 2, 2), KERNEL(2, 4, 4)}};
    if (last < strips)
        return token_tiles == 1 ? KERNEL(1, 2, 1) : KERNEL(2, 2, 1);
    return kernels[token_tiles - 1][strips / 2];
}

const void *qt_mix24_tile_instance(int kind)
{
#define KIND(warpgroups, tokens, us, outlier_us)                                                   \
    (const void *)qt_mix24_tile_kernel<warpgroups, tokens>,
    static const void *const kernels[QT_MIX24_TILE_KINDS] = {QT_MIX24_TILE_TABLE(KIND)};
    return kernels[kind];
}
