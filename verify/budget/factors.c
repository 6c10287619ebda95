/*
 * What groups cost in the model that quantize makes, found by regression. The divergence of a model
 * is taken for the sum over kinds of
 *
 *     cost * (errors up to those of the base) + rise * (errors beyond those of the base)
 *
 * where errors are in units of the divergence of the group alone, and for chance. Every model that
 * is quantized as a whole is an observation. Before the first one the cost of each kind is expected
 * to be near the mean of all kinds, and its rise near its cost.
 */
#include "verify/budget/budget.h"

#include <math.h>

/* The errors of the groups with group.choice, and times their depths. */
static void add_errors(struct model *m, const struct budget *b)
{
    for (size_t i = 0; i < b->ngroups; i++) {
        const struct group *g = &b->groups[i];
        if (!(g->kld > 0 && g->error[b->base] > 0))
            continue;
        const double relative = g->error[g->choice] / g->error[b->base];
        const double cost = g->kld * fmin(relative, 1), rise = g->kld * fmax(relative - 1, 0);
        m->error[g->kind].cost += cost;
        m->error[g->kind].rise += rise;
        m->deep[g->kind].cost += cost * g->depth;
        m->deep[g->kind].rise += rise * g->depth;
    }
}

int budget_observe(struct budget *b, double kld, struct qt_err *err)
{
    struct model *m;
    int rc;
    QT_TRY(qt_array_grow(&b->models, &b->models_capacity, b->nmodels + 1, sizeof *m, err));
    m = &b->models[b->nmodels];
    *m = (struct model){.kld = kld};
    QT_TRY(qt_array_new(&m->error, 2 * b->nkinds, sizeof *m->error, err));
    m->deep = m->error + b->nkinds;
    add_errors(m, b);
    b->nmodels++;
done:
    return rc;
}

/* Estimates of n numbers and their covariances [n][n]; scratch[n]. */
struct estimate {
    size_t n;
    double *value, *covariance, *scratch;
};

/* One step of recursive least squares. weights[n]: the sum of weights times numbers is `sum`, with
 * a standard error. */
static void learn(struct estimate *e, const double *weights, double sum, double se)
{
    double variance = se * se, residual = sum;
    for (size_t i = 0; i < e->n; i++) {
        e->scratch[i] = 0;
        for (size_t j = 0; j < e->n; j++)
            e->scratch[i] += e->covariance[i * e->n + j] * weights[j];
        variance += weights[i] * e->scratch[i];
        residual -= weights[i] * e->value[i];
    }
    for (size_t i = 0; i < e->n; i++) {
        e->value[i] += e->scratch[i] / variance * residual;
        for (size_t j = 0; j < e->n; j++)
            e->covariance[i * e->n + j] -= e->scratch[i] / variance * e->scratch[j];
    }
}

/* The mean of costs, if the model with the base is as divergent as was measured. */
static double mean_cost(const struct budget *b)
{
    double all = 0;
    for (size_t g = 0; g < b->ngroups; g++)
        all += fmax(b->groups[g].kld, 0);
    return all > 0 && b->whole > 0 ? b->whole / all : 1;
}

/* Estimates the factors of all kinds, and as the last number the slope: how much more a group costs
 * the deeper it is. Its effect on a model is that with the factors of the last call, which are 0 in
 * the first. */
static void estimate(struct estimate *e, double *weights, const struct kind_factor *last,
                     const struct budget *b, double mean)
{
    /* How far costs are from their mean and rises from costs, in units of the mean; how far slopes
     * are from 0; how much of a quantized model's divergence is chance. */
    static const double costs = 0.5, rises = 1, slopes = 0.5, chance = 0.02;
    const double square = mean * mean;
    const size_t slope = e->n - 1;
    memset(e->covariance, 0, e->n * e->n * sizeof *e->covariance);
    for (size_t i = 0; i < slope; i += 2) {
        double *row = e->covariance + i * e->n + i;
        e->value[i] = e->value[i + 1] = mean;
        row[0] = row[1] = row[e->n] = costs * costs * square;
        row[e->n + 1] = (costs * costs + rises * rises) * square;
    }
    e->value[slope] = 0;
    e->covariance[slope * e->n + slope] = slopes * slopes;
    for (size_t m = 0; m < b->nmodels; m++) {
        const struct model *model = &b->models[m];
        weights[slope] = 0;
        for (size_t k = 0; k < b->nkinds; k++) {
            weights[2 * k] = model->error[k].cost;
            weights[2 * k + 1] = model->error[k].rise;
            weights[slope] +=
                last[k].cost * model->deep[k].cost + last[k].rise * model->deep[k].rise;
        }
        learn(e, weights, model->kld, chance * model->kld);
    }
}

int budget_kind_factors(struct kind_factor *factor, double *slope, const struct budget *b,
                        struct qt_err *err)
{
    enum { PASSES = 4 };
    static const double least = 0.125, steepest = 0.75; /* in units of the mean */
    const double mean = mean_cost(b);
    struct estimate e = {.n = 2 * b->nkinds + 1};
    double *weights = NULL;
    int rc;
    QT_TRY(qt_array_new(&weights, e.n, sizeof *weights, err));
    QT_TRY(qt_array_new(&e.value, e.n, sizeof *e.value, err));
    QT_TRY(qt_array_new(&e.scratch, e.n, sizeof *e.scratch, err));
    QT_TRY(qt_array_new(&e.covariance, e.n * e.n, sizeof *e.covariance, err));
    memset(factor, 0, b->nkinds * sizeof *factor);
    for (int pass = 0; pass < PASSES; pass++) {
        estimate(&e, weights, factor, b, mean);
        for (size_t k = 0; k < b->nkinds; k++) {
            factor[k].cost = fmax(e.value[2 * k], least * mean);
            factor[k].rise = fmax(e.value[2 * k + 1], least * mean);
        }
    }
    *slope = fmax(-steepest, fmin(e.value[e.n - 1], steepest));
done:
    qt_free(weights);
    qt_free(e.value);
    qt_free(e.scratch);
    qt_free(e.covariance);
    return rc;
}
