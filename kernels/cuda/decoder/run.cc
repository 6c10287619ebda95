/* Dispatch of qtool_decoder_run. */
#include "kernels/cuda/decoder/decoder.h"

/* Queries from which on tiles of 64 are used. */
enum { TILE_QUERIES = 16 };

static bool aligned(const void *p)
{
    return (size_t)p % 16 == 0;
}

static int run_attention(const struct qtool_decoder_attention *a, bool dependent, void *stream)
{
    const bool wide = a->head_dim % 8 == 0;
    if (a->head_dim > 512 || a->kv_heads == 0 || a->heads % a->kv_heads ||
        (wide && (a->sequence_stride % 8 || a->head_stride % 8)) || !aligned(a->q) ||
        !aligned(a->k) || !aligned(a->v) || !aligned(a->out) || a->sequences * a->queries > 65535)
        return QTOOL_UNSUPPORTED;
    int rc = wide && a->queries >= TILE_QUERIES ? qt_attention_tile(a, dependent, stream)
                                                : QTOOL_UNSUPPORTED;
    return rc == QTOOL_UNSUPPORTED ? qt_attention_rows(a, dependent, stream) : rc;
}

int qtool_decoder_run(const struct qtool_decoder_op *op, int dependent_launch, void *stream)
{
    const bool dependent = dependent_launch != 0;
    switch (op->kind) {
    case QTOOL_DECODER_EMBED:
        return qt_decoder_embed(&op->embed, dependent, stream);
    case QTOOL_DECODER_ADD_NORM:
        return qt_decoder_add_norm(&op->add_norm, dependent, stream);
    case QTOOL_DECODER_HEADS:
        return qt_decoder_heads(&op->heads, dependent, stream);
    case QTOOL_DECODER_ATTENTION:
        return run_attention(&op->attention, dependent, stream);
    case QTOOL_DECODER_ACTIVATION:
        return qt_decoder_activation(&op->activation, dependent, stream);
    case QTOOL_DECODER_ROUTE:
        return qt_decoder_route(&op->route, dependent, stream);
    case QTOOL_DECODER_EXPERT_PRODUCT:
        return qt_decoder_expert_product(&op->expert_product, dependent, stream);
    case QTOOL_DECODER_NEXT:
        return op->next.temperature > 0 ? qt_decoder_sample(&op->next, dependent, stream)
                                        : qt_decoder_next(&op->next, dependent, stream);
    }
    return QTOOL_UNSUPPORTED;
}
