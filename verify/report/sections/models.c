/* Speed of whole models: documents of bench --model. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>

enum { KINDS = CHART_SERIES, MOST_SERIES = 16, MOST_POINTS = 16 };

/* The kinds of kernels in a bar; activations count as others. */
static const char *const kinds[KINDS] = {"products", "head",  "attention",
                                         "heads",    "norms", "others"};

static const struct column columns[] = {
    {"scheme", "scheme", NULL},
    {"batch", "batch", "%.0f"},
    {"prefill_tokens_per_s", "prefill (tokens/s)", "%.0f"},
    {"decode_tokens_per_s", "decode (tokens/s)", "%.0f"},
    {"step_ms", "step (ms)", "%.3f"},
    {"fp16_speedup", "of FP16 (x)", "%.2f"},
    {"mib", "memory (MiB)", "%.0f"},
    {"watts", "W", "%.0f"},
    {"joules_per_token", "J/token", "%.3f"},
    {"dollars_per_million_tokens", "$/M tokens", "%.3f"},
    {"refused", "refused", NULL},
};

static void write_table(struct page *p, const json_t *rows)
{
    struct table t;
    size_t i;
    const json_t *row;
    TABLE_BEGIN(&t, "Prefill and decode steps", columns);
    json_array_foreach (rows, i, row) {
        row_begin(&t);
        cell_text(&t, member_text(row, "scheme"));
        cell_number(&t, member(row, "batch"));
        cell_number(&t, member(row, "prefill_tokens_per_s"));
        cell_number(&t, member(row, "decode_tokens_per_s"));
        cell_number(&t, member(row, "step_ms"));
        cell_number(&t, member(row, "fp16_speedup"));
        cell_number(&t, member(row, "bytes") / 0x1p20);
        cell_number(&t, member(row, "watts"));
        cell_number(&t, member(row, "joules_per_token"));
        cell_number(&t, member(row, "dollars_per_million_tokens"));
        cell_text(&t, member_text(row, "refused"));
    }
    page_table(p, &t, false);
}

/* ---- tokens per second against batch -------------------------------------------------------- */

struct series {
    const char *scheme;
    double batch[MOST_POINTS], speed[MOST_POINTS];
    size_t n;
};

static size_t find_series(struct series out[MOST_SERIES], const json_t *rows)
{
    size_t n = 0, i;
    const json_t *row;
    json_array_foreach (rows, i, row) {
        const char *scheme = member_text(row, "scheme");
        size_t at = 0;
        if (!scheme || !(member(row, "decode_tokens_per_s") > 0))
            continue;
        while (at < n && strcmp(out[at].scheme, scheme) != 0)
            at++;
        if (at == MOST_SERIES || (at < n && out[at].n == MOST_POINTS))
            continue;
        if (at == n)
            out[n++] = (struct series){.scheme = scheme};
        out[at].batch[out[at].n] = member(row, "batch");
        out[at].speed[out[at].n++] = member(row, "decode_tokens_per_s");
    }
    return n;
}

static void write_speed(struct page *p, const json_t *rows)
{
    struct series series[MOST_SERIES];
    const char *names[MOST_SERIES];
    const size_t n = find_series(series, rows);
    struct axis x = axis_new("batch (sequences)", true), y = axis_new("tokens/s", true);
    struct chart chart;
    for (size_t i = 0; i < n; i++) {
        names[i] = series[i].scheme;
        for (size_t k = 0; k < series[i].n; k++) {
            axis_take(&x, series[i].batch[k]);
            axis_take(&y, series[i].speed[k]);
        }
    }
    if (!axis_used(&x) || !axis_used(&y))
        return;
    chart_begin(&chart, p, "Tokens per second of all sequences against batch", &x, &y);
    for (size_t i = 0; i < n; i++)
        chart_line(&chart, i, i >= CHART_SERIES, series[i].batch, series[i].speed, series[i].n);
    chart_end(&chart);
    chart_legend(p, names, n, n > CHART_SERIES ? ~0u << CHART_SERIES : 0);
}

/* ---- time of a step by kind ----------------------------------------------------------------- */

static double kind_ms(const json_t *row, int kind)
{
    const json_t *us = json_object_get(row, "kernels_us");
    const double sum =
        kind + 1 < KINDS ? member(us, kinds[kind]) : member(us, "activation") + member(us, "other");
    return sum > 0 ? sum / 1e3 : 0;
}

/* One bar for each scheme that ran with this batch. */
static void write_steps(struct page *p, const json_t *rows, double batch)
{
    struct stack bars[MOST_SERIES];
    char what[96];
    size_t n = 0, i;
    const json_t *row;
    json_array_foreach (rows, i, row) {
        double sum = 0;
        if (member(row, "batch") != batch || !member_text(row, "scheme") || n == MOST_SERIES)
            continue;
        bars[n] = (struct stack){.label = member_text(row, "scheme")};
        for (int kind = 0; kind < KINDS; kind++)
            sum += bars[n].part[kind] = kind_ms(row, kind);
        n += sum > 0;
    }
    if (n == 0)
        return;
    snprintf(what, sizeof what, "Milliseconds of a decode step, batch %.0f", batch);
    html(&p->text, "<h4>%s</h4>\n", what);
    chart_stacks(p, what, bars, n, "%.3f ms");
}

static void write_batches(struct page *p, const json_t *rows)
{
    double batch[MOST_POINTS];
    size_t n = 0, i;
    const json_t *row;
    json_array_foreach (rows, i, row) {
        const double own = member(row, "batch");
        size_t at = 0;
        while (at < n && batch[at] != own)
            at++;
        if (at < n || n == MOST_POINTS || !(own > 0))
            continue;
        batch[n++] = own;
        write_steps(p, rows, own);
    }
    if (n)
        chart_legend(p, kinds, KINDS, 0);
}

/* ---- section -------------------------------------------------------------------------------- */

static void write_model(struct page *p, const json_t *doc)
{
    const json_t *gpu = json_object_get(doc, "gpu"), *rows = json_object_get(doc, "rows");
    html(&p->text, "<h3>%s on %s</h3>\n", member_text(doc, "model"),
         member_text(gpu, "name") ? member_text(gpu, "name") : "an unknown GPU");
    html(&p->text,
         "<p>%sPrompts of %.0f tokens, %.0f decode steps, a KV cache of %.0f bits (fp16: 16). The "
         "bars add the times that the kernels of each kind take alone; others: activations, "
         "embedding, choice of the next token.</p>\n",
         json_is_true(json_object_get(doc, "random_weights")) ? "Random weights. " : "",
         member(doc, "prompt"), member(doc, "tokens"), member(doc, "kv_bits"));
    write_speed(p, rows);
    write_batches(p, rows);
    write_table(p, rows);
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    (void)err;
    for (size_t i = 0; i < r->ndocuments; i++)
        if (is_model_bench(&r->documents[i]))
            write_model(p, r->documents[i].json);
    return QT_OK;
}

const struct section section_models = {"models", "Whole models", write};
