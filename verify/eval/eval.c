/*
 * Perplexity and divergence. The loops are, from outside in: batches of windows, decoder layers,
 * groups of windows. So the weights of each layer are read and decoded once per batch.
 */
#include "verify/verify.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    GROUP_TOKENS = 2048,   /* tokens per call of a decoder layer */
    MASK_STEP = 7,         /* one token of so many is masked, the last one */
    LOGIT_POSITIONS = 256, /* positions whose logits are in memory at once */
};
static const size_t default_batch_bytes = (size_t)1 << 30;

/* Sums over the scored positions of a window; kld and same_top: over all positions. */
struct window_sums {
    double nll, ref_nll, kld, p_delta2;
    double error2, ref2; /* squares of h - h_ref and h_ref, if hidden states are compared */
    size_t same_top;
};

const double qt_kld_quantiles[QT_KLD_QUANTILES] = {0.25, 0.5,   0.75,   0.9, 0.95,
                                                   0.99, 0.999, 0.9999, 1};

/* The model or the reference. */
struct side {
    const struct qt_weights *weights;
    struct qt_model *model;
    struct qt_model_info info;
    struct qt_embed_head *embed_head;
    float *hidden; /* backend: [batch windows * seqlen][hidden] */
    float *logits; /* backend: [LOGIT_POSITIONS][vocab]; of encoders without a head, [hidden] */
};

struct eval {
    struct qt_backend *be;
    const struct qt_log *log;
    const uint32_t *ids;
    uint32_t *masked; /* ids with mask tokens, if the model predicts these; else NULL */
    bool hidden;      /* the models predict nothing: their hidden states are compared */
    float *states[2]; /* host: [LOGIT_POSITIONS][hidden] of both sides, in this case */
    struct qt_comm *comm;
    size_t seqlen, windows;
    size_t first, end; /* windows of this rank */
    /* Windows per call of a layer, and per batch. A batch is a multiple of a group, so that the
     * calls, and the bits of the results, do not depend on the batch size. */
    size_t group, batch;
    size_t nsides; /* 1, or 2 with a reference */
    struct side side[2];
    struct qt_runtime *fused; /* runs side 0; NULL: the backend does */
    uint32_t *targets;        /* [LOGIT_POSITIONS] */
    struct qt_score *scores;  /* [LOGIT_POSITIONS] */
    size_t compared;          /* positions of a window that are compared with the reference */
    double *kld;              /* [windows * compared] with a reference */
    struct window_sums *sums; /* [windows] */
    float *first_logits;      /* [seqlen][vocab] of the first window, if they are kept */
    bool not_finite;          /* a logit is NaN or infinity */
    double done, total;       /* progress: windows times (layers + head) */
};

static void advance(struct eval *ev, size_t windows)
{
    ev->done += (double)windows;
    qt_log_progress(ev->log, "eval", ev->done, ev->total);
}

/* ---- setup ---------------------------------------------------------------------------------- */

