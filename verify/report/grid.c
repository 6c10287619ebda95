/* Heat maps: tables of one figure, by decoder layer and kind of tensor. */
#include "verify/report/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SHADES = 7, MAX_CELLS = 1 << 16 };

int heat_new(struct heat *h, size_t nrows, size_t ncolumns, struct qt_err *err)
{
    int rc;
    h->nrows = nrows;
    h->ncolumns = ncolumns;
    h->row = h->column = NULL;
    h->value = NULL;
    QT_TRY(qt_array_new(&h->row, nrows, sizeof *h->row, err));
    QT_TRY(qt_array_new(&h->column, ncolumns, sizeof *h->column, err));
    QT_TRY(qt_array_new(&h->value, nrows * ncolumns, sizeof *h->value, err));
    for (size_t i = 0; i < nrows * ncolumns; i++)
        h->value[i] = NAN;
done:
    if (rc < 0)
        heat_free(h);
    return rc;
}

void heat_free(struct heat *h)
{
    for (size_t i = 0; h->row && i < h->nrows; i++)
        qt_free(h->row[i]);
    for (size_t i = 0; h->column && i < h->ncolumns; i++)
        qt_free(h->column[i]);
    qt_free(h->row);
    qt_free(h->column);
    qt_free(h->value);
    h->row = h->column = NULL;
    h->value = NULL;
}

static int shade(const struct heat *h, double v, double min, double max)
{
    double at = max > min ? (v - min) / (max - min) : 0.5;
    if (h->high)
        at = 1 - at;
    return (int)fmin(SHADES - 1, floor(at * SHADES));
}

static json_t *heat_json(const struct heat *h)
{
    json_t *columns = json_array(), *rows = json_array();
    bool failed = json_array_append_new(
                      columns, json_pack("{s:s, s:s}", "key", "row", "title", h->corner)) < 0;
    for (size_t k = 0; k < h->ncolumns; k++)
        failed |= json_array_append_new(columns,
                                        json_pack("{s:o, s:o}", "key", qt_json_name(h->column[k]),
                                                  "title", qt_json_name(h->column[k]))) < 0;
    for (size_t i = 0; i < h->nrows; i++) {
        json_t *row = json_array();
        failed |= json_array_append_new(row, qt_json_name(h->row[i])) < 0;
        for (size_t k = 0; k < h->ncolumns; k++) {
            const double v = h->value[i * h->ncolumns + k];
            failed |= json_array_append_new(row, isfinite(v) ? json_real(v) : json_null()) < 0;
        }
        failed |= json_array_append_new(rows, row) < 0;
    }
    json_t *out = json_pack("{s:o, s:o, s:o}", "caption", qt_json_name(h->caption), "columns",
                            columns, "rows", rows);
    if (!failed)
        return out;
    json_decref(out);
    return NULL;
}

void page_heat(struct page *p, const struct heat *h)
{
    struct text *t = &p->text;
    double min = INFINITY, max = -INFINITY;
    for (size_t i = 0; i < h->nrows * h->ncolumns; i++) {
        if (!isfinite(h->value[i]))
            continue;
        min = fmin(min, h->value[i]);
        max = fmax(max, h->value[i]);
    }
    if (min > max)
        return;
    const double wider = fmax(0, h->span - (max - min)) / 2;
    min -= wider;
    max += wider;
    html(t,
         "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"%s\">"
         "<table class=\"heat\"><caption>%s</caption><thead><tr><th scope=\"col\">%s</th>",
         h->caption, h->caption, h->corner);
    for (size_t k = 0; k < h->ncolumns; k++)
        html(t, "<th scope=\"col\">%s</th>", h->column[k]);
    html(t, "</tr></thead><tbody>\n");
    for (size_t i = 0; i < h->nrows; i++) {
        html(t, "<tr><th scope=\"row\">%s</th>", h->row[i]);
        for (size_t k = 0; k < h->ncolumns; k++) {
            const double v = h->value[i * h->ncolumns + k];
            char number[64];
            snprintf(number, sizeof number, h->format, v);
            if (isfinite(v))
                html(t, "<td class=\"h%d\">%s</td>", shade(h, v, min, max), number);
            else
                html(t, "<td></td>");
        }
        html(t, "</tr>\n");
    }
    html(t, "</tbody></table></div>\n");
    p->failed |= json_array_append_new(p->tables, heat_json(h)) < 0;
}

/* ---- sums over tensors ---------------------------------------------------------------------- */

