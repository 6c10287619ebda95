/* Instances of the grouped product in tiles of 64 tokens, for devices without wgmma. Formats whose
 * exponent width is an argument have none, because each kernel takes a second to compile. */
#include "kernels/cuda/moe/product.cuh"

template <class Format> static const void *moe_many_of()
{
    if constexpr (!Format::RARE)
        return (const void *)qt_moe_product_kernel<Format, QT_MOE_MANY_TOKENS / 8>;
    return NULL;
}

const void *qt_moe_many_instance(enum qt_format format)
{
#define GROUP(Format)                       moe_many_of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const formats[])() = {QT_MMA_TILE_GROUP_FORMATS(GROUP)
                                                   QT_FIELD_FORMATS(FIELD)};
    return formats[format]();
#undef FIELD
#undef GROUP
}
