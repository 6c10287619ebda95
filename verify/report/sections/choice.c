/* What somebody needs who chooses between containers: size against divergence. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* A container with one of its evaluations. */
struct choice {
    const struct subject *subject;
    const json_t *eval; /* NULL: none */
    char label[256];
    double size, kld, sqnr;
    size_t order;              /* of the inputs */
    const struct choice *best; /* a choice that is smaller and nearer; NULL: none */
};

struct choices {
    struct choice *list;
    size_t count;
    double unit; /* bytes */
    const char *unit_name;
};

static double subject_sqnr(const struct subject *s)
{
    struct cell_sum sum = {0};
    for (size_t i = 0; i < s->count; i++)
        cell_add(&sum, &s->tensors[i]);
    return cell_sqnr(&sum);
}

static struct choice choice_new(const struct qt_report *r, size_t i, const json_t *eval,
                                size_t order)
{
    const struct subject *s = &r->subjects[i];
    const char *keys = member_text(eval, "kv_keys");
    struct choice c = {.subject = s,
                       .eval = eval,
                       .size = s->bytes,
                       .kld = member(eval, "kld_mean"),
                       .sqnr = subject_sqnr(s),
                       .order = order};
    snprintf(c.label, sizeof c.label, "%s%s%s", s->label, keys ? ", 4-bit KV cache, keys " : "",
             keys ? keys : "");
    return c;
}

/* Evaluations can be compared if they have the same tokens and the same reference: the perplexity
 * of the reference then is the same. */
static bool comparable(const struct choice *a, const struct choice *b)
{
    return member(a->eval, "ref_ppl") == member(b->eval, "ref_ppl") &&
           member(a->eval, "scored_tokens") == member(b->eval, "scored_tokens");
}

static bool is_better(const struct choice *a, const struct choice *b)
{
    return comparable(a, b) && a->size <= b->size && a->kld <= b->kld &&
           (a->size < b->size || a->kld < b->kld);
}

static int compare_choices(const void *pa, const void *pb)
{
    const struct choice *a = pa, *b = pb;
    if (isnan(a->size) != isnan(b->size))
        return isnan(a->size) ? 1 : -1;
    if (a->size != b->size && !isnan(a->size))
        return a->size < b->size ? -1 : 1;
    return (a->order > b->order) - (a->order < b->order);
}

static int choices_new(struct choices *c, const struct qt_report *r, struct qt_err *err)
{
    double largest = 0;
    int rc = qt_array_new(&c->list, r->nsubjects + r->ndocuments, sizeof *c->list, err);
    if (rc < 0)
        return rc;
    c->count = 0;
    for (size_t i = 0; i < r->nsubjects; i++) {
        const size_t before = c->count;
        for (size_t k = 0; k < r->ndocuments; k++) {
            const struct document *d = &r->documents[k];
            if (d->kind == DOCUMENT_EVAL && d->subject == i) {
                c->list[c->count] = choice_new(r, i, d->json, c->count);
                c->count++;
            }
        }
        if (c->count == before) {
            c->list[c->count] = choice_new(r, i, NULL, c->count);
            c->count++;
        }
        largest = fmax(largest, r->subjects[i].bytes);
    }
    c->unit = largest >= 0x1p30 ? 0x1p30 : 0x1p20;
    c->unit_name = largest >= 0x1p30 ? "GiB" : "MiB";
    qsort(c->list, c->count, sizeof *c->list, compare_choices);
    for (size_t i = 0; i < c->count; i++)
        for (size_t k = 0; k < c->count && !c->list[i].best; k++)
            if (is_better(&c->list[k], &c->list[i]))
                c->list[i].best = &c->list[k];
    return QT_OK;
}

static bool is_charted(const struct choice *c)
{
    return isfinite(c->size) && isfinite(c->kld);
}

/* ---- text ----------------------------------------------------------------------------------- */

static void write_lead(struct page *p, const struct choices *c)
{
    size_t n = 0, charted = 0;
    for (size_t i = 0; i < c->count; i++)
        charted += is_charted(&c->list[i]);
    if (charted < 2)
        return;
    html(&p->text, "<p class=\"lead\">Best of their size (no other is both smaller and "
                   "nearer to the original): ");
    for (size_t i = 0; i < c->count; i++) {
        const struct choice *one = &c->list[i];
        if (is_charted(one) && !one->best)
            html(&p->text, "%s<strong>%s</strong> (%.3g %s, KL %.3g)", n++ ? ", " : "", one->label,
                 one->size / c->unit, c->unit_name, one->kld);
    }
    html(&p->text, ".</p>\n");
}

/* ---- charts --------------------------------------------------------------------------------- */

static double choice_kld(const struct choice *c)
{
    return c->kld;
}

/* Positions whose most probable token is not that of the original, in %. */
static double choice_other(const struct choice *c)
{
    return 100 * (1 - member(c->eval, "same_top"));
}

/* Charts the choices that can be compared with `group`, their sizes against `value`. front: [2
 * count], for the places of the best of their size. */
