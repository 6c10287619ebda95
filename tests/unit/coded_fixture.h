/* The functions of a backend for coded matrices, on host memory; they count their
 * calls. */
#ifndef QT_TESTS_CODED_FIXTURE_H
#define QT_TESTS_CODED_FIXTURE_H

#include "base/base.h"

#include <math.h>

static _Atomic size_t times_decoded, times_summed, times_tuned;

static inline int coded_decode(struct qt_backend *be, float *w, const struct qt_coded *c,
                               struct qt_err *err)
{
    (void)be;
    (void)err;
    for (size_t i = 0; i < c->n * c->k; i++) {
        const size_t at = i / c->k * qt_ceil_div(c->k, c->group) + i % c->k / c->group;
        w[i] = c->scale[at] * (c->value[c->code[i]] - (c->zero ? (float)c->zero[at] : 0));
    }
    times_decoded++;
    return QT_OK;
}

static inline int coded_decode_grad(struct qt_backend *be, float *dscale, const struct qt_coded *c,
                                    const float *dw, struct qt_err *err)
{
    const size_t groups = qt_ceil_div(c->k, c->group);
    (void)be;
    (void)err;
    for (size_t at = 0; at < c->n * groups; at++) {
        const size_t from = at % groups * c->group, end = qt_min_size(from + c->group, c->k);
        double sum = 0;
        for (size_t i = at / groups * c->k + from; i < at / groups * c->k + end; i++)
            sum += (double)(dw[i] * (c->value[c->code[i]] - (c->zero ? (float)c->zero[at] : 0)));
        dscale[at] += (float)sum;
    }
    times_summed++;
    return QT_OK;
}

static inline int coded_tune(struct qt_backend *be, const struct qt_tuned *t,
                             const struct qt_adam *a, struct qt_err *err)
{
    (void)be;
    (void)err;
    for (size_t i = 0; i < t->count; i++) {
        const double g = (double)ldexpf(t->grad[i], t->exp2) * (double)t->unit[i];
        const double m = a->beta1 * (double)t->m[i] + (1 - a->beta1) * g;
        const double v = a->beta2 * (double)t->v[i] + (1 - a->beta2) * g * g;
        t->m[i] = (float)m;
        t->v[i] = (float)v;
        t->delta[i] -= (float)(a->lr * (m / a->fix1) / (sqrt(v / a->fix2) + a->eps));
        const float value = t->start[i] + t->unit[i] * t->delta[i];
        const float size = fminf(fmaxf(t->start[i] < 0 ? -value : value, 0x1p-24f), 65504);
        const float scale = copysignf(qt_f16_to_f32(qt_f32_to_f16(size)), t->start[i]);
        t->scale[i] = t->start[i] == 0 ? 0 : ldexpf(scale, t->exp2);
    }
    times_tuned++;
    return QT_OK;
}

static inline void coded_functions(struct qt_backend *be)
{
    be->decode = coded_decode;
    be->decode_grad = coded_decode_grad;
    be->tune = coded_tune;
}

#endif
