/*
 * Decisions about activations, from a few calibration windows through the unquantized model.
 *
 * Order: channels by their 99.9 % quantile, descending (ties: absmax, then index), so that those
 * with outliers share blocks. What comes out of attention may change places within a head only, the
 * same in all heads that read one head of values; what the MLP multiplies, freely: then the rows of
 * the producing matrices change places as well, and nothing is left to do at run time. In front of
 * the other linears is a norm, which gathers.
 *
 * Smoothing (after SmoothQuant, Xiao et al. 2023, for outlier channels only): a channel whose
 * quantile is above `smooth` times the median is divided by a power of two, its weights are
 * multiplied by it. A block of 8 bits for the outliers alone would leave its other channels two or
 * three levels.
 *
 * Precision: a block's error is D = sum |(x - Q(x))_b W_b^T|^2 over all linears of the input. What
 * it means for the model is measured: S, the divergence of the logits when that input alone has 4
 * bits. Blocks get 8 bits by S (D4 - D8) / (sum of D4 over the input), per linear that reads them,
 * largest first.
 */
#include "pack/act_plan.h"

#include "pack/scheme.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    STAT_WINDOWS = 32, /* for quantiles */
    SENSE_WINDOWS = 4, /* for divergences */
    SAMPLES = 1024,    /* tokens whose rounding errors are measured, about */
    LOGIT_POSITIONS = 256,
};
static const float clips[] = {1, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f};
enum { CLIPS = sizeof clips / sizeof *clips };

/* An input of a block's linears while the plan is made. */
struct input {
    size_t k, linears, n; /* n: rows of all of them */
    bool reorder, scale;  /* what may be done to its channels */
    double *d4, *d8;      /* [blocks] */
    double sense;
};

struct planner {
    struct qt_act_plan *out;
    const struct qt_model *model;
    struct qt_weights source;
    const struct qt_calibration *data;
    struct qt_backend *be;
    const struct qt_spec *spec;
    struct input *inputs; /* [layers][QT_INPUTS] */
    /* Of the block that runs. */
    struct qt_channels channels[QT_INPUTS]; /* backend */
    float *sample[QT_INPUTS];               /* host, [sampled][k] */
    size_t sampled[QT_INPUTS], seen[QT_INPUTS], stride;
    int active; /* the input that has 4 bits while divergences are measured; -1: none */
};

static struct input *input_at(const struct planner *p, size_t layer, int i)
{
    return &p->inputs[layer * QT_INPUTS + (size_t)i];
}

static struct qt_act *act_at(const struct qt_act_plan *plan, size_t layer, int i)
{
    return &plan->act[layer * QT_INPUTS + (size_t)i];
}

const struct qt_act *qt_act_plan_find(const struct qt_act_plan *p, size_t layer, int input)
{
    const struct qt_act *a = p->act ? act_at(p, layer, input) : NULL;
    return a && a->k ? a : NULL;
}

/* ---- what is there -------------------------------------------------------------------------- */

static bool is_w4ax(const struct qt_plan_item *item)
{
    return !item->why && item->packed.spec.scheme == &qt_scheme_w4ax;
}

static const struct qt_plan_item *find_item(const struct qt_plan *plan, const char *name)
{
    for (size_t i = 0; i < plan->count; i++)
        if (strcmp(plan->items[i].tensor->name, name) == 0)
            return &plan->items[i];
    return NULL;
}

static int add_linear(struct planner *p, const struct qt_plan_item *item,
                      const struct qt_linear *linear, struct qt_err *err)
{
    struct input *in = input_at(p, linear->layer, linear->input);
    bool is = item && is_w4ax(item);
    if (in->linears && (in->k != 0) != is)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, linear->weight,
                       "of linears that share an input, all or none must be w4ax");
    if (is && p->spec && strcmp(p->spec->text, item->packed.spec.text) != 0)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, linear->weight,
                       "%s, but others are %s: all of a model must have the same parameters",
                       item->packed.spec.text, p->spec->text);
    in->linears++;
    in->n += linear->n;
    if (is) {
        in->k = linear->k;
        p->spec = &item->packed.spec;
    }
    return QT_OK;
}