static int open_models(struct eval *ev, bool logits, struct qt_err *err)
{
    for (size_t i = 0; i < ev->nsides; i++) {
        struct side *s = &ev->side[i];
        int rc = qt_model_open(&s->model, s->weights, err);
        if (rc < 0)
            return rc;
        s->info = *qt_model_info(s->model);
    }
    ev->hidden = ev->side[0].info.predicts == QT_PREDICTS_NOTHING;
    if (ev->hidden && (ev->nsides == 1 || logits))
        return qt_fail(err, QT_E_UNSUPPORTED, ev->side[0].weights->dir, NULL,
                       "an encoder without the head that predicts masked tokens has no %s",
                       logits ? "logits" : "perplexity: compare its hidden states with --ref");
    if (ev->hidden && ev->nsides == 2 && ev->side[0].info.hidden != ev->side[1].info.hidden)
        return qt_fail(err, QT_E_INPUT, ev->side[1].weights->dir, NULL,
                       "the reference has hidden states of %zu channels, the model %zu: they must "
                       "agree",
                       ev->side[1].info.hidden, ev->side[0].info.hidden);
    if (ev->nsides == 2 && ev->side[0].info.predicts != ev->side[1].info.predicts)
        return qt_fail(err, QT_E_INPUT, ev->side[1].weights->dir, NULL,
                       "the model and the reference do not predict the same tokens");
    if (ev->nsides == 2 && ev->side[0].info.vocab != ev->side[1].info.vocab)
        return qt_fail(
            err, QT_E_INPUT, ev->side[1].weights->dir, NULL,
            "the reference has a vocabulary of %zu tokens, the model %zu: they must agree",
            ev->side[1].info.vocab, ev->side[0].info.vocab);
    if (ev->nsides == 2 && ev->side[0].info.logit_softcap != ev->side[1].info.logit_softcap)
        return qt_fail(err, QT_E_INPUT, ev->side[1].weights->dir, NULL,
                       "the reference has a logit soft cap of %g, the model %g: they must agree",
                       (double)ev->side[1].info.logit_softcap,
                       (double)ev->side[0].info.logit_softcap);
    return QT_OK;
}

/* The windows of this rank: whole groups. */
static void choose_share(struct eval *ev)
{
    const size_t groups = qt_ceil_div(ev->windows, ev->group);
    ev->end = qt_comm_share(&ev->first, groups, qt_comm_rank(ev->comm), qt_comm_size(ev->comm));
    ev->first = qt_min_size(ev->first * ev->group, ev->windows);
    ev->end = qt_min_size(ev->end * ev->group, ev->windows);
}

/* seqlen 0: the default, or the maximum of both models if smaller. */
static int choose_seqlen(struct eval *ev, size_t seqlen, struct qt_err *err)
{
    ev->seqlen = seqlen ? seqlen : QT_EVAL_SEQLEN;
    for (size_t i = 0; i < ev->nsides; i++) {
        const struct side *s = &ev->side[i];
        if (seqlen > s->info.max_positions)
            return qt_fail(
                err, QT_E_USAGE, s->weights->dir, NULL,
                "windows of %zu tokens exceed the model's %zu positions: reduce --seqlen", seqlen,
                s->info.max_positions);
        ev->seqlen = qt_min_size(ev->seqlen, s->info.max_positions);
    }
    const bool masked = ev->side[0].info.predicts == QT_PREDICTS_MASKED;
    const size_t least = masked ? MASK_STEP : 2;
    if (ev->seqlen < least)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "a window needs at least %zu tokens", least);
    ev->compared = masked ? ev->seqlen / MASK_STEP : ev->seqlen;
    ev->group = ev->seqlen < GROUP_TOKENS ? GROUP_TOKENS / ev->seqlen : 1;
    return QT_OK;
}

static int choose_windows(struct eval *ev, size_t count, size_t limit, struct qt_err *err)
{
    size_t vocab = ev->side[0].info.vocab;
    ev->windows = count / ev->seqlen;
    if (ev->windows == 0)
        return qt_fail(err, QT_E_INPUT, NULL, NULL,
                       "the data has %zu tokens, less than one window of %zu", count, ev->seqlen);
    if (limit)
        ev->windows = qt_min_size(ev->windows, limit);
    for (size_t i = 0; i < ev->windows * ev->seqlen; i++)
        if (ev->ids[i] >= vocab)
            return qt_fail(
                err, QT_E_INPUT, NULL, NULL,
                "token %zu of the data has id %u, but the model's vocabulary has %zu tokens", i,
                ev->ids[i], vocab);
    return QT_OK;
}

