/* The distribution of the KL divergence over positions. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>

/* One for each of qt_kld_quantiles. */
static const struct column columns[] = {
    {"container", "container", NULL}, {"q0.25", "25 %", "%.4g"},    {"q0.5", "median", "%.4g"},
    {"q0.75", "75 %", "%.4g"},        {"q0.9", "90 %", "%.4g"},     {"q0.95", "95 %", "%.4g"},
    {"q0.99", "99 %", "%.4g"},        {"q0.999", "99.9 %", "%.4g"}, {"q0.9999", "99.99 %", "%.4g"},
    {"q1", "largest", "%.4g"},
};

/* A quantile of a document; NaN if it is not there. */
static double find(const json_t *doc, double q)
{
    const json_t *list = json_object_get(doc, "kld_quantiles"), *one;
    size_t i;
    json_array_foreach (list, i, one) {
        if (member(one, "q") == q)
            return member(one, "kld");
    }
    return q == 0.5 ? member(doc, "kld_median") : q == 0.999 ? member(doc, "kld_p999") : NAN;
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    struct axis x = axis_new("positions with a larger divergence (%)", true);
    struct axis y = axis_new("KL divergence (nats)", true);
    const char **names = NULL;
    struct chart chart;
    struct table t;
    size_t n = 0;
    int rc = qt_array_new(&names, r->ndocuments, sizeof *names, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < r->ndocuments; i++)
        for (size_t k = 0; r->documents[i].kind == DOCUMENT_EVAL && k + 1 < QT_KLD_QUANTILES; k++) {
            const double v = find(r->documents[i].json, qt_kld_quantiles[k]);
            if (!(v > 0))
                continue;
            axis_take(&y, v);
            axis_take(&x, 100 * (1 - qt_kld_quantiles[k]));
        }
    if (!axis_used(&y))
        goto done;
    TABLE_BEGIN(&t, "KL divergence at quantiles of the positions (nats)", columns);
    html(&p->text, "<p>A low mean can hide positions where the model says something else. To the "
                   "left are the rare positions with the largest divergence.</p>\n");
    chart_begin(&chart, p, "Share of positions against the KL divergence that they exceed", &x, &y);
    for (size_t i = 0; i < r->ndocuments; i++) {
        const struct document *d = &r->documents[i];
        double px[QT_KLD_QUANTILES], py[QT_KLD_QUANTILES];
        if (d->kind != DOCUMENT_EVAL || isnan(find(d->json, 0.5)))
            continue;
        row_begin(&t);
        cell_text(&t, r->subjects[d->subject].label);
        for (size_t k = 0; k < QT_KLD_QUANTILES; k++) {
            px[k] = 100 * (1 - qt_kld_quantiles[k]);
            py[k] = find(d->json, qt_kld_quantiles[k]);
            cell_number(&t, py[k]);
        }
        size_t m = 0; /* without those that the document lacks */
        for (size_t k = 0; k < QT_KLD_QUANTILES; k++)
            if (isfinite(py[k]) && px[k] > 0)
                px[m] = px[k], py[m++] = py[k];
        chart_line(&chart, n, n >= CHART_SERIES, px, py, m);
        names[n++] = r->subjects[d->subject].label;
    }
    chart_end(&chart);
    chart_legend(p, names, n, n > CHART_SERIES ? ~0u << CHART_SERIES : 0);
    page_table(p, &t, false);
done:
    qt_free(names);
    return QT_OK;
}

const struct section section_quantiles = {"quantiles", "Rare positions", write};