/* Channels of an input may be changed where a norm or w4ax linears make them. */
static void allow_changes(struct planner *p, size_t layer)
{
    const struct qt_linear *linear;
    size_t n = qt_model_linears(&linear, p->model, layer);
    for (int i = 0; i < QT_INPUTS; i++) {
        struct input *in = input_at(p, layer, i);
        in->reorder = true;
        in->scale = qt_model_input_is_norm(p->model, i);
        for (size_t l = 0; l < n; l++)
            if (linear[l].feeds == i) {
                in->reorder = in->reorder && input_at(p, layer, linear[l].input)->k;
                in->scale = in->scale || linear[l].feeds_scale;
            }
        in->scale = in->scale && in->reorder;
    }
}

static int find_inputs(struct planner *p, const struct qt_plan *plan, struct qt_err *err)
{
    size_t layers = qt_model_info(p->model)->layers, found = 0, wanted = 0;
    for (size_t i = 0; i < plan->count; i++)
        wanted += is_w4ax(&plan->items[i]);
    for (size_t l = 0; l < layers && wanted; l++) {
        const struct qt_linear *linear;
        size_t n = qt_model_linears(&linear, p->model, l);
        for (size_t i = 0; i < n; i++) {
            const struct qt_plan_item *item = find_item(plan, linear[i].weight);
            int rc = add_linear(p, item, &linear[i], err);
            if (rc < 0)
                return rc;
            found += item && is_w4ax(item);
        }
        allow_changes(p, l);
    }
    if (found < wanted)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "%zu tensors are to be w4ax that are no linears of the decoder's blocks",
                       wanted - found);
    return QT_OK;
}

/* ---- statistics of a block's inputs --------------------------------------------------------- */

static int new_zeros(void *out, struct qt_backend *be, size_t bytes, struct qt_err *err)
{
    void *zeros = NULL, *made = NULL;
    int rc;
    QT_TRY(qt_array_new(&zeros, bytes, 1, err));
    QT_TRY(be->new (be, &made, bytes, err));
    memcpy(out, &made, sizeof made);
    QT_TRY(be->upload(be, made, zeros, bytes, err));
done:
    qt_free(zeros);
    return rc;
}

static void observe_end(struct planner *p)
{
    for (int i = 0; i < QT_INPUTS; i++) {
        struct qt_channels *c = &p->channels[i];
        p->be->free(p->be, c->absmax);
        p->be->free(p->be, c->sum2);
        p->be->free(p->be, c->hist);
        *c = (struct qt_channels){0};
        qt_free(p->sample[i]);
        p->sample[i] = NULL;
    }
}

static int observe_begin(struct planner *p, size_t layer, struct qt_err *err)
{
    int rc = QT_OK;
    for (int i = 0; i < QT_INPUTS; i++) {
        struct qt_channels *c = &p->channels[i];
        size_t k = input_at(p, layer, i)->k;
        p->sampled[i] = p->seen[i] = 0;
        if (!k)
            continue;
        QT_TRY(new_zeros(&c->absmax, p->be, k * sizeof *c->absmax, err));
        QT_TRY(new_zeros(&c->sum2, p->be, k * sizeof *c->sum2, err));
        QT_TRY(new_zeros(&c->hist, p->be, k * QT_HIST_BINS * sizeof *c->hist, err));
        QT_TRY(qt_array_new(&p->sample[i], SAMPLES, k * sizeof *p->sample[i], err));
    }
done:
    return rc;
}

