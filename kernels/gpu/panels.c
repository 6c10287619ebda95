/* The panels of an attention (product.h). */
#include "kernels/gpu/product.h"

/* Queries of a panel. A non-finite key affects all queries of its panel. */
enum { QUERIES = 256 };

size_t gpu_first_key(const struct qt_attention *a, size_t r0)
{
    return a->window && r0 >= a->window ? r0 - a->window + 1 : 0;
}

int gpu_attention_panels(const struct qt_attention *a, size_t m, size_t scores,
                         int (*run)(void *ctx, const struct gpu_panel *part, struct qt_err *err),
                         void *ctx, struct qt_err *err)
{
    const size_t group = a->heads / a->kv_heads, sequences = m / a->seqlen;
    int rc = QT_OK;
    for (size_t first = 0; first < a->seqlen; first += QUERIES) {
        const size_t r0 = a->past + first, r1 = a->past + qt_min_size(first + QUERIES, a->seqlen);
        const size_t cells = (r1 - r0) * (r1 - gpu_first_key(a, r0));
        const size_t fit = qt_max_size(scores / (group * cells), 1);
        const size_t whole = qt_max_size(fit / a->kv_heads, 1);
        for (size_t at = 0; at < sequences; at += whole)
            for (size_t head = 0; head < a->kv_heads; head += fit) {
                const struct gpu_panel part = {.s0 = at,
                                               .sequences = qt_min_size(whole, sequences - at),
                                               .h0 = head,
                                               .heads = qt_min_size(fit, a->kv_heads - head),
                                               .r0 = r0,
                                               .r1 = r1};
                QT_TRY(run(ctx, &part, err));
            }
    }
done:
    return rc;
}
