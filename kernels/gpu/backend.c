/*
 * The CUDA backend. Matrix products use cuBLAS (product.c); attention, Hessians, rounding and
 * gradients have files of their own (attention.c, factor.c, round.c, grad.c); everything else is in
 * the kernels of math.cu. Operations of few models are computed on the CPU (host_ops.c).
 */
#include "kernels/gpu/backend.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

/* Frees the FP16 factors of weights, which stay valid with `same_weights` only. */
static struct gpu_backend *entered(struct qt_backend *be)
{
    struct gpu_backend *g = be->ctx;
    if (!be->same_weights)
        gpu_products_release(&g->products);
    return g;
}

/* For functions that may change any backend memory. */
static struct gpu_backend *self(struct qt_backend *be)
{
    struct gpu_backend *g = entered(be);
    gpu_products_forget(&g->products);
    return g;
}

/* For functions that change these bytes only. */
static struct gpu_backend *writing(struct qt_backend *be, const void *p, size_t bytes)
{
    struct gpu_backend *g = entered(be);
    gpu_products_changed(&g->products, p, bytes);
    return g;
}

/* The same for a kernel that also finds the largest magnitude of x[count], in *largest: products
 * with x in FP16 need it. */
static int writing_largest(uint32_t **largest, struct qt_backend *be, const float *x, size_t count,
                           struct qt_err *err)
{
    struct gpu_backend *g = writing(be, x, count * sizeof *x);
    *largest = NULL;
    return be->half ? gpu_largest_new(largest, &g->products, x, count, err) : QT_OK;
}

static struct gpu_products *products_of(struct gpu_backend *g)
{
    g->products.half = g->be.half;
    return &g->products;
}

static struct gpu_products *products(struct qt_backend *be)
{
    return products_of(self(be));
}

/* ---- memory --------------------------------------------------------------------------------- */

static int cuda_zero(struct qt_backend *be, void *p, size_t bytes, struct qt_err *err)
{
    struct qt_gpu *gpu = writing(be, p, bytes)->gpu;
    return gpu->fill(gpu, p, 0, bytes, err);
}

static int cuda_alloc(struct qt_backend *be, void *out, size_t bytes, struct qt_err *err)
{
    struct qt_gpu *gpu = self(be)->gpu;
    void *p = NULL;
    int rc = gpu->alloc(gpu, &p, bytes, err);
    if (rc == QT_OK)
        rc = cuda_zero(be, p, bytes, err);
    if (rc < 0 && p) {
        gpu->free(gpu, p);
        p = NULL;
    }
    memcpy(out, &p, sizeof p);
    return rc;
}

static void cuda_free(struct qt_backend *be, void *p)
{
    struct qt_gpu *gpu = self(be)->gpu;
    if (p)
        gpu->free(gpu, p);
}

static size_t cuda_room(struct qt_backend *be)
{
    struct qt_gpu *gpu = self(be)->gpu;
    return gpu->room(gpu);
}

static int cuda_upload(struct qt_backend *be, void *dst, const void *src, size_t bytes,
                       struct qt_err *err)
{
    struct qt_gpu *gpu = writing(be, dst, bytes)->gpu;
    return bytes ? gpu->upload(gpu, dst, src, bytes, err) : QT_OK;
}

static int cuda_upload_narrow(struct qt_backend *be, float *dst, const void *x, bool bf16,
                              size_t count, struct qt_err *err)
{
    enum { BYTES = 2 };
    struct gpu_backend *g = self(be);
    int rc = QT_OK;
    QT_TRY(gpu_scratch_need(&g->scratch, g->gpu, count, BYTES, err));
    QT_TRY(cuda_upload(be, g->scratch.p, x, count * BYTES, err));
    if (count)
        QT_TRY(gpu_check_launch(gpu_math_widen(dst, g->scratch.p, bf16, count, g->stream),
                                "conversion to FP32", err));
done:
    return rc;
}

static int cuda_download(struct qt_backend *be, void *dst, const void *src, size_t bytes,
                         struct qt_err *err)
{
    struct qt_gpu *gpu = ((struct gpu_backend *)be->ctx)->gpu;
    return bytes ? gpu->download(gpu, dst, src, bytes, err) : QT_OK;
}

static void cuda_pin(struct qt_backend *be, void *p, size_t bytes)
{
    struct qt_gpu *gpu = self(be)->gpu;
    gpu->pin(gpu, p, bytes);
}

