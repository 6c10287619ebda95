#include "kernels/gpu/product.h"

enum {
    PANEL = 2048,  /* rows of a Gram matrix */
    TOKENS = 1024, /* added up in FP32 before they are in FP64, as on the CPU */
    /* Parts are worth making from so many rows and columns and such a depth on. */
    LARGE = 256,
    DEEP = 128,
    PART_CELLS = 1 << 26,
};

int gpu_launched(int status, const char *what, struct qt_err *err)
{
    enum { MEMORY_ALLOCATION = 2 }; /* which the first launch of a kernel may want */
    return status == 0
               ? QT_OK
               : qt_fail(err, status == MEMORY_ALLOCATION ? QT_E_RESOURCE : QT_E_INTERNAL, NULL,
                         NULL, "GPU: %s, or what was before it: CUDA error %d", what, status);
}

int gpu_multiplied(int status, struct qt_err *err)
{
    enum { ALLOC_FAILED = 3 };
    return status == 0 ? QT_OK
                       : qt_fail(err, status == ALLOC_FAILED ? QT_E_RESOURCE : QT_E_INTERNAL, NULL,
                                 NULL, "GPU: cuBLAS: status %d", status);
}

int gpu_scratch_need(struct gpu_scratch *s, struct qt_gpu *gpu, size_t count, size_t size,
                     struct qt_err *err)
{
    size_t bytes;
    if (qt_mul_overflow(&bytes, count, size))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    if (bytes <= s->bytes)
        return QT_OK;
    gpu->free(gpu, s->p);
    s->bytes = 0;
    int rc = gpu->alloc(gpu, &s->p, bytes, err);
    s->bytes = rc < 0 ? 0 : bytes;
    return rc;
}

void gpu_products_free(struct gpu_products *g)
{
    g->gpu->free(g->gpu, g->left.p);
    g->gpu->free(g->gpu, g->right.p);
    g->gpu->free(g->gpu, g->made.p);
    g->left = g->right = g->made = (struct gpu_scratch){0};
}

/* ---- 3xTF32 --------------------------------------------------------------------------------- */

/* GPUs for data centers. Of others (and of cut-down ones of these, H20) the tensor cores take TF32
 * at one or two times the rate of FP32. */
static bool has_fast_tf32(const struct qt_gpu *gpu)
{
    return gpu->cc == 80 || gpu->cc / 10 == 9 || gpu->cc / 10 == 10;
}

static bool is_large(const struct gpu_products *g, int m, int n, int k)
{
    return has_fast_tf32(g->gpu) && m >= LARGE && n >= LARGE && k >= DEEP;
}

/* Rows along m or n of a factor: in x apart by ld, or, transposed, next to each other. */
struct rows {
    const float *x;
    bool transposed;
    int ld;
};

/* Parts of rows of a factor. */
static int split(struct gpu_products *g, struct gpu_scratch *to, const struct rows *f, int row,
                 int rows, int k, struct qt_err *err)
{
    const float *x = f->x + (size_t)row * (f->transposed ? 1 : (size_t)f->ld);
    const size_t width = gpu_math_parts_width((size_t)k);
    int rc = gpu_scratch_need(to, g->gpu, (size_t)rows, width * sizeof *x, err);
    if (rc < 0)
        return rc;
    return gpu_launched(gpu_math_parts(to->p, x, (size_t)rows, (size_t)k, (size_t)f->ld,
                                       f->transposed, to == &g->right, gpu_stream_of(g->gpu)),
                        "parts", err);
}

/* p, but for where its factors lie: in parts, a's from `row` of left on. Sums of tensor cores are
 * not rounded but cut off, for which sums of all k would be small by 2^-24 for every few terms:
 * 3e-5 for 14336. So they begin anew every GPU_PARTS_DEPTH terms. */
