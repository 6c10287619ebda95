/* Random mix24 matrices for the GPU programs. They are packed bit by bit from the description of
 * the format, without code from pack/. */
#ifndef QT_TESTS_GPU_MIX24_MATRIX_H
#define QT_TESTS_GPU_MIX24_MATRIX_H

#include "kernels/include/qtool_kernels.h"

#include <stdbool.h>
#include <stdint.h>

struct mix24_recipe {
    size_t n, k;
    double fours;    /* share of 4-bit groups */
    double outliers; /* share of weights */
    bool skewed;     /* most outliers in few rows */
    bool wide;       /* scales so small that FP16 underflows */
    int scale_exp2;
    bool shuffled; /* groups in random order */
};

struct mix24_matrix {
    struct qtool_matmul_weight weight; /* device */
    float *decoded;                    /* host [n][k] */
    float *device_decoded;
    size_t outliers;
};

/* Makes a matrix in host and device memory from *seed, which is advanced. */
void mix24_matrix_new(struct mix24_matrix *m, const struct mix24_recipe *r, uint64_t *seed);
void mix24_matrix_free(struct mix24_matrix *m);

#endif
