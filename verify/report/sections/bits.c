/* Where the bytes of a container are. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>

static const struct column columns[] = {
    {"kind", "kind", NULL},         {"tensors", "tensors", "%.0f"}, {"weights", "weights", "%.0f"},
    {"bpw", "bits/weight", "%.3f"}, {"bytes", "bytes", "%.0f"},     {"share", "share (%)", "%.1f"},
};

static double cell_bpw(const struct cell_sum *sum)
{
    return sum->bits / sum->weights;
}

static bool has_several(const struct subject *s)
{
    for (size_t i = 1; i < s->count; i++)
        if (fabs(s->tensors[i].bpw - s->tensors[0].bpw) > 0.05)
            return true;
    return false;
}

/* Sums of all tensors of a kind. */
struct kind {
    const char *name;
    size_t tensors;
    double weights, bytes;
};

static int sum_kinds(struct kind *kinds, size_t *n, const struct subject *s, struct qt_err *err)
{
    const char **names = NULL;
    size_t *index = NULL;
    int rc;
    QT_TRY(kinds_of_tensors(&names, n, &index, s->tensors, s->count, err));
    for (size_t k = 0; k < *n; k++)
        kinds[k] = (struct kind){.name = names[k]};
    for (size_t i = 0; i < s->count; i++) {
        const struct tensor_figures *t = &s->tensors[i];
        struct kind *kind = &kinds[index[i]];
        kind->tensors++;
        kind->weights += t->weights;
        kind->bytes += t->weights * t->bpw / 8;
    }
done:
    qt_free(names);
    qt_free(index);
    return rc;
}

enum { MOST_BARS = 24 };

static int write_kinds(struct page *p, const struct subject *s, struct qt_err *err)
{
    struct bar bars[MOST_BARS];
    struct kind *kinds = NULL;
    struct table t;
    size_t n = 0;
    double packed = 0;
    int rc;
    QT_TRY(qt_array_new(&kinds, s->count + 1, sizeof *kinds, err));
    QT_TRY(sum_kinds(kinds, &n, s, err));
    for (size_t i = 0; i < n; i++)
        packed += kinds[i].bytes;
    if (s->bytes - packed > 0.5)
        kinds[n++] = (struct kind){"copied", 0, NAN, s->bytes - packed};
    TABLE_BEGIN(&t, "Bytes by kind of tensor", columns);
    for (size_t i = 0; i < n; i++) {
        row_begin(&t);
        cell_text(&t, kinds[i].name);
        cell_number(&t, kinds[i].tensors ? (double)kinds[i].tensors : NAN);
        cell_number(&t, kinds[i].weights);
        cell_number(&t, 8 * kinds[i].bytes / kinds[i].weights);
        cell_number(&t, kinds[i].bytes);
        cell_number(&t, 100 * kinds[i].bytes / fmax(s->bytes, packed));
        if (i < MOST_BARS)
            bars[i] = (struct bar){kinds[i].name, kinds[i].bytes / 0x1p20,
                                   isnan(kinds[i].weights) ? 5 : 0};
    }
    html(&p->text, "<div class=\"charts\">\n");
    if (n && n <= MOST_BARS)
        chart_bars(p, "Bytes by kind of tensor (MiB)", bars, n, "%.3g MiB");
    html(&p->text, "<div>");
    page_table(p, &t, n > MOST_BARS);
    html(&p->text, "</div></div>\n");
done:
    qt_free(kinds);
    return rc;
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    for (size_t i = 0; i < r->nsubjects; i++) {
        const struct subject *s = &r->subjects[i];
        struct heat h = {.caption = "Bits per weight, by decoder layer and kind",
                         .corner = "layer",
                         .format = "%.2f",
                         .high = true};
        if (s->count == 0)
            continue;
        html(&p->text, "<h3>%s: %s, %.3f bits per quantized weight</h3>\n", s->label,
             s->schemes[0] ? s->schemes : "no scheme", s->bpw);
        int rc = write_kinds(p, s, err);
        if (rc == QT_OK && has_several(s)) {
            rc = heat_of_tensors(&h, s->tensors, s->count, cell_bpw, err);
            if (rc == QT_OK)
                page_heat(p, &h);
            heat_free(&h);
        }
        if (rc < 0)
            return rc;
    }
    return QT_OK;
}

const struct section section_bits = {"bits", "Bits and bytes", write};
