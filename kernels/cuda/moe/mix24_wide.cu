/* The grouped product of MIX24 experts with many tokens, by wgmma. */
#include "kernels/cuda/moe/mix24_wide.cuh"

const void *qt_moe_mix24_wide_instance(void)
{
    return (const void *)qt_moe_mix24_wide_kernel;
}

const void *qt_moe_mix24_gather_instance(void)
{
    return (const void *)moe24_gather_kernel;
}
