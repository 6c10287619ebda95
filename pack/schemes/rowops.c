/* See rowops.h. Compiled with -DQT_ISA=generic, avx2 and avx512; defines struct qt_rowops_<ISA>. */
#include "pack/schemes/rowops.h"

#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define QT_JOIN2(a, b) a##b
#define QT_JOIN(a, b)  QT_JOIN2(a, b)
#define QT_TEXT2(a)    #a
#define QT_TEXT(a)     QT_TEXT2(a)
#define INLINE         static inline __attribute__((always_inline))

/* Sums run in LANES lanes for every register width; VECS registers hold the lanes. */
#if defined(__AVX512F__)
enum { WIDTH = 16 };
#elif defined(__AVX2__)
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif
enum { LANES = 16, VECS = LANES / WIDTH };

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint8_t vb __attribute__((vector_size(WIDTH)));

INLINE vf splat(float x)
{
    return x - (vf){0};
}

INLINE vi splat_i(int32_t x)
{
    return x - (vi){0};
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

INLINE float sum(const vf acc[VECS])
{
    float lane[LANES];
    memcpy(lane, acc, sizeof lane);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++)
            lane[l] += lane[l + half];
    return lane[0];
}

/* LANES elements of x and h at i. The last, partial chunk of a row is read from zero-padded copies,
 * so that its padding has weight 0. */
struct chunk {
    const float *x, *h;
    float tail_x[LANES], tail_h[LANES];
};

INLINE void chunk_at(struct chunk *c, const float *x, const float *h, size_t i, size_t n)
{
    static const float ones[LANES] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    c->x = x + i;
    c->h = h ? h + i : ones;
    if (__builtin_expect(n - i < LANES, 0)) {
        memset(c->tail_x, 0, sizeof c->tail_x);
        memset(c->tail_h, 0, sizeof c->tail_h);
        memcpy(c->tail_x, c->x, (n - i) * sizeof *x);
        memcpy(c->tail_h, c->h, (n - i) * sizeof *x);
        c->x = c->tail_x;
        c->h = c->tail_h;
    }
}

/* ---- nearest value: tables ------------------------------------------------------------------ */

#ifdef __AVX512F__
/* table[index] */
INLINE vf lookup(const float table[16], vi index)
{
    return (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)load(table));
}

/* Binary search. Comparing with all 15 midpoints takes twice as long here. Without an indexed load
 * from one register, comparing is faster. */
INLINE vi table_search(vf y, const struct qt_grid *g, int levels)
{
    vi code = (y > splat(g->mid[levels / 2 - 1])) & splat_i(levels / 2);
    for (int half = levels / 4; half; half /= 2)
        code |= (y > lookup(g->mid, code + (half - 1))) & splat_i(half);
    return code;
}
#endif

INLINE vf table_value(vf y, const struct qt_grid *g, int levels)
{
#ifdef __AVX512F__
    if (levels > 4)
        return lookup(g->value, table_search(y, g, levels));
#endif
    vf q = splat(g->value[0]);
    for (int i = 1; i < levels; i++)
        q = pick(y > splat(g->mid[i - 1]), splat(g->value[i]), q);
    return q;
}

INLINE vi table_code(vf y, const struct qt_grid *g, int levels)
{
#ifdef __AVX512F__
    if (levels > 4)
        return table_search(y, g, levels);
#endif
    vi code = {0};
    for (int i = 1; i < levels; i++)
        code -= y > splat(g->mid[i - 1]); /* a true lane is -1 */
    return code;
}

/* ---- nearest value: minifloats -------------------------------------------------------------- */

/*
 * Let e be the exponent of |y|, at least that of the smallest normal number. Adding C = 2^(e+23-m)
 * makes the FP32 adder round |y| to a multiple of 2^(e-m), ties to even. The low bits of the sum
 * are the multiple, so the magnitude code is (e - e_min) << m + multiple, carries included.
 */
struct mini {
    vf magic; /* C per lane */
    vf sum;   /* |y| + C */
    vi steps; /* (e - e_min) in FP32 exponent position */
};