/* Masks tokens: see qt_eval. */
static int mask_tokens(struct eval *ev, struct qt_err *err)
{
    const size_t count = ev->windows * ev->seqlen;
    struct qt_tokenizer *tok = NULL;
    uint32_t mask;
    int rc = QT_OK;
    if (ev->side[0].info.predicts != QT_PREDICTS_MASKED)
        return QT_OK;
    QT_TRY(qt_tokenizer_open(&tok, ev->side[0].weights->dir, err));
    QT_TRY(qt_tokenizer_mask(&mask, tok, err));
    QT_TRY(qt_array_new(&ev->masked, count, sizeof *ev->masked, err));
    for (size_t i = 0; i < count; i++)
        ev->masked[i] = i % ev->seqlen % MASK_STEP == MASK_STEP - 1 ? mask : ev->ids[i];
done:
    qt_tokenizer_close(tok);
    return rc;
}

/* Memory for hidden states. The weights are loaded once per batch: GPUs have room for more. */
static size_t default_batch(const struct eval *ev)
{
    const size_t room = ev->be->room ? ev->be->room(ev->be) : 0;
    return qt_max_size(default_batch_bytes, room / 4);
}

static void choose_batch(struct eval *ev, size_t batch_bytes)
{
    size_t hidden = 0;
    double layers = 0;
    for (size_t i = 0; i < ev->nsides; i++) {
        hidden += ev->side[i].info.state;
        layers += (double)ev->side[i].info.layers;
    }
    size_t groups = (batch_bytes ? batch_bytes : default_batch(ev)) / sizeof(float) / hidden /
                    ev->seqlen / ev->group;
    const size_t own = ev->end - ev->first;
    groups = qt_min_size(groups ? groups : 1, qt_ceil_div(own, ev->group));
    ev->batch = qt_min_size(groups * ev->group, own);
    ev->total = (double)own * (layers + 1);
}

static bool is_fused(const struct eval *ev, const struct side *s)
{
    return ev->fused && s == &ev->side[0];
}

static int open_fused(struct eval *ev, const struct qt_eval_options *opt, struct qt_err *err)
{
    const struct qt_runtime_options fused = {
        .sequences = 1, .capacity = ev->seqlen, .prompt = ev->seqlen, .log = ev->log};
    const struct side *s = &ev->side[0];
    return opt->gpu ? qt_runtime_open(&ev->fused, opt->gpu, s->model, s->weights, opt->container,
                                      &fused, err)
                    : QT_OK;
}

static int new_buffers(struct eval *ev, bool logits, struct qt_err *err)
{
    int rc;
    for (size_t i = 0; i < ev->nsides; i++) {
        struct side *s = &ev->side[i];
        if (!is_fused(ev, s)) {
            QT_TRY(qt_embed_head_open(&s->embed_head, s->model, s->weights, ev->be, err));
            QT_TRY(
                qt_backend_floats(&s->hidden, ev->be, ev->batch * ev->seqlen, s->info.state, err));
        }
        QT_TRY(qt_backend_floats(&s->logits, ev->be, LOGIT_POSITIONS,
                                 ev->hidden ? s->info.hidden : s->info.vocab, err));
        if (ev->hidden)
            QT_TRY(qt_array_new(&ev->states[i], LOGIT_POSITIONS,
                                s->info.hidden * sizeof *ev->states[i], err));
    }
    QT_TRY(qt_array_new(&ev->targets, LOGIT_POSITIONS, sizeof *ev->targets, err));
    QT_TRY(qt_array_new(&ev->scores, LOGIT_POSITIONS, sizeof *ev->scores, err));
    QT_TRY(qt_array_new(&ev->sums, ev->windows, sizeof *ev->sums, err));
    if (ev->nsides == 2)
        QT_TRY(qt_array_new(&ev->kld, ev->windows * ev->compared, sizeof *ev->kld, err));
    if (logits)
        QT_TRY(qt_array_new(&ev->first_logits, ev->seqlen,
                            ev->side[0].info.vocab * sizeof *ev->first_logits, err));
done:
    return rc;
}

static void eval_close(struct eval *ev)
{
    for (size_t i = 0; i < ev->nsides; i++) {
        struct side *s = &ev->side[i];
        if (s->logits)
            ev->be->free(ev->be, s->logits);
        if (s->hidden)
            ev->be->free(ev->be, s->hidden);
        qt_free(ev->states[i]);
        qt_embed_head_close(s->embed_head);
        qt_model_close(s->model);
    }
    qt_runtime_close(ev->fused);
    qt_free(ev->masked);
    qt_free(ev->targets);
    qt_free(ev->scores);
    qt_free(ev->sums);
    qt_free(ev->kld);
    qt_free(ev->first_logits);
}