static void cuda_unpin(struct qt_backend *be, void *p)
{
    struct qt_gpu *gpu = self(be)->gpu;
    gpu->unpin(gpu, p);
}

static int cuda_copy(struct qt_backend *be, void *dst, const void *src, size_t bytes,
                     struct qt_err *err)
{
    struct qt_gpu *gpu = writing(be, dst, bytes)->gpu;
    return bytes && dst != src ? gpu->copy(gpu, dst, src, bytes, err) : QT_OK;
}

/* ---- products ------------------------------------------------------------------------------- */

static int check_size(size_t n, struct qt_err *err)
{
    return n <= INT_MAX ? QT_OK
                        : qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                                  "a matrix of %zu rows or columns is too large for cuBLAS", n);
}

static int check_sizes(size_t m, size_t n, size_t k, struct qt_err *err)
{
    int rc;
    QT_TRY(check_size(m, err));
    QT_TRY(check_size(n, err));
    QT_TRY(check_size(k, err));
done:
    return rc;
}

/* A factor of a product: a whole matrix, possibly transposed. */
struct factor {
    const float *x;
    bool transposed;
};

/* c[m][n] = a[m][k] b[k][n], added to c if `add`. keep: b is a weight. */
static int multiply(struct qt_backend *be, float *c, struct factor a, struct factor b, bool keep,
                    bool add, size_t m, size_t n, size_t k, struct qt_err *err)
{
    int rc = check_sizes(m, n, k, err);
    if (rc < 0 || m == 0 || n == 0 || (k == 0 && add))
        return rc;
    if (k == 0)
        return cuda_zero(be, c, m * n * sizeof *c, err);
    const struct gpu_product p = {.m = (int)m,
                                  .n = (int)n,
                                  .k = (int)k,
                                  .alpha = 1,
                                  .beta = add ? 1 : 0,
                                  .a = a.x,
                                  .b = b.x,
                                  .c = c,
                                  .a_transposed = a.transposed,
                                  .b_transposed = b.transposed,
                                  .lda = (int)(a.transposed ? m : k),
                                  .ldb = (int)(b.transposed ? k : n),
                                  .ldc = (int)n,
                                  .follows = true,
                                  .keeps_b = keep && be->same_weights,
                                  .count = 1};
    return gpu_product(products_of(entered(be)), &p, err);
}

static int cuda_linear(struct qt_backend *be, float *y, const float *x, const float *w,
                       const float *bias, size_t m, size_t n, size_t k, struct qt_err *err)
{
    void *stream = ((struct gpu_backend *)be->ctx)->stream; /* the bias changes y, as the product */
    int rc;
    QT_TRY(multiply(be, y, (struct factor){x, false}, (struct factor){w, true}, true, false, m, n,
                    k, err));
    if (bias && m && n)
        QT_TRY(gpu_check_launch(gpu_math_bias(y, bias, m, n, stream), "bias", err));
done:
    return rc;
}

/* dx[m][k] = dy[m][n] w[n][k], added to dx if `add`. */
static int cuda_linear_grad_x(struct qt_backend *be, float *dx, const float *dy, const float *w,
                              bool add, size_t m, size_t n, size_t k, struct qt_err *err)
{
    return multiply(be, dx, (struct factor){dy, false}, (struct factor){w, false}, true, add, m, k,
                    n, err);
}

/* dw[n][k] = dy[m][n]^T x[m][k], added to dw if `add`. */
static int cuda_linear_grad_w(struct qt_backend *be, float *dw, const float *dy, const float *x,
                              bool add, size_t m, size_t n, size_t k, struct qt_err *err)
{
    return multiply(be, dw, (struct factor){dy, true}, (struct factor){x, false}, false, add, n, k,
                    m, err);
}

/* ---- attention ------------------------------------------------------------------------------ */

static int cuda_attention(struct qt_backend *be, float *y, const float *q, const float *k,
                          const float *v, size_t m, const struct qt_attention *a,
                          struct qt_err *err)
{
    struct gpu_products *g = &((struct gpu_backend *)be->ctx)->products;
    int rc;
    g->half = be->half;
    if (gpu_attends_in_half(g, a)) {
        QT_TRY(check_sizes(m, a->heads * a->head_dim, 0, err));
        return gpu_attention_half(g, y, q, k, v, m, a, err);
    }
    if (a->bias || a->both_ways)
        return gpu_host_attention(be, y, q, k, v, m, a, err);
    QT_TRY(check_sizes(a->heads * a->head_dim, a->past + a->seqlen, a->heads, err));
    rc = gpu_attention(products(be), y, q, k, v, m, a, err);
done:
    return rc;
}

