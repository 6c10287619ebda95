/*
 * H += X^T X for Hessians: FP32 products over chunks of tokens, accumulated over the chunks in
 * FP64. Only the lower triangle is computed, in square tiles. One thread computes a tile and takes
 * the chunks in order, so results do not depend on the number of threads.
 */
#include "kernels/cpu/internal.h"

#include <cblas.h>

/* A tile's FP32 product has 256 KB and stays in the L2 cache. */
enum { TILE = 256, CHUNK = 1024 };

struct gram_job {
    double *h;
    const float *x;
    size_t m, k;
    const struct cpu_scratch *scratch;
};

static int gram_tile(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct gram_job *job = ctx;
    float *product = cpu_scratch_of(job->scratch, thread);
    size_t row, col, k = job->k;
    (void)err;
    qt_triangle_tile(&row, &col, item);
    size_t i0 = row * TILE, j0 = col * TILE;
    size_t rows = qt_min_size(TILE, k - i0), cols = qt_min_size(TILE, k - j0);
    for (size_t t = 0; t < job->m; t += CHUNK) {
        const float *x = job->x + t * k;
        int tokens = (int)qt_min_size(CHUNK, job->m - t);
        if (row == col)
            cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, (int)rows, tokens, 1, x + i0, (int)k,
                        0, product, TILE);
        else
            cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)rows, (int)cols, tokens, 1,
                        x + i0, (int)k, x + j0, (int)k, 0, product, TILE);
        for (size_t i = 0; i < rows; i++) {
            double *h = job->h + (i0 + i) * k + j0;
            for (size_t j = 0; j < (row == col ? i + 1 : cols); j++)
                h[j] += (double)product[i * TILE + j];
        }
    }
    return QT_OK;
}

int cpu_gram(struct cpu_scratch *scratch, double *h, const float *x, size_t m, size_t k,
             struct qt_err *err)
{
    size_t tiles = qt_ceil_div(k, TILE);
    struct gram_job job = {h, x, m, k, scratch};
    int rc = cpu_check_width(k, err);
    if (rc == QT_OK)
        rc = cpu_scratch_need(scratch, TILE * TILE, err);
    if (rc == QT_OK)
        rc = qt_parallel(tiles * (tiles + 1) / 2, gram_tile, &job, err);
    return rc;
}
