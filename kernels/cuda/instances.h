/* Kernel instances by code format, as host addresses for cudaLaunchKernelExC. */
#ifndef QT_CUDA_INSTANCES_H
#define QT_CUDA_INSTANCES_H

/* How codes are decoded (decode.cuh). */
enum qt_format {
    QT_FORMAT_PAIR2, /* tables of pairs: lut, and minifloats of up to 4 bits */
    QT_FORMAT_PAIR3,
    QT_FORMAT_PAIR4,
    QT_FORMAT_INT4,
    QT_FORMAT_INT4_ZERO, /* with zero points */
    QT_FORMAT_INT8,
    QT_FORMAT_LAST_GROUPED = QT_FORMAT_INT8, /* of those with a scale per group */
    QT_FORMAT_FP5_E2,                        /* bit fields */
    QT_FORMAT_FP6_E2,
    QT_FORMAT_FP6_E3,
    QT_FORMAT_FP7_E3,
    QT_FORMAT_FP8_E4,
    QT_FORMAT_FP8_E5,
    QT_FORMAT_ANY, /* other minifloats of 5 to 8 bits */
};

/* How decode.cuh decodes them, in that order: those with a scale per group, without and with room
 * for wide tables; and bit fields. */
#define QT_GROUP_FORMATS(X)                                                                        \
    X(qt_decode_pair2)                                                                             \
    X(qt_decode_pair3)                                                                             \
    X(qt_decode_pair4)                                                                             \
    X(qt_decode_int4)                                                                              \
    X(qt_decode_int4_zero)                                                                         \
    X(qt_decode_int8)
#define QT_WIDE_GROUP_FORMATS(X)                                                                   \
    X(qt_decode_wide2)                                                                             \
    X(qt_decode_wide3)                                                                             \
    X(qt_decode_wide4)                                                                             \
    X(qt_decode_int4_wide)                                                                         \
    X(qt_decode_int4_zero)                                                                         \
    X(qt_decode_int8)
#define QT_FIELD_FORMATS(X)                                                                        \
    X(qt_decode_fp5)                                                                               \
    X(qt_decode_fp6<2>)                                                                            \
    X(qt_decode_fp6<3>)                                                                            \
    X(qt_decode_fp7)                                                                               \
    X(qt_decode_fp8<4>)                                                                            \
    X(qt_decode_fp8<5>)

/* token_tiles 1, 2 or 4; strips 1 or 2, 1 with 4 token tiles. */
const void *qt_stream_instance(enum qt_format format, int token_tiles, int strips);
/* token_tiles 1 or 2; strips 1, 2 or 4; sm_90a. NULL: none. */
const void *qt_skinny_instance(enum qt_format format, int token_tiles, int strips);
/* Kernel number `kind` of QT_TILE_TABLE; sm_90a. */
const void *qt_tile_instance(enum qt_format format, int kind);
const void *qt_dequantize_instance(enum qt_format format);

/* Parts of these, compiled apart. */
const void *qt_stream_group_instance(enum qt_format format, int token_tiles, int strips);
const void *qt_stream_fpx_instance(enum qt_format format, int token_tiles, int strips);

const void *qt_tile_group_instance(enum qt_format format, int kind);
const void *qt_tile_fpx_instance(enum qt_format format, int kind);

const void *qt_skinny_group_instance(enum qt_format format, int token_tiles, int strips);
const void *qt_skinny_fpx_instance(enum qt_format format, int token_tiles, int strips);

#endif
