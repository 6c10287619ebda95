/* The function `round` of the CUDA backend (round.h): passes over column blocks. The kernels round
 * a column block; a product spreads its errors to the sums of all others. Reference:
 * hessian/solve.c. */
#include "kernels/gpu/round.h"
#include "kernels/gpu/product.h"

#include <string.h>

enum {
    BLOCK = 128, /* positions of a column block, unless a group is longer */
    SPAN = 512,  /* positions whose errors go to those outside by one product */
    PANEL = 128, /* rows that converge together */
    STRIP = 16,  /* rows and columns of a group of mix24 */
};

struct rounding {
    struct gpu_products *products;
    struct qt_gpu *gpu;
    struct qt_round *job;
    struct gpu_round r;
    void *memory[32]; /* of r, and of the results */
    size_t allocated;
    uint32_t *host;            /* [3 k + 2 groups] the tables of r */
    struct row_values *values; /* host */
    double *sum, *error;       /* host [n]; [panels] */
    uint8_t *skip;             /* host [n] */
    uint8_t *code, *zero;      /* device: results */
    float *scale;
    const float *weights; /* device, mix24: importance by position */
    uint8_t *q;           /* device, mix24 */
    uint64_t *outlier_at; /* device, mix24 [outliers]: row k + position */
    float *outlier;       /* device, mix24 [outliers]: values */
};

static int launched(int status, struct qt_err *err)
{
    return gpu_check_launch(status, "rounding", err);
}

/* ---- tables --------------------------------------------------------------------------------- */

static int scales_of(enum qt_scales scales)
{
    return scales == QT_SCALES_F16 ? ROW_F16 : scales == QT_SCALES_POWERS ? ROW_POWERS : ROW_E4M3;
}

static void fill_values(struct row_values *to, const struct qt_round_values *from)
{
    int levels = 16;
    while (levels < (int)from->count)
        levels *= 2;
    *to = (struct row_values){.levels = levels,
                              .smallest = from->value[0],
                              .greatest = from->value[from->count - 1],
                              .floats = from->floats,
                              .least = from->least + 127,
                              .step = 23 - from->bits,
                              .largest = from->largest,
                              .first_scale = from->first_scale,
                              .from = from->from,
                              .to = from->to,
                              .scales = scales_of(from->scales),
                              .steps = (int)from->steps,
                              .zeros = from->zeros,
                              .mirrored = from->mirrored};
    for (unsigned i = 0; i < ROW_VALUES; i++) {
        to->value[i] = from->value[i < from->count ? i : from->count - 1];
        to->mid[i] = i + 1 < from->count ? (from->value[i] + from->value[i + 1]) / 2 : INFINITY;
    }
}

/* Without h, columns are processed in storage order. */
static void fill_tables(struct rounding *s)
{
    const struct qt_round *job = s->job;
    uint32_t *order = s->host, *group = order + job->k, *end = group + job->k,
             *first = end + job->k, *length = first + s->r.groups;
    for (size_t p = 0; p < job->k; p++) {
        order[p] = (uint32_t)(job->h ? job->order[p] : p);
        group[p] = (uint32_t)(job->h ? job->group_at[p] : p / job->group);
    }
    for (size_t p = job->k; p-- > 0;) {
        const bool is_last = p + 1 == job->k || group[p + 1] != group[p];
        end[p] = is_last ? (uint32_t)p + 1 : end[p + 1];
        first[group[p]] = (uint32_t)p;
        length[group[p]] = end[p] - (uint32_t)p;
    }
}

/* ---- memory --------------------------------------------------------------------------------- */

static int device_new(void *out, struct rounding *s, size_t count, size_t size, struct qt_err *err)
{
    size_t bytes;
    void *p;
    if (qt_mul_overflow(&bytes, count, size))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    int rc = s->gpu->alloc(s->gpu, &p, bytes, err);
    if (rc < 0)
        return rc;
    s->memory[s->allocated++] = p;
    memcpy(out, &p, sizeof p);
    return QT_OK;
}

