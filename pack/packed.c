/* One packed matrix: everything that does not depend on the scheme. */
#include "pack/schemes/codebook.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- description ---------------------------------------------------------------------------- */

int qt_packed_describe(struct qt_packed *out, const struct qt_spec *spec, size_t n, size_t k,
                       struct qt_err *err)
{
    *out = (struct qt_packed){.spec = *spec, .n = n, .k = k};
    if (n == 0 || k == 0)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "%zu x %zu has no elements", n, k);
    /* Callers may multiply n and k, and add up section sizes, without overflow checks. */
    size_t product, sum = 0;
    bool overflow = n > SIZE_MAX / 2 || k > SIZE_MAX / 2 || qt_mul_overflow(&product, n, k);
    int rc = overflow ? QT_OK : spec->scheme->describe(out, err);
    for (size_t i = 0; rc == QT_OK && i < out->nsections; i++)
        overflow |= qt_add_overflow(&sum, sum, out->section[i].bytes);
    if (overflow)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "%zu x %zu is too large", n, k);
    return rc;
}

size_t qt_packed_scratch_bytes(const struct qt_packed *p)
{
    return p->spec.scheme->scratch_bytes(p);
}

size_t qt_packed_bytes(const struct qt_packed *p)
{
    size_t bytes = 0;
    for (size_t i = 0; i < p->nsections; i++)
        bytes += p->section[i].bytes;
    return bytes;
}

double qt_packed_bpw(const struct qt_packed *p)
{
    return 8 * (double)qt_packed_bytes(p) / ((double)p->n * (double)p->k);
}

double qt_packed_paper_bpw(const struct qt_packed *p)
{
    return p->spec.scheme->paper_bpw ? p->spec.scheme->paper_bpw(p) : NAN;
}

/* ---- error figures -------------------------------------------------------------------------- */

double qt_error_mse(const struct qt_error *e)
{
    return e->count ? e->sum_e2 / (double)e->count : 0;
}

double qt_error_sqnr_db(const struct qt_error *e)
{
    return e->sum_e2 > 0 ? 10 * log10(e->sum_w2 / e->sum_e2) : INFINITY;
}

double qt_error_cosine(const struct qt_error *e)
{
    double norm = sqrt(e->sum_w2 * e->sum_q2);
    return norm > 0 ? e->sum_wq / norm : e->sum_w2 == e->sum_q2;
}

/* In FP64, because squares of FP32 values may overflow or underflow in FP32; in lanes, so that the
 * compiler vectorizes the loop. */
void qt_error_add_row(struct qt_error *e, const float *w, const float *q, size_t n)
{
    enum { LANES = 16 };
    double w2[LANES] = {0}, q2[LANES] = {0}, wq[LANES] = {0}, e2[LANES] = {0}, top[LANES] = {0};
    for (size_t i = 0; i < n; i += LANES)
        for (size_t l = 0; l < (n - i < LANES ? n - i : LANES); l++) {
            double a = (double)w[i + l], b = (double)q[i + l], d = a - b;
            w2[l] += a * a;
            q2[l] += b * b;
            wq[l] += a * b;
            e2[l] += d * d;
            top[l] = fabs(d) > top[l] ? fabs(d) : top[l];
        }
    for (size_t l = 0; l < LANES; l++) {
        e->sum_w2 += w2[l];
        e->sum_q2 += q2[l];
        e->sum_wq += wq[l];
        e->sum_e2 += e2[l];
        e->max_abs = fmax(e->max_abs, top[l]);
    }
    e->count += n;
}

void qt_error_add(struct qt_error *e, const struct qt_error *more)
{
    e->sum_w2 += more->sum_w2;
    e->sum_q2 += more->sum_q2;
    e->sum_wq += more->sum_wq;
    e->sum_e2 += more->sum_e2;
    e->max_abs = fmax(e->max_abs, more->max_abs);
    e->count += more->count;
}

/* ---- walking a matrix strip by strip -------------------------------------------------------- */

static void scale_by(float *w, size_t count, int exp2)
{
    double factor = ldexp(1, exp2);
    for (size_t i = 0; exp2 != 0 && i < count; i++)
        w[i] = (float)((double)w[i] * factor);
}

