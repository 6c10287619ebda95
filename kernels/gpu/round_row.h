/*
 * Rounding of one row by one warp: the functions that round_kernels.cu runs on the GPU, and tests on
 * the CPU. Methods: hessian/compensate.c, hessian/descent.c, pack/schemes/codebook.c.
 *
 * The columns of a column block are spread over ROW_LANES lanes, `cols` per lane: column c is
 * element c / ROW_LANES of the arrays [cols] of lane c % ROW_LANES. On the CPU there is one lane.
 * All lanes call the functions together; other arguments are the same in all lanes.
 */
#ifndef QT_KERNELS_GPU_ROUND_ROW_H
#define QT_KERNELS_GPU_ROUND_ROW_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define ROW        static __device__ __forceinline__
#define ROW_CALL   static __device__ __noinline__
#define ROW_UNROLL _Pragma("unroll")
#define ROW_LOOP   _Pragma("unroll 1")
enum { ROW_LANES = 32, ROW_COLS = 8 };
ROW int row_lane(void)
{
    return (int)(threadIdx.x % 32);
}
/* v of lane `from`. */
ROW float row_from(float v, int from)
{
    return __shfl_sync(~0u, v, from);
}
/* Sum over lanes, in an order that does not depend on the lane. */
ROW float row_sum(float v)
{
    for (int mask = 16; mask; mask /= 2)
        v += __shfl_xor_sync(~0u, v, mask);
    return v;
}
ROW double row_sum_f64(double v)
{
    for (int mask = 16; mask; mask /= 2)
        v += __shfl_xor_sync(~0u, v, mask);
    return v;
}
ROW float row_max(float v)
{
    for (int mask = 16; mask; mask /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, mask));
    return v;
}
/* Waits until the lanes' writes to memory are visible to the warp. */
ROW void row_sync(void)
{
    __syncwarp();
}
ROW float row_f16(float x)
{
    return __half2float(__float2half_rn(x));
}
ROW uint32_t row_bits(float x)
{
    return __float_as_uint(x);
}
ROW float row_from_bits(uint32_t u)
{
    return __uint_as_float(u);
}
#else
#include "base/base.h"
#define ROW      static inline
#define ROW_CALL static inline
#define ROW_UNROLL
#define ROW_LOOP
enum { ROW_LANES = 1, ROW_COLS = 256 };
ROW int row_lane(void)
{
    return 0;
}
ROW float row_from(float v, int from)
{
    (void)from;
    return v;
}
ROW float row_sum(float v)
{
    return v;
}
ROW double row_sum_f64(double v)
{
    return v;
}
ROW float row_max(float v)
{
    return v;
}
ROW void row_sync(void)
{
}
ROW float row_f16(float x)
{
    return qt_f16_to_f32(qt_f32_to_f16(x));
}
ROW uint32_t row_bits(float x)
{
    return qt_f32_bits(x);
}
ROW float row_from_bits(uint32_t u)
{
    return qt_bits_f32(u);
}
#endif

enum { ROW_VALUES = 256, ROW_F16, ROW_POWERS, ROW_E4M3 };

/* struct qt_round_values (base/backend.h) for kernels. */
struct row_values {
    int levels; /* a power of two, at least 16 and at least the number of values */
    float value[ROW_VALUES], mid[ROW_VALUES]; /* y > mid[i]: above value[i]; infinite from the last
                                               * value on */
    float smallest, greatest;                 /* values */
    bool floats;                              /* as in struct qt_round_values */
    int least, step; /* exponent field; of a value to that of 2^23 times its distance */
    float largest, first_scale, from, to;
    int scales, steps;
    bool zeros, mirrored;
};

/* ---- values --------------------------------------------------------------------------------- */

/* Index of the value nearest to y; 0 for NaN. */
ROW int row_nearest(const struct row_values *t, float y)
{
    int i = 0;
    for (int half = t->levels / 2; half > 8; half /= 2)
        i += y > t->mid[i + half - 1] ? half : 0;
    ROW_UNROLL for (int half = 8; half; half /= 2) i += y > t->mid[i + half - 1] ? half : 0;
    return i;
}

