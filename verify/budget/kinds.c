/*
 * What a group costs in the model that quantize makes. There, the linears behind a group compensate
 * for its errors, for those of v_proj much better than for those of down_proj. So the divergence of
 * the model with this one group quantized overrates some kinds of groups. A model is quantized for
 * each kind, with more bits for this kind, to see how much the divergence falls. With fewer bits
 * for q, k or o it rises by more than in proportion to their errors: that is measured for the kinds
 * of which groups are to get fewer bits than the base has.
 */
#include "verify/budget/budget.h"

#include <math.h>

int budget_find_kinds(struct budget *b, struct qt_err *err)
{
    int rc = QT_OK;
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
done:
    return rc;
}

/* The choice with the least errors for all groups of a kind together. */
static size_t best_choice(const struct budget *b, size_t kind)
{
    double sum[BUDGET_CHOICES] = {0};
    size_t best = 0;
    for (size_t g = 0; g < b->ngroups; g++)
        for (size_t c = 0; c < b->opt->nchoices && b->groups[g].kind == kind; c++)
            sum[c] += b->groups[g].error[c];
    for (size_t c = 1; c < b->opt->nchoices; c++)
        if (sum[c] < sum[best])
            best = c;
    return best;
}

/* The divergences of the groups of a kind together, and by how much the sum falls if the kind gets
 * a choice; it rises if the choice has more error than the base. */
static void promise(double *sum, double *fall, const struct budget *b, size_t kind, size_t choice)
{
    *sum = *fall = 0;
    for (size_t i = 0; i < b->ngroups; i++) {
        const struct group *g = &b->groups[i];
        const double kld = g->kind == kind ? fmax(g->kld, 0) : 0;
        *sum += kld;
        if (kld > 0 && g->error[b->base] > 0)
            *fall += kld * (1 - g->error[choice] / g->error[b->base]);
    }
}

/* ---- measuring ------------------------------------------------------------------------------ */

/* Quantizes the groups of `kind` with `choice` and all others with the base. */
static int measure_with(double *kld, double *se, struct budget *b, size_t kind, size_t choice,
                        struct qt_err *err)
{
    for (size_t g = 0; g < b->ngroups; g++)
        b->groups[g].choice = b->groups[g].kind == kind ? choice : b->base;
    int rc = budget_measure_choice(kld, se, b, NULL, err);
    return rc < 0 ? rc : budget_save(b, err);
}

static int measure_probe(struct probe *probe, struct budget *b, size_t kind, struct qt_err *err)
{
    double se;
    return measure_with(&probe->kld, &se, b, kind, probe->choice, err);
}

int budget_measure_kinds(struct budget *b, struct qt_err *err)
{
    const struct qt_log *log = b->opt->log;
    const double steps = (double)b->nkinds + 1;
    double sum, fall;
    int rc = QT_OK;
    qt_log_progress(log, "kinds", 0, steps);
    if (isnan(b->whole))
        QT_TRY(measure_with(&b->whole, &b->whole_se, b, SIZE_MAX, b->base, err));
    for (size_t k = 0; k < b->nkinds; k++) {
        struct probe *better = &b->kinds[k].better;
        better->choice = best_choice(b, k);
        budget_load_probe(better, b, k);
        promise(&sum, &fall, b, k, better->choice);
        qt_log_progress(log, "kinds", (double)k + 1, steps);
        if (isnan(better->kld) && fall > 0)
            QT_TRY(measure_probe(better, b, k, err));
    }
    qt_log_progress(log, "kinds", steps, steps);
done:
    return rc;
}

/* Returns the choice with the most error for the kind, among those that its groups have; the base
 * if none has more error than the base. */
static size_t worst_chosen(const struct budget *b, size_t kind)
{
    double sum, fall, least = 0;
    size_t worst = b->base;
    for (size_t g = 0; g < b->ngroups; g++) {
        if (b->groups[g].kind != kind)
            continue;
        promise(&sum, &fall, b, kind, b->groups[g].choice);
        if (fall < least) {
            least = fall;
            worst = b->groups[g].choice;
        }
    }
    return worst;
}

