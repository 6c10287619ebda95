/* Histograms of the tensors' weights or inputs by kind of tensor, and channels that stand out, as
 * qtool-report.json has them. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* SERIES: lines of the histogram, of which the last has all kinds that remain. */
enum { OUTLIERS = 24, SERIES = HISTOGRAM_SERIES };

/* The tensors of a container that have the distribution. */
struct part {
    const struct distributions *of;
    struct tensor_figures *tensors; /* copies */
    size_t count;
};

static const struct column tensor_columns[] = {
    {"tensor", "tensor", NULL},
    {"rms", "RMS", "%.4g"},
    {"absmax", "largest", "%.4g"},
    {"outlier", "largest / RMS", "%.1f"},
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

static void gather_tensor(struct gathered *g, size_t series, const char *tensor, const json_t *d)
{
    const json_t *value;
    const double first = member(d, "first_bin"), rms = member(d, "rms");
    size_t i;
    json_array_foreach (json_object_get(d, "histogram"), i, value) {
        const double bin = first + (double)i;
        if (bin >= 0 && bin < QT_HIST_BINS && json_number_value(value) > 0)
            g->bins[series][(size_t)bin] += json_number_value(value);
    }
    json_array_foreach (json_object_get(d, "channels"), i, value) {
        const double absmax = element(value, 1);
        const struct outlier o = {tensor, element(value, 0), absmax, element(value, 2),
                                  absmax / rms};
        take_outlier(g, &o);
    }
}

static int gather(struct gathered *g, const struct part *s, struct qt_err *err)
{
    const char **kinds = NULL;
    size_t *index = NULL, n = 0;
    int rc;
    QT_TRY(kinds_of_tensors(&kinds, &n, &index, s->tensors, s->count, err));
    g->nseries = qt_min_size(n, SERIES);
    for (size_t k = 0; k < g->nseries; k++)
        g->name[k] = k == SERIES - 1 && n > SERIES ? "other kinds" : kinds[k];
    for (size_t i = 0; i < s->count; i++)
        gather_tensor(g, qt_min_size(index[i], SERIES - 1), s->tensors[i].name,
                      s->of->of(&s->tensors[i]));
done:
    qt_free(kinds);
    qt_free(index);
    return rc;
}

static void write_outliers(struct page *p, const struct gathered *g, const struct distributions *d)
{
    struct table t;
    table_begin(&t, d->outliers, d->outlier_columns, OUTLIER_COLUMNS);
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

static void write_tensors(struct page *p, const struct part *s)
{
    struct table t;
    TABLE_BEGIN(&t, s->of->tensors, tensor_columns);
    for (size_t i = 0; i < s->count; i++) {
        const json_t *d = s->of->of(&s->tensors[i]);
        row_begin(&t);
        cell_text(&t, s->tensors[i].name);
        cell_number(&t, member(d, "rms"));
        cell_number(&t, member(d, "absmax"));
        cell_number(&t, member(d, "absmax") / member(d, "rms"));
    }
    page_table(p, &t, true);
}

static int part_new(struct part *out, const struct subject *s, const struct distributions *of,
                    struct qt_err *err)
{
    int rc = qt_array_new(&out->tensors, s->count, sizeof *out->tensors, err);
    out->of = of;
    for (size_t i = 0; i < s->count && rc == QT_OK; i++)
        if (of->of(&s->tensors[i]))
            out->tensors[out->count++] = s->tensors[i];
    return rc;
}

/* True if all distributions are equal. */
static bool same(const struct subject *a, const struct subject *b, const struct distributions *d)
{
    bool equal = a->count == b->count;
    for (size_t i = 0; equal && i < a->count; i++) {
        const json_t *x = d->of(&a->tensors[i]), *y = d->of(&b->tensors[i]);
        equal = strcmp(a->tensors[i].name, b->tensors[i].name) == 0 && !x == !y &&
                (!x || json_equal(x, y));
    }
    return equal;
}

bool has_distributions(const struct subject *s, const struct distributions *d)
{
    for (size_t i = 0; i < s->count; i++)
        if (d->of(&s->tensors[i]))
            return true;
    return false;
}

int page_distributions(struct page *p, const struct qt_report *r, size_t i,
                       const struct distributions *d, struct qt_err *err)
{
    const struct subject *s = &r->subjects[i];
    struct heat h = {.caption = d->heat,
                     .corner = "layer",
                     .format = "%.1f",
                     .high = true,
                     .span = d->heat_span};
    struct part part = {0};
    struct gathered *g = NULL;
    int rc = QT_OK;
    if (!has_distributions(s, d))
        return QT_OK;
    for (size_t j = 0; j < i; j++)
        if (same(&r->subjects[j], s, d))
            return QT_OK;
    QT_TRY(part_new(&part, s, d, err));
    QT_TRY(qt_array_new(&g, 1, sizeof *g, err));
    QT_TRY(gather(g, &part, err));
    QT_TRY(heat_of_tensors(&h, part.tensors, part.count, d->outlier, err));
    const struct histogram histogram = {.what = d->what,
                                        .caption = d->caption,
                                        .value = d->value,
                                        .unit = d->unit,
                                        .bins = (const double(*)[QT_HIST_BINS])g->bins,
                                        .name = g->name,
                                        .n = g->nseries};
    html(&p->text, "<h3>%s", s->label);
    for (size_t j = i + 1; j < r->nsubjects; j++)
        if (same(&r->subjects[j], s, d))
            html(&p->text, ", %s", r->subjects[j].label);
    html(&p->text, "</h3>\n<div class=\"charts\"><div>");
    page_histogram(p, &histogram);
    html(&p->text, "</div><div>");
    page_heat(p, &h);
    html(&p->text, "</div></div>\n");
    write_outliers(p, g, d);
    write_tensors(p, &part);
done:
    heat_free(&h);
    qt_free(part.tensors);
    qt_free(g);
    return rc;
}
