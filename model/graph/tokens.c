/* Lists of the tokens that an expert processes, made from routing weights. */
#include "model/model.h"

#include <stdlib.h>

int qt_tokens_new(struct qt_tokens *out, size_t m, struct qt_err *err)
{
    int rc;
    *out = (struct qt_tokens){0};
    QT_TRY(qt_array_new(&out->row, m, sizeof *out->row, err));
    QT_TRY(qt_array_new(&out->weight, m, sizeof *out->weight, err));
done:
    return rc;
}

void qt_tokens_free(struct qt_tokens *t)
{
    qt_free(t->row);
    qt_free(t->weight);
    *t = (struct qt_tokens){0};
}

/* Lower bound for the weight of an added token, so that sums over added tokens do not vanish. */
static const float SMALLEST = 0x1p-10f;

static int descending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* Sorts the tokens that did not choose the expert by the weight they would have, descending, and
 * returns the weight of the n-th (or of the last, if there are fewer). *ties: how many of the first
 * n have this weight. sorted: room for m. */
static float nth_weight(size_t *ties, float *sorted, const float *weights, size_t m, size_t experts,
                        size_t n)
{
    size_t others = 0;
    for (size_t i = 0; i < m; i++)
        if (weights[i * experts] <= 0)
            sorted[others++] = -weights[i * experts];
    n = qt_min_size(n, others);
    if (n == 0)
        return INFINITY;
    qsort(sorted, others, sizeof *sorted, descending);
    for (*ties = 1; *ties < n && sorted[n - 1 - *ties] == sorted[n - 1];)
        ++*ties;
    return sorted[n - 1];
}

size_t qt_tokens_of_expert(struct qt_tokens *out, const float *weights, size_t m, size_t experts,
                           size_t expert, size_t least)
{
    float last = INFINITY;
    size_t chose = 0, ties = 0;
    weights += expert;
    for (size_t i = 0; i < m; i++)
        chose += weights[i * experts] > 0;
    if (chose < least)
        last = nth_weight(&ties, out->weight, weights, m, experts, least - chose);
    out->count = 0;
    for (size_t i = 0; i < m; i++) {
        const float s = weights[i * experts];
        const bool joins = s <= 0 && (-s > last || (-s == last && ties > 0));
        if (!(s > 0 || joins))
            continue;
        ties -= joins && -s == last;
        out->row[out->count] = (uint32_t)i;
        out->weight[out->count++] = s > 0 ? s : fmaxf(-s, SMALLEST);
    }
    return chose;
}

void qt_tokens_slice(struct qt_tokens *out, const struct qt_tokens *all, size_t at, size_t m)
{
    out->count = 0;
    for (size_t i = 0; i < all->count; i++)
        if (all->row[i] >= at && all->row[i] < at + m) {
            out->row[out->count] = all->row[i] - (uint32_t)at;
            out->weight[out->count++] = all->weight[i];
        }
}
