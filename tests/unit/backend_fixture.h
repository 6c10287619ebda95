/* What the tests of the CPU backend share. */
#ifndef QT_TESTS_BACKEND_FIXTURE_H
#define QT_TESTS_BACKEND_FIXTURE_H

#include "kernels/kernels.h"
#include "random.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static inline float *random_floats(size_t n, double scale)
{
    float *x;
    assert_int_equal(qt_array_new(&x, n, sizeof *x, NULL), QT_OK);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)((uniform() + uniform() + uniform() - 1.5) * scale);
    return x;
}

static inline float *copy_floats(const float *x, size_t n)
{
    float *y = random_floats(n, 1);
    memcpy(y, x, n * sizeof *y);
    return y;
}

static inline struct qt_backend *open_cpu(void)
{
    struct qt_backend *be;
    assert_int_equal(qt_backend_cpu_open(&be, NULL), QT_OK);
    assert_memory_equal(be->name, "OpenBLAS ", 9);
    return be;
}

/* Key j in a 4-bit cache whose last token is i, channel d; exact: key 0 of the sequence. */
static inline float cached_key(const float *exact, size_t ldk, size_t i, size_t j, size_t d)
{
    size_t from = j == 0 ? 0 : j < 64 ? 1 : j / 64 * 64, end = j == 0 ? 1 : j / 64 * 64 + 64;
    float low = INFINITY, high = -INFINITY;
    for (size_t t = from; t < end && t <= i; t++) {
        low = fminf(low, exact[t * ldk + d]);
        high = fmaxf(high, exact[t * ldk + d]);
    }
    const struct qt_kv4_grid grid = qt_kv4_key_grid(qt_kv4_key_param(low, high));
    return j == 0 ? exact[d] : qt_kv4_round(exact[j * ldk + d], grid);
}

/* One query of one head: q[head_dim] at position i of its sequence, whose first key is k. With
 * exact keys, k is ignored. */
static inline void attend_reference(double *y, const float *q, const float *k, const float *exact,
                                    const float *v, size_t i, const struct qt_attention *a)
{
    size_t ldk = a->kv_heads * a->head_dim, end = a->both_ways ? a->seqlen : i + 1;
    double sum = 0, max = -INFINITY;
    double *s = calloc(end, sizeof *s);
    assert_non_null(s);
    for (size_t j = 0; j < end; j++) {
        for (size_t d = 0; d < a->head_dim; d++)
            s[j] += (double)q[d] * (double)a->scale *
                    (double)(exact ? cached_key(exact, ldk, i, j, d) : k[j * ldk + d]);
        if (a->softcap > 0)
            s[j] = (double)a->softcap * tanh(s[j] / (double)a->softcap);
        if (a->window && (j <= i ? i - j : j - i) >= a->window)
            s[j] = -INFINITY;
        max = s[j] > max ? s[j] : max;
    }
    for (size_t j = 0; j < end; j++)
        sum += s[j] = exp(s[j] - max);
    for (size_t d = 0; d < a->head_dim; d++) {
        y[d] = 0;
        for (size_t j = 0; j < end; j++)
            y[d] += s[j] / sum * (double)v[j * ldk + d];
    }
    free(s);
}

/* Random keys of m tokens with channels of different sizes and offsets, as FP16 can hold them. */
static inline float *random_exact_keys(size_t m, size_t ldk, double scale)
{
    float *x = random_floats(m * ldk, scale);
    for (size_t i = 0; i < m * ldk; i++)
        x[i] = qt_f16_to_f32(qt_f32_to_f16(x[i] * (float)(1 + i % ldk % 5) + (float)(i % ldk % 3)));
    return x;
}

/* The keys of m tokens as a cache holds them after the last token of each sequence. */
static inline float *cached_keys(const float *exact, size_t m, size_t ldk, size_t seqlen)
{
    float *k = random_floats(m * ldk, 1);
    for (size_t i = 0; i < m * ldk; i++) {
        size_t first = i / ldk / seqlen * seqlen;
        k[i] = cached_key(exact + first * ldk, ldk, seqlen - 1, i / ldk - first, i % ldk);
    }
    return k;
}

/* qt_backend.attention in FP64: each channel of y comes from that of v alone. */
static inline void attention_reference(double *y, const float *q, const float *k, const float *v,
                                       size_t m, const struct qt_attention *a)
{
    size_t ldq = a->heads * a->head_dim, ldk = a->kv_heads * a->head_dim;
    for (size_t i = 0; i < m; i++)
        for (size_t h = 0; h < a->heads; h++) {
            size_t first = i / a->seqlen * a->seqlen, kv = h / (a->heads / a->kv_heads);
            size_t at = i * ldq + h * a->head_dim, at_k = first * ldk + kv * a->head_dim;
            attend_reference(y + at, q + at, k + at_k, a->exact_keys ? a->exact_keys + at_k : NULL,
                             v + at_k, i - first, a);
        }
}

#endif
