/*
 * Rounding of mix24: a group of columns in a strip of 16 rows, and the steps on a column block, by a
 * thread block, for mix24_kernels.cu on the GPU and tests on the CPU. Methods: hessian/compensate.c,
 * hessian/descent.c. mix24_search.h says which lane has what.
 */
#ifndef QT_KERNELS_GPU_MIX24_ROW_H
#define QT_KERNELS_GPU_MIX24_ROW_H

#include "kernels/gpu/mix24_search.h"

/* ---- a group -------------------------------------------------------------------------------- */

enum { MIX_PITCH = MIX_STRIP + 1 }; /* of arrays that are read by rows and by columns */

/* Memory that the lanes share for the steps on a column block. */
struct mix_block {
    float h[MIX_COLUMNS][MIX_COLUMNS];      /* H of the group; the unit matrix beyond it */
    float m[MIX_COLUMNS][GPU_MIX24_WIDEST]; /* H or V: rows of the group, columns behind it */
    float g[GPU_MIX24_WIDEST][MIX_PITCH];   /* running sums */
    float value[MIX_COLUMNS][MIX_PITCH];    /* weights or values of the group; 0 beyond it */
    float change[MIX_COLUMNS][MIX_PITCH];   /* of the errors of the group */
    uint8_t code[MIX_COLUMNS][MIX_PITCH];
};

/* A strip of the matrix. */
struct mix_strip {
    const struct gpu_round *r;
    struct mix_shared *x;
    struct mix_block *b; /* for steps on a column block */
    size_t index, row;   /* of the strip, and the first row of this lane */
};

ROW bool mix_is_row(const struct mix_strip *s, int r)
{
    return s->row + (size_t)r < s->r->n;
}

/* Parameters of a group in the strip. */
struct mix_params {
    float s[MIX_ROWS], inverse[MIX_ROWS], q[MIX_ROWS], zero[MIX_ROWS];
    unsigned u[2]; /* s2 + z2 of rows 0 to 7, and of the others */
};

ROW unsigned mix_half(int half, int halves)
{
    return halves == 1 ? 0xffffu : 0xffu << 8 * half;
}

/* Takes the choice in the rows of `rows` where take[r]; and its second-order parameters. */
ROW void mix_take(struct mix_params *to, const struct mix_choice *c, unsigned rows,
                  const bool *take)
{
    ROW_UNROLL for (int half = 0; half < 2; half++) if (rows >> 8 * half & 1) to->u[half] =
        (unsigned)(c->s2 + c->z2);
    MIX_EACH_ROW(r)
    {
        if (!(rows >> (mix_row() + r) & 1) || !take[r])
            continue;
        to->s[r] = mix_row_scale(c, r);
        to->inverse[r] = row_inverse(to->s[r]);
        to->q[r] = c->q[r];
        to->zero[r] = c->zero[r];
    }
}

/* Chooses the parameters of a group. */
ROW void mix_fit(struct mix_params *to, struct mix_problem *p, int halves)
{
    bool all[MIX_ROWS];
    mix_set_range(p);
    MIX_EACH_ROW(r) all[r] = true;
    ROW_LOOP for (int half = 0; half < halves; half++)
    {
        const unsigned rows = mix_half(half, halves);
        struct mix_choice c;
        c.s2 = 0x3c00;
        c.z2 = 1;
        MIX_EACH_ROW(r) c.q[r] = c.zero[r] = 0;
        if (mix_has_range(p, rows))
            mix_search(&c, p, rows);
        mix_take(to, &c, rows, all);
    }
}

