/*
 * Coordinate descent under H after error compensation (as in QuantEase, arXiv 2309.01885), and
 * refits of scales. No step increases E.
 *
 * With G = H (w - q)^T kept up to date, the best value of one coordinate is q_j + G_j / H_jj,
 * rounded. The best values of a group without rounding are t = q + (H_gg)^-1 G_g; values q' cost
 * (t - q') H_gg (t - q')^T more. A scheme that can refit a whole group does so for these targets.
 * Otherwise the best scale for fixed codes is s + U.G / U.HU, where U are the group's values before
 * scaling. This least-squares scale is rounded as it will be stored and kept only if E decreases.
 */
#include "hessian/panel.h"

#include <math.h>
#include <string.h>

enum { R = QT_PANEL_ROWS };

/* Updates G of columns [from, to) of the column block for a change c[m][R] of w - q in the m
 * columns from j on. */
static void spread(struct panel *p, size_t at, size_t j, size_t m, size_t from, size_t to,
                   const float *c)
{
    qt_panel_add(p->g + from * R, p->f->h + (at + j) * p->f->k + at + from, p->f->k, c, m,
                 to - from);
}

/* c[R] = change of w - q in column j since q was `old`. True if any change is not 0. */
static bool note_change(struct panel *p, size_t at, size_t j, const float *old, float *c)
{
    const float *q = p->q + (at + j) * R;
    bool changed = false;
    for (size_t r = 0; r < R; r++) {
        c[r] = old[r] - q[r];
        p->change[j * R + r] += c[r];
        changed |= c[r] != 0;
    }
    p->changed |= changed;
    return changed;
}

/* Rounds column j again and updates G of columns [from, to) for its change c[R]. True if any change
 * is not 0. */
static bool descend_column(struct panel *p, size_t at, size_t j, size_t from, size_t to, float *c)
{
    const size_t pos = at + j;
    const float hjj = p->f->h[pos * p->f->k + pos];
    float x[R], old[R], *q = p->q + pos * R;
    memcpy(old, q, sizeof old);
    for (size_t r = 0; r < R; r++)
        x[r] = q[r] + p->g[j * R + r] / hjj;
    p->rounder->round(p->rounder->ctx, p->f->order[pos], x, q, p->unit + pos * R, p->row0, p->rows);
    const bool changed = note_change(p, at, j, old, c);
    if (changed)
        spread(p, at, j, 1, from, to, c);
    return changed;
}

/* Descends through columns [first, end) of a column block of n, QT_PANEL_STEP at a time. Keeps G of
 * [end, n) up to date, and G of [first, end) as well if `all`; else only as far as later columns
 * need it. */
static void descend(struct panel *p, size_t at, size_t first, size_t end, size_t n, bool all)
{
    float *c = p->scratch;
    for (size_t j = first, next; j < end; j = next) {
        bool changed = false;
        next = qt_min_size(j + QT_PANEL_STEP, end);
        for (size_t i = j; i < next; i++)
            changed |= descend_column(p, at, i, all ? j : i + 1, next, c + (i - j) * R);
        if (changed && all)
            spread(p, at, j, next - j, first, j, c);
        if (changed)
            spread(p, at, j, next - j, next, n, c);
    }
}

/* ---- refit of whole groups ------------------------------------------------------------------ */

/* Factors the n x n diagonal block of H at position `at` as V V^T, V upper triangular. */
static void factor_group(float *v, const struct qt_factor *f, size_t at, size_t n)
{
    for (size_t j = n; j-- > 0;)
        for (size_t i = j + 1; i-- > 0;) {
            double sum = (double)f->h[(at + i) * f->k + at + j];
            for (size_t l = j + 1; l < n; l++)
                sum -= (double)v[i * n + l] * (double)v[j * n + l];
            v[i * n + j] = (float)(i == j ? sqrt(sum) : sum / (double)v[j * n + j]);
        }
}

/* t[n][R] = q + (V V^T)^-1 g */
static void group_targets(float *t, const float *q, const float *g, const float *v, size_t n)
{
    memcpy(t, g, n * R * sizeof *t);
    for (size_t j = n; j-- > 0;)
        for (size_t r = 0; r < R; r++) {
            for (size_t l = j + 1; l < n; l++)
                t[j * R + r] -= v[j * n + l] * t[l * R + r];
            t[j * R + r] /= v[j * n + j];
        }
    for (size_t j = 0; j < n; j++)
        for (size_t r = 0; r < R; r++) {
            for (size_t l = 0; l < j; l++)
                t[j * R + r] -= v[l * n + j] * t[l * R + r];
            t[j * R + r] /= v[j * n + j];
        }
    for (size_t i = 0; i < n * R; i++)
        t[i] += q[i];
}

/* Refits the group of columns [first, end) of a column block of n. */
static void refit_group(struct panel *p, size_t at, size_t first, size_t end, size_t n)
{
    const struct qt_factor *f = p->f;
    const size_t pos = at + first, columns = end - first;
    const struct qt_column_group group = {f->group[pos], f->order + pos, columns,
                                          p->v,          columns,        p->round};
    float *q = p->q + pos * R, *old = p->scratch, *c = p->scratch;
    bool changed = false;
    factor_group(p->v, f, pos, columns);
    group_targets(p->target, q, p->g + first * R, p->v, columns);
    memcpy(old, q, columns * R * sizeof *old);
    p->rounder->refit(p->rounder->ctx, &group, p->target, q, p->row0, p->rows);
    for (size_t j = 0; j < columns; j++) /* c overwrites old */
        changed |= note_change(p, at, first + j, old + j * R, c + j * R);
    if (changed)
        spread(p, at, first, columns, first, n, c);
}

