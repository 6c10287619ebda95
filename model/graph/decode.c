/* Generation: a whole model in backend memory that continues sequences, some tokens at a time. */
#include "model/graph/layer.h"

#include <math.h>

struct qt_decoder {
    const struct qt_model *model;
    struct qt_backend *be;
    struct qt_embed_head *outer;
    struct qt_layer **layers;   /* [info.layers]; one of them has the working memory */
    struct layer_cache *caches; /* [info.layers] */
    struct cache_work work;
    size_t past;                   /* tokens of each sequence so far */
    size_t step;                   /* tokens of each sequence that run at a time, at most */
    float *hidden, *last, *logits; /* [sequences * step][state], [sequences][state], [][vocab] */
};

void qt_decoder_close(struct qt_decoder *d)
{
    if (!d)
        return;
    struct qt_backend *be = d->be;
    for (size_t i = 0; i < d->model->cfg.info.layers; i++) {
        if (d->layers)
            qt_layer_close(d->layers[i]);
        if (d->caches)
            cache_close(&d->caches[i], be);
    }
    qt_embed_head_close(d->outer);
    cache_work_close(&d->work, be);
    be->free(be, d->hidden);
    be->free(be, d->last);
    be->free(be, d->logits);
    qt_free(d->layers);
    qt_free(d->caches);
    qt_free(d);
}

static int open_parts(struct qt_decoder *d, const struct qt_weights *w, size_t sequences,
                      size_t capacity, const struct qt_log *log, struct qt_err *err)
{
    const struct qt_model_info *info = &d->model->cfg.info;
    struct qt_backend *be = d->be;
    size_t all;
    int rc;
    if (d->model->cfg.arch->both_ways)
        return qt_fail(err, QT_E_UNSUPPORTED, w->dir, NULL,
                       "an encoder (%s), whose attention goes both ways, cannot continue a text",
                       info->family);
    QT_TRY(layer_check_length(d->model, capacity, capacity, err));
    if (qt_mul_overflow(&all, sequences, capacity))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL,
                       "out of memory (%zu sequences of %zu tokens)", sequences, capacity);
    d->step = qt_min_size(capacity, qt_max_size(LAYER_TOKENS / sequences, 1));
    QT_TRY(qt_array_new(&d->layers, info->layers, sizeof *d->layers, err));
    QT_TRY(qt_array_new(&d->caches, info->layers, sizeof *d->caches, err));
    QT_TRY(cache_work_open(&d->work, d->model, w->fake_quant.cache != NULL, sequences, capacity,
                           d->step, be, err));
    QT_TRY(qt_embed_head_open(&d->outer, d->model, w, be, err));
    for (size_t i = 0; i < info->layers; i++) {
        qt_log_progress(log, "load", (double)i, (double)info->layers);
        QT_TRY(qt_layer_open(&d->layers[i], d->model, i, w, be, err));
        QT_TRY(cache_open(&d->caches[i], d->model, i, &d->work, be, err));
    }
    qt_log_progress(log, "load", (double)info->layers, (double)info->layers);
    QT_TRY(layer_prepare(d->layers[0], sequences * d->step, capacity, err));
    QT_TRY(qt_backend_floats(&d->hidden, be, sequences * d->step, info->state, err));
    QT_TRY(qt_backend_floats(&d->last, be, sequences, info->state, err));
    QT_TRY(qt_backend_floats(&d->logits, be, sequences, info->vocab, err));
done:
    return rc;
}

int qt_decoder_open(struct qt_decoder **out, const struct qt_model *model,
                    const struct qt_weights *w, struct qt_backend *be, size_t sequences,
                    size_t capacity, const struct qt_log *log, struct qt_err *err)
{
    struct qt_decoder *d;
    int rc;
    *out = NULL;
    QT_TRY(qt_array_new(&d, 1, sizeof *d, err));
    *d = (struct qt_decoder){.model = model, .be = be};
    rc = open_parts(d, w, sequences, capacity, log, err);
    if (rc < 0)
        qt_decoder_close(d);
    else
        *out = d;
done:
    return rc;
}

/* Runs ids[sequences][tokens], tokens <= step, through all decoder layers. */
static int run_step(struct qt_decoder *d, const uint32_t *ids, size_t tokens, struct qt_err *err)
{
    const size_t m = d->work.sequences * tokens, layers = d->model->cfg.info.layers;
    int rc;
    QT_TRY(embed_tokens_at(d->outer, d->hidden, ids, m, tokens, d->past, err));
    for (size_t i = 0; i < layers; i++) {
        struct qt_layer *layer = d->layers[i], *next = d->layers[(i + 1) % layers];
        QT_TRY(qt_stop_check(err));
        rc = layer_continue(layer, d->hidden, tokens, d->past, &d->caches[i], err);
        if (next != layer) {
            next->work = layer->work;
            layer->work = (struct layer_work){0};
        }
        if (rc < 0)
            goto done;
    }
    d->past += tokens;
done:
    return rc;
}

/* Logits of the last token of each sequence, of a step of `tokens`. */
static int last_logits(float *logits, struct qt_decoder *d, size_t tokens, struct qt_err *err)
{
    const struct qt_model_info *info = &d->model->cfg.info;
    const size_t sequences = d->work.sequences, n = info->state;
    struct qt_backend *be = d->be;
    int rc;
    QT_TRY(be->copy_columns(be, d->last, n, d->hidden + (tokens - 1) * n, tokens * n, n, sequences,
                            err));
    QT_TRY(qt_head_logits(d->outer, d->logits, d->last, sequences, err));
    QT_TRY(be->download(be, logits, d->logits, sequences * info->vocab * sizeof *logits, err));
    for (size_t i = 0; info->logit_softcap > 0 && i < sequences * info->vocab; i++)
        logits[i] = info->logit_softcap * tanhf(logits[i] / info->logit_softcap);
done:
    return rc;
}

int qt_decoder_run(struct qt_decoder *d, float *logits, const uint32_t *ids, size_t tokens,
                   struct qt_err *err)
{
    const size_t sequences = d->work.sequences;
    uint32_t *some = NULL;
    size_t n = 0;
    int rc;
    if (tokens == 0 || tokens > d->work.capacity - d->past)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "%zu tokens after %zu, but the decoder has room for %zu", tokens, d->past,
                       d->work.capacity);
    QT_TRY(qt_array_new(&some, sequences * d->step, sizeof *some, err));
    for (size_t at = 0; at < tokens; at += n) {
        n = qt_min_size(d->step, tokens - at);
        for (size_t s = 0; s < sequences; s++)
            memcpy(some + s * n, ids + s * tokens + at, n * sizeof *some);
        QT_TRY(run_step(d, some, n, err));
    }
    QT_TRY(last_logits(logits, d, n, err));
done:
    qt_free(some);
    return rc;
}
