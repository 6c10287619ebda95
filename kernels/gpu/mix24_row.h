/*
 * Rounding of mix24 (pack/schemes/mix24/): a group of columns in a strip of 16 rows by a thread
 * block, for mix24_kernels.cu on the GPU and tests on the CPU. Methods: pack/schemes/mix24/fit.c,
 * hessian/compensate.c, hessian/descent.c.
 *
 * On the GPU a warp has all rows, MIX_PARTS lanes each, and a block has up to MIX_WARPS warps. The
 * lanes of a row divide the trials of a search, and all do everything else. On the CPU one lane has
 * all 16 rows. All lanes call the functions together. Arrays [MIX_ROWS] differ between rows, other
 * arguments are the same in all lanes, unless stated otherwise.
 */
#ifndef QT_KERNELS_GPU_MIX24_ROW_H
#define QT_KERNELS_GPU_MIX24_ROW_H

#include "kernels/gpu/round.h"

/* Rows of a strip, most columns of a group, most warps. */
enum { MIX_STRIP = 16, MIX_COLUMNS = 16, MIX_WARPS = 4 };

#ifdef __CUDACC__
enum { MIX_ROWS = 1, MIX_PARTS = 2 };
ROW int mix_part(void)
{
    return row_lane() / MIX_STRIP;
}
ROW int mix_warp(void)
{
    return (int)threadIdx.x / 32;
}
ROW int mix_warps(void)
{
    return (int)blockDim.x / 32;
}
/* Waits until the writes of all lanes are visible to them. */
ROW void mix_sync(void)
{
    __syncthreads();
}
/* The first row of this lane. */
ROW int mix_row(void)
{
    return row_lane() % MIX_STRIP;
}
/* Sum over the rows of the strip in `rows`. */
ROW float mix_sum(const float *x, unsigned rows)
{
    float v = rows >> mix_row() & 1 ? x[0] : 0;
    for (int mask = MIX_STRIP / 2; mask; mask /= 2)
        v += __shfl_xor_sync(~0u, v, mask);
    return v;
}
ROW float mix_max(const float *x, unsigned rows)
{
    float v = rows >> mix_row() & 1 ? fmaxf(x[0], 0) : 0;
    for (int mask = MIX_STRIP / 2; mask; mask /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, mask));
    return v;
}
/* The value of the lane that has the other part of the trials of the row. */
ROW float mix_other(float v)
{
    return __shfl_xor_sync(~0u, v, MIX_STRIP);
}
ROW unsigned row_f16_bits(float x)
{
    return __half_as_ushort(__float2half_rn(x));
}
ROW float row_from_f16(unsigned bits)
{
    return __half2float(__ushort_as_half((unsigned short)bits));
}
#else
enum { MIX_ROWS = MIX_STRIP, MIX_PARTS = 1 };
ROW int mix_part(void)
{
    return 0;
}
ROW int mix_warp(void)
{
    return 0;
}
ROW int mix_warps(void)
{
    return 1;
}
ROW void mix_sync(void)
{
}
ROW int mix_row(void)
{
    return 0;
}
ROW float mix_sum(const float *x, unsigned rows)
{
    float sum = 0;
    for (int r = 0; r < MIX_ROWS; r++)
        sum += rows >> r & 1 ? x[r] : 0;
    return sum;
}
ROW float mix_max(const float *x, unsigned rows)
{
    float most = 0;
    for (int r = 0; r < MIX_ROWS; r++)
        most = rows >> r & 1 ? fmaxf(most, x[r]) : most;
    return most;
}
ROW float mix_other(float v)
{
    return v;
}
ROW unsigned row_f16_bits(float x)
{
    return qt_f32_to_f16(x);
}
ROW float row_from_f16(unsigned bits)
{
    return qt_f16_to_f32((uint16_t)bits);
}
#endif