ROW void mix_load_params(struct mix_params *to, const struct mix_strip *s, size_t group)
{
    const struct gpu_mix24 *m = &s->r->mix24;
    ROW_UNROLL for (int half = 0; half < 2; half++) to->u[half] =
        m->u[(s->index * s->r->groups + group) * 2 + (size_t)half];
    MIX_EACH_ROW(r)
    {
        const size_t at = (s->row + (size_t)r) * s->r->groups + group;
        const unsigned u = mix_row() + r < 8 ? to->u[0] : to->u[1];
        to->q[r] = mix_is_row(s, r) ? (float)m->q[at] : 0;
        to->zero[r] = mix_is_row(s, r) ? (float)s->r->zero[at] : 0;
        to->s[r] = (to->q[r] + (float)(u & 15)) * mix_s2((int)(u & MIX_S2_MASK));
        to->inverse[r] = row_inverse(to->s[r]);
    }
}

ROW void mix_store_params(const struct mix_params *from, const struct mix_strip *s, size_t group)
{
    const struct gpu_mix24 *m = &s->r->mix24;
    if (mix_lane() == 0)
        ROW_UNROLL for (int half = 0; half < 2; half++)
            m->u[(s->index * s->r->groups + group) * 2 + (size_t)half] = (uint16_t)from->u[half];
    MIX_EACH_ROW(r)
    {
        const size_t at = (s->row + (size_t)r) * s->r->groups + group;
        if (mix_worker() || !mix_is_row(s, r))
            continue;
        m->q[at] = (uint8_t)from->q[r];
        s->r->zero[at] = (uint8_t)from->zero[r];
    }
}

/* Rounds x, the best value of column j of the group; returns the stored value. */
ROW float mix_round(int *code, const struct mix_problem *p, const struct mix_params *a, int j,
                    int r, float x)
{
    const float level = mix_level(p, x, a->inverse[r], a->zero[r]);
    const bool is_outlier = mix_is_outlier(p, j, r);
    *code = (int)(a->zero[r] + (is_outlier ? 0 : level));
    return is_outlier ? mix_outlier_value(x) : mix_value(a->zero[r] + level, a->zero[r], a->s[r]);
}

/* u, diagonal and weight of the factor v of n columns. */
ROW void mix_load_factor(struct mix_shared *x, const float *v, size_t ld, int n)
{
    for (int i = mix_lane(); i < MIX_COLUMNS * MIX_COLUMNS; i += mix_lanes()) {
        const int j = i / MIX_COLUMNS, l = i % MIX_COLUMNS;
        const float vjj = j < n ? v[(size_t)j * ld + (size_t)j] : 1;
        x->u[j][l] = l < j && j < n ? v[(size_t)l * ld + (size_t)j] / vjj : 0;
        if (l == j) {
            x->diagonal[j] = vjj;
            x->inverse[j] = 1 / vjj;
            x->weight[j] = j < n ? vjj * vjj : 0;
        }
    }
}

/* The block of h of n columns. */
ROW void mix_load_block(struct mix_block *b, const float *h, size_t ld, int n)
{
    for (int i = mix_lane(); i < MIX_COLUMNS * MIX_COLUMNS; i += mix_lanes()) {
        const int j = i / MIX_COLUMNS, l = i % MIX_COLUMNS;
        b->h[j][l] = j < n && l < n ? h[(size_t)j * ld + (size_t)l] : j == l;
    }
}

/* Columns [end, columns) of the block that begins at `at`, in the n rows of m[k][k] from `from`
 * on. */
ROW void mix_load_rows(const struct mix_strip *s, const float *m, size_t at, int from, int n,
                       int end, int columns)
{
    const float *rows = m + (at + (size_t)from) * s->r->k + at;
    const int width = columns - end;
    for (int i = mix_lane(); i < MIX_COLUMNS * width; i += mix_lanes()) {
        const int j = i / width, c = end + i % width;
        s->b->m[j][c] = rows[(size_t)(j < n ? j : 0) * s->r->k + (size_t)c];
    }
}

/* Weights or values of the n columns from position `at` on. */
ROW void mix_load_values(const struct mix_strip *s, const float *values, size_t at, int n)
{
    for (int i = mix_lane(); i < MIX_COLUMNS * MIX_STRIP; i += mix_lanes()) {
        const int j = i % MIX_COLUMNS, r = i / MIX_COLUMNS;
        const size_t row = s->index * MIX_STRIP + (size_t)r;
        s->b->value[j][r] = j < n && row < s->r->n ? values[row * s->r->k + at + (size_t)j] : 0;
    }
}

