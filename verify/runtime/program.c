/*
 * The kernels of a step, in order. One decoder layer:
 *
 *   x --> q k v products --> heads (bias, norm, rope, append) --> attention --> o product
 *     --> add + norm --> gate up products --> activation --> down product --> add + norm --> x
 *
 * The activation is in the epilogue of gate and up where the plan of their product can do it.
 *
 * With experts: router product --> choice --> grouped products, or for FP16 experts product -->
 * activation --> product, beside the MLP of the shared expert.
 */
#include "verify/runtime/runtime.h"

#include <math.h>

static int append_op(struct rt_op **out, struct rt_program *p, enum rt_type type,
                     enum qt_runtime_share share, struct qt_err *err)
{
    int rc = qt_array_grow(&p->ops, &p->capacity, p->count + 1, sizeof *p->ops, err);
    if (rc < 0)
        return rc;
    *out = &p->ops[p->count++];
    **out = (struct rt_op){.type = type, .share = share};
    return QT_OK;
}

static int append_kernel(struct rt_program *p, enum qt_runtime_share share,
                         const struct qtool_decoder_op *kernel, struct qt_err *err)
{
    struct rt_op *op;
    int rc = append_op(&op, p, RT_KERNEL, share, err);
    if (rc == QT_OK)
        op->kernel = *kernel;
    return rc;
}

void rt_program_free(struct rt_program *p)
{
    qt_free(p->ops);
    *p = (struct rt_program){0};
}

static int not_invariant(const char *what, struct qt_err *err)
{
    return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                   "the fused runtime has no batch-invariant products of %s", what);
}

/* ---- products ------------------------------------------------------------------------------- */

static struct qtool_matmul_options options_of(const struct qt_runtime *rt)
{
    return (struct qtool_matmul_options){.dtype = QTOOL_F16,
                                         .device = rt->gpu->device,
                                         .dependent_launch = !rt->opt.plain,
                                         .batch_invariant = rt->opt.batch_invariant,
                                         .dense = rt->gpu->dense,
                                         .dense_context = rt->gpu->dense_context};
}

/* *done = true: the product of gate and up with the activation in its epilogue, to `out`. */
static int append_gated(bool *done, struct rt_program *p, struct qt_runtime *rt,
                        const struct rt_layer *l, const struct qtool_decoder_activation *a,
                        struct qt_err *err)
{
    const struct rt_linear *linear = &l->gate_up.linear[0];
    struct qtool_matmul_options opt = options_of(rt);
    struct qtool_matmul_plan plan;
    struct rt_op *op;
    int rc;
    *done = false;
    opt.gated = a->act == QTOOL_DECODER_SILU        ? QTOOL_MATMUL_GATED_SILU
                : a->act == QTOOL_DECODER_GELU_TANH ? QTOOL_MATMUL_GATED_GELU_TANH
                                                    : QTOOL_MATMUL_PLAIN;
    if (!opt.gated || opt.batch_invariant || !l->gated || l->gate_up.linears != 1 ||
        linear->dense || a->w4ax || l->gate_up.part[1].first != l->width ||
        linear->n != 2 * l->width || a->gate_bias || a->up_bias || a->token_gate)
        return QT_OK;
    rc = rt->gpu->plan(rt->gpu, &plan, &linear->weight, a->m, &opt, err);
    if (rc == QT_E_UNSUPPORTED)
        return QT_OK;
    QT_TRY(rc);
    QT_TRY(append_op(&op, p, RT_MATMUL, QT_RUNTIME_PRODUCTS, err));
    op->product.linear = linear;
    op->product.y = a->out;
    op->product.x = rt->x;
    op->product.m = a->m;
    op->product.plan = plan;
    QT_TRY(gpu_workspace_need(&rt->operands, rt->gpu, plan.workspace_bytes, err));
    *done = true;
done:
    return rc;
}

