/*
 * Models that show what kinds of groups cost in the model that quantize makes. There, the linears
 * behind a group compensate for its errors, for those of v_proj much better than for those of
 * down_proj. So the divergence of the model with this one group quantized overrates some kinds of
 * groups. A model is quantized for each kind, with more bits for this kind, to see how much the
 * divergence falls. With fewer bits for q, k or o it rises by more than in proportion to their
 * errors: that is measured for the kinds of which groups are to get fewer bits than the base has.
 */
#include "verify/budget/budget.h"

#include <math.h>
#include <stdlib.h>

/* The number of a group's decoder layer, as in a key that has been replaced by '*'; NaN: it has
 * none. */
static double layer_of(const char *key, const char *kind)
{
    const char *star = strchr(kind, '*');
    return star ? (double)strtoul(key + (star - kind), NULL, 10) : NAN;
}

static void set_depths(struct budget *b)
{
    double last = 0;
    for (size_t g = 0; g < b->ngroups; g++)
        last = fmax(last, layer_of(b->groups[g].key, b->kinds[b->groups[g].kind].key));
    for (size_t g = 0; g < b->ngroups; g++) {
        const double layer = layer_of(b->groups[g].key, b->kinds[b->groups[g].kind].key);
        b->groups[g].depth = isnan(layer) || last == 0 ? 0 : 2 * layer / last - 1;
    }
}

int budget_find_kinds(struct budget *b, struct qt_err *err)
{
    int rc = QT_OK;
    b->late.kld = NAN;
    for (size_t g = 0; g < b->ngroups; g++) {
        char *key;
        size_t k = 0;
        QT_TRY(budget_kind_key(&key, b->groups[g].key, err));
        while (k < b->nkinds && strcmp(b->kinds[k].key, key) != 0)
            k++;
        b->groups[g].kind = k;
        if (k < b->nkinds) {
            qt_free(key);
            continue;
        }
        rc = qt_array_grow(&b->kinds, &b->kinds_capacity, k + 1, sizeof *b->kinds, err);
        if (rc < 0) {
            qt_free(key);
            goto done;
        }
        b->kinds[b->nkinds++] = (struct kind){.key = key, .better.kld = NAN, .worse.kld = NAN};
    }
    set_depths(b);
done:
    return rc;
}

#define ALL SIZE_MAX

/* The choice that shows what a kind, or ALL, cost: the smallest with at most half of the errors of
 * the base, which most groups get that get more bits. The one with the least errors, if there is
 * none. */
static size_t better_choice(const struct budget *b, size_t kind)
{
    double error[BUDGET_CHOICES] = {0}, bytes[BUDGET_CHOICES] = {0};
    size_t best = 0;
    for (size_t g = 0; g < b->ngroups; g++) {
        if (kind != ALL && b->groups[g].kind != kind)
            continue;
        for (size_t c = 0; c < b->opt->nchoices; c++) {
            error[c] += b->groups[g].error[c];
            bytes[c] += (double)b->groups[g].bytes[c];
        }
    }
    const double half = error[b->base] / 2;
    for (size_t c = 1; c < b->opt->nchoices; c++) {
        const bool both = error[c] <= half && error[best] <= half;
        if (both ? bytes[c] < bytes[best] : error[c] < error[best])
            best = c;
    }
    return best;
}

/* By how much the sum of the divergences of the groups of a kind falls if the kind gets a choice;
 * it rises if the choice has more error than the base. */
static double promised_fall(const struct budget *b, size_t kind, size_t choice)
{
    double fall = 0;
    for (size_t i = 0; i < b->ngroups; i++) {
        const struct group *g = &b->groups[i];
        if (g->kind == kind && g->kld > 0 && g->error[b->base] > 0)
            fall += g->kld * (1 - g->error[choice] / g->error[b->base]);
    }
    return fall;
}

/* ---- measuring ------------------------------------------------------------------------------ */