ROW int mix_lane(void)
{
    return mix_warp() * ROW_LANES + row_lane();
}
ROW int mix_lanes(void)
{
    return mix_warps() * ROW_LANES;
}
/* The lanes of a row. */
ROW int mix_worker(void)
{
    return mix_warp() * MIX_PARTS + mix_part();
}
ROW int mix_workers(void)
{
    return mix_warps() * MIX_PARTS;
}

#define MIX_EACH_ROW(r)    ROW_UNROLL for (int r = 0; r < MIX_ROWS; r++)
#define MIX_EACH_COLUMN(j) ROW_UNROLL for (int j = 0; j < MIX_COLUMNS; j++)

enum {
    MIX_POINTS = 44, /* scales of the curve, 2^(1/8) apart */
    MIX_Q_MAX = 15,
    MIX_FINE = 0x0080, /* steps between values of s2 in groups of 2 and 4 bits */
    MIX_COARSE = 0x0200,
    MIX_S2_MASK = 0x7f80,
};
#define MIX_S2_UNIT 0x1p-22f

/* Memory that the lanes share. */
struct mix_shared {
    float u[MIX_COLUMNS][MIX_COLUMNS]; /* V_ij / V_jj at [j][i], i < j; 0 beyond the group */
    float h[MIX_COLUMNS][MIX_COLUMNS]; /* H of the group; 0 beyond it */
    float diagonal[MIX_COLUMNS];       /* V_jj; 1 beyond the group */
    float weight[MIX_COLUMNS];         /* V_jj^2; 0 beyond the group */
    float curve[MIX_POINTS][MIX_STRIP], edge[MIX_POINTS];
    float g[GPU_MIX24_WIDEST][MIX_STRIP]; /* running sums of the column block */
    /* A choice of each warp, which others take over. */
    struct {
        int s2, z2, trial[MIX_STRIP];
        float q[MIX_STRIP], zero[MIX_STRIP], cost[MIX_STRIP], total;
    } choice[MIX_WARPS];
};

/* The problem of one group. */
struct mix_problem {
    struct mix_shared *x;
    float top;                           /* the largest code */
    float t[MIX_COLUMNS][MIX_ROWS];      /* targets; 0 beyond the group and beyond the matrix */
    unsigned outliers[MIX_ROWS];         /* bit j: column j is an outlier, which costs nothing */
    float low[MIX_ROWS], high[MIX_ROWS]; /* range of the other targets, including 0 */
};

/* Second-order parameters, and the scale code and zero-point of each row for them. */
struct mix_choice {
    int s2, z2; /* s2: bits of an FP16 number */
    float q[MIX_ROWS], zero[MIX_ROWS], cost[MIX_ROWS];
    float total; /* cost of all selected rows */
};

ROW bool mix_is_outlier(const struct mix_problem *p, int j, int r)
{
    return p->outliers[r] >> j & 1;
}

ROW void mix_set_range(struct mix_problem *p)
{
    MIX_EACH_ROW(r)
    {
        p->low[r] = p->high[r] = 0;
        MIX_EACH_COLUMN(j)
        {
            const float t = mix_is_outlier(p, j, r) ? 0 : p->t[j][r];
            p->low[r] = fminf(p->low[r], t);
            p->high[r] = fmaxf(p->high[r], t);
        }
    }
}

/* ---- costs ---------------------------------------------------------------------------------- */

/* To the nearest integer, ties to even. */
ROW float mix_rint(float x)
{
    return (x + 12582912.0f) - 12582912.0f;
}

ROW float mix_clamp(float x, float low, float high)
{
    return fminf(fmaxf(x, low), high);
}

/* The code nearest to x, less the zero-point. */
ROW float mix_level(const struct mix_problem *p, float x, float inverse, float zero)
{
    return mix_rint(mix_clamp(x * inverse, -zero, p->top - zero));
}

/* The stored value of a code. For |x| < 1/4 FP16 rounds to multiples of 2^-24, as adding 3/4 in FP32
 * does. */
