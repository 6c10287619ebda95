/* Enqueues the kernels of a program. */
#include "verify/runtime/runtime.h"

/* cuBLAS chooses its kernel by the number of rows. Batch-invariant products have the same number
 * always; the rows behind the last are not used. */
static int enqueue_dense(struct qt_runtime *rt, const struct rt_op *op, struct qt_err *err)
{
    const struct rt_linear *l = op->product.linear;
    const bool wide = op->type == RT_DENSE_F32;
    const size_t rows = rt->opt.batch_invariant ? RT_INVARIANT_ROWS : op->product.m;
    struct qt_gpu *gpu = rt->gpu;
    int rc = QT_OK;
    for (size_t at = 0; rc == QT_OK && at < op->product.m; at += rows) {
        char *y = (char *)op->product.y + at * l->n * (wide ? 4 : 2);
        const char *x = (const char *)op->product.x + at * l->k * 2;
        rc = wide ? gpu->gemm_f32(gpu, (float *)(void *)y, x, l->dense, rows, l->n, l->k, err)
                  : gpu->gemm(gpu, y, x, l->dense, rows, l->n, l->k, err);
    }
    return rc;
}

static int enqueue_many(struct qt_runtime *rt, const struct rt_op *op, struct qt_err *err)
{
    const struct rt_group *g = op->many.group;
    const struct qtool_matmul_weight *w[RT_PARTS];
    void *y[RT_PARTS];
    char *at = op->many.y;
    for (size_t i = 0; i < g->linears; i++) {
        w[i] = &g->linear[i].weight;
        y[i] = at;
        at += op->many.plan.m * g->linear[i].n * 2;
    }
    return rt->gpu->run_many(rt->gpu, &op->many.plan, w, g->linears, y, op->many.x, err);
}

static int enqueue(struct qt_runtime *rt, const struct rt_op *op, bool dependent,
                   struct qt_err *err)
{
    struct qt_gpu *gpu = rt->gpu;
    void *workspace = rt->operands.workspace.data;
    const struct qtool_w4ax_acts acts = {rt->operands.codes.data, rt->operands.scale.data,
                                         rt->operands.sum.data};
    struct qtool_decoder_op kernel;
    switch (op->type) {
    case RT_KERNEL:
        kernel = op->kernel;
        if (kernel.kind == QTOOL_DECODER_ADD_NORM)
            kernel.add_norm.acts = acts;
        if (kernel.kind == QTOOL_DECODER_ACTIVATION)
            kernel.activation.acts = acts;
        return gpu->decode(gpu, &kernel, dependent, err);
    case RT_MATMUL:
        return gpu->run(gpu, &op->product.plan, &op->product.linear->weight, op->product.y,
                        op->product.x, workspace, err);
    case RT_MANY:
        return enqueue_many(rt, op, err);
    case RT_QUANTIZE:
        return gpu->w4ax_quantize(gpu, &acts, &op->quantize.input->in, op->quantize.x,
                                  op->quantize.m, QTOOL_F16, err);
    case RT_W4AX:
        return gpu->w4ax_run(gpu, &op->w4ax.plan, &op->w4ax.linear->w4ax, &acts, op->w4ax.y,
                             workspace, err);
    case RT_DENSE:
    case RT_DENSE_F32:
        return enqueue_dense(rt, op, err);
    case RT_EXPERTS:
        return gpu->moe_run(gpu, &op->experts.plan, op->experts.mixture->grouped.table,
                            op->experts.y, op->experts.x, rt->expert, rt->expert_weight, workspace,
                            err);
    case RT_APPEND:
        return gpu->kv_append(gpu, op->append.cache, op->append.k, op->append.v,
                              op->append.sequence, op->append.position, op->append.tokens,
                              QTOOL_F16, dependent, err);
    default:
        return gpu->kv_run(gpu, &op->cached.plan, op->cached.cache, op->cached.out, op->cached.q,
                           rt->next_length, workspace, err);
    }
}

/* The first kernel of a step waits for all of the step before: attention reads `next_length` before
 * its predecessors have finished. */
int rt_enqueue(struct qt_runtime *rt, const struct rt_program *p, int share, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; rc == QT_OK && i < p->count; i++)
        if (share >= QT_RUNTIME_SHARES || p->ops[i].share == (enum qt_runtime_share)share)
            rc = enqueue(rt, &p->ops[i], i > 0 && !rt->opt.plain, err);
    return rc;
}
