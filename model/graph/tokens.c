/* Lists of the tokens that an expert processes, made from routing weights. */
#include "model/model.h"

#include <math.h>
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

/* The squared weight of a token that stands for the layer, relative to the mean of the tokens that
 * chose the expert. */
static const float OF_LAYER = 0.25f;

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

/* The tokens that chose the expert: their number, and their mean squared routing weight. If there
 * are none, the square of the largest weight that a token would have. */
static size_t count_chosen(float *mean_square, const float *weights, size_t m, size_t experts)
{
    double sum = 0, largest = (double)SMALLEST;
    size_t chose = 0;
    for (size_t i = 0; i < m; i++) {
        const double s = (double)weights[i * experts];
        chose += s > 0;
        sum += s > 0 ? s * s : 0;
        largest = fmax(largest, -s);
    }
    *mean_square = (float)(chose ? sum / (double)chose : largest * largest);
    return chose;
}

/* True for n of the m tokens, evenly spaced. */
static bool is_sampled(size_t i, size_t n, size_t m)
{
    return (i + 1) * n / m > i * n / m;
}

size_t qt_tokens_of_expert(struct qt_tokens *out, const float *weights, size_t m, size_t experts,
                           size_t expert, size_t least)
{
    float last = INFINITY, square;
    weights += expert;
    const size_t chose = count_chosen(&square, weights, m, experts);
    const size_t missing = chose < least ? least - chose : 0, sampled = qt_min_size(missing, m);
    size_t ties = 0;
    if (missing)
        last = nth_weight(&ties, out->weight, weights, m, experts, missing);
    out->count = 0;
    for (size_t i = 0; i < m; i++) {
        const float s = weights[i * experts];
        const bool joins = s <= 0 && (-s > last || (-s == last && ties > 0));
        const float own = s > 0 ? s : joins ? fmaxf(-s, SMALLEST) : 0;
        const bool of_layer = is_sampled(i, sampled, m);
        ties -= joins && -s == last;
        if (!(own > 0 || of_layer))
            continue;
        out->row[out->count] = (uint32_t)i;
        out->weight[out->count++] = of_layer ? sqrtf(own * own + OF_LAYER * square) : own;
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
