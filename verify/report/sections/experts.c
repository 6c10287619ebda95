/* Calibration tokens of the experts, and their errors. */
#include "verify/report/report.h"

#include <math.h>
#include <stdlib.h>

static const struct column columns[] = {
    {"tensor", "tensor", NULL},
    {"layer", "layer", "%.0f"},
    {"kind", "kind", NULL},
    {"tokens", "tokens", "%.0f"},
    {"missing", "missing tokens", "%.0f"},
    {"sqnr_db", "SQNR (dB)", "%.2f"},
    {"compensated", "GPTQ, of before", "%.3f"},
    {"note", "note", NULL},
};

static const struct column layer_columns[] = {
    {"layer", "layer", "%.0f"},
    {"matrices", "matrices", "%.0f"},
    {"fewest", "fewest tokens", "%.0f"},
    {"most", "most tokens", "%.0f"},
    {"few", "with too few tokens", "%.0f"},
    {"fallbacks", "without Hessian", "%.0f"},
    {"sqnr_db", "SQNR (dB)", "%.2f"},
    {"few_sqnr_db", "SQNR with too few (dB)", "%.2f"},
};

/* The fewest tokens first. */
static int compare_tokens(const void *pa, const void *pb)
{
    const struct tensor_figures *a = *(const struct tensor_figures *const *)pa;
    const struct tensor_figures *b = *(const struct tensor_figures *const *)pb;
    if (a->tokens != b->tokens)
        return a->tokens < b->tokens ? -1 : 1;
    return (a > b) - (a < b);
}

static int compare_layers(const void *pa, const void *pb)
{
    const struct tensor_figures *a = *(const struct tensor_figures *const *)pa;
    const struct tensor_figures *b = *(const struct tensor_figures *const *)pb;
    if (a->layer != b->layer)
        return a->layer < b->layer ? -1 : 1;
    return compare_tokens(pa, pb);
}

static void write_experts(struct page *p, const struct tensor_figures **experts, size_t n)
{
    struct table t;
    TABLE_BEGIN(&t, "Experts, the fewest tokens first", columns);
    qsort(experts, n, sizeof *experts, compare_tokens);
    for (size_t i = 0; i < n; i++) {
        const struct tensor_figures *one = experts[i];
        row_begin(&t);
        cell_text(&t, one->name);
        cell_number(&t, one->layer == SIZE_MAX ? NAN : (double)one->layer);
        cell_text(&t, one->kind);
        cell_number(&t, one->tokens);
        cell_number(&t, one->missing);
        cell_number(&t, one->sqnr_db);
        cell_number(&t, one->compensated);
        cell_text(&t, one->fell_back ? "the Hessian was not used" : NULL);
    }
    page_table(p, &t, true);
}

/* experts[n]: of one layer, the fewest tokens first. */
static void write_layer(struct table *t, const struct tensor_figures *const *experts, size_t n)
{
    struct cell_sum enough = {0}, few = {0};
    size_t with_few = 0, fallbacks = 0;
    for (size_t i = 0; i < n; i++) {
        const bool lacks = experts[i]->missing > 0;
        cell_add(lacks ? &few : &enough, experts[i]);
        with_few += lacks;
        fallbacks += experts[i]->fell_back;
    }
    row_begin(t);
    cell_number(t, experts[0]->layer == SIZE_MAX ? NAN : (double)experts[0]->layer);
    cell_number(t, (double)n);
    cell_number(t, experts[0]->tokens);
    cell_number(t, experts[n - 1]->tokens);
    cell_number(t, (double)with_few);
    cell_number(t, (double)fallbacks);
    cell_number(t, cell_sqnr(&enough));
    cell_number(t, cell_sqnr(&few));
}

static void write_layers(struct page *p, const struct tensor_figures **experts, size_t n)
{
    struct table t;
    TABLE_BEGIN(&t, "Tokens of experts, by decoder layer", layer_columns);
    qsort(experts, n, sizeof *experts, compare_layers);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && experts[end]->layer == experts[i]->layer;)
            end++;
        write_layer(&t, experts + i, end - i);
    }
    page_table(p, &t, false);
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    bool first = true;
    for (size_t i = 0; i < r->nsubjects; i++) {
        const struct subject *s = &r->subjects[i];
        const struct tensor_figures **experts;
        size_t n = 0;
        int rc = qt_array_new(&experts, s->count, sizeof *experts, err);
        if (rc < 0)
            return rc;
        for (size_t k = 0; k < s->count; k++)
            if (!isnan(s->tensors[k].tokens))
                experts[n++] = &s->tensors[k];
        if (n && first)
            html(&p->text, "<p>Calibration tokens that the router sent to each expert. If they are "
                           "fewer than the Hessian of the expert needs, other tokens stand in for "
                           "the missing ones.</p>\n");
        if (n) {
            first = false;
            html(&p->text, "<h3>%s</h3>\n", s->label);
            write_layers(p, experts, n);
            write_experts(p, experts, n);
        }
        qt_free(experts);
    }
    return QT_OK;
}

const struct section section_experts = {"experts", "Experts", write};