void cell_add(struct cell_sum *sum, const struct tensor_figures *t)
{
    const double error2 = t->mse * t->weights;
    sum->weights += t->weights;
    sum->bits += t->bpw * t->weights;
    sum->error2 += error2;
    /* With an error of 0 the ratio is not stored, and the energy is not known. */
    sum->weight2 += error2 > 0 ? error2 * pow(10, t->sqnr_db / 10) : error2;
    sum->ms += t->ms;
    sum->outlier = fmax(sum->outlier, t->outlier);
    sum->input_outlier = fmax(sum->input_outlier, t->input_outlier);
}

double cell_sqnr(const struct cell_sum *sum)
{
    return sum->weights > 0 ? 10 * log10(sum->weight2 / sum->error2) : NAN;
}

int kinds_of_tensors(const char ***kinds, size_t *n, size_t **index,
                     const struct tensor_figures *tensors, size_t count, struct qt_err *err)
{
    json_t *numbers = json_object();
    bool failed = !numbers;
    int rc;
    *n = 0;
    *kinds = NULL;
    *index = NULL;
    QT_TRY(qt_array_new(kinds, count, sizeof **kinds, err));
    QT_TRY(qt_array_new(index, count, sizeof **index, err));
    for (size_t i = 0; i < count && !failed; i++) {
        const json_t *known = json_object_get(numbers, tensors[i].kind);
        (*index)[i] = known ? (size_t)json_integer_value(known) : *n;
        if (known)
            continue;
        failed = json_object_set_new(numbers, tensors[i].kind, json_integer((json_int_t)*n)) < 0;
        (*kinds)[(*n)++] = tensors[i].kind;
    }
    if (failed)
        rc = qt_no_memory(err, NULL);
done:
    json_decref(numbers);
    return rc;
}

static int compare_sizes(const void *a, const void *b)
{
    const size_t x = *(const size_t *)a, y = *(const size_t *)b;
    return (x > y) - (x < y);
}

/* The distinct layers in ascending order. */
static int find_layers(size_t **layers, size_t *n, const struct tensor_figures *tensors,
                       size_t count, struct qt_err *err)
{
    int rc = qt_array_new(layers, count, sizeof **layers, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < count; i++)
        (*layers)[i] = tensors[i].layer;
    qsort(*layers, count, sizeof **layers, compare_sizes);
    *n = 0;
    for (size_t i = 0; i < count; i++)
        if (*n == 0 || (*layers)[*n - 1] != (*layers)[i])
            (*layers)[(*n)++] = (*layers)[i];
    return QT_OK;
}

static int name_rows(struct heat *h, const size_t *layers, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < h->nrows && rc == QT_OK; i++)
        rc = layers[i] == SIZE_MAX ? qt_string_copy(&h->row[i], "other", err)
                                   : qt_string_format(&h->row[i], err, "%zu", layers[i]);
    return rc;
}

int heat_of_tensors(struct heat *h, const struct tensor_figures *tensors, size_t n,
                    double (*combine)(const struct cell_sum *sum), struct qt_err *err)
{
    const char **kinds = NULL;
    size_t *layers = NULL, *index = NULL, nkinds = 0, nlayers = 0;
    struct cell_sum *sums = NULL;
    int rc;
    h->row = h->column = NULL;
    h->value = NULL;
    QT_TRY(kinds_of_tensors(&kinds, &nkinds, &index, tensors, n, err));
    QT_TRY(find_layers(&layers, &nlayers, tensors, n, err));
    if (nlayers > MAX_CELLS / (nkinds + 1)) /* names that are not those of a model */
        nlayers = nkinds = 0;
    QT_TRY(heat_new(h, nlayers, nkinds, err));
    QT_TRY(name_rows(h, layers, err));
    for (size_t k = 0; k < nkinds; k++)
        QT_TRY(qt_string_copy(&h->column[k], kinds[k], err));
    QT_TRY(qt_array_new(&sums, nlayers * nkinds, sizeof *sums, err));
    for (size_t i = 0; i < n && nlayers; i++) {
        const size_t *row =
            bsearch(&tensors[i].layer, layers, nlayers, sizeof *layers, compare_sizes);
        cell_add(&sums[(size_t)(row - layers) * nkinds + index[i]], &tensors[i]);
    }
    for (size_t i = 0; i < nlayers * nkinds; i++)
        h->value[i] = sums[i].weights > 0 ? combine(&sums[i]) : NAN;
done:
    if (rc < 0)
        heat_free(h);
    qt_free(kinds);
    qt_free(layers);
    qt_free(index);
    qt_free(sums);
    return rc;
}