/* ---- forward pass and scores ---------------------------------------------------------------- */

/* Runs a decoder layer over all windows of the batch. */
static int run_layer(struct eval *ev, struct side *s, size_t layer, size_t windows,
                     struct qt_err *err)
{
    struct qt_layer *l = NULL;
    int rc;
    QT_TRY(qt_layer_open(&l, s->model, layer, s->weights, ev->be, err));
    for (size_t i = 0; i < windows; i += ev->group) {
        size_t n = qt_min_size(ev->group, windows - i);
        float *hidden = s->hidden + i * ev->seqlen * s->info.state;
        QT_TRY(qt_layer_run(l, hidden, n * ev->seqlen, ev->seqlen, NULL, err));
        advance(ev, n);
    }
done:
    qt_layer_close(l);
    return rc;
}

static int run_layers(struct eval *ev, struct side *s, size_t first, size_t windows,
                      struct qt_err *err)
{
    const uint32_t *ids = ev->masked ? ev->masked : ev->ids;
    int rc = qt_embed_tokens(s->embed_head, s->hidden, ids + first * ev->seqlen,
                             windows * ev->seqlen, ev->seqlen, err);
    for (size_t layer = 0; rc == QT_OK && layer < s->info.layers; layer++) {
        qt_log_layer(ev->log, layer, s->info.layers, (double)ev->windows * (double)ev->seqlen);
        rc = run_layer(ev, s, layer, windows, err);
    }
    return rc;
}

/* Adds the scores of positions [pos, pos + m) of a window. */
static int add_scores(struct eval *ev, size_t window, size_t pos, size_t m, struct qt_err *err)
{
    struct window_sums *sums = &ev->sums[window];
    bool ref = ev->nsides == 2;
    for (size_t i = 0; i < m; i++) {
        const struct qt_score *s = &ev->scores[i];
        if (ev->masked && (pos + i) % MASK_STEP != MASK_STEP - 1)
            continue;
        size_t token = window * ev->seqlen + pos + i;
        const bool finite = isfinite(s->nll), ref_finite = !ref || isfinite(s->ref_nll);
        ev->not_finite = !finite || !ref_finite || (ref && !isfinite(s->kld));
        if (ev->not_finite)
            return qt_fail(err, QT_E_INPUT, ev->side[finite && !ref_finite].weights->dir, NULL,
                           "the logits are not finite at token %zu of the data", token);
        if (ref) {
            ev->kld[window * ev->compared + (pos + i) / (ev->masked ? MASK_STEP : 1)] = s->kld;
            sums->kld += s->kld;
            sums->same_top += s->same_top;
        }
        if (!ev->masked && pos + i + 1 == ev->seqlen)
            continue; /* the last position has no target: see score_chunk */
        sums->nll += s->nll;
        if (ref) {
            sums->ref_nll += s->ref_nll;
            sums->p_delta2 += s->p_delta * s->p_delta;
        }
    }
    return QT_OK;
}

/* Keeps the logits of positions [pos, pos + m) of the first window. */
static int keep_logits(struct eval *ev, size_t pos, size_t m, struct qt_err *err)
{
    const struct side *s = &ev->side[0];
    const size_t count = m * s->info.vocab;
    const float cap = s->info.logit_softcap;
    float *out = ev->first_logits + pos * s->info.vocab;
    int rc = ev->be->download(ev->be, out, s->logits, count * sizeof *out, err);
    for (size_t i = 0; rc == QT_OK && cap > 0 && i < count; i++)
        out[i] = cap * tanhf(out[i] / cap);
    return rc;
}

