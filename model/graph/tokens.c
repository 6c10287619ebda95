/* Lists of the tokens that an expert processes, made from routing weights. */
#include "model/model.h"

#include <math.h>

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

/* The n-th largest of the weights that the tokens which did not choose the expert would have (or
 * the last, if there are fewer). *ties: how many of the first n have this weight. The bits of
 * numbers that are not negative are in the order of the numbers, so they are found some at a
 * time. */
static float nth_weight(size_t *ties, const float *weights, size_t m, size_t n)
{
    enum { LEVELS = 3, MOST = 1 << 11 };
    static const int shift[LEVELS] = {20, 10, 0};
    uint32_t found = 0, known = 0; /* bits */
    size_t others = 0;
    for (size_t i = 0; i < m; i++)
        others += weights[i] <= 0;
    n = qt_min_size(n, others);
    if (n == 0)
        return INFINITY;
    for (int level = 0; level < LEVELS; level++) {
        uint32_t count[MOST] = {0}, at = MOST - 1;
        const uint32_t mask = level ? (1 << 10) - 1 : MOST - 1;
        for (size_t i = 0; i < m; i++) {
            const uint32_t bits = qt_f32_bits(weights[i]) & 0x7fffffff;
            if (weights[i] <= 0 && (bits & known) == found)
                count[bits >> shift[level] & mask]++;
        }
        for (; n > count[at]; at--)
            n -= count[at];
        found |= at << shift[level];
        known |= mask << shift[level];
    }
    *ties = n;
    return qt_bits_f32(found);
}

/* The tokens that chose the expert: their number, and their mean squared routing weight. If there
 * are none, the square of the largest weight that a token would have. */
static size_t count_chosen(float *mean_square, const float *weights, size_t m)
{
    double sum = 0, largest = (double)SMALLEST;
    size_t chose = 0;
    for (size_t i = 0; i < m; i++) {
        const double s = (double)weights[i];
        chose += s > 0;
        sum += s > 0 ? s * s : 0;
        largest = -s > largest ? -s : largest;
    }
    *mean_square = (float)(chose ? sum / (double)chose : largest * largest);
    return chose;
}

/* Lists the tokens that chose the expert; no others stand in. */
static size_t list_chosen(struct qt_tokens *out, const float *weights, size_t m, size_t experts)
{
    out->count = 0;
    for (size_t i = 0; i < m; i++)
        if (weights[i * experts] > 0) {
            out->row[out->count] = (uint32_t)i;
            out->weight[out->count++] = weights[i * experts];
        }
    return out->count;
}

size_t qt_tokens_of_expert(struct qt_tokens *out, const float *weights, size_t m, size_t experts,
                           size_t expert, size_t least)
{
    float last = INFINITY, square, *own_weights = out->weight; /* which the list overwrites */
    if (least == 0)
        return list_chosen(out, weights + expert, m, experts);
    for (size_t i = 0; i < m; i++)
        own_weights[i] = weights[i * experts + expert];
    const size_t chose = count_chosen(&square, own_weights, m);
    const size_t missing = chose < least ? least - chose : 0, sampled = qt_min_size(missing, m);
    size_t ties = 0, part = 0; /* of m: sampled tokens are evenly spaced */
    if (missing)
        last = nth_weight(&ties, own_weights, m, missing);
    out->count = 0;
    for (size_t i = 0; i < m; i++) {
        const float s = own_weights[i];
        const bool joins = s <= 0 && (-s > last || (-s == last && ties > 0));
        const float own = s > 0 ? s : joins ? fmaxf(-s, SMALLEST) : 0;
        const bool of_layer = part + sampled >= m;
        part += of_layer ? sampled - m : sampled;
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
