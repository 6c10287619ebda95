/*
 * Rounding of a matrix on the GPU: the function `round` of struct qt_backend (private to kernels/).
 * round.c divides it into column blocks, round_kernels.cu has the kernels, round_row.h what they do
 * with a row. Positions are columns in processing order. All arrays are in device memory and
 * row-major.
 */
#ifndef QT_KERNELS_GPU_ROUND_H
#define QT_KERNELS_GPU_ROUND_H

#include "kernels/gpu/round_row.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Columns of the widest column block; of mix24. */
enum { GPU_ROUND_WIDEST = 256, GPU_MIX24_WIDEST = 128 };

/* mix24 needs these members besides those of struct gpu_round. */
struct gpu_mix24 {
    const uint8_t *bits;      /* [groups] of a code: 2 or 4 */
    const uint16_t *outliers; /* [strips][k] bit r: row r of the strip has an outlier there */
    int halves;               /* s2 and z2 of a strip and group: 1 or 2 */
    bool search;              /* descent searches for s2 and z2 */
    float *values;            /* [n][k] */
    uint8_t *q;               /* [n][groups] codes of scales */
    uint16_t *u;              /* [strips][groups][2] bits of s2, and z2 */
    float *factor;            /* [groups][16][16] of the blocks of H, for descent */
};

struct gpu_round {
    size_t n, k, groups;
    const struct row_values *values;
    const uint8_t *code;                 /* [ROW_VALUES] code of each value */
    const uint32_t *order, *group, *end; /* [k] column, group and end of the group at a position */
    const uint32_t *first, *length;      /* [groups] first position and columns of each group */
    float *w;                            /* [n][k] */
    float *hw;                           /* [n][k] H w, for gpu_round_rescale */
    float *g;                            /* [n][k] running sums */
    float *d;      /* [n][k] errors w - q, or changes of a span of column blocks */
    float *change; /* place of a column block in d: [n][change_ld] */
    size_t change_ld;
    uint8_t *rank; /* [n][k] index of each value, or code of mix24 */
    float *scale;  /* [n][groups]; NULL for mix24 */
    uint8_t *zero; /* [n][groups] */
    uint8_t *skip; /* [n] not 0: descent leaves the row as it is */
    double *sum;   /* [n] objective, or its part so far */
    struct gpu_mix24 mix24;
};

/* These functions return a cudaError_t and only enqueue work on `stream`. */

/* out[k] = diagonal of m[k][k], or its squares. */
int gpu_round_diagonal(float *out, const float *m, size_t k, bool squared, void *stream);
/* Fits the parameters of all groups to w. h[k] weights squared errors; NULL: all 1. */
int gpu_round_fit(const struct gpu_round *r, const float *h, void *stream);
/* Rounds w to nearest. */
int gpu_round_assign(const struct gpu_round *r, void *stream);
/* Error compensation of `columns` positions from `at` on under v; change = w - q, sum += terms. */
int gpu_round_compensate(const struct gpu_round *r, const float *v, size_t at, size_t columns,
                         void *stream);
/* Coordinate descent under h; change = that of w - q. */
int gpu_round_descend(const struct gpu_round *r, const float *h, size_t at, size_t columns,
                      void *stream);
/* d[n][k] = w - q. */
int gpu_round_errors(const struct gpu_round *r, void *stream);
/* sum = (w - q) . g of each row. */
int gpu_round_objective(const struct gpu_round *r, void *stream);
/* Refits the scales of rows with one group, and updates g. */
int gpu_round_rescale(const struct gpu_round *r, void *stream);
/* The results, transposed: code[k][stride] by column, scale and zero [groups][stride]. */
int gpu_round_store(const struct gpu_round *r, uint8_t *code, float *scale, uint8_t *zero,
                    size_t stride, void *stream);

/* out[n][k] = the rounded values times 2^exp2, in column order. */
int gpu_round_values(const struct gpu_round *r, float *out, int exp2, void *stream);
/* Raises range[0] to the bits of the largest magnitude of each group of w[n][k], and lowers range[1]
 * to them where they are not 0. Bits of magnitudes compare like the magnitudes, NaN above all. */
int gpu_round_range(uint32_t range[2], const float *w, size_t n, size_t k, size_t group,
                    void *stream);

/* ---- mix24 (mix24_kernels.cu) ---- */

/* The function mix24_costs of struct qt_backend, with costs of each row. */
struct gpu_mix24_costs {
    size_t n, k, group, groups;
    const float *w;       /* [n][k] */
    int exp2;             /* the weights are w times 2^exp2 */
    const float *weights; /* [k] of squared errors; NULL: all 1 */
    float *two, *four;    /* [n][groups], or NULL */
    float *gain;          /* [n][groups][2], or NULL */
    uint8_t *channel;     /* same */
};
int gpu_mix24_costs(const struct gpu_mix24_costs *c, void *stream);
/* sum[groups] = sums over the rows of cost[n][groups]. */
int gpu_mix24_sum_rows(double *sum, const float *cost, size_t n, size_t groups, void *stream);

/* struct qt_mix24_extent for kernels: raises most[0] and most[1] to the bits of scale and outlier,
 * which compare like the numbers. */
struct gpu_mix24_extent {
    size_t n, k, group, groups;
    const float *w;
    int exp2;
    const uint8_t *bits;
    const uint16_t *outliers;
    uint32_t *most;
};
int gpu_mix24_extent(const struct gpu_mix24_extent *e, void *stream);

/* Fits the parameters of all groups to w, and rounds w to nearest. weights[k] of squared errors by
 * position; NULL: all 1. */
int gpu_mix24_assign(const struct gpu_round *r, const float *weights, void *stream);
/* As gpu_round_compensate and gpu_round_descend. */
int gpu_mix24_compensate(const struct gpu_round *r, const float *v, size_t at, size_t columns,
                         void *stream);
int gpu_mix24_descend(const struct gpu_round *r, const float *h, size_t at, size_t columns,
                      void *stream);
/* Factors the blocks of h. */
int gpu_mix24_factor(const struct gpu_round *r, const float *h, void *stream);
/* As gpu_round_store, with the codes q of scales. */
int gpu_mix24_store(const struct gpu_round *r, uint8_t *code, uint8_t *q, uint8_t *zero,
                    size_t stride, void *stream);
/* out[i] = values[at[i]]: the outliers. */
int gpu_mix24_gather(float *out, const struct gpu_round *r, const uint64_t *at, size_t count,
                     void *stream);

#ifdef __cplusplus
}
#endif

#endif
