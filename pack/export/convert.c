/* One matrix: its codes or weights, panel by panel, through the `convert` of a format. */
#include "pack/export/export.h"

#include <math.h>
#include <string.h>

int qt_export_damaged(const struct qt_tensor *t, struct qt_err *err)
{
    return qt_fail(err, QT_E_INPUT, t->file, t->name,
                   "the data differs from the manifest's CRC-32");
}

int qt_export_packed(struct qt_packed *out, const struct qt_export *x,
                     const struct qt_export_matrix *m, struct qt_err *err)
{
    int rc = qt_packed_open(out, x->container, m->entry, err);
    for (size_t i = 0; rc == QT_OK && i < out->nsections; i++)
        if (qt_crc32(0, out->section[i].data, out->section[i].bytes) != m->entry->section[i].crc)
            rc = qt_export_damaged(m->entry->section[i].tensor, err);
    if (rc < 0)
        qt_packed_free(out);
    return rc;
}

struct conversion {
    const struct qt_export *x;
    const struct qt_export_matrix *m;
    void (*convert)(const struct qt_export_matrix *m, const struct qt_export_panel *panel);
    struct qt_packed p;
    bool arranged; /* rows are stored in another order than in the source */
    size_t scratch_bytes;
    unsigned char *scratch;  /* [threads][scratch_bytes] */
    struct qt_error *errors; /* per panel, if the matrix is rounded */
};

/* Buffers of a thread. */
struct buffers {
    unsigned char *decode;
    struct qt_code_rows rows;
    float *exact_scale, *scale, *weight, *decoded;
};

static unsigned char *take(unsigned char **at, size_t bytes)
{
    unsigned char *start = *at;
    *at += qt_round_up(bytes, 64);
    return start;
}

static size_t weights_of_panel(const struct conversion *c)
{
    const bool needed = c->x->format->weights || (c->m->rounded && !c->x->format->table);
    return needed ? QT_EXPORT_PANEL * c->m->k : 0;
}

static struct buffers buffers_of(const struct conversion *c, unsigned char *at)
{
    const size_t elements = QT_EXPORT_PANEL * c->m->k, weights = weights_of_panel(c);
    const size_t groups = QT_EXPORT_PANEL * c->m->codes.groups;
    struct buffers b;
    b.decode = take(&at, qt_packed_scratch_bytes(&c->p));
    b.rows.code = take(&at, elements);
    b.rows.scale = (uint16_t *)(void *)take(&at, groups * sizeof *b.rows.scale);
    b.rows.zero = take(&at, groups);
    b.exact_scale = (float *)(void *)take(&at, groups * sizeof *b.exact_scale);
    b.scale = (float *)(void *)take(&at, groups * sizeof *b.scale);
    b.weight = (float *)(void *)take(&at, weights * sizeof *b.weight);
    b.decoded = (float *)(void *)take(&at, weights * sizeof *b.decoded);
    return b;
}

static size_t buffer_bytes(const struct conversion *c)
{
    const size_t elements = QT_EXPORT_PANEL * c->m->k;
    const size_t groups = QT_EXPORT_PANEL * c->m->codes.groups;
    return qt_packed_scratch_bytes(&c->p) + elements + weights_of_panel(c) * 2 * sizeof(float) +
           groups * (3 + 2 * sizeof(float)) + 8 * (size_t)64;
}

static void weights_of_codes(float *w, const struct qt_export_matrix *m,
                             const struct qt_code_rows *rows, const float *scale, size_t count)
{
    const struct qt_code_info *c = &m->codes;
    for (size_t g = 0; g < count * c->groups; g++) {
        const size_t k0 = g % c->groups * c->group, n = qt_min_size(c->group, m->k - k0);
        const uint8_t *code = rows->code + g / c->groups * m->k + k0;
        float *out = w + g / c->groups * m->k + k0;
        const float zero = c->asymmetric ? (float)rows->zero[g] : 0;
        for (size_t k = 0; k < n; k++)
            out[k] = scale[g] * (c->value[code[k]] - zero);
    }
}

/* Adds the error of table[code] * scale in place of value[code] * scale. Both depend on the code
 * and the scale alone, so the scales are summed per code. */
static void add_error_of_table(struct qt_error *e, const struct qt_export_matrix *m,
                               const float *table, const struct qt_code_rows *rows,
                               const float *scale, size_t count)
{
    enum { CODES = 256 };
    const struct qt_code_info *c = &m->codes;
    const size_t codes = (size_t)1 << c->bits;
    double sum[CODES] = {0}, largest[CODES] = {0}; /* of scale^2, of |scale| */
    double least = 0;                              /* of largest[]: few scales exceed it */
    unsigned seen[2][CODES];                       /* the next code rarely waits for the last one */
    for (size_t g = 0; g < count * c->groups; g++) {
        const size_t k0 = g % c->groups * c->group, n = qt_min_size(c->group, m->k - k0);
        const uint8_t *code = rows->code + g / c->groups * m->k + k0;
        const double s = fabs((double)scale[g]), s2 = s * s;
        memset(seen[0], 0, codes * sizeof seen[0][0]);
        memset(seen[1], 0, codes * sizeof seen[1][0]);
        for (size_t i = 0; i < n; i++)
            seen[i % 2][code[i]]++;
        for (size_t i = 0; i < codes; i++)
            sum[i] += (seen[0][i] + seen[1][i]) * s2;
        if (s <= least)
            continue;
        least = s;
        for (size_t i = 0; i < codes; i++) {
            if (seen[0][i] + seen[1][i] > 0 && s > largest[i])
                largest[i] = s;
            least = fmin(least, largest[i]);
        }
    }
    for (size_t i = 0; i < codes; i++) {
        const double w = c->value[i], q = table[i], d = w - q;
        e->sum_w2 += sum[i] * w * w;
        e->sum_q2 += sum[i] * q * q;
        e->sum_wq += sum[i] * w * q;
        e->sum_e2 += sum[i] * d * d;
        e->max_abs = fmax(e->max_abs, largest[i] * fabs(d));
    }
    e->count += count * m->k;
}

