/* qtool_kernels.h: plans and runs, dispatched by the kind of weight. */
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/api/dense.h"
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/mix24/mix24.h"

/* Bytes of shared memory that a thread block may have (CUDA programming guide, technical
 * specifications). */
static int smem_limit_of(int cc)
{
    return (cc == 80 || cc == 87 ? 163 : cc == 90 ? 227 : 99) << 10;
}

static int set_device(struct qtool_matmul_plan *p)
{
    struct qt_device d;
    struct qt_plan_state *state = qt_state(p);
    const int compute = p->options.compute, limit = smem_limit_of(compute);
    int rc = qt_query_device(&d, p->options.device, p->reason);
    if (rc != QTOOL_OK)
        return rc;
    if (compute && p->kind == QTOOL_MATMUL_MIX24) /* its kernels are compiled for each device */
        return qt_refuse(p, QTOOL_UNSUPPORTED, "options.compute must be 0 for MIX24");
    if (compute && compute != 80 && compute != 86 && compute != 89 && (compute != 90 || d.cc != 90))
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "options.compute is %d, the device runs kernels for 80, 86, 89%s", compute,
                         d.cc == 90 ? " and 90" : "");
    state->cc = compute == 0 ? d.cc : compute == 90 ? 90 : 80;
    state->smem_limit = compute && limit < d.smem_limit ? limit : d.smem_limit;
    state->sms = d.sms;
    return QTOOL_OK;
}

/* True if w has the kind, format and shape that were planned for. */
static bool is_planned(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    const struct qt_plan_state *state = qt_state(p);
    if (w->n != p->n || w->k != p->k || w->kind != p->kind || state->many)
        return false;
    return w->kind == QTOOL_MATMUL_MIX24
               ? w->mix24.twos + w->mix24.fours == state->units
               : (w->bits == state->bits &&
                  (w->kind != QTOOL_MATMUL_FPX || w->exp_bits == state->exp_bits) &&
                  w->group == state->group && qt_has_zeros(w) == state->zeros);
}

/* NULL, or what is wrong with w. *s is set for all kinds but MIX24. */
static const char *weight_fault(struct qt_shape *s, const struct qtool_matmul_weight *w)
{
    return w->kind == QTOOL_MATMUL_MIX24 ? qt_mix24_fault(w) : qt_shape_of(s, w);
}

static int finish(struct qtool_matmul_plan *p, int rc)
{
    qt_state(p)->ready = rc == QTOOL_OK;
    return rc;
}

/* ---- plan ----------------------------------------------------------------------------------- */

/* NULL, or why the plan cannot be one of a gated product. */
static const char *gated_fault(const struct qtool_matmul_plan *p)
{
    if (p->options.gated > QTOOL_MATMUL_GATED_GELU_TANH)
        return "options.gated is not an enum qtool_matmul_gated";
    if (p->kind == QTOOL_MATMUL_MIX24)
        return "MIX24 has no gated products";
    if (p->options.batch_invariant)
        return "gated products cannot be batch-invariant";
    if (p->n % (2 * QT_STRIP_ROWS))
        return "n of a gated product must be a multiple of 32";
    if (p->m > QT_GATED_TOKENS)
        return "a gated product has at most 64 tokens";
    return NULL;
}

static int check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    struct qt_shape s;
    p->rounded = p->rounded_exp2 = 0;
    if (qt_state(p)->sms == 0)
        return qt_refuse(p, QTOOL_UNSUPPORTED,
                         "qtool_matmul_plan refused the plan, so no config can be checked");
    if (!is_planned(p, w))
        return qt_refuse(p, QTOOL_UNSUPPORTED, "the weight is not of the planned kind and shape");
    const char *fault = weight_fault(&s, w);
    if (fault)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "%s", fault);
    if (p->options.gated && p->config.path != QTOOL_MATMUL_SKINNY &&
        p->config.path != QTOOL_MATMUL_TILE)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "gated products need the path SKINNY or TILE");
    if (p->config.path == QTOOL_MATMUL_DENSE)
        return qt_dense_check(p, w);
    return w->kind == QTOOL_MATMUL_MIX24 ? qt_mix24_check(p, w) : qt_matmul_check(p, &s);
}

