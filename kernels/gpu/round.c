/* The function `round` of the CUDA backend (round.h): passes over column blocks. The kernels round
 * a column block; a product spreads its errors to the sums of all others. Several matrices pass
 * together. Reference: hessian/solve.c. */
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
    struct gpu_arrays arrays;  /* of r, and of the results */
    uint32_t *host;            /* [3 k + 2 groups] the tables of r */
    struct row_values *values; /* host */
    double *sum, *error;       /* host [n]; [panels] */
    uint8_t *skip;             /* host [n] */
    bool active;               /* the next pass runs */
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

static void rounding_free(struct rounding *s)
{
    gpu_arrays_free(&s->arrays);
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
    QT_TRY(
        gpu_array_upload(&s->r.mix24.outliers, &s->arrays, marks, strips * k, sizeof *marks, err));
    QT_TRY(gpu_array_upload(&s->outlier_at, &s->arrays, at, job->outliers, sizeof *at, err));
    QT_TRY(gpu_array_new(&s->outlier, &s->arrays, job->outliers, sizeof *s->outlier, err));
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
    QT_TRY(gpu_array_upload(&s->weights, &s->arrays, weights, k, sizeof *weights, err));
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
    QT_TRY(gpu_array_upload(&to->bits, &s->arrays, job->mix24->bits, groups, 1, err));
    QT_TRY(gpu_array_new(&to->values, &s->arrays, n * s->r.k, sizeof *to->values, err));
    QT_TRY(gpu_array_new(&to->q, &s->arrays, n * groups, 1, err));
    QT_TRY(gpu_array_new(&to->u, &s->arrays, 2 * strips * groups, sizeof *to->u, err));
    QT_TRY(gpu_array_new(&s->q, &s->arrays, groups * job->stride, 1, err));
    QT_TRY(outliers_new(s, err));
    QT_TRY(weights_new(s, err));
    if (job->h)
        QT_TRY(gpu_array_new(&to->factor, &s->arrays, groups * STRIP * STRIP, sizeof *to->factor,
                             err));
done:
    return rc;
}