static void write_points(struct page *p, const struct choices *c, const struct choice *group,
                         const char *what, const char *title,
                         double (*value)(const struct choice *c), double *front)
{
    struct chart chart;
    char size[32];
    size_t n = 0;
    snprintf(size, sizeof size, "size (%s)", c->unit_name);
    struct axis x = axis_new(size, false), y = axis_new(title, true);
    for (size_t i = 0; i < c->count; i++) {
        const struct choice *one = &c->list[i];
        if (!is_charted(one) || !comparable(one, group))
            continue;
        axis_take(&x, one->size / c->unit);
        axis_take(&y, value(one));
        if (!one->best) {
            front[n] = one->size / c->unit;
            front[c->count + n++] = value(one);
        }
    }
    if (!axis_used(&x) || !axis_used(&y))
        return;
    html(&p->text, "<div>");
    chart_begin(&chart, p, what, &x, &y);
    chart_steps(&chart, front, front + c->count, n);
    for (size_t i = 0; i < c->count; i++) {
        const struct choice *one = &c->list[i];
        char more[200];
        if (!is_charted(one) || !comparable(one, group))
            continue;
        snprintf(more, sizeof more, "%.4g %s, %.4g", one->size / c->unit, c->unit_name, value(one));
        chart_point(&chart, one->best ? 5 : 0, one->size / c->unit, value(one), one->label, more);
    }
    chart_end(&chart);
    html(&p->text, "</div>");
}

/* Charts for each set of evaluations that can be compared. */
static int write_charts(struct page *p, const struct choices *c, struct qt_err *err)
{
    double *front = NULL;
    int rc = qt_array_new(&front, 2 * c->count, sizeof *front, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < c->count; i++) {
        const struct choice *first = &c->list[i];
        const char *data = member_text(first->eval, "data");
        bool seen = !is_charted(first);
        for (size_t k = 0; k < i && !seen; k++)
            seen = is_charted(&c->list[k]) && comparable(&c->list[k], first);
        if (seen)
            continue;
        if (data)
            html(&p->text, "<h3>On %s; lower left is better</h3>\n", data);
        html(&p->text, "<div class=\"charts\">");
        write_points(p, c, first, "Size against KL divergence from the original",
                     "KL divergence (nats)", choice_kld, front);
        write_points(p, c, first, "Size against positions with another most probable token",
                     "other top token (%)", choice_other, front);
        html(&p->text, "</div>\n");
    }
    qt_free(front);
    return QT_OK;
}

/* ---- table ---------------------------------------------------------------------------------- */

enum { SIZE_COLUMN = 3 };

static const struct column columns[] = {
    {"container", "container", NULL},
    {"verdict", "verdict", NULL},
    {"schemes", "schemes", NULL},
    {"size", "size", "%.4g"},
    {"of_original", "of original (%)", "%.1f"},
    {"bpw", "bits/weight", "%.3f"},
    {"kld_mean", "KL (nats)", "%.4g"},
    {"kld_se", "\u00b1", "%.2g"},
    {"same_top", "same top (%)", "%.2f"},
    {"ppl", "perplexity", "%.4f"},
    {"ppl_change", "change (%)", "%+.2f"},
    {"ppl_change_se", "\u00b1", "%.2f"},
    {"gates", "gates passed", NULL},
    {"sqnr_db", "SQNR of weights (dB)", "%.2f"},
    {"bytes", "bytes", "%.0f"},
};

/* "2 of 3": the conditions of --gate, in all documents about a subject. */
static const char *text_gates(char buf[64], const struct qt_report *r, const struct subject *s)
{
    size_t all = 0, passed = 0, i;
    const json_t *gate;
    for (size_t d = 0; d < r->ndocuments; d++) {
        if (r->documents[d].kind == DOCUMENT_BENCH || &r->subjects[r->documents[d].subject] != s)
            continue;
        json_array_foreach (json_object_get(r->documents[d].json, "gates"), i, gate) {
            passed += json_is_true(json_object_get(gate, "passed"));
            all++;
        }
    }
    snprintf(buf, 64, "%zu of %zu", passed, all);
    return all ? buf : NULL;
}

static void write_row(struct table *t, const struct qt_report *r, const struct choices *c,
                      const struct choice *one)
{
    char verdict[320] = "", gates[64];
    const json_t *eval = one->eval;
    if (one->best)
        snprintf(verdict, sizeof verdict, "%s is better", one->best->label);
    else if (is_charted(one))
        snprintf(verdict, sizeof verdict, "best of its size");
    row_begin(t);
    cell_text(t, one->label);
    cell_text(t, verdict[0] ? verdict : NULL);
    cell_text(t, one->subject->schemes[0] ? one->subject->schemes : NULL);
    cell_number(t, one->size / c->unit);
    cell_number(t, 100 * one->size / one->subject->source_bytes);
    cell_number(t, one->subject->bpw);
    cell_number(t, one->kld);
    cell_number(t, member(eval, "kld_se"));
    cell_number(t, 100 * member(eval, "same_top"));
    cell_number(t, member(eval, "ppl"));
    cell_number(t, 100 * (member(eval, "ppl_ratio") - 1));
    cell_number(t, 100 * member(eval, "ppl_ratio_se"));
    cell_text(t, text_gates(gates, r, one->subject));
    cell_number(t, one->sqnr);
    cell_number(t, one->size);
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    struct column with_unit[sizeof columns / sizeof *columns];
    struct choices c;
    struct table t;
    char size[32];
    if (r->nsubjects == 0)
        return QT_OK;
    int rc = choices_new(&c, r, err);
    if (rc < 0)
        return rc;
    memcpy(with_unit, columns, sizeof columns);
    snprintf(size, sizeof size, "size (%s)", c.unit_name);
    with_unit[SIZE_COLUMN].title = size;
    write_lead(p, &c);
    rc = write_charts(p, &c, err);
    TABLE_BEGIN(&t, "Containers, the smallest first. \u00b1: standard errors", with_unit);
    for (size_t i = 0; i < c.count; i++)
        write_row(&t, r, &c, &c.list[i]);
    page_table(p, &t, false);
    qt_free(c.list);
    return rc;
}

const struct section section_choice = {"choice", "Size against quality", write};