INLINE struct mini mini_round(vf y, const struct qt_grid *g)
{
    int bias = (1 << (g->exp_bits - 1)) - 1;
    vi e_min = splat_i((127 + 1 - bias) << 23);
    vf a = (vf)((vi)y & 0x7fffffff), top = splat(g->max);
    a = pick(a > top, top, a);
    vi e = (vi)a & 0x7f800000;
    vi low = e < e_min;
    e = (low & e_min) | (~low & e);
    struct mini r;
    r.magic = (vf)(e + ((23 - g->man_bits) << 23));
    r.sum = a + r.magic;
    r.steps = e - e_min;
    return r;
}

INLINE vf mini_value(vf y, const struct qt_grid *g)
{
    struct mini r = mini_round(y, g);
    return (vf)((vi)(r.sum - r.magic) | ((vi)y & INT32_MIN));
}

INLINE vi mini_code(vf y, const struct qt_grid *g)
{
    struct mini r = mini_round(y, g);
    vi mag = (r.steps >> (23 - g->man_bits)) + ((vi)r.sum - (vi)r.magic);
    vi sign = ((vi)y >> 31) & 1;
    return (mag << (g->sign_bit == 0)) | (sign << g->sign_bit);
}

/* ---- nearest value: integers ---------------------------------------------------------------- */

/* Adding 1.5 * 2^23 makes the FP32 adder round to integers, ties to even. */
INLINE vf whole_sum(vf y, const struct qt_grid *g)
{
    y = pick(y < splat(g->low), splat(g->low), y);
    y = pick(y > splat(g->high), splat(g->high), y);
    return y + splat(0x1.8p23f);
}

INLINE vf whole_value(vf y, const struct qt_grid *g)
{
    return whole_sum(y, g) - splat(0x1.8p23f);
}

INLINE vi whole_code(vf y, const struct qt_grid *g)
{
    return (vi)whole_sum(y, g) - (vi)splat(0x1.8p23f) - (int32_t)g->low;
}

/* ---- the loops, one copy per kind of grid --------------------------------------------------- */

enum kind { TABLE4, TABLE8, TABLE16, MINIFLOAT, WHOLE };

INLINE enum kind kind_of(const struct qt_grid *g)
{
    if (g->levels)
        return g->levels == 4 ? TABLE4 : g->levels == 8 ? TABLE8 : TABLE16;
    return g->exp_bits ? MINIFLOAT : WHOLE;
}

INLINE vf nearest_value(vf y, const struct qt_grid *g, enum kind kind)
{
    switch (kind) {
    case MINIFLOAT:
        return mini_value(y, g);
    case WHOLE:
        return whole_value(y, g);
    default:
        return table_value(y, g, kind == TABLE4 ? 4 : kind == TABLE8 ? 8 : 16);
    }
}

INLINE vi nearest_code(vf y, const struct qt_grid *g, enum kind kind)
{
    switch (kind) {
    case MINIFLOAT:
        return mini_code(y, g);
    case WHOLE:
        return whole_code(y, g);
    default:
        return table_code(y, g, kind == TABLE4 ? 4 : kind == TABLE8 ? 8 : 16);
    }
}

INLINE void round_as(uint8_t *code, const float *x, size_t n, float inv, const struct qt_grid *g,
                     enum kind kind)
{
    struct chunk c;
    for (size_t i = 0; i < n; i += LANES) {
        uint8_t out[LANES];
        chunk_at(&c, x, NULL, i, n);
        for (int u = 0; u < VECS; u++) {
            vf y = load(c.x + u * WIDTH) * splat(inv);
            vb narrow = __builtin_convertvector(nearest_code(y, g, kind), vb);
            memcpy(out + u * WIDTH, &narrow, WIDTH);
        }
        memcpy(code + i, out, n - i < LANES ? n - i : LANES);
    }
}

