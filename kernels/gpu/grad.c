/*
 * Gradients of the CUDA backend that are not matrix products (base/backend.h). That of an attention
 * is computed by products of panels of queries, as the attention itself (backend.c):
 *
 *   P = softmax(scale Q K^T), dS = P (dY V^T - row sums of P dY V^T)
 *   dQ = scale dS K;  dK += scale dS^T Q;  dV += P^T dY
 *
 * The query heads of a key head attend to the same keys: their queries are copied to one matrix.
 */
#include "kernels/gpu/product.h"

/* Attention scores in memory at a time, and as many gradients of scores. */
enum { SCORES = 1 << 25 };

static int launched(int status, struct qt_err *err)
{
    return gpu_check_launch(status, "gradient", err);
}

/* ---- rows and elements ---------------------------------------------------------------------- */

int gpu_norm_grad(struct gpu_products *g, float *dx, float *dw, const float *dy, const float *x,
                  const float *w, enum gpu_norm kind, float eps, size_t m, size_t n,
                  struct qt_err *err)
{
    void *stream = gpu_stream_of(g->gpu);
    const size_t runs = qt_ceil_div(m, GPU_NORM_RUN);
    struct gpu_norm_row *rows;
    int rc = QT_OK;
    if (m == 0 || n == 0)
        return QT_OK;
    QT_TRY(gpu_scratch_need(&g->rows, g->gpu, m, sizeof *rows, err));
    rows = g->rows.p;
    QT_TRY(launched(gpu_grad_norm_rows(rows, dy, x, w, kind, eps, m, n, stream), err));
    if (dw) {
        QT_TRY(gpu_scratch_need(&g->scores, g->gpu, runs * n, sizeof(double), err));
        QT_TRY(launched(gpu_grad_norm_weights(dw, g->scores.p, rows, dy, x, m, n, stream), err));
    }
    QT_TRY(launched(gpu_grad_norm_inputs(dx, rows, dy, x, w, m, n, stream), err));
done:
    return rc;
}

int gpu_loss_grad(struct gpu_products *g, double *losses, float *dlogits, const float *logits,
                  const float *ref, const uint32_t *targets, float softcap, float weight, size_t m,
                  size_t vocab, struct qt_err *err)
{
    struct qt_gpu *gpu = g->gpu;
    double *made;
    uint32_t *at;
    int rc = QT_OK;
    for (size_t i = 0; !ref && i < m; i++)
        if (targets[i] >= vocab && targets[i] != QT_NO_TARGET)
            return qt_fail(err, QT_E_INPUT, NULL, NULL,
                           "target %zu is token %u, but the vocabulary has %zu tokens", i,
                           (unsigned)targets[i], vocab);
    if (m == 0)
        return QT_OK;
    QT_TRY(gpu_scratch_need(&g->rows, gpu, m, sizeof *made + sizeof *at, err));
    made = g->rows.p;
    at = (uint32_t *)(void *)(made + m);
    if (!ref)
        QT_TRY(gpu->upload(gpu, at, targets, m * sizeof *at, err));
    QT_TRY(launched(gpu_grad_loss(made, dlogits, logits, ref, at, softcap, weight, m, vocab,
                                  gpu_stream_of(gpu)),
                    err));
    QT_TRY(gpu->download(gpu, losses, made, m * sizeof *made, err));
done:
    return rc;
}

int gpu_square_grad(struct gpu_products *g, double *sum, float *grad, const float *y,
                    const float *target, float weight, size_t count, struct qt_err *err)
{
    struct qt_gpu *gpu = g->gpu;
    const size_t runs = qt_ceil_div(count, GPU_SQUARE_RUN);
    double *sums = NULL;
    int rc = QT_OK;
    *sum = 0;
    if (count == 0)
        return QT_OK;
    QT_TRY(qt_array_new(&sums, runs, sizeof *sums, err));
    QT_TRY(gpu_scratch_need(&g->rows, gpu, runs, sizeof *sums, err));
    QT_TRY(launched(
        gpu_grad_square(g->rows.p, grad, y, target, 2 * weight, count, gpu_stream_of(gpu)), err));
    QT_TRY(gpu->download(gpu, sums, g->rows.p, runs * sizeof *sums, err));
    for (size_t i = 0; i < runs; i++)
        *sum += sums[i];
done:
    qt_free(sums);
    return rc;
}

/* ---- attention ------------------------------------------------------------------------------ */

/* An attention and its gradient. */
struct arrays {
    struct gpu_products *g;
    const struct qt_attention *a;
    float *dq, *dk, *dv;
    const float *dy, *q, *k, *v;
};