static int tap_input(void *ctx, int i, const float *x, size_t m, size_t k, struct qt_err *err)
{
    struct planner *p = ctx;
    size_t first = (p->stride - p->seen[i] % p->stride) % p->stride;
    int rc = QT_OK;
    if (!p->sample[i])
        return QT_OK;
    QT_TRY(p->be->channels(p->be, &p->channels[i], x, m, k, err));
    for (size_t t = first; t < m && p->sampled[i] < SAMPLES; t += p->stride)
        QT_TRY(p->be->download(p->be, p->sample[i] + p->sampled[i]++ * k, x + t * k, k * sizeof *x,
                               err));
    p->seen[i] += m;
done:
    return rc;
}

/* ---- order and smoothing -------------------------------------------------------------------- */

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

/* Channels that one row of values makes have the largest of their statistics. */
static void share_ranks(struct rank *rank, const struct planner *p, int i, size_t k)
{
    for (size_t c = 0; c < k; c++)
        for (size_t d = 0; d < k && i == 1; d++)
            if (qt_model_feed_row(p->model, i, c) == qt_model_feed_row(p->model, i, d)) {
                rank[c].quantile = fmax(rank[c].quantile, rank[d].quantile);
                rank[c].absmax = fmaxf(rank[c].absmax, rank[d].absmax);
            }
}

static int ranks_new(struct rank **out, const struct planner *p, size_t layer, int i,
                     struct qt_err *err)
{
    const struct qt_channels *from = &p->channels[i];
    size_t k = input_at(p, layer, i)->k;
    struct qt_channels c = {0};
    int rc;
    QT_TRY(qt_array_new(out, k, sizeof **out, err));
    QT_TRY(qt_channels_new(&c, k, err));
    QT_TRY(p->be->download(p->be, c.absmax, from->absmax, k * sizeof *c.absmax, err));
    QT_TRY(p->be->download(p->be, c.hist, from->hist, k * QT_HIST_BINS * sizeof *c.hist, err));
    for (size_t j = 0; j < k; j++)
        (*out)[j] = (struct rank){qt_hist_quantile(c.hist + j * QT_HIST_BINS, c.absmax[j], 0.999),
                                  c.absmax[j], (uint32_t)j};
    share_ranks(*out, p, i, k);
done:
    qt_channels_free(&c);
    return rc;
}

static float smooth_factor(double quantile, double limit)
{
    if (!(limit > 0) || quantile <= limit)
        return 1;
    return ldexpf(1, -(int)fmin(ceil(log2(quantile / limit)), 60));
}

static int arrange_input(struct planner *p, size_t layer, int i, struct qt_err *err)
{
    const struct input *in = input_at(p, layer, i);
    struct qt_act *act = act_at(p->out, layer, i);
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

/* ---- rounding errors ------------------------------------------------------------------------ */

/* G[b] = W_b^T W_b of the packed channels of each block, over all linears of the input. */
static int block_grams(double *g, const struct planner *p, size_t layer, int i, struct qt_err *err)
{
    const struct qt_act *act = act_at(p->out, layer, i);
    const struct qt_linear *linear;
    size_t count = qt_model_linears(&linear, p->model, layer), k = act->k;
    float *w = NULL, *part = NULL, product[QT_ACT_BLOCK * QT_ACT_BLOCK];
    int rc = QT_OK;
    openblas_set_num_threads(1);
    for (size_t l = 0; l < count; l++) {
        size_t n = linear[l].n;
        if (linear[l].input != i)
            continue;
        qt_free(w);
        qt_free(part);
        w = part = NULL;
        QT_TRY(qt_array_new(&w, n, k * sizeof *w, err));
        QT_TRY(qt_array_new(&part, n, QT_ACT_BLOCK * sizeof *part, err));
        QT_TRY(p->source.load(p->source.ctx, linear[l].weight, w, err));
        for (size_t at = 0; at < k; at += QT_ACT_BLOCK) {
            size_t width = qt_min_size(QT_ACT_BLOCK, k - at);
            for (size_t r = 0; r < n; r++)
                for (size_t c = 0; c < width; c++)
                    part[r * QT_ACT_BLOCK + c] =
                        w[r * k + act->order[at + c]] / act->factor[at + c];
            cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, (int)width, (int)n, 1, part,
                        QT_ACT_BLOCK, 0, product, QT_ACT_BLOCK);
            double *sum = g + at / QT_ACT_BLOCK * QT_ACT_BLOCK * QT_ACT_BLOCK;
            for (size_t r = 0; r < width; r++)
                for (size_t c = 0; c <= r; c++)
                    sum[r * QT_ACT_BLOCK + c] += (double)product[r * QT_ACT_BLOCK + c];
        }
    }
done:
    qt_free(w);
    qt_free(part);
    return rc;
}

