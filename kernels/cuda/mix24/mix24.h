/* The kernels for MIX24 weights, host side, and definitions that the kernels share. */
#ifndef QT_KERNELS_CUDA_MIX24_MIX24_H
#define QT_KERNELS_CUDA_MIX24_MIX24_H

#include "kernels/cuda/common/plan.h"

#include <cuda_fp16.h>

/* A unit is 128 packed columns. A CSR panel is 65536 packed columns. */
enum { QT_MIX24_UNIT_COLS = 128, QT_MIX24_PANEL_UNITS = 65536 / QT_MIX24_UNIT_COLS };

/* Bytes of a unit in a strip of 16 rows. */
static __host__ __device__ inline int mix24_unit_bytes(bool four)
{
    return four ? QTOOL_MATMUL_MIX24_FOUR : QTOOL_MATMUL_MIX24_TWO;
}

static inline int qt_mix24_units(const struct qtool_matmul_weight *w)
{
    return (int)(w->mix24.twos + w->mix24.fours);
}

static inline int qt_mix24_strips(const struct qtool_matmul_weight *w)
{
    return (int)ceil_div(w->n, QT_STRIP_ROWS);
}

static inline size_t qt_mix24_strip_bytes(const struct qtool_matmul_weight *w)
{
    return w->mix24.twos * QTOOL_MATMUL_MIX24_TWO + w->mix24.fours * QTOOL_MATMUL_MIX24_FOUR;
}

static inline size_t qt_mix24_csr_rows(const struct qtool_matmul_weight *w)
{
    return w->mix24.csr_rows ? w->mix24.csr_rows : w->n;
}

/* Outliers as the skinny and tile kernels use them. */
struct qt_mix24_outliers {
    const uint32_t *ptr;   /* CSR row pointers, [panels][pitch]; NULL without outliers */
    const uint16_t *col;   /* packed column within its CSR panel */
    const uint16_t *val;   /* FP16 */
    const __half *columns; /* F16 [units * 128][column_pitch]: X by packed columns */
    size_t column_pitch;   /* skinny: 8 or 16; tile: m rounded up */
    size_t pitch;          /* row pointers per CSR panel */
    int panels, n;
    int warps; /* skinny: outlier warps per thread block */
};

static inline struct qt_mix24_outliers qt_mix24_outliers_of(const struct qtool_matmul_weight *w)
{
    struct qt_mix24_outliers o = {};
    o.ptr = (const uint32_t *)w->mix24.csr_ptr;
    o.col = (const uint16_t *)w->mix24.csr_col;
    o.val = (const uint16_t *)w->mix24.csr_val;
    o.pitch = qt_mix24_csr_rows(w) + 1;
    o.panels = (int)ceil_div((size_t)qt_mix24_units(w), QT_MIX24_PANEL_UNITS);
    o.n = (int)w->n;
    return o;
}

/* ---- weight.cc ------------------------------------------------------------------------------ */

/* Returns NULL, or what is wrong with the weight. */
const char *qt_mix24_fault(const struct qtool_matmul_weight *w);
/* qtool_matmul_slice of MIX24 weights. */
int qt_mix24_slice(struct qtool_matmul_weight *out, const struct qtool_matmul_weight *w, size_t n0,
                   size_t n, size_t k0, size_t k);
/* Encodes the tensor maps of the records: boxes of one unit TWO and of one unit FOUR in box_strips
 * strips. Returns false if the driver refuses one. */
bool qt_mix24_record_maps(const struct qtool_matmul_plan *p, CUtensorMap records[2],
                          const struct qtool_matmul_weight *w, int box_strips);

/* ---- mix24.cc: dispatch to the paths -------------------------------------------------------- */

/* Chooses a path and checks its configuration. packed_bytes: size of the units. *us is set to the
 * estimated time in microseconds. */
int qt_mix24_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                    size_t packed_bytes, double *us);
/* Validates p->config and sets the rest of the plan. */
int qt_mix24_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, void *y,
                 const void *x, void *workspace, void *stream);
/* qtool_matmul_plan_many and qtool_matmul_run_many, after the checks of the arguments. */
int qt_mix24_plan_many(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *const *w,
                       size_t count);
int qt_mix24_run_many(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *const *w,
                      size_t count, void *const *y, const void *x, void *stream);

/* ---- dequantize.cu -------------------------------------------------------------------------- */

/* qtool_matmul_dequantize of MIX24 weights. */
int qt_mix24_dequantize(const struct qtool_matmul_weight *w, void *out, enum qtool_dtype dtype,
                        void *stream);

/* ---- gather.cu ------------------------------------------------------------------------------ */

/* X in packed order, and what the gather kernel prepares with it, in the workspace. */
struct qt_mix24_gathered {
    void *rows;          /* F16 [m][128 units] */
    void *columns;       /* F16 [128 units][column_pitch], or NULL; zeros for tokens beyond m */
    size_t column_pitch; /* 8, or a multiple of 16 of at least m */
    bool for_wgmma;  /* columns of a row are permuted so that the four columns that a lane has of
                            a k-step are its part of a wgmma operand */
    uint32_t *lists; /* [strips][units][PATCH_LIST] or NULL: lists of outliers
                            (outlier_patch.cuh) */
    void *prepared;  /* BF16: space for qt_prepare_run */
};

/* Outlier lists (outlier_patch.cuh). */
enum {
    PATCH_LIST = 32, /* words */
    PATCH_LIST_BYTES = 4 * PATCH_LIST,
    PATCH_STEP_BIT = 8, /* bit of the first k-step in the head of a list */
    PATCH_MANY = 1 << 16,
    PATCH_STEP_BYTES = 512,
    PATCH_STEPS = 8 /* k-steps of a unit */
};

/* Enqueues the gather of x [m][k]: one launch, or two for BF16, which is prepared first and sets
 * *token_factor. */
int qt_mix24_gather(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                    const struct qt_mix24_gathered *to, const void *x, const float **token_factor,
                    void *stream);

#endif
