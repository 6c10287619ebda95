/* Appends an MLP or a mixture of experts to a program. */
#include "verify/runtime/program.h"

/* ---- experts -------------------------------------------------------------------------------- */

static int append_router(struct rt_program *p, struct qt_runtime *rt, const struct rt_mixture *x,
                         size_t m, struct qt_err *err)
{
    struct qtool_decoder_op op = {.kind = QTOOL_DECODER_ROUTE};
    struct rt_op *logits;
    int rc;
    QT_TRY(rt_append_op(&logits, p, RT_DENSE_F32, QT_RUNTIME_OTHER, err));
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
    QT_TRY(rt_append_kernel(p, QT_RUNTIME_OTHER, &op, err));
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
    QT_TRY(rt_append_kernel(p, QT_RUNTIME_PRODUCTS, &wide, err));
    QT_TRY(rt_append_kernel(p, QT_RUNTIME_ACTIVATION, &act, err));
    QT_TRY(rt_append_kernel(p, QT_RUNTIME_PRODUCTS, &narrow, err));
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
        return rt_not_invariant("packed experts", err);
    rt_expert_act(&opt.activation, rt->config.act);
    QT_TRY(rt_append_op(&op, p, RT_EXPERTS, QT_RUNTIME_PRODUCTS, err));
    op->experts.mixture = x;
    op->experts.y = rt->down;
    op->experts.x = rt->x;
    QT_TRY(rt->gpu->moe_plan(rt->gpu, &op->experts.plan, &layer, m, &opt, err));
    QT_TRY(gpu_workspace_need(&rt->operands, rt->gpu, op->experts.plan.workspace_bytes, err));
done:
    return rc;
}

/* ---- dense ---------------------------------------------------------------------------------- */

/* *done = true: the product of gate and up with the activation in its epilogue, to `out`. */
static int append_gated(bool *done, struct rt_program *p, struct qt_runtime *rt,
                        const struct rt_layer *l, const struct qtool_decoder_activation *a,
                        struct qt_err *err)
{
    const struct rt_linear *linear = &l->gate_up.linear[0];
    struct qtool_matmul_options opt = rt_product_options(rt);
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
    QT_TRY(rt_append_op(&op, p, RT_MATMUL, QT_RUNTIME_PRODUCTS, err));
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
    a->gate = rt_part_of(&a->gate_stride, &l->gate_up, 0, rt->gate_up, m);
    a->gate_bias = l->gated ? l->gate_bias : l->up_bias;
    if (l->gated) {
        a->up = rt_part_of(&a->up_stride, &l->gate_up, 1, rt->gate_up, m);
        a->up_bias = l->up_bias;
    }
    if (l->mixture.shared_gate) {
        a->token_gate = rt->router + l->mixture.experts;
        a->token_gate_stride = l->mixture.router.n;
    }
    if (l->down.input.blocks) {
        QT_TRY(rt_need_codes(rt, &l->down.input, m, err));
        a->w4ax = &l->down.input.in; /* acts: when it is enqueued */
    }
    QT_TRY(append_gated(&gated, p, rt, l, a, err));
    if (!gated) {
        QT_TRY(rt_append_group(p, rt, &l->gate_up, rt->gate_up, rt->x, m,
                               rt_norm_quantizes(rt, l, &l->gate_up), err));
        QT_TRY(rt_append_kernel(p, QT_RUNTIME_ACTIVATION, &op, err));
    }
    QT_TRY(rt_append_group(p, rt, &l->down, y, rt->act, m, true, err));
done:
    return rc;
}

int rt_append_mlp(struct rt_program *p, struct qt_runtime *rt, const struct rt_layer *l, size_t m,
                  struct qt_err *err)
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