static void convert_codes(struct conversion *c, struct buffers *b, struct qt_export_panel *panel)
{
    const struct qt_export_matrix *m = c->m;
    qt_packed_codes(&b->rows, &c->p, panel->row0, panel->rows, b->decode);
    for (size_t i = 0; i < panel->rows * m->codes.groups; i++) {
        b->exact_scale[i] =
            ldexpf(qt_f16_to_f32(b->rows.scale[i]), c->p.scale_exp2 + m->scale_shift);
        b->scale[i] = qt_export_round(b->exact_scale[i], m->scale_dtype);
    }
    panel->code = b->rows.code;
    panel->zero = b->rows.zero;
    panel->scale = b->scale;
    if (m->rounded && !c->x->format->table) {
        weights_of_codes(b->weight, m, &b->rows, b->exact_scale, panel->rows);
        weights_of_codes(b->decoded, m, &b->rows, b->scale, panel->rows);
        panel->decoded = b->decoded;
    }
    c->convert(m, panel);
}

static int convert_weights(struct conversion *c, struct buffers *b, struct qt_export_panel *panel,
                           struct qt_err *err)
{
    const size_t row0 = panel->row0, rows = panel->rows, k = c->m->k;
    int rc = qt_packed_decode(b->weight, &c->p, row0, rows, err);
    if (rc < 0)
        return rc;
    const size_t step = c->arranged ? 1 : rows;
    for (size_t r = 0; r < rows; r += step) {
        panel->row0 = c->arranged ? qt_packed_source_row(&c->p, row0 + r) : row0;
        panel->rows = step;
        panel->weight = b->weight + r * k;
        panel->decoded = c->m->rounded ? b->decoded + r * k : NULL;
        c->convert(c->m, panel);
    }
    return QT_OK;
}

static int convert_panel(void *ctx, size_t item, int thread, struct qt_err *err)
{
    struct conversion *c = ctx;
    const struct qt_export_matrix *m = c->m;
    struct buffers b = buffers_of(c, c->scratch + (size_t)thread * c->scratch_bytes);
    struct qt_export_panel panel = {.row0 = item * QT_EXPORT_PANEL};
    panel.rows = qt_min_size(QT_EXPORT_PANEL, m->n - panel.row0);
    const size_t row0 = panel.row0, count = panel.rows * m->k;
    int rc = QT_OK;
    if (c->x->format->weights)
        rc = convert_weights(c, &b, &panel, err);
    else
        convert_codes(c, &b, &panel);
    if (rc < 0 || !m->rounded)
        return rc;
    if (c->x->format->table) {
        add_error_of_table(&c->errors[item], m, c->x->format->table, &b.rows, b.scale, panel.rows);
        return QT_OK;
    }
    if (qt_find_nonfinite(b.decoded, count) < count)
        return qt_fail(
            err, QT_E_UNSUPPORTED, qt_container_dir(c->x->container), m->entry->name,
            "row %zu has values beyond the largest %s; --dtype bfloat16 has a wider range",
            row0 + qt_find_nonfinite(b.decoded, count) / m->k, qt_dtype_name(m->scale_dtype));
    qt_error_add_row(&c->errors[item], b.weight, b.decoded, count);
    return QT_OK;
}

int qt_export_panels(const struct qt_export *x, struct qt_export_matrix *m,
                     void (*convert)(const struct qt_export_matrix *m,
                                     const struct qt_export_panel *panel),
                     struct qt_err *err)
{
    struct qt_export_matrix with_table = *m;
    struct conversion c = {.x = x, .m = &with_table, .convert = convert};
    const size_t panels = qt_ceil_div(m->n, QT_EXPORT_PANEL);
    int rc;
    m->error = (struct qt_error){0};
    QT_TRY(qt_export_packed(&c.p, x, m, err));
    qt_export_set_values(&with_table, &c.p);
    c.arranged = qt_export_is(m->spec, "w4ax");
    c.scratch_bytes = qt_round_up(buffer_bytes(&c), 64);
    QT_TRY(qt_array_new(&c.scratch, (size_t)qt_threads(), c.scratch_bytes, err));
    QT_TRY(qt_array_new(&c.errors, panels, sizeof *c.errors, err));
    QT_TRY(qt_parallel(panels, convert_panel, &c, err));
    for (size_t i = 0; i < panels; i++)
        qt_error_add(&m->error, &c.errors[i]);
done:
    qt_free(c.errors);
    qt_free(c.scratch);
    qt_packed_free(&c.p);
    return rc;
}