/* The problem of the group of n columns from position `at` on, without targets. */
ROW void mix_open(struct mix_problem *p, const struct mix_strip *s, size_t at, int n)
{
    const struct gpu_mix24 *m = &s->r->mix24;
    p->x = s->x;
    p->top = m->bits[s->r->group[at]] == 2 ? 3 : 15;
    MIX_EACH_ROW(r) p->outliers[r] = 0;
    MIX_EACH_COLUMN(j)
    {
        const unsigned rows = j < n ? m->outliers[s->index * s->r->k + at + (size_t)j] : 0;
        MIX_EACH_ROW(r) p->outliers[r] |= (rows >> (mix_row() + r) & 1) << j;
    }
}

ROW float mix_load(const float *from, const struct mix_strip *s, size_t at, int j, int n, int r)
{
    return j < n && mix_is_row(s, r) ? from[(s->row + (size_t)r) * s->r->k + at + (size_t)j] : 0;
}

/* Shows codes, values and change[j][r] of the group to all lanes: each writes its share. */
ROW void mix_show_group(struct mix_block *b, int code[][MIX_ROWS], float q[][MIX_ROWS],
                        float change[][MIX_ROWS])
{
    MIX_EACH_COLUMN(j) MIX_EACH_ROW(r)
    {
        const int row = mix_row() + r;
        if ((j & (mix_workers() - 1)) != mix_worker())
            continue;
        b->code[j][row] = (uint8_t)code[j][r];
        b->value[j][row] = q[j][r];
        b->change[j][row] = change[j][r];
    }
}

/* Stores codes and values of the n columns from position `at` + `from` on, and their changes for
 * the product that spreads them. */
ROW void mix_store(const struct mix_strip *s, size_t at, int from, int n)
{
    for (int i = mix_lane(); i < MIX_COLUMNS * MIX_STRIP; i += mix_lanes()) {
        const int j = i % MIX_COLUMNS, r = i / MIX_COLUMNS;
        const size_t row = s->index * MIX_STRIP + (size_t)r,
                     to = row * s->r->k + at + (size_t)(from + j);
        if (j >= n || row >= s->r->n)
            continue;
        s->r->rank[to] = s->b->code[j][r];
        s->r->mix24.values[to] = s->b->value[j][r];
        s->r->change[row * s->r->change_ld + (size_t)(from + j)] = s->b->change[j][r];
    }
}

/* g of columns [end, columns) += the change of the group times its rows in b->m. */
ROW void mix_spread(struct mix_block *b, int end, int columns, float change[][MIX_ROWS])
{
    ROW_LOOP for (int c = end + mix_worker(); c < columns; c += mix_workers())
    {
        MIX_EACH_ROW(r)
        {
            float sum = b->g[c][mix_row() + r];
            MIX_EACH_COLUMN(j) sum += b->m[j][c] * change[j][r]; /* 0 beyond the group */
            b->g[c][mix_row() + r] = sum;
        }
    }
}

/* Stores a group and spreads its change to the columns of the block behind it. */
ROW void mix_finish_group(const struct mix_strip *s, size_t at, int from, int n, int end,
                          int columns, int code[][MIX_ROWS], float q[][MIX_ROWS],
                          float change[][MIX_ROWS])
{
    mix_show_group(s->b, code, q, change);
    mix_sync();
    mix_store(s, at, from, n);
    mix_spread(s->b, end, columns, change);
    mix_sync();
}

ROW void mix_load_sums(const struct mix_strip *s, size_t at, int columns)
{
    for (int i = mix_lane(); i < columns * MIX_STRIP; i += mix_lanes()) {
        const int c = i % columns, r = i / columns;
        const size_t row = s->index * MIX_STRIP + (size_t)r;
        s->b->g[c][r] = row < s->r->n ? s->r->g[row * s->r->k + at + (size_t)c] : 0;
    }
    mix_sync();
}