/* Computes logits (of side 0 only if it is not fused) and scores of positions [pos, pos + m) of a
 * window whose hidden states start at row `row`. The target of a position is the next token, or the
 * masked one. The last position of a window has no target: it is compared with the reference like
 * the others, but gets a placeholder target, and add_scores skips the scores that depend on the
 * target. */
static int score_chunk(struct eval *ev, size_t window, size_t row, size_t pos, size_t m,
                       struct qt_err *err)
{
    const uint32_t *ids = ev->ids + window * ev->seqlen;
    int rc;
    for (size_t i = 0; i < m; i++)
        ev->targets[i] = ids[ev->masked ? pos + i : pos + i + 1 < ev->seqlen ? pos + i + 1 : 0];
    for (size_t i = 0; i < ev->nsides; i++) {
        struct side *s = &ev->side[i];
        if (!is_fused(ev, s))
            QT_TRY(qt_head_logits(s->embed_head, s->logits, s->hidden + (row + pos) * s->info.state,
                                  m, err));
    }
    if (window == 0 && ev->first_logits)
        QT_TRY(keep_logits(ev, pos, m, err));
    QT_TRY(ev->be->score(ev->be, ev->scores, ev->side[0].logits, ev->side[1].logits, ev->targets,
                         ev->side[0].info.logit_softcap, m, ev->side[0].info.vocab, err));
    QT_TRY(add_scores(ev, window, pos, m, err));
done:
    return rc;
}

/* Adds the errors of the hidden states of positions [pos, pos + m) of a window: see score_chunk. */
static int compare_chunk(struct eval *ev, size_t window, size_t row, size_t pos, size_t m,
                         struct qt_err *err)
{
    struct window_sums *sums = &ev->sums[window];
    const size_t hidden = ev->side[0].info.hidden;
    int rc = QT_OK;
    for (size_t i = 0; i < 2; i++) {
        struct side *s = &ev->side[i];
        QT_TRY(qt_head_hidden(s->embed_head, s->logits, s->hidden + (row + pos) * s->info.state, m,
                              err));
        QT_TRY(ev->be->download(ev->be, ev->states[i], s->logits, m * hidden * sizeof **ev->states,
                                err));
    }
    for (size_t i = 0; i < m * hidden; i++) {
        const double ref = (double)ev->states[1][i], error = (double)ev->states[0][i] - ref;
        sums->error2 += error * error;
        sums->ref2 += ref * ref;
    }
    ev->not_finite = !isfinite(sums->error2);
    if (ev->not_finite)
        rc = qt_fail(err, QT_E_INPUT, ev->side[isfinite(sums->ref2) ? 0 : 1].weights->dir, NULL,
                     "the hidden states are not finite in window %zu of the data", window);
done:
    return rc;
}

struct fused_window {
    struct eval *ev;
    size_t window, row;
};

/* Scores logits[m][vocab] of the fused runtime. */
static int score_fused(void *ctx, const float *logits, size_t position, size_t m,
                       struct qt_err *err)
{
    const struct fused_window *w = ctx;
    const struct side *s = &w->ev->side[0];
    const size_t vocab = s->info.vocab;
    int rc = QT_OK;
    for (size_t at = 0; at < m; at += LOGIT_POSITIONS) {
        const size_t n = qt_min_size(LOGIT_POSITIONS, m - at);
        QT_TRY(w->ev->be->upload(w->ev->be, s->logits, logits + at * vocab,
                                 n * vocab * sizeof *logits, err));
        QT_TRY(score_chunk(w->ev, w->window, w->row, position + at, n, err));
    }
done:
    return rc;
}

static int score_window(struct eval *ev, size_t window, size_t row, struct qt_err *err)
{
    struct fused_window fused = {ev, window, row};
    int rc = QT_OK;
    if (ev->fused)
        return qt_runtime_all_logits(ev->fused, ev->ids + window * ev->seqlen, ev->seqlen,
                                     score_fused, &fused, err);
    for (size_t pos = 0; rc == QT_OK && pos < ev->seqlen; pos += LOGIT_POSITIONS)
        rc = (ev->hidden ? compare_chunk : score_chunk)(
            ev, window, row, pos, qt_min_size(LOGIT_POSITIONS, ev->seqlen - pos), err);
    return rc;
}

