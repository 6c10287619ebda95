/* Two containers beside each other: the first two inputs of that kind. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>

static const json_t *find_eval(const struct qt_report *r, size_t subject)
{
    for (size_t i = 0; i < r->ndocuments; i++)
        if (r->documents[i].kind == DOCUMENT_EVAL && r->documents[i].subject == subject)
            return r->documents[i].json;
    return NULL;
}

static void figure(struct table *t, const char *name, double a, double b)
{
    if (isnan(a) && isnan(b))
        return;
    row_begin(t);
    cell_text(t, name);
    cell_number(t, a);
    cell_number(t, b);
    cell_number(t, b - a);
    cell_number(t, 100 * (b / a - 1));
}

static void write_figures(struct page *p, const struct subject *a, const struct subject *b,
                          const json_t *ea, const json_t *eb)
{
    static const struct {
        const char *key, *name;
    } figures[] = {
        {"kld_mean", "KL divergence, mean (nats)"},
        {"kld_median", "KL divergence, median"},
        {"kld_p999", "KL divergence, 99.9 %"},
        {"ppl", "perplexity"},
        {"ppl_ratio", "perplexity, of the original"},
        {"same_top", "same top token (fraction)"},
        {"rms_dp", "RMS of dp"},
        {"hidden_error", "error of hidden states"},
    };
    const struct column columns[] = {
        {"figure", "figure", NULL},        {"a", a->label, "%.6g"},
        {"b", b->label, "%.6g"},           {"difference", "difference", "%+.4g"},
        {"change", "change (%)", "%+.2f"},
    };
    struct table t;
    TABLE_BEGIN(&t, "Figures of both", columns);
    figure(&t, "size (MiB)", a->bytes / 0x1p20, b->bytes / 0x1p20);
    figure(&t, "bits per weight", a->bpw, b->bpw);
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++)
        figure(&t, figures[i].name, member(ea, figures[i].key), member(eb, figures[i].key));
    figure(&t, "seconds to quantize", member(json_object_get(a->run, "totals"), "seconds"),
           member(json_object_get(b->run, "totals"), "seconds"));
    page_table(p, &t, false);
}

static const struct column tensor_columns[] = {
    {"tensor", "tensor", NULL},        {"scheme_a", "scheme A", NULL},
    {"scheme_b", "scheme B", NULL},    {"bpw_a", "bits A", "%.3f"},
    {"bpw_b", "bits B", "%.3f"},       {"sqnr_a", "SQNR A (dB)", "%.2f"},
    {"sqnr_b", "SQNR B (dB)", "%.2f"}, {"difference", "B - A (dB)", "%+.2f"},
};

static bool same_names(const struct heat *a, const struct heat *b)
{
    bool same = a->nrows == b->nrows && a->ncolumns == b->ncolumns;
    for (size_t i = 0; same && i < a->nrows; i++)
        same = strcmp(a->row[i], b->row[i]) == 0;
    for (size_t i = 0; same && i < a->ncolumns; i++)
        same = strcmp(a->column[i], b->column[i]) == 0;
    return same;
}

/* Writes the tensors that both have, and the differences of their SQNR. */
static int write_tensors(struct page *p, const struct subject *a, const struct subject *b,
                         struct qt_err *err)
{
    json_t *index = json_object();
    bool failed = !index;
    struct heat h = {.caption = "SQNR of B minus SQNR of A (dB), by decoder layer and kind",
                     .corner = "layer",
                     .format = "%+.1f",
                     .span = 3};
    struct heat other = {0};
    struct table t = {0};
    int rc = QT_OK;
    for (size_t i = 0; i < b->count; i++)
        failed |= json_object_set_new(index, b->tensors[i].name, json_integer((json_int_t)i)) < 0;
    if (failed)
        QT_TRY(qt_no_memory(err, NULL));
    TABLE_BEGIN(&t, "Tensors of both", tensor_columns);
    for (size_t i = 0; i < a->count; i++) {
        const struct tensor_figures *ta = &a->tensors[i], *tb;
        const json_t *found = json_object_get(index, ta->name);
        if (!found)
            continue;
        tb = &b->tensors[json_integer_value(found)];
        row_begin(&t);
        cell_text(&t, ta->name);
        cell_text(&t, ta->scheme);
        cell_text(&t, tb->scheme);
        cell_number(&t, ta->bpw);
        cell_number(&t, tb->bpw);
        cell_number(&t, ta->sqnr_db);
        cell_number(&t, tb->sqnr_db);
        cell_number(&t, tb->sqnr_db - ta->sqnr_db);
    }
    QT_TRY(heat_of_tensors(&h, a->tensors, a->count, cell_sqnr, err));
    QT_TRY(heat_of_tensors(&other, b->tensors, b->count, cell_sqnr, err));
    if (same_names(&h, &other)) {
        for (size_t i = 0; i < h.nrows * h.ncolumns; i++)
            h.value[i] = other.value[i] - h.value[i];
        page_heat(p, &h);
    }
    page_table(p, &t, true);
done:
    json_decref(t.rows);
    heat_free(&h);
    heat_free(&other);
    json_decref(index);
    return rc;
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    if (r->nsubjects < 2)
        return QT_OK;
    const struct subject *a = &r->subjects[0], *b = &r->subjects[1];
    html(&p->text, "<p>A is <strong>%s</strong>, B is <strong>%s</strong>%s.</p>\n", a->label,
         b->label,
         r->nsubjects > 2 ? ": the first two inputs; others are compared when they come first"
                          : "");
    write_figures(p, a, b, find_eval(r, 0), find_eval(r, 1));
    return write_tensors(p, a, b, err);
}

const struct section section_compare = {"compare", "A and B", write};