/* ---- steps on a column block ---------------------------------------------------------------- */

/* The same for the choices before rounding. Columns are in storage order, weights are w 2^exp2. */
ROW void mix_costs_of_group(const struct gpu_mix24_costs *c, struct mix_shared *x, size_t strip,
                            size_t group)
{
    const size_t at = group * c->group, row0 = strip * MIX_STRIP + (size_t)mix_row();
    const int n = (int)(at + c->group < c->k ? c->group : c->k - at);
    struct mix_problem p;
    float two[MIX_ROWS], four[MIX_ROWS], rest[MIX_ROWS];
    mix_sync();
    for (int j = mix_lane(); j < MIX_COLUMNS; j += mix_lanes())
        x->weight[j] = j >= n ? 0 : c->weights ? c->weights[at + (size_t)j] : 1;
    mix_sync();
    p.x = x;
    p.top = 3;
    MIX_EACH_ROW(r)
    {
        p.outliers[r] = 0;
        MIX_EACH_COLUMN(j)
        p.t[j][r] = j < n && row0 + (size_t)r < c->n
                        ? ldexpf(c->w[(row0 + (size_t)r) * c->k + at + (size_t)j], c->exp2)
                        : 0;
    }
    mix_separate_cost(two, &p);
    ROW_LOOP for (int end = 0; c->gain && end < 2; end++)
    {
        int extreme[MIX_ROWS];
        MIX_EACH_ROW(r)
        {
            float most = p.t[0][r];
            extreme[r] = 0;
            ROW_UNROLL for (int j = 1; j < MIX_COLUMNS; j++)
            {
                const bool beyond = end ? p.t[j][r] < most : p.t[j][r] > most;
                extreme[r] = j < n && beyond ? j : extreme[r];
                most = j < n && beyond ? p.t[j][r] : most;
            }
            p.outliers[r] = 1u << extreme[r];
        }
        mix_separate_cost(rest, &p);
        MIX_EACH_ROW(r)
        {
            const size_t to = ((row0 + (size_t)r) * c->groups + group) * 2 + (size_t)end;
            if (mix_worker() || row0 + (size_t)r >= c->n)
                continue;
            c->gain[to] = fmaxf(two[r] - rest[r], 0);
            c->channel[to] = (uint8_t)extreme[r];
        }
    }
    if (!c->two)
        return;
    p.top = 15;
    MIX_EACH_ROW(r) p.outliers[r] = 0;
    mix_separate_cost(four, &p);
    MIX_EACH_ROW(r)
    {
        const size_t to = (row0 + (size_t)r) * c->groups + group;
        if (mix_worker() || row0 + (size_t)r >= c->n)
            continue;
        c->two[to] = two[r];
        c->four[to] = four[r];
    }
}

/* The scale that covers a group of a row, and its largest outlier. */
ROW void mix_extent_of_group(float *scale, float *outlier, const struct gpu_mix24_extent *e,
                             size_t row, size_t group)
{
    const size_t at = group * e->group, end = at + e->group < e->k ? at + e->group : e->k;
    const unsigned outliers = e->outliers ? e->outliers[row * e->groups + group] : 0;
    float low = 0, high = 0;
    *outlier = 0;
    for (size_t i = at; i < end; i++) {
        const float w = ldexpf(e->w[row * e->k + i], e->exp2);
        const bool is_outlier = outliers >> (i - at) & 1;
        *outlier = is_outlier ? fmaxf(*outlier, fabsf(w)) : *outlier;
        low = is_outlier ? low : fminf(low, w);
        high = is_outlier ? high : fmaxf(high, w);
    }
    *scale = (high - low) / (e->bits[group] == 4 ? 15 : 3);
}