void qt_matrix_rows(float *dst, const struct qt_matrix *w, size_t row0, size_t rows, int exp2)
{
    size_t row_bytes = w->k * (qt_dtype_bits(w->dtype) / 8), count = rows * w->k;
    qt_to_f32(dst, (const unsigned char *)w->data + row0 * row_bytes, w->dtype, count);
    scale_by(dst, count, exp2);
}

struct range {
    float largest, smallest; /* absmax of groups, zero groups excluded */
};

struct walk {
    const struct qt_packed *p;
    const struct qt_matrix *w;       /* source, or NULL */
    const struct qt_matrix *targets; /* values to quantize instead of the source, arranged; or
                                      * NULL */
    float *dst;                      /* decode: output for rows [row0, row0 + rows) */
    size_t row0, rows;
    const float *importance;
    struct qt_error *errors; /* per strip, or NULL */
    struct range *ranges;    /* per strip */
    unsigned char *scratch;  /* per thread: scheme scratch, rows of w, rows of q, a spare row */
    size_t scratch_stride, rows_offset;
};

static int walk_open(struct walk *walk, const struct qt_packed *p, struct qt_err *err)
{
    size_t rows_bytes, own = qt_round_up(p->spec.scheme->scratch_bytes(p), 64);
    walk->p = p;
    if (qt_mul_overflow(&rows_bytes, (2 * QT_FRAG_ROWS + 1) * sizeof(float), p->k) ||
        qt_add_overflow(&walk->scratch_stride, own, qt_round_up(rows_bytes, 64)))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "rows of %zu are too long", p->k);
    walk->rows_offset = own;
    return qt_array_new(&walk->scratch, (size_t)qt_threads(), walk->scratch_stride, err);
}

static struct qt_strip walk_strip(const struct walk *walk, size_t index, int thread, float **w,
                                  float **q)
{
    unsigned char *scratch = walk->scratch + (size_t)thread * walk->scratch_stride;
    *w = (float *)(void *)(scratch + walk->rows_offset);
    *q = *w + QT_FRAG_ROWS * walk->p->k;
    return (struct qt_strip){
        .index = index,
        .rows = qt_min_size(QT_FRAG_ROWS, walk->p->n - index * QT_FRAG_ROWS),
        .scratch = scratch,
    };
}

static size_t strip_count(const struct qt_packed *p)
{
    return qt_ceil_div(p->n, QT_FRAG_ROWS);
}

/* Source rows [row0, row0 + rows) in stored order, times 2^exp2: w[rows][k]. spare: one row. */
static void arranged_rows(float *w, const struct qt_packed *p, const struct qt_matrix *source,
                          size_t row0, size_t rows, int exp2, float *spare)
{
    if (!qt_is_arranged(p)) {
        qt_matrix_rows(w, source, row0, rows, exp2);
        return;
    }
    for (size_t r = row0; r < row0 + rows; r++, w += p->k) {
        qt_matrix_rows(spare, source, qt_packed_source_row(p, r), 1, exp2);
        qt_arrange_row(w, p, spare, r);
    }
}

static void stored_rows(float *w, const struct walk *walk, size_t row0, size_t rows, int exp2,
                        float *spare)
{
    if (walk->targets)
        qt_matrix_rows(w, walk->targets, row0, rows, exp2);
    else
        arranged_rows(w, walk->p, walk->w, row0, rows, exp2, spare);
}

/* Dequantizes a strip in source column order: q[rows][k]. */
static void decode_rows(float *q, const struct qt_packed *p, const struct qt_strip *strip,
                        float *spare)
{
    p->spec.scheme->decode(q, p, strip);
    if (!qt_is_arranged(p))
        return;
    for (size_t r = 0; r < strip->rows; r++, q += p->k) {
        memcpy(spare, q, p->k * sizeof *q);
        qt_arrange_restore_row(q, p, spare, strip->index * QT_FRAG_ROWS + r);
    }
}

static void walk_errors(const struct walk *walk, const struct qt_strip *strip, float *w, float *q)
{
    const struct qt_packed *p = walk->p;
    decode_rows(q, p, strip, q + QT_FRAG_ROWS * p->k);
    for (size_t r = 0; r < strip->rows; r++) {
        size_t row = qt_packed_source_row(p, strip->index * QT_FRAG_ROWS + r);
        qt_matrix_rows(w, walk->w, row, 1, 0);
        qt_error_add_row(&walk->errors[strip->index], w, q + r * p->k, p->k);
    }
}