/* y: F16 [m][n]. */
static int append_product(struct rt_program *p, struct qt_runtime *rt,
                          const struct rt_linear *linear, void *y, const void *x, size_t m,
                          enum qt_runtime_share share, struct qt_err *err)
{
    struct qt_gpu *gpu = rt->gpu;
    const struct qtool_matmul_options opt = options_of(rt);
    struct rt_op *op;
    int rc;
    QT_TRY(append_op(&op, p, linear->dense ? RT_DENSE : RT_MATMUL, share, err));
    op->product.linear = linear;
    op->product.y = y;
    op->product.x = x;
    op->product.m = m;
    if (!linear->dense) {
        QT_TRY(gpu->plan(gpu, &op->product.plan, &linear->weight, m, &opt, err));
        QT_TRY(gpu_workspace_need(&rt->operands, gpu, op->product.plan.workspace_bytes, err));
    }
done:
    return rc;
}

static int need_codes(struct qt_runtime *rt, const struct gpu_w4ax_input *in, size_t m,
                      struct qt_err *err)
{
    struct gpu_operands *o = &rt->operands;
    int rc;
    QT_TRY(gpu_buffer_need(&o->codes, rt->gpu, m * in->token_bytes, err));
    QT_TRY(gpu_buffer_need(&o->scale, rt->gpu, gpu_w4ax_scales(in, m) * sizeof(float), err));
    QT_TRY(gpu_buffer_need(&o->sum, rt->gpu, m * sizeof(int), err));
done:
    return rc;
}

static int append_quantize(struct rt_program *p, struct qt_runtime *rt,
                           const struct gpu_w4ax_input *in, const void *x, size_t m,
                           struct qt_err *err)
{
    struct rt_op *op;
    int rc = append_op(&op, p, RT_QUANTIZE, QT_RUNTIME_PRODUCTS, err);
    if (rc < 0)
        return rc;
    op->quantize.input = in;
    op->quantize.x = x;
    op->quantize.m = m;
    return need_codes(rt, in, m, err);
}

/* True if the norm in front of a group of the layer quantizes its input: nothing else reads it. */
static bool norm_quantizes(const struct qt_runtime *rt, const struct rt_layer *l,
                           const struct rt_group *g)
{
    const bool first = g == &l->qkv || (g == &l->gate_up && !l->mixture.experts);
    return g->input.blocks && first && !rt->config.norm_after && !rt->config.parallel;
}

static int append_w4ax(struct rt_program *p, struct qt_runtime *rt, const struct rt_linear *linear,
                       void *y, size_t m, struct qt_err *err)
{
    const struct qtool_w4ax_options opt = {
        .output = QTOOL_W4AX_F16, .device = rt->gpu->device, .dependent_launch = !rt->opt.plain};
    struct rt_op *op;
    int rc;
    if (rt->opt.batch_invariant)
        return not_invariant("w4ax linears", err);
    QT_TRY(append_op(&op, p, RT_W4AX, QT_RUNTIME_PRODUCTS, err));
    op->w4ax.linear = linear;
    op->w4ax.y = y;
    QT_TRY(rt->gpu->w4ax_plan(rt->gpu, &op->w4ax.plan, &linear->w4ax, m, &opt, err));
    QT_TRY(gpu_workspace_need(&rt->operands, rt->gpu, op->w4ax.plan.workspace_bytes, err));
done:
    return rc;
}

/* The products with mix24 or look-up matrices in one launch. *all = false: they have none. */
static int append_many(bool *all, struct rt_program *p, struct qt_runtime *rt,
                       const struct rt_group *g, void *y, const void *x, size_t m,
                       struct qt_err *err)
{
    const struct qtool_matmul_weight *w[RT_PARTS];
    const struct qtool_matmul_options opt = options_of(rt);
    struct qtool_matmul_plan plan;
    struct rt_op *op;
    int rc;
    *all = false;
    if (g->linears < 2)
        return QT_OK;
    for (size_t i = 0; i < g->linears; i++) {
        w[i] = &g->linear[i].weight;
        if (g->linear[i].dense ||
            (w[i]->kind != QTOOL_MATMUL_MIX24 && w[i]->kind != QTOOL_MATMUL_LUT))
            return QT_OK;
    }
    rc = rt->gpu->plan_many(rt->gpu, &plan, w, g->linears, m, &opt, err);
    if (rc == QT_E_UNSUPPORTED)
        return QT_OK;
    QT_TRY(rc);
    QT_TRY(append_op(&op, p, RT_MANY, QT_RUNTIME_PRODUCTS, err));
    op->many.group = g;
    op->many.y = y;
    op->many.x = x;
    op->many.plan = plan;
    *all = true;
done:
    return rc;
}