static int upload_new(void *out, struct rounding *s, const void *from, size_t count, size_t size,
                      struct qt_err *err)
{
    void *p = NULL;
    int rc = device_new(&p, s, count, size, err);
    memcpy(out, &p, sizeof p);
    return rc < 0 ? rc : s->gpu->upload(s->gpu, p, from, count * size, err);
}

static void rounding_free(struct rounding *s)
{
    for (size_t i = 0; i < s->allocated; i++)
        s->gpu->free(s->gpu, s->memory[i]);
    qt_free(s->host);
    qt_free(s->values);
    qt_free(s->sum);
    qt_free(s->error);
    qt_free(s->skip);
}

/* Groups of mix24 have parameters for less than a column block. */
static bool is_one_group(const struct rounding *s)
{
    return s->r.groups == 1 && !s->job->mix24;
}

/* The outliers: their places, and their marks by strip and position. */
static int outliers_new(struct rounding *s, struct qt_err *err)
{
    const struct qt_round_mix24 *job = s->job->mix24;
    const size_t k = s->r.k, strips = qt_ceil_div(s->r.n, STRIP);
    size_t *position = NULL;
    uint16_t *marks = NULL;
    uint64_t *at = NULL;
    int rc;
    QT_TRY(qt_array_new(&position, k, sizeof *position, err));
    QT_TRY(qt_array_new(&marks, strips, k * sizeof *marks, err));
    QT_TRY(qt_array_new(&at, job->outliers, sizeof *at, err));
    for (size_t p = 0; p < k; p++)
        position[s->host[p]] = p;
    for (size_t i = 0; i < job->outliers; i++) {
        const size_t row = job->outlier_row[i], p = position[job->outlier_col[i]];
        at[i] = row * k + p;
        marks[row / STRIP * k + p] |= (uint16_t)(1u << row % STRIP);
    }
    QT_TRY(upload_new(&s->r.mix24.outliers, s, marks, strips * k, sizeof *marks, err));
    QT_TRY(upload_new(&s->outlier_at, s, at, job->outliers, sizeof *at, err));
    QT_TRY(device_new(&s->outlier, s, job->outliers, sizeof *s->outlier, err));
done:
    qt_free(position);
    qt_free(marks);
    qt_free(at);
    return rc;
}

static int weights_new(struct rounding *s, struct qt_err *err)
{
    const size_t k = s->r.k;
    float *weights = NULL;
    int rc = QT_OK;
    if (!s->job->importance)
        return QT_OK;
    QT_TRY(qt_array_new(&weights, k, sizeof *weights, err));
    for (size_t p = 0; p < k; p++)
        weights[p] = s->job->importance[s->host[p]];
    QT_TRY(upload_new(&s->weights, s, weights, k, sizeof *weights, err));
done:
    qt_free(weights);
    return rc;
}

static int mix24_new(struct rounding *s, struct qt_err *err)
{
    const struct qt_round *job = s->job;
    const size_t n = s->r.n, groups = s->r.groups, strips = qt_ceil_div(n, STRIP);
    struct gpu_mix24 *to = &s->r.mix24;
    int rc;
    to->halves = job->mix24->halves;
    QT_TRY(upload_new(&to->bits, s, job->mix24->bits, groups, 1, err));
    QT_TRY(device_new(&to->values, s, n * s->r.k, sizeof *to->values, err));
    QT_TRY(device_new(&to->q, s, n * groups, 1, err));
    QT_TRY(device_new(&to->u, s, 2 * strips * groups, sizeof *to->u, err));
    QT_TRY(device_new(&s->q, s, groups * job->stride, 1, err));
    QT_TRY(outliers_new(s, err));
    QT_TRY(weights_new(s, err));
    if (job->h)
        QT_TRY(device_new(&to->factor, s, groups * STRIP * STRIP, sizeof *to->factor, err));
done:
    return rc;
}

