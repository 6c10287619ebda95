/*
 * The parameters of a group of mix24 (pack/schemes/mix24/): a search by a thread block, for a group of
 * columns in a strip of 16 rows. Method: pack/schemes/mix24/fit.c.
 *
 * On the GPU a warp has all rows, MIX_PARTS lanes each, and a block has up to MIX_WARPS warps. The
 * lanes of a row divide the trials of a search, and all do everything else. On the CPU one lane has
 * all 16 rows. All lanes call the functions together. Arrays [MIX_ROWS] differ between rows, other
 * arguments are the same in all lanes, unless stated otherwise.
 */
#ifndef QT_KERNELS_GPU_MIX24_SEARCH_H
#define QT_KERNELS_GPU_MIX24_SEARCH_H

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
    MIX_STEPS = 4,   /* at most so many s2 are tried for a z2 at the start */
    MIX_Q_MAX = 15,
    MIX_FINE = 0x0080, /* steps between values of s2 in groups of 2 and 4 bits */
    MIX_COARSE = 0x0200,
    MIX_S2_MASK = 0x7f80,
};
#define MIX_S2_UNIT 0x1p-22f

/* Memory that the lanes share. */
struct mix_shared {
    float u[MIX_COLUMNS][MIX_COLUMNS]; /* V_ij / V_jj at [j][i], i < j; 0 beyond the group */
    float diagonal[MIX_COLUMNS];       /* V_jj; 1 beyond the group */
    float inverse[MIX_COLUMNS];        /* 1 / V_jj */
    float weight[MIX_COLUMNS];         /* V_jj^2; 0 beyond the group */
    float curve[MIX_POINTS][MIX_STRIP], edge[MIX_POINTS];
    uint32_t point[MIX_Q_MAX + 1][MIX_STEPS][4]; /* of the curve, by z2, step of s2 and code of the
                                                  * scale: a byte each */
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

/* The point of the curve for the scale s: the number of edges above s. The difference of the bits
 * of two floats is nearly that of their logarithms. */
ROW unsigned mix_point(const struct mix_shared *x, float s, float largest)
{
    const int octaves = (int)(row_bits(largest) - row_bits(s)) >> 20;
    int at = octaves < 0 ? 0 : octaves < MIX_POINTS - 1 ? octaves : MIX_POINTS - 1;
    while (at < MIX_POINTS - 1 && s < x->edge[at])
        at++;
    while (at > 0 && !(s < x->edge[at - 1]))
        at--;
    return (unsigned)at;
}

/* Distance of the s2 that are tried for a z2 at the start, how many there are, and one of them. Of
 * the fine s2 every second one is tried, because the neighbors follow. */
ROW int mix_start_step(const struct mix_problem *p)
{
    return mix_step(p) == MIX_FINE ? 2 * MIX_FINE : MIX_COARSE;
}

ROW int mix_start_steps(const struct mix_problem *p)
{
    enum { OCTAVE = 0x400 };
    return OCTAVE / mix_start_step(p);
}

ROW int mix_start_s2(const struct mix_problem *p, float largest, int z2, int step)
{
    return mix_storable(p, largest / (float)(MIX_Q_MAX + z2), z2) - step * mix_start_step(p);
}

/* Finds the points of all scales with which the search starts. */
ROW void mix_points_new(const struct mix_problem *p, float largest)
{
    const int words = 4 * mix_start_steps(p);
    for (int i = mix_lane(); i < (MIX_Q_MAX + 1) * words; i += mix_lanes()) {
        const int z2 = i / words, step = i % words / 4, word = i % 4;
        const int bits = mix_start_s2(p, largest, z2, step);
        const float s2 = mix_s2(bits > 0 ? bits : 0);
        unsigned points = 0;
        ROW_UNROLL for (int q = 0; q < 4; q++) points |=
            mix_point(p->x, (float)(4 * word + q + z2) * s2, largest) << 8 * q;
        p->x->point[z2][step][word] = points;
    }
    mix_sync();
}

/* Finds the best scale code of each row on the curve; returns the cost of all rows. */
ROW float mix_codes_by_curve(float *code, const struct mix_shared *x, int z2, int step,
                             unsigned rows)
{
    float best[MIX_ROWS];
    MIX_EACH_ROW(r) best[r] = INFINITY;
    ROW_UNROLL for (int q = MIX_Q_MAX; q >= 0; q--)
    {
        const unsigned at = x->point[z2][step][q / 4] >> 8 * (q % 4) & 0xff;
        MIX_EACH_ROW(r)
        {
            const float cost = x->curve[at][mix_row() + r];
            const bool better = (q > 0 || z2 > 0) && cost < best[r];
            code[r] = better ? (float)q : code[r];
            best[r] = better ? cost : best[r];
        }
    }
    return mix_sum(best, rows);
}

/* Starting point of the search: the best on the curve of all z2 and of all s2 for which the largest
 * scale is in (largest / 2, largest]. */
ROW void mix_search_start(struct mix_choice *best, const struct mix_problem *p, unsigned rows)
{
    float range[MIX_ROWS], code[MIX_ROWS];
    struct mix_choice own; /* of the lanes that have the same z2 */
    MIX_EACH_ROW(r)
    {
        range[r] = (p->high[r] - p->low[r]) / p->top;
        code[r] = own.q[r] = own.zero[r] = own.cost[r] = 0;
    }
    const float largest = 1.25f * mix_max(range, rows);
    mix_curve_new(p, largest);
    mix_points_new(p, largest);
    own.s2 = 0x3c00;
    own.z2 = MIX_Q_MAX;
    own.total = INFINITY;
    *best = own;
    ROW_LOOP for (int z2 = mix_worker(); z2 <= MIX_Q_MAX; z2 += mix_workers())
    {
        ROW_LOOP for (int step = 0; step < mix_start_steps(p); step++)
        {
            const int s2 = mix_start_s2(p, largest, z2, step);
            const float total = mix_codes_by_curve(code, p->x, z2, step, rows);
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

#endif
