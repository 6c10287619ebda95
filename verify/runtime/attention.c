/* Appends attention with its products to a program. */
#include "verify/runtime/program.h"

/* True if the layer's decode steps can use the kernels of qtool_kv4.h. */
static bool plain_attention(const struct qt_runtime *rt, const struct rt_layer *l)
{
    return (l->head_dim == 64 || l->head_dim == 128) && !(rt->config.attn_softcap > 0) &&
           !l->sinks && !rt->slopes && (!l->window || l->window >= rt->opt.capacity);
}

/* Elements of the cache from KV head to KV head, and from sequence to sequence. */
static size_t head_stride(const struct qt_runtime *rt, const struct rt_layer *l)
{
    return rt->page * l->head_dim;
}

static size_t sequence_stride(const struct qt_runtime *rt, const struct rt_layer *l)
{
    return l->kv_heads * head_stride(rt, l);
}

/* The FP16 cache that a layer of a step writes and reads. */
static void cache_of(char **k, char **v, const struct qt_runtime *rt, const struct rt_layer *l,
                     const struct rt_batch *b)
{
    const bool scratch = rt->opt.kv4;
    const size_t at = b->prompt && !scratch ? b->first * sequence_stride(rt, l) * 2 : 0;
    *k = (char *)(scratch ? rt->scratch.k : l->cache.k) + at;
    *v = (char *)(scratch ? rt->scratch.v : l->cache.v) + at;
}

static int append_heads(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l,
                        const struct rt_batch *b, struct qt_err *err)
{
    const struct rt_config *c = &rt->config;
    const size_t m = b->sequences * b->tokens;
    const struct rt_rope *keys = &rt->rope[l->rope];
    const struct rt_rope *queries =
        l->rope == QT_ROPE_FULL && rt->query_rope.cos ? &rt->query_rope : keys;
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_HEADS};
    struct qtool_decoder_heads *h = &op.heads;
    char *cache_k, *cache_v;
    *h = (struct qtool_decoder_heads){.m = m,
                                      .heads = c->heads,
                                      .head_dim = l->head_dim,
                                      .q_bias = l->q_bias,
                                      .k_bias = l->k_bias,
                                      .v_bias = l->v_bias,
                                      .q_norm = l->q_norm,
                                      .k_norm = l->k_norm,
                                      .v_norm = l->v_norm,
                                      .norm_all_heads = c->norm_all_heads,
                                      .norm_last = c->norm_last,
                                      .rotary = keys->rotary,
                                      .q_cos = queries->cos,
                                      .q_sin = queries->sin,
                                      .k_cos = keys->cos,
                                      .k_sin = keys->sin,
                                      .interleaved = c->interleaved,
                                      .sequence = b->sequence,
                                      .position = b->position,
                                      .q_out = rt->q,
                                      .clip = c->clip};
    h->q = rt_part_of(&h->q_stride, &l->qkv, 0, rt->qkv, m);
    if (l != &rt->layers[l->keys_of]) /* attends to keys and values that are there */
        return rt_append_kernel(p, QT_RUNTIME_HEADS, &op, err);
    h->kv_heads = l->kv_heads;
    h->k = rt_part_of(&h->k_stride, &l->qkv, 1, rt->qkv, m);
    h->v = rt_part_of(&h->v_stride, &l->qkv, 2, rt->qkv, m);
    h->head_stride = head_stride(rt, l);
    h->sequence_stride = sequence_stride(rt, l);
    if (rt->opt.kv4 && !b->prompt) {
        h->kv4 = &l->cache;
    } else {
        if (rt->opt.kv4) {
            h->row_k = rt->row_k;
            h->row_v = rt->row_v;
        }
        cache_of(&cache_k, &cache_v, rt, l, b);
        h->cache_k = cache_k;
        h->cache_v = cache_v;
    }
    return rt_append_kernel(p, QT_RUNTIME_HEADS, &op, err);
}