/* Scales that are floats, and their table of values. */
static int scales_new(struct rounding *s, struct qt_err *err)
{
    const struct qt_round *job = s->job;
    int rc;
    QT_TRY(device_new(&s->r.scale, s, s->r.n * s->r.groups, sizeof *s->r.scale, err));
    QT_TRY(device_new(&s->scale, s, s->r.groups * job->stride, sizeof *s->scale, err));
    if (job->h && is_one_group(s) && job->descent_rounds > 0)
        QT_TRY(device_new(&s->r.hw, s, s->r.n * s->r.k, sizeof *s->r.hw, err));
done:
    return rc;
}

static int rounding_new(struct rounding *s, struct qt_err *err)
{
    const struct qt_round *job = s->job;
    const size_t n = job->n, k = job->k, groups = qt_ceil_div(k, job->group);
    uint8_t code[ROW_VALUES];
    size_t cells;
    int rc = QT_OK;
    if (qt_mul_overflow(&cells, n, k))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of GPU memory");
    s->r.n = n;
    s->r.k = k;
    s->r.groups = groups;
    QT_TRY(qt_array_new(&s->host, 3 * k + 2 * groups, sizeof *s->host, err));
    QT_TRY(qt_array_new(&s->values, 1, sizeof *s->values, err));
    QT_TRY(qt_array_new(&s->sum, n, sizeof *s->sum, err));
    QT_TRY(qt_array_new(&s->error, qt_ceil_div(n, PANEL), sizeof *s->error, err));
    QT_TRY(qt_array_new(&s->skip, n, 1, err));
    if (job->values)
        fill_values(s->values, job->values);
    for (size_t i = 0; i < ROW_VALUES; i++)
        code[i] = job->values ? job->values->code[i] : (uint8_t)i;
    fill_tables(s);
    QT_TRY(upload_new(&s->r.values, s, s->values, 1, sizeof *s->values, err));
    QT_TRY(upload_new(&s->r.code, s, code, ROW_VALUES, 1, err));
    QT_TRY(upload_new(&s->r.order, s, s->host, 3 * k + 2 * groups, sizeof *s->host, err));
    s->r.group = s->r.order + k;
    s->r.end = s->r.group + k;
    s->r.first = s->r.end + k;
    s->r.length = s->r.first + groups;
    QT_TRY(device_new(&s->r.w, s, cells, sizeof *s->r.w, err));
    QT_TRY(device_new(&s->r.rank, s, cells, 1, err));
    QT_TRY(device_new(&s->r.zero, s, n * groups, 1, err));
    QT_TRY(device_new(&s->r.sum, s, n, sizeof *s->r.sum, err));
    QT_TRY(device_new(&s->r.skip, s, n, 1, err));
    if (job->h)
        QT_TRY(device_new(&s->r.d, s, cells, sizeof *s->r.d, err));
    if (!job->only_rounded) {
        QT_TRY(device_new(&s->code, s, k * job->stride, 1, err));
        QT_TRY(device_new(&s->zero, s, groups * job->stride, 1, err));
    }
    QT_TRY(job->mix24 ? mix24_new(s, err) : scales_new(s, err));
done:
    return rc;
}

/* ---- passes --------------------------------------------------------------------------------- */

/* Number of positions of the column block that begins at `at`: one or more whole groups. A single
 * group that spans the matrix is split. */
static size_t block_columns(const struct rounding *s, size_t at)
{
    const uint32_t *group_end = s->host + 2 * s->r.k;
    size_t end = group_end[at];
    if (is_one_group(s))
        return qt_min_size(BLOCK, s->r.k - at);
    while (end < s->r.k && group_end[end] - at <= BLOCK)
        end = group_end[end];
    return end - at;
}

/* Column blocks [first, end) of a span. */
struct span {
    size_t first, end;
};

static struct span span_at(const struct rounding *s, size_t first)
{
    struct span span = {first, first};
    while (span.end < s->r.k && span.end - first < SPAN)
        span.end += block_columns(s, span.end);
    return span;
}

/* Lets the next kernel write changes of a column block in the span. */
static void set_change(struct rounding *s, struct span span, size_t at)
{
    s->r.change = s->r.d + (at - span.first);
    s->r.change_ld = span.end - span.first;
}

/* g of positions [from, to) += changes of positions [at, at + columns) times these rows of m. The
 * factors are cut off to TF32: an error of 2^-10 of what a change adds to g is far smaller than a
 * step of the values, and the factors need no conversion. */