/* ---- rows and elements ---------------------------------------------------------------------- */

static const enum gpu_norm norms[] = {
    [QT_NORM_RMS] = GPU_NORM_RMS, [QT_NORM_LAYER] = GPU_NORM_LAYER};

static int cuda_norm(struct qt_backend *be, float *y, const float *x, const float *w,
                     const float *bias, enum qt_norm_kind kind, float eps, size_t m, size_t n,
                     struct qt_err *err)
{
    void *stream = ((struct gpu_backend *)be->ctx)->stream;
    uint32_t *largest;
    int rc = check_size(m, err);
    if (rc < 0 || m == 0 || n == 0)
        return rc;
    QT_TRY(writing_largest(&largest, be, y, m * n, err));
    QT_TRY(gpu_check_launch(gpu_math_norm(y, x, w, kind == QT_NORM_LAYER ? bias : NULL, norms[kind],
                                          eps, m, n, largest, stream),
                            "norm", err));
done:
    return rc;
}

static int cuda_rope(struct qt_backend *be, float *x, const float *cos, const float *sin, size_t m,
                     size_t seqlen, size_t heads, size_t dim, size_t rot, bool interleaved,
                     struct qt_err *err)
{
    if (m * heads * (rot / 2) == 0)
        return QT_OK;
    void *stream = writing(be, x, m * heads * dim * sizeof *x)->stream;
    return gpu_check_launch(
        gpu_math_rope(x, cos, sin, m, seqlen, heads, dim, rot / 2, interleaved, stream), "rope",
        err);
}

static const enum gpu_act activations[] = {
    [QT_ACT_SILU] = GPU_SILU,       [QT_ACT_GELU_TANH] = GPU_GELU_TANH, [QT_ACT_GELU] = GPU_GELU,
    [QT_ACT_RELU] = GPU_RELU,       [QT_ACT_RELU2] = GPU_RELU2,         [QT_ACT_NONE] = GPU_NONE,
    [QT_ACT_SIGMOID] = GPU_SIGMOID, [QT_ACT_CLAMPED] = GPU_CLAMPED};

static int cuda_activate(struct qt_backend *be, float *y, const float *gate, const float *up,
                         enum qt_act_kind kind, size_t count, struct qt_err *err)
{
    void *stream = ((struct gpu_backend *)be->ctx)->stream;
    uint32_t *largest;
    int rc = QT_OK;
    if (count == 0)
        return QT_OK;
    QT_TRY(writing_largest(&largest, be, y, count, err));
    QT_TRY(
        gpu_check_launch(gpu_math_activate(y, gate, up, activations[kind], count, largest, stream),
                         "activation", err));
done:
    return rc;
}

static int cuda_subtract(struct qt_backend *be, float *y, const float *x, size_t count,
                         struct qt_err *err)
{
    void *stream = ((struct gpu_backend *)be->ctx)->stream;
    uint32_t *largest;
    int rc = QT_OK;
    if (count == 0)
        return QT_OK;
    QT_TRY(writing_largest(&largest, be, y, count, err));
    QT_TRY(gpu_check_launch(gpu_math_subtract(y, x, count, largest, stream), "difference", err));
done:
    return rc;
}

static int cuda_add(struct qt_backend *be, float *y, const float *x, size_t count,
                    struct qt_err *err)
{
    void *stream = writing(be, y, count * sizeof *y)->stream;
    return count ? gpu_check_launch(gpu_math_add(y, x, count, stream), "sum", err) : QT_OK;
}

static int cuda_copy_columns(struct qt_backend *be, float *y, size_t ldy, const float *x,
                             size_t ldx, size_t n, size_t m, struct qt_err *err)
{
    return m && n ? gpu_check_launch(gpu_math_copy_columns(y, ldy, x, ldx, n, m, self(be)->stream),
                                     "copy", err)
                  : QT_OK;
}

