/* FP32 products and Gram matrices of the CUDA backend (see product.h). */
#include "kernels/gpu/product.h"

enum {
    PANEL = 2048, /* rows of a Gram matrix per product */
    /* Tokens added in FP32 before the sums are added in FP64: as on the CPU; with FP16 factors more,
     * as their rounding errors are larger than those of the sums. */
    TOKENS = 1024,
    TOKENS_HALF = 4096,
    /* 3xTF32 pays from this number of rows and columns, and from this depth on. */
    MIN_SIDE = 256,
    MIN_DEPTH = 128,
    SPLIT_CELLS = 1 << 26,
};

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
    g->gpu->free(g->gpu, g->panel.p);
    g->gpu->free(g->gpu, g->factors.p);
    g->gpu->free(g->gpu, g->scores.p);
    g->gpu->free(g->gpu, g->rows.p);
    for (size_t i = 0; i < GPU_HALVES; i++) {
        g->gpu->free(g->gpu, g->halves[i].z.p);
        g->halves[i] = (struct gpu_half){0};
    }
    g->left = g->right = g->panel = g->factors = g->scores = g->rows = (struct gpu_scratch){0};
}

/* ---- 3xTF32 --------------------------------------------------------------------------------- */

/* True for data center GPUs. The tensor cores of other GPUs (and of reduced ones: H20) multiply
 * TF32 at once or twice the FP32 rate. */
static bool has_fast_tf32(const struct qt_gpu *gpu)
{
    return gpu->cc == 80 || gpu->cc / 10 == 9 || gpu->cc / 10 == 10;
}

static bool is_large(const struct gpu_products *g, int m, int n, int k)
{
    return has_fast_tf32(g->gpu) && m >= MIN_SIDE && n >= MIN_SIDE && k >= MIN_DEPTH;
}

/* A factor by its rows (along m or n). Rows are ld floats apart, or adjacent columns if
 * transposed. */
struct rows {
    const float *x;
    bool transposed;
    int ld;
};

/* Splits `rows` rows of a factor from `row` on into TF32 parts. */
static int split(struct gpu_products *g, struct gpu_scratch *to, const struct rows *f, int row,
                 int rows, int k, struct qt_err *err)
{
    const float *x = f->x + (size_t)row * (f->transposed ? 1 : (size_t)f->ld);
    const size_t width = gpu_math_tf32_width((size_t)k);
    int rc = gpu_scratch_need(to, g->gpu, (size_t)rows, width * sizeof *x, err);
    if (rc < 0)
        return rc;
    return gpu_check_launch(gpu_math_split_tf32(to->p, x, (size_t)rows, (size_t)k, (size_t)f->ld,
                                                f->transposed, to == &g->right,
                                                gpu_stream_of(g->gpu)),
                            "TF32 split", err);
}

/* Computes p from the TF32 parts of its factors; those of a start at `row` of g->left. Tensor cores
 * truncate their sums instead of rounding, so a sum over all of k would be too small by 2^-24 per
 * few terms, 3e-5 for 14336. Therefore the accumulation in tensor cores restarts every
 * GPU_TF32_DEPTH terms. */
static int multiply_split(struct gpu_products *g, const struct gpu_product *p, int row,
                          struct qt_err *err)
{
    const size_t width = gpu_math_tf32_width((size_t)p->k);
    int rc = QT_OK;
    for (size_t at = 0; at < width; at += 3 * GPU_TF32_DEPTH) {
        struct gpu_product q = *p;
        q.a = (float *)g->left.p + (size_t)row * width + at;
        q.b = (float *)g->right.p + at;
        q.a_transposed = false;
        q.b_transposed = true;
        q.lda = q.ldb = (int)width;
        q.k = (int)qt_min_size(3 * GPU_TF32_DEPTH, width - at);
        q.beta = at ? 1 : p->beta;
        q.tf32 = true;
        QT_TRY(gpu_check_cublas(gpu_cublas_product(gpu_cublas_of(g->gpu), &q), err));
    }
done:
    return rc;
}