static int spread(struct rounding *s, const float *m, struct span span, size_t at, size_t columns,
                  size_t from, size_t to, struct qt_err *err)
{
    const size_t k = s->r.k;
    const struct gpu_product p = {.m = (int)s->r.n,
                                  .n = (int)(to - from),
                                  .k = (int)columns,
                                  .alpha = 1,
                                  .beta = 1,
                                  .a = s->r.d + (at - span.first),
                                  .b = m + at * k + from,
                                  .c = s->r.g + from,
                                  .tf32 = true,
                                  .lda = (int)(span.end - span.first),
                                  .ldb = (int)k,
                                  .ldc = (int)k,
                                  .count = 1};
    return from < to ? gpu_check_cublas(gpu_cublas_product(gpu_cublas_of(s->gpu), &p), err) : QT_OK;
}

/* Runs error compensation, or a round of descent, on all column blocks. */
static int pass(struct rounding *s, bool descent, struct qt_err *err)
{
    const float *m = descent ? s->job->h : s->job->v;
    int (*const round)(const struct gpu_round *, const float *, size_t, size_t, void *) =
        !s->job->mix24 ? (descent ? gpu_round_descend : gpu_round_compensate)
                       : (descent ? gpu_mix24_descend : gpu_mix24_compensate);
    void *stream = gpu_stream_of(s->gpu);
    int rc = QT_OK;
    for (struct span span = {0, 0}; span.end < s->r.k;) {
        span = span_at(s, span.end);
        for (size_t at = span.first, columns; at < span.end; at += columns) {
            columns = block_columns(s, at);
            set_change(s, span, at);
            QT_TRY(launched(round(&s->r, m, at, columns, stream), err));
            QT_TRY(spread(s, m, span, at, columns, descent ? span.first : at + columns, span.end,
                          err));
        }
        const size_t columns = span.end - span.first;
        if (descent)
            QT_TRY(spread(s, m, span, span.first, columns, 0, span.first, err));
        QT_TRY(spread(s, m, span, span.first, columns, span.end, s->r.k, err));
    }
done:
    return rc;
}

/* out[n][k] = x h, for the symmetric h. The factors are rounded to FP16: the error of g is 2^-12 of
 * it and random, that of the objective, a sum over all weights, is far smaller. */
static int times_h(struct rounding *s, float *out, const float *x, struct qt_err *err)
{
    const int k = (int)s->r.k;
    const bool half = s->products->half;
    const struct gpu_product p = {.m = (int)s->r.n,
                                  .n = k,
                                  .k = k,
                                  .alpha = 1,
                                  .a = x,
                                  .b = s->job->h,
                                  .c = out,
                                  .b_transposed = true,
                                  .lda = k,
                                  .ldb = k,
                                  .ldc = k,
                                  .count = 1};
    s->products->half = true;
    const int rc = gpu_product(s->products, &p, err);
    s->products->half = half;
    return rc;
}

/* error[panel] = sum over the rows of the panel. Returns the total. */
static int download_sums(double *total, struct rounding *s, struct qt_err *err)
{
    const size_t n = s->r.n;
    int rc = s->gpu->download(s->gpu, s->sum, s->r.sum, n * sizeof *s->sum, err);
    *total = 0;
    for (size_t row = 0; row < n && rc == QT_OK; row++) {
        double *error = &s->error[row / PANEL];
        *error = (row % PANEL ? *error : 0) + s->sum[row];
    }
    for (size_t i = 0; i < qt_ceil_div(n, PANEL); i++)
        *total += s->error[i];
    return rc;
}

/* Computes g = H (w - q) and the objective. */
static int start_sums(double *total, struct rounding *s, struct qt_err *err)
{
    void *stream = gpu_stream_of(s->gpu);
    int rc;
    QT_TRY(launched(gpu_round_errors(&s->r, stream), err));
    QT_TRY(times_h(s, s->r.g, s->r.d, err));
    QT_TRY(launched(gpu_round_objective(&s->r, stream), err));
    QT_TRY(download_sums(total, s, err));
done:
    return rc;
}

