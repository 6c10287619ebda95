/*
 * Loops over rows of weights that must run at memory speed. rowops.c is compiled once per
 * instruction set; all builds give the same bits, because sums run in 16 fixed lanes that are added
 * in a fixed order, and nothing is contracted to fused multiply-adds.
 */
#ifndef QT_PACK_SCHEMES_ROWOPS_H
#define QT_PACK_SCHEMES_ROWOPS_H

#include <stddef.h>
#include <stdint.h>

enum { QT_GRID_MAX = 16 }; /* entries of a table */

/* The values that codes stand for, before scaling: a table, a minifloat, or whole numbers. */
struct qt_grid {
    int levels;               /* 4, 8 or 16 table entries; 0: no table */
    float value[QT_GRID_MAX]; /* ascending */
    float mid[QT_GRID_MAX];   /* (value[i] + value[i+1]) / 2: x > mid[i] goes to i + 1 or above; the
                                 last is not used */
    int exp_bits, man_bits;   /* minifloat ExMy; 0, 0: none */
    int sign_bit;             /* of its code: 0, behind the magnitude, or the top one */
    float low, high;          /* else integers low..high; code = (value - low) mod 256 */
    float max;                /* largest magnitude */
};

struct qt_rowops {
    const char *isa;
    /* max |x[i]|; 0 for n = 0. NaN and infinities give NaN or infinity. */
    float (*absmax)(const float *x, size_t n);
    /* code[i] = nearest(x[i] * inv). Table ties go to the lower index, others to even. */
    void (*round)(uint8_t *code, const float *x, size_t n, float inv, const struct qt_grid *g);
    /* sum of h[i] (x[i] - s * nearest(x[i] * inv))^2; h = NULL: 1. */
    float (*error)(const float *x, const float *h, size_t n, float inv, float s,
                   const struct qt_grid *g);
    /* xq = sum h x q, qq = sum h q^2 with q = nearest(x * inv): least squares gives s = xq / qq. */
    void (*moments)(float *xq, float *qq, const float *x, const float *h, size_t n, float inv,
                    const struct qt_grid *g);
};

/* The best build for this processor; the environment variable QTOOL_ISA=generic|avx2|avx512 asks
 * for another one (ignored where it cannot run), so that tests can compare them. */
const struct qt_rowops *qt_rowops_best(void);
/* All builds that this processor can run, NULL beyond the end. */
const struct qt_rowops *qt_rowops_at(size_t i);

#endif
