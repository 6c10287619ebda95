/* Speed of the fused kernels: bench, and the tensors of containers (verify --device cuda). */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>

/* ---- containers ----------------------------------------------------------------------------- */

enum { MOST_M = 8 };

/* Sums over the matrices of a container, at each number of tokens. */
struct sums {
    double m[MOST_M], us[MOST_M], cublas_us[MOST_M];
    size_t n;
};

static void take_times(struct sums *sums, const json_t *times)
{
    size_t i;
    const json_t *time;
    json_array_foreach (times, i, time) {
        const double m = member(time, "m"), us = member(time, "us");
        size_t at = 0;
        while (at < sums->n && sums->m[at] != m)
            at++;
        if (!(m > 0 && us > 0) || at == MOST_M)
            continue;
        if (at == sums->n) {
            sums->m[sums->n++] = m;
            sums->us[at] = sums->cublas_us[at] = 0;
        }
        sums->us[at] += us;
        sums->cublas_us[at] += member(time, "cublas_us");
    }
}

static const struct column container_columns[] = {
    {"container", "container", NULL},
    {"gpu", "GPU", NULL},
    {"m", "batch", "%.0f"},
    {"us", "all linears (us)", "%.1f"},
    {"tokens_per_s", "tokens/s", "%.0f"},
    {"cublas_us", "cuBLAS FP16 (us)", "%.1f"},
    {"speedup", "speed-up", "%.2f"},
};

static bool sum_document(struct sums *sums, const struct document *d)
{
    size_t i;
    const json_t *kernel;
    *sums = (struct sums){0};
    if (d->kind == DOCUMENT_VERIFY)
        json_array_foreach (json_object_get(d->json, "kernels"), i, kernel) {
            take_times(sums, json_object_get(kernel, "times"));
        }
    return sums->n > 0;
}

static int write_containers(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    struct axis x = axis_new("batch (tokens per step)", true), y = axis_new("tokens/s", true);
    const char **names = NULL;
    struct chart chart;
    struct sums s;
    struct table t;
    size_t n = 0;
    int rc = qt_array_new(&names, r->ndocuments, sizeof *names, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < r->ndocuments; i++) {
        if (!sum_document(&s, &r->documents[i]))
            continue;
        for (size_t k = 0; k < s.n; k++) {
            axis_take(&x, s.m[k]);
            axis_take(&y, 1e6 * s.m[k] / s.us[k]);
        }
        n++;
    }
    if (n == 0)
        goto done;
    html(&p->text,
         "<h3>Containers: all linears one after the other</h3>\n<p>The matrix products of one "
         "decode step, without attention and norms: an upper bound of the tokens per "
         "second.</p>\n");
    TABLE_BEGIN(&t, "Tokens per second against batch", container_columns);
    chart_begin(&chart, p, "Tokens per second against batch", &x, &y);
    n = 0;
    for (size_t i = 0; i < r->ndocuments; i++) {
        const struct document *d = &r->documents[i];
        double speed[MOST_M];
        if (!sum_document(&s, d))
            continue;
        for (size_t k = 0; k < s.n; k++) {
            speed[k] = 1e6 * s.m[k] / s.us[k];
            row_begin(&t);
            cell_text(&t, r->subjects[d->subject].label);
            cell_text(&t, member_text(json_object_get(d->json, "gpu"), "name"));
            cell_number(&t, s.m[k]);
            cell_number(&t, s.us[k]);
            cell_number(&t, speed[k]);
            cell_number(&t, s.cublas_us[k]);
            cell_number(&t, s.cublas_us[k] / s.us[k]);
        }
        chart_line(&chart, n, n >= CHART_SERIES, s.m, speed, s.n);
        names[n++] = r->subjects[d->subject].label;
    }
    chart_end(&chart);
    chart_legend(p, names, n, n > CHART_SERIES ? ~0u << CHART_SERIES : 0);
    page_table(p, &t, false);
done:
    qt_free(names);
    return QT_OK;
}

/* ---- bench ---------------------------------------------------------------------------------- */

