/* The tensors of a container through their fused GPU kernels, each product against truth.c. */
#include "verify/gpu.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    GUARD = 4096,  /* bytes before and after outputs, workspace and X; keeps their alignment */
    POISON = 0xff, /* two or four such bytes are a NaN in every format */
};

/* Descending: the widest product is what others are compared with in batch_invariant mode. 33 is
 * one more than the kernels for few tokens take at once. */
static const size_t tokens[] = {TRUTH_TOKENS, 33, 16, 8, 1};
enum { TOKEN_COUNTS = sizeof tokens / sizeof *tokens };

const size_t qt_device_times[QT_DEVICE_TIMES] = {1, 16, 128};

struct cublas_time {
    size_t n, k;
    double us[QT_DEVICE_TIMES];
};

struct device {
    struct qt_gpu *gpu;
    struct qt_backend *cpu;
    struct gpu_buffer x, y, workspace; /* with guards */
    struct gpu_buffer dequantized[2];  /* FP16, BF16 */
    struct gpu_operands timing;
    struct cublas_time *cublas; /* a model has few shapes */
    size_t cublas_count, cublas_capacity;
    unsigned char *guarded; /* host */
    size_t guarded_capacity;
    uint16_t *first, *again, *wide; /* outputs on the host: a run, its repetition, most tokens */
    size_t first_capacity, again_capacity, wide_capacity;
};

/* The tensor that is being checked. */
struct check {
    struct device *d;
    struct qt_device_tensor *out;
    const struct qt_packed *packed;
    struct gpu_copies copies;
    struct truth truth;
};