/* Uploads rows[m] and factor[m], or NULL, from host memory to scratch memory. */
static int upload_rows(const uint32_t **at, const float **by, struct gpu_backend *g,
                       const uint32_t *rows, const float *factor, size_t m, struct qt_err *err)
{
    uint32_t *to;
    int rc;
    QT_TRY(gpu_scratch_need(&g->scratch, g->gpu, m, sizeof *rows + sizeof *factor, err));
    to = g->scratch.p;
    *at = rows ? to : NULL;
    *by = factor ? (const float *)(to + m) : NULL;
    if (rows)
        QT_TRY(cuda_upload(&g->be, to, rows, m * sizeof *rows, err));
    if (factor)
        QT_TRY(cuda_upload(&g->be, to + m, factor, m * sizeof *factor, err));
done:
    return rc;
}

static int cuda_gather_rows(struct qt_backend *be, float *y, const float *x, const uint32_t *rows,
                            const float *factor, size_t m, size_t n, struct qt_err *err)
{
    struct gpu_backend *g = be->ctx;
    uint32_t *largest;
    int rc = QT_OK;
    if (m == 0 || n == 0)
        return QT_OK;
    QT_TRY(writing_largest(&largest, be, y, m * n, err));
    QT_TRY(upload_rows(&rows, &factor, g, rows, factor, m, err));
    QT_TRY(gpu_check_launch(gpu_math_gather(y, x, rows, factor, m, n, largest, g->stream), "rows",
                            err));
done:
    return rc;
}

static int cuda_scatter_rows(struct qt_backend *be, float *y, const float *x, const uint32_t *rows,
                             const float *factor, size_t m, size_t n, struct qt_err *err)
{
    struct gpu_backend *g = self(be);
    int rc = QT_OK;
    if (m == 0 || n == 0)
        return QT_OK;
    QT_TRY(upload_rows(&rows, &factor, g, rows, factor, m, err));
    QT_TRY(gpu_check_launch(gpu_math_scatter(y, x, rows, factor, m, n, g->stream), "rows", err));
done:
    return rc;
}

static int cuda_add_f64(struct qt_backend *be, double *y, const double *x, size_t count,
                        struct qt_err *err)
{
    return count ? gpu_check_launch(gpu_math_add_f64(y, x, count, self(be)->stream), "sum", err)
                 : QT_OK;
}

static int cuda_scale(struct qt_backend *be, float *y, float factor, size_t count,
                      struct qt_err *err)
{
    void *stream = writing(be, y, count * sizeof *y)->stream;
    return count ? gpu_check_launch(gpu_math_scale(y, factor, count, stream), "scale", err) : QT_OK;
}

/* ---- quantized activations ------------------------------------------------------------------ */

static float by_7(float clip)
{
    return (float)((double)clip / 7);
}

/* *a: the arrays of `act` in device memory, in scratch memory, in front of which there are `before`
 * doubles. */
static int inputs_new(struct gpu_input *a, struct qt_backend *be, float *y, const float *x,
                      size_t m, const struct qt_act *act, size_t before, struct qt_err *err)
{
    struct gpu_backend *g = writing(be, y, y ? m * act->k * sizeof *y : 0);
    const size_t k = act->k, blocks = qt_ceil_div(k, QT_ACT_BLOCK);
    uint32_t *order;
    float *factor;
    uint8_t *bits;
    int rc;
    QT_TRY(gpu_scratch_need(&g->scratch, g->gpu, before + k,
                            qt_max_size(sizeof(double), sizeof *order + sizeof *factor + 1), err));
    order = (uint32_t *)((double *)g->scratch.p + before);
    factor = (float *)(order + k);
    bits = (uint8_t *)(factor + k);
    QT_TRY(cuda_upload(be, order, act->order, k * sizeof *order, err));
    QT_TRY(cuda_upload(be, factor, act->factor, k * sizeof *factor, err));
    if (act->bits)
        QT_TRY(cuda_upload(be, bits, act->bits, blocks, err));
    *a = (struct gpu_input){.y = y,
                            .x = x,
                            .order = order,
                            .factor = factor,
                            .bits = bits,
                            .m = m,
                            .k = k,
                            .scales = (int)act->scales,
                            .rotate = act->rotate,
                            .clip = act->clip,
                            .clip_by_7 = by_7(act->clip)};
done:
    return rc;
}

/* Calls `launch` with the arrays of `act` in device memory. */
static int launch_inputs(struct qt_backend *be, float *y, const float *x, size_t m,
                         const struct qt_act *act,
                         int (*launch)(const struct gpu_input *a, void *stream), struct qt_err *err)
{
    struct gpu_input a;
    int rc = QT_OK;
    if (m == 0 || act->k == 0)
        return QT_OK;
    QT_TRY(inputs_new(&a, be, y, x, m, act, 0, err));
    QT_TRY(writing_largest(&a.largest, be, y, m * act->k, err));
    QT_TRY(gpu_check_launch(launch(&a, ((struct gpu_backend *)be->ctx)->stream), "quantizer", err));
done:
    return rc;
}

