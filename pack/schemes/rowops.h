/*
 * Vector loops over rows of weights, which run at memory speed. rowops.c is compiled once per
 * instruction set. All builds give the same bits: sums run in 16 fixed lanes, lanes are added in a
 * fixed order, and products and sums are not contracted to fused multiply-adds.
 */
#ifndef QT_PACK_SCHEMES_ROWOPS_H
#define QT_PACK_SCHEMES_ROWOPS_H

#include <stddef.h>
#include <stdint.h>

enum { QT_GRID_MAX = 16 }; /* entries of a table */

/* The values of codes before scaling: a table, a minifloat, or integers. */
struct qt_grid {
    int levels;               /* 4, 8 or 16 table entries; 0: no table */
    float value[QT_GRID_MAX]; /* ascending */
    float mid[QT_GRID_MAX];   /* (value[i] + value[i+1]) / 2; x > mid[i] rounds to i + 1 or above;
                               * the last is unused */
    int exp_bits, man_bits;   /* minifloat ExMy; 0, 0: none */
    int sign_bit;             /* sign bit of a minifloat code: 0 (last) or bits - 1 (first) */
    float low, high;          /* else integers low..high; code = (value - low) mod 256 */
    float max;                /* largest magnitude */
};

struct qt_rowops {
    const char *isa;
    /* max |x[i]|; 0 for n = 0; NaN or infinity if x has one. */
    float (*absmax)(const float *x, size_t n);
    /* code[i] = nearest(x[i] * inv). Ties: tables to the lower index, others to even. */
    void (*round)(uint8_t *code, const float *x, size_t n, float inv, const struct qt_grid *g);
    /* sum of h[i] (x[i] - s * nearest(x[i] * inv))^2; h = NULL: 1. */
    float (*error)(const float *x, const float *h, size_t n, float inv, float s,
                   const struct qt_grid *g);
    /* xq = sum of h x q, qq = sum of h q^2 with q = nearest(x * inv). The least-squares scale is xq
     * / qq. */
    void (*moments)(float *xq, float *qq, const float *x, const float *h, size_t n, float inv,
                    const struct qt_grid *g);
};

/* The fastest build that this processor runs, or the one that the environment variable
 * QTOOL_ISA=generic|avx2|avx512 names, if it runs here. Tests compare builds with it. */
const struct qt_rowops *qt_rowops_best(void);
/* Builds that this processor runs, in ascending speed; NULL past the end. */
const struct qt_rowops *qt_rowops_at(size_t i);

#endif
