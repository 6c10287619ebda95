/*
 * A panel of rows while it is being solved (private to hessian/). Its matrices are [k][R] in
 * processing order, R = QT_PANEL_ROWS, so that the rows of a column are contiguous; rows beyond the
 * panel's are zero.
 *
 * The solver processes column blocks. The influence of all other columns on a column block is in
 * G[k][rows], running sums of products with V or H; the changes of the column block are added to G:
 *
 *     G --rows of the block--> panel.g --compensate.c, descent.c--> panel.change --V or H--> G
 *
 * The steps in the middle access their panel only. running_sums.c owns G and its products: either
 * each thread solves one panel at a time with its own G, or all panels advance together with G and
 * its products on a backend.
 */
#ifndef QT_HESSIAN_PANEL_H
#define QT_HESSIAN_PANEL_H

#include "hessian/hessian.h"

#include <cblas.h>

struct panel {
    const struct qt_factor *f;
    const struct qt_rounder *rounder;
    size_t row0, rows;
    float *w;    /* [k][R] weights (targets) */
    float *q;    /* [k][R] rounded values */
    float *unit; /* [k][R] q / scale */
    float *hw;   /* [k][R] H w if descent refits one scale per row, else NULL */

    /* [columns of the current column block][R] */
    float *g;      /* compensation: sum of V_ij e_i over finished i; descent: H (w - q)^T */
    float *change; /* change of w - q; compensation: w - q */
    float *target; /* unconstrained optimum of a group's columns */
    float *scratch;
    float *v;     /* [columns]^2 factor of a group if the rounder refits groups, or NULL */
    bool changed; /* change is not all 0 */

    double sum;           /* of the terms of the objective in the current pass */
    double error, before; /* the objective now, and before the round */
    int round;            /* of descent */
    bool converged;       /* descent gained too little in the last round */

    /* Refit of one scale per row: u.G, u.Hq, the new scale and its relative change. */
    double ug[QT_PANEL_ROWS], uhq[QT_PANEL_ROWS];
    float scale[QT_PANEL_ROWS], scale_change[QT_PANEL_ROWS];
};

/* Columns that are rounded before one product spreads their errors to the rest of the column block.
 * Updating all of g after each column would take longer than everything else in the block. */
enum { QT_PANEL_STEP = 16 };

/* g[n][R] += h[m][n]^T c[m][R], h with row stride k: adds the effect of changes c of m columns on n
 * other columns. */
static inline void qt_panel_add(float *g, const float *h, size_t k, const float *c, size_t m,
                                size_t n)
{
    if (m == 1 && n)
        cblas_sger(CblasRowMajor, (int)n, QT_PANEL_ROWS, 1, h, 1, c, 1, g, QT_PANEL_ROWS);
    else if (n)
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n, QT_PANEL_ROWS, (int)m, 1, h,
                    (int)k, c, QT_PANEL_ROWS, 1, g, QT_PANEL_ROWS);
}

/* A step on the column block [at, at + n) of the processing order. */
typedef void qt_panel_step(struct panel *p, size_t at, size_t n);

/* Rounds the columns with compensation of all earlier errors. Adds to sum. */
qt_panel_step qt_panel_compensate;
/* One round of coordinate descent. Also refits the parameters of the groups, except a single scale
 * per row. */
qt_panel_step qt_panel_descend;
/* Refit of one scale per row: sums, and after the last column block the new scale; then updates q
 * and g. */
qt_panel_step qt_panel_moments, qt_panel_rescale;

/* End of the group that starts at position `at`. */
size_t qt_factor_group_end(const struct qt_factor *f, size_t at);
/* True if each row has a single scale. */
bool qt_factor_is_one_group(const struct qt_factor *f);

/* G of a set of panels. */
struct qt_running_sums {
    const struct qt_factor *f;
    struct panel *panel;
    size_t panels;
    const float *m; /* the matrix of the products: V or H */
    float *g;       /* without a backend: [k][R], owned by the caller; panels is 1 */
    struct qt_backend *be;
    float *device_g, *device_change; /* [k][panels * R], [longest][panels * R] */
    float *staged;                   /* rows of a column block in host memory */
};

/* Allocates G on be; `longest` is the length of the longest column block. */
int qt_running_sums_on_backend(struct qt_running_sums *s, struct qt_backend *be, size_t longest,
                               struct qt_err *err);
void qt_running_sums_free(struct qt_running_sums *s); /* frees the backend's part */
/* Sets G to 0 and the matrix of the products to m, which is V or H of the factor. */
int qt_running_sums_start(struct qt_running_sums *s, const float *m, struct qt_err *err);

/* Effect of a step on G: none; G += m^T change; or G's rows = g. */
enum qt_running_sums_use { QT_SUMS_READ, QT_SUMS_ADD, QT_SUMS_STORE };
int qt_running_sums_block(struct qt_running_sums *s, qt_panel_step *step,
                          enum qt_running_sums_use use, size_t at, size_t n, struct qt_err *err);

/* cholesky.c: replaces the lower triangle of a[k][k] by L with a = L L^T; the upper triangle does
 * not change. Returns false, with a undefined, if a is not positive definite. The result does not
 * depend on the number of threads. Sets OpenBLAS to one thread. */
bool qt_cholesky(double *a, size_t k);

#endif
