/* Products of many tokens: weights are dequantized into the workspace, then multiplied by the
 * caller's dense product. Rows are dequantized in parts of about 256 MiB to bound the workspace;
 * that does not make the product faster (docs/experiments, E071). */
#include "kernels/cuda/api/dense.h"

/* A part has a multiple of ALIGN rows, as tiles of dense products do. */
enum { PART_BYTES = 256 << 20, ALIGN = 256 };

static size_t part_rows(const struct qtool_matmul_plan *p)
{
    const size_t rows = round_up(ceil_div(p->n, (size_t)p->config.dense.parts), ALIGN);
    return rows < p->n ? rows : p->n;
}

/* NULL, or why the weight has no dense product. */
static const char *dense_fault(const struct qtool_matmul_plan *p,
                               const struct qtool_matmul_weight *w)
{
    if (!p->options.dense)
        return "the path DENSE needs options.dense";
    if (p->options.dtype == QTOOL_F16 && w->scale_exp2 < 0)
        return "weights with scale_exp2 below 0 are too small for the path DENSE in FP16";
    /* MIX24 mostly has scale_exp2 above 0, as its stored scales are small. */
    if (p->options.dtype == QTOOL_F16 && w->scale_exp2 > 0 && w->kind != QTOOL_MATMUL_MIX24)
        return "weights with scale_exp2 above 0 are too large for the path DENSE in FP16";
    return NULL;
}

/*
 * True if dequantize + dense GEMM beats `us` microseconds. The rates are those of an H200: memory
 * 4.2 TB/s; products 705 TFLOP/s for large matrices at the power limit (docs/experiments, E070).
 * Dequantized weights are written faster than the 3 TB/s assumed here, but tile kernels are also
 * faster than their model (docs/experiments, E072). Other kernels were timed in products too short
 * for the power limit, where tiles reach 0.95 of the rate of dense products. The models of other
 * kernels are for an H200 too. On devices whose tensor cores are only used through mma.sync, dense
 * products are therefore assumed to be 1.25 times as fast as the mma tile kernel on an H200 (340
 * TFLOP/s): an estimate, not measured on such a device.
 *
 * mix24 is dequantized at 3.3 TB/s, and 2 us are added. With outliers 3 us and a tenth of the time
 * of writing are added to what was measured: tiles of up to 1536 tokens are faster than their
 * model, which would choose dense products that take up to 1.16 of the time
 * (docs/experiments, E073).
 */
static bool is_faster(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                      size_t packed_bytes, double us)
{
    const bool hopper = qt_state(p)->cc == 90;
    const double n = (double)p->n, k = (double)p->k, m = (double)p->m;
    const double read = 2 * n * k / 4.2e6, multiply = 2 * m * n * k / (hopper ? 705e6 : 425e6);
    const bool mix24 = p->kind == QTOOL_MATMUL_MIX24, outliers = mix24 && w->mix24.csr_ptr;
    const double write = 2 * n * k / (outliers ? 2.9e6 : mix24 ? 3.3e6 : 3e6);
    const double start = outliers ? 11 : mix24 ? 10 : 8;
    const double limited = hopper ? multiply / 0.95 : 0;
    const double dense =
        start + (double)packed_bytes / 4.2e6 + write + (read > multiply ? read : multiply);
    return dense < (us > limited ? us : limited);
}

void qt_dense_prefer(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                     size_t packed_bytes, double us)
{
    if (dense_fault(p, w) || p->options.batch_invariant || p->m <= 32 ||
        !is_faster(p, w, packed_bytes, us))
        return;
    p->config = {};
    p->config.path = QTOOL_MATMUL_DENSE;
    p->config.dense.parts = (int)ceil_div(p->n * p->k * 2, PART_BYTES);
}

int qt_dense_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    const char *fault = dense_fault(p, w);
    if (fault)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "%s", fault);
    if (p->config.dense.parts < 1)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "config.dense.parts is %d, must be at least 1",
                         p->config.dense.parts);
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
    if (dense_fault(p, w)) /* possible for another weight than the planned one */
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
