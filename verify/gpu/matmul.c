/* The tensors of qtool_kernels.h through their kernels, each product against truth.c. */
#include "verify/gpu/device.h"

#include <stdio.h>
#include <string.h>

/* Descending: the widest product is what others are compared with in batch_invariant mode. 33 is
 * one more than the kernels for few tokens take at once. */
static const size_t tokens[] = {TRUTH_TOKENS, 33, 16, 8, 1};
enum { TOKEN_COUNTS = sizeof tokens / sizeof *tokens };

/* The tensor that is being checked. */
struct check {
    struct device *d;
    struct qt_device_tensor *out;
    const struct qt_packed *packed;
    struct gpu_copies copies;
    struct truth truth;
};

/* ---- one product ---------------------------------------------------------------------------- */

struct product {
    const struct truth_set *set;
    size_t m;
    struct qtool_matmul_plan plan;
    char name[64]; /* "M=16 random f16" */
};

/* One run; the outputs to y[m][n]. X is between NaNs as well: reading beyond it shows. */
static int guarded_run(struct check *c, uint16_t *y, const struct product *p, struct qt_err *err)
{
    struct device *d = c->d;
    size_t count = p->m * c->truth.n, bytes = p->plan.workspace_bytes;
    char *dx, *dy, *workspace;
    int rc;
    QT_TRY(device_poison(&dx, d, &d->x, p->m * c->truth.k * 2, err));
    QT_TRY(d->gpu->upload(d->gpu, dx, p->set->x, p->m * c->truth.k * 2, err));
    QT_TRY(device_poison(&dy, d, &d->y, count * 2, err));
    QT_TRY(device_workspace(&workspace, d, bytes, err));
    QT_TRY(d->gpu->run(d->gpu, &p->plan, &c->copies.weight[0], dy, dx, workspace, err));
    QT_TRY(d->gpu->download(d->gpu, y, dy, count * 2, err));
    QT_TRY(device_check_guards(d, c->out, p->name, "output", dy, count * 2, err));
    QT_TRY(device_check_workspace(d, c->out, p->name, workspace, bytes, err));
done:
    return rc;
}

/*
 * The relative error may exceed that of the true values rounded to the type by SLACK (FP16: 2.07e-4
 * + 2.3e-5 = 2.3e-4). A single value may be off by half a unit in its last place and SPREAD of what
 * the token's values are like.
 */
static const double SLACK[] = {2.3e-5, 8 * 2.3e-5};
static const double SPREAD[] = {2e-4, 8 * 2e-4};
static const double HALF_ULP[] = {0x1p-11, 0x1p-8};
static const double HALF_TINY = 0x1p-25; /* of FP16 subnormals */

/* Where a plan rounds weights, of these. */
static const float *expected_of(const struct product *p)
{
    return p->plan.rounded ? p->set->rounded : p->set->y;
}

struct difference {
    double error2, rounding2, truth2;
    size_t wrong, token, row; /* values that are off; the first */
};

static void compare_token(struct difference *out, const struct product *p, const uint16_t *y,
                          size_t token, size_t n)
{
    const struct truth_set *set = p->set;
    unsigned d = set->dtype;
    for (size_t row = 0; row < n; row++) {
        float truth = expected_of(p)[token * n + row];
        double got = (double)truth_value(y[token * n + row], set->dtype),
               error = got - (double)truth;
        double rounding = (double)(truth_value(truth_round(truth, set->dtype), set->dtype) - truth);
        double limit = HALF_ULP[d] * fabs((double)truth) + SPREAD[d] * set->rms[token] + HALF_TINY;
        out->error2 += error * error;
        out->rounding2 += rounding * rounding;
        out->truth2 += (double)truth * (double)truth;
        if (!(fabs(error) <= limit) && out->wrong++ == 0) { /* NaN is off */
            out->token = token;
            out->row = row;
        }
    }
}

static void compare(struct check *c, const struct product *p, const uint16_t *y)
{
    const struct truth_set *set = p->set;
    struct difference diff = {0};
    for (size_t t = 0; t < p->m; t++)
        compare_token(&diff, p, y, t, c->truth.n);
    double norm = diff.truth2 > 0 ? sqrt(diff.truth2) : 1;
    double error = sqrt(diff.error2) / norm, rounding = sqrt(diff.rounding2) / norm;
    size_t at = diff.token * c->truth.n + diff.row;
    double got = (double)truth_value(y[at], set->dtype);
    char text[32];
    if (diff.wrong)
        device_fault(c->out, "%s: %zu of %zu values off; token %zu, row %zu is %s, not %g", p->name,
                     diff.wrong, p->m * c->truth.n, diff.token, diff.row,
                     device_value_text(text, got), (double)expected_of(p)[at]);
    else if (!(error <= rounding + SLACK[set->dtype]))
        device_fault(c->out, "%s: relative error %.3g, rounding alone is %.3g", p->name, error,
                     rounding);
    device_worst(&c->out->error[set->dtype], error);
}

/* Plans, runs twice, compares. *y: the outputs, in d->first. */
static int check_product(struct check *c, struct product *p, const struct truth_set *set, size_t m,
                         bool invariant, struct qt_err *err)
{
    const struct qtool_matmul_options opt = {
        .dtype = set->dtype, .device = c->d->gpu->device, .batch_invariant = invariant};
    struct device *d = c->d;
    size_t count = m * c->truth.n;
    int rc;
    *p = (struct product){.set = set, .m = m};
    snprintf(p->name, sizeof p->name, "M=%zu %s%s", m, set->name,
             invariant ? " batch-invariant" : "");
    QT_TRY(qt_array_grow(&d->first, &d->first_capacity, count, sizeof *d->first, err));
    QT_TRY(qt_array_grow(&d->again, &d->again_capacity, count, sizeof *d->again, err));
    QT_TRY(d->gpu->plan(d->gpu, &p->plan, &c->copies.weight[0], m, &opt, err));
    QT_TRY(guarded_run(c, d->first, p, err));
    QT_TRY(guarded_run(c, d->again, p, err));
    c->out->runs++;
    if (memcmp(d->first, d->again, count * 2) != 0)
        device_fault(c->out, "%s: two runs differ", p->name);
    compare(c, p, d->first);
done:
    return rc;
}