/* Searches the parameters of all groups, with squared errors weighted by the diagonal of m, or its
 * squares. d is overwritten. */
static int fit(struct rounding *s, const float *m, bool squared, struct qt_err *err)
{
    void *stream = gpu_stream_of(s->gpu);
    int rc;
    QT_TRY(launched(gpu_round_diagonal(s->r.d, m, s->r.k, squared, stream), err));
    QT_TRY(launched(gpu_round_fit(&s->r, s->r.d, stream), err));
done:
    return rc;
}

/* The objective of rounding to nearest, which is only reported. */
static int measure_before(struct rounding *s, struct qt_err *err)
{
    void *stream = gpu_stream_of(s->gpu);
    int rc;
    if (s->job->mix24) {
        QT_TRY(launched(gpu_mix24_assign(&s->r, s->weights, stream), err));
    } else {
        QT_TRY(fit(s, s->job->h, false, err));
        QT_TRY(launched(gpu_round_assign(&s->r, stream), err));
    }
    QT_TRY(start_sums(&s->job->before, s, err));
done:
    return rc;
}

static int compensate(double *total, struct rounding *s, struct qt_err *err)
{
    int rc;
    QT_TRY(s->gpu->fill(s->gpu, s->r.g, 0, s->r.n * s->r.k * sizeof *s->r.g, err));
    QT_TRY(s->gpu->fill(s->gpu, s->r.sum, 0, s->r.n * sizeof *s->r.sum, err));
    if (is_one_group(s))
        QT_TRY(fit(s, s->job->v, true, err));
    QT_TRY(pass(s, false, err));
    QT_TRY(download_sums(total, s, err));
done:
    return rc;
}

/* *total: the objective before and after. *active: some panels have not converged. */
static int descend(bool *active, double *total, struct rounding *s, struct qt_err *err)
{
    void *stream = gpu_stream_of(s->gpu);
    const size_t n = s->r.n, panels = qt_ceil_div(n, PANEL);
    double *before = NULL;
    int rc;
    QT_TRY(qt_array_new(&before, panels, sizeof *before, err));
    memcpy(before, s->error, panels * sizeof *before);
    QT_TRY(pass(s, true, err));
    if (s->r.hw)
        QT_TRY(launched(gpu_round_rescale(&s->r, stream), err));
    QT_TRY(launched(gpu_round_objective(&s->r, stream), err));
    QT_TRY(download_sums(total, s, err));
    *active = false;
    for (size_t i = 0; i < panels; i++) {
        const bool gains = before[i] - s->error[i] > s->job->min_gain * before[i];
        *active |= gains;
        for (size_t row = i * PANEL; row < qt_min_size(n, (i + 1) * PANEL) && !gains; row++)
            s->skip[row] = 1;
    }
    QT_TRY(s->gpu->upload(s->gpu, s->r.skip, s->skip, n, err));
done:
    qt_free(before);
    return rc;
}

static int solve(struct rounding *s, struct qt_err *err)
{
    struct qt_round *job = s->job;
    bool active = true;
    int rc;
    QT_TRY(measure_before(s, err));
    QT_TRY(compensate(&job->after_compensation, s, err));
    job->after_descent = job->after_compensation;
    if (job->descent_rounds > 0) {
        QT_TRY(s->gpu->fill(s->gpu, s->r.skip, 0, job->n, err));
        if (s->r.hw)
            QT_TRY(times_h(s, s->r.hw, s->r.w, err));
        if (job->mix24)
            QT_TRY(launched(gpu_mix24_factor(&s->r, job->h, gpu_stream_of(s->gpu)), err));
        QT_TRY(start_sums(&job->after_descent, s, err));
    }
    for (int round = 0; round < job->descent_rounds && active; round++) {
        QT_TRY(qt_stop_check(err));
        s->r.mix24.search = job->mix24 && round < job->mix24->searches;
        QT_TRY(descend(&active, &job->after_descent, s, err));
    }
done:
    return rc;
}

