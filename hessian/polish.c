/*
 * Coordinate descent under H after the feedback pass. With G = H (w - q)^T kept up to date, the
 * best value of one coordinate is q_j + G_j / H_jj, rounded. The best values of a group, if they
 * could be anything, are t = q + (H_gg)^-1 G_g, and others cost (t - q) H_gg (t - q)^T more: where
 * the scheme can refit a group as a whole, it does so for these targets. Otherwise the best scale
 * of a group, its codes fixed, is s + U.G / U.HU, U being the group's values before scaling: least
 * squares in one unknown, tried as it will be stored and kept only if E falls. Every step lowers E
 * or leaves it.
 */
#include "hessian/panel.h"

#include <cblas.h>
#include <math.h>
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

/* Columns being worked on, [n][R] from position `at` on: G, kept up to date here and in p->g once
 * they are done, and what has changed in q. */
struct block {
    size_t at, n;
    float g[BLOCK * R], delta[BLOCK * R];
};

/* q at position at + j has changed by d[R]: G of columns `from` of the block and later. */
static void spread(struct block *b, const struct qt_factor *f, size_t j, size_t from,
                   const float *d)
{
    for (size_t i = from; i < b->n; i++) {
        float h = f->h[(b->at + j) * f->k + b->at + i];
        for (size_t r = 0; r < R; r++)
            b->g[i * R + r] -= h * d[r];
    }
}

/* d[R] = what q at position at + j is now beyond old, added to delta. True unless it is 0. */
static bool changes(struct block *b, const struct panel *p, size_t j, const float *old, float *d)
{
    const float *q = p->q + (b->at + j) * R;
    bool changed = false;
    for (size_t r = 0; r < R; r++) {
        d[r] = q[r] - old[r];
        b->delta[j * R + r] += d[r];
        changed |= d[r] != 0;
    }
    return changed;
}

static bool descend_column(struct block *b, struct panel *p, size_t j)
{
    size_t at = b->at + j;
    float hjj = p->f->h[at * p->f->k + at], x[R], old[R], d[R];
    float *q = p->q + at * R;
    memcpy(old, q, sizeof old);
    for (size_t r = 0; r < R; r++)
        x[r] = q[r] + b->g[j * R + r] / hjj;
    p->rounder->round(p->rounder->ctx, p->f->order[at], x, q, p->unit + at * R, p->row0, p->rows);
    if (!changes(b, p, j, old, d))
        return false;
    spread(b, p->f, j, j + 1, d);
    return true;
}

/* The n x n of H from position `at` on as V V^T, V upper triangular. */
static void factor_group(float v[BLOCK * BLOCK], const struct qt_factor *f, size_t at, size_t n)
{
    for (size_t j = n; j-- > 0;)
        for (size_t i = j + 1; i-- > 0;) {
            double sum = (double)f->h[(at + i) * f->k + at + j];
            for (size_t l = j + 1; l < n; l++)
                sum -= (double)v[i * BLOCK + l] * (double)v[j * BLOCK + l];
            v[i * BLOCK + j] = (float)(i == j ? sqrt(sum) : sum / (double)v[j * BLOCK + j]);
        }
}

/* t[n][R] = q + (V V^T)^-1 g */
static void group_targets(float *t, const float *q, const float *g, const float *v, size_t n)
{
    memcpy(t, g, n * R * sizeof *t);
    for (size_t j = n; j-- > 0;)
        for (size_t r = 0; r < R; r++) {
            for (size_t l = j + 1; l < n; l++)
                t[j * R + r] -= v[j * BLOCK + l] * t[l * R + r];
            t[j * R + r] /= v[j * BLOCK + j];
        }
    for (size_t j = 0; j < n; j++)
        for (size_t r = 0; r < R; r++) {
            for (size_t l = 0; l < j; l++)
                t[j * R + r] -= v[l * BLOCK + j] * t[l * R + r];
            t[j * R + r] /= v[j * BLOCK + j];
        }
    for (size_t i = 0; i < n * R; i++)
        t[i] += q[i];
}

/* Refits the group of columns first .. first + n of the block. */
static bool refit_whole(struct block *b, struct panel *p, size_t first, size_t n)
{
    const struct qt_factor *f = p->f;
    size_t at = b->at + first;
    float v[BLOCK * BLOCK], t[BLOCK * R], old[BLOCK * R], d[R];
    const struct qt_column_group group = {f->group[at], f->order + at, n, v, BLOCK};
    bool changed = false;
    factor_group(v, f, at, n);
    group_targets(t, p->q + at * R, b->g + first * R, v, n);
    memcpy(old, p->q + at * R, n * R * sizeof *old);
    p->rounder->refit(p->rounder->ctx, &group, t, p->q + at * R, p->row0, p->rows);
    for (size_t j = 0; j < n; j++)
        if (changes(b, p, first + j, old + j * R, d)) {
            spread(b, f, first + j, first, d);
            changed = true;
        }
    return changed;
}

/* As many whole groups as fit if these are refitted, any columns otherwise. */
static size_t block_end(const struct panel *p, size_t at)
{
    size_t end = qt_min_size(at + BLOCK, p->f->k);
    if (!p->rounder->refit)
        return end;
    size_t last = qt_factor_group_end(p->f, at), next = last;
    while (next < p->f->k && (next = qt_factor_group_end(p->f, last)) <= end)
        last = next;
    return last;
}

static void descend(struct panel *p)
{
    struct block b;
    for (size_t at = 0; at < p->f->k; at += b.n) {
        bool changed = false;
        b.at = at;
        b.n = block_end(p, at) - at;
        memcpy(b.g, p->g + at * R, b.n * R * sizeof *b.g);
        memset(b.delta, 0, b.n * R * sizeof *b.delta);
        for (size_t j = 0, end; j < b.n; j = end) {
            end = b.n;
            if (p->rounder->refit) {
                end = qt_factor_group_end(p->f, at + j) - at;
                changed |= refit_whole(&b, p, j, end - j);
            }
            for (size_t i = j; i < end; i++)
                changed |= descend_column(&b, p, i);
        }
        if (changed)
            times_h(p->g, p->f, at, at + b.n, b.delta, -1, 1);
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
        descend(p);
        for (size_t at = 0, end; at < k && !p->rounder->refit; at = end) {
            end = qt_factor_group_end(p->f, at);
            refit_group(p, at, end);
        }
        error = objective(p);
        if (!(before - error > WORTHWHILE * before))
            break;
    }
    return error;
}
