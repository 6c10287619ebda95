/* Tables: every number of the report is in one, as HTML and as JSON. */
#include "verify/report/report.h"

#include <math.h>

void table_begin(struct table *t, const char *caption, const struct column *columns,
                 size_t ncolumns)
{
    *t = (struct table){caption, columns, ncolumns, json_array(), false};
    t->failed = !t->rows;
}

void row_begin(struct table *t)
{
    t->failed |= json_array_append_new(t->rows, json_array()) < 0;
}

static void cell(struct table *t, json_t *value)
{
    json_t *row = json_array_get(t->rows, json_array_size(t->rows) - 1);
    t->failed |= json_array_append_new(row, value) < 0;
}

void cell_text(struct table *t, const char *text)
{
    cell(t, text ? qt_json_name(text) : json_null());
}

void cell_number(struct table *t, double value)
{
    cell(t, isfinite(value) ? json_real(value) : json_null());
}

static void write_cell(struct text *out, const struct column *c, const json_t *value, bool first)
{
    char number[64];
    const char *text = json_string_value(value);
    if (json_is_real(value)) {
        snprintf(number, sizeof number, c->format, json_real_value(value));
        text = number;
    }
    if (first)
        html(out, "<th scope=\"row\">%s</th>", text ? text : "");
    else if (c->format)
        html(out, "<td class=\"n\">%s</td>", text ? text : "\u2013");
    else
        html(out, "<td>%s</td>", text ? text : "\u2013");
}

static void write_html(struct text *out, const struct table *t)
{
    size_t i, k;
    json_t *row, *value;
    html(out,
         "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"%s\">"
         "<table data-sort><caption>%s</caption><thead><tr>",
         t->caption, t->caption);
    for (k = 0; k < t->ncolumns; k++)
        html(out,
             t->columns[k].format ? "<th scope=\"col\" class=\"n\">%s</th>"
                                  : "<th scope=\"col\">%s</th>",
             t->columns[k].title);
    html(out, "</tr></thead><tbody>\n");
    json_array_foreach (t->rows, i, row) {
        html(out, "<tr>");
        json_array_foreach (row, k, value) {
            write_cell(out, &t->columns[k], value, k == 0);
        }
        html(out, "</tr>\n");
    }
    html(out, "</tbody></table></div>\n");
}

static json_t *table_json(const struct table *t)
{
    json_t *columns = json_array();
    bool failed = false;
    for (size_t k = 0; k < t->ncolumns; k++)
        failed |= json_array_append_new(columns,
                                        json_pack("{s:s, s:o}", "key", t->columns[k].key, "title",
                                                  qt_json_name(t->columns[k].title))) < 0;
    json_t *out = json_pack("{s:o, s:o, s:O}", "caption", qt_json_name(t->caption), "columns",
                            columns, "rows", t->rows);
    if (!failed)
        return out;
    json_decref(out);
    return NULL;
}

void page_table(struct page *p, struct table *t, bool folded)
{
    /* After a failure rows may have cells of others. */
    const size_t rows = t->failed ? 0 : json_array_size(t->rows);
    if (rows && folded)
        html(&p->text, "<details><summary>%s (%zu rows)</summary>", t->caption, rows);
    if (rows)
        write_html(&p->text, t);
    if (rows && folded)
        html(&p->text, "</details>\n");
    p->failed |= t->failed || (rows && json_array_append_new(p->tables, table_json(t)) < 0);
    json_decref(t->rows);
    t->rows = NULL;
}
