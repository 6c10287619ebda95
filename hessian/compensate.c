/*
 * GPTQ error compensation (arXiv 2210.17323). With H = V V^T, V upper triangular, and e = w - q,
 *     E(q) = sum over j of ( V_jj e_j + sum over i < j of V_ij e_i )^2.
 * When columns are processed in order, the best q_j for the earlier choices is therefore the
 * representable value nearest to w_j + (sum over i < j of V_ij e_i) / V_jj, and its error has the
 * weight V_jj^2. This equals GPTQ's update (its U is V^-1) but needs no inverse. The sums for later
 * columns take one matrix product per column block.
 */
#include "hessian/panel.h"

#include <string.h>

enum { R = QT_PANEL_ROWS };

/*
 * Chooses the parameters of the group of n columns that starts at column j of the column block. Its
 * targets are the optimum without rounding for the errors so far: the e for which every term of E
 * is 0, by forward substitution.
 */
static void begin_group(struct panel *p, size_t at, size_t j, size_t n)
{
    const struct qt_factor *f = p->f;
    size_t from = at + j, k = f->k;
    float *t = p->w, *e = p->scratch;
    const struct qt_column_group group = {
        f->group[from], f->order + from, n, f->v + from * k + from, k, 0};
    if (from > 0) { /* the first group's targets are the weights themselves */
        t = p->target;
        memcpy(e, p->g + j * R, n * R * sizeof *e);
        for (size_t i = 0; i < n; i++) {
            float vii = f->v[(from + i) * k + from + i];
            for (size_t r = 0; r < R; r++) {
                e[i * R + r] /= -vii;
                t[i * R + r] = p->w[(from + i) * R + r] - e[i * R + r];
            }
            qt_panel_add(e + (i + 1) * R, f->v + (from + i) * k + from + i + 1, k, e + i * R, 1,
                         n - i - 1);
        }
    }
    p->rounder->begin(p->rounder->ctx, &group, t, p->row0, p->rows);
}

/* Rounds column j of a column block and adds its error to g of the columns after it up to `end`. */
static void round_column(struct panel *p, size_t at, size_t j, size_t end)
{
    const struct qt_factor *f = p->f;
    const size_t pos = at + j;
    const float vjj = f->v[pos * f->k + pos], *w = p->w + pos * R;
    float x[R], *q = p->q + pos * R, *error = p->change + j * R;
    for (size_t r = 0; r < R; r++)
        x[r] = w[r] + p->g[j * R + r] / vjj;
    p->rounder->round(p->rounder->ctx, f->order[pos], x, q, p->unit + pos * R, p->row0, p->rows);
    for (size_t r = 0; r < p->rows; r++) {
        double term = (double)vjj * (double)(x[r] - q[r]);
        p->sum += term * term;
    }
    for (size_t r = 0; r < R; r++)
        error[r] = w[r] - q[r];
    qt_panel_add(p->g + (j + 1) * R, f->v + pos * f->k + pos + 1, f->k, error, 1, end - j - 1);
}

void qt_panel_compensate(struct panel *p, size_t at, size_t n)
{
    const struct qt_factor *f = p->f;
    p->changed = true;
    for (size_t j = 0, end; j < n; j = end) {
        const size_t pos = at + j, most = qt_min_size(j + QT_PANEL_STEP, n);
        if (pos == 0 || f->group[pos] != f->group[pos - 1])
            begin_group(p, at, j, qt_factor_group_end(f, pos) - pos);
        for (end = j + 1; end < most && f->group[at + end] == f->group[pos];)
            end++;
        for (size_t i = j; i < end; i++)
            round_column(p, at, i, end);
        qt_panel_add(p->g + end * R, f->v + pos * f->k + at + end, f->k, p->change + j * R, end - j,
                     n - end);
    }
}
