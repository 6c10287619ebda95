/* Very many tokens: weights are dequantized once, and the caller's dense product does the rest. */
#include "kernels/cuda/plan.h"

static size_t dense_bytes(const struct qt_matmul_plan *p)
{
    return round_up(p->n * p->k * 2, 256);
}

/* At the speeds seen on an H200: memory 4.2 TB/s, writing dequantized weights 3, those of mix24,
 * whose channels are in another order, 2.5, and outliers 6 us more; products 705 TFLOP/s in large
 * matrices, of a GPU at its power limit (docs/kernels.md). Models of other kernels are of an H200
 * too, so for devices whose tensor cores are used by mma.sync alone products count as 1.25 times as
 * fast as the mma tile kernel's there (340 TFLOP/s): an estimate, not measured on such a device. */
double qt_dense_us(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w,
                   size_t packed_bytes)
{
    double n = (double)p->n, k = (double)p->k, m = (double)p->m;
    double read = 2 * n * k / 4.2e6, multiply = 2 * m * n * k / (p->cc == 90 ? 705e6 : 425e6);
    double write = 2 * n * k / (p->kind == QT_MATMUL_MIX24 ? 2.5e6 : 3e6);
    double start = p->kind == QT_MATMUL_MIX24 && w->mix24.csr_ptr ? 14 : 8;
    return start + (double)packed_bytes / 4.2e6 + write + (read > multiply ? read : multiply);
}

const char *qt_dense_fault(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w)
{
    if (!p->options.dense)
        return "options.dense is not set";
    if (p->options.dtype == QT_MATMUL_F16 && w->scale_exp2 < 0)
        return "weights are too small for FP16";
    return NULL;
}

int qt_dense_check(struct qt_matmul_plan *p, const struct qt_matmul_weight *w, const void *kernel)
{
    const char *fault = qt_dense_fault(p, w);
    if (fault)
        return qt_refuse(p, QT_MATMUL_UNSUPPORTED, "%s", fault);
    p->kernel = kernel;
    p->rounded = 1;
    p->workspace_bytes = QT_MATMUL_WORKSPACE_ZEROED + dense_bytes(p);
    return QT_MATMUL_OK;
}

int qt_dense_run(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w, void *y,
                 const void *x, void *workspace, void *stream)
{
    void *dense = (char *)workspace + QT_MATMUL_WORKSPACE_ZEROED;
    if (qt_dense_fault(p, w)) /* of another weight than the planned one */
        return QT_MATMUL_UNSUPPORTED;
    int rc = qt_matmul_dequantize(w, dense, p->options.dtype, stream);
    if (rc != QT_MATMUL_OK)
        return rc;
    return p->options.dense(p->options.dense_context, y, x, dense, p->m, p->n, p->k,
                            p->options.dtype, stream) == 0
               ? QT_MATMUL_OK
               : QT_MATMUL_FAILED;
}