static const struct column row_columns[] = {
    {"scheme", "scheme", NULL},
    {"shape", "shape", NULL},
    {"m", "batch", "%.0f"},
    {"us", "us", "%.2f"},
    {"floor_us", "floor (us)", "%.2f"},
    {"floor_share", "of floor (%)", "%.1f"},
    {"tokens_per_s", "tokens/s", "%.0f"},
    {"gb_per_s", "GB/s", "%.0f"},
    {"tflop_per_s", "TFLOP/s", "%.1f"},
    {"cublas_speedup", "of cuBLAS (x)", "%.2f"},
    {"config", "kernel", NULL},
    {"refused", "refused", NULL},
};
static const struct column cache_columns[] = {
    {"format", "cache", NULL},          {"paged", "pages", NULL},
    {"shape", "shape", NULL},           {"m", "batch", "%.0f"},
    {"length", "length", "%.0f"},       {"us", "us", "%.2f"},
    {"floor_us", "floor (us)", "%.2f"}, {"floor_share", "of floor (%)", "%.1f"},
    {"gb_per_s", "GB/s", "%.0f"},       {"f16_speedup", "of FP16 (x)", "%.2f"},
    {"refused", "refused", NULL},
};

static void text_of_shape(char buf[96], const json_t *row)
{
    const char *name = member_text(row, "shape_name");
    snprintf(buf, 96, "%.60s%s%.0fx%.0f", name ? name : "", name ? " " : "", member(row, "n"),
             member(row, "k"));
}

static void write_rows(struct page *p, const json_t *rows)
{
    struct table t;
    size_t i;
    const json_t *row;
    TABLE_BEGIN(&t, "Products with packed weights", row_columns);
    json_array_foreach (rows, i, row) {
        char shape[96];
        text_of_shape(shape, row);
        row_begin(&t);
        cell_text(&t, member_text(row, "scheme"));
        cell_text(&t, shape);
        cell_number(&t, member(row, "m"));
        cell_number(&t, member(row, "us"));
        cell_number(&t, member(row, "floor_us"));
        cell_number(&t, 100 * member(row, "floor_share"));
        cell_number(&t, 1e6 * member(row, "m") / member(row, "us"));
        cell_number(&t, member(row, "gb_per_s"));
        cell_number(&t, member(row, "tflop_per_s"));
        cell_number(&t, member(row, "cublas_speedup"));
        cell_text(&t, member_text(row, "config"));
        cell_text(&t, member_text(row, "refused"));
    }
    page_table(p, &t, true);
}

static void write_caches(struct page *p, const json_t *caches)
{
    struct table t;
    size_t i;
    const json_t *row;
    TABLE_BEGIN(&t, "Attention over KV caches", cache_columns);
    json_array_foreach (caches, i, row) {
        char shape[96];
        snprintf(shape, sizeof shape, "%.0f heads, %.0f KV heads, %.0f channels",
                 member(row, "heads"), member(row, "kv_heads"), member(row, "head_dim"));
        row_begin(&t);
        cell_text(&t, member_text(row, "format"));
        cell_text(&t, json_is_true(json_object_get(row, "paged")) ? "paged" : "contiguous");
        cell_text(&t, shape);
        cell_number(&t, member(row, "m"));
        cell_number(&t, member(row, "length"));
        cell_number(&t, member(row, "us"));
        cell_number(&t, member(row, "floor_us"));
        cell_number(&t, 100 * member(row, "floor_share"));
        cell_number(&t, member(row, "gb_per_s"));
        cell_number(&t, member(row, "f16_speedup"));
        cell_text(&t, member_text(row, "refused"));
    }
    page_table(p, &t, false);
}

enum { MOST_SERIES = 12, MOST_POINTS = 32, MOST_SHAPES = 16 };

/* Rows of one scheme at one shape, in ascending order of the batch. */
struct series {
    const char *scheme;
    double m[MOST_POINTS], us[MOST_POINTS], floor[MOST_POINTS];
    size_t n;
};

/* Adds a row, unless there is one of that batch. */
static void insert(struct series *s, const json_t *row)
{
    const double m = member(row, "m");
    size_t at = 0;
    while (at < s->n && s->m[at] < m)
        at++;
    if (!(m > 0) || s->n == MOST_POINTS || (at < s->n && s->m[at] == m))
        return;
    for (size_t i = s->n++; i > at; i--) {
        s->m[i] = s->m[i - 1];
        s->us[i] = s->us[i - 1];
        s->floor[i] = s->floor[i - 1];
    }
    s->m[at] = m;
    s->us[at] = member(row, "us");
    s->floor[at] = member(row, "floor_us");
}