struct error_job {
    const struct qt_act *act;
    const double *g;
    const float *x, *q; /* [m][k] */
    size_t m;
    double *d; /* [blocks] */
};

/* d[b] = sum over tokens of e G[b] e^T */
static int error_block(void *ctx, size_t b, int thread, struct qt_err *err)
{
    const struct error_job *job = ctx;
    const struct qt_act *act = job->act;
    const double *g = job->g + b * QT_ACT_BLOCK * QT_ACT_BLOCK;
    size_t at = b * QT_ACT_BLOCK, width = qt_min_size(QT_ACT_BLOCK, act->k - at);
    double e[QT_ACT_BLOCK], sum = 0;
    (void)thread;
    (void)err;
    for (size_t t = 0; t < job->m; t++) {
        for (size_t c = 0; c < width; c++) {
            size_t j = t * act->k + act->order[at + c];
            e[c] = (double)((job->x[j] - job->q[j]) * act->factor[at + c]);
        }
        for (size_t r = 0; r < width; r++) {
            double row = 0;
            for (size_t c = 0; c < r; c++)
                row += g[r * QT_ACT_BLOCK + c] * e[c];
            sum += e[r] * (2 * row + g[r * QT_ACT_BLOCK + r] * e[r]);
        }
    }
    job->d[b] = sum;
    return QT_OK;
}

/* Errors of all blocks with these bits and this clip ratio; returns their sum. */
static int measure(double *total, double *d, struct qt_act *act, const double *g, const float *x,
                   size_t m, unsigned bits, float clip, float *q, struct qt_err *err)
{
    size_t blocks = qt_ceil_div(act->k, QT_ACT_BLOCK);
    struct error_job job = {act, g, x, q, m, d};
    int rc = QT_OK;
    memset(act->bits, (int)bits, blocks);
    act->clip = clip;
    *total = 0;
    QT_TRY(qt_act_apply(q, x, m, act, err));
    QT_TRY(qt_parallel(blocks, error_block, &job, err));
    for (size_t b = 0; b < blocks; b++)
        *total += d[b];
done:
    return rc;
}

static int measure_input(struct planner *p, size_t layer, int i, struct qt_err *err)
{
    struct input *in = input_at(p, layer, i);
    struct qt_act *act = act_at(p->out, layer, i);
    size_t blocks = qt_ceil_div(in->k, QT_ACT_BLOCK), m = p->sampled[i];
    const float *x = p->sample[i];
    double *g = NULL, *d = NULL, total, least = INFINITY;
    float *q = NULL, clip = 1;
    int rc = QT_OK;
    QT_TRY(qt_array_new(&g, blocks, QT_ACT_BLOCK * QT_ACT_BLOCK * sizeof *g, err));
    QT_TRY(qt_array_new(&d, blocks, sizeof *d, err));
    QT_TRY(qt_array_new(&q, m, in->k * sizeof *q, err));
    QT_TRY(qt_array_new(&in->d4, blocks, sizeof *in->d4, err));
    QT_TRY(qt_array_new(&in->d8, blocks, sizeof *in->d8, err));
    QT_TRY(block_grams(g, p, layer, i, err));
    QT_TRY(measure(&total, in->d8, act, g, x, m, 8, 1, q, err));
    for (int c = 0; c < CLIPS; c++) {
        QT_TRY(measure(&total, d, act, g, x, m, 4, clips[c], q, err));
        if (!(total < least))
            continue;
        least = total;
        clip = clips[c];
        memcpy(in->d4, d, blocks * sizeof *d);
    }
    act->clip = clip;
done:
    qt_free(g);
    qt_free(d);
    qt_free(q);
    return rc;
}

