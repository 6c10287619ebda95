/* The errors of the choices, and matrices as the measurements see them. */
#include "verify/budget/budget.h"

#include <math.h>
#include <string.h>

/* Rounds all groups with plan `base` of `count` plans; error: [plan items][count]. in_turn: as
 * quantize does. */
static int round_all(double *error, struct budget *b, const struct qt_plan *plans, size_t count,
                     size_t base, bool in_turn, const struct qt_log *log, struct qt_err *err)
{
    const size_t items = b->plan[0].count;
    struct qt_candidates_options opt = {.plans = plans,
                                        .count = count,
                                        .base = base,
                                        .in_turn = in_turn,
                                        .data = b->opt->data,
                                        .backend = b->opt->data ? b->opt->data->backend : NULL,
                                        .log = log,
                                        .interrupted = b->opt->interrupted};
    bool *wanted;
    int rc;
    QT_TRY(qt_array_new(&wanted, items, sizeof *wanted, err));
    for (size_t i = 0; i < items; i++) {
        wanted[i] = b->group_of[i] != SIZE_MAX;
        if (b->rounded)
            qt_packed_free(&b->rounded[i]);
    }
    opt.wanted = wanted;
    rc = qt_candidates(error, b->rounded, b->ckpt, &opt, err);
done:
    qt_free(wanted);
    return rc;
}

/* Measurements have a scale of their own: an error counts relative to that of the base. */
static void add_errors(struct budget *b, const double *error, size_t i)
{
    const double base = b->opt->data ? error[b->base] : 1;
    struct group *g = &b->groups[b->group_of[i]];
    for (size_t c = 0; c < b->opt->nchoices && base > 0; c++)
        g->error[c] += (double)b->plan[0].items[i].tensor->count * error[c] / base;
}

/* Makes the errors of a group relative to that of the base. */
static void relate_errors(struct group *g, size_t base, size_t choices)
{
    const double all = g->error[base];
    for (size_t c = 0; c < choices && all > 0; c++)
        g->error[c] /= all;
}

/* True if no error and no divergence of a group is unknown. */
static bool is_measured(const struct budget *b)
{
    bool all = b->opt->data;
    for (size_t g = 0; g < b->ngroups; g++) {
        all = all && !isnan(b->groups[g].kld);
        for (size_t c = 0; c < b->opt->nchoices; c++)
            all = all && !isnan(b->groups[g].error[c]);
    }
    return all;
}

int budget_errors(struct budget *b, struct qt_err *err)
{
    const size_t items = b->plan[0].count, choices = b->opt->nchoices;
    double *error = NULL;
    int rc;
    if (b->opt->data)
        QT_TRY(qt_array_new(&b->rounded, items, sizeof *b->rounded, err));
    if (is_measured(b))
        return QT_OK;
    QT_TRY(qt_array_new(&error, items, choices * sizeof *error, err));
    QT_TRY(round_all(error, b, b->plan, choices, b->base, false, b->opt->log, err));
    for (size_t g = 0; g < b->ngroups; g++)
        memset(b->groups[g].error, 0, sizeof b->groups[g].error);
    for (size_t i = 0; i < items; i++)
        if (b->group_of[i] != SIZE_MAX)
            add_errors(b, error + i * choices, i);
    for (size_t g = 0; g < b->ngroups && b->opt->data; g++)
        relate_errors(&b->groups[g], b->base, choices);
done:
    qt_free(error);
    return rc;
}

int budget_round_chosen(struct budget *b, const struct qt_log *log, struct qt_err *err)
{
    const size_t items = b->plan[0].count;
    struct qt_plan plan = b->plan[0]; /* only its items are used */
    double *error = NULL;
    int rc;
    plan.items = NULL;
    QT_TRY(qt_array_new(&error, items, sizeof *error, err));
    QT_TRY(qt_array_new(&plan.items, items, sizeof *plan.items, err));
    for (size_t i = 0; i < items; i++) {
        const size_t g = b->group_of[i];
        plan.items[i] = b->plan[g == SIZE_MAX ? 0 : b->groups[g].choice].items[i];
    }
    rc = round_all(error, b, &plan, 1, 0, true, log, err);
done:
    qt_free(plan.items);
    qt_free(error);
    return rc;
}
