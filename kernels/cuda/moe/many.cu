/* Instances of the grouped product in tiles of 64 tokens, for devices without wgmma. Formats whose
 * exponent width is an argument have none, because each kernel takes a second to compile. */
#include "kernels/cuda/moe/product.cuh"

template <class Format> struct moe_many {
    static const void *get()
    {
        if constexpr (!Format::RARE)
            return (const void *)qt_moe_product_kernel<Format, QT_MOE_MANY_TOKENS / 8>;
        return NULL;
    }
};

const void *qt_moe_many_instance(enum qt_format format)
{
    return moe_instance<moe_many>(format);
}
