/*
 * Parameters and codes of one mix24 group in the 16 rows of a strip (private to pack/). Values q =
 * s (code - zero) for the targets t of a row cost
 *
 *     sum over j of ( sum over i <= j of V_ij (t_i - q_i) )^2
 *
 * with an upper triangular V. Error compensation and coordinate descent provide V; without a
 * Hessian V is diagonal, with the square roots of the channels' importance. Codes are found column
 * by column: each is the nearest to its target after the errors of the columns before it (Babai's
 * nearest plane). Compiled per instruction set with the same results on all: a vector holds the 16
 * rows, and sums over rows are made in order.
 */
#ifndef QT_PACK_SCHEMES_MIX24_FIT_H
#define QT_PACK_SCHEMES_MIX24_FIT_H

#include "pack/schemes/mix24/mix24.h"

/* Rounds of coordinate descent that search for s2 and z2. Later rounds would find hardly any better
 * ones (E on tiny-llama: 0.1 % lower). */
enum { QT_MIX24_SEARCHES = 2 };

struct qt_mix24_problem {
    size_t n;               /* columns, 1 to 16, in rounding order */
    unsigned bits;          /* of a code */
    size_t halves;          /* 16 / g2 */
    bool search;            /* fit: search for the parameters, else min-max; refit: search for s2
                             * and z2 as well */
    bool coupled;           /* V has off-diagonal entries */
    const uint8_t *channel; /* [n] channel of each column in the group */
    const float *t;         /* [n][16] */
    const uint16_t *outlier_rows; /* [n] bit r: row r has an outlier, which costs nothing */
    const float *v;               /* [n][stride] */
    size_t stride;
};

struct qt_mix24_fitops {
    /* Per row, the least cost with a separate scale; off-diagonal entries of V are ignored. */
    void (*cost)(float cost[QT_FRAG_ROWS], const struct qt_mix24_problem *p);
    /* Chooses parameters and codes. q[n][16]: the values; for an outlier, the target. */
    void (*fit)(struct qt_mix24_group *out, float *q, const struct qt_mix24_problem *p);
    /* Same, but keeps the parameters and codes of rows for which it finds nothing better. */
    void (*refit)(struct qt_mix24_group *group, float *q, const struct qt_mix24_problem *p);
};

/* The build for the instruction set of qt_rowops_best. */
const struct qt_mix24_fitops *qt_mix24_fitops_best(void);

#endif