ROW float mix_value(float code, float zero, float s)
{
    const float magic = 0.75f, offset = (zero * s + magic) - magic;
    return (code * s - offset + magic) - magic;
}

/* The stored value of an outlier. */
ROW float mix_outlier_value(float x)
{
    return row_from_f16(row_f16_bits(mix_clamp(x, -65504.0f, 65504.0f)));
}

/* Number of zero-points to try with a scale: all four of 2 bits; with 4 bits three around the
 * zero-point that centers the codes on the targets. */
ROW int mix_zeros(const struct mix_problem *p)
{
    return p->top == 3 ? 4 : 3;
}

ROW float mix_zero(const struct mix_problem *p, int r, float inverse, int i)
{
    const float middle = p->top / 2 - (p->low[r] + p->high[r]) * 0.5f * inverse;
    return p->top == 3
               ? (float)i
               : mix_clamp(mix_rint(mix_clamp(middle, 0, p->top)) + (float)i - 1, 0, p->top);
}

/* The least cost of a scale under the diagonal of V, over the zero-points. */
ROW float mix_plain_cost(const struct mix_problem *p, int r, float s)
{
    enum { ZEROS = 4 };
    const float inverse = row_inverse(s);
    float zero[ZEROS], cost[ZEROS] = {0, 0, 0, 0};
    ROW_UNROLL for (int z = 0; z < ZEROS; z++) zero[z] =
        mix_zero(p, r, inverse, z < mix_zeros(p) ? z : 0);
    MIX_EACH_COLUMN(j)
    {
        const float t = mix_is_outlier(p, j, r) ? 0 : p->t[j][r];
        const float y = mix_rint(mix_clamp(t * inverse, -64, 64)), weight = p->x->weight[j];
        ROW_UNROLL for (int z = 0; z < ZEROS; z++)
        {
            const float e = t - s * mix_clamp(y, -zero[z], p->top - zero[z]);
            cost[z] += weight * e * e;
        }
    }
    return fminf(fminf(cost[0], cost[1]), fminf(cost[2], cost[3]));
}

/* The least cost of each row under the diagonal of V, with a separate scale. */
ROW void mix_separate_cost(float *cost, struct mix_problem *p)
{
    const int steps = p->top == 3 ? 12 : 8;
    const float from = 1.15f, to = p->top == 3 ? 0.45f : 0.7f;
    mix_set_range(p);
    MIX_EACH_ROW(r)
    {
        const float whole = (p->high[r] - p->low[r]) / p->top;
        cost[r] = INFINITY;
        ROW_LOOP for (int i = mix_part(); i < steps; i += MIX_PARTS) cost[r] = fminf(
            cost[r],
            mix_plain_cost(p, r, whole * (from + (to - from) * (float)i / (float)(steps - 1))));
        cost[r] = fminf(cost[r], mix_other(cost[r]));
    }
}

/* Costs of a scale with two zero-points under V. */
ROW void mix_costs(float cost[2], const struct mix_problem *p, int r, float s, const float zero[2])
{
    const float inverse = row_inverse(s);
    float e[2][MIX_COLUMNS];
    cost[0] = cost[1] = 0;
    MIX_EACH_COLUMN(j)
    {
        float x[2] = {p->t[j][r], p->t[j][r]};
        ROW_UNROLL for (int i = 0; i < j; i++)
        {
            const float u = p->x->u[j][i];
            x[0] += u * e[0][i];
            x[1] += u * e[1][i];
        }
        ROW_UNROLL for (int z = 0; z < 2; z++)
        {
            const float q =
                mix_is_outlier(p, j, r) ? x[z] : s * mix_level(p, x[z], inverse, zero[z]);
            const float term = x[z] - q;
            cost[z] += p->x->weight[j] * term * term;
            e[z][j] = p->t[j][r] - q;
        }
    }
}

/* ---- search --------------------------------------------------------------------------------- */