static int cuda_round_inputs(struct qt_backend *be, float *y, const float *x, size_t m,
                             const struct qt_act *act, struct qt_err *err)
{
    return launch_inputs(be, y, x, m, act, gpu_round_inputs, err);
}

static int cuda_arrange_inputs(struct qt_backend *be, float *y, const float *x, size_t m,
                               const struct qt_act *act, struct qt_err *err)
{
    return launch_inputs(be, y, x, m, act, gpu_arrange_inputs, err);
}

static int cuda_block_grams(struct qt_backend *be, float *g, const float *w, size_t n, size_t k,
                            struct qt_err *err)
{
    int rc = check_sizes(n, k, 0, err);
    return rc < 0 || n == 0 ? rc : gpu_block_grams(products(be), g, w, n, k, err);
}

static int cuda_input_errors(struct qt_backend *be, double *d, double *squares, const float *x,
                             const float *g, size_t m, const struct qt_act *act,
                             const struct qt_act_rounding *how, size_t count, struct qt_err *err)
{
    const size_t tiles = qt_ceil_div(m, GPU_ERROR_TOKENS),
                 sums = count * qt_ceil_div(act->k, QT_ACT_BLOCK);
    struct gpu_input_errors a = {.g = g, .count = (int)count};
    double *part = NULL;
    int rc = QT_OK;
    memset(d, 0, sums * sizeof *d);
    memset(squares, 0, sums * sizeof *squares);
    if (m == 0 || sums == 0)
        return QT_OK;
    QT_TRY(qt_array_new(&part, 2 * sums, tiles * sizeof *part, err));
    QT_TRY(inputs_new(&a.in, be, NULL, x, m, act, 2 * sums * tiles, err));
    a.part = self(be)->scratch.p;
    for (size_t i = 0; i < count; i++) {
        a.how[i].narrow = how[i].bits == 4;
        a.how[i].clip = how[i].clip;
        a.how[i].clip_by_7 = by_7(how[i].clip);
    }
    QT_TRY(gpu_check_launch(gpu_input_errors(&a, self(be)->stream), "errors of inputs", err));
    QT_TRY(cuda_download(be, part, a.part, 2 * sums * tiles * sizeof *part, err));
    for (size_t i = 0; i < sums * tiles; i++) {
        d[i / tiles] += part[i];
        squares[i / tiles] += part[sums * tiles + i];
    }
done:
    qt_free(part);
    return rc;
}

/* ---- score ---------------------------------------------------------------------------------- */

static int cuda_score(struct qt_backend *be, struct qt_score *scores, const float *logits,
                      const float *ref, const uint32_t *targets, float softcap, size_t m,
                      size_t vocab, struct qt_err *err)
{
    struct gpu_backend *g = self(be);
    struct gpu_score *host = NULL, *made;
    int rc = QT_OK;
    for (size_t i = 0; i < m; i++)
        if (targets[i] >= vocab)
            return qt_fail(err, QT_E_INPUT, NULL, NULL,
                           "target %zu is token %u, but the vocabulary has %zu tokens", i,
                           targets[i], vocab);
    if (m == 0)
        return QT_OK;
    QT_TRY(check_sizes(m, vocab, 0, err));
    QT_TRY(qt_array_new(&host, m, sizeof *host, err));
    QT_TRY(gpu_scratch_need(&g->scratch, g->gpu, m, sizeof *made + sizeof *targets, err));
    made = g->scratch.p;
    QT_TRY(cuda_upload(be, made + m, targets, m * sizeof *targets, err));
    QT_TRY(gpu_check_launch(gpu_math_score(made, logits, ref, (const uint32_t *)(made + m), softcap,
                                           m, vocab, g->stream),
                            "score", err));
    QT_TRY(cuda_download(be, host, made, m * sizeof *host, err));
    for (size_t i = 0; i < m; i++)
        scores[i] = (struct qt_score){.nll = host[i].nll,
                                      .ref_nll = host[i].ref_nll,
                                      .kld = host[i].kld,
                                      .p_delta = host[i].p_delta,
                                      .same_top = host[i].same_top};
done:
    qt_free(host);
    return rc;
}

