/*
 * What a group costs in the model that quantize makes. There, the linears behind a group compensate
 * for its errors, for those of v_proj much better than for those of down_proj. So the divergence of
 * the model with this one group quantized overrates some kinds of groups. A model is quantized for
 * each kind, with more bits for this kind, to see how much the divergence falls.
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
        b->kinds[b->nkinds++] = (struct kind){.key = key, .kld = NAN};
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

/* The divergences of the groups of a kind together, and by how much the sum falls with the best
 * choice for the kind. */
static void promise(double *sum, double *fall, const struct budget *b, size_t kind)
{
    *sum = *fall = 0;
    for (size_t i = 0; i < b->ngroups; i++) {
        const struct group *g = &b->groups[i];
        const double kld = g->kind == kind ? fmax(g->kld, 0) : 0;
        *sum += kld;
        if (kld > 0 && g->error[b->base] > 0)
            *fall += kld * (1 - g->error[b->kinds[kind].best] / g->error[b->base]);
    }
}

/* kind: of the groups that get its best choice; SIZE_MAX: none. */
static int measure_with(double *kld, double *se, struct budget *b, size_t kind, struct qt_err *err)
{
    for (size_t g = 0; g < b->ngroups; g++)
        b->groups[g].choice = b->groups[g].kind == kind ? b->kinds[kind].best : b->base;
    int rc = budget_measure_choice(kld, se, b, NULL, err);
    return rc < 0 ? rc : budget_save(b, err);
}

int budget_measure_kinds(struct budget *b, struct qt_err *err)
{
    const struct qt_log *log = b->opt->log;
    const double steps = (double)b->nkinds + 1;
    double se, sum, fall;
    int rc = QT_OK;
    qt_log_progress(log, "kinds", 0, steps);
    if (isnan(b->whole))
        QT_TRY(measure_with(&b->whole, &b->whole_se, b, SIZE_MAX, err));
    for (size_t k = 0; k < b->nkinds; k++) {
        b->kinds[k].best = best_choice(b, k);
        budget_load_kind(b, k, b->kinds[k].best);
        promise(&sum, &fall, b, k);
        qt_log_progress(log, "kinds", (double)k + 1, steps);
        if (isnan(b->kinds[k].kld) && fall > 0)
            QT_TRY(measure_with(&b->kinds[k].kld, &se, b, k, err));
    }
    qt_log_progress(log, "kinds", steps, steps);
done:
    return rc;
}

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
        promise(&sum, &fall, b, k);
        if (!(fall > 0) || isnan(b->kinds[k].kld))
            continue;
        divergences += b->kinds[k].kld * sum / fall;
        shares += sum / fall;
        squares += sum / fall * sum / fall;
    }
    if (!(shares > 1))
        return b->whole;
    const double weight = (shares - 1) * (shares - 1) / squares;
    return (b->whole + weight * divergences / (shares - 1)) / (1 + weight);
}

void budget_kind_factors(double *factor, const struct budget *b)
{
    /* How much of a quantized model's divergence is chance, how far the factors of kinds are from
     * their mean, and the least factor, in units of the mean. */
    static const double chance = 0.02, spread = 0.5, least = 0.125;
    const double whole = estimate_whole(b);
    double sum, fall, all = 0;
    for (size_t k = 0; k < b->nkinds; k++) {
        promise(&sum, &fall, b, k);
        all += sum;
    }
    const double mean = all > 0 && whole > 0 ? whole / all : 1;
    for (size_t k = 0; k < b->nkinds; k++) {
        promise(&sum, &fall, b, k);
        factor[k] = mean;
        if (!(fall > 0) || isnan(b->kinds[k].kld))
            continue;
        const double error = chance * whole / fall, prior = spread * mean;
        const double weight = prior * prior / (prior * prior + error * error);
        factor[k] += weight * ((whole - b->kinds[k].kld) / fall - mean);
        factor[k] = fmax(factor[k], least * mean);
    }
}
