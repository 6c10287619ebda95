/* FP32 products and Gram matrices of the CUDA backend (see product.h). */
#include "kernels/gpu/product.h"

enum {
    PANEL = 2048, /* rows of a Gram matrix per product */
    /* Tokens added in FP32 before the sums are added in FP64: as on the CPU; with FP16 factors
     * more, as their rounding errors are larger than those of the sums. */
    TOKENS = 1024,
    TOKENS_HALF = 8192,
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
    g->gpu->free(g->gpu, g->pointers.p);
    g->gpu->free(g->gpu, g->factors.p);
    g->gpu->free(g->gpu, g->scores.p);
    g->gpu->free(g->gpu, g->rows.p);
    g->gpu->free(g->gpu, g->known.p);
    gpu_products_release(g);
    for (size_t i = 0; i < GPU_HALVES; i++) {
        g->gpu->free(g->gpu, g->halves[i].z.p);
        g->halves[i] = (struct gpu_half){0};
    }
    g->left = g->right = g->panel = g->pointers = g->factors = g->scores = g->rows = g->known =
        (struct gpu_scratch){0};
    gpu_products_forget(g);
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

/* Enqueues p with the factors a and b, that is z_a and z_b, parts of them. */
static int multiply_half(struct gpu_products *g, const struct gpu_product *p,
                         const struct gpu_half *a, const void *z_a, const struct gpu_half *b,
                         const void *z_b, struct qt_err *err)
{
    float *factors;
    int rc;
    QT_TRY(gpu_scratch_need(&g->factors, g->gpu, 2, sizeof *factors, err));
    factors = g->factors.p;
    QT_TRY(gpu_check_launch(gpu_math_half_factors(factors, gpu_half_largest(a), gpu_half_largest(b),
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
    QT_TRY(gpu_half_of(&a, g, p->a, p->a_transposed ? p->k : p->m, q.lda, p->lda, false, err));
    QT_TRY(gpu_half_of(&b, g, p->b, p->b_transposed ? p->n : p->k, q.ldb, p->ldb, p->keeps_b, err));
    QT_TRY(multiply_half(g, &q, a, gpu_half_values(a), b, gpu_half_values(b), err));
done:
    return rc;
}

int gpu_product(struct gpu_products *g, const struct gpu_product *p, struct qt_err *err)
{
    struct gpu_product q = *p;
    if (p->follows)
        gpu_products_changed(g, p->c,
                             ((size_t)(p->m - 1) * (size_t)p->ldc + (size_t)p->n) * sizeof *p->c);
    else if (!p->as) /* what a batch changes, the caller knows */
        gpu_products_forget(g);
    if (!p->as && is_large(g, p->m, p->n, p->k))
        return g->half ? product_half(g, p, err) : product_3xtf32(g, p, err);
    q.tf32 |= g->half && p->as && has_fast_tf32(g->gpu);
    return gpu_check_cublas(gpu_cublas_product(gpu_cublas_of(g->gpu), &q), err);
}

/* ---- Gram matrices -------------------------------------------------------------------------- */

/* Adds the Gram matrix of rows [t, t + m) of x[][k] to h in panels: rows [i0, i0 + rows) of h up to
 * the diagonal. z: x in FP16; NULL: not. */
static int add_gram(struct gpu_products *g, double *h, const float *x, const struct gpu_half *z,
                    size_t t, int m, int k, struct qt_err *err)
{
    const float *at = x + t * (size_t)k;
    const struct rows f = {at, true, k};
    const bool large = is_large(g, k, k, m);
    const uint16_t *half = z ? (const uint16_t *)gpu_half_values(z) + t * (size_t)k : NULL;
    int rc = QT_OK;
    if (large && !z) {
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
                                      .a = at + i0,
                                      .b = at,
                                      .c = g->panel.p,
                                      .a_transposed = true,
                                      .lda = k,
                                      .ldb = k,
                                      .ldc = cols,
                                      .count = 1};
        QT_TRY(z       ? multiply_half(g, &p, z, half + i0, z, half, err)
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
    struct gpu_half *z = NULL;
    int rc = QT_OK;
    if (m && g->half && is_large(g, (int)k, (int)k, (int)m))
        QT_TRY(gpu_half_of(&z, g, x, (int)m, (int)k, (int)k, false, err));
    for (size_t t = 0; t < m; t += tokens)
        QT_TRY(add_gram(g, h, x, z, t, (int)qt_min_size(tokens, m - t), (int)k, err));
done:
    return rc;
}

/* Gram matrices of channel blocks. A batch has one product per block and piece of rows: products of
 * few columns are small, so that those of a few blocks would leave the GPU idle. */
enum { SIDE = QT_ACT_BLOCK, CELLS = SIDE * SIDE, BATCH = 128 };

/* *at: device memory, the places in w of the parts [pieces][blocks], and those of their products in
 * `sums`. */
static int upload_parts(float ***at, struct gpu_products *g, const float *w, float *sums,
                        size_t pieces, size_t rows, size_t blocks, size_t k, struct qt_err *err)
{
    const size_t parts = pieces * blocks;
    const float **of = NULL;
    int rc;
    QT_TRY(qt_array_new(&of, 2 * parts, sizeof *of, err));
    for (size_t i = 0; i < parts; i++) {
        of[i] = w + i / blocks * rows * k + i % blocks * SIDE;
        of[parts + i] = sums + i * CELLS;
    }
    QT_TRY(gpu_scratch_need(&g->pointers, g->gpu, 2 * parts, sizeof *of, err));
    QT_TRY(g->gpu->upload(g->gpu, g->pointers.p, of, 2 * parts * sizeof *of, err));
    *at = g->pointers.p;
done:
    qt_free(of);
    return rc;
}

/* g[blocks][SIDE][SIDE] += the Gram matrices of whole channel blocks of w[pieces * rows][k]. */
static int add_block_grams(struct gpu_products *p, float *g, const float *w, size_t pieces,
                           size_t rows, size_t blocks, size_t k, struct qt_err *err)
{
    const size_t parts = pieces * blocks;
    float **at, *sums;
    int rc;
    QT_TRY(gpu_scratch_need(&p->panel, p->gpu, parts * CELLS, sizeof *sums, err));
    sums = p->panel.p;
    QT_TRY(upload_parts(&at, p, w, sums, pieces, rows, blocks, k, err));
    QT_TRY(gpu_product(p,
                       &(struct gpu_product){.m = SIDE,
                                             .n = SIDE,
                                             .k = (int)rows,
                                             .alpha = 1,
                                             .a_transposed = true,
                                             .lda = (int)k,
                                             .ldb = (int)k,
                                             .ldc = SIDE,
                                             .as = at,
                                             .bs = at,
                                             .cs = at + parts,
                                             .count = (int)parts},
                       err));
    for (size_t i = 0; i < pieces; i++)
        QT_TRY(gpu_check_launch(
            gpu_math_add(g, sums + i * blocks * CELLS, blocks * CELLS, gpu_stream_of(p->gpu)),
            "sum", err));
done:
    return rc;
}

int gpu_block_grams(struct gpu_products *p, float *g, const float *w, size_t n, size_t k,
                    struct qt_err *err)
{
    const size_t blocks = k / SIDE, last = k % SIDE;
    const size_t pieces = blocks ? qt_max_size(BATCH / blocks, 1) : 1, rows = n / pieces;
    const float *rest = w + pieces * rows * k;
    int rc = QT_OK;
    if (blocks && rows)
        QT_TRY(add_block_grams(p, g, w, pieces, rows, blocks, k, err));
    if (blocks && n > pieces * rows)
        QT_TRY(add_block_grams(p, g, rest, 1, n - pieces * rows, blocks, k, err));
    if (last)
        QT_TRY(gpu_product(p,
                           &(struct gpu_product){.m = (int)last,
                                                 .n = (int)last,
                                                 .k = (int)n,
                                                 .alpha = 1,
                                                 .beta = 1,
                                                 .a = w + blocks * SIDE,
                                                 .b = w + blocks * SIDE,
                                                 .c = g + blocks * CELLS,
                                                 .a_transposed = true,
                                                 .lda = (int)k,
                                                 .ldb = (int)k,
                                                 .ldc = SIDE,
                                                 .count = 1},
                           err));
done:
    return rc;
}