static int product_3xtf32(struct gpu_products *g, const struct gpu_product *p, struct qt_err *err)
{
    const struct rows a = {p->a, p->a_transposed, p->lda}, b = {p->b, !p->b_transposed, p->ldb};
    const int fit = (g->split_cells ? g->split_cells : SPLIT_CELLS) / p->k;
    const int rows = fit > MIN_SIDE ? fit : MIN_SIDE;
    struct gpu_product q = *p;
    int rc = QT_OK;
    for (int i = 0; i < p->m; i += rows) {
        q.m = p->m - i < rows ? p->m - i : rows;
        QT_TRY(split(g, &g->left, &a, i, q.m, p->k, err));
        for (int j = 0; j < p->n; j += rows) {
            q.n = p->n - j < rows ? p->n - j : rows;
            q.c = p->c + (size_t)i * (size_t)p->ldc + j;
            if (i == 0 || p->n > rows) /* otherwise b is still split from the first i */
                QT_TRY(split(g, &g->right, &b, j, q.n, p->k, err));
            QT_TRY(multiply_split(g, &q, 0, err));
        }
    }
done:
    return rc;
}

/* ---- FP16 ----------------------------------------------------------------------------------- */

void gpu_products_forget(struct gpu_products *g)
{
    for (size_t i = 0; i < GPU_HALVES; i++)
        g->halves[i].x = NULL;
}

/* Forgets factors that overlap with c, the result of p. */
static void forget_result(struct gpu_products *g, const struct gpu_product *p)
{
    const uintptr_t c = (uintptr_t)p->c;
    const uintptr_t end = (uintptr_t)(p->c + (size_t)(p->m - 1) * (size_t)p->ldc + p->n);
    for (size_t i = 0; i < GPU_HALVES; i++) {
        const struct gpu_half *h = &g->halves[i];
        const float *last = h->x ? h->x + (size_t)(h->rows - 1) * (size_t)h->ld + h->k : NULL;
        if ((uintptr_t)h->x < end && c < (uintptr_t)last)
            g->halves[i].x = NULL;
    }
}

static uint32_t *largest_of(struct gpu_products *g, const struct gpu_half *h)
{
    return (uint32_t *)g->factors.p + 2 + (h - g->halves);
}

/* *out: rows [0, rows) of a factor as it is stored, in FP16. Takes the place of the factor that has not
 * been used for longest. */
static int to_half(struct gpu_half **out, struct gpu_products *g, const float *x, int rows, int k,
                   int ld, struct qt_err *err)
{
    struct gpu_half *h = g->halves;
    int rc;
    QT_TRY(gpu_scratch_need(&g->factors, g->gpu, 2 + GPU_HALVES, sizeof(uint32_t), err));
    for (size_t i = 0; i < GPU_HALVES; i++) {
        *out = &g->halves[i];
        if ((*out)->x == x && (*out)->rows == rows && (*out)->k == k && (*out)->ld == ld) {
            (*out)->used = ++g->uses;
            return QT_OK;
        }
        h = (*out)->used < h->used ? *out : h;
    }
    *out = h;
    h->x = NULL;
    QT_TRY(gpu_scratch_need(&h->z, g->gpu, (size_t)rows, (size_t)k * sizeof(uint16_t), err));
    QT_TRY(gpu_check_launch(gpu_math_to_half(h->z.p, largest_of(g, h), x, (size_t)rows, (size_t)k,
                                             (size_t)ld, gpu_stream_of(g->gpu)),
                            "FP16 factors", err));
    h->x = x;
    h->rows = rows;
    h->k = k;
    h->ld = ld;
    h->used = ++g->uses;
done:
    return rc;
}

/* Enqueues p with the factors a and b, that is z_a and z_b, parts of them. */
static int multiply_half(struct gpu_products *g, const struct gpu_product *p,
                         const struct gpu_half *a, const void *z_a, const struct gpu_half *b,
                         const void *z_b, struct qt_err *err)
{
    float *factors = g->factors.p;
    int rc;
    QT_TRY(gpu_check_launch(gpu_math_half_factors(factors, largest_of(g, a), largest_of(g, b),
                                                  p->alpha, p->beta, gpu_stream_of(g->gpu)),
                            "FP16 factors", err));
    QT_TRY(gpu_check_cublas(gpu_cublas_product_half(gpu_cublas_of(g->gpu), p, z_a, z_b, factors),
                            err));
done:
    return rc;
}