static int multiply_parts(struct gpu_products *g, const struct gpu_product *p, int row,
                          struct qt_err *err)
{
    const size_t width = gpu_math_parts_width((size_t)p->k);
    int rc = QT_OK;
    for (size_t at = 0; at < width; at += 3 * GPU_PARTS_DEPTH) {
        struct gpu_product q = *p;
        q.a = (float *)g->left.p + (size_t)row * width + at;
        q.b = (float *)g->right.p + at;
        q.a_transposed = false;
        q.b_transposed = true;
        q.lda = q.ldb = (int)width;
        q.k = (int)qt_min_size(3 * GPU_PARTS_DEPTH, width - at);
        q.beta = at ? 1 : p->beta;
        q.tf32 = true;
        QT_TRY(gpu_multiplied(gpu_cublas_product(gpu_cublas_of(g->gpu), &q), err));
    }
done:
    return rc;
}

static int product_of_parts(struct gpu_products *g, const struct gpu_product *p, struct qt_err *err)
{
    const struct rows a = {p->a, p->a_transposed, p->lda}, b = {p->b, !p->b_transposed, p->ldb};
    const int fit = (g->part_cells ? g->part_cells : PART_CELLS) / p->k;
    const int most = fit > LARGE ? fit : LARGE;
    struct gpu_product q = *p;
    int rc = QT_OK;
    for (int i = 0; i < p->m; i += most) {
        q.m = p->m - i < most ? p->m - i : most;
        QT_TRY(split(g, &g->left, &a, i, q.m, p->k, err));
        for (int j = 0; j < p->n; j += most) {
            q.n = p->n - j < most ? p->n - j : most;
            q.c = p->c + (size_t)i * (size_t)p->ldc + j;
            if (i == 0 || p->n > most) /* else they are there */
                QT_TRY(split(g, &g->right, &b, j, q.n, p->k, err));
            QT_TRY(multiply_parts(g, &q, 0, err));
        }
    }
done:
    return rc;
}

int gpu_product(struct gpu_products *g, const struct gpu_product *p, struct qt_err *err)
{
    if (p->count == 1 && is_large(g, p->m, p->n, p->k))
        return product_of_parts(g, p, err);
    return gpu_multiplied(gpu_cublas_product(gpu_cublas_of(g->gpu), p), err);
}

/* ---- Gram matrices -------------------------------------------------------------------------- */

/* Of a few tokens x[m][k]; a panel is rows [i0, i0 + rows) of h up to its diagonal. */
static int add_gram(struct gpu_products *g, double *h, const float *x, int m, int k,
                    struct qt_err *err)
{
    const struct rows f = {x, true, k};
    const bool large = is_large(g, k, k, m);
    int rc = QT_OK;
    if (large) {
        QT_TRY(split(g, &g->left, &f, 0, k, m, err));
        QT_TRY(split(g, &g->right, &f, 0, k, m, err));
    }
    for (int i0 = 0; i0 < k; i0 += PANEL) {
        const int rows = k - i0 < PANEL ? k - i0 : PANEL, cols = i0 + rows;
        QT_TRY(gpu_scratch_need(&g->made, g->gpu, (size_t)rows * (size_t)cols, sizeof *x, err));
        const struct gpu_product p = {.m = rows,
                                      .n = cols,
                                      .k = m,
                                      .alpha = 1,
                                      .a = x + i0,
                                      .b = x,
                                      .c = g->made.p,
                                      .a_transposed = true,
                                      .lda = k,
                                      .ldb = k,
                                      .ldc = cols,
                                      .count = 1};
        QT_TRY(large ? multiply_parts(g, &p, i0, err)
                     : gpu_multiplied(gpu_cublas_product(gpu_cublas_of(g->gpu), &p), err));
        QT_TRY(gpu_launched(gpu_math_add_lower(h, p.c, (size_t)i0, (size_t)rows, (size_t)cols,
                                               (size_t)k, gpu_stream_of(g->gpu)),
                            "Gram matrix", err));
    }
done:
    return rc;
}

int gpu_gram(struct gpu_products *g, double *h, const float *x, size_t m, size_t k,
             struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t t = 0; t < m; t += TOKENS)
        QT_TRY(add_gram(g, h, x + t * k, (int)qt_min_size(TOKENS, m - t), (int)k, err));
done:
    return rc;
}
