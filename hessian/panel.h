/* A panel of rows while it is being solved (private to hessian/). Its matrices are [k][R] in
 * processing order, R = QT_PANEL_ROWS, so that what happens to a column is contiguous over rows;
 * rows beyond the panel's are zero. */
#ifndef QT_HESSIAN_PANEL_H
#define QT_HESSIAN_PANEL_H

#include "hessian/hessian.h"

struct panel {
    const struct qt_factor *f;
    const struct qt_rounder *rounder;
    size_t row0, rows;
    float *w;     /* [k][R] source */
    float *q;     /* [k][R] rounded */
    float *unit;  /* [k][R] q / scale */
    float *g;     /* [k][R] feedback: sum of V_ij e_i over finished i; polish: H (w - q)^T */
    float *tmp;   /* [k][R] a group's targets */
    float *block; /* [2 * longest block][R]: a group's errors, then the block's */
};

/* End of the group that starts at position `at`. */
size_t qt_factor_group_end(const struct qt_factor *f, size_t at);

/* Coordinate descent on codes and scales, `rounds` times or until it stops paying. Returns the
 * panel's objective. */
double qt_panel_polish(struct panel *p, int rounds);

/* cholesky.c: the lower triangle of a[k][k] becomes L, a = L L^T; what stands above is left alone.
 * *positive false: a is not positive definite, and half done. Never depends on the number of
 * threads; sets OpenBLAS to one. */
int qt_cholesky(bool *positive, double *a, size_t k, struct qt_err *err);

#endif
