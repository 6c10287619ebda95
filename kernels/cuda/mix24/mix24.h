/* QTOOL_MATMUL_MIX24 behind qtool_kernels.h: matmul.cc hands these matrices on. */
#ifndef QT_KERNELS_CUDA_MIX24_MIX24_H
#define QT_KERNELS_CUDA_MIX24_MIX24_H

#include "kernels/cuda/common/plan.h"

#include <cuda_fp16.h>

/* PANEL: what a part of the CSR is for, 64 Ki columns. */
enum { QT_MIX24_UNIT_COLS = 128, QT_MIX24_PANEL_UNITS = 65536 / QT_MIX24_UNIT_COLS };

/* Of a strip. */
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

/* Outliers for the skinny and tile kernels. */
struct qt_mix24_outliers {
    const uint32_t *ptr;   /* [panels][pitch]: CSR row pointers; NULL without outliers */
    const uint16_t *col;   /* packed column in the panel of 64 Ki */
    const uint16_t *val;   /* FP16 */
    const __half *columns; /* F16 [units * 128][column_pitch]: X by packed columns */
    size_t column_pitch;   /* 8 or 16; of the tile kernel all tokens, rounded up */
    size_t pitch;          /* row pointers of a panel */
    int panels, n;
    int warps; /* of a block that add them up; skinny kernel */
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

/* As qtool_matmul_slice, _plan_check, _run and _dequantize. choose: the part of qtool_matmul_plan after
 * the facts of the device are known; *us: about how long 16 tokens at a time take, then what the
 * plan takes. */
int qt_mix24_slice(struct qtool_matmul_weight *out, const struct qtool_matmul_weight *w, size_t n0,
                   size_t n, size_t k0, size_t k);
const char *qt_mix24_fault(const struct qtool_matmul_weight *w);
int qt_mix24_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, double *us);
int qt_mix24_plan_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w);
int qt_mix24_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, void *y,
                 const void *x, void *workspace, void *stream);
int qt_mix24_dequantize(const struct qtool_matmul_weight *w, void *out, enum qtool_dtype dtype,
                        void *stream);

/* The stream for the copy engine: boxes of a TWO and of a FOUR of so many strips. */
bool qt_mix24_record_maps(const struct qtool_matmul_plan *p, CUtensorMap records[2],
                          const struct qtool_matmul_weight *w, int box_strips);

/* X in packed order, in the workspace. */
struct qt_mix24_gathered {
    void *rows;          /* F16 [m][128 units] */
    void *columns;       /* F16 [128 units][column_pitch], or NULL; zeros beyond m */
    size_t column_pitch; /* 8, or a multiple of 16 from m on */
    bool for_wgmma;      /* rows are ordered so that a lane's four columns of a k-step become its
                            part of a wgmma */
    uint32_t *lists;     /* [strips][units][32] or NULL: outliers, as mix24_patch.cuh wants them */
    void *prepared;      /* X as qt_prepare_run leaves it; BF16 */
};

/* Of the lists. */
enum {
    PATCH_LIST = 32, /* words */
    PATCH_LIST_BYTES = 4 * PATCH_LIST,
    PATCH_STEP_BIT = 8, /* of a list's head: the first step's */
    PATCH_MANY = 1 << 16,
    PATCH_STEP_BYTES = 512,
    PATCH_STEPS = 8 /* of a unit */
};

/* From x [m][k], by one launch, or two: BF16 is prepared first, which sets *token_factor. */
int qt_mix24_gather(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                    const struct qt_mix24_gathered *to, const void *x, const float **token_factor,
                    void *stream);

#endif