/* ---- the pass over the blocks --------------------------------------------------------------- */

static int plan_layer(struct planner *p, size_t layer, float *hidden, size_t tokens,
                      struct qt_err *err)
{
    const struct qt_tap tap = {p, tap_input};
    struct qt_block *block = NULL;
    int rc;
    QT_TRY(observe_begin(p, layer, err));
    QT_TRY(qt_block_open(&block, p->model, layer, &p->source, p->be, err));
    QT_TRY(qt_block_run(block, hidden, tokens, p->data->seqlen, &tap, err));
    for (int i = 0; i < QT_INPUTS; i++) {
        size_t k = input_at(p, layer, i)->k;
        if (!k)
            continue;
        QT_TRY(qt_act_new(act_at(p->out, layer, i), k, 4, err));
        act_at(p->out, layer, i)->scales = (enum qt_act_scales)qt_spec_value(p->spec, "scales");
        QT_TRY(arrange_input(p, layer, i, err));
        QT_TRY(measure_input(p, layer, i, err));
    }
done:
    observe_end(p);
    qt_block_close(block);
    return rc;
}

static int embed(struct planner *p, float *hidden, size_t tokens, struct qt_err *err)
{
    struct qt_ends *ends = NULL;
    int rc;
    QT_TRY(qt_ends_open(&ends, p->model, &p->source, p->be, err));
    QT_TRY(qt_ends_embed(ends, hidden, p->data->ids, tokens, p->data->seqlen, err));
done:
    qt_ends_close(ends);
    return rc;
}

static int plan_layers(struct planner *p, struct qt_err *err)
{
    size_t tokens = qt_min_size(p->data->samples, STAT_WINDOWS) * p->data->seqlen, bytes;
    float *hidden = NULL;
    int rc = QT_OK;
    p->stride = qt_ceil_div(tokens, SAMPLES);
    if (qt_mul_overflow(&bytes, tokens, qt_model_info(p->model)->hidden * sizeof *hidden))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
    QT_TRY(p->be->new (p->be, (void **)&hidden, bytes, err));
    QT_TRY(embed(p, hidden, tokens, err));
    for (size_t l = 0; l < p->out->layers; l++)
        QT_TRY(plan_layer(p, l, hidden, tokens, err));
done:
    p->be->free(p->be, hidden);
    return rc;
}

/* ---- divergences ---------------------------------------------------------------------------- */

/* With the active input at 4 bits, all others as they are. */
static int sense_input(void *ctx, struct qt_backend *be, float *y, const float *x,
                       const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err)
{
    const struct planner *p = ctx;
    if (linear->input != p->active)
        return be->copy(be, y, x, m * k * sizeof *x, err);
    return qt_act_apply_on(be, y, x, m, act_at(p->out, linear->layer, linear->input), err);
}

/* Variant 0 is the model as it is, variant 1 + QT_INPUTS * l + i has input i of block l at 4 bits;
 * each starts from variant 0 where it differs. */
static int sense_layer(struct planner *p, size_t layer, float *variants, size_t tokens,
                       struct qt_err *err)
{
    size_t width = qt_model_info(p->model)->hidden, step = tokens * width;
    struct qt_weights w = p->source;
    struct qt_block *block = NULL;
    int rc;
    w.runtime = (struct qt_runtime){.ctx = p, .input = sense_input};
    QT_TRY(qt_block_open(&block, p->model, layer, &w, p->be, err));
    for (int i = 0; i < QT_INPUTS; i++) {
        float *v = variants + (1 + layer * QT_INPUTS + (size_t)i) * step;
        p->active = input_at(p, layer, i)->k ? i : -1;
        QT_TRY(p->be->copy(p->be, v, variants, step * sizeof *v, err));
        QT_TRY(qt_block_run(block, v, tokens, p->data->seqlen, NULL, err));
    }
    p->active = -1;
    for (size_t v = 0; v < 1 + layer * QT_INPUTS; v++)
        QT_TRY(qt_block_run(block, variants + v * step, tokens, p->data->seqlen, NULL, err));
done:
    qt_block_close(block);
    return rc;
}