static void fault(struct check *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void fault(struct check *c, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    if (c->out->faults++ == 0)
        vsnprintf(c->out->fault, sizeof c->out->fault, fmt, ap);
    va_end(ap);
}

/* ---- one product ---------------------------------------------------------------------------- */

struct product {
    const struct truth_set *set;
    size_t m;
    struct qt_matmul_plan plan;
    char name[64]; /* "M=16 random f16" */
};

/* GUARD, the buffer, GUARD: all poison. *data is the buffer. */
static int poisoned(struct device *d, struct gpu_buffer *b, char **data, size_t bytes,
                    struct qt_err *err)
{
    int rc = gpu_buffer_need(b, d->gpu, bytes + 2 * GUARD, err);
    if (rc == QT_OK)
        rc = d->gpu->fill(d->gpu, b->data, POISON, bytes + 2 * GUARD, err);
    *data = rc == QT_OK ? (char *)b->data + GUARD : NULL;
    return rc;
}

static bool all_bytes(const unsigned char *p, int byte, size_t n)
{
    return n == 0 || (p[0] == byte && memcmp(p, p + 1, n - 1) == 0);
}

/* Downloads part of a guarded buffer and looks at GUARD bytes at `at`. */
static int check_guard(bool *intact, struct device *d, const char *at, struct qt_err *err)
{
    unsigned char guard[GUARD];
    int rc = d->gpu->download(d->gpu, guard, at, GUARD, err);
    *intact = *intact && rc == QT_OK && all_bytes(guard, POISON, GUARD);
    return rc;
}

/* Guards of the workspace, and that the part which has to be zero is so again. */
static int check_workspace(struct check *c, const struct product *p, const char *workspace,
                           struct qt_err *err)
{
    struct device *d = c->d;
    size_t bytes = p->plan.workspace_bytes, zeroed = qt_min_size(bytes, QT_MATMUL_WORKSPACE_ZEROED);
    bool intact = true;
    int rc;
    QT_TRY(qt_array_grow(&d->guarded, &d->guarded_capacity, zeroed + 1, 1, err));
    QT_TRY(check_guard(&intact, d, workspace - GUARD, err));
    QT_TRY(check_guard(&intact, d, workspace + bytes, err));
    QT_TRY(d->gpu->download(d->gpu, d->guarded, workspace, zeroed, err));
    if (!intact)
        fault(c, "%s: wrote beside the workspace", p->name);
    if (!all_bytes(d->guarded, 0, zeroed))
        fault(c, "%s: left the workspace's counters other than zero", p->name);
done:
    return rc;
}

/* One run; the outputs to y[m][n]. X is between NaNs as well: reading beyond it shows. */
static int guarded_run(struct check *c, uint16_t *y, const struct product *p, struct qt_err *err)
{
    struct device *d = c->d;
    size_t count = p->m * c->truth.n, bytes = p->plan.workspace_bytes;
    char *dx, *dy, *workspace;
    bool intact = true;
    int rc;
    QT_TRY(poisoned(d, &d->x, &dx, p->m * c->truth.k * 2, err));
    QT_TRY(d->gpu->upload(d->gpu, dx, p->set->x, p->m * c->truth.k * 2, err));
    QT_TRY(poisoned(d, &d->y, &dy, count * 2, err));
    QT_TRY(poisoned(d, &d->workspace, &workspace, bytes, err));
    QT_TRY(d->gpu->fill(d->gpu, workspace, 0, qt_min_size(bytes, QT_MATMUL_WORKSPACE_ZEROED), err));
    QT_TRY(d->gpu->run(d->gpu, &p->plan, &c->copies.weight[0], dy, dx, workspace, err));
    QT_TRY(d->gpu->download(d->gpu, y, dy, count * 2, err));
    QT_TRY(check_guard(&intact, d, dy - GUARD, err));
    QT_TRY(check_guard(&intact, d, dy + count * 2, err));
    if (!intact)
        fault(c, "%s: wrote beside the output", p->name);
    QT_TRY(check_workspace(c, p, workspace, err));
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

struct difference {
    double error2, rounding2, truth2;
    size_t wrong, token, row; /* values that are off; the first */
};

static void compare_token(struct difference *out, const struct truth_set *set, const uint16_t *y,
                          size_t token, size_t n)
{
    unsigned d = set->dtype;
    for (size_t row = 0; row < n; row++) {
        float truth = set->y[token * n + row];
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
        compare_token(&diff, set, y, t, c->truth.n);
    double norm = diff.truth2 > 0 ? sqrt(diff.truth2) : 1;
    double error = sqrt(diff.error2) / norm, rounding = sqrt(diff.rounding2) / norm;
    size_t at = diff.token * c->truth.n + diff.row;
    double got = (double)truth_value(y[at], set->dtype);
    char text[32] = "NaN"; /* printf may give its sign */
    if (!isnan(got))
        snprintf(text, sizeof text, "%g", got);
    if (diff.wrong)
        fault(c, "%s: %zu of %zu values off; token %zu, row %zu is %s, not %g", p->name, diff.wrong,
              p->m * c->truth.n, diff.token, diff.row, text, (double)set->y[at]);
    else if (!(error <= rounding + SLACK[set->dtype]))
        fault(c, "%s: relative error %.3g, rounding alone is %.3g", p->name, error, rounding);
    if (!(error <= c->out->error[set->dtype])) /* NaN stays */
        c->out->error[set->dtype] = error;
}

/* Plans, runs twice, compares. *y: the outputs, in d->first. */
static int check_product(struct check *c, struct product *p, const struct truth_set *set, size_t m,
                         bool invariant, struct qt_err *err)
{
    const struct qt_matmul_options opt = {
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
        fault(c, "%s: two runs differ", p->name);
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
            fault(c, "%s: other bits than with M=%zu", p.name, tokens[0]);
    }
done:
    return rc;
}

/* The sections, after all runs, are what was uploaded. */
static int check_unchanged(struct check *c, struct qt_err *err)
{
    struct device *d = c->d;
    const char *at = c->copies.base;
    int rc = QT_OK;
    for (size_t i = 0; i < c->packed->nsections; i++) {
        const struct qt_section *s = &c->packed->section[i];
        QT_TRY(qt_array_grow(&d->guarded, &d->guarded_capacity, s->bytes, 1, err));
        QT_TRY(d->gpu->download(d->gpu, d->guarded, at, s->bytes, err));
        if (memcmp(d->guarded, s->data, s->bytes) != 0)
            fault(c, "section %s was written to", s->name);
        at += gpu_section_stride(s->bytes);
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
    int rc;
    for (int i = 0; i < 2; i++) {
        QT_TRY(gpu_buffer_need(&d->dequantized[i], d->gpu, bytes, err));
        dequantized[i] = d->dequantized[i].data;
        QT_TRY(d->gpu->fill(d->gpu, dequantized[i], POISON, bytes, err));
        QT_TRY(d->gpu->dequantize(d->gpu, &c->copies.weight[0], dequantized[i],
                                  i ? QT_MATMUL_BF16 : QT_MATMUL_F16, err));
    }
    QT_TRY(truth_new(&c->truth, c->packed, seed, d->cpu, d->gpu, dequantized, err));
    for (int i = 0; i < 2; i++)
        if (c->truth.wrong[i])
            fault(c, "dequantized to %s: %zu of %zu weights differ", names[i], c->truth.wrong[i],
                  bytes / 2);
done:
    return rc;
}

/* ---- times ---------------------------------------------------------------------------------- */

static int cublas_times(double us[QT_DEVICE_TIMES], struct device *d, size_t n, size_t k,
                        struct qt_err *err)
{
    int rc;
    for (size_t i = 0; i < d->cublas_count; i++)
        if (d->cublas[i].n == n && d->cublas[i].k == k) {
            memcpy(us, d->cublas[i].us, sizeof d->cublas[i].us);
            return QT_OK;
        }
    struct cublas_time t = {.n = n, .k = k};
    QT_TRY(gpu_time_cublas(t.us, d->gpu, n, k, qt_device_times, QT_DEVICE_TIMES, &d->timing, err));
    QT_TRY(qt_array_grow(&d->cublas, &d->cublas_capacity, d->cublas_count + 1, sizeof t, err));
    d->cublas[d->cublas_count++] = t;
    memcpy(us, t.us, sizeof t.us);
done:
    return rc;
}

static int measure(struct check *c, struct qt_err *err)
{
    const struct qt_matmul_options opt = {.dtype = QT_MATMUL_F16, .device = c->d->gpu->device};
    struct device *d = c->d;
    size_t n = c->packed->n, k = c->packed->k, most = qt_device_times[QT_DEVICE_TIMES - 1];
    struct qt_matmul_plan plan;
    int rc;
    QT_TRY(gpu_buffer_need(&d->timing.x, d->gpu, most * k * 2, err));
    QT_TRY(gpu_buffer_need(&d->timing.y, d->gpu, most * n * 2, err));
    QT_TRY(gpu_fill_random(d->gpu, d->timing.x.data, most * k * 2, 1, err));
    for (size_t i = 0; i < QT_DEVICE_TIMES; i++) {
        QT_TRY(d->gpu->plan(d->gpu, &plan, &c->copies.weight[0], qt_device_times[i], &opt, err));
        QT_TRY(gpu_time_plan(&c->out->us[i], d->gpu, &c->copies, &plan, &d->timing, err));
        c->out->cublas_us[i] = NAN;
    }
    if (d->gpu->has_cublas)
        QT_TRY(cublas_times(c->out->cublas_us, d, n, k, err));
done:
    return rc;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static int check_tensor(struct check *c, uint64_t seed, struct qt_err *err)
{
    int rc;
    QT_TRY(gpu_copies_new(&c->copies, c->d->gpu, c->packed, err));
    QT_TRY(make_truth(c, seed, err));
    QT_TRY(check_products(c, err));
    QT_TRY(check_invariance(c, &c->truth.set[0], err));
    QT_TRY(measure(c, err));
    QT_TRY(check_unchanged(c, err));
done:
    truth_free(&c->truth);
    gpu_copies_free(&c->copies, c->d->gpu);
    return rc;
}

static int check_entry(struct qt_device_report *out, struct device *d,
                       const struct qt_container *container, size_t i, struct qt_err *err)
{
    const struct qt_entry *e = qt_container_entry(container, i);
    struct qt_device_tensor *t = &out->tensors[i];
    struct qt_packed packed = {0};
    struct check c = {.d = d, .out = t, .packed = &packed};
    int rc;
    *t = (struct qt_device_tensor){.name = e->name, .spec = e->spec, .n = e->n, .k = e->k};
    QT_TRY(qt_packed_open(&packed, container, e, err));
    rc = check_tensor(&c, 1000 * i, err);
    if (rc == QT_E_UNSUPPORTED) {
        snprintf(t->missing, sizeof t->missing, "%.*s", (int)sizeof t->missing - 1, err->reason);
        out->missing++;
        rc = QT_OK;
    } else if (rc < 0 && err && !err->tensor[0]) {
        snprintf(err->tensor, sizeof err->tensor, "%s", e->name);
    }
    out->faults += t->faults;
done:
    qt_packed_free(&packed);
    return rc;
}

static void device_close(struct device *d)
{
    gpu_buffer_free(&d->x, d->gpu);
    gpu_buffer_free(&d->y, d->gpu);
    gpu_buffer_free(&d->workspace, d->gpu);
    gpu_buffer_free(&d->dequantized[0], d->gpu);
    gpu_buffer_free(&d->dequantized[1], d->gpu);
    gpu_operands_free(&d->timing, d->gpu);
    qt_free(d->cublas);
    qt_free(d->guarded);
    qt_free(d->first);
    qt_free(d->again);
    qt_free(d->wide);
}

int qt_verify_device(struct qt_device_report *out, const struct qt_container *c, struct qt_gpu *gpu,
                     struct qt_backend *cpu, const struct qt_log *log, struct qt_err *err)
{
    struct device d = {.gpu = gpu, .cpu = cpu};
    double done = 0, total = 0;
    int rc;
    *out = (struct qt_device_report){.count = qt_container_count(c)};
    QT_TRY(qt_array_new(&out->tensors, out->count, sizeof *out->tensors, err));
    for (size_t i = 0; i < out->count; i++)
        total += (double)qt_container_entry(c, i)->n * (double)qt_container_entry(c, i)->k;
    for (size_t i = 0; i < out->count; i++) {
        QT_TRY(check_entry(out, &d, c, i, err));
        done += (double)out->tensors[i].n * (double)out->tensors[i].k;
        qt_log_progress(log, "kernels", done, total);
    }
done:
    device_close(&d);
    if (rc < 0)
        qt_device_free(out);
    return rc;
}

void qt_device_free(struct qt_device_report *report)
{
    qt_free(report->tensors);
    *report = (struct qt_device_report){0};
}
