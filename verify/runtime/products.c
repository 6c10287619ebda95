/* Appends products to a program: dense ones, packed ones, and the quantization of their inputs. */
#include "verify/runtime/program.h"

int rt_append_op(struct rt_op **out, struct rt_program *p, enum rt_type type,
                 enum qt_runtime_share share, struct qt_err *err)
{
    int rc = qt_array_grow(&p->ops, &p->capacity, p->count + 1, sizeof *p->ops, err);
    if (rc < 0)
        return rc;
    *out = &p->ops[p->count++];
    **out = (struct rt_op){.type = type, .share = share};
    return QT_OK;
}

int rt_append_kernel(struct rt_program *p, enum qt_runtime_share share,
                     const struct qtool_decoder_op *kernel, struct qt_err *err)
{
    struct rt_op *op;
    int rc = rt_append_op(&op, p, RT_KERNEL, share, err);
    if (rc == QT_OK)
        op->kernel = *kernel;
    return rc;
}

int rt_not_invariant(const char *what, struct qt_err *err)
{
    return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                   "the fused runtime has no batch-invariant products of %s", what);
}

struct qtool_matmul_options rt_product_options(const struct qt_runtime *rt)
{
    return (struct qtool_matmul_options){.dtype = QTOOL_F16,
                                         .device = rt->gpu->device,
                                         .dependent_launch = !rt->opt.plain,
                                         .batch_invariant = rt->opt.batch_invariant,
                                         .dense = rt->gpu->dense,
                                         .dense_context = rt->gpu->dense_context};
}

int rt_append_product(struct rt_program *p, struct qt_runtime *rt, const struct rt_linear *linear,
                      void *y, const void *x, size_t m, enum qt_runtime_share share,
                      struct qt_err *err)
{
    struct qt_gpu *gpu = rt->gpu;
    const struct qtool_matmul_options opt = rt_product_options(rt);
    struct rt_op *op;
    int rc;
    QT_TRY(rt_append_op(&op, p, linear->dense ? RT_DENSE : RT_MATMUL, share, err));
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

int rt_need_codes(struct qt_runtime *rt, const struct gpu_w4ax_input *in, size_t m,
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
    int rc = rt_append_op(&op, p, RT_QUANTIZE, QT_RUNTIME_PRODUCTS, err);
    if (rc < 0)
        return rc;
    op->quantize.input = in;
    op->quantize.x = x;
    op->quantize.m = m;
    return rt_need_codes(rt, in, m, err);
}

bool rt_norm_quantizes(const struct qt_runtime *rt, const struct rt_layer *l,
                       const struct rt_group *g)
{
    const bool first = g == &l->qkv || (g == &l->gate_up && !l->mixture.experts);
    return g->input.blocks && first && !rt->config.norm_after &&
           (!rt->config.parallel || l->mlp_in.weight);
}

static int append_w4ax(struct rt_program *p, struct qt_runtime *rt, const struct rt_linear *linear,
                       void *y, size_t m, struct qt_err *err)
{
    const struct qtool_w4ax_options opt = {
        .output = QTOOL_W4AX_F16, .device = rt->gpu->device, .dependent_launch = !rt->opt.plain};
    struct rt_op *op;
    int rc;
    if (rt->opt.batch_invariant)
        return rt_not_invariant("w4ax linears", err);
    QT_TRY(rt_append_op(&op, p, RT_W4AX, QT_RUNTIME_PRODUCTS, err));
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
    const struct qtool_matmul_options opt = rt_product_options(rt);
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
    QT_TRY(rt_append_op(&op, p, RT_MANY, QT_RUNTIME_PRODUCTS, err));
    op->many.group = g;
    op->many.y = y;
    op->many.x = x;
    op->many.plan = plan;
    *all = true;
done:
    return rc;
}

int rt_append_group(struct rt_program *p, struct qt_runtime *rt, const struct rt_group *g, void *y,
                    const void *x, size_t m, bool quantized, struct qt_err *err)
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
                   : rt_append_product(p, rt, &g->linear[i], at, x, m, QT_RUNTIME_PRODUCTS, err));
        at += m * g->linear[i].n * 2;
    }
done:
    return rc;
}

const void *rt_part_of(size_t *stride, const struct rt_group *g, size_t part, const void *y,
                       size_t m)
{
    const char *at = y;
    for (size_t i = 0; i < g->part[part].linear; i++)
        at += m * g->linear[i].n * 2;
    *stride = g->linear[g->part[part].linear].n;
    return at + g->part[part].first * 2;
}