int qtool_matmul_plan_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    return finish(p, check(p, w));
}

static int choose_mix24(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    const size_t packed_bytes = ceil_div(w->n, QT_STRIP_ROWS) * qt_mix24_strip_bytes(w);
    double us;
    int rc = qt_mix24_choose(p, w, packed_bytes, &us);
    if (rc != QTOOL_OK)
        return rc;
    qt_dense_prefer(p, w, packed_bytes, us);
    return p->config.path == QTOOL_MATMUL_DENSE ? check(p, w) : rc;
}

static int choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                  const struct qt_shape *s)
{
    const size_t packed_bytes = (size_t)s->strips * (size_t)s->blocks * 128 * (size_t)s->bits;
    double us;
    if (!qt_matmul_choose(p, s, &us))
        return p->options.gated
                   ? qt_refuse(p, QTOOL_UNSUPPORTED, "no kernel has gated products of this weight")
                   : qt_refuse(p, QTOOL_UNSUPPORTED,
                               "n = %zu, k = %zu does not fit into the device's shared memory",
                               w->n, w->k);
    if (!p->options.gated)
        qt_dense_prefer(p, w, packed_bytes, us);
    return check(p, w);
}

/* Sets what plans have before a kernel is chosen. */
static int begin(struct qtool_matmul_plan *out, const struct qtool_matmul_weight *w, size_t m,
                 const struct qtool_matmul_options *opt)
{
    *out = {};
    struct qt_plan_state *state = qt_state(out);
    *state = {};
    out->m = m;
    out->n = w->n;
    out->k = w->k;
    out->kind = w->kind;
    out->options = *opt;
    state->bits = w->bits;
    state->exp_bits = w->exp_bits;
    state->group = w->group;
    state->zeros = qt_has_zeros(w);
    state->units = w->mix24.twos + w->mix24.fours;
    if (opt->dtype != QTOOL_F16 && opt->dtype != QTOOL_BF16)
        return qt_refuse(out, QTOOL_UNSUPPORTED, "options.dtype must be FP16 or BF16");
    if (m == 0 || m > 1 << 24)
        return qt_refuse(out, QTOOL_UNSUPPORTED, "m must be 1..2^24");
    const char *fault = opt->gated ? gated_fault(out) : NULL;
    return fault ? qt_refuse(out, QTOOL_UNSUPPORTED, "%s", fault) : QTOOL_OK;
}

static int plan(struct qtool_matmul_plan *out, const struct qtool_matmul_weight *w, size_t m,
                const struct qtool_matmul_options *opt)
{
    struct qt_shape s;
    int rc = begin(out, w, m, opt);
    if (rc != QTOOL_OK)
        return rc;
    const char *fault = weight_fault(&s, w);
    if (fault)
        return qt_refuse(out, QTOOL_UNSUPPORTED, "%s", fault);
    rc = set_device(out);
    if (rc != QTOOL_OK)
        return rc;
    return w->kind == QTOOL_MATMUL_MIX24 ? choose_mix24(out, w) : choose(out, w, &s);
}

int qtool_matmul_plan(struct qtool_matmul_plan *out, const struct qtool_matmul_weight *w, size_t m,
                      const struct qtool_matmul_options *opt)
{
    return finish(out, plan(out, w, m, opt));
}

/* ---- run ------------------------------------------------------------------------------------ */

int qtool_matmul_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                     void *y, const void *x, void *workspace, void *stream)
{
    struct qt_shape s;
    const bool mix24 = w->kind == QTOOL_MATMUL_MIX24;
    if (!qt_state(p)->ready || !is_planned(p, w) || weight_fault(&s, w))
        return QTOOL_UNSUPPORTED;
    if (!x || !y || (size_t)x % (mix24 ? 2 : 16) || (size_t)y % 2 || (size_t)workspace % 256 ||
        (p->workspace_bytes && !workspace))
        return QTOOL_UNSUPPORTED;
    if (p->options.gated && (size_t)y % 16)
        return QTOOL_UNSUPPORTED;
    if (p->config.path == QTOOL_MATMUL_DENSE)
        return qt_dense_run(p, w, y, x, workspace, stream);
    return mix24 ? qt_mix24_run(p, w, y, x, workspace, stream)
                 : qt_matmul_run(p, &s, w, y, x, workspace, stream);
}