/* y: the outputs of the group's linears, one after the other. quantized: the codes of x are there,
 * if the linears are w4ax. */
static int append_group(struct rt_program *p, struct qt_runtime *rt, const struct rt_group *g,
                        void *y, const void *x, size_t m, bool quantized, struct qt_err *err)
{
    char *at = y;
    bool all;
    int rc;
    QT_TRY(append_many(&all, p, rt, g, y, x, m, err));
    if (all)
        return QT_OK;
    if (g->input.blocks && !quantized)
        QT_TRY(append_quantize(p, rt, &g->input, x, m, err));
    for (size_t i = 0; i < g->linears; i++) {
        QT_TRY(g->input.blocks
                   ? append_w4ax(p, rt, &g->linear[i], at, m, err)
                   : append_product(p, rt, &g->linear[i], at, x, m, QT_RUNTIME_PRODUCTS, err));
        at += m * g->linear[i].n * 2;
    }
done:
    return rc;
}

/* Where a part of a group's output begins; *stride = elements from token to token. */
static const void *part_of(size_t *stride, const struct rt_group *g, size_t part, const void *y,
                           size_t m)
{
    const char *at = y;
    for (size_t i = 0; i < g->part[part].linear; i++)
        at += m * g->linear[i].n * 2;
    *stride = g->linear[g->part[part].linear].n;
    return at + g->part[part].first * 2;
}

/* ---- attention ------------------------------------------------------------------------------ */

/* True if the layer's decode steps can use the kernels of qtool_kv4.h. */
static bool plain_attention(const struct qt_runtime *rt, const struct rt_layer *l)
{
    const struct rt_config *c = &rt->config;
    return (c->head_dim == 64 || c->head_dim == 128) && !(c->attn_softcap > 0) && !l->sinks &&
           (!l->window || l->window >= rt->opt.capacity);
}

static size_t head_stride(const struct qt_runtime *rt, size_t tokens)
{
    return tokens * rt->config.head_dim;
}

/* Bytes from the keys of sequence 0 to those of `sequence`. */
static size_t sequence_bytes(const struct qt_runtime *rt, size_t sequence)
{
    return sequence * rt->config.kv_heads * head_stride(rt, rt->page) * 2;
}

/* The FP16 cache that a layer of a step writes and reads. */
static void cache_of(char **k, char **v, const struct qt_runtime *rt, const struct rt_layer *l,
                     const struct rt_batch *b)
{
    const bool scratch = rt->opt.kv4;
    const size_t at = b->prompt && !scratch ? sequence_bytes(rt, b->first) : 0;
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
                                      .kv_heads = c->kv_heads,
                                      .head_dim = c->head_dim,
                                      .q_bias = l->q_bias,
                                      .k_bias = l->k_bias,
                                      .v_bias = l->v_bias,
                                      .q_norm = l->q_norm,
                                      .k_norm = l->k_norm,
                                      .norm_all_heads = c->norm_all_heads,
                                      .norm_last = c->norm_last,
                                      .rotary = c->rotary,
                                      .q_cos = queries->cos,
                                      .q_sin = queries->sin,
                                      .k_cos = keys->cos,
                                      .k_sin = keys->sin,
                                      .interleaved = c->interleaved,
                                      .sequence = b->sequence,
                                      .position = b->position,
                                      .q_out = rt->q,
                                      .head_stride = head_stride(rt, rt->page)};
    h->q = part_of(&h->q_stride, &l->qkv, 0, rt->qkv, m);
    h->k = part_of(&h->k_stride, &l->qkv, 1, rt->qkv, m);
    h->v = part_of(&h->v_stride, &l->qkv, 2, rt->qkv, m);
    h->sequence_stride = c->kv_heads * h->head_stride;
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
    return append_kernel(p, QT_RUNTIME_HEADS, &op, err);
}

