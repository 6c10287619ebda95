/*
 * Cholesky factorization in tiles, each the work of one thread and of fixed size: unlike LAPACK's
 * with threads, its result does not depend on how many there are.
 *
 *            p        for each panel of PANEL columns:
 *     +---+
 *     |   |             L11         = Cholesky factor of A11             (LAPACK)
 *   p +---+---+         L21 L11^T   = A21      a tile of rows an item    (trsm)
 *     |   |L11|         A22        -= L21 L21^T   a tile an item         (syrk, gemm)
 *     |   +---+---+
 *     |   |L21|A22|
 *     +---+---+---+
 */
#include "hessian/panel.h"

#include <cblas.h>
#include <lapacke.h>

/* On one core, k = 4096, 1.05 to 1.15 times as long as LAPACK on the whole. */
enum { PANEL = 256, TILE = 512 };

struct job {
    double *a;
    size_t k, p, below; /* the panel's first column, the first row behind it */
};

static size_t tile_rows(const struct job *job, size_t at)
{
    return qt_min_size(TILE, job->k - at);
}

static int solve_tile(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *job = ctx;
    size_t k = job->k, at = job->below + item * TILE;
    (void)thread;
    (void)err;
    cblas_dtrsm(CblasRowMajor, CblasRight, CblasLower, CblasTrans, CblasNonUnit,
                (int)tile_rows(job, at), (int)(job->below - job->p), 1,
                job->a + job->p * k + job->p, (int)k, job->a + at * k + job->p, (int)k);
    return QT_OK;
}

static int update_tile(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct job *job = ctx;
    size_t k = job->k, row, col;
    const int panel = (int)(job->below - job->p), ld = (int)k;
    (void)thread;
    (void)err;
    qt_triangle_tile(&row, &col, item);
    const size_t i = job->below + row * TILE, j = job->below + col * TILE;
    const double *li = job->a + i * k + job->p, *lj = job->a + j * k + job->p;
    double *to = job->a + i * k + j;
    if (i == j)
        cblas_dsyrk(CblasRowMajor, CblasLower, CblasNoTrans, (int)tile_rows(job, i), panel, -1, li,
                    ld, 1, to, ld);
    else
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)tile_rows(job, i),
                    (int)tile_rows(job, j), panel, -1, li, ld, lj, ld, 1, to, ld);
    return QT_OK;
}

int qt_cholesky(bool *positive, double *a, size_t k, struct qt_err *err)
{
    int rc = QT_OK;
    *positive = false;
    openblas_set_num_threads(1);
    for (size_t p = 0; p < k; p += PANEL) {
        struct job job = {a, k, p, qt_min_size(p + PANEL, k)};
        const size_t tiles = qt_ceil_div(k - job.below, TILE);
        /* Lower by rows is upper by columns: no transposed copy. */
        if (LAPACKE_dpotrf_work(LAPACK_COL_MAJOR, 'U', (lapack_int)(job.below - p), a + p * k + p,
                                (lapack_int)k) != 0)
            return QT_OK;
        QT_TRY(qt_parallel(tiles, solve_tile, &job, err));
        QT_TRY(qt_parallel(tiles * (tiles + 1) / 2, update_tile, &job, err));
    }
    *positive = true;
done:
    return rc;
}
