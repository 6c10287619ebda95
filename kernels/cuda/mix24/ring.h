/* The mix24 ring kernel (ring.cuh): for all devices, batch-invariant plans, and products that do
 * not fit into the other kernels. Arguments and plan. */
#ifndef QT_KERNELS_CUDA_MIX24_RING_H
#define QT_KERNELS_CUDA_MIX24_RING_H

#include "kernels/cuda/mix24/mix24.h"

enum {
    MIX24_UNIT_BYTES = QT_MIX24_UNIT_COLS * 2, /* bytes of X per unit */
    MIX24_MAX_UNITS = 32,                      /* maximum units of a warp */
    MIX24_MAX_DEPTH = 4,                       /* maximum stages of a warp's pipeline; minimum 2 */
};

/* Returns the bytes of a stage of a warp's pipeline: a multiple of 128 for TMA, with room for the
 * barrier at the end. */
static constexpr __host__ __device__ uint32_t mix24_stage_bytes(int strips)
{
    return ((uint32_t)strips * QTOOL_MATMUL_MIX24_FOUR + 8 + 127) / 128 * 128;
}

struct qt_mix24_args {
    CUtensorMap records[2]; /* of TWOs and FOURs: the stream as U64 [strips][pitch / 8] */
    /* The arguments of the first copies share a line of 64 bytes: the first read of a line takes
     * 100 clocks. */
    int warps_k, strips_cta, passes, cluster;
    int strips, units, fours; /* strips of 16 rows; units of 128 columns, of which fours are FOUR */
    int first_unit, end_unit; /* range of this launch */
    int split_units;          /* units per thread block */
    int depth;                /* stages of a warp's pipeline */
    /* Offsets in shared memory. */
    int ring_at, barrier_at, long_at, ptr_at, sums_at, top_at, inbox_at, window_at;
    int m, n, k;
    const unsigned char *stream; /* [strips][pitch] */
    const uint16_t *perm;        /* [units * 8] */
    const uint32_t *csr_ptr;     /* [panels][csr_pitch]; NULL without outliers */
    const uint16_t *csr_col;     /* packed column within its CSR panel */
    const uint16_t *csr_val;     /* FP16 */
    const void *x;               /* F16 or BF16 [m][k] */
    void *y;                     /* F16 or BF16 [m][n] */
    const float *before;         /* [m][n]: partial sums of the units before first_unit, or NULL */
    float *after;     /* [m][n]: receives partial sums instead of y if units follow, or NULL */
    int panels;       /* CSR panels of 65536 columns */
    size_t csr_pitch; /* row pointers per CSR panel */
    uint32_t pitch;   /* bytes per strip */
    float factor;     /* power of two that multiplies every result */
    int bf16;         /* x and y are BF16 */
    int x_aligned;    /* rows of x are 16-byte aligned */
    int dependent;    /* launched as a dependent launch */
    int row_threads;  /* log2 of the threads that add the outliers of an output */
    int long_parts;   /* warps that share an output of a row with many outliers */
    int ptr_rows;     /* row pointers per thread block: rows of whole passes, plus 1 */
    int window;       /* outliers of a pass that fit into shared memory */
    int x_pitch;      /* bytes of a row of X in shared memory */
};

/* Host address of a kernel, or NULL if it does not exist. token_tiles 1, 2, 4; strips 1, 2, 4. */
const void *qt_mix24_ring_instance(int token_tiles, int strips);

/* Returns false if n does not fit into shared memory. */
bool qt_mix24_ring_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_ring_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_ring_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                      void *y, const void *x, void *workspace, void *stream);

#endif
