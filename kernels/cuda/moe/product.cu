/* Instances of the grouped product in tiles of 16 tokens by code format, for devices without
 * mbarriers. */
#include "kernels/cuda/moe/product.cuh"

template <class Format> static const void *moe_few_of()
{
    return (const void *)qt_moe_product_kernel<Format, QT_MOE_FEW_TOKENS / 8>;
}

const void *qt_moe_few_sm80_instance(enum qt_format format)
{
#define GROUP(Format)                       moe_few_of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const formats[])() = {QT_MMA_TILE_GROUP_FORMATS(GROUP)
                                                   QT_FIELD_FORMATS(FIELD)};
    return formats[format]();
#undef FIELD
#undef GROUP
}
