/*
 * Arrangements of an input's channels: their order and their factors.
 *
 * Order. By quantile: channels are sorted by their 99.9 % quantile, descending (ties: absmax, then
 * index), so that outlier channels share channel blocks, which then get 8 bits (channel permutation
 * of COMET, arXiv 2410.12168). Attention outputs are permuted only within a head, in the same way
 * in all heads that read one value head. Products of the MLP are permuted freely. In both cases the
 * rows of the producing linears are stored in that order, so inference needs no gather. The other
 * inputs are gathered by the norm in front of them or, without a norm, by the activation quantizer.
 * Source order: better if all channel blocks have 4 bits, and free.
 *
 * Factors. Smoothed: with s[c] = sqrt(x[c] / w[c]) divided by its median over the channels, where
 * x[c] is the RMS of the activations and w[c] that of the weights, channel c is divided by the
 * power of two nearest to s[c], and its weights are multiplied by it (SmoothQuant, arXiv
 * 2211.10438, with alpha = 1/2). Channels with s[c] between 1 / smooth and smooth keep the factor
 * 1. With rotated blocks this lowers the errors of activations and of weights that are rounded to
 * nearest: both grow with the product of the block's sum of x^2 and its sum of w^2.
 */
#include "pack/activations/planner.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST_EXP2 = 8 }; /* of a factor: values and norm weights stay inside the range of FP16 */

struct qt_act_rank {
    double quantile, balance; /* balance: log2 s[c] */
    float absmax;
    uint32_t channel;
};

static int by_outliers(const void *a, const void *b)
{
    const struct qt_act_rank *x = a, *y = b;
    if (x->quantile != y->quantile)
        return x->quantile < y->quantile ? 1 : -1;
    if (x->absmax != y->absmax)
        return x->absmax < y->absmax ? 1 : -1;
    return (x->channel > y->channel) - (x->channel < y->channel);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Channels that one row of the value projection produces must have the same rank and factor: each
 * gets the largest of their quantiles and the geometric mean of their s[c]. */
static int merge_ranks(struct qt_act_rank *rank, const struct qt_act_planner *p, int i, size_t k,
                       struct qt_err *err)
{
    size_t *first = NULL, *count = NULL; /* of the channels of a row */
    int rc;
    if (i != 1)
        return QT_OK;
    QT_TRY(qt_array_new(&first, k, sizeof *first, err));
    QT_TRY(qt_array_new(&count, k, sizeof *count, err));
    for (size_t c = 0; c < k; c++) {
        const size_t row = qt_model_feed_row(p->model, i, c);
        if (count[row]++ == 0) {
            first[row] = c;
            continue;
        }
        struct qt_act_rank *one = &rank[first[row]];
        one->quantile = fmax(one->quantile, rank[c].quantile);
        one->absmax = fmaxf(one->absmax, rank[c].absmax);
        one->balance += rank[c].balance;
    }
    for (size_t row = 0; row < k; row++)
        if (count[row])
            rank[first[row]].balance /= (double)count[row];
    for (size_t c = 0; c < k; c++) {
        rank[c] = rank[first[qt_model_feed_row(p->model, i, c)]];
        rank[c].channel = (uint32_t)c;
    }
done:
    qt_free(first);
    qt_free(count);
    return rc;
}

/* log2 sqrt(x / w) from the sums of squares. NaN for channels without activations or weights. */
static double balance_of(double x2, double w2)
{
    return x2 > 0 && w2 > 0 && isfinite(x2 / w2) ? log2(x2 / w2) / 4 : NAN;
}

/* Subtracts the median. NaN becomes 0. */
static int center_balance(struct qt_act_rank *rank, size_t k, struct qt_err *err)
{
    size_t count = 0;
    double *value;
    int rc = qt_array_new(&value, k, sizeof *value, err);
    if (rc < 0)
        return rc;
    for (size_t c = 0; c < k; c++)
        if (!isnan(rank[c].balance))
            value[count++] = rank[c].balance;
    qsort(value, count, sizeof *value, by_value);
    for (size_t c = 0; c < k; c++)
        rank[c].balance = isnan(rank[c].balance) ? 0 : rank[c].balance - value[count / 2];
    qt_free(value);
    return QT_OK;
}

int qt_act_ranks_new(struct qt_act_rank **out, const struct qt_act_planner *p, size_t layer, int i,
                     const double *weights2, struct qt_err *err)
{
    const struct qt_channels *from = &p->channels[i];
    size_t k = qt_act_input_at(p, layer, i)->k;
    struct qt_channels c = {0};
    int rc;
    QT_TRY(qt_array_new(out, k, sizeof **out, err));
    QT_TRY(qt_channels_new(&c, k, err));
    QT_TRY(p->be->download(p->be, c.absmax, from->absmax, k * sizeof *c.absmax, err));
    QT_TRY(p->be->download(p->be, c.sum2, from->sum2, k * sizeof *c.sum2, err));
    QT_TRY(p->be->download(p->be, c.hist, from->hist, k * QT_HIST_BINS * sizeof *c.hist, err));
    for (size_t j = 0; j < k; j++)
        (*out)[j] =
            (struct qt_act_rank){qt_hist_quantile(c.hist + j * QT_HIST_BINS, c.absmax[j], 0.999),
                                 balance_of(c.sum2[j], weights2[j]), c.absmax[j], (uint32_t)j};
    QT_TRY(center_balance(*out, k, err));
    QT_TRY(merge_ranks(*out, p, i, k, err));
done:
    qt_channels_free(&c);
    return rc;
}

static float factor_of(const struct qt_act_rank *rank, double smooth)
{
    if (fabs(rank->balance) <= log2(smooth))
        return 1;
    return ldexpf(1, -(int)fmin(fmax(rint(rank->balance), -LARGEST_EXP2), LARGEST_EXP2));
}

int qt_act_order(struct qt_act *act, const struct qt_act_planner *p, int i,
                 const struct qt_act_rank *ranks, bool sorted, bool smoothed, struct qt_err *err)
{
    const double smooth = qt_spec_value(p->spec, "smooth");
    size_t k = act->k, run = i == 1 ? qt_model_info(p->model)->head_dim : k;
    struct qt_act_rank *rank = NULL;
    int rc;
    QT_TRY(qt_array_new(&rank, k, sizeof *rank, err));
    memcpy(rank, ranks, k * sizeof *rank);
    for (size_t j = 0; j < k && smoothed; j++)
        rank[j].quantile *= (double)factor_of(&rank[j], smooth);
    for (size_t at = 0; at < k && sorted; at += run)
        qsort(rank + at, run, sizeof *rank, by_outliers);
    for (size_t j = 0; j < k; j++) {
        act->order[j] = rank[j].channel;
        act->factor[j] = smoothed ? factor_of(&rank[j], smooth) : 1;
    }
done:
    qt_free(rank);
    return rc;
}