ROW float mix_s2(int bits)
{
    return row_from_f16((unsigned)bits) * MIX_S2_UNIT;
}

ROW int mix_step(const struct mix_problem *p)
{
    return p->top == 3 ? MIX_FINE : MIX_COARSE;
}

/* Rounds x down to a storable s2 that is small enough that no scale with z2 exceeds FP16. */
ROW int mix_storable(const struct mix_problem *p, float x, int z2)
{
    const int step = mix_step(p);
    const float most = 65504.0f / (float)(MIX_Q_MAX + z2);
    int top = (int)row_f16_bits(most), bits = (int)row_f16_bits(x * (1 / MIX_S2_UNIT));
    top -= row_from_f16((unsigned)top) > most;
    bits = bits < top ? bits : top;
    bits -= bits % step;
    return bits < step ? step : bits;
}

ROW float mix_row_scale(const struct mix_choice *c, int r)
{
    return (c->q[r] + (float)c->z2) * mix_s2(c->s2);
}

/* Keeps the better of two candidates of a row; the parts have tried different zero-points. */
ROW void mix_join_parts(struct mix_choice *c, int *trial, int r)
{
    const float cost = mix_other(c->cost[r]), q = mix_other(c->q[r]), zero = mix_other(c->zero[r]);
    const int other = (int)mix_other((float)*trial);
    if (cost < c->cost[r] || (cost == c->cost[r] && other < *trial)) {
        c->cost[r] = cost;
        c->q[r] = q;
        c->zero[r] = zero;
        *trial = other;
    }
}

/* Shows the choices of all warps to all. */
ROW void mix_show(struct mix_shared *x, const struct mix_choice *c, const int *trial)
{
    const int warp = mix_warp();
    mix_sync();
    x->choice[warp].s2 = c->s2;
    x->choice[warp].z2 = c->z2;
    x->choice[warp].total = c->total;
    MIX_EACH_ROW(r)
    {
        x->choice[warp].q[mix_row() + r] = c->q[r];
        x->choice[warp].zero[mix_row() + r] = c->zero[r];
        x->choice[warp].cost[mix_row() + r] = c->cost[r];
        x->choice[warp].trial[mix_row() + r] = trial[r];
    }
    mix_sync();
}

/* Takes the best candidate c of the warps, if it is better. */
ROW void mix_pick(struct mix_choice *best, struct mix_shared *x, const struct mix_choice *c)
{
    int none[MIX_ROWS] = {0}, from = -1;
    float total = best->total;
    mix_show(x, c, none);
    for (int warp = 0; warp < mix_warps(); warp++)
        if (x->choice[warp].total < total) {
            total = x->choice[warp].total;
            from = warp;
        }
    if (from < 0)
        return;
    best->s2 = x->choice[from].s2;
    best->z2 = x->choice[from].z2;
    best->total = total;
    MIX_EACH_ROW(r)
    {
        best->q[r] = x->choice[from].q[mix_row() + r];
        best->zero[r] = x->choice[from].zero[mix_row() + r];
        best->cost[r] = x->choice[from].cost[mix_row() + r];
    }
}

/* For each row the best of the warps' trials. */
ROW void mix_join_warps(struct mix_choice *c, struct mix_shared *x, int *trial)
{
    mix_show(x, c, trial);
    for (int warp = 0; warp < mix_warps(); warp++)
        MIX_EACH_ROW(r)
        {
            const int row = mix_row() + r, other = x->choice[warp].trial[row];
            const float cost = x->choice[warp].cost[row];
            if (cost < c->cost[r] || (cost == c->cost[r] && other < trial[r])) {
                c->cost[r] = cost;
                c->q[r] = x->choice[warp].q[row];
                c->zero[r] = x->choice[warp].zero[row];
                trial[r] = other;
            }
        }
}

/* Evaluates s2 and z2 by true costs: scale codes next to `guess`, all zero-points. With `together`
 * the warps divide the scale codes of the same s2 and z2; otherwise each warp has its own. */
