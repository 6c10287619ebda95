/* Divergences of models in which a group is quantized, or all are. */
#include "verify/budget/budget.h"

#include <math.h>

#define ALL SIZE_MAX

/* The rounded matrix that takes the place of a tensor; NULL: there is none. */
static const struct qt_packed *find_changed(void *ctx, const char *name)
{
    const struct budget_changed *c = ctx;
    const struct budget *b = c->budget;
    const struct qt_plan_item *item = qt_plan_find(&b->plan[0], name);
    const size_t i = item ? (size_t)(item - b->plan[0].items) : 0;
    const size_t group = item ? b->group_of[i] : SIZE_MAX;
    return group == SIZE_MAX || (c->group != ALL && c->group != group) ? NULL : &b->rounded[i];
}

struct qt_weights budget_changed_weights(struct budget_changed *out, const struct budget *b,
                                         size_t group)
{
    *out = (struct budget_changed){
        .weights = {.source = qt_weights_of_ckpt(b->ckpt), .find = find_changed, .ctx = out},
        .budget = b,
        .group = group};
    return qt_weights_replaced(&out->weights);
}

static int measure(double *kld, double *se, const struct budget *b, size_t group,
                   const struct qt_calibration *windows, struct qt_err *err)
{
    const struct qt_eval_options eval = {.seqlen = windows->seqlen};
    const struct qt_weights source = qt_weights_of_ckpt(b->ckpt);
    struct budget_changed changed;
    const struct qt_weights w = budget_changed_weights(&changed, b, group);
    struct qt_eval_report report;
    int rc = qt_eval(&report, &w, &source, windows->ids, windows->samples * windows->seqlen, &eval,
                     windows->backend, err);
    if (rc < 0)
        return rc;
    *kld = report.kld_mean;
    *se = report.kld_se;
    return QT_OK;
}

int budget_measure_choice(double *kld, double *se, struct budget *b, const struct qt_log *log,
                          struct qt_err *err)
{
    int rc = budget_round_chosen(b, log, err);
    return rc < 0 ? rc : measure(kld, se, b, ALL, &b->opt->checked, err);
}

int budget_measure(struct budget *b, struct qt_err *err)
{
    const struct qt_budget_options *o = b->opt;
    size_t measured;
    double se;
    int rc;
    do {
        QT_TRY(budget_measure_pass(&measured, b, err));
        if (measured)
            QT_TRY(budget_save(b, err));
    } while (measured);
    /* The others are no linears of decoder layers. */
    for (size_t g = 0; g < b->ngroups; g++) {
        qt_log_progress(o->log, "measure", (double)g, (double)b->ngroups);
        if (!isnan(b->groups[g].kld))
            continue;
        if (o->interrupted && o->interrupted())
            QT_TRY(qt_fail(err, QT_E_INTERRUPTED, NULL, NULL, "interrupted"));
        QT_TRY(measure(&b->groups[g].kld, &se, b, g, &o->measured, err));
        QT_TRY(budget_save(b, err));
    }
    qt_log_progress(o->log, "measure", (double)b->ngroups, (double)b->ngroups);
done:
    return rc;
}
