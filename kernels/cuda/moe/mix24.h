/* Layers of experts in MIX24: what host and device code share. */
#ifndef QT_KERNELS_CUDA_MOE_MIX24_H
#define QT_KERNELS_CUDA_MOE_MIX24_H

#include "kernels/cuda/mix24/mix24.h"
#include "kernels/cuda/moe/moe.h"

/* A MIX24 matrix in the table of a layer, in the place of a qt_moe_matrix. */
struct alignas(64) qt_moe_mix24_matrix {
    const unsigned char *stream; /* records [strips][units] */
    const uint16_t *perm;        /* [8 units] */
    const uint32_t *ptr;         /* CSR row pointers [n + 1]; NULL: no outliers */
    const uint16_t *col;         /* packed column */
    const uint16_t *val;         /* FP16 */
    const float *bias;           /* [n], or NULL */
    float factor;                /* power of two that multiplies every result */
};
static_assert(sizeof(struct qt_moe_mix24_matrix) == sizeof(struct qt_moe_matrix),
              "tables have one size");

/* Units of thread blocks of which the kernel for few tokens keeps what their epilogues need, and
 * bytes of one. */
enum { QT_MOE_MIX24_UNITS = 8, QT_MOE_MIX24_UNIT_BYTES = 256 };

/* The kernel for many tokens: tokens of an item at most; bytes of decoded weights, and of results
 * of a warpgroup, in shared memory; pipeline stages; units as above. */
enum {
    QT_MOE_MIX24_MANY = 128,
    QT_MOE_MIX24_A_BYTES = 65536,
    QT_MOE_MIX24_RESULT_BYTES = 2048,
    QT_MOE_MIX24_WIDE_STAGES = 3,
    QT_MOE_MIX24_WIDE_UNITS = 5,
    QT_MOE_MIX24_WIDE_UNIT_BYTES = 1088
};

/* A product with one matrix per expert: gate and up are two launches, as each has its own order of
 * channels. */
struct qt_moe_mix24_args : qt_moe_half_args {
    const struct qt_moe_mix24_matrix *table; /* [experts][QT_MOE_MATRICES] */
    size_t strip_bytes;                      /* of the stream */
    int units, fours;                        /* of 128 columns; those of them with 4-bit groups */
    float unit_inverse;                      /* 1 / units */
    /* Units of 4-bit groups among as many units as there are warps along k: fours << log2_wk
     * divided by units, and the remainder. */
    int fours_step, fours_rest;
    int record_bytes; /* of a record in a stage */
    int x_rows;       /* rows of X in a stage: 16, or 1 if no item has more */
};

/* Host addresses of the kernels. */
const void *qt_moe_mix24_instance(void);
const void *qt_moe_mix24_wide_instance(void); /* for 9.0a */

#endif
