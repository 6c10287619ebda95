/* Instances of the grouped product for few tokens by code format. */
#include "kernels/cuda/moe/few.cuh"

template <class Format> static const void *moe_few_of()
{
    return (const void *)qt_moe_few_kernel<Format>;
}

const void *qt_moe_few_instance(enum qt_format format)
{
#define GROUP(Format)                       moe_few_of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const formats[])() = {QT_MMA_TILE_GROUP_FORMATS(GROUP)
                                                   QT_FIELD_FORMATS(FIELD)};
    return formats[format]();
#undef FIELD
#undef GROUP
}
