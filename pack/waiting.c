/* Linears that are rounded together (run.h). */
#include "pack/run.h"

static void free_earlier(struct qt_run_waiting *w)
{
    while (w->inputs)
        qt_factor_free(&w->earlier[--w->inputs]);
}

void qt_run_waiting_free(struct qt_run_waiting *w)
{
    while (w->n)
        qt_run_item_free(NULL, w->item[--w->n]);
    free_earlier(w);
    qt_factor_free(&w->current);
}

int qt_run_round_waiting(struct qt_run_waiting *w, struct qt_err *err)
{
    const size_t n = w->n;
    int rc = n ? qt_run_items_round(w->item, n, err) : QT_OK;
    if (rc < 0)
        return rc;
    w->n = w->rows = 0;
    for (size_t i = 0; i < n; i++)
        if (rc == QT_OK)
            rc = qt_run_item_finish(w->kept[i], w->item[i], NULL, err);
        else
            qt_run_item_free(NULL, w->item[i]);
    free_earlier(w);
    return rc;
}

int qt_run_wait(struct qt_run_waiting *w, struct qt_run_item *item, struct qt_packed *kept,
                struct qt_err *err)
{
    enum { FULL = 8192 }; /* rows that keep a GPU busy */
    w->item[w->n] = item;
    w->kept[w->n++] = kept;
    w->rows += qt_run_item_packed(item)->n;
    return qt_run_item_is_rounded(item) || w->n == QT_RUN_WAITING || w->rows >= FULL
               ? qt_run_round_waiting(w, err)
               : QT_OK;
}

void qt_run_leave_input(struct qt_run_waiting *w)
{
    if (w->n)
        w->earlier[w->inputs++] = w->current;
    else
        qt_factor_free(&w->current);
    w->current = (struct qt_factor){0};
}