/* ---- statistics ----------------------------------------------------------------------------- */

static int cuda_gram(struct qt_backend *be, double *h, const float *x, size_t m, size_t k,
                     struct qt_err *err)
{
    struct gpu_backend *g = writing(be, h, k * k * sizeof *h);
    int rc = check_sizes(m, k, 0, err);
    g->products.half = be->half;
    return rc < 0 ? rc : gpu_gram(&g->products, h, x, m, k, err);
}

static int cuda_channels(struct qt_backend *be, const struct qt_channels *c, const float *x,
                         size_t m, size_t k, struct qt_err *err)
{
    struct gpu_backend *g = be->ctx;
    uint32_t *largest = NULL;
    int rc = check_size(k, err);
    if (rc < 0 || k == 0 || m == 0)
        return rc;
    if (be->half)
        QT_TRY(gpu_largest_new(&largest, &g->products, x, m * k, err));
    QT_TRY(
        gpu_scratch_need(&g->scratch, g->gpu, gpu_math_channel_parts(m, k), sizeof(double), err));
    QT_TRY(gpu_check_launch(
        gpu_math_channels(c->absmax, c->sum2, c->hist, g->scratch.p, x, m, k, largest, g->stream),
        "statistics", err));
done:
    return rc;
}

/* ---- Hessians ------------------------------------------------------------------------------- */

static int cuda_factor(struct qt_backend *be, float *h, float *v, bool *positive,
                       const double *gram, const size_t *order, double scale, double damp, size_t k,
                       struct qt_err *err)
{
    int rc = check_size(k, err);
    return rc < 0 ? rc : gpu_factor(products(be), h, v, positive, gram, order, scale, damp, k, err);
}

static int cuda_factor_again(struct qt_backend *be, float *h, float *v, bool *positive,
                             const float *from, const size_t *order, size_t k, struct qt_err *err)
{
    int rc = check_size(k, err);
    return rc < 0 ? rc : gpu_factor_again(products(be), h, v, positive, from, order, k, err);
}

static int cuda_regress(struct qt_backend *be, float *s, double *explained, const float *c,
                        const float *v, const size_t *order, double scale, size_t m, size_t k,
                        struct qt_err *err)
{
    int rc = check_sizes(m, k, 0, err);
    return rc < 0 ? rc : gpu_regress(products(be), s, explained, c, v, order, scale, m, k, err);
}

/* ---- rounding ------------------------------------------------------------------------------- */

static int cuda_mix24_costs(struct qt_backend *be, const struct qt_mix24_costs *job,
                            struct qt_err *err)
{
    return gpu_mix24_group_costs(products(be)->gpu, job, err);
}

static int cuda_mix24_extent(struct qt_backend *be, struct qt_mix24_extent *job, struct qt_err *err)
{
    return gpu_mix24_find_extent(self(be)->gpu, job, err);
}

static int cuda_round(struct qt_backend *be, struct qt_round *const *jobs, size_t count,
                      struct qt_err *err)
{
    return gpu_round(products(be), jobs, count, err);
}

static int cuda_group_range(struct qt_backend *be, float *largest, float *smallest, const float *w,
                            size_t n, size_t k, size_t group, struct qt_err *err)
{
    return gpu_group_range(self(be)->gpu, largest, smallest, w, n, k, group, err);
}

/* ---- gradients ------------------------------------------------------------------------------ */

static int cuda_norm_grad(struct qt_backend *be, float *dx, float *dw, const float *dy,
                          const float *x, const float *w, enum qt_norm_kind kind, float eps,
                          size_t m, size_t n, struct qt_err *err)
{
    struct gpu_backend *g = writing(be, dx, m * n * sizeof *dx);
    int rc = check_sizes(m, n, 0, err);
    if (dw)
        writing(be, dw, n * sizeof *dw);
    return rc < 0 ? rc
                  : gpu_norm_grad(products_of(g), dx, dw, dy, x, w, norms[kind], eps, m, n, err);
}

static int cuda_attention_grad(struct qt_backend *be, float *dq, float *dk, float *dv,
                               const float *dy, const float *q, const float *k, const float *v,
                               size_t m, const struct qt_attention *a, struct qt_err *err)
{
    const size_t keys = m * a->kv_heads * a->head_dim * sizeof *dk;
    struct gpu_backend *g = writing(be, dq, m * a->heads * a->head_dim * sizeof *dq);
    int rc = check_sizes(a->heads * a->head_dim, a->seqlen, a->heads, err);
    if (rc < 0)
        return rc;
    writing(be, dk, keys);
    writing(be, dv, keys);
    return a->bias ? gpu_host_attention_grad(be, dq, dk, dv, dy, q, k, v, m, a, err)
                   : gpu_attention_grad(products_of(g), dq, dk, dv, dy, q, k, v, m, a, err);
}

