/*
 * Order and smoothing of an input's channels.
 *
 * Order (channel permutation of COMET, arXiv 2410.12168): channels are sorted by their 99.9 %
 * quantile, descending (ties: absmax, then index), so that outlier channels share channel blocks.
 * Attention outputs are permuted only within a head, in the same way in all heads that read one
 * value head. Products of the MLP are permuted freely. In both cases the rows of the producing
 * linears are stored in that order, so inference needs no gather. The other inputs are gathered by
 * the norm in front of them or, without a norm, by the activation quantizer.
 *
 * Smoothing (SmoothQuant, arXiv 2211.10438, for outlier channels only): a channel whose quantile is
 * above `smooth` times the median is divided by a power of two, and its weights are multiplied by
 * the same number. Without smoothing, the other channels of an 8-bit block with outliers would have
 * only two or three levels.
 */
#include "pack/activations/planner.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct rank {
    double quantile;
    float absmax;
    uint32_t channel;
};

static int by_outliers(const void *a, const void *b)
{
    const struct rank *x = a, *y = b;
    if (x->quantile != y->quantile)
        return x->quantile < y->quantile ? 1 : -1;
    if (x->absmax != y->absmax)
        return x->absmax < y->absmax ? 1 : -1;
    return (x->channel > y->channel) - (x->channel < y->channel);
}

static int by_value(const void *a, const void *b)
{
    double x = ((const struct rank *)a)->quantile, y = ((const struct rank *)b)->quantile;
    return (x > y) - (x < y);
}

/* Channels that one row of the value projection produces must have the same rank: each gets the
 * largest of their statistics. */
static void merge_ranks(struct rank *rank, const struct qt_act_planner *p, int i, size_t k)
{
    for (size_t c = 0; c < k; c++)
        for (size_t d = 0; d < k && i == 1; d++)
            if (qt_model_feed_row(p->model, i, c) == qt_model_feed_row(p->model, i, d)) {
                rank[c].quantile = fmax(rank[c].quantile, rank[d].quantile);
                rank[c].absmax = fmaxf(rank[c].absmax, rank[d].absmax);
            }
}

static int ranks_new(struct rank **out, const struct qt_act_planner *p, size_t layer, int i,
                     struct qt_err *err)
{
    const struct qt_channels *from = &p->channels[i];
    size_t k = qt_act_input_at(p, layer, i)->k;
    struct qt_channels c = {0};
    int rc;
    QT_TRY(qt_array_new(out, k, sizeof **out, err));
    QT_TRY(qt_channels_new(&c, k, err));
    QT_TRY(p->be->download(p->be, c.absmax, from->absmax, k * sizeof *c.absmax, err));
    QT_TRY(p->be->download(p->be, c.hist, from->hist, k * QT_HIST_BINS * sizeof *c.hist, err));
    for (size_t j = 0; j < k; j++)
        (*out)[j] = (struct rank){qt_hist_quantile(c.hist + j * QT_HIST_BINS, c.absmax[j], 0.999),
                                  c.absmax[j], (uint32_t)j};
    merge_ranks(*out, p, i, k);
done:
    qt_channels_free(&c);
    return rc;
}

/* The power of two that brings `quantile` down to `limit`; limit = 0: no smoothing. */
static float smooth_factor(double quantile, double limit)
{
    if (!(limit > 0) || quantile <= limit)
        return 1;
    return ldexpf(1, -(int)fmin(ceil(log2(quantile / limit)), 60));
}

int qt_act_order(struct qt_act_planner *p, size_t layer, int i, struct qt_err *err)
{
    const struct qt_act_input *in = qt_act_input_at(p, layer, i);
    struct qt_act *act = qt_act_planned(p, layer, i);
    size_t k = in->k, run = i == 1 ? qt_model_info(p->model)->head_dim : k;
    struct rank *rank = NULL, *sorted = NULL;
    int rc;
    QT_TRY(ranks_new(&rank, p, layer, i, err));
    QT_TRY(qt_array_new(&sorted, k, sizeof *sorted, err));
    memcpy(sorted, rank, k * sizeof *sorted);
    qsort(sorted, k, sizeof *sorted, by_value);
    double limit = in->scale ? qt_spec_value(p->spec, "smooth") * sorted[k / 2].quantile : 0;
    memcpy(sorted, rank, k * sizeof *sorted);
    for (size_t j = 0; j < k; j++)
        sorted[j].quantile *= (double)smooth_factor(rank[j].quantile, limit);
    if (in->reorder && qt_spec_value(p->spec, "order") != 0)
        for (size_t at = 0; at < k; at += run)
            qsort(sorted + at, run, sizeof *sorted, by_outliers);
    for (size_t j = 0; j < k; j++) {
        act->order[j] = sorted[j].channel;
        act->factor[j] = smooth_factor(rank[sorted[j].channel].quantile, limit);
    }
done:
    qt_free(rank);
    qt_free(sorted);
    return rc;
}