static int product_half(struct gpu_products *g, const struct gpu_product *p, struct qt_err *err)
{
    struct gpu_product q = *p;
    struct gpu_half *a, *b;
    int rc;
    q.lda = p->a_transposed ? p->m : p->k;
    q.ldb = p->b_transposed ? p->k : p->n;
    QT_TRY(to_half(&a, g, p->a, p->a_transposed ? p->k : p->m, q.lda, p->lda, err));
    QT_TRY(to_half(&b, g, p->b, p->b_transposed ? p->n : p->k, q.ldb, p->ldb, err));
    QT_TRY(multiply_half(g, &q, a, a->z.p, b, b->z.p, err));
done:
    return rc;
}

int gpu_product(struct gpu_products *g, const struct gpu_product *p, struct qt_err *err)
{
    struct gpu_product q = *p;
    if (p->follows)
        forget_result(g, p);
    else
        gpu_products_forget(g);
    if (!p->as && is_large(g, p->m, p->n, p->k))
        return g->half ? product_half(g, p, err) : product_3xtf32(g, p, err);
    q.tf32 |= g->half && p->as && has_fast_tf32(g->gpu);
    return gpu_check_cublas(gpu_cublas_product(gpu_cublas_of(g->gpu), &q), err);
}

/* ---- Gram matrices -------------------------------------------------------------------------- */

/* Adds the Gram matrix of x[m][k] to h in panels: rows [i0, i0 + rows) of h up to the
 * diagonal. */
static int add_gram(struct gpu_products *g, double *h, const float *x, int m, int k,
                    struct qt_err *err)
{
    const struct rows f = {x, true, k};
    const bool large = is_large(g, k, k, m), half = large && g->half;
    struct gpu_half *z = NULL;
    int rc = QT_OK;
    gpu_products_forget(g);
    if (half)
        QT_TRY(to_half(&z, g, x, m, k, k, err));
    if (large && !half) {
        QT_TRY(split(g, &g->left, &f, 0, k, m, err));
        QT_TRY(split(g, &g->right, &f, 0, k, m, err));
    }
    for (int i0 = 0; i0 < k; i0 += PANEL) {
        const int rows = k - i0 < PANEL ? k - i0 : PANEL, cols = i0 + rows;
        QT_TRY(gpu_scratch_need(&g->panel, g->gpu, (size_t)rows * (size_t)cols, sizeof *x, err));
        const struct gpu_product p = {.m = rows,
                                      .n = cols,
                                      .k = m,
                                      .alpha = 1,
                                      .a = x + i0,
                                      .b = x,
                                      .c = g->panel.p,
                                      .a_transposed = true,
                                      .lda = k,
                                      .ldb = k,
                                      .ldc = cols,
                                      .count = 1};
        QT_TRY(half    ? multiply_half(g, &p, z, (uint16_t *)z->z.p + i0, z, z->z.p, err)
               : large ? multiply_split(g, &p, i0, err)
                       : gpu_check_cublas(gpu_cublas_product(gpu_cublas_of(g->gpu), &p), err));
        QT_TRY(gpu_check_launch(gpu_math_add_lower(h, p.c, (size_t)i0, (size_t)rows, (size_t)cols,
                                                   (size_t)k, gpu_stream_of(g->gpu)),
                                "Gram matrix", err));
    }
done:
    return rc;
}

int gpu_gram(struct gpu_products *g, double *h, const float *x, size_t m, size_t k,
             struct qt_err *err)
{
    const size_t tokens = g->half ? TOKENS_HALF : TOKENS;
    int rc = QT_OK;
    for (size_t t = 0; t < m; t += tokens)
        QT_TRY(add_gram(g, h, x + t * k, (int)qt_min_size(tokens, m - t), (int)k, err));
done:
    return rc;
}
