/* Instances of the grouped product in tiles of 16 tokens by code format, for devices without
 * mbarriers. */
#include "kernels/cuda/moe/product.cuh"

template <class Format> struct moe_few {
    static const void *get()
    {
        return (const void *)qt_moe_product_kernel<Format, QT_MOE_FEW_TOKENS / 8>;
    }
};

const void *qt_moe_few_sm80_instance(enum qt_format format)
{
    return moe_instance<moe_few>(format);
}