/* The value nearest to y. Among floats, additions round to it, ties to even. */
ROW float row_rounded(const struct row_values *t, float y)
{
    if (!t->floats)
        return t->value[row_nearest(t, y)];
    y = fminf(fmaxf(y, t->smallest), t->greatest);
    const int field = (int)(row_bits(y) >> 23 & 0xff);
    const int most = field > t->least ? field : t->least;
    const float magic = row_from_bits((uint32_t)(most + t->step) << 23 | 1u << 22);
    return (y + magic) - magic;
}

ROW float row_inverse(float scale)
{
    return scale != 0 ? 1 / scale : 0;
}

/* The value of E4M3FN nearest to s > 0, ties to even; at most 448. */
ROW float row_e4m3(float s)
{
    const int field = (int)(row_bits(s) >> 23), least = 127 - 6;
    const float step = row_from_bits((uint32_t)((field > least ? field : least) - 3) << 23);
    return fminf(rintf(s / step) * step, 448.0f);
}

/* The power of two whose ratio to s > 0 is nearest to 1, within the normal range. */
ROW float row_power(float s)
{
    const uint32_t bits = row_bits(s), fraction = bits & 0x7fffff;
    return row_from_bits((bits & 0x7f800000) + (fraction < 0x3504f4 ? 0 : 0x800000));
}

/* The storable scale nearest to s; `instead` if there is none. */
ROW float row_storable(const struct row_values *t, float s, float instead)
{
    if (t->scales != ROW_F16 && !(s > 0))
        return instead;
    s = row_f16(t->scales == ROW_POWERS ? row_power(s)
                : t->scales == ROW_E4M3 ? 8 * row_e4m3(s / 8)
                                        : s);
    return fabsf(s) <= 65504.0f ? s : instead;
}

/* ---- parameters of a group ------------------------------------------------------------------ */

struct row_group {
    float scale, zero;
    float error;
};

/* x[n], h[n] (NULL: all 1) in memory that all lanes see. */
struct row_targets {
    const float *x, *h;
    int n;
};

ROW float row_error(const struct row_values *t, const struct row_targets *a, float scale,
                    float zero)
{
    const float inverse = row_inverse(scale);
    float sum = 0;
    for (int i = row_lane(); i < a->n; i += ROW_LANES) {
        const float x = a->x[i], q = row_rounded(t, x * inverse + zero) - zero;
        const float e = x - scale * q;
        sum += (a->h ? a->h[i] : 1) * e * e;
    }
    return row_sum(sum);
}

/* Tries scale s as it will be stored; true if it lowers the error. */
ROW_CALL bool row_try(struct row_group *best, const struct row_values *t,
                      const struct row_targets *a, float s)
{
    s = row_storable(t, s, 0);
    if (s == 0 || (s == best->scale && best->error < INFINITY))
        return false;
    const float error = row_error(t, a, s, best->zero);
    if (!(error < best->error))
        return false;
    best->error = error;
    best->scale = s;
    return true;
}

/* Several scales, as they are stored; 0: none. */
enum { ROW_TRIALS = 4 };
struct row_trials {
    float scale[ROW_TRIALS];
};

/* As row_try for one scale after the other, but the targets are read once. */
ROW_CALL void row_try_all(struct row_group *best, const struct row_values *t,
                          const struct row_targets *a, struct row_trials trials)
{
    const float zero = best->zero;
    float inverse[ROW_TRIALS], sum[ROW_TRIALS];
    ROW_UNROLL for (int j = 0; j < ROW_TRIALS; j++)
    {
        inverse[j] = row_inverse(trials.scale[j]);
        sum[j] = 0;
    }
    for (int i = row_lane(); i < a->n; i += ROW_LANES) {
        const float x = a->x[i], h = a->h ? a->h[i] : 1;
        ROW_UNROLL for (int j = 0; j < ROW_TRIALS; j++)
        {
            const float e = x - trials.scale[j] * (row_rounded(t, x * inverse[j] + zero) - zero);
            sum[j] += h * e * e;
        }
    }
    ROW_UNROLL for (int j = 0; j < ROW_TRIALS; j++)
    {
        const float error = row_sum(sum[j]);
        if (trials.scale[j] != 0 && error < best->error) {
            best->error = error;
            best->scale = trials.scale[j];
        }
    }
}