INLINE float error_as(const float *x, const float *h, size_t n, float inv, float s,
                      const struct qt_grid *g, enum kind kind)
{
    vf acc[VECS] = {{0}};
    struct chunk c;
    for (size_t i = 0; i < n; i += LANES) {
        chunk_at(&c, x, h, i, n);
        for (int u = 0; u < VECS; u++) {
            vf v = load(c.x + u * WIDTH), w = load(c.h + u * WIDTH);
            vf e = v - splat(s) * nearest_value(v * splat(inv), g, kind);
            acc[u] += w * e * e;
        }
    }
    return sum(acc);
}

INLINE void moments_as(float *xq, float *qq, const float *x, const float *h, size_t n, float inv,
                       const struct qt_grid *g, enum kind kind)
{
    vf acc_xq[VECS] = {{0}}, acc_qq[VECS] = {{0}};
    struct chunk c;
    for (size_t i = 0; i < n; i += LANES) {
        chunk_at(&c, x, h, i, n);
        for (int u = 0; u < VECS; u++) {
            vf v = load(c.x + u * WIDTH), w = load(c.h + u * WIDTH);
            vf q = nearest_value(v * splat(inv), g, kind);
            acc_xq[u] += w * v * q;
            acc_qq[u] += w * q * q;
        }
    }
    *xq = sum(acc_xq);
    *qq = sum(acc_qq);
}

static float absmax(const float *x, size_t n)
{
    vi acc[VECS] = {{0}};
    struct chunk c;
    for (size_t i = 0; i < n; i += LANES) {
        chunk_at(&c, x, NULL, i, n);
        for (int u = 0; u < VECS; u++) {
            /* FP32 magnitudes compare like their bits, infinities and NaN above all others. */
            vi a = (vi)load(c.x + u * WIDTH) & 0x7fffffff;
            vi more = a > acc[u];
            acc[u] = (more & a) | (~more & acc[u]);
        }
    }
    int32_t lane[LANES], best = 0;
    memcpy(lane, acc, sizeof lane);
    for (int l = 0; l < LANES; l++)
        best = lane[l] > best ? lane[l] : best;
    float f;
    memcpy(&f, &best, sizeof f);
    return f;
}

/* Calls a loop with the kind of grid as a constant, so that each kind is compiled separately. */
#define BY_KIND(g, call)                                                                           \
    switch (kind_of(g)) {                                                                          \
    case TABLE4:                                                                                   \
        call(TABLE4);                                                                              \
        break;                                                                                     \
    case TABLE8:                                                                                   \
        call(TABLE8);                                                                              \
        break;                                                                                     \
    case TABLE16:                                                                                  \
        call(TABLE16);                                                                             \
        break;                                                                                     \
    case MINIFLOAT:                                                                                \
        call(MINIFLOAT);                                                                           \
        break;                                                                                     \
    case WHOLE:                                                                                    \
        call(WHOLE);                                                                               \
        break;                                                                                     \
    }

static void round_row(uint8_t *code, const float *x, size_t n, float inv, const struct qt_grid *g)
{
#define CALL(kind) round_as(code, x, n, inv, g, kind)
    BY_KIND(g, CALL)
#undef CALL
}

static float error_row(const float *x, const float *h, size_t n, float inv, float s,
                       const struct qt_grid *g)
{
    float e = 0;
#define CALL(kind) e = error_as(x, h, n, inv, s, g, kind)
    BY_KIND(g, CALL)
#undef CALL
    return e;
}

static void moments_row(float *xq, float *qq, const float *x, const float *h, size_t n, float inv,
                        const struct qt_grid *g)
{
#define CALL(kind) moments_as(xq, qq, x, h, n, inv, g, kind)
    BY_KIND(g, CALL)
#undef CALL
}

extern const struct qt_rowops QT_JOIN(qt_rowops_, QT_ISA);
const struct qt_rowops QT_JOIN(qt_rowops_, QT_ISA) = {
    .isa = QT_TEXT(QT_ISA),
    .absmax = absmax,
    .round = round_row,
    .error = error_row,
    .moments = moments_row,
};