/* Appends the keys and values of prompts to the 4-bit cache. */
static int append_quantized(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l,
                            const struct rt_batch *b, struct qt_err *err)
{
    struct rt_op *op;
    int rc = rt_append_op(&op, p, RT_APPEND, QT_RUNTIME_HEADS, err);
    if (rc < 0)
        return rc;
    op->append.cache = &l->cache;
    op->append.k = rt->row_k;
    op->append.v = rt->row_v;
    op->append.sequence = b->all_sequences;
    op->append.position = b->position;
    op->append.tokens = b->sequences * b->tokens;
    return QT_OK;
}

static int append_cached(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l,
                         struct qt_err *err)
{
    const struct qtool_kv_options opt = {.batch = rt->opt.sequences,
                                         .heads = rt->config.heads,
                                         .max_length = rt->opt.capacity,
                                         .scale = rt->config.attn_scale,
                                         .dtype = QTOOL_F16,
                                         .device = rt->gpu->device,
                                         .dependent_launch = !rt->opt.plain};
    struct rt_op *op;
    int rc;
    struct qtool_kv_options one = opt;
    struct qtool_kv_plan plan_of_one;
    size_t split_tokens = 0;
    one.batch = 1;
    if (rt->opt.batch_invariant) {
        QT_TRY(rt->gpu->kv_plan(rt->gpu, &plan_of_one, &l->cache, &one, 0, err));
        split_tokens = plan_of_one.split_tokens;
    }
    QT_TRY(rt_append_op(&op, p, RT_CACHED, QT_RUNTIME_ATTENTION, err));
    op->cached.cache = &l->cache;
    op->cached.out = rt->attended;
    op->cached.q = rt->q;
    QT_TRY(rt->gpu->kv_plan(rt->gpu, &op->cached.plan, &l->cache, &opt, split_tokens, err));
    QT_TRY(gpu_workspace_need(&rt->operands, rt->gpu, op->cached.plan.workspace_bytes, err));
done:
    return rc;
}

static int append_attention(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l,
                            const struct rt_batch *b, struct qt_err *err)
{
    const struct rt_config *c = &rt->config;
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_ATTENTION};
    char *k, *v;
    if (!b->prompt && plain_attention(rt, l))
        return append_cached(p, rt, l, err);
    cache_of(&k, &v, rt, l, b);
    op.attention = (struct qtool_decoder_attention){
        .sequences = b->sequences,
        .queries = b->tokens,
        .heads = c->heads,
        .kv_heads = l->kv_heads,
        .head_dim = l->head_dim,
        .q = rt->q,
        .k = k,
        .v = v,
        .sequence_stride = sequence_stride(rt, l),
        .head_stride = head_stride(rt, l),
        .position = b->position,
        .out = rt->attended,
        .scale = c->attn_scale,
        .softcap = c->attn_softcap,
        .sinks = l->sinks,
        .window = l->window >= rt->opt.capacity ? 0 : l->window,
        .batch_invariant = rt->opt.batch_invariant,
        .slopes = rt->slopes,
        .slope_factor = rt->slope_factor,
    };
    return rt_append_kernel(p, QT_RUNTIME_ATTENTION, &op, err);
}

int rt_append_mixer(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l,
                    const struct rt_batch *b, struct qt_err *err)
{
    const size_t m = b->sequences * b->tokens;
    int rc;
    QT_TRY(
        rt_append_group(p, rt, &l->qkv, rt->qkv, rt->x, m, rt_norm_quantizes(rt, l, &l->qkv), err));
    QT_TRY(append_heads(p, rt, l, b, err));
    if (rt->opt.kv4 && b->prompt)
        QT_TRY(append_quantized(p, rt, l, b, err));
    QT_TRY(append_attention(p, rt, l, b, err));
    QT_TRY(rt_append_group(p, rt, &l->o, rt->o, rt->attended, m, false, err));
done:
    return rc;
}
