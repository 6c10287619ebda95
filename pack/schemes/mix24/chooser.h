/* State of the choices of mix24 before there are codes (private to mix24/): choose.c makes those of
 * groups and of the exponent, outliers.c those of outliers. */
#ifndef QT_PACK_SCHEMES_MIX24_CHOOSER_H
#define QT_PACK_SCHEMES_MIX24_CHOOSER_H

#include "pack/schemes/mix24/fit.h"

/* DIGIT: bits of a score that decide at a time which are the largest (outliers.c). */
enum { ROWS = QT_FRAG_ROWS, MAX_G = 16, DIGIT = 11, DIGITS = 1 << DIGIT };

/* The largest min-max scale of a strip's groups and the largest outlier, for weights before
 * division by 2^scale_exp2. */
struct qt_mix24_range {
    float scale, outlier;
};

struct qt_mix24_chooser {
    const struct qt_packed *p;
    struct qt_mix24 m;
    struct qt_mix24_recipe recipe;
    const struct qt_mix24_fitops *ops;
    const struct qt_matrix *w;
    const struct qt_copy *on; /* where costs are computed; NULL: on the host */
    float *root;              /* [k] square root of the cost of a squared error of the channel */
    double *strips;           /* [strips][groups] sensitivities */
    double *sens;             /* [groups] sums of the sensitivities */
    bool *is_four;            /* [groups] */
    float *score;             /* [n][scores] error reduction by an outlier; 0 for other weights */
    size_t scores;            /* k, or 2 groups: of the weights of a group that `channel` names */
    uint8_t *channel;         /* [n][2 groups] ascending in a group; NULL: scores are of columns */
    uint16_t *marks;          /* [n][groups] bit j: column j of the group is an outlier */
    float *rows;              /* [threads][16][k] */
    struct qt_mix24_range *extents; /* [strips] */
};

/* A group's problem with its storage. */
struct qt_mix24_part {
    struct qt_mix24_problem p;
    float t[MAX_G * ROWS], v[MAX_G * MAX_G];
    uint8_t channel[MAX_G];
    uint16_t outlier_rows[MAX_G];
};

/* rows[count][k] of the matrix; missing rows are 0. */
void qt_mix24_part(struct qt_mix24_part *x, const struct qt_mix24_chooser *c, const float *rows,
                   size_t count, size_t group);
/* The rows of a strip, in memory of the thread. */
float *qt_mix24_rows_of(const struct qt_mix24_chooser *c, size_t strip, int thread, size_t *count);

/* [k] the costs of squared errors. */
int qt_mix24_importance_new(float **out, const struct qt_mix24_chooser *c, struct qt_err *err);
/* Costs of a backend, with these costs of squared errors. */
struct qt_mix24_costs qt_mix24_costs_on(const struct qt_mix24_chooser *c, const float *importance);

/* Marks the outliers, and writes rows and columns of the CSR matrix. */
int qt_mix24_choose_outliers(struct qt_mix24_chooser *c, struct qt_err *err);

#endif