static int score_batch(struct eval *ev, size_t first, size_t windows, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < windows; i++) {
        QT_TRY(score_window(ev, first + i, i * ev->seqlen, err));
        advance(ev, 1);
    }
done:
    return rc;
}

static int run_batches(struct eval *ev, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t first = ev->first; first < ev->end; first += ev->batch) {
        size_t windows = qt_min_size(ev->batch, ev->end - first);
        for (size_t i = 0; i < ev->nsides; i++)
            if (!is_fused(ev, &ev->side[i]))
                QT_TRY(run_layers(ev, &ev->side[i], first, windows, err));
        QT_TRY(score_batch(ev, first, windows, err));
    }
done:
    return rc;
}

/* All ranks receive the results of all windows, in order. rc: the status of this rank. */
static int gather(struct eval *ev, int rc, struct qt_err *err)
{
    const size_t own = ev->end - ev->first;
    size_t *sizes = NULL;
    char *all = NULL;
    QT_TRY(qt_comm_meet(ev->comm, rc, err));
    if (qt_comm_size(ev->comm) == 1)
        return QT_OK;
    QT_TRY(qt_array_new(&sizes, ev->comm->size, sizeof *sizes, err));
    QT_TRY(
        qt_comm_collect(ev->comm, &all, sizes, ev->sums + ev->first, own * sizeof *ev->sums, err));
    memcpy(ev->sums, all, ev->windows * sizeof *ev->sums);
    if (ev->nsides == 2) {
        const size_t bytes = ev->compared * sizeof *ev->kld;
        qt_free(all);
        QT_TRY(qt_comm_collect(ev->comm, &all, sizes, ev->kld + ev->first * ev->compared,
                               own * bytes, err));
        memcpy(ev->kld, all, ev->windows * bytes);
    }
done:
    qt_free(sizes);
    qt_free(all);
    return rc;
}

/* ---- figures -------------------------------------------------------------------------------- */

