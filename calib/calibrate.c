/*
 * Calibration on the unquantized model: one pass over the decoder layers. Each layer runs on the
 * hidden states of all windows, and a hook adds up the statistics of the linear inputs.
 */
#include "calib/calib.h"

#include <string.h>

/* ---- the model ------------------------------------------------------------------------------ */

/* Fills *out except for its parts; the caller frees *k, to which out->k points. */
static int describe_model(struct qt_qcal_info *out, size_t (**k)[QT_INPUTS],
                          const struct qt_ckpt *ckpt, const struct qt_model *model,
                          struct qt_err *err)
{
    const struct qt_model_info *info = qt_model_info(model);
    const char *part = qt_model_cannot(model, QT_USE_CALIB_FILE);
    int rc;
    if (part)
        return qt_fail(err, QT_E_UNSUPPORTED, qt_ckpt_path(ckpt), NULL,
                       "calibration files do not support %s; quantize with --data instead", part);
    *out = (struct qt_qcal_info){
        .family = info->family, .layers = info->layers, .hidden = info->hidden};
    QT_TRY(qt_ckpt_sample_crc(&out->sample_crc, ckpt, err));
    QT_TRY(qt_array_new(k, info->layers, sizeof **k, err));
    for (size_t l = 0; l < info->layers; l++) {
        const struct qt_linear *linear;
        size_t n = qt_model_linears(&linear, model, l);
        for (size_t i = 0; i < n; i++)
            (*k)[l][linear[i].input] = linear[i].k;
    }
    out->k = (const size_t(*)[QT_INPUTS]) * k;
done:
    return rc;
}

int qt_calibrate_check(const struct qt_qcal *q, const struct qt_ckpt *ckpt,
                       const struct qt_model *model, struct qt_err *err)
{
    struct qt_qcal_info info;
    size_t(*k)[QT_INPUTS] = NULL;
    int rc = describe_model(&info, &k, ckpt, model, err);
    if (rc == QT_OK)
        rc = qt_qcal_check_model(q, &info, qt_ckpt_path(ckpt), err);
    qt_free(k);
    return rc;
}

/* ---- statistics ----------------------------------------------------------------------------- */

struct run {
    const char *path;
    const struct qt_calibrate_options *opt;
    struct qt_backend *be;
    struct qt_weights weights;
    struct qt_model *model;
    struct qt_qcal_info info;
    size_t (*k)[QT_INPUTS];
    struct qt_qcal_writer *writer;
    size_t tokens, seqlen;
    float *hidden; /* backend, [tokens][hidden] */
    /* Statistics of the current layer, in backend memory. */
    double *gram[QT_INPUTS];
    struct qt_channels channels[QT_INPUTS];
};

static int calibrate_interrupted(const char *path, struct qt_err *err)
{
    return qt_fail(err, QT_E_INTERRUPTED, path, NULL, "interrupted; no file was written");
}

static int add_statistics(void *ctx, int input, const float *x, size_t m, size_t k,
                          struct qt_err *err)
{
    struct run *r = ctx;
    if (r->opt->interrupted && r->opt->interrupted())
        return calibrate_interrupted(r->path, err);
    int rc = r->be->gram(r->be, r->gram[input], x, m, k, err);
    return rc < 0 ? rc : r->be->channels(r->be, &r->channels[input], x, m, k, err);
}

static void free_input(struct run *r, size_t i)
{
    struct qt_channels *c = &r->channels[i];
    r->be->free(r->be, r->gram[i]);
    qt_backend_channels_free(c, r->be);
    r->gram[i] = NULL;
}

static int new_input(struct run *r, size_t i, size_t k, struct qt_err *err)
{
    struct qt_channels *c = &r->channels[i];
    size_t bytes;
    int rc;
    if (qt_mul_overflow(&bytes, k, k) || qt_mul_overflow(&bytes, bytes, sizeof **r->gram))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory (%zu x %zu doubles)", k, k);
    QT_TRY(r->be->alloc(r->be, &r->gram[i], bytes, err));
    QT_TRY(qt_backend_channels(c, r->be, k, err));
done:
    return rc;
}

/* Downloads the statistics of an input and writes them to the file. */
static int store_input(struct run *r, size_t layer, size_t i, struct qt_err *err)
{
    size_t k = r->k[layer][i];
    struct qt_backend *be = r->be;
    const struct qt_channels *from = &r->channels[i];
    struct qt_channels c = {0};
    double *h = NULL;
    int rc;
    QT_TRY(qt_channels_new(&c, k, err));
    QT_TRY(be->download(be, c.absmax, from->absmax, k * sizeof *c.absmax, err));
    QT_TRY(be->download(be, c.sum2, from->sum2, k * sizeof *c.sum2, err));
    QT_TRY(be->download(be, c.hist, from->hist, k * QT_HIST_BINS * sizeof *c.hist, err));
    QT_TRY(qt_array_new(&h, k * k, sizeof *h, err));
    QT_TRY(be->download(be, h, r->gram[i], k * k * sizeof *h, err));
    QT_TRY(qt_qcal_put(r->writer, layer, i, h, &c, r->weights.dir, err));
done:
    qt_channels_free(&c);
    qt_free(h);
    return rc;
}

