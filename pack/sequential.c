#include "pack/sequential.h"

#include <string.h>

enum { CHUNK_TOKENS = 4096 }; /* about; whole windows that are run at once to observe */

struct qt_sequential {
    const struct qt_calibration *data;
    struct qt_backend *be;
    struct qt_weights source;
    struct qt_model *model;
    size_t tokens, width;
    float *hidden;           /* backend, [tokens][width] */
    float *chunk;            /* backend, a copy of some windows */
    double *gram[QT_INPUTS]; /* backend */
    double *h[QT_INPUTS];    /* host */
};

static int embed(struct qt_sequential *s, struct qt_err *err)
{
    struct qt_ends *ends = NULL;
    int rc;
    QT_TRY(qt_ends_open(&ends, s->model, &s->source, s->be, err));
    QT_TRY(qt_ends_embed(ends, s->hidden, s->data->ids, s->tokens, s->data->seqlen, err));
done:
    qt_ends_close(ends);
    return rc;
}

static size_t chunk_tokens(const struct qt_sequential *s)
{
    size_t windows = CHUNK_TOKENS / s->data->seqlen;
    return (windows ? windows : 1) * s->data->seqlen;
}

int qt_sequential_open(struct qt_sequential **out, const struct qt_weights *source,
                       const struct qt_calibration *data, struct qt_err *err)
{
    struct qt_sequential *s = NULL;
    size_t bytes;
    int rc;
    *out = NULL;
    QT_TRY(qt_array_new(&s, 1, sizeof *s, err));
    s->data = data;
    s->be = data->backend;
    s->source = *source;
    QT_TRY(qt_model_open(&s->model, source, err));
    s->width = qt_model_info(s->model)->hidden;
    if (data->seqlen > qt_model_info(s->model)->max_positions) {
        rc = qt_fail(err, QT_E_USAGE, NULL, NULL, "windows of %zu tokens; the model takes %zu",
                     data->seqlen, qt_model_info(s->model)->max_positions);
        goto done;
    }
    s->tokens = data->samples * data->seqlen;
    if (qt_mul_overflow(&bytes, s->tokens, s->width * sizeof *s->hidden)) {
        rc = qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
        goto done;
    }
    QT_TRY(s->be->new (s->be, (void **)&s->hidden, bytes, err));
    QT_TRY(
        s->be->new (s->be, (void **)&s->chunk, chunk_tokens(s) * s->width * sizeof *s->chunk, err));
    QT_TRY(embed(s, err));
    *out = s;
done:
    if (rc < 0)
        qt_sequential_close(s);
    return rc;
}

static void grams_free(struct qt_sequential *s)
{
    for (int i = 0; i < QT_INPUTS; i++) {
        s->be->free(s->be, s->gram[i]);
        qt_free(s->h[i]);
        s->gram[i] = s->h[i] = NULL;
    }
}

void qt_sequential_close(struct qt_sequential *s)
{
    if (!s)
        return;
    grams_free(s);
    s->be->free(s->be, s->hidden);
    s->be->free(s->be, s->chunk);
    qt_model_close(s->model);
    qt_free(s);
}

const struct qt_model *qt_sequential_model(const struct qt_sequential *s)
{
    return s->model;
}

static int tap_input(void *ctx, int input, const float *x, size_t m, size_t k, struct qt_err *err)
{
    struct qt_sequential *s = ctx;
    return s->be->gram(s->be, s->gram[input], x, m, k, err);
}

static int grams_new(struct qt_sequential *s, size_t layer, struct qt_err *err)
{
    const struct qt_linear *linear;
    size_t n = qt_model_linears(&linear, s->model, layer);
    int rc = QT_OK;
    grams_free(s);
    for (size_t i = 0; i < n; i++) {
        int input = linear[i].input;
        size_t bytes;
        if (s->h[input])
            continue;
        if (qt_mul_overflow(&bytes, linear[i].k, linear[i].k) ||
            qt_mul_overflow(&bytes, bytes, sizeof **s->h))
            return qt_fail(err, QT_E_RESOURCE, NULL, linear[i].weight, "out of memory");
        QT_TRY(qt_array_new(&s->h[input], bytes, 1, err)); /* zero */
        QT_TRY(s->be->new (s->be, (void **)&s->gram[input], bytes, err));
        QT_TRY(s->be->upload(s->be, s->gram[input], s->h[input], bytes, err));
    }
done:
    return rc;
}

static int grams_download(struct qt_sequential *s, size_t layer, struct qt_err *err)
{
    const struct qt_linear *linear;
    size_t n = qt_model_linears(&linear, s->model, layer);
    int rc = QT_OK;
    for (size_t i = 0; i < n; i++) {
        int input = linear[i].input;
        if (!s->gram[input])
            continue;
        QT_TRY(s->be->download(s->be, s->h[input], s->gram[input],
                               linear[i].k * linear[i].k * sizeof **s->h, err));
        s->be->free(s->be, s->gram[input]);
        s->gram[input] = NULL;
    }
done:
    return rc;
}

int qt_sequential_observe(const double *const **h, struct qt_sequential *s, size_t layer,
                          struct qt_err *err)
{
    struct qt_tap tap = {s, tap_input};
    struct qt_block *block = NULL;
    size_t step = chunk_tokens(s);
    int rc;
    QT_TRY(grams_new(s, layer, err));
    QT_TRY(qt_block_open(&block, s->model, layer, &s->source, s->be, err));
    for (size_t at = 0; at < s->tokens; at += step) {
        size_t m = qt_min_size(step, s->tokens - at);
        QT_TRY(s->be->copy(s->be, s->chunk, s->hidden + at * s->width,
                           m * s->width * sizeof *s->chunk, err));
        QT_TRY(qt_block_run(block, s->chunk, m, s->data->seqlen, &tap, err));
    }
    QT_TRY(grams_download(s, layer, err));
    *h = (const double *const *)s->h;
done:
    qt_block_close(block);
    return rc;
}

int qt_sequential_advance(struct qt_sequential *s, size_t layer, const struct qt_weights *quantized,
                          struct qt_err *err)
{
    struct qt_block *block = NULL;
    int rc;
    QT_TRY(qt_block_open(&block, s->model, layer, quantized, s->be, err));
    QT_TRY(qt_block_run(block, s->hidden, s->tokens, s->data->seqlen, NULL, err));
done:
    qt_block_close(block);
    return rc;
}
