/* Instances of the mix24 kernel for one token. */
#include "kernels/cuda/mix24_vector.cuh"

const void *qt_mix24_vector_instance(int strips)
{
    static const void *const kernels[QT_MIX24_VECTOR_STRIPS] = {
        (const void *)qt_mix24_vector_kernel<1>, (const void *)qt_mix24_vector_kernel<2>,
        (const void *)qt_mix24_vector_kernel<3>};
    return kernels[strips - 1];
}
