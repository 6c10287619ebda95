/*
 * Vector arithmetic of the CPU backend: all operations that are not matrix products.
 *
 * math.c is compiled for several instruction sets (function multiversioning) and gives the same
 * bits on all of them: sums use a fixed number of lanes, the lanes are added in a fixed order, and
 * the build forbids contraction of a*b+c.
 */
#ifndef QT_KERNELS_CPU_MATH_H
#define QT_KERNELS_CPU_MATH_H

#include "base/base.h"

/*
 * Returns e^x. The error is below 1.1 ulp (measured over all floats), also for subnormal results.
 * Exactly 1 at 0; 0 below -104; infinity from 88.73 on; NaN for NaN. Branch-free, so that loops
 * vectorize.
 */
static inline float cpu_exp(float x)
{
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    /* n = round(x / ln 2): adding 1.5 * 2^23 leaves the integer in the low mantissa bits. */
    float t = x * 0x1.715476p+0f + 0x1.8p+23f;
    int32_t n = (int32_t)(qt_f32_bits(t) - 0x4b400000u);
    float k = t - 0x1.8p+23f;
    /* r = x - n ln 2 in two parts; the first has 15 significant bits: k * hi is exact. */
    float r = x - k * 0x1.62e4p-1f;
    r = r - k * 0x1.7f7d1cp-20f;
    /* (e^r - 1 - r) / r^2 on |r| <= ln(2)/2, weighted minimax fit, relative error 3e-9. */
    float p = 0x1.6a23c0p-10f;
    p = p * r + 0x1.123a22p-7f;
    p = p * r + 0x1.5558f4p-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = (p * r * r + r) + 1.0f;
    /* 2^n in two factors: n reaches -150 and 128; only the last product can round. */
    int32_t half = n >> 1;
    float a = qt_bits_f32((uint32_t)(half + 127) << 23);
    float b = qt_bits_f32((uint32_t)(n - half + 127) << 23);
    return p * a * b;
}

/* Returns tanh(x), error below 2 ulp. */
static inline float cpu_tanh(float x)
{
    float s = x * x;
    /* (tanh(x)/x - 1) / x^2 as a polynomial in x^2 on |x| <= 0.625, error 4e-9. */
    float p = -0x1.76ab88p-8f;
    p = p * s + 0x1.5256b4p-6f;
    p = p * s - 0x1.b84442p-5f;
    p = p * s + 0x1.110768p-3f;
    p = p * s - 0x1.555534p-2f;
    float small = p * s * x + x;
    float big = 1.0f - 2.0f / (cpu_exp(2.0f * fabsf(x)) + 1.0f);
    big = x < 0.0f ? -big : big;
    return fabsf(x) < 0.625f ? small : big;
}

/* Returns erf(x), absolute error below 1.5e-7. */
static inline float cpu_erf(float x)
{
    float a = fabsf(x), s = x * x;
    /* erf(x)/x as a polynomial in x^2 on |x| <= 1. */
    float p = 0x1.4ae4aap-14f;
    p = p * s - 0x1.a485dep-11f;
    p = p * s + 0x1.5419f4p-8f;
    p = p * s - 0x1.b7fbb4p-6f;
    p = p * s + 0x1.ce2d20p-4f;
    p = p * s - 0x1.81273ep-2f;
    p = p * s + 0x1.20dd74p+0f;
    /* ln(erfc(a)) on 1 <= a <= 4; erfc(4) is below half an ulp of 1. */
    float c = a > 4.0f ? 4.0f : a;
    float q = 0x1.852f2cp-13f;
    q = q * c - 0x1.814dfap-9f;
    q = q * c + 0x1.6542aep-6f;
    q = q * c - 0x1.a60acap-4f;
    q = q * c - 0x1.46c57ap-1f;
    q = q * c - 0x1.2085b6p+0f;
    q = q * c - 0x1.72db92p-12f;
    float big = 1.0f - cpu_exp(q);
    big = x < 0.0f ? -big : big;
    return a < 1.0f ? p * x : big;
}

/* Elementwise functions of arrays of n floats. */

/* y = act(gate) * up; up = NULL: y = act(gate). y may be gate. */
void cpu_activate(float *y, const float *gate, const float *up, enum qt_act_kind kind, size_t n);
/* y += x */
void cpu_add(float *y, const float *x, size_t n);
/* y = x - y */
void cpu_subtract(float *y, const float *x, size_t n);
/* y *= factor */
void cpu_scale(float *y, float factor, size_t n);
/* y = cap * tanh(x / cap); y may be x. */
void cpu_softcap(float *y, const float *x, float cap, size_t n);
/* y = qt_kv4_round(x, grid) */
void cpu_kv4_round(float *y, const float *x, struct qt_kv4_grid grid, size_t n);

/* Gradient of cpu_activate: dgate and dup from dy; dup is NULL if up is. dgate and dup may be any
 * of the inputs. */
void cpu_activate_grad(float *dgate, float *dup, const float *dy, const float *gate,
                       const float *up, enum qt_act_kind kind, size_t n);
/* Returns the sum of (y - target)^2; d = factor * (y - target). d may be y. */
double cpu_square_error(float *d, const float *y, const float *target, float factor, size_t n);
/* d *= derivative of cpu_softcap at the point where its result is y. */
void cpu_softcap_grad(float *d, const float *y, float cap, size_t n);

/* Norm of one row of width n; y may be x; bias may be NULL. */
void cpu_norm(float *y, const float *x, const float *w, const float *bias, enum qt_norm_kind kind,
              float eps, size_t n);

/* Gradient of cpu_norm for one row: dx (may be dy), and dw[n] += dy * normalized x unless dw is
 * NULL. */
void cpu_norm_grad(float *dx, double *dw, const float *dy, const float *x, const float *w,
                   enum qt_norm_kind kind, float eps, size_t n);

/* Rotates one token x[heads][dim] in place: pairs (i, i + half) of a head, or (2i, 2i + 1) if
 * interleaved, i < half. */
void cpu_rope(float *x, const float *cos, const float *sin, size_t heads, size_t dim, size_t half,
              bool interleaved);

/* x[i] = e^(x[i] - max x), not normalized. Returns the sum, at least 1 (n > 0, x finite). */
double cpu_softmax(float *x, size_t n);

/* Gradient of a softmax with result p: d = p * (d - sum p d). */
void cpu_softmax_grad(float *d, const float *p, size_t n);

/* Statistics of a row of logits. */
struct cpu_row_stats {
    float max;
    double sum; /* sum of e^(x - max) */
    size_t top; /* lowest index of the maximum */
};
struct cpu_row_stats cpu_row_stats(const float *x, size_t n);
/* Returns the sum over i of e^(r[i] - max) * (r[i] - x[i]). */
double cpu_cross_sum(const float *r, const float *x, float max, size_t n);
/* y = e^(x - max) * factor; y may be x. */
void cpu_exp_scaled(float *y, const float *x, float max, float factor, size_t n);
/* y -= e^(x - max) * factor */
void cpu_exp_subtract(float *y, const float *x, float max, float factor, size_t n);

#endif
