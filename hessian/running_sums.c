/* G of panel.h: passes the rows of a column block to the panels' steps and multiplies their changes
 * by V or H. */
#include "hessian/panel.h"

#include <string.h>

enum { R = QT_PANEL_ROWS };

/* ---- one panel, on the calling thread ------------------------------------------------------- */

/* First column that a product changes. V is upper triangular: only columns after the block. */
static size_t first_column(const struct qt_running_sums *s, size_t end)
{
    return s->m == s->f->v ? end : 0;
}

static void block_on_cpu(struct qt_running_sums *s, qt_panel_step *step,
                         enum qt_running_sums_use use, size_t at, size_t n)
{
    struct panel *p = s->panel;
    const size_t k = s->f->k, bytes = n * R * sizeof *s->g, first = first_column(s, at + n);
    memcpy(p->g, s->g + at * R, bytes);
    step(p, at, n);
    if (use == QT_SUMS_STORE)
        memcpy(s->g + at * R, p->g, bytes);
    if (use == QT_SUMS_ADD && p->changed && first < k)
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)(k - first), R, (int)n, 1,
                    s->m + at * k + first, (int)k, p->change, R, 1, s->g + first * R, R);
}

/* ---- all panels, products on a backend ------------------------------------------------------ */

struct column_block {
    struct qt_running_sums *s;
    qt_panel_step *step;
    enum qt_running_sums_use use;
    size_t at, n;
};

/* Copy between a panel's rows and its part of the staged rows. */
static void load_staged(const struct column_block *b, size_t item, float *to)
{
    for (size_t i = 0; i < b->n; i++)
        memcpy(to + i * R, b->s->staged + (i * b->s->panels + item) * R, R * sizeof *to);
}

static void store_staged(const struct column_block *b, size_t item, const float *from)
{
    for (size_t i = 0; i < b->n; i++)
        memcpy(b->s->staged + (i * b->s->panels + item) * R, from + i * R, R * sizeof *from);
}

static void step_panel(void *ctx, size_t item)
{
    const struct column_block *b = ctx;
    struct panel *p = &b->s->panel[item];
    load_staged(b, item, p->g);
    b->step(p, b->at, b->n);
    if (b->use != QT_SUMS_READ)
        store_staged(b, item, b->use == QT_SUMS_ADD ? p->change : p->g);
}

static int block_on_backend(struct qt_running_sums *s, struct column_block *b, struct qt_err *err)
{
    struct qt_backend *be = s->be;
    const size_t k = s->f->k, width = s->panels * R, bytes = b->n * width * sizeof *s->staged;
    float *rows = s->device_g + b->at * width;
    bool changed = false;
    int rc;
    QT_TRY(be->download(be, s->staged, rows, bytes, err));
    qt_parallel_for(s->panels, step_panel, b);
    for (size_t i = 0; i < s->panels; i++)
        changed |= s->panel[i].changed;
    if (b->use == QT_SUMS_STORE)
        QT_TRY(be->upload(be, rows, s->staged, bytes, err));
    if (b->use == QT_SUMS_ADD &&
        changed) { /* all columns even of V, which is 0 below its diagonal */
        QT_TRY(be->upload(be, s->device_change, s->staged, bytes, err));
        const float *m = s->m == s->f->v ? s->f->backend_v : s->f->backend_h;
        QT_TRY(be->linear_grad_w(be, s->device_g, m + b->at * k, s->device_change, true, b->n, k,
                                 width, err));
    }
done:
    return rc;
}

int qt_running_sums_on_backend(struct qt_running_sums *s, struct qt_backend *be, size_t longest,
                               struct qt_err *err)
{
    const size_t k = s->f->k, width = s->panels * R;
    int rc;
    s->be = be;
    QT_TRY(qt_array_new(&s->staged, longest, width * sizeof *s->staged, err));
    be->pin(be, s->staged, longest * width * sizeof *s->staged);
    QT_TRY(be->alloc(be, &s->device_change, longest * width * sizeof *s->staged, err));
    QT_TRY(be->alloc(be, &s->device_g, k * width * sizeof *s->g, err));
done:
    return rc;
}

void qt_running_sums_free(struct qt_running_sums *s)
{
    if (!s->be)
        return;
    s->be->free(s->be, s->device_g);
    s->be->free(s->be, s->device_change);
    s->be->unpin(s->be, s->staged);
    qt_free(s->staged);
    s->be = NULL;
}

/* ---- both ----------------------------------------------------------------------------------- */

int qt_running_sums_start(struct qt_running_sums *s, const float *m, struct qt_err *err)
{
    const size_t k = s->f->k;
    s->m = m;
    if (s->be)
        return s->be->zero(s->be, s->device_g, k * s->panels * R * sizeof *s->g, err);
    memset(s->g, 0, k * R * sizeof *s->g);
    return QT_OK;
}

int qt_running_sums_block(struct qt_running_sums *s, qt_panel_step *step,
                          enum qt_running_sums_use use, size_t at, size_t n, struct qt_err *err)
{
    if (s->be)
        return block_on_backend(s, &(struct column_block){s, step, use, at, n}, err);
    block_on_cpu(s, step, use, at, n);
    return QT_OK;
}
