/* The error of the weights, by decoder layer and kind, and for each tensor. */
#include "verify/report/report.h"

#include <math.h>
#include <stdlib.h>

static const struct column columns[] = {
    {"tensor", "tensor", NULL},     {"layer", "layer", "%.0f"},
    {"kind", "kind", NULL},         {"scheme", "scheme", NULL},
    {"bpw", "bits/weight", "%.3f"}, {"sqnr_db", "SQNR (dB)", "%.2f"},
    {"cosine", "cosine", "%.6f"},   {"mse", "MSE", "%.3g"},
    {"max_abs", "largest", "%.3g"}, {"compensated", "GPTQ, of before", "%.3f"},
    {"ms", "ms", "%.1f"},
};

/* The worst first; tensors without a figure last. */
static int compare_sqnr(const void *pa, const void *pb)
{
    const struct tensor_figures *a = *(const struct tensor_figures *const *)pa;
    const struct tensor_figures *b = *(const struct tensor_figures *const *)pb;
    if (isnan(a->sqnr_db) || isnan(b->sqnr_db) || a->sqnr_db == b->sqnr_db) {
        const int last = isnan(a->sqnr_db) - isnan(b->sqnr_db);
        return last ? last : (a > b) - (a < b);
    }
    return a->sqnr_db < b->sqnr_db ? -1 : 1;
}

static int write_table(struct page *p, const struct subject *s, struct qt_err *err)
{
    const struct tensor_figures **order = NULL;
    struct table t;
    int rc = qt_array_new(&order, s->count, sizeof *order, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < s->count; i++)
        order[i] = &s->tensors[i];
    qsort(order, s->count, sizeof *order, compare_sqnr);
    TABLE_BEGIN(&t, "Tensors, the largest error first", columns);
    for (size_t i = 0; i < s->count; i++) {
        const struct tensor_figures *one = order[i];
        row_begin(&t);
        cell_text(&t, one->name);
        cell_number(&t, one->layer == SIZE_MAX ? NAN : (double)one->layer);
        cell_text(&t, one->kind);
        cell_text(&t, one->scheme);
        cell_number(&t, one->bpw);
        cell_number(&t, one->sqnr_db);
        cell_number(&t, one->cosine);
        cell_number(&t, one->mse);
        cell_number(&t, one->max_abs);
        cell_number(&t, one->compensated);
        cell_number(&t, one->ms);
    }
    page_table(p, &t, true);
    qt_free(order);
    return QT_OK;
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    bool first = true;
    for (size_t i = 0; i < r->nsubjects; i++) {
        const struct subject *s = &r->subjects[i];
        struct heat h = {.caption = "Signal to quantization noise (dB), by decoder layer and kind",
                         .corner = "layer",
                         .format = "%.1f",
                         .span = 3};
        if (s->count == 0)
            continue;
        if (first)
            html(&p->text, "<p>Errors of the weights themselves. A calibrated container may have "
                           "larger ones and still be nearer to the original: error compensation "
                           "trades them for smaller errors of the outputs.</p>\n"
                           "<div class=\"charts\">\n");
        first = false;
        html(&p->text, "<div><h3>%s</h3>\n", s->label);
        int rc = heat_of_tensors(&h, s->tensors, s->count, cell_sqnr, err);
        if (rc == QT_OK)
            page_heat(p, &h);
        heat_free(&h);
        if (rc == QT_OK)
            rc = write_table(p, s, err);
        if (rc < 0)
            return rc;
        html(&p->text, "</div>\n");
    }
    if (!first)
        html(&p->text, "</div>\n");
    return QT_OK;
}

const struct section section_errors = {"errors", "Errors of weights", write};
