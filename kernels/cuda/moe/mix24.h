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

/* The kernel for many tokens: stages of the pipeline of records; bytes of a warp's decoded weights;
 * units as above. */
enum {
    QT_MOE_MIX24_RECORDS = 3,
    QT_MOE_MIX24_A_BYTES = 2048,
    QT_MOE_MIX24_WIDE_UNITS = 4,
    QT_MOE_MIX24_WIDE_UNIT_BYTES = 1696
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
    /* Offsets in shared memory, of the kernel by wgmma: records and decoded weights. */
    int records_at, operands_at;
};

/* The same of the kernel by wgmma. X and token_factor are by position, X in the packed order of the
 * expert's matrix: F16 [positions][128 units]. */
struct qt_moe_mix24_wide_args : qt_moe_mix24_args {
    CUtensorMap x_map; /* boxes of QT_MOE_WIDE_BOX x 64 */
};

/* Copies X of items of the kind MANY to that order. */
struct qt_moe_mix24_gather_args {
    const struct qt_moe_item *item;
    const int *items, *order;
    const struct qt_moe_mix24_matrix *table;
    int matrix, by_token, topk;
    int k, pitch;              /* of x, in elements */
    int chunks;                /* of 8 columns in a packed row */
    const __half *x;           /* by token or by position: [..][pitch] */
    const float *token_factor; /* NULL: not copied */
    uint4 *out;                /* [positions][chunks] */
    float *out_factor;         /* [positions] */
};

/* Host addresses of the kernels. */
const void *qt_moe_mix24_instance(void);
const void *qt_moe_mix24_gather_instance(void);
const void *qt_moe_mix24_wide_instance(void); /* for 9.0a */

#endif
