/* The kernels of kernels/gpu/round.h as loops on the CPU, with the same functions for a row. */
#ifndef QT_TESTS_SIMULATED_ROUND_H
#define QT_TESTS_SIMULATED_ROUND_H

#include "kernels/gpu/mix24_row.h"

int gpu_round_diagonal(float *out, const float *m, size_t k, bool squared, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < k; i++)
        out[i] = m[i * k + i] * (squared ? m[i * k + i] : 1);
    return 0;
}

int gpu_round_fit(const struct gpu_round *r, const float *h, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < r->n * r->groups; i++) {
        const uint32_t first = r->first[i % r->groups];
        const struct row_targets a = {r->w + i / r->groups * r->k + first, h ? h + first : NULL,
                                      (int)r->length[i % r->groups]};
        const struct row_group best = row_fit(r->values, &a);
        r->scale[i] = best.scale;
        r->zero[i] = (uint8_t)best.zero;
    }
    return 0;
}

static struct row_whole whole_row(const struct gpu_round *r, size_t row)
{
    const size_t first = row * r->k;
    return (struct row_whole){r->values,
                              (int)r->k,
                              r->group,
                              r->w + first,
                              r->hw ? r->hw + first : NULL,
                              r->mix24.values ? r->mix24.values + first : NULL,
                              r->g + first,
                              r->rank + first,
                              r->scale ? r->scale + row * r->groups : NULL,
                              r->zero + row * r->groups};
}

int gpu_round_assign(const struct gpu_round *r, void *stream)
{
    (void)stream;
    for (size_t row = 0; row < r->n; row++) {
        const struct row_whole a = whole_row(r, row);
        row_assign(&a);
    }
    return 0;
}

int gpu_round_errors(const struct gpu_round *r, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < r->n * r->k; i++) {
        const struct row_whole a = whole_row(r, i / r->k);
        r->d[i] = r->w[i] - row_value(&a, (int)(i % r->k));
    }
    return 0;
}

int gpu_round_objective(const struct gpu_round *r, void *stream)
{
    (void)stream;
    for (size_t row = 0; row < r->n; row++) {
        const struct row_whole a = whole_row(r, row);
        r->sum[row] = row_objective(&a);
    }
    return 0;
}

int gpu_round_rescale(const struct gpu_round *r, void *stream)
{
    (void)stream;
    for (size_t row = 0; row < r->n; row++) {
        const struct row_whole a = whole_row(r, row);
        if (!r->skip[row])
            row_rescale(&a);
    }
    return 0;
}

static int round_block(const struct gpu_round *r, const float *m, size_t at, size_t columns,
                       bool descent)
{
    float x[GPU_ROUND_WIDEST], h[GPU_ROUND_WIDEST];
    const struct row_block b = {r->values,     (int)columns, m + at * r->k + at, (int)r->k,
                                r->group + at, r->end + at,  (uint32_t)at,       r->groups > 1};
    for (size_t row = 0; row < r->n; row++) {
        struct row_state s = {r->scale + row * r->groups, r->zero + row * r->groups, x, h, 0};
        const size_t first = row * r->k + at;
        float g[GPU_ROUND_WIDEST], *d = r->change + row * r->change_ld;
        int rank[GPU_ROUND_WIDEST];
        memset(d, 0, columns * sizeof *d);
        if (descent && r->skip[row])
            continue;
        memcpy(g, r->g + first, columns * sizeof *g);
        for (size_t c = 0; c < columns; c++)
            rank[c] = r->rank[first + c];
        if (descent)
            row_descend(&b, &s, (int)columns, g, rank, d);
        else
            row_compensate(&b, &s, (int)columns, r->w + first, g, rank, d);
        for (size_t c = 0; c < columns; c++)
            r->rank[first + c] = (uint8_t)rank[c];
        if (!descent)
            r->sum[row] += s.sum;
    }
    return 0;
}

int gpu_round_compensate(const struct gpu_round *r, const float *v, size_t at, size_t columns,
                         void *stream)
{
    (void)stream;
    return round_block(r, v, at, columns, false);
}

int gpu_round_descend(const struct gpu_round *r, const float *h, size_t at, size_t columns,
                      void *stream)
{
    (void)stream;
    return round_block(r, h, at, columns, true);
}

static void store_codes(const struct gpu_round *r, uint8_t *code, size_t stride)
{
    for (size_t i = 0; i < r->n * r->k; i++)
        code[r->order[i % r->k] * stride + i / r->k] = r->code[r->rank[i]];
}

int gpu_round_store(const struct gpu_round *r, uint8_t *code, float *scale, uint8_t *zero,
                    size_t stride, void *stream)
{
    (void)stream;
    store_codes(r, code, stride);
    for (size_t i = 0; i < r->n * r->groups; i++) {
        scale[i % r->groups * stride + i / r->groups] = r->scale[i];
        zero[i % r->groups * stride + i / r->groups] = r->zero[i];
    }
    return 0;
}