static void errors_total(struct qt_error *out, const struct walk *walk)
{
    *out = (struct qt_error){0};
    for (size_t i = 0; i < strip_count(walk->p); i++)
        qt_error_add(out, &walk->errors[i]);
}

/* A rounded scale may decode to infinity if weights are near the FP32 maximum. */
static int check_decoded(const struct qt_error *error, const struct walk *walk, struct qt_err *err)
{
    if (isfinite(error->sum_e2))
        return QT_OK;
    return qt_fail(err, QT_E_INPUT, walk->w->file, walk->w->name,
                   "weights near the FP32 maximum become infinite when they are quantized");
}

/* ---- quantize ------------------------------------------------------------------------------- */

static bool is_finite_f64(const struct qt_matrix *w, size_t i)
{
    double x;
    memcpy(&x, (const unsigned char *)w->data + i * sizeof x, sizeof x);
    return isfinite(x);
}

/* Error for a value of stored row `row` that is not finite in FP32. w: [k], scratch. */
static int fail_not_finite(const struct walk *walk, size_t row, float *w, struct qt_err *err)
{
    const struct qt_matrix *m = walk->w;
    row = qt_packed_source_row(walk->p, row);
    qt_matrix_rows(w, m, row, 1, 0);
    size_t bad = qt_find_nonfinite(w, m->k);
    if (bad == m->k)
        return qt_fail(err, QT_E_INPUT, m->file, m->name,
                       "row %zu has values that overflow FP32 when smoothing factors are applied",
                       row);
    bool large = m->dtype == QT_F64 && is_finite_f64(m, row * m->k + bad);
    return qt_fail(err, QT_E_INPUT, m->file, m->name, "value at row %zu, column %zu is %s", row,
                   bad,
                   large           ? "too large for FP32"
                   : isnan(w[bad]) ? "NaN"
                                   : "infinite");
}

static int scan_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    struct walk *walk = ctx;
    const struct qt_packed *p = walk->p;
    const struct qt_rowops *ops = qt_rowops_best();
    size_t group = p->spec.scheme->group(p);
    struct range range = {0, INFINITY};
    float *w, *q;
    struct qt_strip strip = walk_strip(walk, item, thread, &w, &q);
    for (size_t r = 0; r < strip.rows; r++) {
        size_t row = item * QT_FRAG_ROWS + r;
        stored_rows(w, walk, row, 1, 0, q);
        for (size_t k0 = 0; k0 < p->k; k0 += group) {
            float amax = ops->absmax(w + k0, qt_min_size(group, p->k - k0));
            if (!isfinite(amax))
                return fail_not_finite(walk, row, w, err);
            range.largest = fmaxf(range.largest, amax);
            range.smallest = amax > 0 ? fminf(range.smallest, amax) : range.smallest;
        }
    }
    walk->ranges[item] = range;
    return QT_OK;
}

/*
 * Returns 0 if all scales are well inside the normal range of FP16 (a search moves them by at most
 * a factor of two). Otherwise returns the power of two that moves the largest scale just below
 * 2^14, which leaves 28 binades of normal scales below it.
 */
static int choose_scale_exp2(const struct walk *walk)
{
    struct range all = {0, INFINITY};
    for (size_t i = 0; i < strip_count(walk->p); i++) {
        all.largest = fmaxf(all.largest, walk->ranges[i].largest);
        all.smallest = fminf(all.smallest, walk->ranges[i].smallest);
    }
    double unit = walk->p->spec.scheme->unit_scale(walk->p);
    double largest = (double)all.largest * unit, smallest = (double)all.smallest * unit;
    const int wanted =
        walk->p->spec.scheme->scale_exponent ? walk->p->spec.scheme->scale_exponent(walk->p) : 0;
    if (largest == 0 || (!wanted && largest <= 0x1p14 && smallest >= 0x1p-12))
        return 0;
    int exponent;
    frexp(largest, &exponent);
    return exponent - (wanted ? wanted : 14);
}