static int cuda_activate_grad(struct qt_backend *be, float *dgate, float *dup, const float *dy,
                              const float *gate, const float *up, enum qt_act_kind kind,
                              size_t count, struct qt_err *err)
{
    void *stream = writing(be, dgate, count * sizeof *dgate)->stream;
    if (dup)
        writing(be, dup, count * sizeof *dup);
    return count ? gpu_check_launch(gpu_grad_activate(dgate, dup, dy, gate, up, activations[kind],
                                                      count, stream),
                                    "gradient", err)
                 : QT_OK;
}

static int cuda_loss_grad(struct qt_backend *be, double *losses, float *dlogits,
                          const float *logits, const float *ref, const uint32_t *targets,
                          float softcap, float weight, size_t m, size_t vocab, struct qt_err *err)
{
    struct gpu_backend *g = writing(be, dlogits, m * vocab * sizeof *dlogits);
    int rc = check_sizes(m, vocab, 0, err);
    return rc < 0 ? rc
                  : gpu_loss_grad(products_of(g), losses, dlogits, logits, ref, targets, softcap,
                                  weight, m, vocab, err);
}

static int cuda_square_grad(struct qt_backend *be, double *sum, float *grad, const float *y,
                            const float *target, float weight, size_t count, struct qt_err *err)
{
    struct gpu_backend *g = writing(be, grad, count * sizeof *grad);
    return gpu_square_grad(products_of(g), sum, grad, y, target, weight, count, err);
}

/* ---- learned scales ------------------------------------------------------------------------- */

static struct gpu_coded coded(const struct qt_coded *c)
{
    return (struct gpu_coded){.n = c->n,
                              .k = c->k,
                              .group = c->group,
                              .value = c->value,
                              .code = c->code,
                              .scale = c->scale,
                              .zero = c->zero};
}

static int cuda_decode(struct qt_backend *be, float *w, const struct qt_coded *c,
                       struct qt_err *err)
{
    const struct gpu_coded a = coded(c);
    int rc = check_sizes(c->n, c->k, c->group, err);
    if (rc < 0 || c->n == 0 || c->k == 0)
        return rc;
    void *stream = writing(be, w, c->n * c->k * sizeof *w)->stream;
    return gpu_check_launch(gpu_grad_decode(w, &a, stream), "decoding", err);
}

static int cuda_decode_grad(struct qt_backend *be, float *dscale, const struct qt_coded *c,
                            const float *dw, struct qt_err *err)
{
    const struct gpu_coded a = coded(c);
    int rc = check_sizes(c->n, c->k, c->group, err);
    if (rc < 0 || c->n == 0 || c->k == 0)
        return rc;
    void *stream = writing(be, dscale, c->n * qt_ceil_div(c->k, c->group) * sizeof *dscale)->stream;
    return gpu_check_launch(gpu_grad_scales(dscale, &a, dw, stream), "gradient", err);
}

static int cuda_tune(struct qt_backend *be, const struct qt_tuned *t, const struct qt_adam *step,
                     struct qt_err *err)
{
    const struct gpu_tuned on = {.count = t->count,
                                 .exp2 = t->exp2,
                                 .start = t->start,
                                 .unit = t->unit,
                                 .grad = t->grad,
                                 .delta = t->delta,
                                 .m = t->m,
                                 .v = t->v,
                                 .scale = t->scale};
    const struct gpu_adam adam = {.beta1 = step->beta1,
                                  .beta2 = step->beta2,
                                  .eps = step->eps,
                                  .fix1 = step->fix1,
                                  .fix2 = step->fix2,
                                  .lr = step->lr};
    void *stream = self(be)->stream;
    return t->count ? gpu_check_launch(gpu_grad_tune(&on, &adam, stream), "step of Adam", err)
                    : QT_OK;
}

/* ---- ranks ---------------------------------------------------------------------------------- */

static int cuda_link(struct qt_backend *be, struct qt_comm *comm, char *text, size_t size,
                     struct qt_err *err)
{
    struct gpu_backend *g = self(be);
    int rc = gpu_nccl_open(&g->nccl, text, size, comm, g->gpu->device, g->stream, err);
    be->linked = g->nccl != NULL;
    return rc;
}