/* ---- several matrices ----------------------------------------------------------------------- */

/* NULL, or what is wrong with the matrices. *rows: the sum of their n; shapes: of LUT matrices. */
static const char *many_fault(size_t *rows, struct qt_shape shapes[QTOOL_MATMUL_MANY],
                              const struct qtool_matmul_weight *const *w, size_t count)
{
    *rows = 0;
    if (count < 1 || count > QTOOL_MATMUL_MANY)
        return "count must be 1..3";
    for (size_t i = 0; i < count; i++) {
        if ((w[i]->kind != QTOOL_MATMUL_MIX24 && w[i]->kind != QTOOL_MATMUL_LUT) ||
            w[i]->kind != w[0]->kind || w[i]->k != w[0]->k)
            return "several matrices must be MIX24, or LUT, and have the same k";
        const char *fault = weight_fault(&shapes[i], w[i]);
        if (fault)
            return fault;
        if (w[0]->kind == QTOOL_MATMUL_LUT &&
            (w[i]->bits != w[0]->bits || w[i]->group != w[0]->group))
            return "several LUT matrices must have the same bits and groups";
        *rows += w[i]->n;
    }
    return NULL;
}

static int plan_many(struct qtool_matmul_plan *out, const struct qtool_matmul_weight *const *w,
                     size_t count, size_t m, const struct qtool_matmul_options *opt)
{
    size_t rows;
    struct qt_shape shapes[QTOOL_MATMUL_MANY];
    const char *fault = many_fault(&rows, shapes, w, count);
    *out = {};
    if (fault)
        return qt_refuse(out, QTOOL_UNSUPPORTED, "%s", fault);
    int rc = begin(out, w[0], m, opt);
    if (rc != QTOOL_OK)
        return rc;
    out->n = rows;
    qt_state(out)->many = count;
    if (opt->batch_invariant || opt->gated)
        return qt_refuse(out, QTOOL_UNSUPPORTED,
                         "several matrices cannot be batch-invariant, nor gated");
    rc = set_device(out);
    if (rc != QTOOL_OK)
        return rc;
    if (w[0]->kind == QTOOL_MATMUL_LUT)
        return qt_skinny_plan_many(out, shapes, count);
    return m == 1 ? qt_mix24_plan_many(out, w, count)
                  : qt_refuse(out, QTOOL_UNSUPPORTED, "several MIX24 matrices take one token");
}

int qtool_matmul_plan_many(struct qtool_matmul_plan *out,
                           const struct qtool_matmul_weight *const *w, size_t count, size_t m,
                           const struct qtool_matmul_options *opt)
{
    return finish(out, plan_many(out, w, count, m, opt));
}

int qtool_matmul_run_many(const struct qtool_matmul_plan *p,
                          const struct qtool_matmul_weight *const *w, size_t count, void *const *y,
                          const void *x, void *stream)
{
    size_t rows;
    struct qt_shape shapes[QTOOL_MATMUL_MANY];
    const bool lut = p->kind == QTOOL_MATMUL_LUT;
    if (!qt_state(p)->ready || count == 0 || qt_state(p)->many != count ||
        many_fault(&rows, shapes, w, count) || rows != p->n || w[0]->k != p->k ||
        w[0]->kind != p->kind || !x || (size_t)x % (lut ? 16 : 2))
        return QTOOL_UNSUPPORTED;
    if (lut && (w[0]->bits != qt_state(p)->bits || w[0]->group != qt_state(p)->group))
        return QTOOL_UNSUPPORTED;
    for (size_t i = 0; i < count; i++)
        if (!y[i] || (size_t)y[i] % 2)
            return QTOOL_UNSUPPORTED;
    return lut ? qt_skinny_run_many(p, shapes, w, count, y, x, stream)
               : qt_mix24_run_many(p, w, count, y, x, stream);
}