static int quantize_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    struct walk *walk = ctx;
    const struct qt_packed *p = walk->p;
    float *w, *q;
    struct qt_strip strip = walk_strip(walk, item, thread, &w, &q);
    (void)err;
    stored_rows(w, walk, item * QT_FRAG_ROWS, strip.rows, -p->scale_exp2, q);
    p->spec.scheme->quantize(p, &strip, w, walk->importance);
    if (walk->errors)
        walk_errors(walk, &strip, w, q);
    return QT_OK;
}

static int sections_new(struct qt_packed *p, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < p->nsections && rc == QT_OK; i++)
        rc = qt_array_new(&p->section[i].data, p->section[i].bytes, 1, err);
    return rc;
}

/* Allocates the sections and scans the source. */
static int quantize_begin(struct walk *walk, struct qt_packed *out, const struct qt_spec *spec,
                          const struct qt_matrix *w, const float *importance, bool want_errors,
                          struct qt_err *err)
{
    int rc = QT_OK;
    *walk = (struct walk){.w = w, .importance = importance};
    QT_TRY(qt_packed_describe(out, spec, w->n, w->k, err));
    size_t strips = strip_count(out);
    QT_TRY(sections_new(out, err));
    if (qt_is_arranged(out))
        qt_arrange_store(out, spec->arrange);
    QT_TRY(walk_open(walk, out, err));
    QT_TRY(qt_array_new(&walk->ranges, strips, sizeof *walk->ranges, err));
    if (want_errors)
        QT_TRY(qt_array_new(&walk->errors, strips, sizeof *walk->errors, err));
    QT_TRY(qt_parallel(strips, scan_strip, walk, err));
done:
    return rc;
}

/* Chooses the scale exponent and the parameters that precede the codes (tables), after the scan. */
static int quantize_prepare(struct walk *walk, struct qt_packed *out, struct qt_err *err)
{
    const struct qt_matrix *w = walk->targets ? walk->targets : walk->w;
    out->scale_exp2 = choose_scale_exp2(walk);
    return out->spec.scheme->prepare ? out->spec.scheme->prepare(out, w, walk->importance, err)
                                     : QT_OK;
}

static void quantize_end(struct walk *walk, struct qt_packed *out, int rc)
{
    qt_free(walk->scratch);
    qt_free(walk->ranges);
    qt_free(walk->errors);
    out->spec.arrange = NULL; /* borrowed; the sections hold its content now */
    if (rc < 0)
        qt_packed_free(out);
}

int qt_packed_quantize(struct qt_packed *out, const struct qt_spec *spec, const struct qt_matrix *w,
                       const float *importance, struct qt_error *error, struct qt_err *err)
{
    return qt_packed_quantize_on(NULL, out, spec, w, importance, error, err);
}

static int rows_on_backend(struct qt_backend *be, const struct walk *walk, struct qt_packed *out,
                           struct qt_err *err)
{
    const struct qt_matrix *w = walk->w;
    float *rows = NULL;
    int rc;
    QT_TRY(qt_array_new(&rows, w->n * w->k, sizeof *rows, err));
    qt_matrix_rows(rows, w, 0, w->n, -out->scale_exp2);
    QT_TRY(qt_codebook_quantize_on(be, out, rows, walk->importance, err));
done:
    qt_free(rows);
    return rc;
}

int qt_packed_quantize_on(struct qt_backend *be, struct qt_packed *out, const struct qt_spec *spec,
                          const struct qt_matrix *w, const float *importance,
                          struct qt_error *error, struct qt_err *err)
{
    struct walk walk;
    int rc;
    QT_TRY(quantize_begin(&walk, out, spec, w, importance, error != NULL, err));
    QT_TRY(quantize_prepare(&walk, out, err));
    if (qt_packed_rounds_on(out, be) && !qt_is_arranged(out)) {
        QT_TRY(rows_on_backend(be, &walk, out, err));
        if (error)
            QT_TRY(qt_packed_compare(error, out, w, err));
    } else {
        QT_TRY(qt_parallel(strip_count(out), quantize_strip, &walk, err));
        if (error)
            errors_total(error, &walk);
    }
    if (error)
        QT_TRY(check_decoded(error, &walk, err));
done:
    quantize_end(&walk, out, rc);
    return rc;
}