struct senses {
    struct qt_ends *ends;
    float *logits, *ref; /* backend, [LOGIT_POSITIONS][vocab] */
    uint32_t targets[LOGIT_POSITIONS];
    struct qt_score scores[LOGIT_POSITIONS];
};

/* Adds the divergences of positions [at, at + m) of all variants. */
static int sense_chunk(struct planner *p, struct senses *s, const float *variants, size_t tokens,
                       size_t at, size_t m, struct qt_err *err)
{
    const struct qt_model_info *info = qt_model_info(p->model);
    int rc;
    QT_TRY(qt_ends_logits(s->ends, s->ref, variants + at * info->hidden, m, err));
    for (size_t v = 0; v < p->out->layers * QT_INPUTS; v++) {
        const float *hidden = variants + ((1 + v) * tokens + at) * info->hidden;
        if (!p->inputs[v].k)
            continue;
        QT_TRY(qt_ends_logits(s->ends, s->logits, hidden, m, err));
        QT_TRY(p->be->score(p->be, s->scores, s->logits, s->ref, s->targets, info->logit_softcap, m,
                            info->vocab, err));
        for (size_t i = 0; i < m; i++)
            p->inputs[v].sense += s->scores[i].kld / (double)tokens;
    }
done:
    return rc;
}

static int sense_logits(struct planner *p, const float *variants, size_t tokens, struct qt_err *err)
{
    size_t bytes = LOGIT_POSITIONS * qt_model_info(p->model)->vocab * sizeof(float);
    struct senses *s = NULL;
    int rc;
    QT_TRY(qt_array_new(&s, 1, sizeof *s, err)); /* targets 0: only divergences are read */
    QT_TRY(qt_ends_open(&s->ends, p->model, &p->source, p->be, err));
    QT_TRY(p->be->new (p->be, (void **)&s->logits, bytes, err));
    QT_TRY(p->be->new (p->be, (void **)&s->ref, bytes, err));
    for (size_t at = 0; at < tokens; at += LOGIT_POSITIONS)
        QT_TRY(sense_chunk(p, s, variants, tokens, at, qt_min_size(LOGIT_POSITIONS, tokens - at),
                           err));
done:
    if (s) {
        p->be->free(p->be, s->logits);
        p->be->free(p->be, s->ref);
        qt_ends_close(s->ends);
    }
    qt_free(s);
    return rc;
}

static int sense(struct planner *p, struct qt_err *err)
{
    size_t tokens = qt_min_size(p->data->samples, SENSE_WINDOWS) * p->data->seqlen, bytes;
    size_t count = 1 + p->out->layers * QT_INPUTS;
    float *variants = NULL;
    int rc = QT_OK;
    if (qt_mul_overflow(&bytes, count * tokens, qt_model_info(p->model)->hidden * sizeof *variants))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
    QT_TRY(p->be->new (p->be, (void **)&variants, bytes, err));
    QT_TRY(embed(p, variants, tokens, err));
    for (size_t v = 0; v < p->out->layers * QT_INPUTS; v++)
        if (p->out->act[v].k)
            memset(p->out->act[v].bits, 4, qt_ceil_div(p->out->act[v].k, QT_ACT_BLOCK));
    for (size_t l = 0; l < p->out->layers; l++)
        QT_TRY(sense_layer(p, l, variants, tokens, err));
    QT_TRY(sense_logits(p, variants, tokens, err));
done:
    p->be->free(p->be, variants);
    return rc;
}

/* ---- the budget ----------------------------------------------------------------------------- */

struct choice {
    double gain; /* of divergence, estimated */
    size_t cost, input, block;
};