/* All products of a panel; `of` are the arrays of pointers. */
static int panel_products(struct gpu_products *g, float **of, const struct gpu_grad_heads *heads,
                          const struct qt_attention *a, const struct gpu_panel *part,
                          struct qt_err *err)
{
    const size_t parts = heads->parts;
    const float *sinks = a->sinks ? a->sinks + part->h0 * heads->group : NULL;
    const int rows = (int)(heads->rows * heads->group), keys = (int)heads->keys;
    const int dim = (int)heads->dim, narrow = (int)(a->kv_heads * heads->dim);
    const struct gpu_product scores = {.m = rows,
                                       .n = keys,
                                       .k = dim,
                                       .alpha = a->scale,
                                       .b_transposed = true,
                                       .lda = dim,
                                       .ldb = narrow,
                                       .ldc = keys,
                                       .as = of + GPU_GRAD_Q * parts,
                                       .bs = of + GPU_GRAD_K * parts,
                                       .cs = of + GPU_GRAD_P * parts,
                                       .count = (int)parts};
    struct gpu_product changes = scores, queries = scores, values = scores, from_keys;
    int rc;
    changes.alpha = 1;
    changes.as = of + GPU_GRAD_DY * parts;
    changes.bs = of + GPU_GRAD_V * parts;
    changes.cs = of + GPU_GRAD_DS * parts;
    queries.n = queries.ldc = dim;
    queries.k = queries.lda = keys;
    queries.b_transposed = false;
    queries.as = changes.cs;
    queries.cs = of + GPU_GRAD_DQ * parts;
    values.m = values.lda = keys;
    values.n = values.ldb = dim;
    values.k = rows;
    values.ldc = narrow;
    values.alpha = values.beta = 1;
    values.a_transposed = true;
    values.b_transposed = false;
    values.as = of + GPU_GRAD_P * parts;
    values.bs = of + GPU_GRAD_DY * parts;
    values.cs = of + GPU_GRAD_DV * parts;
    from_keys = values;
    from_keys.alpha = a->scale;
    from_keys.as = of + GPU_GRAD_DS * parts;
    from_keys.bs = of + GPU_GRAD_Q * parts;
    from_keys.cs = of + GPU_GRAD_DK * parts;
    QT_TRY(gpu_product(g, &scores, err));
    QT_TRY(gpu_product(g, &changes, err));
    QT_TRY(launched(gpu_grad_softmax(heads, part->r0, gpu_first_key(a, part->r0), a->window,
                                     a->softcap, sinks, gpu_stream_of(g->gpu)),
                    err));
    QT_TRY(gpu_product(g, &queries, err));
    QT_TRY(gpu_product(g, &values, err));
    QT_TRY(gpu_product(g, &from_keys, err));
done:
    return rc;
}

static int panel_grad(void *ctx, const struct gpu_panel *part, struct qt_err *err)
{
    const struct arrays *x = ctx;
    const struct qt_attention *a = x->a;
    struct gpu_products *g = x->g;
    void *stream = gpu_stream_of(g->gpu);
    const size_t group = a->heads / a->kv_heads, dim = a->head_dim, wide = a->heads * dim,
                 narrow = a->kv_heads * dim, lo = gpu_first_key(a, part->r0);
    const size_t query = (part->s0 * a->seqlen + part->r0) * wide + part->h0 * group * dim;
    const size_t key = (part->s0 * a->seqlen + lo) * narrow + part->h0 * dim;
    const size_t parts = part->sequences * part->heads, rows = part->r1 - part->r0,
                 keys = part->r1 - lo, stack = parts * rows * group;
    int rc;
    QT_TRY(gpu_scratch_need(&g->scores, g->gpu, stack, (2 * keys + 3 * dim) * sizeof(float), err));
    QT_TRY(gpu_scratch_need(&g->rows, g->gpu, parts, GPU_GRAD_ARRAYS * sizeof(float *), err));
    float *p = g->scores.p, *q = p + stack * 2 * keys;
    const struct gpu_grad_heads heads = {.k = x->k + key,
                                         .v = x->v + key,
                                         .dk = x->dk + key,
                                         .dv = x->dv + key,
                                         .q = q,
                                         .dy = q + stack * dim,
                                         .dq = q + 2 * stack * dim,
                                         .p = p,
                                         .ds = p + stack * keys,
                                         .parts = parts,
                                         .heads = part->heads,
                                         .rows = rows,
                                         .group = group,
                                         .keys = keys,
                                         .dim = dim,
                                         .query_step = a->seqlen * wide,
                                         .key_step = a->seqlen * narrow};
    QT_TRY(launched(gpu_grad_pointers(g->rows.p, &heads, stream), err));
    QT_TRY(launched(gpu_grad_stack(heads.q, x->q + query, &heads, wide, stream), err));
    QT_TRY(launched(gpu_grad_stack(heads.dy, x->dy + query, &heads, wide, stream), err));
    QT_TRY(panel_products(g, g->rows.p, &heads, a, part, err));
    QT_TRY(launched(gpu_grad_unstack(x->dq + query, heads.dq, &heads, wide, stream), err));
done:
    return rc;
}

int gpu_attention_grad(struct gpu_products *g, float *dq, float *dk, float *dv, const float *dy,
                       const float *q, const float *k, const float *v, size_t m,
                       const struct qt_attention *a, struct qt_err *err)
{
    struct arrays x = {g, a, dq, dk, dv, dy, q, k, v};
    const size_t bytes = m * a->kv_heads * a->head_dim * sizeof *dk;
    int rc = QT_OK;
    if (m == 0)
        return QT_OK;
    QT_TRY(g->gpu->fill(g->gpu, dk, 0, bytes, err));
    QT_TRY(g->gpu->fill(g->gpu, dv, 0, bytes, err));
    QT_TRY(gpu_attention_panels(a, m, SCORES, panel_grad, &x, err));
done:
    return rc;
}