/* Importance in storage order: the diagonal of H, or 1 / diagonal of H^-1 (conditional). */
static int importance_new(float **out, const struct qt_factor *f, bool conditional,
                          struct qt_err *err)
{
    int rc = qt_array_new(out, f->k, sizeof **out, err);
    if (rc == QT_OK && conditional)
        rc = qt_factor_inverse_diagonal(*out, f, err);
    for (size_t i = 0; rc == QT_OK && i < f->k; i++)
        if (conditional)
            (*out)[i] = 1 / (*out)[i];
        else
            (*out)[f->order[i]] = f->diagonal[i];
    return rc;
}

/* Error under H of rounding to nearest with searched scales, for comparison. rows[n][k]: the
 * targets in stored order. */
static int error_before(double *out, const struct qt_spec *spec, const float *rows, size_t n,
                        const struct qt_factor *factor, const float *importance, struct qt_err *err)
{
    const struct qt_matrix w = {.data = rows, .dtype = QT_F32, .n = n, .k = factor->k};
    struct qt_spec plain = *spec;
    struct qt_packed p;
    float *q = NULL;
    plain.arrange = NULL;
    int rc = qt_packed_quantize(&p, &plain, &w, importance, NULL, err);
    if (rc < 0)
        return rc;
    QT_TRY(qt_array_new(&q, n * w.k, sizeof *q, err));
    QT_TRY(qt_packed_decode(q, &p, 0, n, err));
    QT_TRY(qt_solve_error(out, factor, rows, q, n, err));
done:
    qt_free(q);
    qt_packed_free(&p);
    return rc;
}

/* From squared errors of values divided by 2^exp2 to squared errors of weights. */
static void report_unscale(struct qt_solve_report *report, int exp2)
{
    report->before = ldexp(report->before, 2 * exp2);
    report->after_compensation = ldexp(report->after_compensation, 2 * exp2);
    report->after_descent = ldexp(report->after_descent, 2 * exp2);
}

/* Targets of rounding, in stored order: rows[n][k]. Falls back to W if a target is not finite. */
static int make_targets(float *rows, struct walk *walk, const struct qt_factor *factor,
                        struct qt_err *err)
{
    const struct qt_matrix *w = walk->w;
    float *spare = (float *)(void *)(walk->scratch + walk->rows_offset);
    int rc;
    arranged_rows(rows, walk->p, w, 0, w->n, 0, spare);
    rc = qt_factor_targets(rows, w->n, factor, err);
    if (rc == QT_OK && qt_find_nonfinite(rows, w->n * w->k) < w->n * w->k)
        arranged_rows(rows, walk->p, w, 0, w->n, 0, spare);
    return rc;
}

bool qt_packed_rounds_on(const struct qt_packed *p, const struct qt_backend *be)
{
    struct qt_codebook cb;
    if (!be || !be->round || !p->spec.scheme->codebook)
        return false;
    p->spec.scheme->codebook(&cb, p);
    return !cb.multiples;
}

/* The schemes that are rounded on the host read the factor there. */
static int fetch_factor(struct qt_factor *f, const struct qt_spec *spec, const struct qt_matrix *w,
                        struct qt_err *err)
{
    struct qt_packed p;
    int rc = qt_packed_describe(&p, spec, w->n, w->k, err);
    return rc < 0 || !f->backend || qt_packed_rounds_on(&p, f->backend) ? rc
                                                                        : qt_factor_fetch(f, err);
}