ROW void mix_judge(struct mix_choice *c, const struct mix_problem *p, const float *guess,
                   unsigned rows, bool together)
{
    const float s2 = mix_s2(c->s2), least = c->z2 == 0;
    const int zeros = mix_zeros(p), step = together ? mix_warps() : 1;
    int trial[MIX_ROWS];
    MIX_EACH_ROW(r)
    {
        trial[r] = 8;
        c->cost[r] = INFINITY;
        c->q[r] = c->zero[r] = 0;
        ROW_LOOP for (int d = together ? mix_warp() - 1 : -1; d <= 1; d += step)
        {
            const float q = mix_clamp(guess[r] + (float)d, least, MIX_Q_MAX);
            const float s = (q + (float)c->z2) * s2, inverse = row_inverse(s);
            ROW_LOOP for (int i = mix_part(); i < zeros; i += 2 * MIX_PARTS)
            {
                const int at[2] = {i, i + MIX_PARTS < zeros ? i + MIX_PARTS : i};
                const float zero[2] = {mix_zero(p, r, inverse, at[0]),
                                       mix_zero(p, r, inverse, at[1])};
                float cost[2];
                mix_costs(cost, p, r, s, zero);
                ROW_UNROLL for (int z = 0; z < 2; z++) if (cost[z] < c->cost[r])
                {
                    c->cost[r] = cost[z];
                    c->q[r] = q;
                    c->zero[r] = zero[z];
                    trial[r] = 4 * d + at[z];
                }
            }
        }
        mix_join_parts(c, &trial[r], r);
    }
    if (together)
        mix_join_warps(c, p->x, trial);
    c->total = mix_sum(c->cost, rows);
}

/* 2^(-i / 8) */
ROW float mix_eighth_octaves(int i)
{
    const float eighths =
        (i & 1 ? 0.917004043f : 1) * (i & 2 ? 0.840896415f : 1) * (i & 4 ? 0.70710678f : 1);
    return eighths * row_from_bits((uint32_t)(127 - i / 8) << 23);
}

/* Cost of each row as a function of its scale, with the best zero-point, at scales from `largest`
 * down. */
ROW void mix_curve_new(const struct mix_problem *p, float largest)
{
    struct mix_shared *x = p->x;
    mix_sync();
    for (int i = mix_lane(); i < MIX_POINTS; i += mix_lanes())
        x->edge[i] = 0.5f * largest * (mix_eighth_octaves(i) + mix_eighth_octaves(i + 1));
    ROW_LOOP for (int i = mix_worker(); i < MIX_POINTS; i += mix_workers())
    {
        const float s = largest * mix_eighth_octaves(i);
        MIX_EACH_ROW(r) x->curve[i][mix_row() + r] = mix_plain_cost(p, r, s);
    }
    mix_sync();
}

/* Finds the best scale code of each row on the curve; returns the cost of all rows. */
ROW float mix_codes_by_curve(float *code, const struct mix_shared *x, int z2, float s2,
                             unsigned rows)
{
    float best[MIX_ROWS];
    int at = 0;
    MIX_EACH_ROW(r) best[r] = INFINITY;
    ROW_LOOP for (int q = MIX_Q_MAX; q >= (z2 == 0); q--)
    {
        const float s = (float)(q + z2) * s2;
        while (at < MIX_POINTS - 1 && s < x->edge[at])
            at++;
        MIX_EACH_ROW(r)
        {
            const float cost = x->curve[at][mix_row() + r];
            code[r] = cost < best[r] ? (float)q : code[r];
            best[r] = fminf(cost, best[r]);
        }
    }
    return mix_sum(best, rows);
}

/* Starting point of the search: the best on the curve of all z2 and of all s2 for which the largest
 * scale is in (largest / 2, largest]. Of the fine s2 values every second one is tried, because the
 * neighbors follow. */