/* Appends the keys and values of prompts to the 4-bit cache. */
static int append_quantized(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l,
                            const struct rt_batch *b, struct qt_err *err)
{
    struct rt_op *op;
    int rc = append_op(&op, p, RT_APPEND, QT_RUNTIME_HEADS, err);
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
    QT_TRY(append_op(&op, p, RT_CACHED, QT_RUNTIME_ATTENTION, err));
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
        .kv_heads = c->kv_heads,
        .head_dim = c->head_dim,
        .q = rt->q,
        .k = k,
        .v = v,
        .sequence_stride = c->kv_heads * head_stride(rt, rt->page),
        .head_stride = head_stride(rt, rt->page),
        .position = b->position,
        .out = rt->attended,
        .scale = c->attn_scale,
        .softcap = c->attn_softcap,
        .sinks = l->sinks,
        .window = l->window >= rt->opt.capacity ? 0 : l->window,
        .batch_invariant = rt->opt.batch_invariant,
    };
    return append_kernel(p, QT_RUNTIME_ATTENTION, &op, err);
}

static int append_mixer(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l,
                        const struct rt_batch *b, struct qt_err *err)
{
    const size_t m = b->sequences * b->tokens;
    int rc;
    QT_TRY(append_group(p, rt, &l->qkv, rt->qkv, rt->x, m, norm_quantizes(rt, l, &l->qkv), err));
    QT_TRY(append_heads(p, rt, l, b, err));
    if (rt->opt.kv4 && b->prompt)
        QT_TRY(append_quantized(p, rt, l, b, err));
    QT_TRY(append_attention(p, rt, l, b, err));
    QT_TRY(append_group(p, rt, &l->o, rt->o, rt->attended, m, false, err));
done:
    return rc;
}

/* ---- experts -------------------------------------------------------------------------------- */

static int append_router(struct rt_program *p, struct qt_runtime *rt, const struct rt_mixture *x,
                         size_t m, struct qt_err *err)
{
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_ROUTE};
    struct rt_op *logits;
    int rc;
    QT_TRY(append_op(&logits, p, RT_DENSE_F32, QT_RUNTIME_OTHER, err));
    logits->product.linear = &x->router;
    logits->product.y = rt->router;
    logits->product.x = rt->x;
    logits->product.m = m;
    op.route = (struct qtool_decoder_route){.m = m,
                                            .experts = x->experts,
                                            .top_k = x->top_k,
                                            .logits = rt->router,
                                            .stride = x->router.n,
                                            .bias = x->bias,
                                            .select_bias = x->select_bias,
                                            .sigmoid = x->sigmoid,
                                            .normalize = x->normalize,
                                            .eps = x->eps,
                                            .scale = x->scale,
                                            .ids = rt->expert,
                                            .weights = rt->expert_weight};
    QT_TRY(append_kernel(p, QT_RUNTIME_OTHER, &op, err));
done:
    return rc;
}

