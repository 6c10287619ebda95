/* Shared by tests of the solver: correlated random data and a plain computation of E. */
#ifndef QT_TESTS_HESSIAN_FIXTURE_H
#define QT_TESTS_HESSIAN_FIXTURE_H

#include "hessian/hessian.h"
#include "random.h"

#include <cblas.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static inline void *must_alloc(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size);
    assert_non_null(p);
    return p;
}

static inline float *random_weights(size_t n, size_t k)
{
    float *w = must_alloc(n * k, sizeof *w);
    for (size_t i = 0; i < n * k; i++)
        w[i] = (float)(0.05 * normal());
    return w;
}

/* X^T X of tokens with correlated neighboring channels of different magnitudes. */
static inline double *random_hessian(size_t k, size_t tokens)
{
    double *h = must_alloc(k * k, sizeof *h), *x = must_alloc(k, sizeof *x);
    double *size = must_alloc(k, sizeof *size);
    for (size_t j = 0; j < k; j++)
        size[j] = exp(0.7 * normal());
    for (size_t t = 0; t < tokens; t++) {
        for (size_t j = 0; j < k; j++)
            x[j] = 0.5 * normal() + (j ? 0.85 * x[j - 1] : 0);
        for (size_t j = 0; j < k; j++)
            x[j] *= size[j];
        for (size_t i = 0; i < k; i++)
            for (size_t j = 0; j < k; j++)
                h[i * k + j] += x[i] * x[j];
    }
    free(x);
    free(size);
    return h;
}

/* Makes a channel dead. */
static inline void kill_channel(double *h, size_t k, size_t channel)
{
    for (size_t i = 0; i < k; i++)
        h[channel * k + i] = h[i * k + channel] = 0;
}

/* h as qt_factor_new defines it, in storage order: mean diagonal 1, then damped. */
static inline double *damped(const double *h, size_t k, double damp)
{
    double *out = must_alloc(k * k, sizeof *out), sum = 0;
    for (size_t j = 0; j < k; j++)
        sum += h[j * k + j];
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < k; j++)
            out[i * k + j] = (sum > 0 ? h[i * k + j] * (double)k / sum : 0) + (i == j ? damp : 0);
    return out;
}

/* The sum over rows of (w - q) h (w - q)^T. */
static inline double naive_error(const double *h, const float *w, const float *q, size_t n,
                                 size_t k)
{
    double sum = 0, *e = must_alloc(k, sizeof *e);
    for (size_t r = 0; r < n; r++) {
        for (size_t j = 0; j < k; j++)
            e[j] = (double)w[r * k + j] - (double)q[r * k + j];
        for (size_t i = 0; i < k; i++) {
            double he = 0;
            for (size_t j = 0; j < k; j++)
                he += h[i * k + j] * e[j];
            sum += e[i] * he;
        }
    }
    free(e);
    return sum;
}

static inline void expect_near(const char *what, double got, double want, double relative)
{
    if (!(fabs(got - want) <= relative * fabs(want)))
        fail_msg("%s: %.9g, expected %.9g", what, got, want);
}

/* Compares an objective that was updated in FP32 while it fell from `from`. */
static inline void expect_close(const char *what, double got, double want, double from)
{
    if (!(fabs(got - want) <= 1e-3 * want + 1e-6 * from))
        fail_msg("%s: %.9g, expected %.9g", what, got, want);
}

static inline int factor_elsewhere(struct qt_backend *be, float *h, float *v, bool *positive,
                                   const double *gram, const size_t *order, double scale,
                                   double damp, size_t k, struct qt_err *err)
{
    double *a = must_alloc(k * k, sizeof *a);
    (void)be;
    (void)err;
    *positive = true;
    for (size_t j = k; j-- > 0;)
        for (size_t i = j + 1; i-- > 0;) {
            const size_t row = order[i] > order[j] ? order[i] : order[j];
            const float value = (float)(gram[row * k + order[i] + order[j] - row] * scale);
            double sum = (double)value + (i == j ? damp : 0);
            h[i * k + j] = h[j * k + i] = value + (i == j ? (float)damp : 0);
            for (size_t l = j + 1; l < k; l++)
                sum -= a[i * k + l] * a[j * k + l];
            *positive = *positive && (i < j || sum > 0);
            a[i * k + j] = i == j ? sqrt(sum) : sum / a[j * k + j];
        }
    for (size_t i = 0; i < k * k; i++)
        v[i] = (float)a[i];
    free(a);
    return QT_OK;
}

static inline int regress_elsewhere(struct qt_backend *be, float *s, double *explained,
                                    const float *c, const float *v, const size_t *order,
                                    double scale, size_t m, size_t k, struct qt_err *err)
{
    float *x = must_alloc(m * k, sizeof *x);
    (void)be;
    (void)err;
    for (size_t i = 0; i < m * k; i++)
        x[i] = (float)((double)c[i / k * k + order[i % k]] * scale);
    for (int pass = 0; pass < 2; pass++)
        cblas_strsm(CblasRowMajor, CblasRight, CblasUpper, pass ? CblasNoTrans : CblasTrans,
                    CblasNonUnit, (int)m, (int)k, 1, v, (int)k, x, (int)k);
    *explained = 0;
    for (size_t i = 0; i < m * k; i++) {
        const size_t to = i / k * k + order[i % k];
        s[to] = x[i];
        *explained += (double)c[to] * (double)x[i];
    }
    free(x);
    return QT_OK;
}

static inline size_t room_elsewhere(struct qt_backend *be)
{
    (void)be;
    return SIZE_MAX;
}

/* A CPU backend with host = false: the solver processes all rows together. */
static inline struct qt_backend elsewhere(const struct qt_backend *cpu)
{
    struct qt_backend other = *cpu;
    other.host = false;
    other.room = room_elsewhere;
    other.factor = factor_elsewhere;
    other.regress = regress_elsewhere;
    return other;
}

/* Moves a factor to a backend whose memory is that of the host, or from there (NULL) before it is
 * freed. */
static inline void put_on(struct qt_factor *f, struct qt_backend *be)
{
    f->backend = be;
    f->backend_h = be ? f->h : NULL;
    f->backend_v = be ? f->v : NULL;
}

static inline struct qt_factor factor_of(const double *h, size_t k, size_t group, bool natural,
                                         double damp)
{
    struct qt_factor f;
    struct qt_err err = {0};
    struct qt_factor_options opt = {.damp = damp, .group = group, .storage_order = natural};
    if (qt_factor_new(&f, h, k, &opt, &err) < 0)
        fail_msg("factor of %zu channels, groups of %zu: %s", k, group, err.reason);
    return f;
}

#endif