/* Rounds the weights of a group to nearest, with weights[k] by position; NULL: all 1. */
ROW void mix_assign(const struct mix_strip *s, size_t group, const float *weights)
{
    const size_t at = s->r->first[group];
    const int n = (int)s->r->length[group];
    struct mix_problem p;
    struct mix_params a = {0};
    mix_sync();
    for (int i = mix_lane(); i < MIX_COLUMNS * MIX_COLUMNS; i += mix_lanes())
        s->x->u[i / MIX_COLUMNS][i % MIX_COLUMNS] = 0;
    for (int j = mix_lane(); j < MIX_COLUMNS; j += mix_lanes())
        s->x->weight[j] = j >= n ? 0 : weights ? weights[at + (size_t)j] : 1;
    mix_sync();
    mix_open(&p, s, at, n);
    MIX_EACH_COLUMN(j) MIX_EACH_ROW(r) p.t[j][r] = mix_load(s->r->w, s, at, j, n, r);
    mix_fit(&a, &p, s->r->mix24.halves);
    mix_store_params(&a, s, group);
    MIX_EACH_ROW(r) MIX_EACH_COLUMN(j)
    {
        const size_t to = (s->row + (size_t)r) * s->r->k + at + (size_t)j;
        int code;
        const float q = mix_round(&code, &p, &a, j, r, p.t[j][r]);
        if (!mix_worker() && mix_is_row(s, r) && j < n) {
            s->r->rank[to] = (uint8_t)code;
            s->r->mix24.values[to] = q;
        }
    }
}

/* Error compensation of a column block under v[k][k]. sum[r] += the terms of the objective. */
ROW void mix_compensate(const struct mix_strip *s, double *sum, const float *v, size_t at,
                        int columns)
{
    const size_t k = s->r->k;
    struct mix_shared *x = s->x;
    struct mix_block *b = s->b;
    mix_load_sums(s, at, columns);
    ROW_LOOP for (int from = 0, end; from < columns; from = end)
    {
        const size_t first = at + (size_t)from;
        struct mix_problem p;
        struct mix_params a = {0};
        float e[MIX_COLUMNS][MIX_ROWS], q[MIX_COLUMNS][MIX_ROWS];
        int code[MIX_COLUMNS][MIX_ROWS];
        end = (int)(s->r->end[first] - at);
        const int n = end - from;
        mix_load_factor(x, v + first * k + first, k, n);
        mix_load_rows(s, v, at, from, n, end, columns);
        mix_load_values(s, s->r->w, first, n);
        mix_sync();
        mix_open(&p, s, first, n);
        /* The targets are the optimum without rounding for the errors so far. */
        MIX_EACH_COLUMN(j) MIX_EACH_ROW(r)
        {
            float sought = j < n ? b->g[from + j][mix_row() + r] * x->inverse[j] : 0;
            ROW_UNROLL for (int i = 0; i < j; i++) sought += x->u[j][i] * e[i][r];
            e[j][r] = -sought;
            p.t[j][r] = b->value[j][mix_row() + r] + sought;
        }
        mix_fit(&a, &p, s->r->mix24.halves);
        mix_store_params(&a, s, s->r->group[first]);
        MIX_EACH_COLUMN(j) MIX_EACH_ROW(r)
        {
            const float w = b->value[j][mix_row() + r];
            float best = w + (j < n ? b->g[from + j][mix_row() + r] * x->inverse[j] : 0);
            ROW_UNROLL for (int i = 0; i < j; i++) best += x->u[j][i] * e[i][r];
            code[j][r] = 0;
            q[j][r] = j < n ? mix_round(&code[j][r], &p, &a, j, r, best) : 0;
            e[j][r] = j < n ? w - q[j][r] : 0;
            const double term = j < n ? (double)x->diagonal[j] * (double)(best - q[j][r]) : 0;
            sum[r] += term * term;
        }
        mix_sync(); /* all lanes have read the weights */
        mix_finish_group(s, at, from, n, end, columns, code, q, e);
    }
}

