/*
 * Coordinate descent under H after the feedback pass. With G = H (w - q)^T kept up to date, the
 * best value of one coordinate is q_j + G_j / H_jj, rounded; the best scale of a group, its codes
 * fixed, is s + U.G / U.HU, U being the group's values before scaling: least squares in one
 * unknown, tried as it will be stored and kept only if E falls. Every step lowers E or leaves it.
 */
#include "hessian/panel.h"

#include <cblas.h>
#include <string.h>

enum {
    R = QT_PANEL_ROWS,
    BLOCK = 64, /* columns between updates of all of G */
};

static const double WORTHWHILE = 1e-3; /* relative gain of a round below which it is the last */

/* out[k][R] = H[:, from..to) x[to - from][R] */
static void times_h(float *out, const struct qt_factor *f, size_t from, size_t to, const float *x,
                    float alpha, float beta)
{
    size_t k = f->k;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)k, R, (int)(to - from), alpha,
                f->h + from, (int)k, x, R, beta, out, R);
}

static double objective(const struct panel *p)
{
    double sum = 0;
    for (size_t i = 0; i < p->f->k * R; i++)
        sum += (double)(p->w[i] - p->q[i]) * (double)p->g[i];
    return sum;
}

/* Rounds position j anew; delta[R] = what changed. */
static bool descend_column(struct panel *p, size_t j, const float *g, float *delta)
{
    float hjj = p->f->h[j * p->f->k + j], x[R], old[R];
    float *q = p->q + j * R;
    bool changed = false;
    memcpy(old, q, sizeof old);
    for (size_t r = 0; r < R; r++)
        x[r] = q[r] + g[r] / hjj;
    p->rounder->round(p->rounder->ctx, p->f->order[j], x, q, p->unit + j * R, p->row0, p->rows);
    for (size_t r = 0; r < R; r++) {
        delta[r] = q[r] - old[r];
        changed |= delta[r] != 0;
    }
    return changed;
}

static void descend_codes(struct panel *p)
{
    const struct qt_factor *f = p->f;
    size_t k = f->k;
    float g[BLOCK * R], delta[BLOCK * R];
    for (size_t at = 0; at < k; at += BLOCK) {
        size_t n = qt_min_size(BLOCK, k - at);
        bool changed = false;
        memcpy(g, p->g + at * R, n * R * sizeof *g);
        for (size_t j = 0; j < n; j++) {
            float *d = delta + j * R;
            if (!descend_column(p, at + j, g + j * R, d))
                continue;
            changed = true;
            for (size_t i = j + 1; i < n; i++)
                for (size_t r = 0; r < R; r++)
                    g[i * R + r] -= f->h[(at + j) * k + at + i] * d[r];
        }
        if (changed)
            times_h(p->g, f, at, at + n, delta, -1, 1);
    }
}

/* How much E changes when the group's scale moves by step, per row. */
static void gains(double *gain, const double *ug, const double *uhu, const float *from,
                  const float *to)
{
    for (size_t r = 0; r < R; r++) {
        double step = (double)to[r] - (double)from[r];
        gain[r] = step * (step * uhu[r] - 2 * ug[r]);
    }
}

static void refit_group(struct panel *p, size_t from, size_t to)
{
    const struct qt_factor *f = p->f;
    float *hu = p->tmp, scale[R] = {0}, stored[R] = {0};
    double ug[R] = {0}, uhu[R] = {0}, gain[R];
    times_h(hu, f, from, to, p->unit + from * R, 1, 0);
    for (size_t i = from * R; i < to * R; i++) {
        ug[i % R] += (double)p->unit[i] * (double)p->g[i];
        uhu[i % R] += (double)p->unit[i] * (double)hu[i];
    }
    p->rounder->scale(p->rounder->ctx, f->group[from], scale, p->row0, p->rows);
    for (size_t r = 0; r < p->rows; r++)
        stored[r] = uhu[r] > 0 ? scale[r] + (float)(ug[r] / uhu[r]) : scale[r];
    p->rounder->rescale(p->rounder->ctx, f->group[from], stored, p->row0, p->rows);
    gains(gain, ug, uhu, scale, stored);
    for (size_t r = 0; r < p->rows; r++)
        if (!(gain[r] < 0))
            stored[r] = scale[r];
    p->rounder->rescale(p->rounder->ctx, f->group[from], stored, p->row0, p->rows);
    for (size_t r = 0; r < R; r++)
        scale[r] = stored[r] - scale[r]; /* the step */
    for (size_t i = from * R; i < to * R; i++)
        p->q[i] = stored[i % R] * p->unit[i];
    for (size_t i = 0; i < f->k * R; i++)
        p->g[i] -= scale[i % R] * hu[i];
}

double qt_panel_polish(struct panel *p, int rounds)
{
    size_t k = p->f->k;
    for (size_t i = 0; i < k * R; i++)
        p->tmp[i] = p->w[i] - p->q[i];
    times_h(p->g, p->f, 0, k, p->tmp, 1, 0);
    double error = objective(p);
    for (int round = 0; round < rounds; round++) {
        double before = error;
        descend_codes(p);
        for (size_t at = 0, end; at < k; at = end) {
            end = qt_factor_group_end(p->f, at);
            refit_group(p, at, end);
        }
        error = objective(p);
        if (!(before - error > WORTHWHILE * before))
            break;
    }
    return error;
}