/* Replaces the scale by the least-squares scale for its codes, as long as that lowers the error. */
ROW void row_refine(struct row_group *best, const struct row_values *t, const struct row_targets *a)
{
    for (int round = 0; round < 4; round++) {
        const float inverse = row_inverse(best->scale);
        float xq = 0, qq = 0;
        for (int i = row_lane(); i < a->n; i += ROW_LANES) {
            const float x = a->x[i], h = a->h ? a->h[i] : 1;
            const float q = row_rounded(t, x * inverse + best->zero) - best->zero;
            xq += h * x * q;
            qq += h * q * q;
        }
        xq = row_sum(xq);
        qq = row_sum(qq);
        if (!(qq > 0) || !row_try(best, t, a, xq / qq))
            return;
    }
}

/* Finds the best scale for the zero-point of *best. */
ROW void row_fit_scale(struct row_group *best, const struct row_values *t,
                       const struct row_targets *a, float nominal)
{
    if (!t->steps) {
        const float s = row_storable(t, nominal, 0);
        best->scale = s != 0 ? s : best->scale;
        return;
    }
    row_try(best, t, a, nominal);
    const int width = t->mirrored ? 2 : 1; /* trials of a step */
    for (int at = 0; at < width * (t->steps + 1); at += ROW_TRIALS) {
        struct row_trials trials;
        ROW_UNROLL for (int j = 0; j < ROW_TRIALS; j++)
        {
            const int i = (at + j) / width;
            const float s = nominal * (t->from + (t->to - t->from) * (float)i / (float)t->steps);
            trials.scale[j] = i <= t->steps ? row_storable(t, (at + j) % width ? -s : s, 0) : 0;
        }
        row_try_all(best, t, a, trials);
    }
    row_refine(best, t, a);
}

/* Best parameters of a group. */
ROW_CALL struct row_group row_fit(const struct row_values *t, const struct row_targets *a)
{
    struct row_group best = {t->first_scale, 0, INFINITY};
    float low = 0, high = 0;
    for (int i = row_lane(); i < a->n; i += ROW_LANES) {
        low = fminf(low, a->x[i]);
        high = fmaxf(high, a->x[i]);
    }
    low = -row_max(-low);
    high = row_max(high);
    if (low == 0 && high == 0)
        return best;
    if (!t->zeros) {
        row_fit_scale(&best, t, a, fmaxf(high, -low) / t->largest);
        return best;
    }
    /* The range covers the targets and 0; the search also tries the zero-points around it. */
    const int middle = (int)rintf(-low / (high - low) * t->largest), reach = t->steps ? 2 : 0;
    for (int zero = middle - reach; zero <= middle + reach; zero++) {
        struct row_group one = {t->first_scale, (float)zero, INFINITY};
        if (zero < 0 || zero > (int)t->largest)
            continue;
        row_fit_scale(&one, t, a, (high - low) / t->largest);
        if (!t->steps || one.error < best.error)
            best = one;
    }
    return best;
}

/* ---- a column block ------------------------------------------------------------------------- */

/* All rows of a column block share this. */
struct row_block {
    const struct row_values *t;
    int n;          /* columns, at most cols * ROW_LANES */
    const float *m; /* [n][ld] diagonal block of V or H */
    int ld;
    const uint32_t *group; /* [n] group number of each column */
    const uint32_t *end;   /* [n] end of its group, counted from the first column of the row */
    uint32_t at;           /* first column of the block, counted like that */
    bool fits;             /* compensation fits the parameters of groups, descent refits scales */
};

/* Parameters and state of a row. */
struct row_state {
    float *scale;  /* by group number */
    uint8_t *zero; /* same */
    float *x, *h;  /* [n] scratch memory */
    double sum;    /* this lane's terms of the objective */
};

/* Elements of columns [from, end): for each r, c runs through the columns that are element r. */
#define ROW_COLUMNS(r, c, from, end)                                                               \
    ROW_UNROLL for (int r = 0; r < cols;                                                           \
                    r++) for (int c = (from) > r * ROW_LANES ? (from) : r * ROW_LANES;             \
                              c < (end) && c < (r + 1) * ROW_LANES; c++)

/* y[i] += element of row c of the block's matrix, times v, for elements from r on. */
ROW void row_add(float *y, const struct row_block *b, int cols, int c, int r, float v)
{
    const float *m = b->m + (long long)c * b->ld;
    ROW_UNROLL for (int i = 0; i < cols; i++)
    {
        const int at = i * ROW_LANES + row_lane();
        if (i >= r)
            y[i] += m[at < b->n ? at : 0] * v; /* columns from n on are not used */
    }
}