static int by_gain(const void *a, const void *b)
{
    const struct choice *x = a, *y = b;
    double gx = x->gain / (double)x->cost, gy = y->gain / (double)y->cost;
    if (gx != gy)
        return gx < gy ? 1 : -1;
    if (x->input != y->input)
        return x->input > y->input ? 1 : -1;
    return (x->block > y->block) - (x->block < y->block);
}

/* Fills choice[]; returns their number, *total their cost, *left the divergence of all at 4 bits.
 */
static size_t list_choices(struct choice *choice, size_t *total, double *left,
                           const struct planner *p)
{
    size_t n = 0;
    *total = 0;
    *left = 0;
    for (size_t v = 0; v < p->out->layers * QT_INPUTS; v++) {
        const struct input *in = &p->inputs[v];
        size_t blocks = qt_ceil_div(in->k, QT_ACT_BLOCK);
        double sum = 0;
        for (size_t b = 0; b < blocks; b++)
            sum += in->d4[b];
        for (size_t b = 0; b < blocks; b++, n++) {
            double gain = sum > 0 ? in->sense * (in->d4[b] - in->d8[b]) / sum : 0;
            choice[n] = (struct choice){gain, in->linears, v, b};
            *total += in->linears;
        }
        *left += in->k ? in->sense : 0;
    }
    return n;
}

static int spend(struct planner *p, double *left, struct qt_err *err)
{
    bool all = qt_spec_value(p->spec, "scales") == QT_ACT_SCALES_ROW;
    double share = all ? 1 : qt_spec_value(p->spec, "a8max");
    double bound = all ? 0 : qt_spec_value(p->spec, "bound");
    size_t count = 0, total, used = 0;
    struct choice *choice = NULL;
    for (size_t v = 0; v < p->out->layers * QT_INPUTS; v++)
        count += qt_ceil_div(p->inputs[v].k, QT_ACT_BLOCK);
    int rc = qt_array_new(&choice, count, sizeof *choice, err);
    if (rc < 0)
        return rc;
    list_choices(choice, &total, left, p);
    qsort(choice, count, sizeof *choice, by_gain);
    for (size_t i = 0; i < count && (bound == 0 || *left > bound); i++) {
        if ((double)(used + choice[i].cost) > share * (double)total + 1e-9)
            continue;
        used += choice[i].cost;
        *left -= choice[i].gain;
        p->out->act[choice[i].input].bits[choice[i].block] = 8;
    }
    qt_free(choice);
    return QT_OK;
}

/* ---- report --------------------------------------------------------------------------------- */

struct shares {
    double blocks, blocks8, macs, macs8; /* blocks are counted once per linear */
};

static void add_input(struct shares *s, const struct input *in, const struct qt_act *act)
{
    for (size_t b = 0, at = 0; at < in->k; b++, at += QT_ACT_BLOCK) {
        double macs = (double)in->n * (double)qt_min_size(QT_ACT_BLOCK, in->k - at);
        s->blocks += (double)in->linears;
        s->macs += macs;
        s->blocks8 += act->bits[b] == 8 ? (double)in->linears : 0;
        s->macs8 += act->bits[b] == 8 ? macs : 0;
    }
}

static json_t *shares_json(const struct shares *s)
{
    bool any = s->blocks > 0;
    return json_pack("{s:f, s:f}", "a8_blocks", any ? s->blocks8 / s->blocks : 0.0, "a8_macs",
                     any ? s->macs8 / s->macs : 0.0);
}

static int make_report(struct planner *p, double left, struct qt_err *err)
{
    struct shares all = {0};
    json_t *layers = json_array();
    for (size_t l = 0; l < p->out->layers; l++) {
        struct shares one = {0};
        for (int i = 0; i < QT_INPUTS; i++) {
            add_input(&one, input_at(p, l, i), act_at(p->out, l, i));
            add_input(&all, input_at(p, l, i), act_at(p->out, l, i));
        }
        json_array_append_new(layers, shares_json(&one));
    }
    p->out->report = shares_json(&all);
    json_object_set_new(p->out->report, "estimated_kld", json_real(left));
    json_object_set_new(p->out->report, "layers", layers);
    return p->out->report ? QT_OK : qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
}

