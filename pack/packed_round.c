/* Quantizing a matrix: without a Hessian or under one, on the host or on a backend. */
#include "pack/schemes/codebook.h"
#include "pack/walk.h"

#include <math.h>
#include <string.h>

static void stored_rows(float *w, const struct walk *walk, size_t row0, size_t rows, int exp2,
                        float *spare)
{
    if (walk->targets)
        qt_matrix_rows(w, walk->targets, row0, rows, exp2);
    else
        walk_arranged_rows(w, walk->p, walk->w, row0, rows, exp2, spare);
}

/* A rounded scale may decode to infinity if weights are near the FP32 maximum. */
static int check_decoded(const struct qt_error *error, const struct qt_matrix *w,
                         struct qt_err *err)
{
    if (isfinite(error->sum_e2))
        return QT_OK;
    return qt_fail(err, QT_E_INPUT, w->file, w->name,
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
static int choose_scale_exp2(const struct qt_packed *p, const struct range *all)
{
    const struct qt_scheme *scheme = p->spec.scheme;
    double unit = scheme->unit_scale(p);
    double largest = (double)all->largest * unit, smallest = (double)all->smallest * unit;
    const int wanted = scheme->scale_exponent ? scheme->scale_exponent(p) : 0;
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
    struct qt_strip strip = walk_strip(walk, walk->row0 / QT_FRAG_ROWS + item, thread, &w, &q);
    (void)err;
    stored_rows(w, walk, strip.index * QT_FRAG_ROWS, strip.rows, -p->scale_exp2, q);
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

/* Allocates the sections. */
static int quantize_begin(struct walk *walk, struct qt_packed *out, const struct qt_spec *spec,
                          const struct qt_matrix *w, const float *importance, bool want_errors,
                          struct qt_err *err)
{
    int rc = QT_OK;
    *walk = (struct walk){.w = w, .importance = importance};
    QT_TRY(qt_packed_describe(out, spec, w->n, w->k, err));
    walk->p = out;
    QT_TRY(sections_new(out, err));
    if (qt_is_arranged(out))
        qt_arrange_store(out, spec->arrange);
    if (want_errors)
        QT_TRY(qt_array_new(&walk->errors, walk_strips(out), sizeof *walk->errors, err));
done:
    return rc;
}

/* Memory for strips, which a backend that has the weights does not need. */
static int walk_need(struct walk *walk, struct qt_err *err)
{
    return walk->scratch ? QT_OK : walk_open(walk, walk->p, err);
}

/* Checks that all values are finite, and finds their range. */
static int scan(struct range *all, struct walk *walk, struct qt_err *err)
{
    const size_t strips = walk_strips(walk->p);
    int rc;
    *all = (struct range){0, INFINITY};
    QT_TRY(walk_need(walk, err));
    if (!walk->ranges)
        QT_TRY(qt_array_new(&walk->ranges, strips, sizeof *walk->ranges, err));
    QT_TRY(qt_parallel(strips, scan_strip, walk, err));
    for (size_t i = 0; i < strips; i++) {
        all->largest = fmaxf(all->largest, walk->ranges[i].largest);
        all->smallest = fminf(all->smallest, walk->ranges[i].smallest);
    }
done:
    return rc;
}

/* Chooses the scale exponent and the parameters that precede the codes (tables), for the values w
 * with this range. */
static int quantize_prepare(struct walk *walk, struct qt_packed *out, const struct qt_matrix *w,
                            const struct qt_copy *on, const struct range *range, struct qt_err *err)
{
    out->scale_exp2 = choose_scale_exp2(out, range);
    return out->spec.scheme->prepare ? out->spec.scheme->prepare(out, w, on, walk->importance, err)
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

static int quantize_on_host(struct qt_packed *out, const struct qt_spec *spec,
                            const struct qt_matrix *w, const float *importance,
                            struct qt_error *error, struct qt_err *err)
{
    struct walk walk;
    struct range range;
    int rc;
    QT_TRY(quantize_begin(&walk, out, spec, w, importance, error != NULL, err));
    QT_TRY(scan(&range, &walk, err));
    QT_TRY(quantize_prepare(&walk, out, w, NULL, &range, err));
    QT_TRY(qt_parallel(walk_strips(out), quantize_strip, &walk, err));
    if (error) {
        walk_total(error, &walk);
        QT_TRY(check_decoded(error, w, err));
    }
done:
    quantize_end(&walk, out, rc);
    return rc;
}

/* ---- rounding on a backend ------------------------------------------------------------------ */

struct arrange_job {
    float *rows;
    const struct walk *walk;
};

static int arrange_strip(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct arrange_job *job = ctx;
    float *w, *q;
    const struct qt_strip strip = walk_strip(job->walk, item, thread, &w, &q);
    const size_t row0 = item * QT_FRAG_ROWS;
    (void)err;
    walk_arranged_rows(job->rows + row0 * job->walk->p->k, job->walk->p, job->walk->w, row0,
                       strip.rows, 0, q);
    return QT_OK;
}

/* rows[n][k] = the source weights in stored order. */
static int arrange_all(float *rows, struct walk *walk, struct qt_err *err)
{
    int rc = walk_need(walk, err);
    return rc < 0 ? rc
                  : qt_parallel(walk_strips(walk->p), arrange_strip,
                                &(struct arrange_job){rows, walk}, err);
}

/* The source weights in stored order: t[n][k], backend memory. */
static int load_weights(float *t, struct walk *walk, struct qt_backend *be,
                        const struct qt_place *place, struct qt_err *err)
{
    const struct qt_matrix *w = walk->w;
    const size_t bytes = w->n * w->k * sizeof *t;
    const bool arranged = qt_is_arranged(walk->p);
    float *rows = NULL;
    int rc;
    if (place && place->w)
        return arranged ? qt_arrange_on(be, t, place->w, walk->p, err)
                        : be->copy(be, t, place->w, bytes, err);
    if (be->upload_narrow && !arranged && (w->dtype == QT_F16 || w->dtype == QT_BF16))
        return be->upload_narrow(be, t, w->data, w->dtype == QT_BF16, w->n * w->k, err);
    QT_TRY(qt_array_new(&rows, w->n * w->k, sizeof *rows, err));
    QT_TRY(arrange_all(rows, walk, err));
    QT_TRY(be->upload(be, t, rows, bytes, err));
done:
    qt_free(rows);
    return rc;
}

/* t = the targets; W if a target is not finite. */
static int load_targets(float *t, struct range *range, struct walk *walk, struct qt_backend *be,
                        const struct qt_factor *factor, const struct qt_place *place,
                        struct qt_err *err)
{
    const struct qt_packed *p = walk->p;
    int rc;
    for (int corrected = factor != NULL; corrected >= 0; corrected--) {
        QT_TRY(load_weights(t, walk, be, place, err));
        if (corrected)
            QT_TRY(qt_factor_targets_on_backend(t, p->n, factor, err));
        QT_TRY(be->group_range(be, &range->largest, &range->smallest, t, p->n, p->k,
                               p->spec.scheme->group(p), err));
        if (isfinite(range->largest))
            return QT_OK;
    }
    QT_TRY(scan(range, walk, err)); /* names the value */
    rc = qt_fail(err, QT_E_INTERNAL, walk->w->file, walk->w->name,
                 "weights in the backend's memory are not finite");
done:
    return rc;
}

/* t *= 2^exp2, in steps that FP32 can hold. */
static int scale_on_backend(struct qt_backend *be, float *t, size_t count, int exp2,
                            struct qt_err *err)
{
    int rc = QT_OK;
    for (int step; exp2 && rc == QT_OK; exp2 -= step) {
        step = exp2 < -100 ? -100 : exp2 > 100 ? 100 : exp2;
        rc = be->scale(be, t, ldexpf(1, step), count, err);
    }
    return rc;
}

static int descent_rounds(const struct qt_spec *spec, const struct qt_place *place)
{
    return place && place->only_compensated ? 0
           : spec->scheme->descent_rounds   ? spec->scheme->descent_rounds(spec)
                                            : 6;
}

struct qt_rounding {
    struct qt_packed *out;
    struct walk walk;
    struct qt_backend *be;
    struct qt_round job;
    void *state;       /* of the scheme */
    float *importance; /* owned */
    float *wanted;     /* receives the rounded weights in source order; NULL: job.rounded does */
    struct qt_solve_report *report;
    bool done; /* out->codes are complete */
};

/* Makes the job. The factor may be NULL. */
static int begin_on_backend(struct qt_rounding *r, const struct qt_factor *factor,
                            const struct qt_place *place, struct qt_err *err)
{
    struct qt_packed *out = r->out;
    struct qt_backend *be = r->be;
    struct qt_round *job = &r->job;
    float *const wanted = place ? place->rounded : NULL;
    struct qt_matrix targets = *r->walk.w;
    struct range range;
    int rc = QT_OK;
    *job = (struct qt_round){.n = out->n,
                             .k = out->k,
                             .importance = r->walk.importance,
                             .rounded = wanted,
                             .only_rounded = place && place->only_rounded};
    if (wanted && qt_is_arranged(out)) {
        job->rounded = NULL;
        r->wanted = wanted;
        QT_TRY(qt_backend_floats(&job->rounded, be, out->n, out->k, err));
    }
    QT_TRY(qt_backend_floats(&job->w, be, out->n, out->k, err));
    QT_TRY(load_targets(job->w, &range, &r->walk, be, factor, place, err));
    targets.data = NULL;
    targets.dtype = QT_F32;
    QT_TRY(quantize_prepare(&r->walk, out, &targets, &(struct qt_copy){be, job->w}, &range, err));
    QT_TRY(scale_on_backend(be, job->w, out->n * out->k, -out->scale_exp2, err));
    job->exp2 = out->scale_exp2;
    if (factor) {
        job->h = factor->backend_h;
        job->v = factor->backend_v;
        job->order = factor->order;
        job->group_at = factor->group;
        job->descent_rounds = descent_rounds(&out->spec, place);
        job->min_gain = QT_SOLVE_MIN_GAIN;
    }
    QT_TRY(out->spec.scheme->round_begin(&r->state, out, factor, job, err));
done:
    return rc;
}

/* Importance in storage order: the diagonal of H, or 1 / diagonal of H^-1 (conditional). */
static int importance_new(float **out, struct qt_factor *f, bool conditional, struct qt_err *err)
{
    int rc = qt_array_new(out, f->k, sizeof **out, err);
    if (rc == QT_OK && conditional)
        rc = qt_factor_invert_diagonal(f, err);
    for (size_t i = 0; rc == QT_OK && i < f->k; i++)
        if (conditional)
            (*out)[i] = 1 / f->inverse_diagonal[i];
        else
            (*out)[f->order[i]] = f->diagonal[i];
    return rc;
}

/* Quantizes rows of w, which is in stored order. */
static int quantize_stored(struct qt_packed *out, const struct qt_spec *spec,
                           const struct qt_matrix *w, const struct qt_packed_part *part,
                           const float *importance, struct qt_err *err)
{
    struct walk walk;
    struct range range;
    int rc;
    QT_TRY(quantize_begin(&walk, out, spec, w, importance, false, err));
    walk.targets = w;
    QT_TRY(scan(&range, &walk, err));
    QT_TRY(quantize_prepare(&walk, out, w, NULL, &range, err));
    walk.row0 = part->first;
    QT_TRY(qt_parallel(qt_ceil_div(part->end - part->first, QT_FRAG_ROWS), quantize_strip, &walk,
                       err));
done:
    quantize_end(&walk, out, rc);
    return rc;
}

/* Error under H of rounding to nearest with searched scales, for comparison: of each panel of the
 * part. rows[n][k]: the targets in stored order. */
static int error_before(const struct qt_packed_part *part, const struct qt_spec *spec,
                        const float *rows, size_t n, const struct qt_factor *factor,
                        const float *importance, struct qt_err *err)
{
    const struct qt_matrix w = {.data = rows, .dtype = QT_F32, .n = n, .k = factor->k};
    const size_t own = part->end - part->first, panels = qt_ceil_div(own, QT_PANEL_ROWS);
    struct qt_spec plain = *spec;
    struct qt_packed p;
    float *q = NULL;
    double *before = NULL;
    plain.arrange = NULL;
    int rc = quantize_stored(&p, &plain, &w, part, importance, err);
    if (rc < 0)
        return rc;
    QT_TRY(qt_array_new(&q, own * w.k, sizeof *q, err));
    QT_TRY(qt_array_new(&before, panels, sizeof *before, err));
    QT_TRY(qt_packed_decode_stored(q, &p, part->first, own, err));
    QT_TRY(qt_solve_errors(before, factor, rows + part->first * w.k, q, own, err));
    for (size_t i = 0; i < panels; i++)
        part->panels[part->first / QT_PANEL_ROWS + i].before = before[i];
done:
    qt_free(q);
    qt_free(before);
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
    int rc;
    QT_TRY(arrange_all(rows, walk, err));
    QT_TRY(qt_factor_targets(rows, w->n, factor, err));
    if (qt_find_nonfinite(rows, w->n * w->k) < w->n * w->k)
        QT_TRY(arrange_all(rows, walk, err));
done:
    return rc;
}

bool qt_packed_rounds_on(const struct qt_packed *p, const struct qt_backend *be)
{
    const struct qt_scheme *scheme = p->spec.scheme;
    return be && be->round && scheme->rounds_on && scheme->rounds_on(p);
}

size_t qt_packed_unit(const struct qt_packed *p, const struct qt_backend *be)
{
    return p->spec.scheme->codebook && (!be || be->host) ? QT_PANEL_ROWS : 0;
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

static int solve_on_host(struct qt_packed *out, struct walk *walk, const struct qt_factor *factor,
                         const struct qt_place *place, const struct qt_packed_part *part,
                         struct qt_solve_report *report, struct qt_err *err)
{
    const struct qt_matrix *w = walk->w;
    const size_t first = part->first, own = part->end - first;
    const struct qt_solve_options opt = {.descent_rounds = descent_rounds(&out->spec, place),
                                         .panels = part->panels + first / QT_PANEL_ROWS};
    struct qt_packed rows_of;
    struct qt_matrix targets = *w;
    struct range range;
    float *rows = NULL;
    int rc;
    QT_TRY(scan(&range, walk, err));
    QT_TRY(qt_array_new(&rows, w->n * w->k, sizeof *rows, err));
    targets.data = rows;
    targets.dtype = QT_F32;
    QT_TRY(make_targets(rows, walk, factor, err));
    /* Exponent and tables are chosen for the targets, which may be larger than W. */
    walk->targets = &targets;
    QT_TRY(scan(&range, walk, err));
    QT_TRY(quantize_prepare(walk, out, &targets, NULL, &range, err));
    walk_scale(rows, w->n * w->k, -out->scale_exp2);
    if (own < w->n)
        qt_codebook_rows(&rows_of, out, first, part->end);
    QT_TRY(out->spec.scheme->solve(report, own < w->n ? &rows_of : out, rows + first * w->k, factor,
                                   &opt, err));
    QT_TRY(error_before(part, &out->spec, rows, w->n, factor, walk->importance, err));
    report->before = 0;
    for (size_t i = 0; i < qt_ceil_div(own, QT_PANEL_ROWS); i++)
        report->before += opt.panels[i].before;
done:
    walk->targets = NULL;
    qt_free(rows);
    return rc;
}

static int end_on_backend(struct qt_rounding *r, struct qt_err *err)
{
    const struct qt_round *job = &r->job;
    int rc = QT_OK;
    if (r->wanted)
        QT_TRY(qt_arrange_restore_on(r->be, r->wanted, job->rounded, r->out, err));
    if (r->report) {
        *r->report =
            (struct qt_solve_report){job->before, job->after_compensation, job->after_descent};
        report_unscale(r->report, r->out->scale_exp2);
    }
    r->done = true;
done:
    return rc;
}

/* part may be NULL. */
static int round_on_host(struct qt_packed *out, struct walk *walk, const struct qt_factor *factor,
                         const struct qt_place *place, const struct qt_packed_part *part,
                         struct qt_solve_report *report, struct qt_err *err)
{
    const size_t n = walk->w->n;
    struct qt_packed_part all = {0, n, NULL};
    int rc;
    if (!part) {
        QT_TRY(qt_array_new(&all.panels, qt_ceil_div(n, QT_PANEL_ROWS), sizeof *all.panels, err));
        part = &all;
    }
    QT_TRY(solve_on_host(out, walk, factor, place, part, report, err));
    report_unscale(report, out->scale_exp2);
    for (size_t i = part->first / QT_PANEL_ROWS; i < qt_ceil_div(part->end, QT_PANEL_ROWS); i++)
        report_unscale(&part->panels[i], out->scale_exp2);
done:
    qt_free(all.panels);
    return rc;
}

/* Rounds the matrix of *r, if that is done on the host, under the factor. */
static int solve_begin(struct qt_rounding *r, const struct qt_spec *spec, const struct qt_matrix *w,
                       struct qt_factor *factor, const struct qt_place *place,
                       const struct qt_packed_part *part, struct qt_err *err)
{
    int rc;
    QT_TRY(fetch_factor(factor, spec, w, err));
    QT_TRY(importance_new(&r->importance, factor, spec->scheme->conditional, err));
    QT_TRY(quantize_begin(&r->walk, r->out, spec, w, r->importance, false, err));
    r->be = factor->backend;
    if (qt_packed_rounds_on(r->out, r->be))
        return begin_on_backend(r, factor, place, err);
    QT_TRY(round_on_host(r->out, &r->walk, factor, place, part, r->report, err));
    r->done = true;
done:
    return rc;
}

/* True if a matrix of this scheme is rounded on the backend without a Hessian. */
static bool quantizes_on(const struct qt_spec *spec, const struct qt_matrix *w,
                         const struct qt_backend *be)
{
    struct qt_packed p;
    return qt_packed_describe(&p, spec, w->n, w->k, NULL) == QT_OK && qt_packed_rounds_on(&p, be);
}

/* The same without a factor. importance may be NULL. */
static int plain_begin(struct qt_rounding *r, const struct qt_spec *spec, const struct qt_matrix *w,
                       const float *importance, const struct qt_place *place, struct qt_err *err)
{
    int rc;
    if (!quantizes_on(spec, w, r->be)) {
        QT_TRY(quantize_on_host(r->out, spec, w, importance, NULL, err));
        r->done = true;
        return QT_OK;
    }
    QT_TRY(quantize_begin(&r->walk, r->out, spec, w, importance, false, err));
    QT_TRY(begin_on_backend(r, NULL, place, err));
done:
    return rc;
}

int qt_rounding_new(struct qt_rounding **out, struct qt_packed *packed, const struct qt_spec *spec,
                    const struct qt_matrix *w, struct qt_factor *factor, struct qt_backend *be,
                    const struct qt_place *place, const struct qt_packed_part *part,
                    struct qt_solve_report *report, struct qt_err *err)
{
    struct qt_rounding *r;
    int rc;
    *out = NULL;
    *packed = (struct qt_packed){0};
    QT_TRY(qt_array_new(&r, 1, sizeof *r, err));
    *r = (struct qt_rounding){.out = packed, .be = be, .report = report};
    *out = r;
    QT_TRY(factor ? solve_begin(r, spec, w, factor, place, part, err)
                  : plain_begin(r, spec, w, NULL, place, err));
done:
    return rc;
}

bool qt_rounding_done(const struct qt_rounding *r)
{
    return r->done;
}

int qt_rounding_run(struct qt_rounding *const *all, size_t n, struct qt_err *err)
{
    struct qt_backend *be = NULL;
    struct qt_round **job = NULL;
    size_t jobs = 0;
    int rc;
    QT_TRY(qt_array_new(&job, n, sizeof *job, err));
    for (size_t i = 0; i < n; i++)
        if (!all[i]->done) {
            be = all[i]->be;
            job[jobs++] = &all[i]->job;
        }
    if (jobs)
        QT_TRY(be->round(be, job, jobs, err));
    for (size_t i = 0; i < n; i++)
        if (!all[i]->done)
            QT_TRY(end_on_backend(all[i], err));
done:
    qt_free(job);
    return rc;
}

static void rounding_end(struct qt_rounding *r)
{
    if (r->state)
        r->out->spec.scheme->round_end(r->state, r->out, r->done);
    if (r->wanted)
        r->be->free(r->be, r->job.rounded);
    if (r->be)
        r->be->free(r->be, r->job.w);
    quantize_end(&r->walk, r->out, r->done ? QT_OK : QT_E_INTERNAL);
    qt_free(r->importance);
}

void qt_rounding_free(struct qt_rounding *r)
{
    if (!r)
        return;
    rounding_end(r);
    qt_free(r);
}

int qt_packed_round(struct qt_packed *out, const struct qt_spec *spec, const struct qt_matrix *w,
                    struct qt_factor *factor, struct qt_backend *be, const struct qt_place *place,
                    const struct qt_packed_part *part, struct qt_solve_report *report,
                    struct qt_err *err)
{
    struct qt_rounding *r;
    int rc = qt_rounding_new(&r, out, spec, w, factor, be, place, part, report, err);
    if (rc == QT_OK)
        rc = qt_rounding_run(&r, 1, err);
    qt_rounding_free(r);
    return rc;
}

int qt_packed_complete(struct qt_packed *p, const struct qt_matrix *w, struct qt_error *error,
                       struct qt_err *err)
{
    int rc = QT_OK;
    if (p->codes)
        QT_TRY(p->spec.scheme->pack(p, p->codes, err));
    qt_codes_free(p->codes);
    p->codes = NULL;
    if (error) {
        QT_TRY(qt_packed_compare(error, p, w, err));
        QT_TRY(check_decoded(error, w, err));
    }
done:
    return rc;
}

/* rc: of the function that has made *out. */
static int complete(struct qt_packed *out, int rc, const struct qt_matrix *w,
                    struct qt_error *error, struct qt_err *err)
{
    if (rc == QT_OK)
        rc = qt_packed_complete(out, w, error, err);
    if (rc < 0)
        qt_packed_free(out);
    return rc;
}

int qt_packed_solve(struct qt_packed *out, const struct qt_spec *spec, const struct qt_matrix *w,
                    struct qt_factor *factor, struct qt_error *error,
                    struct qt_solve_report *report, struct qt_err *err)
{
    return complete(out,
                    qt_packed_round(out, spec, w, factor, factor->backend, NULL, NULL, report, err),
                    w, error, err);
}

int qt_packed_quantize_on(struct qt_backend *be, struct qt_packed *out, const struct qt_spec *spec,
                          const struct qt_matrix *w, const float *importance,
                          struct qt_error *error, struct qt_err *err)
{
    struct qt_rounding r = {.out = out, .be = be}, *one = &r;
    int rc;
    if (!quantizes_on(spec, w, be))
        return quantize_on_host(out, spec, w, importance, error, err);
    *out = (struct qt_packed){0};
    rc = plain_begin(&r, spec, w, importance, NULL, err);
    if (rc == QT_OK)
        rc = qt_rounding_run(&one, 1, err);
    rounding_end(&r);
    return complete(out, rc, w, error, err);
}

int qt_packed_quantize(struct qt_packed *out, const struct qt_spec *spec, const struct qt_matrix *w,
                       const float *importance, struct qt_error *error, struct qt_err *err)
{
    return quantize_on_host(out, spec, w, importance, error, err);
}