ROW void mix_search_start(struct mix_choice *best, const struct mix_problem *p, unsigned rows)
{
    enum { OCTAVE = 0x400 };
    const int step = mix_step(p) == MIX_FINE ? 2 * MIX_FINE : MIX_COARSE;
    float range[MIX_ROWS], code[MIX_ROWS];
    struct mix_choice own; /* of the lanes that have the same z2 */
    MIX_EACH_ROW(r)
    {
        range[r] = (p->high[r] - p->low[r]) / p->top;
        code[r] = own.q[r] = own.zero[r] = own.cost[r] = 0;
    }
    const float largest = 1.25f * mix_max(range, rows);
    mix_curve_new(p, largest);
    own.s2 = 0x3c00;
    own.z2 = MIX_Q_MAX;
    own.total = INFINITY;
    *best = own;
    ROW_LOOP for (int z2 = mix_worker(); z2 <= MIX_Q_MAX; z2 += mix_workers())
    {
        const int top = mix_storable(p, largest / (float)(MIX_Q_MAX + z2), z2);
        ROW_LOOP for (int below = 0; below < OCTAVE; below += step)
        {
            const int s2 = top - below;
            const float total = mix_codes_by_curve(code, p->x, z2, mix_s2(s2 > 0 ? s2 : 0), rows);
            if (s2 >= mix_step(p) && total < own.total) {
                own.s2 = s2;
                own.z2 = z2;
                own.total = total;
                MIX_EACH_ROW(r) own.q[r] = code[r];
            }
        }
    }
    const float total = mix_other(own.total);
    const int s2 = (int)mix_other((float)own.s2), z2 = (int)mix_other((float)own.z2);
    const bool other = total < own.total || (total == own.total && z2 < own.z2);
    MIX_EACH_ROW(r)
    {
        const float q = mix_other(own.q[r]);
        own.q[r] = other ? q : own.q[r];
    }
    own.s2 = other ? s2 : own.s2;
    own.z2 = other ? z2 : own.z2;
    own.total = other ? total : own.total;
    mix_pick(best, p->x, &own);
    MIX_EACH_ROW(r) code[r] = best->q[r];
    mix_judge(best, p, code, rows, true);
}

/* Moves to the best of the four neighbors while that lowers the cost, for a few steps. */
ROW void mix_climb(struct mix_choice *best, const struct mix_problem *p, unsigned rows)
{
    enum { ROUNDS = 4, NEIGHBORS = 4 };
    float before = INFINITY;
    ROW_LOOP for (int round = 0; round < ROUNDS && best->total < before; round++)
    {
        const struct mix_choice from = *best;
        before = from.total;
        ROW_LOOP for (int first = 0; first < NEIGHBORS; first += mix_warps())
        {
            const int i = first + mix_warp();
            struct mix_choice c = from;
            float guess[MIX_ROWS];
            c.s2 = from.s2 + (i == 0 ? mix_step(p) : i == 1 ? -mix_step(p) : 0);
            c.z2 = from.z2 + (i == 2 ? 1 : i == 3 ? -1 : 0);
            c.total = INFINITY;
            if (c.s2 >= mix_step(p) && c.z2 >= 0 && c.z2 <= MIX_Q_MAX &&
                c.s2 <= mix_storable(p, INFINITY, c.z2)) {
                MIX_EACH_ROW(r)
                guess[r] = mix_rint(mix_row_scale(&from, r) * (1 / mix_s2(c.s2))) - (float)c.z2;
                mix_judge(&c, p, guess, rows, false);
            }
            mix_pick(best, p->x, &c);
        }
    }
}

/* Parameters of a group in the rows in `rows`. For rows of zeros: scale 1. */
ROW void mix_search(struct mix_choice *best, const struct mix_problem *p, unsigned rows)
{
    mix_search_start(best, p, rows);
    mix_climb(best, p, rows);
}