/* ---- the plan ------------------------------------------------------------------------------- */

int qt_act_plan_new(struct qt_act_plan *out, const struct qt_plan *plan,
                    const struct qt_model *model, const struct qt_weights *source,
                    const struct qt_calibration *data, const struct qt_log *log, struct qt_err *err)
{
    struct planner p = {.out = out, .model = model, .source = *source, .data = data, .active = -1};
    size_t layers = qt_model_info(model)->layers;
    double left;
    int rc;
    *out = (struct qt_act_plan){.layers = layers};
    p.be = data->backend;
    QT_TRY(qt_array_new(&p.inputs, layers * QT_INPUTS, sizeof *p.inputs, err));
    QT_TRY(find_inputs(&p, plan, err));
    if (!p.spec)
        goto done;
    QT_TRY(qt_array_new(&out->act, layers * QT_INPUTS, sizeof *out->act, err));
    QT_TRY(plan_layers(&p, err));
    QT_TRY(sense(&p, err));
    QT_TRY(spend(&p, &left, err));
    QT_TRY(make_report(&p, left, err));
    qt_log_message(log, QT_LOG_INFO, "activations: %.1f %% of the blocks at 8 bits",
                   100 * json_real_value(json_object_get(out->report, "a8_blocks")));
done:
    for (size_t v = 0; p.inputs && v < layers * QT_INPUTS; v++) {
        qt_free(p.inputs[v].d4);
        qt_free(p.inputs[v].d8);
    }
    qt_free(p.inputs);
    if (rc < 0)
        qt_act_plan_free(out);
    return rc;
}

void qt_act_plan_free(struct qt_act_plan *p)
{
    for (size_t v = 0; p->act && v < p->layers * QT_INPUTS; v++)
        qt_act_free(&p->act[v]);
    qt_free(p->act);
    json_decref(p->report);
    *p = (struct qt_act_plan){0};
}

int qt_act_plan_input(void *ctx, struct qt_backend *be, float *y, const float *x,
                      const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err)
{
    const struct qt_act *act = qt_act_plan_find(ctx, linear->layer, linear->input);
    return act ? qt_act_apply_on(be, y, x, m, act, err)
               : be->copy(be, y, x, m * k * sizeof *x, err);
}

int qt_act_plan_arrange(struct qt_arrange *out, const struct qt_act_plan *p,
                        const struct qt_model *model, const struct qt_linear *linear,
                        struct qt_err *err)
{
    const struct qt_act *fed =
        linear->feeds >= 0 ? qt_act_plan_find(p, linear->layer, linear->feeds) : NULL;
    uint32_t *order = NULL;
    float *factor = NULL;
    int rc = QT_OK;
    *out = (struct qt_arrange){.input = qt_act_plan_find(p, linear->layer, linear->input)};
    if (!fed || !out->input)
        return QT_OK;
    QT_TRY(qt_array_new(&order, linear->n, sizeof *order, err));
    QT_TRY(qt_array_new(&factor, linear->n, sizeof *factor, err));
    for (size_t c = 0; c < fed->k; c++) {
        size_t row = qt_model_feed_row(model, linear->feeds, c);
        order[row] = (uint32_t)qt_model_feed_row(model, linear->feeds, fed->order[c]);
        factor[row] = linear->feeds_scale ? fed->factor[c] : 1;
    }
    out->row_order = order;
    out->row_factor = factor;
done:
    if (rc < 0) {
        qt_free(order);
        qt_free(factor);
    }
    return rc;
}

void qt_act_plan_arrange_free(struct qt_arrange *a)
{
    qt_free((void *)(uintptr_t)a->row_order);
    qt_free((void *)(uintptr_t)a->row_factor);
    *a = (struct qt_arrange){0};
}