/* ---- refit of scales ------------------------------------------------------------------------ */

/* Replaces scale[R] of a group by the best storable scale in the rows where that lowers E. */
static void choose_scale(float *scale, const struct panel *p, size_t group, const double *ug,
                         const double *uhu)
{
    const struct qt_rounder *rounder = p->rounder;
    float best[R] = {0};
    for (size_t r = 0; r < p->rows; r++)
        best[r] = uhu[r] > 0 ? scale[r] + (float)(ug[r] / uhu[r]) : scale[r];
    rounder->rescale(rounder->ctx, group, best, p->row0, p->rows);
    for (size_t r = 0; r < p->rows; r++) {
        const double step = (double)best[r] - (double)scale[r];
        if (step * (step * uhu[r] - 2 * ug[r]) < 0) /* change of E */
            scale[r] = best[r];
    }
    rounder->rescale(rounder->ctx, group, scale, p->row0, p->rows);
}

/* Refits the scale of columns [first, end) of a column block of n, whose G must be up to date. */
static void refit_scale(struct panel *p, size_t at, size_t first, size_t end, size_t n)
{
    const struct qt_factor *f = p->f;
    const size_t pos = at + first, columns = end - first, cells = columns * R;
    const float *unit = p->unit + pos * R, *g = p->g + first * R;
    float *q = p->q + pos * R, *hu = p->scratch, *c = p->scratch, scale[R] = {0}, old[R];
    bool changed = false;
    double ug[R] = {0}, uhu[R] = {0};
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)columns, R, (int)columns, 1,
                f->h + pos * f->k + pos, (int)f->k, unit, R, 0, hu, R);
    for (size_t i = 0; i < cells; i += R)
        for (size_t r = 0; r < R; r++) {
            ug[r] += (double)unit[i + r] * (double)g[i + r];
            uhu[r] += (double)unit[i + r] * (double)hu[i + r];
        }
    p->rounder->scale(p->rounder->ctx, f->group[pos], scale, p->row0, p->rows);
    choose_scale(scale, p, f->group[pos], ug, uhu);
    for (size_t j = first; j < end; j++, q += R, unit += R, c += R) { /* c overwrites hu */
        memcpy(old, q, sizeof old);
        for (size_t r = 0; r < R; r++)
            q[r] = scale[r] * unit[r];
        changed |= note_change(p, at, j, old, c);
    }
    if (changed)
        spread(p, at, first, columns, end, n, p->scratch);
}

/* One scale per row: with q = s U, HU is (Hw - G) / s, which needs no matrix product. */
void qt_panel_moments(struct panel *p, size_t at, size_t n)
{
    float before[R] = {0};
    if (p->converged)
        return;
    if (at == 0) {
        memset(p->ug, 0, sizeof p->ug);
        memset(p->uhq, 0, sizeof p->uhq);
    }
    for (size_t i = 0; i < n * R; i++) {
        const double u = (double)p->unit[at * R + i], g = (double)p->g[i];
        p->ug[i % R] += u * g;
        p->uhq[i % R] += u * ((double)p->hw[at * R + i] - g);
    }
    if (at + n < p->f->k)
        return;
    p->rounder->scale(p->rounder->ctx, p->f->group[0], before, p->row0, p->rows);
    memcpy(p->scale, before, sizeof before);
    for (size_t r = 0; r < R; r++) /* a scale of 0 stays 0 */
        p->uhq[r] = before[r] != 0 ? p->uhq[r] / (double)before[r] : 0;
    choose_scale(p->scale, p, p->f->group[0], p->ug, p->uhq);
    for (size_t r = 0; r < R; r++)
        p->scale_change[r] = before[r] != 0 ? (p->scale[r] - before[r]) / before[r] : 0;
}

void qt_panel_rescale(struct panel *p, size_t at, size_t n)
{
    const size_t first = at * R;
    for (size_t i = 0; i < n * R && !p->converged; i++) {
        p->q[first + i] = p->scale[i % R] * p->unit[first + i];
        p->g[i] -= p->scale_change[i % R] * (p->hw[first + i] - p->g[i]);
    }
}

/* ---- a column block ------------------------------------------------------------------------- */

void qt_panel_descend(struct panel *p, size_t at, size_t n)
{
    const bool refits_groups = p->rounder->refit,
               refits_scales = !refits_groups && !qt_factor_is_one_group(p->f);
    p->changed = false;
    memset(p->change, 0, n * R * sizeof *p->change);
    for (size_t j = 0, end; j < n && !p->converged; j = end) {
        end = refits_groups || refits_scales ? qt_factor_group_end(p->f, at + j) - at : n;
        if (refits_groups)
            refit_group(p, at, j, end, n);
        descend(p, at, j, end, n, refits_scales);
        if (refits_scales)
            refit_scale(p, at, j, end, n);
    }
}
