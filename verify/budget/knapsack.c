/* Multiple-choice knapsack: one choice for each group, least cost, within a number of bytes. */
#include "verify/budget/budget.h"

#include <math.h>

enum { MOST_UNITS = 1 << 16 };

static uint64_t gcd(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Bytes per step of the table. Sizes are multiples of large powers of two, so that the common
 * divisor often gives an exact result. */
static uint64_t find_unit(const struct budget *b)
{
    uint64_t unit = b->budget;
    for (size_t g = 0; g < b->ngroups; g++)
        for (size_t c = 0; c < b->opt->nchoices; c++)
            unit = gcd(unit, b->groups[g].bytes[c]);
    const uint64_t least = b->budget / MOST_UNITS + 1;
    return unit > least ? unit : least;
}

/* Spends what rounding up to units left over: one group after the other, the best gain per byte
 * first. */
static void spend_rest(struct budget *b, const double *cost)
{
    uint64_t used = 0;
    for (size_t g = 0; g < b->ngroups; g++)
        used += b->groups[g].bytes[b->groups[g].choice];
    for (;;) {
        size_t best_group = SIZE_MAX, best_choice = 0;
        double best = 0;
        for (size_t g = 0; g < b->ngroups; g++) {
            const struct group *one = &b->groups[g];
            const double *row = cost + g * BUDGET_CHOICES;
            for (size_t c = 0; c < b->opt->nchoices; c++) {
                const uint64_t now = one->bytes[one->choice], then = one->bytes[c];
                if (row[c] >= row[one->choice] || used - now + then > b->budget)
                    continue;
                const double more = then > now ? (double)(then - now) : 1;
                const double gain = (row[one->choice] - row[c]) / more;
                if (gain > best) {
                    best = gain;
                    best_group = g;
                    best_choice = c;
                }
            }
        }
        if (best_group == SIZE_MAX)
            return;
        struct group *one = &b->groups[best_group];
        used += one->bytes[best_choice] - one->bytes[one->choice];
        one->choice = best_choice;
    }
}

int budget_solve(struct budget *b, const double *cost, struct qt_err *err)
{
    const uint64_t unit = find_unit(b);
    const size_t units = (size_t)(b->budget / unit) + 1;
    double *least = NULL, *next = NULL, *swap;
    uint8_t *choice = NULL; /* [group][units]: the best choice, with at most so many units in all */
    size_t cells;
    int rc;
    if (qt_mul_overflow(&cells, b->ngroups, units))
        return qt_no_memory(err, NULL);
    QT_TRY(qt_array_new(&least, units, sizeof *least, err));
    QT_TRY(qt_array_new(&next, units, sizeof *next, err));
    QT_TRY(qt_array_new(&choice, cells, 1, err));
    for (size_t g = 0; g < b->ngroups; g++) {
        for (size_t u = 0; u < units; u++)
            next[u] = INFINITY;
        for (size_t c = 0; c < b->opt->nchoices; c++) {
            const uint64_t bytes = b->groups[g].bytes[c], need = bytes / unit + (bytes % unit != 0);
            for (size_t u = (size_t)need; need < units && u < units; u++) {
                const double sum = least[u - need] + cost[g * BUDGET_CHOICES + c];
                if (sum < next[u]) {
                    next[u] = sum;
                    choice[g * units + u] = (uint8_t)c;
                }
            }
        }
        swap = least;
        least = next;
        next = swap;
    }
    size_t u = units - 1;
    if (!isfinite(least[u])) {
        /* Rounding up made it fail: the caller has checked that the smallest choices fit. */
        for (size_t g = 0; g < b->ngroups; g++) {
            struct group *one = &b->groups[g];
            one->choice = 0;
            for (size_t c = 1; c < b->opt->nchoices; c++)
                if (one->bytes[c] < one->bytes[one->choice])
                    one->choice = c;
        }
    } else {
        for (size_t g = b->ngroups; g-- > 0;) {
            struct group *one = &b->groups[g];
            one->choice = choice[g * units + u];
            u -= (size_t)(one->bytes[one->choice] / unit + (one->bytes[one->choice] % unit != 0));
        }
    }
    spend_rest(b, cost);
done:
    qt_free(least);
    qt_free(next);
    qt_free(choice);
    return rc;
}