static int cuda_shift(struct qt_backend *be, const void *out, size_t out_bytes, size_t to, void *in,
                      size_t in_bytes, size_t from, struct qt_err *err)
{
    return gpu_nccl_shift(self(be)->nccl, out, out_bytes, to, in, in_bytes, from, err);
}

static int cuda_broadcast(struct qt_backend *be, void *data, size_t bytes, size_t from,
                          struct qt_err *err)
{
    return gpu_nccl_broadcast(self(be)->nccl, data, bytes, from, err);
}

/* ---- open and close ------------------------------------------------------------------------- */

static void cuda_close(struct qt_backend *be)
{
    struct gpu_backend *g = be ? self(be) : NULL;
    if (!g)
        return;
    if (g->gpu) {
        gpu_nccl_close(g->nccl);
        gpu_products_free(&g->products);
        g->gpu->free(g->gpu, g->scratch.p);
        g->gpu->close(g->gpu);
    }
    if (g->cpu)
        g->cpu->close(g->cpu);
    qt_free(g);
}

static const struct qt_backend functions = {
    .alloc = cuda_alloc,
    .free = cuda_free,
    .room = cuda_room,
    .upload = cuda_upload,
    .upload_narrow = cuda_upload_narrow,
    .download = cuda_download,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .copy = cuda_copy,
    .zero = cuda_zero,
    .linear = cuda_linear,
    .norm = cuda_norm,
    .rope = cuda_rope,
    .attention = cuda_attention,
    .activate = cuda_activate,
    .add = cuda_add,
    .subtract = cuda_subtract,
    .gather_rows = cuda_gather_rows,
    .scatter_rows = cuda_scatter_rows,
    .copy_columns = cuda_copy_columns,
    .convolve = gpu_host_convolve,
    .delta_rule = gpu_host_delta_rule,
    .state_space = gpu_host_state_space,
    .scale = cuda_scale,
    .clip = gpu_host_clip,
    .score = cuda_score,
    .gram = cuda_gram,
    .add_f64 = cuda_add_f64,
    .channels = cuda_channels,
    .linear_grad_x = cuda_linear_grad_x,
    .linear_grad_w = cuda_linear_grad_w,
    .norm_grad = cuda_norm_grad,
    .attention_grad = cuda_attention_grad,
    .activate_grad = cuda_activate_grad,
    .loss_grad = cuda_loss_grad,
    .square_grad = cuda_square_grad,
    .decode = cuda_decode,
    .decode_grad = cuda_decode_grad,
    .tune = cuda_tune,
    .round_inputs = cuda_round_inputs,
    .arrange_inputs = cuda_arrange_inputs,
    .block_grams = cuda_block_grams,
    .input_errors = cuda_input_errors,
    .factor = cuda_factor,
    .factor_again = cuda_factor_again,
    .regress = cuda_regress,
    .round = cuda_round,
    .mix24_costs = cuda_mix24_costs,
    .mix24_extent = cuda_mix24_extent,
    .group_range = cuda_group_range,
    .link = cuda_link,
    .shift = cuda_shift,
    .broadcast = cuda_broadcast,
    .close = cuda_close,
};

int qt_backend_cuda_open(struct qt_backend **out, int device, struct qt_err *err)
{
    struct gpu_backend *g = NULL;
    int rc;
    *out = NULL;
    QT_TRY(qt_array_new(&g, 1, sizeof *g, err));
    g->be = functions;
    g->be.ctx = g;
    QT_TRY(qt_gpu_open(&g->gpu, device, err));
    g->products.gpu = g->gpu;
    if (!g->gpu->has_cublas) {
        rc = qt_fail(err, QT_E_NO_GPU, NULL, NULL, "GPU %d cannot run models: %s", device,
                     g->gpu->cublas);
        goto done;
    }
    g->cublas = gpu_cublas_of(g->gpu);
    g->stream = gpu_stream_of(g->gpu);
    QT_TRY(qt_backend_cpu_open(&g->cpu, err));
    snprintf(g->name, sizeof g->name, "%s, %s, %s", g->gpu->name, g->gpu->cublas, g->cpu->name);
    g->be.name = g->name;
    *out = &g->be;
done:
    if (rc < 0 && g)
        cuda_close(&g->be);
    return rc;
}
