/* Kernel instances of LUT, FPX and INT weights by code format, as host addresses for
 * cudaLaunchKernelExC. */
#ifndef QT_KERNELS_CUDA_MATMUL_INSTANCES_H
#define QT_KERNELS_CUDA_MATMUL_INSTANCES_H

/* Minifloats of 5 to 8 bits: X(name, bits, exponent bits or 0 for all that are not listed before,
 * decoder in decode_fpx.cuh). */
#define QT_FIELD_FORMATS(X)                                                                        \
    X(FP5_E2, 5, 2, qt_decode_fp5<2>)                                                              \
    X(FP5, 5, 0, qt_decode_fp5<0>)                                                                 \
    X(FP6_E2, 6, 2, qt_decode_fp6<2>)                                                              \
    X(FP6_E3, 6, 3, qt_decode_fp6<3>)                                                              \
    X(FP6, 6, 0, qt_decode_fp6<0>)                                                                 \
    X(FP7_E3, 7, 3, qt_decode_fp7<3>)                                                              \
    X(FP7, 7, 0, qt_decode_fp7<0>)                                                                 \
    X(FP8_E4, 8, 4, qt_decode_fp8<4>)                                                              \
    X(FP8_E5, 8, 5, qt_decode_fp8<5>)                                                              \
    X(FP8, 8, 0, qt_decode_fp8<0>)

/* Code formats: how codes are dequantized. */
enum qt_format {
    QT_FORMAT_LUT2, /* by a look-up table: LUT, and FPX of up to 4 bits */
    QT_FORMAT_LUT3,
    QT_FORMAT_LUT4,
    QT_FORMAT_INT4,
    QT_FORMAT_INT4_ZERO, /* with zero-points */
    QT_FORMAT_INT8,
    QT_FORMAT_LAST_GROUPED = QT_FORMAT_INT8, /* the last format with a scale per group */
#define QT_FORMAT_NAME(name, bits, exp_bits, decoder) QT_FORMAT_##name,
    QT_FIELD_FORMATS(QT_FORMAT_NAME)
#undef QT_FORMAT_NAME
};

/* Decoders of the formats with a scale per group, in the order of enum qt_format, by kernel. */
#define QT_DEQUANTIZE_GROUP_FORMATS(X)                                                             \
    X(qt_decode_value2)                                                                            \
    X(qt_decode_value3)                                                                            \
    X(qt_decode_single4)                                                                           \
    QT_INT_FORMATS(X)
#define QT_MMA_TILE_GROUP_FORMATS(X)                                                               \
    X(qt_decode_value2)                                                                            \
    X(qt_decode_value3)                                                                            \
    X(qt_decode_pair4)                                                                             \
    QT_INT_FORMATS(X)
#define QT_STREAM_GROUP_FORMATS(X)                                                                 \
    X(qt_decode_pair2)                                                                             \
    X(qt_decode_pair3)                                                                             \
    X(qt_decode_pair4)                                                                             \
    QT_INT_FORMATS(X)
#define QT_SKINNY_GROUP_FORMATS(X)                                                                 \
    X(qt_decode_steps2<2>)                                                                         \
    X(qt_decode_steps3)                                                                            \
    X(qt_decode_wide4)                                                                             \
    QT_INT_FORMATS(X)
#define QT_TILE_GROUP_FORMATS(X)                                                                   \
    X(qt_decode_mixed2)                                                                            \
    X(qt_decode_mixed3)                                                                            \
    X(qt_decode_tile4)                                                                             \
    QT_INT_FORMATS(X)
#define QT_INT_FORMATS(X)                                                                          \
    X(qt_decode_int4)                                                                              \
    X(qt_decode_int4_zero)                                                                         \
    X(qt_decode_int8)

/* Host addresses of kernels; NULL if the instance does not exist. */

/* token_tiles 1, 2 or 4; strips 1 or 2. */
const void *qt_stream_instance(enum qt_format format, int token_tiles, int strips);
/* token_tiles 1 or 2; strips 1, 2 or 4; last: strips of the last warp (qt_skinny_last); small: with
 * a small look-up table, for 1 or 2 strips per warp. For sm_90a. */
const void *qt_skinny_instance(enum qt_format format, int token_tiles, int strips, int last,
                               bool small);
/* Instance number `kind` of the format's table in tile.h. For sm_90a. */
const void *qt_tile_instance(enum qt_format format, int kind);
/* The same for gated products. Two strips per warp, four with 2 and 3 bits; the table is large. */
const void *qt_skinny_gated_instance(enum qt_format format, int token_tiles, int strips, int last);
const void *qt_tile_gated_instance(enum qt_format format, int kind);
/* For several matrices in one launch (qtool_matmul_plan_many): LUT of 3 and 4 bits, with a large
 * table; strips 2 or 4. */
const void *qt_skinny_many_instance(enum qt_format format, int token_tiles, int strips, int last);
const void *qt_dequantize_instance(enum qt_format format);
int qt_dequantize_smem(enum qt_format format); /* bytes of shared memory */

/* Bytes of the look-up tables, which are at the start of shared memory. */
int qt_mma_tile_table_bytes(enum qt_format format);
int qt_stream_table_bytes(enum qt_format format, int token_tiles);
int qt_skinny_table_bytes(enum qt_format format, bool small);
int qt_tile_table_bytes(enum qt_format format);
#define QT_TABLE_BYTES(Format) Format::TABLE_BYTES, /* an X for the lists above */

/* Parts of the functions above in files of their own: tile kernels, which take longest to compile,
 * and QT_FORMAT_INT4_ZERO, whose stream and mma tile kernels are also compiled for Hopper. */
const void *qt_tile_group_instance(enum qt_format format, int kind);
const void *qt_tile_fpx_instance(enum qt_format format, int kind);
const void *qt_stream_zero_instance(int token_tiles, int strips);
const void *qt_mma_tile_zero_instance(int kind);

#endif
