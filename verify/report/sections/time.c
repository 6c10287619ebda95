/* The time and memory that quantizing took, from the containers' qtool-report.json. */
#include "verify/report/report.h"

#include <math.h>

static const struct column columns[] = {
    {"container", "container", NULL},         {"seconds", "seconds", "%.2f"},
    {"tensors", "tensors (s)", "%.2f"},       {"learning", "learning (s)", "%.2f"},
    {"rest", "all else (s)", "%.2f"},         {"peak_rss_bytes", "peak memory (MiB)", "%.1f"},
    {"tokens", "calibration tokens", "%.0f"},
};

static double cell_ms(const struct cell_sum *sum)
{
    return sum->ms;
}

static double tensor_seconds(const struct subject *s)
{
    double sum = 0;
    for (size_t i = 0; i < s->count; i++)
        sum += isfinite(s->tensors[i].ms) ? s->tensors[i].ms / 1e3 : 0;
    return sum;
}

static int write_heats(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    for (size_t i = 0; i < r->nsubjects; i++) {
        const struct subject *s = &r->subjects[i];
        struct heat h = {.caption = "Milliseconds to quantize, by decoder layer and kind",
                         .corner = "layer",
                         .format = "%.0f",
                         .high = true};
        if (!s->run || s->count == 0)
            continue;
        int rc = heat_of_tensors(&h, s->tensors, s->count, cell_ms, err);
        if (rc < 0)
            return rc;
        html(&p->text, "<details><summary>%s: by decoder layer and kind</summary>", s->label);
        page_heat(p, &h);
        html(&p->text, "</details>\n");
        heat_free(&h);
    }
    return QT_OK;
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    struct table t;
    struct bar *bars = NULL;
    size_t n = 0;
    int rc = qt_array_new(&bars, r->nsubjects, sizeof *bars, err);
    if (rc < 0)
        return rc;
    TABLE_BEGIN(&t,
                "Time and memory of quantize. Tensors: rounding and packing; all else: reading, "
                "calibration, writing",
                columns);
    for (size_t i = 0; i < r->nsubjects; i++) {
        const struct subject *s = &r->subjects[i];
        const json_t *totals = json_object_get(s->run, "totals");
        const double all = member(totals, "seconds"), tensors = tensor_seconds(s);
        const double learning = member(json_object_get(s->run, "learning"), "seconds");
        if (isnan(all))
            continue;
        row_begin(&t);
        cell_text(&t, s->label);
        cell_number(&t, all);
        cell_number(&t, tensors);
        cell_number(&t, learning);
        cell_number(&t, fmax(0, all - tensors - (isnan(learning) ? 0 : learning)));
        cell_number(&t, member(totals, "peak_rss_bytes") / 0x1p20);
        cell_number(&t, member(totals, "calibration_tokens"));
        bars[n++] = (struct bar){s->label, all, 0};
    }
    if (n)
        chart_bars(p, "Seconds that quantize took", bars, n, "%.2f s");
    page_table(p, &t, false);
    if (n)
        rc = write_heats(p, r, err);
    qt_free(bars);
    return rc;
}

const struct section section_time = {"time", "Time to quantize", write};