static int run_layer(struct run *r, size_t layer, struct qt_err *err)
{
    struct qt_hook hook = {r, add_statistics};
    struct qt_layer *decoder_layer = NULL;
    int rc;
    for (size_t i = 0; i < QT_INPUTS; i++)
        QT_TRY(new_input(r, i, r->k[layer][i], err));
    QT_TRY(qt_layer_open(&decoder_layer, r->model, layer, &r->weights, r->be, err));
    QT_TRY(qt_layer_run(decoder_layer, r->hidden, r->tokens, r->seqlen, &hook, err));
    qt_layer_close(decoder_layer);
    decoder_layer = NULL;
    for (size_t i = 0; i < QT_INPUTS; i++) {
        QT_TRY(store_input(r, layer, i, err));
        free_input(r, i);
    }
done:
    qt_layer_close(decoder_layer);
    return rc;
}

/* ---- the run -------------------------------------------------------------------------------- */

static int check_windows(struct run *r, const struct qt_qcal_part *part, struct qt_err *err)
{
    size_t limit = qt_model_info(r->model)->max_positions;
    r->seqlen = part->seqlen;
    if (r->seqlen > limit)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "windows of %zu tokens; the model takes %zu",
                       r->seqlen, limit);
    if (qt_mul_overflow(&r->tokens, part->samples, part->seqlen) || r->tokens > UINT32_MAX)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "%zu windows of %zu tokens are too many",
                       part->samples, part->seqlen);
    return QT_OK;
}

static int embed(struct run *r, const uint32_t *ids, struct qt_err *err)
{
    size_t bytes;
    int rc;
    if (qt_mul_overflow(&bytes, r->tokens, r->info.hidden * sizeof *r->hidden))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
    QT_TRY(r->be->alloc(r->be, &r->hidden, bytes, err));
    QT_TRY(qt_model_embed(r->hidden, r->model, &r->weights, r->be, ids, r->tokens, r->seqlen, err));
done:
    return rc;
}

int qt_calibrate(const char *path, const struct qt_ckpt *ckpt, const uint32_t *ids,
                 const struct qt_qcal_part *part, const struct qt_calibrate_options *opt,
                 struct qt_err *err)
{
    struct run r = {
        .path = path, .opt = opt, .be = opt->backend, .weights = qt_weights_of_ckpt(ckpt)};
    struct qt_qcal_part stored = *part;
    int rc;
    QT_TRY(qt_model_open(&r.model, &r.weights, err));
    QT_TRY(check_windows(&r, part, err));
    QT_TRY(describe_model(&r.info, &r.k, ckpt, r.model, err));
    stored.ids_crc = qt_crc32(0, ids, r.tokens * sizeof *ids);
    r.info.parts = &stored;
    r.info.nparts = 1;
    QT_TRY(qt_qcal_create(&r.writer, path, &r.info, opt->force, err));
    QT_TRY(embed(&r, ids, err));
    for (size_t l = 0; l < r.info.layers; l++) {
        qt_log_layer(opt->log, l, r.info.layers, (double)r.tokens);
        QT_TRY(run_layer(&r, l, err));
        qt_log_progress(opt->log, "calibrate", (double)(l + 1), (double)r.info.layers);
    }
    QT_TRY(qt_ckpt_check_unchanged(ckpt, err));
    QT_TRY(qt_qcal_finish(r.writer, err));
done:
    if (rc == QT_E_INTERRUPTED && !err->file[0]) /* a parallel loop was stopped */
        calibrate_interrupted(path, err);
    for (size_t i = 0; i < QT_INPUTS; i++)
        free_input(&r, i);
    r.be->free(r.be, r.hidden);
    qt_qcal_abandon(r.writer);
    qt_free(r.k);
    qt_model_close(r.model);
    return rc;
}

/* ---- histograms ----------------------------------------------------------------------------- */

double qt_hist_quantile(const uint32_t hist[QT_HIST_BINS], float absmax, double q)
{
    double total = 0, below = 0, lo, hi;
    uint32_t b = 0;
    for (size_t i = 0; i < QT_HIST_BINS; i++)
        total += hist[i];
    double rank = q * total;
    while (b + 1 < QT_HIST_BINS && below + hist[b] < rank)
        below += hist[b++];
    if (hist[b] == 0)
        return (double)absmax; /* no tokens in the histogram */
    lo = b ? exp2(((double)b - 33) / 2) : 0;
    hi = exp2(((double)b - 32) / 2);
    hi = b + 1 < QT_HIST_BINS && hi < (double)absmax ? hi : (double)absmax;
    return lo + (hi - lo) * (rank - below) / hist[b];
}