/* inverse[i] = 1 / diagonal element. */
ROW void row_inverse_diagonal(float *inverse, const struct row_block *b, int cols)
{
    ROW_UNROLL for (int i = 0; i < cols; i++)
    {
        const int at = i * ROW_LANES + row_lane();
        inverse[i] = at < b->n ? 1 / b->m[(long long)at * b->ld + at] : 0;
    }
}

/*
 * Chooses the parameters of the group of columns [from, end) during compensation. Its targets are
 * the optimum without rounding for the errors so far: the e for which every term of the objective
 * is 0, by forward substitution.
 */
ROW struct row_group row_begin(const struct row_block *b, struct row_state *s, int cols,
                               const float *w, const float *g, const float *inverse, int from,
                               int end)
{
    float sum[ROW_COLS];
    struct row_targets a = {s->x, s->h, end - from};
    ROW_UNROLL for (int i = 0; i < cols; i++) sum[i] = g[i];
    ROW_COLUMNS(r, c, from, end)
    {
        const float e = -sum[r] * inverse[r];
        if (row_lane() == c % ROW_LANES) {
            s->x[c - from] = w[r] - e;
            s->h[c - from] = 1 / (inverse[r] * inverse[r]);
        }
        row_add(sum, b, cols, c, r, row_from(e, c % ROW_LANES));
    }
    row_sync();
    const struct row_group best = row_fit(b->t, &a);
    row_sync();
    return best;
}

/* Rounds the columns with compensation of all earlier errors. w, g: weights and sums of V_ij e_i
 * over finished columns i. Sets rank (index of the value) and e = w - q, and adds to s->sum. */
ROW void row_compensate(const struct row_block *b, struct row_state *s, int cols, const float *w,
                        float *g, int *rank, float *e)
{
    float inverse[ROW_COLS];
    row_inverse_diagonal(inverse, b, cols);
    for (int from = 0, end; from < b->n; from = end) {
        const uint32_t group = b->group[from];
        struct row_group p = {s->scale[group], (float)s->zero[group], 0};
        end = b->fits ? (int)(b->end[from] - b->at) : b->n;
        if (b->fits) {
            p = row_begin(b, s, cols, w, g, inverse, from, end);
            if (row_lane() == 0) {
                s->scale[group] = p.scale;
                s->zero[group] = (uint8_t)p.zero;
            }
        }
        const float inverse_scale = row_inverse(p.scale);
        ROW_COLUMNS(r, c, from, end)
        {
            const float x = w[r] + g[r] * inverse[r];
            const int i = row_nearest(b->t, x * inverse_scale + p.zero);
            const float q = p.scale * (b->t->value[i] - p.zero);
            if (row_lane() == c % ROW_LANES) {
                const double term = (double)(x - q) / (double)inverse[r];
                rank[r] = i;
                e[r] = w[r] - q;
                s->sum += term * term;
            }
            row_add(g, b, cols, c, r, row_from(w[r] - q, c % ROW_LANES));
        }
    }
}

/* Replaces the scale of the group of columns [from, end) by the least-squares scale for its codes
 * if that lowers the objective. */
ROW void row_refit(const struct row_block *b, struct row_state *s, int cols, float *g,
                   const float *unit, float *change, float scale, int from, int end)
{
    float hu[ROW_COLS];
    double ug = 0, uhu = 0;
    ROW_UNROLL for (int i = 0; i < cols; i++) hu[i] = 0;
    ROW_COLUMNS(r, c, from, end)
    {
        const float u = row_from(unit[r], c % ROW_LANES);
        if (u != 0)
            row_add(hu, b, cols, c, 0, u);
    }
    ROW_UNROLL for (int i = 0; i < cols; i++)
    {
        const int c = i * ROW_LANES + row_lane();
        if (c >= from && c < end) {
            ug += (double)unit[i] * (double)g[i];
            uhu += (double)unit[i] * (double)hu[i];
        }
    }
    ug = row_sum_f64(ug);
    uhu = row_sum_f64(uhu);
    const float best = uhu > 0 ? row_storable(b->t, scale + (float)(ug / uhu), scale) : scale;
    const double step = (double)best - (double)scale;
    if (!(step * (step * uhu - 2 * ug) < 0)) /* change of the objective */
        return;
    ROW_UNROLL for (int i = 0; i < cols; i++)
    {
        const int c = i * ROW_LANES + row_lane();
        if (c >= from && c < end)
            change[i] += (scale - best) * unit[i];
        g[i] += (scale - best) * hu[i];
    }
    if (row_lane() == 0)
        s->scale[b->group[from]] = best;
}

