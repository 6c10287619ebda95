/* The source's weights, from the containers' qtool-report.json: histograms by kind of tensor, and
 * input channels that stand out. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* SERIES: lines of the histogram, of which the last has all kinds that remain. */
enum { OUTLIERS = 24, SERIES = HISTOGRAM_SERIES };

static const struct column tensor_columns[] = {
    {"tensor", "tensor", NULL},
    {"rms", "RMS", "%.4g"},
    {"absmax", "largest", "%.4g"},
    {"outlier", "largest / RMS", "%.1f"},
};
static const struct column outlier_columns[] = {
    {"tensor", "tensor", NULL},
    {"channel", "input channel", "%.0f"},
    {"absmax", "largest", "%.4g"},
    {"rms", "RMS of channel", "%.4g"},
    {"ratio", "largest / RMS of tensor", "%.1f"},
};

struct outlier {
    const char *tensor;
    double channel, absmax, rms, ratio;
};

struct gathered {
    double bins[SERIES][QT_HIST_BINS];
    const char *name[SERIES];
    size_t nseries;
    struct outlier top[OUTLIERS]; /* the largest ratios, in descending order */
    size_t ntop;
};

static void take_outlier(struct gathered *g, const struct outlier *o)
{
    size_t at = g->ntop;
    while (at > 0 && g->top[at - 1].ratio < o->ratio)
        at--;
    if (at == OUTLIERS || !(o->ratio > 0))
        return;
    const size_t last = g->ntop < OUTLIERS ? g->ntop++ : OUTLIERS - 1;
    memmove(&g->top[at + 1], &g->top[at], (last - at) * sizeof *g->top);
    g->top[at] = *o;
}

static double element(const json_t *array, size_t i)
{
    const json_t *value = json_array_get(array, i);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static void gather_tensor(struct gathered *g, size_t series, const struct tensor_figures *t)
{
    const json_t *d = t->distribution, *value;
    const double first = member(d, "first_bin"), rms = member(d, "rms");
    size_t i;
    json_array_foreach (json_object_get(d, "histogram"), i, value) {
        const double bin = first + (double)i;
        if (bin >= 0 && bin < QT_HIST_BINS && json_number_value(value) > 0)
            g->bins[series][(size_t)bin] += json_number_value(value);
    }
    json_array_foreach (json_object_get(d, "channels"), i, value) {
        const double absmax = element(value, 1);
        const struct outlier o = {t->name, element(value, 0), absmax, element(value, 2),
                                  absmax / rms};
        take_outlier(g, &o);
    }
}

static int gather(struct gathered *g, const struct subject *s, struct qt_err *err)
{
    const char **kinds = NULL;
    size_t *index = NULL, n = 0;
    int rc;
    QT_TRY(kinds_of_tensors(&kinds, &n, &index, s->tensors, s->count, err));
    g->nseries = qt_min_size(n, SERIES);
    for (size_t k = 0; k < g->nseries; k++)
        g->name[k] = k == SERIES - 1 && n > SERIES ? "other kinds" : kinds[k];
    for (size_t i = 0; i < s->count; i++)
        gather_tensor(g, qt_min_size(index[i], SERIES - 1), &s->tensors[i]);
done:
    qt_free(kinds);
    qt_free(index);
    return rc;
}

static void write_outliers(struct page *p, const struct gathered *g)
{
    struct table t;
    TABLE_BEGIN(&t, "Input channels that stand out most", outlier_columns);
    for (size_t i = 0; i < g->ntop; i++) {
        const struct outlier *o = &g->top[i];
        row_begin(&t);
        cell_text(&t, o->tensor);
        cell_number(&t, o->channel);
        cell_number(&t, o->absmax);
        cell_number(&t, o->rms);
        cell_number(&t, o->ratio);
    }
    page_table(p, &t, true);
}

static void write_tensors(struct page *p, const struct subject *s)
{
    struct table t;
    TABLE_BEGIN(&t, "Weights of tensors", tensor_columns);
    for (size_t i = 0; i < s->count; i++) {
        const struct tensor_figures *one = &s->tensors[i];
        if (!one->distribution)
            continue;
        row_begin(&t);
        cell_text(&t, one->name);
        cell_number(&t, member(one->distribution, "rms"));
        cell_number(&t, member(one->distribution, "absmax"));
        cell_number(&t, one->outlier);
    }
    page_table(p, &t, true);
}

static bool has_distributions(const struct subject *s)
{
    for (size_t i = 0; i < s->count; i++)
        if (s->tensors[i].distribution)
            return true;
    return false;
}

/* True if both were made from the same weights, as far as the figures say. */
static bool same_weights(const struct subject *a, const struct subject *b)
{
    bool same = a->count == b->count;
    for (size_t i = 0; same && i < a->count; i++)
        same = strcmp(a->tensors[i].name, b->tensors[i].name) == 0 && a->tensors[i].distribution &&
               b->tensors[i].distribution &&
               json_equal(a->tensors[i].distribution, b->tensors[i].distribution);
    return same;
}

static double cell_outlier(const struct cell_sum *sum)
{
    return sum->outlier > 0 ? sum->outlier : NAN;
}

/* The weights of subject i, if no earlier one has the same. */
static int write_subject(struct page *p, const struct qt_report *r, size_t i, struct qt_err *err)
{
    const struct subject *s = &r->subjects[i];
    struct heat h = {.caption = "Largest weight of a tensor, divided by its RMS, by decoder layer "
                                "and kind",
                     .corner = "layer",
                     .format = "%.1f",
                     .high = true,
                     .span = 3};
    struct gathered *g = NULL;
    int rc = QT_OK;
    for (size_t j = 0; j < i; j++)
        if (same_weights(&r->subjects[j], s))
            return QT_OK;
    QT_TRY(qt_array_new(&g, 1, sizeof *g, err));
    QT_TRY(gather(g, s, err));
    QT_TRY(heat_of_tensors(&h, s->tensors, s->count, cell_outlier, err));
    const struct histogram histogram = {
        .what = "Histogram of the magnitudes of weights, by kind of tensor",
        .caption = "Histogram of |w| (%), by kind of tensor",
        .value = "|w|",
        .unit = "share of weights (%)",
        .bins = (const double(*)[QT_HIST_BINS])g->bins,
        .name = g->name,
        .n = g->nseries};
    html(&p->text, "<h3>%s", s->label);
    for (size_t j = i + 1; j < r->nsubjects; j++)
        if (same_weights(&r->subjects[j], s))
            html(&p->text, ", %s", r->subjects[j].label);
    html(&p->text, "</h3>\n<div class=\"charts\"><div>");
    page_histogram(p, &histogram);
    html(&p->text, "</div><div>");
    page_heat(p, &h);
    html(&p->text, "</div></div>\n");
    write_outliers(p, g);
    write_tensors(p, s);
done:
    heat_free(&h);
    qt_free(g);
    return rc;
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    bool first = true;
    int rc = QT_OK;
    for (size_t i = 0; i < r->nsubjects && rc == QT_OK; i++) {
        if (!has_distributions(&r->subjects[i]))
            continue;
        if (first)
            html(&p->text, "<p>Weights before quantization. Containers of the same source have "
                           "the same.</p>\n");
        first = false;
        rc = write_subject(p, r, i, err);
    }
    return rc;
}

const struct section section_weights = {"weights", "Weights", write};
