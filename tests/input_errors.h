/* Errors of channel blocks (base/backend.h, input_errors) by their definition: the reference of the
 * GPU's tests, and a backend's function for tests without one. */
#ifndef QT_TESTS_INPUT_ERRORS_H
#define QT_TESTS_INPUT_ERRORS_H

#include "pack/activations/plan.h"

#include <string.h>

/* g[blocks][128][128] += the Gram matrices of the channel blocks of w[n][k] (block_grams). */
static inline void block_grams_by_definition(float *g, const float *w, size_t n, size_t k)
{
    for (size_t i = 0; i < k; i++)
        for (size_t j = i - i % QT_ACT_BLOCK; j < k && j / QT_ACT_BLOCK == i / QT_ACT_BLOCK; j++) {
            double sum = 0;
            for (size_t r = 0; r < n; r++)
                sum += (double)w[r * k + i] * (double)w[r * k + j];
            g[i * QT_ACT_BLOCK + j % QT_ACT_BLOCK] += (float)sum;
        }
}

/* e g e^T of a channel block with `width` channels. */
static inline double error_form(const float *e, const float *g, size_t width)
{
    double sum = 0;
    for (size_t i = 0; i < width; i++)
        for (size_t j = 0; j < width; j++)
            sum += (double)e[i] * (double)g[i * QT_ACT_BLOCK + j] * (double)e[j];
    return sum;
}

/* d[blocks] and squares[blocks] of one rounding of the tokens t[m][k], which are in packed order,
 * scale and rotation. */
static inline int errors_of(double *d, double *squares, const float *t, const float *g, size_t m,
                            struct qt_act *act, struct qt_act_rounding how, struct qt_err *err)
{
    const size_t k = act->k, blocks = qt_ceil_div(k, QT_ACT_BLOCK);
    float *e = NULL;
    int rc;
    QT_TRY(qt_array_new(&e, m, k * sizeof *e, err));
    memset(act->bits, (int)how.bits, blocks);
    act->clip = how.clip;
    QT_TRY(qt_act_round(e, t, m, act, err));
    for (size_t i = 0; i < m * k; i++)
        e[i] -= t[i];
    for (size_t b = 0, at = 0; b < blocks; b++, at += QT_ACT_BLOCK)
        for (size_t i = 0; i < m; i++) {
            const float *own = e + i * k + at;
            const size_t width = qt_min_size(QT_ACT_BLOCK, k - at);
            d[b] += error_form(own, g + at * QT_ACT_BLOCK, width);
            for (size_t j = 0; j < width; j++)
                squares[b] += (double)own[j] * (double)own[j];
        }
done:
    qt_free(e);
    return rc;
}

static inline int input_errors_by_definition(struct qt_backend *be, double *d, double *squares,
                                             const float *x, const float *g, size_t m,
                                             const struct qt_act *act,
                                             const struct qt_act_rounding *how, size_t count,
                                             struct qt_err *err)
{
    const size_t blocks = qt_ceil_div(act->k, QT_ACT_BLOCK);
    struct qt_act own = *act;
    float *t = NULL;
    int rc;
    (void)be;
    own.bits = NULL;
    memset(d, 0, count * blocks * sizeof *d);
    memset(squares, 0, count * blocks * sizeof *squares);
    QT_TRY(qt_array_new(&own.bits, blocks, 1, err));
    QT_TRY(qt_array_new(&t, m, act->k * sizeof *t, err));
    QT_TRY(qt_act_arrange(t, x, m, act, err));
    for (size_t i = 0; i < count; i++)
        QT_TRY(errors_of(d + i * blocks, squares + i * blocks, t, g, m, &own, how[i], err));
done:
    qt_free(own.bits);
    qt_free(t);
    return rc;
}

#endif