/* FP16 experts, in the buffers of the dense MLP, which follows. */
static int append_half_experts(struct rt_program *p, struct qt_runtime *rt,
                               const struct rt_mixture *x, size_t m, struct qt_err *err)
{
    const size_t hidden = rt->config.hidden, width = x->width;
    struct qtool_decoder_op wide = {.kind = QTOOL_DECODER_EXPERT_PRODUCT}, narrow = wide;
    struct qtool_decoder_op act = {.kind = QTOOL_DECODER_ACTIVATION};
    int rc;
    wide.expert_product = (struct qtool_decoder_expert_product){.m = m * x->top_k,
                                                                .n = 2 * width,
                                                                .k = hidden,
                                                                .terms = 1,
                                                                .share = x->top_k,
                                                                .w = x->gate_up,
                                                                .x = rt->x,
                                                                .ids = rt->expert,
                                                                .y = rt->gate_up};
    act.activation = (struct qtool_decoder_activation){.act = rt->config.act,
                                                       .m = m * x->top_k,
                                                       .n = width,
                                                       .gate = rt->gate_up,
                                                       .up = (char *)rt->gate_up + width * 2,
                                                       .gate_stride = 2 * width,
                                                       .up_stride = 2 * width,
                                                       .out = rt->act};
    narrow.expert_product = (struct qtool_decoder_expert_product){.m = m,
                                                                  .n = hidden,
                                                                  .k = width,
                                                                  .terms = x->top_k,
                                                                  .share = 1,
                                                                  .w = x->down,
                                                                  .x = rt->act,
                                                                  .ids = rt->expert,
                                                                  .factor = rt->expert_weight,
                                                                  .y = rt->down};
    QT_TRY(append_kernel(p, QT_RUNTIME_PRODUCTS, &wide, err));
    QT_TRY(append_kernel(p, QT_RUNTIME_ACTIVATION, &act, err));
    QT_TRY(append_kernel(p, QT_RUNTIME_PRODUCTS, &narrow, err));
done:
    return rc;
}

static int append_experts(struct rt_program *p, struct qt_runtime *rt, const struct rt_mixture *x,
                          size_t m, struct qt_err *err)
{
    const struct qtool_moe_layer layer = gpu_experts_layer(&x->grouped);
    struct qtool_moe_options opt = {.dtype = QTOOL_F16,
                                    .device = rt->gpu->device,
                                    .topk = x->top_k,
                                    .same_tables = x->grouped.same_tables,
                                    .dependent_launch = !rt->opt.plain};
    struct rt_op *op;
    int rc;
    if (x->gate_up)
        return append_half_experts(p, rt, x, m, err);
    if (rt->opt.batch_invariant)
        return not_invariant("packed experts", err);
    rt_expert_act(&opt.activation, rt->config.act);
    QT_TRY(append_op(&op, p, RT_EXPERTS, QT_RUNTIME_PRODUCTS, err));
    op->experts.mixture = x;
    op->experts.y = rt->down;
    op->experts.x = rt->x;
    QT_TRY(rt->gpu->moe_plan(rt->gpu, &op->experts.plan, &layer, m, &opt, err));
    QT_TRY(gpu_workspace_need(&rt->operands, rt->gpu, op->experts.plan.workspace_bytes, err));
done:
    return rc;
}

/* ---- MLP and norms -------------------------------------------------------------------------- */

/* y = the dense MLP or the shared expert. */
static int append_dense(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l,
                        void *y, size_t m, struct qt_err *err)
{
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_ACTIVATION};
    struct qtool_decoder_activation *a = &op.activation;
    bool gated;
    int rc;
    *a = (struct qtool_decoder_activation){
        .act = rt->config.act, .m = m, .n = l->width, .out = rt->act};
    a->gate = part_of(&a->gate_stride, &l->gate_up, 0, rt->gate_up, m);
    a->gate_bias = l->gated ? l->gate_bias : l->up_bias;
    if (l->gated) {
        a->up = part_of(&a->up_stride, &l->gate_up, 1, rt->gate_up, m);
        a->up_bias = l->up_bias;
    }
    if (l->mixture.shared_gate) {
        a->token_gate = rt->router + l->mixture.experts;
        a->token_gate_stride = l->mixture.router.n;
    }
    if (l->down.input.blocks) {
        QT_TRY(need_codes(rt, &l->down.input, m, err));
        a->w4ax = &l->down.input.in; /* acts: when it is enqueued */
    }
    QT_TRY(append_gated(&gated, p, rt, l, a, err));
    if (!gated) {
        QT_TRY(append_group(p, rt, &l->gate_up, rt->gate_up, rt->x, m,
                            norm_quantizes(rt, l, &l->gate_up), err));
        QT_TRY(append_kernel(p, QT_RUNTIME_ACTIVATION, &op, err));
    }
    QT_TRY(append_group(p, rt, &l->down, y, rt->act, m, true, err));