int qt_packed_solve(struct qt_packed *out, const struct qt_spec *spec, const struct qt_matrix *w,
                    struct qt_factor *factor, struct qt_error *error,
                    struct qt_solve_report *report, struct qt_err *err)
{
    const struct qt_solve_options opt = {
        .descent_rounds = spec->scheme->descent_rounds ? spec->scheme->descent_rounds(spec) : 6,
    };
    struct walk walk = {0};
    struct qt_matrix targets = *w;
    float *importance = NULL, *rows = NULL;
    int rc = QT_OK;
    *out = (struct qt_packed){0};
    QT_TRY(fetch_factor(factor, spec, w, err));
    QT_TRY(importance_new(&importance, factor, spec->scheme->conditional, err));
    QT_TRY(quantize_begin(&walk, out, spec, w, importance, false, err));
    QT_TRY(qt_array_new(&rows, w->n * w->k, sizeof *rows, err));
    targets.data = rows;
    targets.dtype = QT_F32;
    QT_TRY(make_targets(rows, &walk, factor, err));
    /* Exponent and tables are chosen for the targets, which may be larger than W. */
    walk.targets = &targets;
    QT_TRY(qt_parallel(strip_count(out), scan_strip, &walk, err));
    QT_TRY(quantize_prepare(&walk, out, err));
    scale_by(rows, w->n * w->k, -out->scale_exp2);
    report->before = NAN;
    QT_TRY(spec->scheme->solve(report, out, rows, factor, &opt, err));
    if (isnan(report->before))
        QT_TRY(error_before(&report->before, spec, rows, w->n, factor, importance, err));
    report_unscale(report, out->scale_exp2);
    if (error) {
        QT_TRY(qt_packed_compare(error, out, w, err));
        QT_TRY(check_decoded(error, &walk, err));
    }
done:
    qt_free(importance);
    qt_free(rows);
    quantize_end(&walk, out, rc);
    return rc;
}

size_t qt_packed_group(const struct qt_packed *p)
{
    return p->spec.scheme->group(p);
}

void qt_packed_free(struct qt_packed *p)
{
    for (size_t i = 0; i < p->nsections; i++)
        qt_free(p->section[i].data);
    *p = (struct qt_packed){0};
}

/* ---- reading -------------------------------------------------------------------------------- */

static int decode_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    struct walk *walk = ctx;
    const struct qt_packed *p = walk->p;
    float *w, *q;
    struct qt_strip strip = walk_strip(walk, walk->row0 / QT_FRAG_ROWS + item, thread, &w, &q);
    size_t first = strip.index * QT_FRAG_ROWS, last = first + strip.rows;
    (void)err;
    decode_rows(q, p, &strip, w);
    first = first < walk->row0 ? walk->row0 : first;
    last = qt_min_size(last, walk->row0 + walk->rows);
    memcpy(walk->dst + (first - walk->row0) * p->k, q + first % QT_FRAG_ROWS * p->k,
           (last - first) * p->k * sizeof *q);
    return QT_OK;
}

int qt_packed_decode(float *w, const struct qt_packed *p, size_t row0, size_t rows,
                     struct qt_err *err)
{
    struct walk walk = {.dst = w, .row0 = row0, .rows = rows};
    size_t strips = qt_ceil_div(row0 + rows, QT_FRAG_ROWS) - row0 / QT_FRAG_ROWS;
    if (rows == 0)
        return QT_OK;
    int rc = walk_open(&walk, p, err);
    if (rc == QT_OK)
        rc = qt_parallel(strips, decode_strip, &walk, err);
    qt_free(walk.scratch);
    return rc;
}

int qt_packed_weights(float *w, const struct qt_packed *p, struct qt_err *err)
{
    size_t row_bytes = p->k * sizeof *w;
    float *stored = NULL;
    int rc = QT_OK;
    if (!qt_is_arranged(p))
        return qt_packed_decode(w, p, 0, p->n, err);
    QT_TRY(qt_array_new(&stored, p->n, row_bytes, err));
    QT_TRY(qt_packed_decode(stored, p, 0, p->n, err));
    for (size_t r = 0; r < p->n; r++)
        memcpy(w + qt_packed_source_row(p, r) * p->k, stored + r * p->k, row_bytes);
done:
    qt_free(stored);
    return rc;
}

static int compare_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    struct walk *walk = ctx;
    float *w, *q;
    struct qt_strip strip = walk_strip(walk, item, thread, &w, &q);
    (void)err;
    walk_errors(walk, &strip, w, q);
    return QT_OK;
}

int qt_packed_compare(struct qt_error *out, const struct qt_packed *p, const struct qt_matrix *w,
                      struct qt_err *err)
{
    struct walk walk = {.w = w};
    int rc = QT_OK;
    QT_TRY(walk_open(&walk, p, err));
    QT_TRY(qt_array_new(&walk.errors, strip_count(p), sizeof *walk.errors, err));
    QT_TRY(qt_parallel(strip_count(p), compare_strip, &walk, err));
    errors_total(out, &walk);
done:
    qt_free(walk.scratch);
    qt_free(walk.errors);
    return rc;
}

