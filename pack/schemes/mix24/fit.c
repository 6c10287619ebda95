/* See fit.h. Compiled with -DQT_ISA=generic, avx2 and avx512; defines struct qt_mix24_fit_<ISA>. */
#include "pack/schemes/mix24/fit.h"

#include <math.h>
#include <string.h>

#define QT_JOIN2(a, b) a##b
#define QT_JOIN(a, b)  QT_JOIN2(a, b)
#define QT_TEXT2(a)    #a
#define QT_TEXT(a)     QT_TEXT2(a)
#define INLINE         static inline __attribute__((always_inline))

enum { ROWS = QT_FRAG_ROWS, MAX_N = 16 };

typedef float vf __attribute__((vector_size(4 * ROWS)));
typedef int32_t vi __attribute__((vector_size(4 * ROWS)));

INLINE vf splat(float x)
{
    return x - (vf){0};
}

INLINE vf load(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vf pick(vi mask, vf yes, vf no)
{
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

INLINE vf vmin(vf a, vf b)
{
    return pick(a < b, a, b);
}

INLINE vf vmax(vf a, vf b)
{
    return pick(a > b, a, b);
}

/* Rounds to the nearest integer, ties to even; |x| < 2^22. */
INLINE vf vrint(vf x)
{
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23 */
    return (x + magic) - magic;
}

/* Sum over the rows in `rows`, in order. */
INLINE float sum_rows(vf x, vi rows)
{
    float lane[ROWS], sum = 0;
    x = pick(rows, x, splat(0));
    memcpy(lane, &x, sizeof lane);
    for (int r = 0; r < ROWS; r++)
        sum += lane[r];
    return sum;
}

INLINE float max_rows(vf x, vi rows)
{
    float lane[ROWS], top = 0;
    x = pick(rows, x, splat(0));
    memcpy(lane, &x, sizeof lane);
    for (int r = 0; r < ROWS; r++)
        top = lane[r] > top ? lane[r] : top;
    return top;
}

/* ---- the problem, prepared for evaluation --------------------------------------------------- */

struct work {
    const struct qt_mix24_problem *p;
    size_t n;
    vf t[MAX_N];
    vi live[MAX_N];        /* not an outlier */
    float u[MAX_N][MAX_N]; /* V_ij / V_jj at [j][i] */
    float weight[MAX_N];   /* V_jj^2 */
    vf low, high;          /* range of the targets, including 0 */
    float top;             /* the largest code */
    bool coupled;
};

INLINE vi row_mask(unsigned bits)
{
    const vi bit = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                    1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    return (bit & (int32_t)bits) != 0;
}

static void work_new(struct work *w, const struct qt_mix24_problem *p)
{
    w->p = p;
    w->n = p->n;
    w->low = w->high = splat(0);
    w->top = (float)((1u << p->bits) - 1);
    w->coupled = p->coupled;
    for (size_t j = 0; j < p->n; j++) {
        float vjj = p->v[j * p->stride + j];
        w->t[j] = load(p->t + j * ROWS);
        w->live[j] = ~row_mask(p->outlier_rows[j]);
        w->weight[j] = vjj * vjj;
        for (size_t i = 0; i < j; i++)
            w->u[j][i] = p->coupled ? p->v[i * p->stride + j] / vjj : 0;
        vf t = pick(w->live[j], w->t[j], splat(0));
        w->low = vmin(w->low, t);
        w->high = vmax(w->high, t);
    }
}

/* A scale and a zero-point per row. */
struct trial {
    vf s, inv, zero;
};

INLINE vf nearest(const struct trial *x, vf t, float top)
{
    vf y = t * x->inv;
    y = vmin(vmax(y, -x->zero), splat(top) - x->zero);
    return x->s * vrint(y);
}

INLINE vf inverse(vf s)
{
    return pick(s > splat(0), splat(1) / s, splat(0));
}

/* Cost of a trial under the diagonal of V. */
INLINE vf cost_plain(const struct work *w, const struct trial *x)
{
    vf sum = splat(0);
    for (size_t j = 0; j < w->n; j++) {
        vf e = pick(w->live[j], w->t[j] - nearest(x, w->t[j], w->top), splat(0));
        sum += splat(w->weight[j]) * e * e;
    }
    return sum;
}

/* Cost of a trial under V; stores the values in q unless it is NULL. */
INLINE vf cost_coupled(vf *q, const struct work *w, const struct trial *x)
{
    vf sum = splat(0), e[MAX_N];
    for (size_t j = 0; j < w->n; j++) {
        vf target = w->t[j];
        for (size_t i = 0; i < j; i++)
            target += splat(w->u[j][i]) * e[i];
        vf value = pick(w->live[j], nearest(x, target, w->top), target);
        vf term = target - value;
        sum += splat(w->weight[j]) * term * term;
        e[j] = w->t[j] - value;
        if (q)
            q[j] = value;
    }
    return sum;
}

static vf cost_of(const struct work *w, const struct trial *x)
{
    return w->coupled ? cost_coupled(NULL, w, x) : cost_plain(w, x);
}

/* Cost of given values. */
static vf cost_of_values(const struct work *w, const vf *q)
{
    vf sum = splat(0);
    for (size_t j = 0; j < w->n; j++) {
        vf term = w->t[j] - q[j];
        for (size_t i = 0; i < j && w->coupled; i++)
            term += splat(w->u[j][i]) * (w->t[i] - q[i]);
        sum += splat(w->weight[j]) * term * term;
    }
    return sum;
}

/* ---- zero-points ---------------------------------------------------------------------------- */

/* Number of zero-points to try with a scale. 2 bits: all four; 4 bits: three around the zero-point
 * that centers the codes on the targets. */
INLINE int zeros_of(const struct work *w)
{
    return w->top == 3 ? 4 : 3;
}

INLINE vf zero_at(const struct work *w, vf inv, int i)
{
    if (w->top == 3)
        return splat((float)i);
    vf middle = splat(w->top / 2) - (w->low + w->high) * splat(0.5f) * inv;
    vf zero = vrint(vmin(vmax(middle, splat(0)), splat(w->top))) + splat((float)i - 1);
    return vmin(vmax(zero, splat(0)), splat(w->top));
}

INLINE vf zero_minmax(const struct work *w, vf inv)
{
    return vrint(vmin(vmax(-w->low * inv, splat(0)), splat(w->top)));
}

/* ---- a separate scale for every row --------------------------------------------------------- */

static vf minmax_scale(const struct work *w)
{
    return (w->high - w->low) / splat(w->top);
}

static void cost(float out[ROWS], const struct qt_mix24_problem *p)
{
    struct work w;
    work_new(&w, p);
    const int steps = p->bits == 2 ? 12 : 8;
    const float from = 1.15f, to = p->bits == 2 ? 0.45f : 0.7f;
    vf best = splat(INFINITY), whole = minmax_scale(&w);
    struct trial x = {whole, inverse(whole), splat(0)};
    if (p->search)
        for (int i = 0; i < steps; i++) {
            x.s = whole * splat(from + (to - from) * (float)i / (float)(steps - 1));
            x.inv = inverse(x.s);
            for (int z = 0; z < zeros_of(&w); z++) {
                x.zero = zero_at(&w, x.inv, z);
                best = vmin(best, cost_plain(&w, &x));
            }
        }
    else {
        x.zero = zero_minmax(&w, x.inv);
        best = cost_plain(&w, &x);
    }
    memcpy(out, &best, sizeof best);
}

/* ---- second-order scales: the scales of several rows together ------------------------------- */

enum {
    POINTS = 44, /* scales of the curve, 2^(1/8) apart */
    PER_OCTAVE = 8,
};

/* Second-order parameters, and the best scale code and zero-point of each row for them. */
struct choice {
    uint16_t s2;
    unsigned z2;
    vf q, zero, cost;
    float total; /* cost of all selected rows */
};

/* 2^(-i/8). Not by exp2f, whose rounding depends on the C library and processor. */
static float eighth_octaves(int i)
{
    static const float eighth[PER_OCTAVE] = {1,           0.917004043f, 0.840896415f, 0.771105413f,
                                             0.70710678f, 0.648419777f, 0.594603558f, 0.545253866f};
    return ldexpf(eighth[i % PER_OCTAVE], -(i / PER_OCTAVE));
}

/* Cost of each row as a function of its scale, with the best zero-point. */
struct curve {
    vf cost[POINTS];
    float edge[POINTS]; /* below this scale the next point is nearer */
};

/* Samples scales from `largest` down. */
static void curve_new(struct curve *curve, const struct work *w, float largest)
{
    for (int i = 0; i < POINTS; i++) {
        struct trial x;
        x.s = splat(largest * eighth_octaves(i));
        x.inv = inverse(x.s);
        curve->edge[i] = 0.5f * largest * (eighth_octaves(i) + eighth_octaves(i + 1));
        curve->cost[i] = splat(INFINITY);
        for (int z = 0; z < zeros_of(w); z++) {
            x.zero = zero_at(w, x.inv, z);
            curve->cost[i] = vmin(curve->cost[i], cost_plain(w, &x));
        }
    }
}

/* Finds the best scale code of each row on the curve; returns the cost of all rows. */
static float codes_by_curve(vf *code, const struct curve *curve, unsigned z2, float s2, vi rows)
{
    vf best = splat(INFINITY);
    int at = 0;
    for (unsigned q = QT_MIX24_Q_MAX; q + z2 > 0; q--) {
        float s = (float)(q + z2) * s2;
        while (at < POINTS - 1 && s < curve->edge[at])
            at++;
        vi better = curve->cost[at] < best;
        best = pick(better, curve->cost[at], best);
        *code = pick(better, splat((float)q), *code);
        if (q == 0)
            break;
    }
    return sum_rows(best, rows);
}

/* s2 as a number. */
static float s2_of(uint16_t bits)
{
    return qt_f16_to_f32(bits) * QT_MIX24_S2_UNIT;
}

/* Distance between neighboring s2 values, in FP16 bits. */
static unsigned s2_step(const struct work *w)
{
    return w->top == 3 ? QT_MIX24_S2_FINE : QT_MIX24_S2_COARSE;
}

/* Rounds x to a storable s2 that is small enough that no scale with z2 exceeds FP16. up: 0 rounds
 * down, a step less one rounds up. */
static uint16_t storable(const struct work *w, float x, unsigned z2, unsigned up)
{
    const unsigned step = s2_step(w);
    const float most = (float)QT_MIX24_SIGMA_MAX / (float)(QT_MIX24_Q_MAX + z2);
    unsigned top = qt_f32_to_f16(most), bits;
    top -= qt_f16_to_f32((uint16_t)top) > most;
    bits = qt_f32_to_f16(x * (1 / QT_MIX24_S2_UNIT)) + up;
    bits = bits < top ? bits : top;
    bits -= bits % step;
    return (uint16_t)(bits < step ? step : bits);
}

/* Evaluates s2 and z2 by true costs: scale codes next to `guess`, all zero-points. */
static void choice_judge(struct choice *c, const struct work *w, vf guess, vi rows)
{
    const float s2 = s2_of(c->s2), q_min = c->z2 == 0, q_max = QT_MIX24_Q_MAX;
    c->cost = splat(INFINITY);
    c->q = c->zero = splat(0);
    for (int d = -1; d <= 1; d++) {
        vf q = vmin(vmax(guess + splat((float)d), splat(q_min)), splat(q_max));
        struct trial x;
        x.s = (q + splat((float)c->z2)) * splat(s2);
        x.inv = inverse(x.s);
        for (int z = 0; z < zeros_of(w); z++) {
            x.zero = zero_at(w, x.inv, z);
            vf cost = cost_of(w, &x);
            vi better = cost < c->cost;
            c->cost = pick(better, cost, c->cost);
            c->q = pick(better, q, c->q);
            c->zero = pick(better, x.zero, c->zero);
        }
    }
    c->total = sum_rows(c->cost, rows);
}

/* The scales and zero-points of a choice. */
static struct trial trial_of(const struct choice *c)
{
    struct trial x;
    x.s = (c->q + splat((float)c->z2)) * splat(s2_of(c->s2));
    x.inv = inverse(x.s);
    x.zero = c->zero;
    return x;
}

/* For rows of zeros: scale 1. */
static struct choice zero_choice(void)
{
    return (struct choice){.s2 = 0x3c00, .z2 = 1};
}

/* Starting point of the search: the best on the curve of all z2 and of all s2 for which the largest
 * scale is in (largest / 2, largest]. Of the fine s2 values every second one is tried, because
 * climb follows. */
static struct choice search_start(const struct work *w, vi rows)
{
    const float largest = 1.25f * max_rows(minmax_scale(w), rows);
    const unsigned step = s2_step(w), octave = 0x400;
    struct choice best = zero_choice();
    struct curve curve;
    vf code = splat(0);
    curve_new(&curve, w, largest);
    best.total = INFINITY;
    for (unsigned z2 = 0; z2 < 16; z2++) {
        unsigned top = storable(w, largest / (float)(QT_MIX24_Q_MAX + z2), z2, 0);
        for (unsigned s2 = top; s2 >= step && s2 + octave > top;
             s2 -= step == QT_MIX24_S2_FINE ? 2 * step : step) {
            float total = codes_by_curve(&code, &curve, z2, s2_of((uint16_t)s2), rows);
            if (total < best.total)
                best = (struct choice){.s2 = (uint16_t)s2, .z2 = z2, .q = code, .total = total};
        }
    }
    choice_judge(&best, w, best.q, rows);
    return best;
}

/* Moves to the best of the four neighbors while that lowers the cost, for at most ROUNDS steps. */
static void climb(struct choice *best, const struct work *w, vi rows)
{
    enum { ROUNDS = 4, NEIGHBOURS = 4 };
    static const int ds[NEIGHBOURS] = {1, -1, 0, 0}, dz[NEIGHBOURS] = {0, 0, 1, -1};
    const int step = (int)s2_step(w);
    float before = INFINITY;
    for (int round = 0; round < ROUNDS && best->total < before; round++) {
        const struct choice from = *best;
        const vf scale = (from.q + splat((float)from.z2)) * splat(s2_of(from.s2));
        before = from.total;
        for (int i = 0; i < NEIGHBOURS; i++) {
            int s2 = from.s2 + ds[i] * step, z2 = (int)from.z2 + dz[i];
            if (s2 < step || z2 < 0 || z2 > 15)
                continue;
            struct choice c = {.s2 = (uint16_t)s2, .z2 = (unsigned)z2};
            if (c.s2 > storable(w, INFINITY, c.z2, 0))
                continue;
            choice_judge(&c, w, vrint(scale * splat(1 / s2_of(c.s2))) - splat((float)z2), rows);
            if (c.total < best->total)
                *best = c;
        }
    }
}

static struct choice search(const struct work *w, vi rows)
{
    struct choice best = search_start(w, rows);
    climb(&best, w, rows);
    return best;
}

/* As in the paper: min-max scales, whose range is divided evenly. */
static struct choice minmax(const struct work *w, vi rows)
{
    vf s = minmax_scale(w);
    const float q_max = QT_MIX24_Q_MAX;
    const unsigned up = s2_step(w) - 1;
    rows &= s > splat(0);
    float most = max_rows(s, rows), least = most - max_rows(splat(most) - s, rows);
    struct choice c = {.s2 = storable(w, (most - least) / q_max, 0, up)};
    if (rintf(least / s2_of(c.s2)) > 15)
        c.s2 = storable(w, most / (q_max + 15), 15, up);
    c.z2 = (unsigned)fminf(rintf(least / s2_of(c.s2)), 15);
    c.s2 = storable(w, s2_of(c.s2), c.z2, 0);
    const float s2 = s2_of(c.s2);
    c.q = vrint(vmin(s * splat(1 / s2), splat(64))) - splat((float)c.z2);
    c.q = vmin(vmax(c.q, splat(c.z2 == 0)), splat(q_max));
    struct trial x = trial_of(&c);
    c.zero = zero_minmax(w, x.inv);
    return c;
}

/* ---- results -------------------------------------------------------------------------------- */

/* Vector form of qt_mix24_value. */
INLINE vf stored_value(vf code, const struct trial *x)
{
    const vf magic = splat(0.75f);
    vf offset = (x->zero * x->s + magic) - magic;
    return (code * x->s - offset + magic) - magic;
}

/* Stores parameters, codes and values of the rows in `rows`. */
static void store(struct qt_mix24_group *out, float *q, const struct work *w,
                  const struct choice *c, vi rows)
{
    vf value[MAX_N];
    float code[ROWS], zero[ROWS], lane[ROWS];
    struct trial x = trial_of(c);
    cost_coupled(value, w, &x);
    memcpy(code, &c->q, sizeof code);
    memcpy(zero, &c->zero, sizeof zero);
    for (int r = 0; r < ROWS; r++) {
        if (!rows[r])
            continue;
        out->s2[r / 8] = c->s2;
        out->z2[r / 8] = (uint8_t)c->z2;
        out->q[r] = (uint8_t)code[r];
        out->zero[r] = (uint8_t)zero[r];
    }
    for (size_t j = 0; j < w->n; j++) {
        vf level = vrint(value[j] * x.inv) + c->zero;
        level = pick(w->live[j], level, c->zero);
        value[j] = pick(w->live[j], stored_value(level, &x), value[j]);
        memcpy(lane, &level, sizeof lane);
        for (int r = 0; r < ROWS; r++)
            if (rows[r]) {
                out->code[w->p->channel[j]][r] = (uint8_t)lane[r];
                q[j * ROWS + (size_t)r] = value[j][r];
            }
    }
}

static vi rows_of_half(const struct qt_mix24_problem *p, size_t half)
{
    return row_mask(p->halves == 1 ? 0xffff : 0xffu << 8 * half);
}

static void fit(struct qt_mix24_group *out, float *q, const struct qt_mix24_problem *p)
{
    struct work w;
    work_new(&w, p);
    for (size_t half = 0; half < p->halves; half++) {
        vi rows = rows_of_half(p, half);
        struct choice c = zero_choice();
        if (max_rows(w.high - w.low, rows) > 0)
            c = p->search ? search(&w, rows) : minmax(&w, rows);
        store(out, q, &w, &c, rows);
    }
}

/* Improves the rows of a group under its present second-order parameters. keep: rows whose codes
 * are better left unchanged. */
static struct choice improve(vi *keep, const struct work *w, const struct qt_mix24_group *group,
                             vf now, vi rows)
{
    struct choice c = {0};
    vf guess = splat(0);
    for (int r = ROWS - 1; r >= 0; r--) {
        guess[r] = group->q[r];
        if (!rows[r])
            continue;
        c.s2 = group->s2[r / 8];
        c.z2 = group->z2[r / 8];
    }
    choice_judge(&c, w, guess, rows);
    *keep = now <= c.cost;
    c.total = sum_rows(pick(*keep, now, c.cost), rows);
    return c;
}

static void refit(struct qt_mix24_group *group, float *q, const struct qt_mix24_problem *p)
{
    struct work w;
    vf value[MAX_N];
    work_new(&w, p);
    for (size_t j = 0; j < p->n; j++)
        value[j] = load(q + j * ROWS);
    vf now = cost_of_values(&w, value);
    for (size_t half = 0; half < p->halves; half++) {
        vi rows = rows_of_half(p, half), keep;
        struct choice c = improve(&keep, &w, group, now, rows);
        if (p->search && max_rows(w.high - w.low, rows) > 0) {
            struct choice fresh = search(&w, rows);
            if (fresh.total < c.total) {
                c = fresh;
                keep = (vi){0};
            }
        }
        store(group, q, &w, &c, rows & ~keep);
    }
}

extern const struct qt_mix24_fitops QT_JOIN(qt_mix24_fit_, QT_ISA);
const struct qt_mix24_fitops QT_JOIN(qt_mix24_fit_, QT_ISA) = {
    .cost = cost,
    .fit = fit,
    .refit = refit,
};
