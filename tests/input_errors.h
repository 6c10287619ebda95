/* Errors of channel blocks (base/backend.h, input_errors) by their definition: the reference of the
 * GPU's tests, and a backend's function for tests without one. */
#ifndef QT_TESTS_INPUT_ERRORS_H
#define QT_TESTS_INPUT_ERRORS_H

#include "pack/activations/plan.h"

#include <string.h>

/* e g e^T of a channel block with `width` channels. */
static inline double error_form(const float *e, const float *g, size_t width)
{
    double sum = 0;
    for (size_t i = 0; i < width; i++)
        for (size_t j = 0; j < width; j++)
            sum += (double)e[i] * (double)g[i * QT_ACT_BLOCK + j] * (double)e[j];
    return sum;
}

/* d[blocks] of one rounding of the tokens t[m][k], which are in packed order, scale and
 * rotation. */
static inline int errors_of(double *d, const float *t, const float *g, size_t m, struct qt_act *act,
                            struct qt_act_rounding how, struct qt_err *err)
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
    for (size_t b = 0; b < blocks; b++)
        for (size_t i = 0; i < m; i++)
            d[b] += error_form(e + i * k + b * QT_ACT_BLOCK, g + b * QT_ACT_BLOCK * QT_ACT_BLOCK,
                               qt_min_size(QT_ACT_BLOCK, k - b * QT_ACT_BLOCK));
done:
    qt_free(e);
    return rc;
}

static inline int input_errors_by_definition(struct qt_backend *be, double *d, const float *x,
                                             const float *g, size_t m, const struct qt_act *act,
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
    QT_TRY(qt_array_new(&own.bits, blocks, 1, err));
    QT_TRY(qt_array_new(&t, m, act->k * sizeof *t, err));
    QT_TRY(qt_act_arrange(t, x, m, act, err));
    for (size_t i = 0; i < count; i++)
        QT_TRY(errors_of(d + i * blocks, t, g, m, &own, how[i], err));
done:
    qt_free(own.bits);
    qt_free(t);
    return rc;
}

#endif