done:
    return rc;
}

static int append_mlp(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l,
                      size_t m, struct qt_err *err)
{
    const bool mixture = l->mixture.experts > 0;
    int rc = QT_OK;
    if (mixture) {
        QT_TRY(append_router(p, rt, &l->mixture, m, err));
        QT_TRY(append_experts(p, rt, &l->mixture, m, err));
    }
    if (l->width)
        QT_TRY(append_dense(p, rt, l, mixture ? rt->shared : rt->down, m, err));
done:
    return rc;
}

/* group: of layer l, behind the norm; l may be NULL. */
static int append_norm(struct rt_program *p, struct qt_runtime *rt,
                       struct qtool_decoder_add_norm *a, size_t m, const struct rt_layer *l,
                       const struct rt_group *group, struct qt_err *err)
{
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_ADD_NORM};
    a->m = a->m ? a->m : m;
    a->step = a->step ? a->step : 1;
    a->n = rt->config.hidden;
    a->hidden = rt->hidden;
    a->out = rt->x;
    if (l && norm_quantizes(rt, l, group)) {
        int rc = need_codes(rt, &group->input, a->m, err);
        if (rc < 0)
            return rc;
        a->w4ax = &group->input.in; /* acts: when it is enqueued */
    }
    op.add_norm = *a;
    return append_kernel(p, QT_RUNTIME_NORMS, &op, err);
}

/* The norm in front of layer i, or the final norm. After the last layer only the last tokens of the
 * sequences go on. */
static void set_next_norm(struct qtool_decoder_add_norm *a, const struct qt_runtime *rt,
                          size_t layer, const struct rt_batch *b)
{
    if (layer < rt->config.layers) {
        if (!rt->config.norm_after)
            a->norm = rt->layers[layer].attn_in;
        return;
    }
    a->norm = rt->final_norm;
    if (!b->all) {
        a->m = b->sequences;
        a->first = b->tokens - 1;
        a->step = b->tokens;
    }
}

static int append_layer(struct rt_program *p, struct qt_runtime *rt, size_t i,
                        const struct rt_batch *b, struct qt_err *err)
{
    const struct rt_config *c = &rt->config;
    const struct rt_layer *l = &rt->layers[i], *next = i + 1 < c->layers ? l + 1 : NULL;
    const size_t m = b->sequences * b->tokens;
    const struct qtool_decoder_addend mixed = {rt->o, l->o_bias, l->attn_out};
    const struct qtool_decoder_addend mlp = {rt->down, l->down_bias, l->mlp_out};
    struct qtool_decoder_add_norm middle = {.add = {mixed}, .factor = c->residual_scale};
    struct qtool_decoder_add_norm end = {.add = {mlp}, .factor = c->residual_scale};
    int rc;
    QT_TRY(append_mixer(p, rt, l, b, err));
    if (c->parallel) {
        end.add[1] = mixed;
    } else {
        *(c->norm_after ? &middle.after : &middle.norm) = c->norm_after ? l->attn_in : l->mlp_in;
        QT_TRY(append_norm(p, rt, &middle, m, l, &l->gate_up, err));
    }
    QT_TRY(append_mlp(p, rt, l, m, err));
    if (l->mixture.experts && l->width) /* has neither bias nor norm */
        end.add[1] = (struct qtool_decoder_addend){.x = rt->shared};
    if (c->norm_after)
        end.after = l->mlp_in;
    set_next_norm(&end, rt, i + 1, b);
    QT_TRY(append_norm(p, rt, &end, m, next, next ? &next->qkv : NULL, err));
done:
    return rc;
}

