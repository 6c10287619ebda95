/*
 * Parameters and codes of one group of mix24 in the 16 rows of a strip (private to pack/). A row's
 * targets t and values q = s (code - zero) cost
 *
 *     sum over j of ( sum over i <= j of V_ij (t_i - q_i) )^2,
 *
 * V upper triangular: what error feedback and polishing give, and without a Hessian the diagonal of
 * the square roots of the channels' importance. Codes are found column by column, each nearest to
 * its target after the errors of those before it (Babai). Built per instruction set with the same
 * results on all: a vector holds the 16 rows, and sums over rows run in order.
 */
#ifndef QT_PACK_SCHEMES_MIX24_FIT_H
#define QT_PACK_SCHEMES_MIX24_FIT_H

#include "pack/schemes/mix24/mix24.h"

struct qt_mix24_problem {
    size_t n;               /* columns, 1..16, in the order in which they are rounded */
    unsigned bits;          /* of codes */
    size_t halves;          /* 16 / g2 */
    bool search;            /* else min-max */
    bool coupled;           /* V has entries beside the diagonal */
    const uint8_t *channel; /* [n] of the group: where the column's codes go */
    const float *t;         /* [n][16] */
    const uint16_t *apart;  /* [n] bit r: an outlier in row r, which costs nothing */
    const float *v;         /* [n][stride] */
    size_t stride;
};

struct qt_mix24_fitops {
    const char *isa;
    /* Per row, the least cost with a scale of its own, off-diagonal V ignored. */
    void (*cost)(float cost[QT_FRAG_ROWS], const struct qt_mix24_problem *p);
    /* Chooses everything. q[n][16]: the values, the target itself where it is an outlier. */
    void (*fit)(struct qt_mix24_group *out, float *q, const struct qt_mix24_problem *p);
    /* The same, but keeps what group and q have where nothing better is found. */
    void (*refit)(struct qt_mix24_group *group, float *q, const struct qt_mix24_problem *p);
};

/* For the instruction set of qt_rowops_best. */
const struct qt_mix24_fitops *qt_mix24_fitops_best(void);

#endif