static int repack_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    struct walk *walk = ctx;
    float *w, *q;
    struct qt_strip strip = walk_strip(walk, item, thread, &w, &q);
    if (walk->p->spec.scheme->repack_equal(walk->p, &strip))
        return QT_OK;
    return qt_fail(err, QT_E_INPUT, NULL, NULL,
                   "rows %zu to %zu differ from their codes packed again", item * QT_FRAG_ROWS,
                   item * QT_FRAG_ROWS + strip.rows - 1);
}

int qt_packed_check_repack(const struct qt_packed *p, const char *file, const char *name,
                           struct qt_err *err)
{
    struct walk walk = {0};
    struct qt_err inner = {0};
    int rc = walk_open(&walk, p, err);
    if (rc == QT_OK) {
        rc = qt_parallel(strip_count(p), repack_strip, &walk, &inner);
        if (rc < 0)
            qt_fail(err, inner.status, file, name, "%s", inner.reason);
    }
    qt_free(walk.scratch);
    return rc;
}

/* ---- containers ----------------------------------------------------------------------------- */

static int section_read(struct qt_section *s, const struct qt_container *c,
                        const struct qt_tensor *t, struct qt_err *err)
{
    struct qt_blob blob;
    int rc = qt_array_new(&s->data, s->bytes, 1, err);
    if (rc < 0)
        return rc;
    rc = qt_ckpt_read(&blob, qt_container_ckpt(c), t, err);
    if (rc < 0)
        return rc;
    memcpy(s->data, blob.data, s->bytes);
    qt_blob_free(&blob);
    return QT_OK;
}

static bool section_matches(const struct qt_section *s, const char *name, const struct qt_tensor *t)
{
    return strcmp(s->name, name) == 0 && s->dtype == t->dtype && s->ndim == t->ndim &&
           memcmp(s->shape, t->shape, (size_t)s->ndim * sizeof *s->shape) == 0;
}

static int check_entry(struct qt_packed *out, const struct qt_entry *e, const char *file,
                       struct qt_err *err)
{
    struct qt_spec spec;
    struct qt_err inner = {0};
    if (qt_spec_read(&spec, e->spec, &inner) < 0)
        return qt_fail(err, QT_E_INPUT, file, e->name, "scheme '%s': %s", e->spec, inner.reason);
    if (!spec.scheme)
        return qt_fail(err, QT_E_INPUT, file, e->name, "scheme 'none' has no sections");
    if (qt_packed_describe(out, &spec, e->n, e->k, &inner) < 0)
        return qt_fail(err, QT_E_INPUT, file, e->name, "%s", inner.reason);
    out->scale_exp2 = e->scale_exp2;
    if (strcmp(out->layout, e->layout) != 0)
        return qt_fail(
            err, QT_E_UNSUPPORTED, file, e->name,
            "layout '%s', expected '%s': written by another version of qtool, quantize again",
            e->layout, out->layout);
    if (out->nsections != e->nsections)
        return qt_fail(err, QT_E_INPUT, file, e->name, "%zu sections, expected %zu", e->nsections,
                       out->nsections);
    for (size_t i = 0; i < e->nsections; i++)
        if (!section_matches(&out->section[i], e->section[i].name, e->section[i].tensor))
            return qt_fail(err, QT_E_INPUT, file, e->name,
                           "section '%s' does not match scheme '%s' for %zu x %zu",
                           e->section[i].name, e->spec, e->n, e->k);
    return QT_OK;
}

int qt_packed_open(struct qt_packed *out, const struct qt_container *c, const struct qt_entry *e,
                   struct qt_err *err)
{
    struct qt_err inner = {0};
    const char *file = qt_container_dir(c);
    int rc = QT_OK;
    *out = (struct qt_packed){0};
    QT_TRY(check_entry(out, e, file, err));
    for (size_t i = 0; i < out->nsections; i++)
        QT_TRY(section_read(&out->section[i], c, e->section[i].tensor, err));
    rc = out->spec.scheme->check_values(out, &inner);
    if (rc < 0)
        qt_fail(err, rc, file, e->name, "%s", inner.reason);
done:
    if (rc < 0)
        qt_packed_free(out);
    return rc;
}