/* Quantizes with group.choice, if *kld is unknown. */
static int measure(double *kld, double *se, struct budget *b, struct qt_err *err)
{
    int rc = QT_OK;
    if (isnan(*kld)) {
        QT_TRY(budget_measure_choice(kld, se, b, NULL, err));
        QT_TRY(budget_save(b, err));
    }
    QT_TRY(budget_observe(b, *kld, err));
done:
    return rc;
}

/* The base. */
static int measure_base(struct budget *b, struct qt_err *err)
{
    for (size_t g = 0; g < b->ngroups; g++)
        b->groups[g].choice = b->base;
    return measure(&b->whole, &b->whole_se, b, err);
}

/* The base, the groups of a kind with another choice. */
static int measure_probe(struct probe *probe, struct budget *b, size_t kind, struct qt_err *err)
{
    double se;
    for (size_t g = 0; g < b->ngroups; g++)
        b->groups[g].choice = b->groups[g].kind == kind ? probe->choice : b->base;
    budget_load_probe(probe, b, b->kinds[kind].key);
    return measure(&probe->kld, &se, b, err);
}

/* The base, the second half of the decoder layers with a better choice. */
static int measure_late(struct budget *b, struct qt_err *err)
{
    double se;
    bool any = false;
    b->late.choice = better_choice(b, ALL);
    for (size_t g = 0; g < b->ngroups; g++) {
        const bool late = b->groups[g].depth > 0;
        b->groups[g].choice = late ? b->late.choice : b->base;
        any |= late;
    }
    budget_load_probe(&b->late, b, BUDGET_LATE_KEY);
    return any ? measure(&b->late.kld, &se, b, err) : QT_OK;
}

int budget_measure_kinds(struct budget *b, struct qt_err *err)
{
    const struct qt_log *log = b->opt->log;
    const double steps = (double)b->nkinds + 2;
    int rc = QT_OK;
    qt_log_progress(log, "kinds", 0, steps);
    QT_TRY(measure_base(b, err));
    for (size_t k = 0; k < b->nkinds; k++) {
        struct probe *better = &b->kinds[k].better;
        better->choice = better_choice(b, k);
        qt_log_progress(log, "kinds", (double)k + 1, steps);
        if (promised_fall(b, k, better->choice) > 0)
            QT_TRY(measure_probe(better, b, k, err));
    }
    qt_log_progress(log, "kinds", steps - 1, steps);
    QT_TRY(measure_late(b, err));
    qt_log_progress(log, "kinds", steps, steps);
done:
    return rc;
}

/* Returns the choice with the most error for the kind, among those that its groups have; the base
 * if none has more error than the base. */
static size_t worst_chosen(const struct budget *b, size_t kind)
{
    double least = 0;
    size_t worst = b->base;
    for (size_t g = 0; g < b->ngroups; g++) {
        const double fall =
            b->groups[g].kind == kind ? promised_fall(b, kind, b->groups[g].choice) : 0;
        if (fall < least) {
            least = fall;
            worst = b->groups[g].choice;
        }
    }
    return worst;
}

int budget_measure_worse(size_t *measured, struct budget *b, struct qt_err *err)
{
    static const char step[] = "kinds with fewer bits";
    const struct qt_log *log = b->opt->log;
    size_t *wanted = NULL, count = 0;
    int rc;
    *measured = 0;
    QT_TRY(qt_array_new(&wanted, b->nkinds, sizeof *wanted, err));
    for (size_t k = 0; k < b->nkinds; k++) {
        const size_t worst = worst_chosen(b, k);
        if (worst == b->base || !isnan(b->kinds[k].worse.kld))
            continue;
        b->kinds[k].worse.choice = worst;
        wanted[count++] = k;
    }
    for (; *measured < count; ++*measured) {
        const size_t k = wanted[*measured];
        qt_log_progress(log, step, (double)*measured, (double)count);
        QT_TRY(measure_probe(&b->kinds[k].worse, b, k, err));
    }
    if (count)
        qt_log_progress(log, step, (double)count, (double)count);
done:
    qt_free(wanted);
    return rc;
}