static int append_embed(struct rt_program *p, struct qt_runtime *rt, const struct rt_batch *b,
                        struct qt_err *err)
{
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_EMBED};
    struct qtool_decoder_add_norm first = {.factor = 1};
    const size_t m = b->sequences * b->tokens;
    int rc;
    op.embed = (struct qtool_decoder_embed){.m = m,
                                            .n = rt->config.hidden,
                                            .hidden = rt->hidden,
                                            .table = rt->embed,
                                            .positions = rt->positions,
                                            .ids = b->ids,
                                            .position = b->position,
                                            .position_offset = (int)rt->config.position_offset,
                                            .factor = rt->config.embed_scale};
    QT_TRY(append_kernel(p, QT_RUNTIME_OTHER, &op, err));
    set_next_norm(&first, rt, 0, b);
    QT_TRY(append_norm(p, rt, &first, m, rt->layers, &rt->layers->qkv, err));
done:
    return rc;
}

/* The FP16 head by cuBLAS with FP32 results. */
static int append_dense_head(struct rt_program *p, struct qt_runtime *rt, float *logits,
                             const void *x, size_t m, struct qt_err *err)
{
    struct rt_op *op;
    int rc = append_op(&op, p, RT_DENSE_F32, QT_RUNTIME_HEAD, err);
    if (rc == QT_OK) {
        op->product.linear = &rt->head;
        op->product.y = logits;
        op->product.x = x;
        op->product.m = m;
    }
    return rc;
}

int rt_add_head(struct rt_program *p, struct qt_runtime *rt, float *logits, size_t row, size_t m,
                float softcap, struct qt_err *err)
{
    const struct rt_config *c = &rt->config;
    const void *x = (char *)rt->x + row * c->hidden * 2;
    const bool dense = rt->head.dense != NULL;
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_NEXT};
    int rc;
    QT_TRY(dense ? append_dense_head(p, rt, logits, x, m, err)
                 : append_product(p, rt, &rt->head, rt->head_out, x, m, QT_RUNTIME_HEAD, err));
    if (!dense || c->logit_scale != 1 || rt->head_bias || softcap > 0) {
        op.next = (struct qtool_decoder_next){.sequences = m,
                                              .vocab = c->vocab,
                                              .logits = logits,
                                              .half = dense ? NULL : rt->head_out,
                                              .bias = rt->head_bias,
                                              .factor = c->logit_scale,
                                              .softcap = softcap};
        QT_TRY(append_kernel(p, QT_RUNTIME_OTHER, &op, err));
    }
done:
    return rc;
}

int rt_add_next(struct rt_program *p, struct qt_runtime *rt, struct qt_err *err)
{
    const struct qt_sampling *how = &rt->opt.sampling;
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_NEXT};
    op.next = (struct qtool_decoder_next){.sequences = rt->opt.sequences,
                                          .vocab = rt->config.vocab,
                                          .logits = rt->logits,
                                          .factor = 1,
                                          .temperature = (float)how->temperature,
                                          .top_p = how->top_p,
                                          .top_k = how->top_k,
                                          .seed = how->seed,
                                          .ids = rt->next_ids,
                                          .position = rt->next_position,
                                          .length = rt->next_length,
                                          .fault = rt->fault};
    return append_kernel(p, QT_RUNTIME_OTHER, &op, err);
}

int rt_build(struct rt_program *out, struct qt_runtime *rt, const struct rt_batch *b,
             struct qt_err *err)
{
    int rc;
    *out = (struct rt_program){0};
    QT_TRY(append_embed(out, rt, b, err));
    for (size_t i = 0; i < rt->config.layers; i++)
        QT_TRY(append_layer(out, rt, i, b, err));
    if (!b->all)
        QT_TRY(rt_add_head(out, rt, b->logits, 0, b->sequences, rt->config.logit_softcap, err));
done:
    if (rc < 0)
        rt_program_free(out);
    return rc;
}
