/* The mix24 vector kernel, for one token: arguments and plan. */
#ifndef QT_KERNELS_CUDA_MIX24_VECTOR_H
#define QT_KERNELS_CUDA_MIX24_VECTOR_H

#include "kernels/cuda/mix24/mix24.h"

enum {
    QT_MIX24_VECTOR_WARPS = 16,                       /* maximum warps */
    QT_MIX24_VECTOR_STRIPS = 3,                       /* maximum strips per warp and pass */
    QT_MIX24_VECTOR_STAGES = 4,                       /* maximum stages of a warp's pipeline */
    QT_MIX24_VECTOR_UNITS = 32,                       /* maximum units of a warp */
    QT_MIX24_VECTOR_AT = QT_MIX24_UNIT_COLS / 16 * 4, /* bytes of `at` per unit */
    /* Offsets at the start of shared memory: barriers, partial sums of a long row, three words. */
    QT_MIX24_VECTOR_TAIL = QT_MIX24_VECTOR_WARPS * QT_MIX24_VECTOR_STAGES * 8,
    QT_MIX24_VECTOR_TOP = QT_MIX24_VECTOR_TAIL + QT_MIX24_VECTOR_WARPS * 4,
    QT_MIX24_VECTOR_LONG = QT_MIX24_VECTOR_TOP + 4,
    QT_MIX24_VECTOR_RINGS = 640,
};
static_assert((int)QT_MIX24_VECTOR_LONG + 8 <= (int)QT_MIX24_VECTOR_RINGS, "no room");

/* Stages of a warp's pipeline. */
static constexpr __host__ __device__ int mix24_vector_stages(int strips)
{
    return strips == 1 ? 4 : 3;
}

/* Bytes of a stage: a multiple of 128 for TMA. */
static constexpr __host__ __device__ uint32_t mix24_vector_stage_bytes(int strips)
{
    return ((uint32_t)strips * QTOOL_MATMUL_MIX24_FOUR + 127) / 128 * 128;
}

/* The part of a pass that a warp computes. */
struct qt_mix24_share {
    uint32_t at;               /* offset of its first unit in a strip, in U64 */
    uint32_t fours;            /* bit i: its unit i is a FOUR */
    uint16_t unit, count;      /* its first unit, its number of units */
    uint16_t strip, warp_of_k; /* its first strip; its index among the warps along k */
};

struct qt_mix24_vector_args {
    CUtensorMap records[2]; /* of TWOs and FOURs: the stream as U64 [strips][pitch / 8] */
    /* The first read of a line of 64 bytes takes 200 clocks or more: few lines, read early. */
    const void *x;           /* F16 or BF16 [k] */
    const uint32_t *perm;    /* U16 [units * 8], two at a time */
    const uint32_t *csr_ptr; /* [n + 1]; NULL without outliers */
    const uint16_t *csr_col; /* packed column */
    const uint16_t *csr_val; /* FP16 */
    void *y;                 /* F16 or BF16 [n] */
    int strips, strips_cta;  /* of 16 rows; per thread block */
    int passes, pass_strips;
    int n, k;
    int units;                /* of 128 columns */
    int warps_k;              /* warps along k */
    int log2_row_threads;     /* log2 of the threads that add a row */
    int bf16;                 /* x and y are BF16 */
    int x_aligned;            /* x is 16-byte aligned and k a multiple of 8 */
    int dependent;            /* launched as a dependent launch */
    int x_at, at_at, sums_at; /* offsets in shared memory; partial sums of two passes */
    float factor;             /* power of two that multiplies every result */
    struct qt_mix24_share share[QT_MIX24_VECTOR_WARPS];
};

/* Several matrices, which have the same configuration. */
struct qt_mix24_vector_many_args {
    int first[QTOOL_MATMUL_MANY]; /* first thread block of each; INT_MAX: no such matrix */
    struct qt_mix24_vector_args args[QTOOL_MATMUL_MANY];
};

/* Host address of a kernel. strips 1..3. many: it takes qt_mix24_vector_many_args. For sm_90a. */
const void *qt_mix24_vector_instance(int strips, bool many);

/* Returns false if the kernel does not support the device, the matrix or m. */
bool qt_mix24_vector_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_vector_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_vector_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                        void *y, const void *x, void *stream);
/* The same for several matrices in one launch; plan_many chooses and checks. */
int qt_mix24_vector_plan_many(struct qtool_matmul_plan *p,
                              const struct qtool_matmul_weight *const *w, size_t count);
int qt_mix24_vector_run_many(const struct qtool_matmul_plan *p,
                             const struct qtool_matmul_weight *const *w, size_t count,
                             void *const *y, const void *x, void *stream);

#endif