int gpu_round_values(const struct gpu_round *r, float *out, int exp2, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < r->n * r->k; i++) {
        const size_t row = i / r->k, at = row * r->groups + r->group[i % r->k];
        out[row * r->k + r->order[i % r->k]] =
            r->mix24.values
                ? ldexpf(r->mix24.values[i], exp2)
                : ldexpf(r->scale[at], exp2) * (r->values->value[r->rank[i]] - (float)r->zero[at]);
    }
    return 0;
}

int gpu_round_range(uint32_t range[2], const float *w, size_t n, size_t k, size_t group,
                    void *stream)
{
    (void)stream;
    for (size_t row = 0; row < n; row++)
        for (size_t at = 0; at < k; at += group) {
            uint32_t most = 0;
            for (size_t i = at; i < qt_min_size(at + group, k); i++) {
                const uint32_t bits = qt_f32_bits(w[row * k + i]) & 0x7fffffff;
                most = bits > most ? bits : most;
            }
            range[0] = most > range[0] ? most : range[0];
            range[1] = most && most < range[1] ? most : range[1];
        }
    return 0;
}

/* ---- mix24 ---------------------------------------------------------------------------------- */

static struct mix_strip strip_at(const struct gpu_round *r, struct mix_shared *x,
                                 struct mix_block *b, size_t index)
{
    return (struct mix_strip){r, x, b, index, index * MIX_STRIP};
}

static size_t strips_of(const struct gpu_round *r)
{
    return qt_ceil_div(r->n, MIX_STRIP);
}

int gpu_mix24_costs(const struct gpu_mix24_costs *c, void *stream)
{
    struct mix_shared x;
    (void)stream;
    for (size_t i = 0; i < qt_ceil_div(c->n, MIX_STRIP) * c->groups; i++)
        mix_costs_of_group(c, &x, i / c->groups, i % c->groups);
    return 0;
}

int gpu_mix24_extent(const struct gpu_mix24_extent *e, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < e->n * e->groups; i++) {
        float most[2];
        mix_extent_of_group(&most[0], &most[1], e, i / e->groups, i % e->groups);
        for (int j = 0; j < 2; j++)
            e->most[j] = qt_f32_bits(most[j]) > e->most[j] ? qt_f32_bits(most[j]) : e->most[j];
    }
    return 0;
}

int gpu_mix24_sum_rows(double *sum, const float *cost, size_t n, size_t groups, void *stream)
{
    (void)stream;
    for (size_t i = 0; i < n * groups; i++)
        sum[i % groups] = (i < groups ? 0 : sum[i % groups]) + (double)cost[i];
    return 0;
}

int gpu_mix24_assign(const struct gpu_round *r, const float *weights, void *stream)
{
    struct mix_shared x;
    (void)stream;
    for (size_t i = 0; i < strips_of(r) * r->groups; i++) {
        const struct mix_strip s = strip_at(r, &x, NULL, i / r->groups);
        mix_assign(&s, i % r->groups, weights);
    }
    return 0;
}

int gpu_mix24_compensate(const struct gpu_round *r, const float *v, size_t at, size_t columns,
                         void *stream)
{
    struct mix_shared x;
    struct mix_block b;
    (void)stream;
    for (size_t i = 0; i < strips_of(r); i++) {
        const struct mix_strip s = strip_at(r, &x, &b, i);
        double sum[MIX_ROWS] = {0};
        mix_compensate(&s, sum, v, at, (int)columns);
        for (size_t row = 0; row < MIX_ROWS && s.row + row < r->n; row++)
            r->sum[s.row + row] += sum[row];
    }
    return 0;
}

int gpu_mix24_descend(const struct gpu_round *r, const float *h, size_t at, size_t columns,
                      void *stream)
{
    struct mix_shared x;
    struct mix_block b;
    (void)stream;
    for (size_t i = 0; i < strips_of(r); i++) {
        const struct mix_strip s = strip_at(r, &x, &b, i);
        if (!r->skip[s.row])
            mix_descend(&s, h, at, (int)columns);
        for (size_t row = s.row; row < r->n && row < s.row + MIX_STRIP && r->skip[row]; row++)
            memset(r->change + row * r->change_ld, 0, columns * sizeof *r->change);
    }
    return 0;
}

int gpu_mix24_factor(const struct gpu_round *r, const float *h, void *stream)
{
    (void)stream;
    for (size_t group = 0; group < r->groups; group++)
        mix_factor_group(r->mix24.factor + group * MIX_COLUMNS * MIX_COLUMNS,
                         h + r->first[group] * (r->k + 1), r->k, (int)r->length[group]);
    return 0;
}

int gpu_mix24_store(const struct gpu_round *r, uint8_t *code, uint8_t *q, uint8_t *zero,
                    size_t stride, void *stream)
{
    (void)stream;
    store_codes(r, code, stride);
    for (size_t i = 0; i < r->n * r->groups; i++) {
        q[i % r->groups * stride + i / r->groups] = r->mix24.q[i];
        zero[i % r->groups * stride + i / r->groups] = r->zero[i];
    }
    return 0;
}

int gpu_mix24_gather(float *out, const struct gpu_round *r, const uint64_t *at, size_t count,
                     void *stream)
{
    (void)stream;
    for (size_t i = 0; i < count; i++)
        out[i] = r->mix24.values[at[i]];
    return 0;
}

#endif
