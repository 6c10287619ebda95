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
    uint8_t *rank; /* [n][k] index of each value */
    float *scale;  /* [n][groups] */
    uint8_t *zero; /* [n][groups] */
    uint8_t *skip; /* [n] not 0: descent leaves the row as it is */
    double *sum;   /* [n] objective, or its part so far */
};

/* Columns of the widest column block. */
enum { GPU_ROUND_WIDEST = 256 };

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

#ifdef __cplusplus
}
#endif

#endif
