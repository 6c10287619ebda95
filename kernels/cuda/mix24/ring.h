/* The mix24 kernel for other devices, batch-invariant plans, and what has no room elsewhere: its
 * arguments (mix24_ring.cuh), and its plan behind mix24.h. */
#ifndef QT_KERNELS_CUDA_MIX24_RING_H
#define QT_KERNELS_CUDA_MIX24_RING_H

#include "kernels/cuda/mix24/mix24.h"

enum {
    MIX24_UNIT_BYTES = QT_MIX24_UNIT_COLS * 2, /* of X */
    MIX24_MAX_UNITS = 32,                      /* of a warp */
    MIX24_MAX_DEPTH = 4,                       /* slots of its ring, of 2 at least */
};

/* Of a warp's ring: the copy engine wants multiples of 128; the last of them have room for the
 * barrier. */
static constexpr __host__ __device__ uint32_t mix24_slot_bytes(int strips)
{
    return ((uint32_t)strips * QTOOL_MATMUL_MIX24_FOUR + 8 + 127) / 128 * 128;
}

struct qt_mix24_args {
    CUtensorMap records[2]; /* of TWOs and FOURs: the stream as U64 [strips][pitch / 8] */
    /* What the first copies want is in one line of 64 bytes: each line that is read first costs 100
     * clocks. */
    int warps_k, strips_cta, passes, cluster;
    int strips, units, fours; /* strips of 16 rows; units of 128 columns, of which fours are FOUR */
    int first_unit, end_unit; /* of this launch */
    int split_units;          /* units of a block */
    int depth;                /* slots of a warp's ring */
    /* In shared memory: */
    int ring_at, barrier_at, long_at, ptr_at, sums_at, top_at, inbox_at, window_at;
    int m, n, k;
    const unsigned char *stream; /* [strips][pitch] */
    const uint16_t *perm;        /* [units * 8] */
    const uint32_t *csr_ptr;     /* [panels][csr_pitch]; NULL without outliers */
    const uint16_t *csr_col;     /* packed column in the panel of 64 Ki */
    const uint16_t *csr_val;     /* FP16 */
    const void *x;               /* F16 or BF16 [m][k] */
    void *y;                     /* F16 or BF16 [m][n] */
    const float *before;         /* [m][n]: sums of the units before first_unit; NULL if none */
    float *after;     /* [m][n]: where sums go instead of y, when there are units after */
    int panels;       /* of 64 Ki columns */
    size_t csr_pitch; /* row pointers of a panel */
    uint32_t pitch;   /* bytes of a strip */
    float factor;     /* power of two on every result */
    int bf16;         /* x and y are BF16 */
    int x_aligned;    /* rows of x are 16-byte aligned */
    int dependent;    /* launched before the previous kernel has ended */
    int row_threads;  /* log2 of the threads that add up an output */
    int long_parts;   /* warps that share an output of a row with many outliers */
    int ptr_rows;     /* row pointers of a block: of whole passes, and one */
    int window;       /* outliers of a pass that have room in shared memory */
    int x_pitch;      /* bytes of a row of X in shared memory */
};

/* Kernel instances as host addresses: token_tiles 1, 2, 4; strips 1, 2, 4. NULL if there is none.
 */
const void *qt_mix24_ring_instance(int token_tiles, int strips);

/* False: n is too long for shared memory. */
bool qt_mix24_ring_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_ring_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_ring_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                      void *y, const void *x, void *workspace, void *stream);

#endif