static int compare_double(const void *a, const void *b)
{
    double x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

/* Quantile q of sorted x[n] with linear interpolation, as in NumPy and R by default. */
static double quantile(const double *x, size_t n, double q)
{
    double at = q * (double)(n - 1);
    size_t i = (size_t)at;
    double part = at - (double)i;
    return i + 1 < n ? x[i] + part * (x[i + 1] - x[i]) : x[n - 1];
}

static double window_nll(const struct window_sums *w)
{
    return w->nll;
}

static double window_increase(const struct window_sums *w)
{
    return w->nll - w->ref_nll;
}

static double window_kld(const struct window_sums *w)
{
    return w->kld;
}

/* The standard error of the mean over windows of value(window) / n; NaN for one window. Windows of
 * a text are less dependent on each other than its tokens are. */
static double standard_error(const struct eval *ev, double (*value)(const struct window_sums *),
                             double n)
{
    const double count = (double)ev->windows;
    double mean = 0, square = 0;
    if (ev->windows < 2)
        return NAN;
    for (size_t i = 0; i < ev->windows; i++)
        mean += value(&ev->sums[i]) / n / count;
    for (size_t i = 0; i < ev->windows; i++) {
        const double d = value(&ev->sums[i]) / n - mean;
        square += d * d;
    }
    return sqrt(square / (count - 1) / count);
}

static double window_error(const struct window_sums *w)
{
    return sqrt(w->error2 / w->ref2);
}

static void fill_hidden(struct qt_eval_report *out, const struct eval *ev)
{
    double error2 = 0, ref2 = 0;
    for (size_t i = 0; i < ev->windows; i++) {
        error2 += ev->sums[i].error2;
        ref2 += ev->sums[i].ref2;
    }
    *out = (struct qt_eval_report){.windows = ev->windows,
                                   .seqlen = ev->seqlen,
                                   .vocab = ev->side[0].info.vocab,
                                   .scored_tokens = ev->windows * ev->seqlen,
                                   .nll = NAN,
                                   .ppl = NAN,
                                   .ppl_se = NAN,
                                   .has_ref = true,
                                   .hidden = true,
                                   .hidden_error = sqrt(error2 / ref2),
                                   .hidden_error_se = standard_error(ev, window_error, 1)};
}

/* Errors of exponentials are those of the exponents, times the value (the delta method). */
static void fill_report(struct qt_eval_report *out, struct eval *ev)
{
    const size_t targets = ev->masked ? ev->compared : ev->seqlen - 1;
    const double each = (double)targets, scored = (double)ev->windows * each;
    size_t positions = ev->windows * ev->compared;
    struct window_sums all = {0};
    for (size_t i = 0; i < ev->windows; i++) {
        all.nll += ev->sums[i].nll;
        all.ref_nll += ev->sums[i].ref_nll;
        all.p_delta2 += ev->sums[i].p_delta2;
        all.same_top += ev->sums[i].same_top;
    }
    *out = (struct qt_eval_report){
        .windows = ev->windows,
        .seqlen = ev->seqlen,
        .vocab = ev->side[0].info.vocab,
        .logits = ev->first_logits,
        .masked = ev->masked != NULL,
        .scored_tokens = ev->windows * targets,
        .nll = all.nll / scored,
        .ppl = exp(all.nll / scored),
        .has_ref = ev->nsides == 2,
    };
    ev->first_logits = NULL; /* is the caller's now */
    out->ppl_se = out->ppl * standard_error(ev, window_nll, each);
    if (!out->has_ref)
        return;
    double sum = 0;
    for (size_t i = 0; i < positions; i++)
        sum += ev->kld[i];
    qsort(ev->kld, positions, sizeof *ev->kld, compare_double);
    out->ref_nll = all.ref_nll / scored;
    out->ref_ppl = exp(out->ref_nll);
    out->ppl_ratio = exp(out->nll - out->ref_nll);
    out->ppl_ratio_se = out->ppl_ratio * standard_error(ev, window_increase, each);
    out->kld_mean = sum / (double)positions;
    out->kld_se = standard_error(ev, window_kld, (double)ev->compared);
    out->kld_median = quantile(ev->kld, positions, 0.5);
    out->kld_p999 = quantile(ev->kld, positions, 0.999);
    for (size_t i = 0; i < QT_KLD_QUANTILES; i++)
        out->kld_quantile[i] = quantile(ev->kld, positions, qt_kld_quantiles[i]);
    out->same_top = (double)all.same_top / (double)positions;
    out->rms_dp = sqrt(all.p_delta2 / scored);
}

int qt_eval(struct qt_eval_report *out, const struct qt_weights *w, const struct qt_weights *ref,
            const uint32_t *ids, size_t count, const struct qt_eval_options *opt,
            struct qt_backend *be, struct qt_err *err)
{
    struct eval ev = {.be = be, .log = opt->log, .ids = ids, .comm = opt->comm};
    int rc;
    *out = (struct qt_eval_report){0};
    ev.nsides = ref ? 2 : 1;
    ev.side[0].weights = w;
    ev.side[1].weights = ref;
    QT_TRY(open_models(&ev, opt->logits, err));
    QT_TRY(choose_seqlen(&ev, opt->seqlen, err));
    QT_TRY(choose_windows(&ev, count, opt->windows, err));
    QT_TRY(mask_tokens(&ev, err));
    choose_share(&ev);
    QT_TRY(open_fused(&ev, opt, err));
    choose_batch(&ev, opt->batch_bytes);
    QT_TRY(new_buffers(&ev, opt->logits, err));
    QT_TRY(gather(&ev, run_batches(&ev, err), err));
    if (ev.hidden)
        fill_hidden(out, &ev);
    else
        fill_report(out, &ev);
done:
    out->not_finite = ev.not_finite;
    eval_close(&ev);
    return rc;
}
