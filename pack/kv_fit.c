/*
 * The static 4-bit scale of a channel of keys: the range of 16 even levels with the least weighted
 * squared error over a sample. Tails are long, so that the best range is narrower than the
 * sample's, and not by the same on both sides; docs/accuracy.md has what that is worth.
 *
 * With the sample in ascending order and prefix sums of 1, x and x^2, the error of any range takes
 * 15 binary searches, whatever the size of the sample.
 */
#include "pack/kv_fit.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

enum { LEVELS = 16, SHRINKS = 32 };
static const double shrink = 0.93; /* of an end, per step: to 0.1 of it */

struct sample {
    const struct qt_kv_key *key; /* [n], ascending */
    /* [n + 1]: sums over the first i keys, x taken from the centre */
    const double *weight, *sum, *sum2;
    size_t n;
    double centre; /* the median */
};

/* From the lowest level to the highest, both as distances from the centre. */
struct range {
    double down, up;
};

static int ascending(const void *a, const void *b)
{
    const struct qt_kv_key *x = a, *y = b;
    if (x->x != y->x)
        return x->x < y->x ? -1 : 1;
    return (x->weight > y->weight) - (x->weight < y->weight);
}

/* The first of key[from..n) that is not below `bound`. */
static size_t first_above(const struct sample *s, size_t from, double bound)
{
    size_t end = s->n;
    while (from < end) {
        size_t mid = from + (end - from) / 2;
        if ((double)s->key[mid].x < bound)
            from = mid + 1;
        else
            end = mid;
    }
    return from;
}

static double error_of(const struct sample *s, struct range r)
{
    double step = (r.down + r.up) / (LEVELS - 1), error = 0;
    size_t first = 0;
    for (int q = 0; q < LEVELS; q++) {
        double level = q * step - r.down;
        size_t end = s->n;
        if (q < LEVELS - 1)
            end = first_above(s, first, s->centre + level + step / 2);
        error += s->sum2[end] - s->sum2[first] - 2 * level * (s->sum[end] - s->sum[first]) +
                 (s->weight[end] - s->weight[first]) * level * level;
        first = end;
    }
    return error;
}

static struct range search(const struct sample *s)
{
    const struct range all = {s->centre - (double)s->key[0].x,
                              (double)s->key[s->n - 1].x - s->centre};
    struct range best = all;
    double least = INFINITY, down = 1, up;
    for (int i = 0; i < SHRINKS; i++, down *= shrink) {
        up = 1;
        for (int j = 0; j < SHRINKS; j++, up *= shrink) {
            struct range r = {down * all.down, up * all.up};
            double error = error_of(s, r);
            if (error < least) {
                least = error;
                best = r;
            }
        }
    }
    return best;
}

void qt_kv_fit(float *scale, float *zero, struct qt_kv_key *key, size_t n, double *sums)
{
    double *weight = sums, *sum = weight + n + 1, *sum2 = sum + n + 1;
    struct sample s = {.key = key, .weight = weight, .sum = sum, .sum2 = sum2, .n = n};
    qsort(key, n, sizeof *key, ascending);
    s.centre = (double)key[n / 2].x;
    weight[0] = sum[0] = sum2[0] = 0;
    for (size_t i = 0; i < n; i++) {
        double w = (double)key[i].weight, d = (double)key[i].x - s.centre;
        weight[i + 1] = weight[i] + w;
        sum[i + 1] = sum[i] + w * d;
        sum2[i + 1] = sum2[i] + w * d * d;
    }
    struct range r = search(&s);
    *scale = (float)((r.down + r.up) / (LEVELS - 1));
    if (*scale < FLT_MIN) /* a constant, or as good as one */
        *scale = 1;
    *zero = (float)((r.down - s.centre) / (double)*scale);
}