int budget_measure_worse(size_t *measured, struct budget *b, struct qt_err *err)
{
    const struct qt_log *log = b->opt->log;
    bool *wanted = NULL;
    size_t done = 0;
    int rc;
    *measured = 0;
    QT_TRY(qt_array_new(&wanted, b->nkinds, sizeof *wanted, err));
    for (size_t k = 0; k < b->nkinds; k++) {
        struct probe *worse = &b->kinds[k].worse;
        const size_t worst = worst_chosen(b, k);
        if (worst == b->base || !isnan(worse->kld))
            continue;
        worse->choice = worst;
        budget_load_probe(worse, b, k);
        wanted[k] = isnan(worse->kld);
        ++*measured;
    }
    for (size_t k = 0; k < b->nkinds; k++) {
        if (!wanted[k])
            continue;
        qt_log_progress(log, "kinds with fewer bits", (double)done++, (double)*measured);
        QT_TRY(measure_probe(&b->kinds[k].worse, b, k, err));
    }
    if (*measured)
        qt_log_progress(log, "kinds with fewer bits", (double)*measured, (double)*measured);
done:
    qt_free(wanted);
    return rc;
}

/* ---- factors -------------------------------------------------------------------------------- */

/*
 * The divergence of the model with the base, with less chance in it than in `whole`: the kinds
 * together cost as much as that. With m_k the divergence with the best choice for kind k, and a_k
 * the share of its cost that the best choice saves, sum (whole - m_k) / a_k = whole. The mean of
 * both estimates, weighted by how exact they are if all measured divergences are equally exact.
 */
static double estimate_whole(const struct budget *b)
{
    double sum, fall, divergences = 0, shares = 0, squares = 0;
    for (size_t k = 0; k < b->nkinds; k++) {
        const struct probe *better = &b->kinds[k].better;
        promise(&sum, &fall, b, k, better->choice);
        if (!(fall > 0) || isnan(better->kld))
            continue;
        divergences += better->kld * sum / fall;
        shares += sum / fall;
        squares += sum / fall * sum / fall;
    }
    if (!(shares > 1))
        return b->whole;
    const double weight = (shares - 1) * (shares - 1) / squares;
    return (b->whole + weight * divergences / (shares - 1)) / (1 + weight);
}

/* How far a factor is from what is expected of it before its measurement. */
struct prior {
    double expected, spread;
};

static double factor_of(const struct budget *b, size_t kind, const struct probe *probe,
                        double whole, struct prior prior)
{
    static const double chance = 0.02; /* how much of a quantized model's divergence is chance */
    double sum, fall;
    promise(&sum, &fall, b, kind, probe->choice);
    if (isnan(probe->kld) || fall == 0)
        return prior.expected;
    const double error = chance * whole / fall, square = prior.spread * prior.spread;
    const double weight = square / (square + error * error);
    return prior.expected + weight * ((whole - probe->kld) / fall - prior.expected);
}

void budget_kind_factors(struct kind_factor *factor, const struct budget *b)
{
    /* In units of the mean of the costs: how far costs are from it, how far rises are from costs,
     * and the least factor. */
    static const double costs = 0.5, rises = 1, least = 0.125;
    const double whole = estimate_whole(b);
    double sum, fall, all = 0;
    for (size_t k = 0; k < b->nkinds; k++) {
        promise(&sum, &fall, b, k, b->base);
        all += sum;
    }
    const double mean = all > 0 && whole > 0 ? whole / all : 1;
    for (size_t k = 0; k < b->nkinds; k++) {
        const struct kind *one = &b->kinds[k];
        struct kind_factor *f = &factor[k];
        f->cost = factor_of(b, k, &one->better, whole, (struct prior){mean, costs * mean});
        f->cost = fmax(f->cost, least * mean);
        f->rise = factor_of(b, k, &one->worse, whole, (struct prior){f->cost, rises * mean});
        f->rise = fmax(f->rise, least * mean);
    }
}
