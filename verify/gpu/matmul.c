/* verify --device: checks the kernels of qtool_kernels.h against the products of reference.c. */
#include "verify/gpu/device.h"

#include <stdio.h>
#include <string.h>

/* Descending: with batch_invariant, the first product is the reference of the others. 33 is one
 * more than the kernels for few tokens process at once. */
static const size_t tokens[] = {REFERENCE_TOKENS, 33, 16, 8, 1};
enum { TOKEN_COUNTS = sizeof tokens / sizeof *tokens };

/* The tensor that is being checked. */
struct check {
    struct device *d;
    struct qt_device_tensor *out;
    const struct qt_packed *packed;
    struct gpu_copies copies;
    struct reference reference;
};

/* ---- one product ---------------------------------------------------------------------------- */

struct product {
    const struct reference_set *set;
    size_t m;
    struct qtool_matmul_plan plan;
    char name[64]; /* "M=16 random f16" */
};

/* Runs the product once and copies the output to y[m][n]. X lies between NaNs too, so that an
 * output that depends on values outside X is NaN. */
static int guarded_run(struct check *c, uint16_t *y, const struct product *p, struct qt_err *err)
{
    struct device *d = c->d;
    size_t count = p->m * c->reference.n, bytes = p->plan.workspace_bytes;
    char *dx, *dy, *workspace;
    int rc;
    QT_TRY(device_poison(&dx, d, &d->x, p->m * c->reference.k * 2, err));
    QT_TRY(d->gpu->upload(d->gpu, dx, p->set->x, p->m * c->reference.k * 2, err));
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
 * Limits, by output type. The relative error of a product may exceed that of the rounded reference
 * by SLACK (FP16: 2.07e-4 + 2.3e-5 = 2.3e-4). The error of one value may be half a unit in the last
 * place plus SPREAD times the RMS of the token's outputs.
 */
static const double SLACK[] = {2.3e-5, 8 * 2.3e-5};
static const double SPREAD[] = {2e-4, 8 * 2e-4};
static const double HALF_ULP[] = {0x1p-11, 0x1p-8};
static const double HALF_TINY = 0x1p-25; /* half the spacing of FP16 subnormals */

/* The reference products; with rounded weights if the plan rounds weights. */
static const float *expected_of(const struct product *p)
{
    return p->plan.rounded ? p->set->rounded : p->set->y;
}

struct difference {
    double error2, rounding2, reference2;
    size_t wrong, token, row; /* number of wrong values; position of the first */
};

static void compare_token(struct difference *out, const struct product *p, const uint16_t *y,
                          size_t token, size_t n)
{
    const struct reference_set *set = p->set;
    unsigned d = set->dtype;
    for (size_t row = 0; row < n; row++) {
        float expected = expected_of(p)[token * n + row];
        double got = (double)gpu_to_f32(y[token * n + row], set->dtype),
               error = got - (double)expected;
        double rounding =
            (double)(gpu_to_f32(gpu_from_f32(expected, set->dtype), set->dtype) - expected);
        double limit =
            HALF_ULP[d] * fabs((double)expected) + SPREAD[d] * set->rms[token] + HALF_TINY;
        out->error2 += error * error;
        out->rounding2 += rounding * rounding;
        out->reference2 += (double)expected * (double)expected;
        if (!(fabs(error) <= limit) && out->wrong++ == 0) { /* also if NaN */
            out->token = token;
            out->row = row;
        }
    }
}

static void compare(struct check *c, const struct product *p, const uint16_t *y)
{
    const struct reference_set *set = p->set;
    struct difference diff = {0};
    for (size_t t = 0; t < p->m; t++)
        compare_token(&diff, p, y, t, c->reference.n);
    double norm = diff.reference2 > 0 ? sqrt(diff.reference2) : 1;
    double error = sqrt(diff.error2) / norm, rounding = sqrt(diff.rounding2) / norm;
    size_t at = diff.token * c->reference.n + diff.row;
    double got = (double)gpu_to_f32(y[at], set->dtype);
    char text[32];
    if (diff.wrong)
        device_fault(c->out,
                     "%s: %zu of %zu values wrong; first at token %zu, row %zu: %s, expected %g",
                     p->name, diff.wrong, p->m * c->reference.n, diff.token, diff.row,
                     device_value_text(text, got), (double)expected_of(p)[at]);
    else if (!(error <= rounding + SLACK[set->dtype]))
        device_fault(c->out, "%s: relative error %.3g is too large (rounding alone: %.3g)", p->name,
                     error, rounding);
    device_max_error(&c->out->error[set->dtype], error);
}

/* Plans a product, runs it twice and compares. Leaves *p filled and the output in d->first. */
static int check_product(struct check *c, struct product *p, const struct reference_set *set,
                         size_t m, bool invariant, struct qt_err *err)
{
    const struct qtool_matmul_options opt = {
        .dtype = set->dtype, .device = c->d->gpu->device, .batch_invariant = invariant};
    struct device *d = c->d;
    size_t count = m * c->reference.n;
    int rc;
    *p = (struct product){.set = set, .m = m};
    snprintf(p->name, sizeof p->name, "M=%zu %s%s", m, set->name,
             invariant ? " batch-invariant" : "");
    QT_TRY(qt_array_grow(&d->first, &d->first_capacity, count, sizeof *d->first, err));
    QT_TRY(qt_array_grow(&d->second, &d->second_capacity, count, sizeof *d->second, err));
    QT_TRY(d->gpu->plan(d->gpu, &p->plan, &c->copies.weight[0], m, &opt, err));
    QT_TRY(guarded_run(c, d->first, p, err));
    QT_TRY(guarded_run(c, d->second, p, err));
    c->out->runs++;
    if (memcmp(d->first, d->second, count * 2) != 0)
        device_fault(c->out, "%s: two runs gave different bits", p->name);
    compare(c, p, d->first);
done:
    return rc;
}

/* ---- one tensor ----------------------------------------------------------------------------- */

static int check_products(struct check *c, struct qt_err *err)
{
    struct product p;
    for (size_t s = 0; s < REFERENCE_SETS; s++)
        for (size_t i = 0; i < TOKEN_COUNTS; i++) {
            int rc = check_product(c, &p, &c->reference.set[s], tokens[i], false, err);
            if (rc < 0)
                return rc;
        }
    return QT_OK;
}

/* With batch_invariant, a token's outputs must have the same bits for every number of tokens. */
static int check_invariance(struct check *c, const struct reference_set *set, struct qt_err *err)
{
    struct device *d = c->d;
    struct product p;
    int rc;
    QT_TRY(qt_array_grow(&d->widest, &d->widest_capacity, tokens[0] * c->reference.n,
                         sizeof *d->widest, err));
    for (size_t i = 0; i < TOKEN_COUNTS; i++) {
        size_t bytes = tokens[i] * c->reference.n * 2;
        QT_TRY(check_product(c, &p, set, tokens[i], true, err));
        if (i == 0)
            memcpy(d->widest, d->first, bytes);
        else if (memcmp(d->widest, d->first, bytes) != 0)
            device_fault(c->out, "%s: bits differ from those with M=%zu", p.name, tokens[0]);
    }
done:
    return rc;
}

/* *out: the unit in which plans round weights, 0 if no plan rounds. */
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

static int make_reference(struct check *c, uint64_t seed, struct qt_err *err)
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
    QT_TRY(reference_new(&c->reference, c->packed, seed, unit, d->cpu, d->gpu, dequantized, err));
    for (int i = 0; i < 2; i++)
        if (c->reference.wrong[i])
            device_fault(c->out, "dequantized to %s: %zu of %zu weights differ", names[i],
                         c->reference.wrong[i], bytes / 2);
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

/* ---- checker -------------------------------------------------------------------------------- */

int device_matmul(struct qt_device_tensor *t, struct device *d, const struct qt_packed *p,
                  uint64_t seed, struct qt_err *err)
{
    struct check c = {.d = d, .out = t, .packed = p};
    int rc;
    QT_TRY(gpu_copies_new(&c.copies, d->gpu, p, err));
    QT_TRY(make_reference(&c, seed, err));
    QT_TRY(check_products(&c, err));
    QT_TRY(check_invariance(&c, &c.reference.set[0], err));
    QT_TRY(measure(&c, err));
    QT_TRY(device_check_sections(d, t, p, &c.copies, err));
done:
    reference_free(&c.reference);
    gpu_copies_free(&c.copies, d->gpu);
    return rc;
}
