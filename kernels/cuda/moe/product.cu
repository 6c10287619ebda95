/* Instances of the grouped product by code format. Formats whose exponent width is an argument have
 * only the kernel for few tokens, because each kernel takes a second to compile. */
#include "kernels/cuda/moe/product.cuh"

template <class Format> static const void *of(int kind)
{
    if (kind == QT_MOE_FEW)
        return (const void *)qt_moe_product_kernel<Format, QT_MOE_FEW_TOKENS / 8>;
    if constexpr (!Format::RARE)
        return (const void *)qt_moe_product_kernel<Format, QT_MOE_MANY_TOKENS / 8>;
    return NULL;
}

const void *qt_moe_product_instance(enum qt_format format, int kind)
{
#define GROUP(Format)                       of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const formats[])(int) = {QT_MMA_TILE_GROUP_FORMATS(GROUP)
                                                      QT_FIELD_FORMATS(FIELD)};
    return formats[format](kind);
#undef FIELD
#undef GROUP
}
