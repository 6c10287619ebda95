/*
 * A panel of rows while it is being solved (private to hessian/). Its matrices are [k][R] in
 * processing order, R = QT_PANEL_ROWS, so that what happens to a column is contiguous over rows;
 * rows beyond the panel's are zero.
 *
 * Solving goes through blocks of columns. What a block needs of all others is in G[k][rows], sums
 * of products with V or H, and what it changes goes there:
 *
 *     G --rows of the block--> panel.g --feedback.c, polish.c--> panel.change --V or H--> G
 *
 * The steps in the middle see nothing but their panel. Where G is and how it is multiplied is a
 * matter of sums.c: either panels are solved one by one, each by a thread with a G of its own, or
 * all at the same time, with G and its products on a backend.
 */
#ifndef QT_HESSIAN_PANEL_H
#define QT_HESSIAN_PANEL_H

#include "hessian/hessian.h"

#include <cblas.h>

struct panel {
    const struct qt_factor *f;
    const struct qt_rounder *rounder;
    size_t row0, rows;
    float *w;    /* [k][R] source */
    float *q;    /* [k][R] rounded */
    float *unit; /* [k][R] q / scale */
    float *hw;   /* [k][R] H w; where polishing refits one scale a row, else NULL */

    /* Of the block at hand, [columns of it][R]. */
    float *g;      /* in feedback: sum of V_ij e_i over finished i; in polishing: H (w - q)^T */
    float *change; /* what w - q has changed by; in feedback: w - q */
    float *target; /* what a group's columns would best be */
    float *spare;
    float *v;     /* [columns]^2: of a group, where the rounder refits groups as a whole; or NULL */
    bool changed; /* change is not 0 */

    double sum;           /* of the pass at hand: over terms of the objective */
    double error, before; /* the objective now and before the round */
    bool done;            /* polishing has stopped paying */

    /* Of a refit of one scale a row: u.G, u.Hq, the new scale and its relative change. */
    double ug[QT_PANEL_ROWS], uhq[QT_PANEL_ROWS];
    float scale[QT_PANEL_ROWS], move[QT_PANEL_ROWS];
};

/* Columns that are rounded one after the other before others learn of it, by one product: updates
 * for each column, of all of g, would take longer than all else that is done in a block. */
enum { QT_PANEL_STEP = 16 };

/* g[n][R] += h[m][n]^T c[m][R], rows of h apart by k: what m columns that have changed by c change
 * in n others. */
static inline void qt_panel_add(float *g, const float *h, size_t k, const float *c, size_t m,
                                size_t n)
{
    if (m == 1 && n)
        cblas_sger(CblasRowMajor, (int)n, QT_PANEL_ROWS, 1, h, 1, c, 1, g, QT_PANEL_ROWS);
    else if (n)
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n, QT_PANEL_ROWS, (int)m, 1, h,
                    (int)k, c, QT_PANEL_ROWS, 1, g, QT_PANEL_ROWS);
}

/* What is done with a block: columns [at, at + n) in processing order. */
typedef void qt_panel_step(struct panel *p, size_t at, size_t n);

/* Rounds the columns, each with the errors before it. sum: the objective. */
qt_panel_step qt_panel_compensate;
/* Descends through the columns of the block; refits the parameters of its groups, if more than one
 * in the matrix. */
qt_panel_step qt_panel_descend;
/* The refit of one scale a row: sums; the new scale at the last block; then q and g of it. */
qt_panel_step qt_panel_moments, qt_panel_rescale;

/* End of the group that starts at position `at`. */
size_t qt_factor_group_end(const struct qt_factor *f, size_t at);
/* One scale a row. */
bool qt_factor_is_one_group(const struct qt_factor *f);

/* G of some panels. */
struct qt_running_sums {
    const struct qt_factor *f;
    struct panel *panel;
    size_t panels;
    const float *m; /* V or H, what is multiplied by */
    float *g;       /* without a backend: [k][R] of the only panel, the caller's */
    struct qt_backend *be;
    float *device_g, *device_m, *device_change; /* [k][panels * R], [k][k], [longest][panels * R] */
    float *staged;                              /* a block's rows in host memory */
};

/* On be; longest: columns of the longest block. */
int qt_running_sums_on_backend(struct qt_running_sums *s, struct qt_backend *be, size_t longest,
                               struct qt_err *err);
void qt_running_sums_free(struct qt_running_sums *s); /* what qt_running_sums_on_backend has made */
/* G = 0; from now on products are with m, which is V or H of the factor. */
int qt_running_sums_start(struct qt_running_sums *s, const float *m, struct qt_err *err);

/* What becomes of a step's results: nothing; G += m^T change; g takes the place of G's rows. */
enum qt_running_sums_use { QT_SUMS_READ, QT_SUMS_ADD, QT_SUMS_STORE };
int qt_running_sums_block(struct qt_running_sums *s, qt_panel_step *step,
                          enum qt_running_sums_use use, size_t at, size_t n, struct qt_err *err);

/* cholesky.c: the lower triangle of a[k][k] becomes L, a = L L^T; what stands above is left alone.
 * *positive false: a is not positive definite, and half done. Never depends on the number of
 * threads; sets OpenBLAS to one. */
int qt_cholesky(bool *positive, double *a, size_t k, struct qt_err *err);

#endif
