/* Instances of the grouped product for few tokens by code format. */
#include "kernels/cuda/moe/few.cuh"

template <class Format> struct moe_few {
    static const void *get()
    {
        return (const void *)qt_moe_few_kernel<Format>;
    }
};

const void *qt_moe_few_instance(enum qt_format format)
{
    return moe_instance<moe_few>(format);
}
