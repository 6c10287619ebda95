/* Attention with FP16 factors (product.h). */
#include "kernels/gpu/product.h"

#include <limits.h>

enum { SEQUENCES = 65535 }; /* of all heads in a launch */

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
