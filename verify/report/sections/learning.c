/* Learning curves, from the containers' qtool-report.json. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>

static const struct column columns[] = {
    {"step", "step", "%.0f"},
    {"train", "training", "%.6g"},
    {"held_out", "held out", "%.6g"},
    {"block", "decoder layer", "%.0f"},
};

static int write_curve(struct page *p, const struct subject *s, const json_t *learning,
                       const json_t *curve, struct qt_err *err)
{
    static const char *const names[] = {"held out", "training"};
    const size_t n = json_array_size(curve);
    struct axis x = axis_new("step", false), y = axis_new("objective", false);
    double *step = NULL, *held, *train;
    struct chart chart;
    struct table t;
    bool blocks = false;
    int rc;
    QT_TRY(qt_array_new(&step, 3 * n, sizeof *step, err));
    held = step + n;
    train = held + n;
    TABLE_BEGIN(&t, "Learning curve", columns);
    for (size_t i = 0; i < n; i++) {
        const json_t *row = json_array_get(curve, i);
        step[i] = member(row, "step");
        held[i] = member(row, "held_out");
        train[i] = step[i] > 0 ? member(row, "train") : NAN; /* nothing was trained before step 1 */
        blocks |= !isnan(member(row, "block"));
        axis_take(&x, step[i]);
        axis_take(&y, held[i]);
        axis_take(&y, train[i]);
        row_begin(&t);
        cell_number(&t, step[i]);
        cell_number(&t, train[i]);
        cell_number(&t, held[i]);
        cell_number(&t, member(row, "block"));
    }
    html(&p->text, "<h3>%s</h3>\n<p class=\"soft\">%s</p>\n", s->label,
         member_text(learning, "options") ? member_text(learning, "options") : "");
    /* With scope=block every decoder layer has a curve: only the table has room for them. */
    if (!blocks && axis_used(&x) && axis_used(&y)) {
        size_t m = 0;
        chart_begin(&chart, p, "Objective against steps", &x, &y);
        chart_line(&chart, 0, false, step, held, n);
        for (size_t i = 0; i < n; i++)
            if (isfinite(train[i]))
                held[m] = train[i], step[m++] = step[i];
        chart_line(&chart, 1, true, step, held, m);
        chart_end(&chart);
        chart_legend(p, names, 2, 2);
    }
    page_table(p, &t, n > 12);
done:
    qt_free(step);
    return rc;
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < r->nsubjects && rc == QT_OK; i++) {
        const json_t *learning = json_object_get(r->subjects[i].run, "learning");
        const json_t *curve = json_object_get(learning, "curve");
        if (json_array_size(curve))
            rc = write_curve(p, &r->subjects[i], learning, curve, err);
    }
    return rc;
}

const struct section section_learning = {"learning", "Learning", write};
