/* Hessians on the GPU: factorization and regression (base/backend.h). */
#include "kernels/gpu/product.h"

enum {
    TILE = 128,  /* columns that a kernel factors at a time */
    WIDE = 1024, /* columns that contribute to the others at a time: many tiles are few products */
    BLOCK = 256, /* columns that cuBLAS solves at a time; products do the rest */
};

static int launched(int status, struct qt_err *err)
{
    return gpu_check_launch(status, "factorization", err);
}

/* *out: order[k] in device memory. */
static int upload_order(uint32_t **out, struct qt_gpu *gpu, const size_t *order, size_t k,
                        struct qt_err *err)
{
    uint32_t *narrow = NULL;
    void *p = NULL;
    int rc;
    QT_TRY(qt_array_new(&narrow, k, sizeof *narrow, err));
    for (size_t i = 0; i < k; i++)
        narrow[i] = (uint32_t)order[i];
    QT_TRY(gpu->alloc(gpu, &p, k * sizeof *narrow, err));
    *out = p;
    QT_TRY(gpu->upload(gpu, p, narrow, k * sizeof *narrow, err));
done:
    qt_free(narrow);
    return rc;
}

/* Replaces the lower triangle of a[k][k] by its Cholesky factor. failed: device memory. */
static int cholesky(bool *positive, struct gpu_products *g, double *a, int *failed, size_t k,
                    struct qt_err *err)
{
    struct qt_gpu *gpu = g->gpu;
    struct gpu_cublas *cublas = gpu_cublas_of(gpu);
    int any, rc;
    QT_TRY(gpu->fill(gpu, failed, 0, sizeof *failed, err));
    for (size_t p = 0; p < k; p += TILE) {
        const size_t n = qt_min_size(TILE, k - p), next = p + n;
        const size_t wide = p / WIDE * WIDE, end = qt_min_size(wide + WIDE, k);
        QT_TRY(launched(
            gpu_math_cholesky_tile(a + p * k + p, (int)n, k, failed, gpu_stream_of(gpu)), err));
        if (next < k)
            QT_TRY(gpu_check_cublas(gpu_cublas_cholesky_solve(cublas, a, (int)k, (int)p, (int)n),
                                    err));
        if (next < end)
            QT_TRY(gpu_check_cublas(
                gpu_cublas_cholesky_update(cublas, a, (int)k, (int)p, (int)n, (int)next, (int)end),
                err));
        else if (next < k)
            QT_TRY(gpu_check_cublas(gpu_cublas_cholesky_update(cublas, a, (int)k, (int)wide,
                                                               (int)(end - wide), (int)end, (int)k),
                                    err));
    }
    QT_TRY(gpu->download(gpu, &any, failed, sizeof any, err));
    *positive = !any;
done:
    return rc;
}

/* The source of h: gram, scaled and damped, or h in another order. */
struct source {
    const double *gram;
    double scale, damp;
    const float *from;
};

static int factor(struct gpu_products *g, float *h, float *v, bool *positive,
                  const struct source *source, const size_t *order, size_t k, struct qt_err *err)
{
    struct qt_gpu *gpu = g->gpu;
    void *stream = gpu_stream_of(gpu), *a = NULL, *failed = NULL;
    uint32_t *at = NULL;
    size_t bytes;
    int rc;
    *positive = false;
    if (qt_mul_overflow(&bytes, k, k * sizeof(double)))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    QT_TRY(upload_order(&at, gpu, order, k, err));
    QT_TRY(gpu->alloc(gpu, &a, bytes, err));
    QT_TRY(gpu->alloc(gpu, &failed, sizeof(int), err));
    QT_TRY(launched(source->gram ? gpu_math_order_gram(h, a, source->gram, at, source->scale,
                                                       source->damp, k, stream)
                                 : gpu_math_order_again(h, a, source->from, at, k, stream),
                    err));
    QT_TRY(cholesky(positive, g, a, failed, k, err));
    if (*positive)
        QT_TRY(launched(gpu_math_reverse(v, a, k, stream), err));
done:
    gpu->free(gpu, at);
    gpu->free(gpu, a);
    gpu->free(gpu, failed);
    return rc;
}

