/* One packed matrix: everything that does not depend on the scheme. */
#include "pack/schemes/codebook.h"
#include "pack/walk.h"

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

void walk_scale(float *w, size_t count, int exp2)
{
    double factor = ldexp(1, exp2);
    for (size_t i = 0; exp2 != 0 && i < count; i++)
        w[i] = (float)((double)w[i] * factor);
}

void qt_matrix_rows(float *dst, const struct qt_matrix *w, size_t row0, size_t rows, int exp2)
{
    size_t row_bytes = w->k * (qt_dtype_bits(w->dtype) / 8), count = rows * w->k;
    qt_to_f32(dst, (const unsigned char *)w->data + row0 * row_bytes, w->dtype, count);
    walk_scale(dst, count, exp2);
}

int walk_open(struct walk *walk, const struct qt_packed *p, struct qt_err *err)
{
    size_t rows_bytes, own = qt_round_up(p->spec.scheme->scratch_bytes(p), 64);
    walk->p = p;
    if (qt_mul_overflow(&rows_bytes, (2 * QT_FRAG_ROWS + 1) * sizeof(float), p->k) ||
        qt_add_overflow(&walk->scratch_stride, own, qt_round_up(rows_bytes, 64)))
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "rows of %zu are too long", p->k);
    walk->rows_offset = own;
    return qt_array_new(&walk->scratch, (size_t)qt_threads(), walk->scratch_stride, err);
}

struct qt_strip walk_strip(const struct walk *walk, size_t index, int thread, float **w, float **q)
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

size_t walk_strips(const struct qt_packed *p)
{
    return qt_ceil_div(p->n, QT_FRAG_ROWS);
}

void walk_arranged_rows(float *w, const struct qt_packed *p, const struct qt_matrix *source,
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

/* Dequantizes a strip, in source column order unless walk->stored: q[rows][k]. */
static void decode_rows(float *q, const struct walk *walk, const struct qt_strip *strip,
                        float *spare)
{
    const struct qt_packed *p = walk->p;
    p->spec.scheme->decode(q, p, strip);
    if (walk->stored || !qt_is_arranged(p))
        return;
    for (size_t r = 0; r < strip->rows; r++, q += p->k) {
        memcpy(spare, q, p->k * sizeof *q);
        qt_arrange_restore_row(q, p, spare, strip->index * QT_FRAG_ROWS + r);
    }
}

void walk_errors(const struct walk *walk, const struct qt_strip *strip, float *w, float *q)
{
    const struct qt_packed *p = walk->p;
    decode_rows(q, walk, strip, q + QT_FRAG_ROWS * p->k);
    for (size_t r = 0; r < strip->rows; r++) {
        size_t row = qt_packed_source_row(p, strip->index * QT_FRAG_ROWS + r);
        qt_matrix_rows(w, walk->w, row, 1, 0);
        qt_error_add_row(&walk->errors[strip->index], w, q + r * p->k, p->k);
    }
}

void walk_total(struct qt_error *out, const struct walk *walk)
{
    *out = (struct qt_error){0};
    for (size_t i = 0; i < walk_strips(walk->p); i++)
        qt_error_add(out, &walk->errors[i]);
}

size_t qt_packed_divided(const struct qt_packed *p)
{
    struct qt_codebook cb;
    if (!p->spec.scheme->codebook)
        return 0;
    p->spec.scheme->codebook(&cb, p);
    return qt_codebook_sections(&cb);
}

size_t qt_packed_group(const struct qt_packed *p)
{
    return p->spec.scheme->group(p);
}

void qt_packed_free(struct qt_packed *p)
{
    for (size_t i = 0; i < p->nsections; i++)
        qt_free(p->section[i].data);
    qt_codes_free(p->codes);
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
    decode_rows(q, walk, &strip, w);
    first = first < walk->row0 ? walk->row0 : first;
    last = qt_min_size(last, walk->row0 + walk->rows);
    memcpy(walk->dst + (first - walk->row0) * p->k, q + first % QT_FRAG_ROWS * p->k,
           (last - first) * p->k * sizeof *q);
    return QT_OK;
}

static int decode(struct walk walk, const struct qt_packed *p, struct qt_err *err)
{
    const size_t row0 = walk.row0, rows = walk.rows;
    size_t strips = qt_ceil_div(row0 + rows, QT_FRAG_ROWS) - row0 / QT_FRAG_ROWS;
    if (rows == 0)
        return QT_OK;
    int rc = walk_open(&walk, p, err);
    if (rc == QT_OK)
        rc = qt_parallel(strips, decode_strip, &walk, err);
    qt_free(walk.scratch);
    return rc;
}

int qt_packed_decode(float *w, const struct qt_packed *p, size_t row0, size_t rows,
                     struct qt_err *err)
{
    return decode((struct walk){.dst = w, .row0 = row0, .rows = rows}, p, err);
}

int qt_packed_decode_stored(float *w, const struct qt_packed *p, size_t row0, size_t rows,
                            struct qt_err *err)
{
    return decode((struct walk){.dst = w, .row0 = row0, .rows = rows, .stored = true}, p, err);
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
    QT_TRY(qt_array_new(&walk.errors, walk_strips(p), sizeof *walk.errors, err));
    QT_TRY(qt_parallel(walk_strips(p), compare_strip, &walk, err));
    walk_total(out, &walk);
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
        rc = qt_parallel(walk_strips(p), repack_strip, &walk, &inner);
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

static int check_entry(struct qt_packed *out, const struct qt_entry *e, int version,
                       const char *file, struct qt_err *err)
{
    struct qt_spec spec;
    struct qt_err inner = {0};
    if (qt_spec_read(&spec, e->spec, &inner) < 0)
        return qt_fail(err, QT_E_INPUT, file, e->name, "scheme '%s': %s", e->spec, inner.reason);
    if (!spec.scheme)
        return qt_fail(err, QT_E_INPUT, file, e->name, "scheme 'none' has no sections");
    const char *added = spec.scheme->added_param;
    if (added && qt_spec_format_version(&spec) != version)
        return qt_fail(err, QT_E_INPUT, file, e->name,
                       version == 1 ? "scheme '%s': format version 1 has no parameter '%s'"
                                    : "scheme '%s' lacks the parameter '%s'",
                       e->spec, added);
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
    QT_TRY(check_entry(out, e, qt_container_version(c), file, err));
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
