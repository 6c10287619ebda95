/* The mix24 kernel for one token: its arguments, and its plan behind mix24.h. */
#ifndef QT_KERNELS_CUDA_MIX24_VECTOR_H
#define QT_KERNELS_CUDA_MIX24_VECTOR_H

#include "kernels/cuda/mix24/mix24.h"

enum {
    QT_MIX24_VECTOR_WARPS = 16,                       /* at most */
    QT_MIX24_VECTOR_STRIPS = 3,                       /* at most, of a warp and pass */
    QT_MIX24_VECTOR_SLOTS = 4,                        /* at most, of a warp's ring */
    QT_MIX24_VECTOR_UNITS = 32,                       /* at most, of a warp */
    QT_MIX24_VECTOR_AT = QT_MIX24_UNIT_COLS / 16 * 4, /* bytes of a unit's entries of `at` */
    /* Shared memory begins with barriers, partial sums of a long row, and three words. */
    QT_MIX24_VECTOR_TAIL = QT_MIX24_VECTOR_WARPS * QT_MIX24_VECTOR_SLOTS * 8,
    QT_MIX24_VECTOR_TOP = QT_MIX24_VECTOR_TAIL + QT_MIX24_VECTOR_WARPS * 4,
    QT_MIX24_VECTOR_LONG = QT_MIX24_VECTOR_TOP + 4,
    QT_MIX24_VECTOR_RINGS = 640,
};
static_assert((int)QT_MIX24_VECTOR_LONG + 8 <= (int)QT_MIX24_VECTOR_RINGS, "no room");

/* Slots of a warp's ring. */
static constexpr __host__ __device__ int mix24_vector_slots(int strips)
{
    return strips == 1 ? 4 : 3;
}

/* The copy engine wants multiples of 128. */
static constexpr __host__ __device__ uint32_t mix24_vector_slot_bytes(int strips)
{
    return ((uint32_t)strips * QTOOL_MATMUL_MIX24_FOUR + 127) / 128 * 128;
}

/* What a warp has of a pass. */
struct qt_mix24_share {
    uint32_t at;               /* its first unit: U64 of the strip before it */
    uint32_t fours;            /* bit i: its unit i is a FOUR */
    uint16_t unit, count;      /* its units: the first, how many */
    uint16_t strip, warp_of_k; /* its first strip; which it is of those side by side along k */
};

struct qt_mix24_vector_args {
    CUtensorMap records[2]; /* of TWOs and FOURs: the stream as U64 [strips][pitch / 8] */
    /* Each line of 64 bytes that is read first costs 200 clocks or more: few, and early. */
    const void *x;           /* F16 or BF16 [k] */
    const uint32_t *perm;    /* U16 [units * 8], two at a time */
    const uint32_t *csr_ptr; /* [n + 1]; NULL without outliers */
    const uint16_t *csr_col; /* packed column */
    const uint16_t *csr_val; /* FP16 */
    void *y;                 /* F16 or BF16 [n] */
    int strips, strips_cta;  /* of 16 rows; of them a block's */
    int passes, pass_strips;
    int n, k;
    int units;                /* of 128 columns */
    int warps_k;              /* warps side by side along k */
    int log2_row_threads;     /* of the threads that add up a row */
    int bf16;                 /* x and y are BF16 */
    int x_aligned;            /* x is 16-byte aligned and k a multiple of 8 */
    int dependent;            /* launched before the previous kernel has ended */
    int x_at, at_at, sums_at; /* in shared memory; sums of two passes */
    float factor;             /* power of two on every result */
    struct qt_mix24_share share[QT_MIX24_VECTOR_WARPS];
};

/* strips 1..3; sm_90a. */
const void *qt_mix24_vector_instance(int strips);

/* False: not for this device or matrix, or more than one token. */
bool qt_mix24_vector_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_vector_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_vector_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                        void *y, const void *x, void *stream);

#endif