/* Rounds each group separately. */
static int round_groups(struct rounding *s, struct qt_err *err)
{
    void *stream = gpu_stream_of(s->gpu);
    const float *importance = NULL;
    int rc = QT_OK;
    if (s->job->mix24)
        return launched(gpu_mix24_assign(&s->r, s->weights, stream), err);
    if (s->job->importance)
        QT_TRY(upload_new(&importance, s, s->job->importance, s->r.k, sizeof *importance, err));
    QT_TRY(launched(gpu_round_fit(&s->r, importance, stream), err));
    QT_TRY(launched(gpu_round_assign(&s->r, stream), err));
done:
    return rc;
}

static int store_scales(struct rounding *s, struct qt_err *err)
{
    const struct qt_round *job = s->job;
    const size_t params = s->r.groups * job->stride;
    int rc;
    QT_TRY(launched(
        gpu_round_store(&s->r, s->code, s->scale, s->zero, job->stride, gpu_stream_of(s->gpu)),
        err));
    QT_TRY(s->gpu->download(s->gpu, job->scale, s->scale, params * sizeof *s->scale, err));
done:
    return rc;
}

static int store_mix24(struct rounding *s, struct qt_err *err)
{
    const struct qt_round_mix24 *to = s->job->mix24;
    const size_t stride = s->job->stride, params = s->r.groups * stride;
    const size_t strips = qt_ceil_div(s->r.n, STRIP);
    void *stream = gpu_stream_of(s->gpu);
    int rc;
    QT_TRY(launched(gpu_mix24_store(&s->r, s->code, s->q, s->zero, stride, stream), err));
    QT_TRY(s->gpu->download(s->gpu, to->q, s->q, params, err));
    QT_TRY(s->gpu->download(s->gpu, to->u, s->r.mix24.u, 2 * strips * s->r.groups * sizeof *to->u,
                            err));
    if (to->outliers) {
        QT_TRY(launched(gpu_mix24_gather(s->outlier, &s->r, s->outlier_at, to->outliers, stream),
                        err));
        QT_TRY(s->gpu->download(s->gpu, to->outlier, s->outlier, to->outliers * sizeof *to->outlier,
                                err));
    }
done:
    return rc;
}

static int store(struct rounding *s, struct qt_err *err)
{
    const struct qt_round *job = s->job;
    int rc;
    QT_TRY(job->mix24 ? store_mix24(s, err) : store_scales(s, err));
    QT_TRY(s->gpu->download(s->gpu, job->code, s->code, job->k * job->stride, err));
    QT_TRY(s->gpu->download(s->gpu, job->zero, s->zero, s->r.groups * job->stride, err));
done:
    return rc;
}

/* Downloads the sums over the rows of cost. sum: device, [groups]. */
static int download_costs(double *out, struct qt_gpu *gpu, double *sum, const float *cost,
                          const struct gpu_mix24_costs *c, struct qt_err *err)
{
    int rc;
    QT_TRY(launched(gpu_mix24_sum_rows(sum, cost, c->n, c->groups, gpu_stream_of(gpu)), err));
    QT_TRY(gpu->download(gpu, out, sum, c->groups * sizeof *sum, err));
done:
    return rc;
}

int gpu_mix24_group_costs(struct qt_gpu *gpu, const struct qt_mix24_costs *job, struct qt_err *err)
{
    const size_t n = job->n, groups = qt_ceil_div(job->k, job->group), cells = n * groups;
    struct gpu_mix24_costs c = {
        .n = n, .k = job->k, .group = job->group, .groups = groups, .w = job->w, .exp2 = job->exp2};
    struct rounding s = {.gpu = gpu}; /* owns the memory */
    double *sum = NULL;
    int rc;
    if (n == 0 || groups == 0)
        return QT_OK;
    if (job->importance)
        QT_TRY(upload_new(&c.weights, &s, job->importance, job->k, sizeof *c.weights, err));
    if (job->two) {
        QT_TRY(device_new(&sum, &s, groups, sizeof *sum, err));
        QT_TRY(device_new(&c.two, &s, cells, sizeof *c.two, err));
        QT_TRY(device_new(&c.four, &s, cells, sizeof *c.four, err));
    }
    if (job->gain) {
        QT_TRY(device_new(&c.gain, &s, 2 * cells, sizeof *c.gain, err));
        QT_TRY(device_new(&c.channel, &s, 2 * cells, 1, err));
    }
    QT_TRY(launched(gpu_mix24_costs(&c, gpu_stream_of(gpu)), err));
    if (job->two) {
        QT_TRY(download_costs(job->two, gpu, sum, c.two, &c, err));
        QT_TRY(download_costs(job->four, gpu, sum, c.four, &c, err));
    }
    if (job->gain) {
        QT_TRY(gpu->download(gpu, job->gain, c.gain, 2 * cells * sizeof *c.gain, err));
        QT_TRY(gpu->download(gpu, job->channel, c.channel, 2 * cells, err));
    }
done:
    rounding_free(&s);
    return rc;
}

