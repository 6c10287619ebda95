/* Instances of the grouped product by wgmma; formats whose exponent width is an argument have none,
 * because each kernel takes seconds to compile. */
#include "kernels/cuda/moe/wide.cuh"

/* Decoders of the formats with a scale per group. */
#define WIDE_GROUP_FORMATS(X)                                                                      \
    X(qt_decode_value2)                                                                            \
    X(qt_decode_value3)                                                                            \
    X(qt_decode_wide4)                                                                             \
    X(wide_int4)                                                                                   \
    X(wide_int4_zero)                                                                              \
    X(qt_decode_int8)

template <class Format> static const void *moe_wide_of()
{
    if constexpr (!Format::RARE)
        return (const void *)qt_moe_wide_kernel<Format>;
    return NULL;
}

const void *qt_moe_wide_instance(enum qt_format format)
{
#define GROUP(Format)                       moe_wide_of<Format>,
#define FIELD(name, bits, exp_bits, Format) GROUP(Format)
    static const void *(*const formats[])() = {WIDE_GROUP_FORMATS(GROUP) QT_FIELD_FORMATS(FIELD)};
    return formats[format]();
#undef FIELD
#undef GROUP
}

int qt_moe_wide_table_bytes(enum qt_format format)
{
    static const int bytes[] = {WIDE_GROUP_FORMATS(QT_TABLE_BYTES)};
    return format <= QT_FORMAT_LAST_GROUPED ? bytes[format] : 0;
}