/* Scales that are floats, and their table of values. */
static int scales_new(struct rounding *s, struct qt_err *err)
{
    const struct qt_round *job = s->job;
    int rc;
    QT_TRY(gpu_array_new(&s->r.scale, &s->arrays, s->r.n * s->r.groups, sizeof *s->r.scale, err));
    QT_TRY(gpu_array_new(&s->scale, &s->arrays, s->r.groups * job->stride, sizeof *s->scale, err));
    if (job->h && is_one_group(s) && job->descent_rounds > 0)
        QT_TRY(gpu_array_new(&s->r.hw, &s->arrays, s->r.n * s->r.k, sizeof *s->r.hw, err));
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
    QT_TRY(gpu_array_upload(&s->r.values, &s->arrays, s->values, 1, sizeof *s->values, err));
    QT_TRY(gpu_array_upload(&s->r.code, &s->arrays, code, ROW_VALUES, 1, err));
    QT_TRY(gpu_array_upload(&s->r.order, &s->arrays, s->host, 3 * k + 2 * groups, sizeof *s->host,
                            err));
    s->r.group = s->r.order + k;
    s->r.end = s->r.group + k;
    s->r.first = s->r.end + k;
    s->r.length = s->r.first + groups;
    QT_TRY(gpu_array_new(&s->r.w, &s->arrays, cells, sizeof *s->r.w, err));
    QT_TRY(gpu_array_new(&s->r.rank, &s->arrays, cells, 1, err));
    QT_TRY(gpu_array_new(&s->r.zero, &s->arrays, n * groups, 1, err));
    QT_TRY(gpu_array_new(&s->r.sum, &s->arrays, n, sizeof *s->r.sum, err));
    QT_TRY(gpu_array_new(&s->r.skip, &s->arrays, n, 1, err));
    if (job->h)
        QT_TRY(gpu_array_new(&s->r.d, &s->arrays, cells, sizeof *s->r.d, err));
    if (!job->only_rounded) {
        QT_TRY(gpu_array_new(&s->code, &s->arrays, k * job->stride, 1, err));
        QT_TRY(gpu_array_new(&s->zero, &s->arrays, groups * job->stride, 1, err));
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

/* ---- several matrices ----------------------------------------------------------------------- */

/* Matrices that are rounded at the same time. */
struct several {
    struct rounding *s;
    size_t n;
};

/* Runs a pass on all matrices that have not converged. A column block of one matrix waits for the
 * one before, and its rows alone may not fill the GPU, so each matrix has a lane of its own. */
static int pass_all(const struct several *all, bool descent, struct qt_err *err)
{
    struct qt_gpu *gpu = all->s->gpu;
    size_t lane = 0, active = 0;
    int rc, ended;
    for (size_t i = 0; i < all->n; i++)
        active += all->s[i].active;
    rc = gpu_lanes_begin(gpu, active, err);
    for (size_t i = 0; i < all->n && rc == QT_OK; i++) {
        if (!all->s[i].active)
            continue;
        rc = gpu_lane_use(gpu, lane++, err);
        if (rc == QT_OK)
            rc = pass(&all->s[i], descent, err);
    }
    ended = gpu_lanes_end(gpu, rc < 0 ? NULL : err);
    return rc < 0 ? rc : ended;
}

static int begin_compensation(struct rounding *s, struct qt_err *err)
{
    int rc;
    QT_TRY(s->gpu->fill(s->gpu, s->r.g, 0, s->r.n * s->r.k * sizeof *s->r.g, err));
    QT_TRY(s->gpu->fill(s->gpu, s->r.sum, 0, s->r.n * sizeof *s->r.sum, err));
    if (is_one_group(s))
        QT_TRY(fit(s, s->job->v, true, err));
done:
    return rc;
}

static int compensate(const struct several *all, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < all->n; i++) {
        QT_TRY(begin_compensation(&all->s[i], err));
        all->s[i].active = true;
    }
    QT_TRY(pass_all(all, false, err));
    for (size_t i = 0; i < all->n; i++) {
        struct qt_round *job = all->s[i].job;
        QT_TRY(download_sums(&job->after_compensation, &all->s[i], err));
        job->after_descent = job->after_compensation;
        all->s[i].active = job->descent_rounds > 0;
    }
done:
    return rc;
}

static int begin_descent(struct rounding *s, struct qt_err *err)
{
    int rc;
    QT_TRY(s->gpu->fill(s->gpu, s->r.skip, 0, s->r.n, err));
    if (s->r.hw)
        QT_TRY(times_h(s, s->r.hw, s->r.w, err));
    if (s->job->mix24)
        QT_TRY(launched(gpu_mix24_factor(&s->r, s->job->h, gpu_stream_of(s->gpu)), err));
    QT_TRY(start_sums(&s->job->after_descent, s, err));
done:
    return rc;
}

/* Finds the panels that have converged in a round of descent. */
static int end_round(struct rounding *s, struct qt_err *err)
{
    void *stream = gpu_stream_of(s->gpu);
    const size_t n = s->r.n, panels = qt_ceil_div(n, PANEL);
    double *before = NULL;
    int rc;
    QT_TRY(qt_array_new(&before, panels, sizeof *before, err));
    memcpy(before, s->error, panels * sizeof *before);
    if (s->r.hw)
        QT_TRY(launched(gpu_round_rescale(&s->r, stream), err));
    QT_TRY(launched(gpu_round_objective(&s->r, stream), err));
    QT_TRY(download_sums(&s->job->after_descent, s, err));
    s->active = false;
    for (size_t i = 0; i < panels; i++) {
        const bool gains = before[i] - s->error[i] > s->job->min_gain * before[i];
        s->active |= gains;
        for (size_t row = i * PANEL; row < qt_min_size(n, (i + 1) * PANEL) && !gains; row++)
            s->skip[row] = 1;
    }
    QT_TRY(s->gpu->upload(s->gpu, s->r.skip, s->skip, n, err));
done:
    qt_free(before);
    return rc;
}

/* *active: some matrices have not converged. */
static int descend(bool *active, const struct several *all, int round, struct qt_err *err)
{
    int rc;
    for (size_t i = 0; i < all->n; i++) {
        const struct qt_round_mix24 *mix24 = all->s[i].job->mix24;
        all->s[i].r.mix24.search = mix24 && round < mix24->searches;
    }
    QT_TRY(pass_all(all, true, err));
    *active = false;
    for (size_t i = 0; i < all->n; i++) {
        struct rounding *s = &all->s[i];
        if (s->active)
            QT_TRY(end_round(s, err));
        s->active &= round + 1 < s->job->descent_rounds;
        *active |= s->active;
    }
done:
    return rc;
}

static int solve(const struct several *all, struct qt_err *err)
{
    bool active = false;
    int rc = QT_OK;
    for (size_t i = 0; i < all->n; i++)
        QT_TRY(measure_before(&all->s[i], err));
    QT_TRY(compensate(all, err));
    for (size_t i = 0; i < all->n; i++) {
        if (all->s[i].active)
            QT_TRY(begin_descent(&all->s[i], err));
        active |= all->s[i].active;
    }
    for (int round = 0; active; round++) {
        QT_TRY(qt_stop_check(err));
        QT_TRY(descend(&active, all, round, err));
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
        QT_TRY(gpu_array_upload(&importance, &s->arrays, s->job->importance, s->r.k,
                                sizeof *importance, err));
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

static int begin(struct rounding *s, struct gpu_products *products, struct qt_round *job,
                 struct qt_err *err)
{
    int rc;
    *s = (struct rounding){.products = products,
                           .gpu = products->gpu,
                           .job = job,
                           .r.g = job->w,
                           .arrays.gpu = products->gpu};
    if (job->n > INT32_MAX || job->k > INT32_MAX ||
        (job->group > GPU_ROUND_WIDEST && job->group < job->k))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "%zu x %zu in groups of %zu cannot be rounded on a GPU", job->n, job->k,
                       job->group);
    QT_TRY(rounding_new(s, err));
    QT_TRY(launched(gpu_math_order_columns(s->r.w, job->w, s->r.order, 1, job->n, job->k,
                                           gpu_stream_of(s->gpu)),
                    err));
    if (!job->h)
        QT_TRY(round_groups(s, err));
done:
    return rc;
}

static int end(struct rounding *s, struct qt_err *err)
{
    const struct qt_round *job = s->job;
    int rc = QT_OK;
    if (job->rounded)
        QT_TRY(
            launched(gpu_round_values(&s->r, job->rounded, job->exp2, gpu_stream_of(s->gpu)), err));
    if (!job->only_rounded)
        QT_TRY(store(s, err));
done:
    return rc;
}

/* Moves those with a Hessian to the front. Returns their number. */
static size_t with_hessian(struct rounding *s, size_t n)
{
    size_t front = 0;
    for (size_t i = 0; i < n; i++)
        if (s[i].job->h) {
            const struct rounding first = s[i];
            s[i] = s[front];
            s[front++] = first;
        }
    return front;
}

int gpu_round(struct gpu_products *products, struct qt_round *const *jobs, size_t count,
              struct qt_err *err)
{
    struct rounding *s = NULL;
    size_t n = 0;
    int rc;
    QT_TRY(qt_array_new(&s, count, sizeof *s, err));
    for (size_t i = 0; i < count; i++)
        if (jobs[i]->n && jobs[i]->k)
            QT_TRY(begin(&s[n++], products, jobs[i], err));
    QT_TRY(solve(&(struct several){s, with_hessian(s, n)}, err));
    for (size_t i = 0; i < n; i++)
        QT_TRY(end(&s[i], err));
done:
    for (size_t i = 0; i < n; i++)
        rounding_free(&s[i]);
    qt_free(s);
    return rc;
}