/* t = q + (V V^T)^-1 g, the best values of the group without rounding. */
ROW void mix_group_targets(struct mix_problem *p, float q[][MIX_ROWS], float g[][MIX_ROWS])
{
    const struct mix_shared *x = p->x;
    MIX_EACH_ROW(r)
    {
        float y[MIX_COLUMNS];
        ROW_UNROLL for (int j = MIX_COLUMNS - 1; j >= 0; j--)
        {
            float sum = g[j][r];
            ROW_UNROLL for (int l = MIX_COLUMNS - 1; l > j; l--) sum -=
                x->u[l][j] * (x->diagonal[l] * y[l]);
            y[j] = sum * x->inverse[j];
        }
        MIX_EACH_COLUMN(j)
        {
            y[j] *= x->inverse[j];
            ROW_UNROLL for (int l = 0; l < j; l++) y[j] -= x->u[j][l] * y[l];
            p->t[j][r] = y[j] + q[j][r];
        }
    }
}

/* cost[r] of values q. */
ROW void mix_cost_of_values(float *cost, const struct mix_problem *p, float q[][MIX_ROWS])
{
    MIX_EACH_ROW(r)
    {
        cost[r] = 0;
        MIX_EACH_COLUMN(j)
        {
            float term = p->t[j][r] - q[j][r];
            ROW_UNROLL for (int i = 0; i < j; i++) term += p->x->u[j][i] * (p->t[i][r] - q[i][r]);
            cost[r] += p->x->weight[j] * term * term;
        }
    }
}

/* Values of the group by nearest plane, in the rows where take[r]. */
ROW void mix_nearest_plane(float q[][MIX_ROWS], const struct mix_problem *p,
                           const struct mix_params *a, const bool *take)
{
    MIX_EACH_ROW(r)
    {
        float e[MIX_COLUMNS];
        MIX_EACH_COLUMN(j)
        {
            float x = p->t[j][r];
            ROW_UNROLL for (int i = 0; i < j; i++) x += p->x->u[j][i] * e[i];
            const float level = mix_level(p, x, a->inverse[r], a->zero[r]);
            const bool is_outlier = mix_is_outlier(p, j, r);
            e[j] = p->t[j][r] - (is_outlier ? x : a->s[r] * level);
            x = is_outlier ? mix_outlier_value(x)
                           : mix_value(a->zero[r] + level, a->zero[r], a->s[r]);
            q[j][r] = take[r] ? x : q[j][r];
        }
    }
}

/* Chooses the parameters of a group again where that lowers the cost of its values, now[r]. take[r]:
 * the row is rounded again. */
ROW void mix_refit(bool *take, const float *now, struct mix_problem *p, struct mix_params *a,
                   const struct gpu_mix24 *m)
{
    const int halves = m->halves;
    MIX_EACH_ROW(r) take[r] = false;
    ROW_LOOP for (int half = 0; half < halves; half++)
    {
        const unsigned rows = mix_half(half, halves), u = half ? a->u[1] : a->u[0];
        struct mix_choice c, fresh;
        bool better[MIX_ROWS];
        c.s2 = (int)(u & MIX_S2_MASK);
        c.z2 = (int)(u & 15);
        mix_judge(&c, p, a->q, rows, true);
        MIX_EACH_ROW(r)
        {
            better[r] = c.cost[r] < now[r];
            c.cost[r] = better[r] ? c.cost[r] : now[r];
        }
        c.total = mix_sum(c.cost, rows);
        if (m->search && mix_has_range(p, rows)) {
            mix_search(&fresh, p, rows);
            const bool all = fresh.total < c.total;
            MIX_EACH_ROW(r) better[r] |= all;
            if (all)
                c = fresh;
        }
        mix_take(a, &c, rows, better);
        MIX_EACH_ROW(r) take[r] |= better[r] && (rows >> (mix_row() + r) & 1);
    }
}