int gpu_mix24_find_extent(struct qt_gpu *gpu, struct qt_mix24_extent *job, struct qt_err *err)
{
    const size_t n = job->n, groups = qt_ceil_div(job->k, job->group);
    struct gpu_mix24_extent e = {
        .n = n, .k = job->k, .group = job->group, .groups = groups, .w = job->w, .exp2 = job->exp2};
    struct rounding s = {.gpu = gpu}; /* owns the memory */
    uint32_t most[2] = {0};
    int rc;
    QT_TRY(upload_new(&e.most, &s, most, 2, sizeof *most, err));
    QT_TRY(upload_new(&e.bits, &s, job->bits, groups, 1, err));
    if (job->outliers)
        QT_TRY(upload_new(&e.outliers, &s, job->outliers, n * groups, sizeof *e.outliers, err));
    if (n && groups)
        QT_TRY(launched(gpu_mix24_extent(&e, gpu_stream_of(gpu)), err));
    QT_TRY(gpu->download(gpu, most, e.most, sizeof most, err));
    job->scale = qt_bits_f32(most[0]);
    job->outlier = qt_bits_f32(most[1]);
done:
    rounding_free(&s);
    return rc;
}

int gpu_group_range(struct qt_gpu *gpu, float *largest, float *smallest, const float *w, size_t n,
                    size_t k, size_t group, struct qt_err *err)
{
    uint32_t range[] = {0, 0x7f800000};
    void *p = NULL;
    int rc;
    QT_TRY(gpu->alloc(gpu, &p, sizeof range, err));
    QT_TRY(gpu->upload(gpu, p, range, sizeof range, err));
    if (n && k)
        QT_TRY(launched(gpu_round_range(p, w, n, k, group, gpu_stream_of(gpu)), err));
    QT_TRY(gpu->download(gpu, range, p, sizeof range, err));
    *largest = qt_bits_f32(range[0]);
    *smallest = qt_bits_f32(range[1]);
done:
    gpu->free(gpu, p);
    return rc;
}

int gpu_round(struct gpu_products *products, struct qt_round *job, struct qt_err *err)
{
    struct rounding s = {.products = products, .gpu = products->gpu, .job = job, .r.g = job->w};
    int rc;
    if (job->n == 0 || job->k == 0)
        return QT_OK;
    if (job->n > INT32_MAX || job->k > INT32_MAX ||
        (job->group > GPU_ROUND_WIDEST && job->group < job->k))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "%zu x %zu in groups of %zu cannot be rounded on a GPU", job->n, job->k,
                       job->group);
    QT_TRY(rounding_new(&s, err));
    QT_TRY(launched(
        gpu_math_order_columns(s.r.w, job->w, s.r.order, 1, job->n, job->k, gpu_stream_of(s.gpu)),
        err));
    QT_TRY(job->h ? solve(&s, err) : round_groups(&s, err));
    if (job->rounded)
        QT_TRY(
            launched(gpu_round_values(&s.r, job->rounded, job->exp2, gpu_stream_of(s.gpu)), err));
    if (!job->only_rounded)
        QT_TRY(store(&s, err));
done:
    rounding_free(&s);
    return rc;
}