/* ---- one tensor ----------------------------------------------------------------------------- */

static int check_products(struct check *c, struct qt_err *err)
{
    struct product p;
    for (size_t s = 0; s < TRUTH_SETS; s++)
        for (size_t i = 0; i < TOKEN_COUNTS; i++) {
            int rc = check_product(c, &p, &c->truth.set[s], tokens[i], false, err);
            if (rc < 0)
                return rc;
        }
    return QT_OK;
}

/* Rows of the outputs must have the same bits for every number of tokens. */
static int check_invariance(struct check *c, const struct truth_set *set, struct qt_err *err)
{
    struct device *d = c->d;
    struct product p;
    int rc;
    QT_TRY(
        qt_array_grow(&d->wide, &d->wide_capacity, tokens[0] * c->truth.n, sizeof *d->wide, err));
    for (size_t i = 0; i < TOKEN_COUNTS; i++) {
        size_t bytes = tokens[i] * c->truth.n * 2;
        QT_TRY(check_product(c, &p, set, tokens[i], true, err));
        if (i == 0)
            memcpy(d->wide, d->first, bytes);
        else if (memcmp(d->wide, d->first, bytes) != 0)
            device_fault(c->out, "%s: other bits than with M=%zu", p.name, tokens[0]);
    }
done:
    return rc;
}

/* *out: what plans round weights in units of, 0 if none does. */
static int rounding_unit(double *out, struct check *c, struct qt_err *err)
{
    const struct qtool_matmul_weight *w = &c->copies.weight[0];
    int rc = QT_OK;
    *out = 0;
    for (size_t i = 0; i < 2 * TOKEN_COUNTS; i++) {
        const struct qtool_matmul_options opt = {.dtype = i % 2 ? QTOOL_BF16 : QTOOL_F16,
                                                 .device = c->d->gpu->device};
        struct qtool_matmul_plan plan;
        QT_TRY(c->d->gpu->plan(c->d->gpu, &plan, w, tokens[i / 2], &opt, err));
        if (plan.rounded)
            *out = ldexp(1, w->scale_exp2 + plan.rounded_exp2);
    }
done:
    return rc;
}

static int make_truth(struct check *c, uint64_t seed, struct qt_err *err)
{
    static const char *const names[] = {"FP16", "BF16"};
    struct device *d = c->d;
    size_t bytes = c->packed->n * c->packed->k * 2;
    void *dequantized[2];
    double unit;
    int rc;
    QT_TRY(rounding_unit(&unit, c, err));
    for (int i = 0; i < 2; i++) {
        QT_TRY(gpu_buffer_need(&d->dequantized[i], d->gpu, bytes, err));
        dequantized[i] = d->dequantized[i].data;
        QT_TRY(d->gpu->fill(d->gpu, dequantized[i], DEVICE_POISON, bytes, err));
        QT_TRY(d->gpu->dequantize(d->gpu, &c->copies.weight[0], dequantized[i],
                                  i ? QTOOL_BF16 : QTOOL_F16, err));
    }
    QT_TRY(truth_new(&c->truth, c->packed, seed, unit, d->cpu, d->gpu, dequantized, err));
    for (int i = 0; i < 2; i++)
        if (c->truth.wrong[i])
            device_fault(c->out, "dequantized to %s: %zu of %zu weights differ", names[i],
                         c->truth.wrong[i], bytes / 2);
done:
    return rc;
}

/* ---- times ---------------------------------------------------------------------------------- */

static int measure(struct check *c, struct qt_err *err)
{
    const struct qtool_matmul_options opt = {.dtype = QTOOL_F16, .device = c->d->gpu->device};
    struct device *d = c->d;
    struct qtool_matmul_plan plan;
    int rc;
    QT_TRY(device_timing_room(d, c->packed->n, c->packed->k, err));
    for (size_t i = 0; i < QT_DEVICE_TIMES; i++) {
        QT_TRY(d->gpu->plan(d->gpu, &plan, &c->copies.weight[0], qt_device_times[i], &opt, err));
        QT_TRY(
            gpu_time_plan(&c->out->us[i], NULL, d->gpu, &c->copies, &plan, NULL, &d->timing, err));
    }
    QT_TRY(device_cublas_times(c->out->cublas_us, d, c->packed->n, c->packed->k, err));
done:
    return rc;
}

/* ---- the whole ------------------------------------------------------------------------------ */

int device_matmul(struct qt_device_tensor *t, struct device *d, const struct qt_packed *p,
                  uint64_t seed, struct qt_err *err)
{
    struct check c = {.d = d, .out = t, .packed = p};
    int rc;
    QT_TRY(gpu_copies_new(&c.copies, d->gpu, p, err));
    QT_TRY(make_truth(&c, seed, err));
    QT_TRY(check_products(&c, err));
    QT_TRY(check_invariance(&c, &c.truth.set[0], err));
    QT_TRY(measure(&c, err));
    QT_TRY(device_check_sections(d, t, p, &c.copies, err));
done:
    truth_free(&c.truth);
    gpu_copies_free(&c.copies, d->gpu);
    return rc;
}