int gpu_factor(struct gpu_products *g, float *h, float *v, bool *positive, const double *gram,
               const size_t *order, double scale, double damp, size_t k, struct qt_err *err)
{
    const struct source source = {.gram = gram, .scale = scale, .damp = damp};
    return factor(g, h, v, positive, &source, order, k, err);
}

int gpu_factor_again(struct gpu_products *g, float *h, float *v, bool *positive, const float *from,
                     const size_t *order, size_t k, struct qt_err *err)
{
    return factor(g, h, v, positive, &(struct source){.from = from}, order, k, err);
}

/* Replaces x[m][k] by x V^-1, or by x V^-T if `transposed`: y V = x gives the columns of y from
 * left to right, y V^T = x from right to left. */
static int solve_upper(struct gpu_products *g, float *x, const float *v, bool transposed, size_t m,
                       size_t k, struct qt_err *err)
{
    const size_t blocks = qt_ceil_div(k, BLOCK);
    int rc = QT_OK;
    for (size_t i = 0; i < blocks; i++) {
        const size_t p = (transposed ? blocks - 1 - i : i) * BLOCK, n = qt_min_size(BLOCK, k - p);
        const size_t first = transposed ? 0 : p + n, rest = transposed ? p : k - p - n;
        const struct gpu_product update = {.m = (int)m,
                                           .n = (int)rest,
                                           .k = (int)n,
                                           .alpha = -1,
                                           .beta = 1,
                                           .a = x + p,
                                           .b = transposed ? v + p : v + p * k + first,
                                           .c = x + first,
                                           .b_transposed = transposed,
                                           .lda = (int)k,
                                           .ldb = (int)k,
                                           .ldc = (int)k,
                                           .count = 1};
        QT_TRY(gpu_check_cublas(gpu_cublas_solve_upper(gpu_cublas_of(g->gpu), x + p, v + p * k + p,
                                                       transposed, (int)m, (int)n, (int)k),
                                err));
        if (rest)
            QT_TRY(gpu_product(g, &update, err));
    }
done:
    return rc;
}

int gpu_regress(struct gpu_products *g, float *s, double *explained, const float *c, const float *v,
                const size_t *order, double scale, size_t m, size_t k, struct qt_err *err)
{
    struct qt_gpu *gpu = g->gpu;
    void *stream = gpu_stream_of(gpu), *x = NULL, *dots = NULL;
    uint32_t *at = NULL;
    double *sums = NULL;
    int rc;
    *explained = 0;
    QT_TRY(upload_order(&at, gpu, order, k, err));
    QT_TRY(gpu->alloc(gpu, &x, m * k * sizeof(float), err));
    QT_TRY(gpu->alloc(gpu, &dots, m * sizeof *sums, err));
    QT_TRY(qt_array_new(&sums, m, sizeof *sums, err));
    QT_TRY(launched(gpu_math_order_columns(x, c, at, (float)scale, m, k, stream), err));
    QT_TRY(solve_upper(g, x, v, true, m, k, err));
    QT_TRY(solve_upper(g, x, v, false, m, k, err));
    QT_TRY(launched(gpu_math_restore_columns(s, x, at, m, k, stream), err));
    QT_TRY(launched(gpu_math_row_dots(dots, c, s, m, k, stream), err));
    QT_TRY(gpu->download(gpu, sums, dots, m * sizeof *sums, err));
    for (size_t i = 0; i < m; i++)
        *explained += sums[i];
done:
    gpu->free(gpu, at);
    gpu->free(gpu, x);
    gpu->free(gpu, dots);
    qt_free(sums);
    return rc;
}
