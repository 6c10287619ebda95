/* Conditions of --gate, passed and failed. */
#include "verify/report/report.h"

static const struct column columns[] = {
    {"container", "container", NULL}, {"command", "command", NULL},
    {"condition", "condition", NULL}, {"value", "value", "%.6g"},
    {"result", "result", NULL},
};

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    struct table t;
    size_t failed = 0, i;
    const json_t *gate;
    (void)err;
    TABLE_BEGIN(&t, "Conditions of --gate", columns);
    for (size_t d = 0; d < r->ndocuments; d++) {
        json_array_foreach (json_object_get(r->documents[d].json, "gates"), i, gate) {
            const bool passed = json_is_true(json_object_get(gate, "passed"));
            if (r->documents[d].kind == DOCUMENT_BENCH)
                continue;
            row_begin(&t);
            cell_text(&t, r->subjects[r->documents[d].subject].label);
            cell_text(&t, member_text(r->documents[d].json, "command"));
            cell_text(&t, member_text(gate, "condition"));
            cell_number(&t, member(gate, "value"));
            cell_text(&t, passed ? "passed" : "FAILED");
            failed += !passed;
        }
    }
    const size_t n = json_array_size(t.rows);
    if (n)
        html(&p->text, "<p><span class=\"good\">%zu passed</span>, ", n - failed);
    if (n && failed)
        html(&p->text, "<span class=\"bad\">%zu failed</span>.</p>\n", failed);
    else if (n)
        html(&p->text, "none failed.</p>\n");
    page_table(p, &t, false);
    return QT_OK;
}

const struct section section_gates = {"gates", "Gates", write};