/* One round of coordinate descent, with g = H (w - q) of the columns. Updates rank, and sets change
 * to the change of w - q. */
ROW void row_descend(const struct row_block *b, struct row_state *s, int cols, float *g, int *rank,
                     float *change)
{
    float inverse[ROW_COLS], unit[ROW_COLS];
    row_inverse_diagonal(inverse, b, cols);
    ROW_UNROLL for (int i = 0; i < cols; i++) change[i] = 0;
    for (int from = 0, end; from < b->n; from = end) {
        const uint32_t group = b->group[from];
        const float scale = s->scale[group], zero = (float)s->zero[group];
        const float inverse_scale = row_inverse(scale);
        end = b->fits ? (int)(b->end[from] - b->at) : b->n;
        ROW_UNROLL for (int i = 0; i < cols; i++) unit[i] = b->t->value[rank[i]] - zero;
        ROW_COLUMNS(r, c, from, end)
        {
            const float x = scale * unit[r] + g[r] * inverse[r];
            const int i = row_nearest(b->t, x * inverse_scale + zero);
            const float now = b->t->value[i] - zero, moved = scale * unit[r] - scale * now;
            const float all = row_from(moved, c % ROW_LANES);
            if (row_lane() == c % ROW_LANES) {
                rank[r] = i;
                unit[r] = now;
                change[r] += moved;
            }
            if (all != 0)
                row_add(g, b, cols, c, 0, all);
        }
        if (b->fits)
            row_refit(b, s, cols, g, unit, change, scale, from, end);
    }
}

/* ---- a whole row ---------------------------------------------------------------------------- */

/* Columns [0, k) of a row in processing order. */
struct row_whole {
    const struct row_values *t;
    int k;
    const uint32_t *group; /* [k] */
    const float *w, *hw;   /* [k]; hw: H w, for row_rescale */
    const float *q;        /* [k] values that are no scale times a table entry; else NULL */
    float *g;              /* [k] */
    uint8_t *rank;         /* [k] */
    float *scale;          /* by group number */
    const uint8_t *zero;   /* same */
};

ROW float row_unit(const struct row_whole *a, int p)
{
    return a->t->value[a->rank[p]] - (float)a->zero[a->group[p]];
}

ROW float row_value(const struct row_whole *a, int p)
{
    return a->q ? a->q[p] : a->scale[a->group[p]] * row_unit(a, p);
}

/* Rounds the weights to nearest. */
ROW void row_assign(const struct row_whole *a)
{
    for (int p = row_lane(); p < a->k; p += ROW_LANES) {
        const float inverse = row_inverse(a->scale[a->group[p]]);
        a->rank[p] = (uint8_t)row_nearest(a->t, a->w[p] * inverse + (float)a->zero[a->group[p]]);
    }
}

/* (w - q) . g */
ROW double row_objective(const struct row_whole *a)
{
    double sum = 0;
    for (int p = row_lane(); p < a->k; p += ROW_LANES)
        sum += (double)(a->w[p] - row_value(a, p)) * (double)a->g[p];
    return row_sum_f64(sum);
}

/* Refits the scale of a row with one group: with q = s U, H U is (H w - g) / s. */
ROW void row_rescale(const struct row_whole *a)
{
    const float before = *a->scale;
    double ug = 0, uhq = 0;
    for (int p = row_lane(); p < a->k; p += ROW_LANES) {
        const double u = (double)row_unit(a, p);
        ug += u * (double)a->g[p];
        uhq += u * (double)(a->hw[p] - a->g[p]);
    }
    ug = row_sum_f64(ug);
    const double uhu = before != 0 ? row_sum_f64(uhq) / (double)before : 0;
    const float best = uhu > 0 ? row_storable(a->t, before + (float)(ug / uhu), before) : before;
    const double step = (double)best - (double)before;
    if (!(step * (step * uhu - 2 * ug) < 0))
        return;
    const float change = (best - before) / before;
    for (int p = row_lane(); p < a->k; p += ROW_LANES)
        a->g[p] -= change * (a->hw[p] - a->g[p]);
    row_sync();
    if (row_lane() == 0)
        *a->scale = best;
}

#endif
