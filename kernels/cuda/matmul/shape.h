/* The weights of LUT, FPX and INT products as the host code of the kernels sees them. */
#ifndef QT_KERNELS_CUDA_MATMUL_SHAPE_H
#define QT_KERNELS_CUDA_MATMUL_SHAPE_H

#include "kernels/cuda/common/plan.h"
#include "kernels/cuda/matmul/instances.h"

/* A checked struct qtool_matmul_weight. */
struct qt_shape {
    enum qt_format format;
    int bits;
    int width[3];       /* bits of each plane; 0: no such plane */
    int strips, blocks; /* of 16 rows; of 64 columns */
    size_t groups;      /* scales per row */
    size_t pitch_blocks, pitch_groups;
    int group_shift; /* log2(channels per scale); 30: one scale per row */
    bool grouped;    /* the kernels apply scales to partial sums, not to results */
    int zero_bytes;  /* bytes of the zero-points of 16 rows and a group; 0: no zero-points */
    bool zero_boxes; /* TMA can copy the zero-points, or there are none. TMA needs 16-byte aligned
                        strips of a multiple of 16 bytes, which is two groups of 4-bit codes. */
};

/* Checks w and fills *out. Returns NULL, or an error message. */
const char *qt_shape_of(struct qt_shape *out, const struct qtool_matmul_weight *w);
/* qtool_matmul_slice of these weights. */
int qt_shape_slice(struct qtool_matmul_weight *out, const struct qtool_matmul_weight *w, size_t n0,
                   size_t n, size_t k0, size_t k);
bool qt_has_zeros(const struct qtool_matmul_weight *w);
/* Returns the power of two that kernels multiply results by: scale_exp2, and the factor that
 * dequantization leaves out. */
float qt_result_factor(const struct qtool_matmul_weight *w);
struct qt_decode_args qt_decode_args_of(const struct qtool_matmul_weight *w);

/* Returns the scales per row in `blocks` blocks that begin with a group or lie within one; 0 for
 * formats with one scale per row. */
static inline int qt_stage_groups(const struct qt_shape *s, int blocks)
{
    int groups = s->grouped ? blocks * QT_BLOCK_COLS >> s->group_shift : 0;
    return s->grouped && groups == 0 ? 1 : groups;
}

/* Returns the bytes per strip of a TMA box of zero-points of box_groups groups: at least 16. */
static inline int qt_zero_pitch(const struct qt_shape *s, int box_groups)
{
    const int bytes = box_groups * s->zero_bytes;
    return bytes == 8 ? 16 : bytes;
}

/* Encodes the tensor maps of the planes, and of the group scales and zero-points if there are any,
 * with boxes of box_strips strips and box_blocks blocks or box_groups groups. Those of a
 * gated product have the dimensions columns, halves, strips of a half: a box has strips of gate and
 * of up in turns. Returns false if the driver refuses one. */
bool qt_weight_maps(const struct qtool_matmul_plan *p, CUtensorMap plane[3], CUtensorMap *scales,
                    CUtensorMap *zeros, const struct qt_shape *s,
                    const struct qtool_matmul_weight *w, int box_strips, int box_blocks,
                    int box_groups);

#endif
