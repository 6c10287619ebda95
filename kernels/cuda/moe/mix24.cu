/* The grouped product of MIX24 experts in tiles of 16 tokens. */
#include "kernels/cuda/moe/mix24_product.cuh"

const void *qt_moe_mix24_instance(void)
{
    return (const void *)qt_moe_mix24_kernel;
}