/* Opens the problem of improving a group, with its factor in p->x; now[r]: the cost of its values. */
ROW void mix_open_refit(struct mix_problem *p, float *now, const struct mix_strip *s, size_t at,
                        int from, int n)
{
    float g[MIX_COLUMNS][MIX_ROWS], q[MIX_COLUMNS][MIX_ROWS];
    mix_open(p, s, at, n);
    MIX_EACH_COLUMN(j) MIX_EACH_ROW(r)
    {
        g[j][r] = j < n ? s->b->g[from + j][mix_row() + r] : 0;
        q[j][r] = s->b->value[j][mix_row() + r];
    }
    mix_group_targets(p, q, g);
    mix_set_range(p);
    mix_cost_of_values(now, p, q);
}

/* One round of coordinate descent on a column block under h[k][k]. Values and sums are read again
 * after the search, which needs the registers. */
ROW void mix_descend(const struct mix_strip *s, const float *h, size_t at, int columns)
{
    const size_t k = s->r->k;
    struct mix_shared *x = s->x;
    struct mix_block *b = s->b;
    mix_load_sums(s, at, columns);
    ROW_LOOP for (int from = 0, end; from < columns; from = end)
    {
        const size_t first = at + (size_t)from, group = s->r->group[first];
        struct mix_problem p;
        struct mix_params a = {0};
        float g[MIX_COLUMNS][MIX_ROWS], q[MIX_COLUMNS][MIX_ROWS], change[MIX_COLUMNS][MIX_ROWS];
        float now[MIX_ROWS];
        bool take[MIX_ROWS];
        int code[MIX_COLUMNS][MIX_ROWS];
        end = (int)(s->r->end[first] - at);
        const int n = end - from;
        mix_load_rows(s, h, at, from, n, end, columns);
        mix_load_block(b, h + first * k + first, k, n);
        mix_load_factor(x, s->r->mix24.factor + group * MIX_COLUMNS * MIX_COLUMNS, MIX_COLUMNS, n);
        mix_load_values(s, s->r->mix24.values, first, n);
        mix_load_params(&a, s, group);
        mix_sync();
        mix_open_refit(&p, now, s, first, from, n);
        mix_refit(take, now, &p, &a, &s->r->mix24);
        MIX_EACH_COLUMN(j) MIX_EACH_ROW(r) q[j][r] = b->value[j][mix_row() + r];
        mix_nearest_plane(q, &p, &a, take);
        MIX_EACH_COLUMN(j) MIX_EACH_ROW(r)
        {
            g[j][r] = j < n ? b->g[from + j][mix_row() + r] : 0;
            change[j][r] = j < n ? b->value[j][mix_row() + r] - q[j][r] : 0;
        }
        MIX_EACH_COLUMN(j)
        MIX_EACH_COLUMN(i) MIX_EACH_ROW(r) g[j][r] += b->h[i][j] * change[i][r];
        MIX_EACH_COLUMN(j) MIX_EACH_ROW(r)
        {
            const float best = q[j][r] + g[j][r] / b->h[j][j], old = q[j][r];
            code[j][r] = 0;
            q[j][r] = j < n ? mix_round(&code[j][r], &p, &a, j, r, best) : 0;
            const float moved = j < n ? old - q[j][r] : 0;
            change[j][r] += moved;
            ROW_UNROLL for (int i = j + 1; i < MIX_COLUMNS; i++) g[i][r] += b->h[j][i] * moved;
        }
        mix_sync(); /* all lanes have read the parameters and values */
        mix_store_params(&a, s, group);
        mix_finish_group(s, at, from, n, end, columns, code, q, change);
    }
}

/* v[16][16] = the upper triangular factor of the n x n block h of H, in one lane. */
ROW void mix_factor_group(float *v, const float *h, size_t ld, int n)
{
    for (int j = n - 1; j >= 0; j--)
        for (int i = j; i >= 0; i--) {
            double sum = (double)h[(size_t)i * ld + (size_t)j];
            for (int l = j + 1; l < n; l++)
                sum -= (double)v[i * MIX_COLUMNS + l] * (double)v[j * MIX_COLUMNS + l];
            v[i * MIX_COLUMNS + j] =
                (float)(i == j ? sqrt(sum) : sum / (double)v[j * MIX_COLUMNS + j]);
        }
}

#endif
