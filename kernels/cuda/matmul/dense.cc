/* Very many tokens: weights are dequantized once, and the caller's dense product does the rest.
 * Some rows at a time, which bounds the workspace and is no faster (docs/kernels_tried.md). */
#include "kernels/cuda/common/plan.h"

/* A part has a multiple of ALIGN rows, as tiles of dense products have. */
enum { PART_BYTES = 256 << 20, ALIGN = 256 };

static size_t part_rows(const struct qtool_matmul_plan *p)
{
    const size_t rows = round_up(ceil_div(p->n, (size_t)p->config.parts), ALIGN);
    return rows < p->n ? rows : p->n;
}

void qt_dense_choose(struct qtool_matmul_plan *p)
{
    p->config = (struct qtool_matmul_config){};
    p->config.path = QTOOL_MATMUL_DENSE;
    p->config.parts = (int)ceil_div(p->n * p->k * 2, PART_BYTES);
}

/*
 * At the speeds seen on an H200: memory 4.2 TB/s; products 705 TFLOP/s in large matrices, of a GPU
 * at its power limit (docs/kernels.md). Dequantized weights are written faster than the 3 TB/s that
 * they count, but tiles are faster than their model too (docs/kernels_tried.md). Other kernels were
 * timed in products too short for that limit, at which tiles have 0.95 of the rate of dense
 * products. Models of other kernels are of an H200 too, so for devices whose tensor cores are used
 * by mma.sync alone products count as 1.25 times as fast as the mma tile kernel's there (340
 * TFLOP/s): an estimate, not measured on such a device.
 *
 * mix24 is dequantized at 3.3 TB/s, and counts 2 us more than others; with outliers it counts 3 us
 * and a tenth of the writing more than it takes: tiles of up to 1536 tokens are faster than their
 * model, by which dense products would take up to 1.16 of the time (docs/kernels_tried.md).
 */
bool qt_dense_is_faster(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                        size_t packed_bytes, double us)
{
    const double n = (double)p->n, k = (double)p->k, m = (double)p->m;
    const double read = 2 * n * k / 4.2e6, multiply = 2 * m * n * k / (p->cc == 90 ? 705e6 : 425e6);
    const bool mix24 = p->kind == QTOOL_MATMUL_MIX24, outliers = mix24 && w->mix24.csr_ptr;
    const double write = 2 * n * k / (outliers ? 2.9e6 : mix24 ? 3.3e6 : 3e6);
    const double start = outliers ? 11 : mix24 ? 10 : 8;
    const double limited = p->cc == 90 ? multiply / 0.95 : 0;
    const double dense =
        start + (double)packed_bytes / 4.2e6 + write + (read > multiply ? read : multiply);
    return dense < (us > limited ? us : limited);
}

const char *qt_dense_fault(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    if (!p->options.dense)
        return "options.dense is not set";
    if (p->options.dtype == QTOOL_F16 && w->scale_exp2 < 0)
        return "weights are too small for FP16";
    /* Of mix24 it is above 0 mostly, as its stored scales are small. */
    if (p->options.dtype == QTOOL_F16 && w->scale_exp2 > 0 && w->kind != QTOOL_MATMUL_MIX24)
        return "weights are too large for FP16";
    return NULL;
}

int qt_dense_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                   const void *kernel)
{
    const char *fault = qt_dense_fault(p, w);
    if (fault)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "%s", fault);
    if (p->config.parts < 1)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "a dense product in %d parts", p->config.parts);
    p->kernel = kernel;
    p->rounded = 1;
    p->workspace_bytes = QTOOL_WORKSPACE_ZEROED + round_up(part_rows(p) * p->k * 2, 256);
    return QTOOL_OK;
}

int qt_dense_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w, void *y,
                 const void *x, void *workspace, void *stream)
{
    char *dense = (char *)workspace + QTOOL_WORKSPACE_ZEROED;
    const size_t rows = part_rows(p);
    struct qtool_matmul_weight part;
    if (qt_dense_fault(p, w)) /* of another weight than the planned one */
        return QTOOL_UNSUPPORTED;
    for (size_t n0 = 0; n0 < p->n; n0 += rows) {
        const size_t n = p->n - n0 < rows ? p->n - n0 : rows;
        int rc = qtool_matmul_slice(&part, w, n0, n, 0, p->k);
        if (rc == QTOOL_OK)
            rc = qtool_matmul_dequantize(&part, dense, p->options.dtype, stream);
        if (rc != QTOOL_OK)
            return rc;
        if (p->options.dense(p->options.dense_context, (char *)y + n0 * 2, p->n, x, dense, p->m, n,
                             p->k, p->options.dtype, stream) != 0)
            return QTOOL_FAILED;
    }
    return QTOOL_OK;
}
