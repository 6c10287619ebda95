/* Attention with FP16 factors, by one kernel, and in FP32, by products of panels (product.h). */
#include "kernels/gpu/product.h"

#include <limits.h>

enum { SEQUENCES = 65535 }; /* of all heads in a launch */
enum { SCORES = 1 << 26 };  /* in memory at a time */

/* ---- FP16 ----------------------------------------------------------------------------------- */

bool gpu_attends_in_half(const struct gpu_products *g, const struct qt_attention *a)
{
    return g->half && g->gpu->cc >= 80 && (a->head_dim == 64 || a->head_dim == 128) &&
           a->past == 0 && a->scale > 0 && a->softcap == 0 && !a->sinks && !a->exact_keys &&
           !a->bias && !a->both_ways && a->heads <= SEQUENCES && a->seqlen < INT_MAX / 2 &&
           a->window < INT_MAX / 2;
}

int gpu_attention_half(struct gpu_products *g, float *y, const float *q, const float *k,
                       const float *v, size_t m, const struct qt_attention *a, struct qt_err *err)
{
    const size_t wide = a->heads * a->head_dim, narrow = a->kv_heads * a->head_dim;
    const size_t all = m / a->seqlen, fit = SEQUENCES / a->heads;
    struct gpu_half *hq, *hk, *hv;
    uint32_t *largest;
    int rc;
    gpu_products_changed(g, y, m * wide * sizeof *y);
    QT_TRY(gpu_half_of(&hq, g, q, (int)m, (int)wide, (int)wide, false, err));
    QT_TRY(gpu_half_of(&hk, g, k, (int)m, (int)narrow, (int)narrow, false, err));
    QT_TRY(gpu_half_of(&hv, g, v, (int)m, (int)narrow, (int)narrow, false, err));
    QT_TRY(gpu_largest_new(&largest, g, y, m * wide, err));
    for (size_t s = 0; s < all; s += fit) {
        const size_t at = s * a->seqlen;
        const struct gpu_attention part = {.y = y + at * wide,
                                           .q = (uint16_t *)gpu_half_values(hq) + at * wide,
                                           .k = (uint16_t *)gpu_half_values(hk) + at * narrow,
                                           .v = (uint16_t *)gpu_half_values(hv) + at * narrow,
                                           .largest_q = gpu_half_largest(hq),
                                           .largest_k = gpu_half_largest(hk),
                                           .largest_v = gpu_half_largest(hv),
                                           .largest = largest,
                                           .sequences = qt_min_size(fit, all - s),
                                           .seqlen = a->seqlen,
                                           .heads = a->heads,
                                           .kv_heads = a->kv_heads,
                                           .dim = a->head_dim,
                                           .window = a->window,
                                           .scale = a->scale};
        QT_TRY(gpu_check_launch(gpu_attend(&part, gpu_stream_of(g->gpu)), "attention", err));
    }
done:
    return rc;
}

/* ---- FP32 ----------------------------------------------------------------------------------- */

/* The arrays of an attention. */
struct attended {
    struct gpu_products *g;
    const struct qt_attention *a;
    float *y;
    const float *q, *k, *v;
};

/* The products of all heads and sequences of a panel are one batch. */
static int attention_panel(void *ctx, const struct gpu_panel *part, struct qt_err *err)
{
    const struct attended *x = ctx;
    const struct qt_attention *a = x->a;
    struct gpu_products *g = x->g;
    void *stream = gpu_stream_of(g->gpu);
    const size_t r0 = part->r0, r1 = part->r1;
    const size_t group = a->heads / a->kv_heads, dim = a->head_dim, wide = a->heads * dim,
                 narrow = a->kv_heads * dim;
    const size_t lo = gpu_first_key(a, r0), rows = r1 - r0, keys = r1 - lo, cells = rows * keys;
    const size_t query = (part->s0 * a->seqlen + r0 - a->past) * wide + part->h0 * group * dim;
    const size_t key = part->s0 * (a->past + a->seqlen) * narrow + part->h0 * dim;
    const size_t batch = part->sequences * part->heads * group;
    const float *sinks = a->sinks ? a->sinks + part->h0 * group : NULL;
    int rc;
    QT_TRY(gpu_scratch_need(&g->scores, g->gpu, batch * cells, sizeof(float), err));
    QT_TRY(gpu_scratch_need(&g->rows, g->gpu, batch, GPU_HEAD_ARRAYS * sizeof(float *), err));
    float *s = g->scores.p;
    const struct gpu_heads heads = {.q = x->q + query,
                                    .k = x->k + key + lo * narrow,
                                    .v = x->v + key + lo * narrow,
                                    .y = x->y + query,
                                    .s = s,
                                    .heads = part->heads * group,
                                    .group = group,
                                    .dim = dim,
                                    .cells = cells,
                                    .query_step = a->seqlen * wide,
                                    .key_step = (a->past + a->seqlen) * narrow,
                                    .batch = batch};
    QT_TRY(gpu_check_launch(gpu_math_head_pointers(g->rows.p, &heads, stream), "heads", err));
    float **of = g->rows.p;
    const struct gpu_product scores = {.m = (int)rows,
                                       .n = (int)keys,
                                       .k = (int)dim,
                                       .alpha = a->scale,
                                       .b_transposed = true,
                                       .lda = (int)wide,
                                       .ldb = (int)narrow,
                                       .ldc = (int)keys,
                                       .as = of + GPU_HEAD_QUERIES * batch,
                                       .bs = of + GPU_HEAD_KEYS * batch,
                                       .cs = of + GPU_HEAD_SCORES * batch,
                                       .count = (int)batch};
    const struct gpu_product values = {.m = (int)rows,
                                       .n = (int)dim,
                                       .k = (int)keys,
                                       .alpha = 1,
                                       .lda = (int)keys,
                                       .ldb = (int)narrow,
                                       .ldc = (int)wide,
                                       .as = of + GPU_HEAD_SCORES * batch,
                                       .bs = of + GPU_HEAD_VALUES * batch,
                                       .cs = of + GPU_HEAD_OUTPUTS * batch,
                                       .count = (int)batch};
    QT_TRY(gpu_product(g, &scores, err));
    for (size_t i = 0; i < part->sequences && a->exact_keys; i++) {
        const struct gpu_own_scores own = {.s = s + i * heads.heads * cells,
                                           .q = heads.q + i * heads.query_step,
                                           .exact = a->exact_keys + key + i * heads.key_step,
                                           .count = part->heads,
                                           .group = group,
                                           .rows = rows,
                                           .keys = keys,
                                           .r0 = r0,
                                           .lo = lo,
                                           .ldq = wide,
                                           .ldk = narrow,
                                           .dim = dim,
                                           .scale = a->scale};
        QT_TRY(gpu_check_launch(gpu_math_own_scores(&own, stream), "own scores", err));
    }
    QT_TRY(gpu_check_launch(gpu_math_softmax(s, batch, rows, keys, r0, lo, a->window, a->softcap,
                                             sinks, heads.heads, stream),
                            "softmax", err));
    QT_TRY(gpu_product(g, &values, err));
done:
    return rc;
}

int gpu_attention(struct gpu_products *g, float *y, const float *q, const float *k, const float *v,
                  size_t m, const struct qt_attention *a, struct qt_err *err)
{
    struct attended x = {g, a, y, q, k, v};
    if (a->exact_keys && a->head_dim > GPU_OWN_DIM)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "attention over 4-bit keys has heads of %zu channels, at most %d are "
                       "supported on a GPU",
                       a->head_dim, GPU_OWN_DIM);
    return gpu_attention_panels(a, m, SCORES, attention_panel, &x, err);
}