static size_t find_series(struct series out[MOST_SERIES], const json_t *rows, const char *shape)
{
    size_t n = 0, i;
    const json_t *row;
    json_array_foreach (rows, i, row) {
        const char *scheme = member_text(row, "scheme");
        char own[96];
        size_t at = 0;
        text_of_shape(own, row);
        if (!scheme || strcmp(own, shape) != 0 || !(member(row, "us") > 0))
            continue;
        while (at < n && strcmp(out[at].scheme, scheme) != 0)
            at++;
        if (at == MOST_SERIES)
            continue;
        if (at == n)
            out[n++] = (struct series){.scheme = scheme};
        insert(&out[at], row);
    }
    return n;
}

/* The time of one shape against batch, with the read floors dashed; and the tokens per second. */
static void write_shape(struct page *p, const json_t *rows, const char *shape)
{
    struct series series[MOST_SERIES];
    const char *names[MOST_SERIES];
    const size_t n = find_series(series, rows, shape);
    struct axis x = axis_new("batch", true), us = axis_new("microseconds", true);
    struct axis speed = axis_new("tokens/s through this matrix", true);
    struct chart chart;
    for (size_t i = 0; i < n; i++) {
        names[i] = series[i].scheme;
        for (size_t k = 0; k < series[i].n; k++) {
            axis_take(&x, series[i].m[k]);
            axis_take(&us, series[i].us[k]);
            axis_take(&us, series[i].floor[k]);
            axis_take(&speed, 1e6 * series[i].m[k] / series[i].us[k]);
        }
    }
    if (!axis_used(&x) || !axis_used(&us))
        return;
    html(&p->text, "<h3>%s</h3>\n<div class=\"charts\"><div>", shape);
    chart_begin(&chart, p, "Time against batch; dashed: the read floor", &x, &us);
    for (size_t i = 0; i < n; i++) {
        chart_line(&chart, i, false, series[i].m, series[i].us, series[i].n);
        chart_line(&chart, i, true, series[i].m, series[i].floor, series[i].n);
    }
    chart_end(&chart);
    html(&p->text, "</div><div>");
    chart_begin(&chart, p, "Tokens per second against batch", &x, &speed);
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < series[i].n; k++)
            series[i].us[k] = 1e6 * series[i].m[k] / series[i].us[k];
        chart_line(&chart, i, false, series[i].m, series[i].us, series[i].n);
    }
    chart_end(&chart);
    html(&p->text, "</div></div>\n");
    chart_legend(p, names, n, 0);
}

static void write_bench(struct page *p, const json_t *doc)
{
    const json_t *gpu = json_object_get(doc, "gpu"), *rows = json_object_get(doc, "rows"), *row;
    char shapes[MOST_SHAPES][96];
    size_t n = 0, i;
    html(&p->text,
         "<h3>Kernels on %s</h3>\n<p>%s. Weights cold in L2. The dashed lines are the read floor: "
         "the time that reading the packed weights alone takes.</p>\n",
         member_text(gpu, "name") ? member_text(gpu, "name") : "an unknown GPU",
         member_text(doc, "dtype") ? member_text(doc, "dtype") : "");
    json_array_foreach (rows, i, row) {
        char shape[96];
        size_t at = 0;
        text_of_shape(shape, row);
        while (at < n && strcmp(shapes[at], shape) != 0)
            at++;
        if (at < n || n == MOST_SHAPES)
            continue;
        memcpy(shapes[n++], shape, sizeof shape);
        write_shape(p, rows, shape);
    }
    write_rows(p, rows);
    write_caches(p, json_object_get(doc, "caches"));
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    int rc = write_containers(p, r, err);
    for (size_t i = 0; i < r->ndocuments && rc == QT_OK; i++)
        if (r->documents[i].kind == DOCUMENT_BENCH && !is_model_bench(&r->documents[i]))
            write_bench(p, r->documents[i].json);
    return rc;
}

const struct section section_speed = {"speed", "Speed", write};
