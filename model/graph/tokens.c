/* Lists of tokens that go through an expert of a mixture, made of their shares. */
#include "model/model.h"

#include <stdlib.h>

int qt_tokens_new(struct qt_tokens *out, size_t m, struct qt_err *err)
{
    int rc;
    *out = (struct qt_tokens){0};
    QT_TRY(qt_array_new(&out->row, m, sizeof *out->row, err));
    QT_TRY(qt_array_new(&out->share, m, sizeof *out->share, err));
done:
    return rc;
}

void qt_tokens_free(struct qt_tokens *t)
{
    qt_free(t->row);
    qt_free(t->share);
    *t = (struct qt_tokens){0};
}

/* Least share of a token that does not choose the expert: sums of them must not vanish. */
static const float SMALLEST = 0x1p-10f;

static int descending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The share that the n-th of those that do not choose the expert would have, or the last if there
 * are fewer; *ties: how many of those with this share are among the n. sorted: room for m. */
static float nth_share(size_t *ties, float *sorted, const float *share, size_t m, size_t experts,
                       size_t n)
{
    size_t others = 0;
    for (size_t i = 0; i < m; i++)
        if (share[i * experts] <= 0)
            sorted[others++] = -share[i * experts];
    n = qt_min_size(n, others);
    if (n == 0)
        return INFINITY;
    qsort(sorted, others, sizeof *sorted, descending);
    for (*ties = 1; *ties < n && sorted[n - 1 - *ties] == sorted[n - 1];)
        ++*ties;
    return sorted[n - 1];
}

size_t qt_tokens_of_expert(struct qt_tokens *out, const float *share, size_t m, size_t experts,
                           size_t expert, size_t least)
{
    float last = INFINITY;
    size_t chose = 0, ties = 0;
    share += expert;
    for (size_t i = 0; i < m; i++)
        chose += share[i * experts] > 0;
    if (chose < least)
        last = nth_share(&ties, out->share, share, m, experts, least - chose);
    out->count = 0;
    for (size_t i = 0; i < m; i++) {
        const float s = share[i * experts];
        const bool joins = s <= 0 && (-s > last || (-s == last && ties > 0));
        if (!(s > 0 || joins))
            continue;
        ties -= joins && -s == last;
        out->row[out->count] = (uint32_t)i;
        out->share[out->count++] = s > 0 ? s : fmaxf(-s, SMALLEST);
    }
    return chose;
}

void qt_tokens_slice(struct qt_tokens *out, const struct qt_tokens *all, size_t at, size_t m)
{
    out->count = 0;
    for (size_t i = 0; i < all->count; i++)
        if (all->row[i] >= at && all->row[i] < at + m) {
            out->row[out->count] = all->row[i] - (uint32_t)at;
            out->share[out->count++] = all->share[i];
        }
}
