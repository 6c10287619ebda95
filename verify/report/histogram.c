/* Histograms of magnitudes, a line and a table column for each series. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>

/* share[b]: per cent of the values that are in bin b; NaN without values. */
static void shares(double *share, const double *bins)
{
    double sum = 0;
    for (size_t b = 0; b < QT_HIST_BINS; b++)
        sum += bins[b];
    for (size_t b = 0; b < QT_HIST_BINS; b++)
        share[b] = sum > 0 ? 100 * bins[b] / sum : NAN;
}

void page_histogram(struct page *p, const struct histogram *h)
{
    struct axis x = axis_new(h->value, true), y = axis_new(h->unit, true);
    struct column columns[HISTOGRAM_SERIES + 1] = {{"from", "at least", "%.5g"}};
    double edge[QT_HIST_BINS], share[HISTOGRAM_SERIES][QT_HIST_BINS];
    size_t first = QT_HIST_BINS, last = 0;
    char keys[HISTOGRAM_SERIES][24];
    struct chart chart;
    struct table t;
    for (size_t b = 0; b < QT_HIST_BINS; b++) /* a log axis has no place for the bin of zeros */
        edge[b] = b ? qt_hist_from(b) : NAN;
    for (size_t i = 0; i < h->n; i++) {
        shares(share[i], h->bins[i]);
        for (size_t b = 0; b < QT_HIST_BINS; b++)
            if (h->bins[i][b] > 0) {
                first = qt_min_size(first, b);
                last = qt_max_size(last, b);
                axis_take(&y, share[i][b]);
                axis_take(&x, edge[b]);
            }
        snprintf(keys[i], sizeof keys[i], "series%zu", i);
        columns[i + 1] = (struct column){keys[i], h->name[i], "%.4g"};
    }
    if (axis_used(&x) && axis_used(&y)) {
        chart_begin(&chart, p, h->what, &x, &y);
        for (size_t i = 0; i < h->n; i++)
            chart_line(&chart, i, i >= CHART_SERIES, edge, share[i], QT_HIST_BINS);
        chart_end(&chart);
        chart_legend(p, h->name, h->n, ~0u << CHART_SERIES);
    }
    table_begin(&t, h->caption, columns, h->n + 1);
    for (size_t b = first; b <= last && b < QT_HIST_BINS; b++) {
        row_begin(&t);
        cell_number(&t, qt_hist_from(b));
        for (size_t i = 0; i < h->n; i++)
            cell_number(&t, share[i][b]);
    }
    page_table(p, &t, true);
}