ROW bool mix_has_range(const struct mix_problem *p, unsigned rows)
{
    float range[MIX_ROWS];
    MIX_EACH_ROW(r) range[r] = p->high[r] - p->low[r];
    return mix_max(range, rows) > 0;
}

/* ---- a group -------------------------------------------------------------------------------- */

/* A strip of the matrix. */
struct mix_strip {
    const struct gpu_round *r;
    struct mix_shared *x;
    size_t index, row; /* of the strip, and the first row of this lane */
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
    mix_sync();
    for (int i = mix_lane(); i < MIX_COLUMNS * MIX_COLUMNS; i += mix_lanes()) {
        const int j = i / MIX_COLUMNS, l = i % MIX_COLUMNS;
        const float vjj = j < n ? v[(size_t)j * ld + (size_t)j] : 1;
        x->u[j][l] = l < j && j < n ? v[(size_t)l * ld + (size_t)j] / vjj : 0;
        if (l == j) {
            x->diagonal[j] = vjj;
            x->weight[j] = j < n ? vjj * vjj : 0;
        }
    }
    mix_sync();
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

/* Stores codes and values of the group, and change[j][r] for the product that spreads it. */
ROW void mix_store(const struct mix_strip *s, size_t at, int from, int n, int code[][MIX_ROWS],
                   float q[][MIX_ROWS], float change[][MIX_ROWS])
{
    MIX_EACH_ROW(r)
    {
        const size_t row = s->row + (size_t)r, first = row * s->r->k + at + (size_t)from;
        if (mix_worker() || !mix_is_row(s, r))
            continue;
        MIX_EACH_COLUMN(j)
        {
            if (j >= n)
                continue;
            s->r->rank[first + (size_t)j] = (uint8_t)code[j][r];
            s->r->mix24.values[first + (size_t)j] = q[j][r];
            s->r->change[row * s->r->change_ld + (size_t)(from + j)] = change[j][r];
        }
    }
}

/* g of columns [end, columns) of the block += the change of the n columns from `from` on, times
 * their rows of m[k][k]. */
ROW void mix_spread(const struct mix_strip *s, const float *m, size_t at, int from, int n, int end,
                    int columns, float change[][MIX_ROWS])
{
    mix_sync();
    ROW_LOOP for (int c = end + mix_worker(); c < columns; c += mix_workers())
    {
        const float *column = m + (at + (size_t)from) * s->r->k + at + (size_t)c;
        float factor[MIX_COLUMNS];
        MIX_EACH_COLUMN(j) factor[j] = column[(size_t)(j < n ? j : 0) * s->r->k];
        MIX_EACH_ROW(r)
        {
            float sum = s->x->g[c][mix_row() + r];
            MIX_EACH_COLUMN(j) sum += factor[j] * change[j][r]; /* 0 from n on */
            s->x->g[c][mix_row() + r] = sum;
        }
    }
    mix_sync();
}

ROW void mix_load_sums(const struct mix_strip *s, size_t at, int columns)
{
    mix_sync();
    for (int c = mix_worker(); c < columns; c += mix_workers())
        MIX_EACH_ROW(r) s->x->g[c][mix_row() + r] = mix_load(s->r->g, s, at, c, columns, r);
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
        mix_load_factor(s->x, v + first * k + first, k, n);
        mix_open(&p, s, first, n);
        /* The targets are the optimum without rounding for the errors so far. */
        MIX_EACH_COLUMN(j) MIX_EACH_ROW(r)
        {
            float x = j < n ? s->x->g[from + j][mix_row() + r] / s->x->diagonal[j] : 0;
            ROW_UNROLL for (int i = 0; i < j; i++) x += s->x->u[j][i] * e[i][r];
            e[j][r] = -x;
            p.t[j][r] = mix_load(s->r->w, s, first, j, n, r) + x;
        }
        mix_fit(&a, &p, s->r->mix24.halves);
        mix_store_params(&a, s, s->r->group[first]);
        MIX_EACH_COLUMN(j) MIX_EACH_ROW(r)
        {
            const float w = mix_load(s->r->w, s, first, j, n, r), vjj = s->x->diagonal[j];
            float x = w + (j < n ? s->x->g[from + j][mix_row() + r] / vjj : 0);
            ROW_UNROLL for (int i = 0; i < j; i++) x += s->x->u[j][i] * e[i][r];
            code[j][r] = 0;
            q[j][r] = j < n ? mix_round(&code[j][r], &p, &a, j, r, x) : 0;
            e[j][r] = j < n ? w - q[j][r] : 0;
            const double term = j < n ? (double)vjj * (double)(x - q[j][r]) : 0;
            sum[r] += term * term;
        }
        mix_store(s, at, from, n, code, q, e);
        mix_spread(s, v, at, from, n, end, columns, e);
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
            y[j] = sum / x->diagonal[j];
        }
        MIX_EACH_COLUMN(j)
        {
            y[j] /= x->diagonal[j];
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
                   int halves)
{
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
        if (mix_has_range(p, rows)) {
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
        g[j][r] = j < n ? s->x->g[from + j][mix_row() + r] : 0;
        q[j][r] = mix_load(s->r->mix24.values, s, at, j, n, r);
    }
    mix_group_targets(p, q, g);
    mix_set_range(p);
    mix_cost_of_values(now, p, q);
}

/* One round of coordinate descent on a column block under h[k][k]. Values and sums are loaded again
 * after the search, which needs the registers. */
ROW void mix_descend(const struct mix_strip *s, const float *h, size_t at, int columns)
{
    const size_t k = s->r->k;
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
        mix_load_factor(s->x, s->r->mix24.factor + group * MIX_COLUMNS * MIX_COLUMNS, MIX_COLUMNS,
                        n);
        for (int i = mix_lane(); i < MIX_COLUMNS * MIX_COLUMNS; i += mix_lanes()) {
            const int j = i / MIX_COLUMNS, l = i % MIX_COLUMNS;
            s->x->h[j][l] =
                j < n && l < n ? h[(first + (size_t)j) * k + first + (size_t)l] : j == l;
        }
        mix_load_params(&a, s, group);
        mix_open_refit(&p, now, s, first, from, n);
        mix_refit(take, now, &p, &a, s->r->mix24.halves);
        mix_sync();
        MIX_EACH_COLUMN(j)
        MIX_EACH_ROW(r) q[j][r] = mix_load(s->r->mix24.values, s, first, j, n, r);
        mix_nearest_plane(q, &p, &a, take);
        MIX_EACH_COLUMN(j) MIX_EACH_ROW(r)
        {
            g[j][r] = j < n ? s->x->g[from + j][mix_row() + r] : 0;
            change[j][r] = j < n ? mix_load(s->r->mix24.values, s, first, j, n, r) - q[j][r] : 0;
        }
        MIX_EACH_COLUMN(j)
        MIX_EACH_COLUMN(i) MIX_EACH_ROW(r) g[j][r] += s->x->h[i][j] * change[i][r];
        MIX_EACH_COLUMN(j) MIX_EACH_ROW(r)
        {
            const float x = q[j][r] + g[j][r] / s->x->h[j][j], old = q[j][r];
            code[j][r] = 0;
            q[j][r] = j < n ? mix_round(&code[j][r], &p, &a, j, r, x) : 0;
            const float moved = j < n ? old - q[j][r] : 0;
            change[j][r] += moved;
            ROW_UNROLL for (int i = j + 1; i < MIX_COLUMNS; i++) g[i][r] += s->x->h[j][i] * moved;
        }
        mix_sync(); /* all lanes have read the parameters and values */
        mix_store_params(&a, s, group);
        mix_store(s, at, from, n, code, q, change);
        mix_spread(s, h, at, from, n, end, columns, change);
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
