#include "pack/sequential.h"

enum { CHUNK_TOKENS = 4096 }; /* about; whole windows that are run at once to observe */

struct qt_sequential {
    const struct qt_calibration *data;
    struct qt_backend *be;
    struct qt_weights source;
    struct qt_model *model;
    size_t tokens, width, layer;
    float *hidden;                    /* backend, [tokens][width] */
    float *reference;                 /* the same of the unquantized model */
    struct qt_block *rounded, *exact; /* of the layer, for either */
    struct sums {
        size_t k;
        double *gram, *h;         /* backend, host */
        float *shift, *cross;     /* backend (negative until it is complete), host */
        float *exact;             /* backend, [chunk][k]: z of the chunk */
        size_t exact_at, seen_at; /* tokens of it */
        struct qt_channels apart; /* backend: of z - x */
        double *strayed;          /* host, [k] */
    } sums;
};

static int embed(struct qt_sequential *s, struct qt_err *err)
{
    int rc = qt_model_embed(s->hidden, s->model, &s->source, s->be, s->data->ids, s->tokens,
                            s->data->seqlen, err);
    if (rc < 0)
        return rc;
    return s->be->copy(s->be, s->reference, s->hidden, s->tokens * s->width * sizeof *s->hidden,
                       err);
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
    QT_TRY(s->be->new (s->be, (void **)&s->reference, bytes, err));
    QT_TRY(embed(s, err));
    *out = s;
done:
    if (rc < 0)
        qt_sequential_close(s);
    return rc;
}

/* What is in backend memory. */
static void sums_release(struct qt_sequential *s)
{
    struct sums *u = &s->sums;
    s->be->free(s->be, u->gram);
    s->be->free(s->be, u->shift);
    s->be->free(s->be, u->exact);
    s->be->free(s->be, u->apart.absmax);
    s->be->free(s->be, u->apart.sum2);
    u->gram = NULL;
    u->shift = u->exact = NULL;
    u->apart = (struct qt_channels){0};
}

static void sums_free(struct qt_sequential *s)
{
    sums_release(s);
    qt_free(s->sums.h);
    qt_free(s->sums.cross);
    qt_free(s->sums.strayed);
    s->sums = (struct sums){0};
}

void qt_sequential_close(struct qt_sequential *s)
{
    if (!s)
        return;
    sums_free(s);
    qt_block_close(s->rounded);
    qt_block_close(s->exact);
    s->be->free(s->be, s->hidden);
    s->be->free(s->be, s->reference);
    qt_model_close(s->model);
    qt_free(s);
}

const struct qt_model *qt_sequential_model(const struct qt_sequential *s)
{
    return s->model;
}

/* ---- the blocks of a layer ------------------------------------------------------------------ */

static int enter(struct qt_block **block, struct qt_sequential *s, size_t layer,
                 const struct qt_weights *weights, struct qt_err *err)
{
    return *block ? qt_block_load(*block, layer, weights, err)
                  : qt_block_open(block, s->model, layer, weights, s->be, err);
}

int qt_sequential_enter(struct qt_sequential *s, size_t layer, const struct qt_weights *now,
                        struct qt_err *err)
{
    int rc = enter(&s->exact, s, layer, &s->source, err);
    s->layer = layer;
    return rc < 0 ? rc : enter(&s->rounded, s, layer, now, err);
}

int qt_sequential_renew(struct qt_sequential *s, int input, const struct qt_weights *now,
                        struct qt_err *err)
{
    return qt_block_load_linears(s->rounded, input, now, err);
}

int qt_sequential_advance(struct qt_sequential *s, int input, struct qt_err *err)
{
    int rc;
    QT_TRY(qt_block_run_sublayer(s->rounded, input, s->hidden, s->tokens, s->data->seqlen, err));
    QT_TRY(qt_block_run_sublayer(s->exact, input, s->reference, s->tokens, s->data->seqlen, err));
done:
    return rc;
}

/* ---- an input ------------------------------------------------------------------------------- */

/* The chunk on its way through the unquantized block: z is kept until x comes. */
static int tap_exact(void *ctx, int input, const float *z, size_t m, size_t k, struct qt_err *err)
{
    struct qt_sequential *s = ctx;
    struct sums *u = &s->sums;
    float *dst = u->exact + u->exact_at * k;
    (void)input;
    u->exact_at += m;
    return s->be->copy(s->be, dst, z, m * k * sizeof *z, err);
}

/* The same chunk with the inputs that the linears will get: x - z takes the place of z. */
static int tap_input(void *ctx, int input, const float *x, size_t m, size_t k, struct qt_err *err)
{
    struct qt_sequential *s = ctx;
    struct sums *u = &s->sums;
    float *z = u->exact + u->seen_at * k;
    int rc;
    (void)input;
    u->seen_at += m;
    QT_TRY(s->be->gram(s->be, u->gram, x, m, k, err));
    QT_TRY(s->be->scale(s->be, z, -1, m * k, err));
    QT_TRY(s->be->add(s->be, z, x, m * k, err));
    QT_TRY(s->be->linear_grad_w(s->be, u->shift, z, x, m, k, k, err));
    QT_TRY(s->be->channels(s->be, &u->apart, z, m, k, err));
done:
    return rc;
}

static size_t chunk_tokens(const struct qt_sequential *s)
{
    size_t windows = CHUNK_TOKENS / s->data->seqlen;
    return qt_min_size((windows ? windows : 1) * s->data->seqlen, s->tokens);
}

static const struct qt_linear *linear_with(const struct qt_sequential *s, int input)
{
    const struct qt_linear *linear;
    size_t n = qt_model_linears(&linear, s->model, s->layer);
    for (size_t i = 0; i < n; i++)
        if (linear[i].input == input)
            return &linear[i];
    return NULL;
}

static int sums_new(struct qt_sequential *s, const struct qt_linear *linear, struct qt_err *err)
{
    struct sums *u = &s->sums;
    size_t k = linear->k, cells, bytes;
    int rc;
    sums_free(s);
    if (qt_mul_overflow(&cells, k, k) || qt_mul_overflow(&bytes, cells, sizeof *u->h))
        return qt_fail(err, QT_E_RESOURCE, NULL, linear->weight, "out of memory");
    u->k = k;
    QT_TRY(qt_array_new(&u->h, cells, sizeof *u->h, err));
    QT_TRY(qt_array_new(&u->cross, cells, sizeof *u->cross, err));
    QT_TRY(qt_array_new(&u->strayed, k, sizeof *u->strayed, err));
    QT_TRY(s->be->new (s->be, (void **)&u->gram, bytes, err));
    QT_TRY(s->be->new (s->be, (void **)&u->shift, cells * sizeof *u->shift, err));
    QT_TRY(s->be->new (s->be, (void **)&u->exact, chunk_tokens(s) * k * sizeof *u->exact, err));
    QT_TRY(s->be->new (s->be, (void **)&u->apart.absmax, k * sizeof *u->apart.absmax, err));
    QT_TRY(s->be->new (s->be, (void **)&u->apart.sum2, k * sizeof *u->apart.sum2, err));
done:
    return rc;
}

static int sums_download(struct qt_observed *out, struct qt_sequential *s, struct qt_err *err)
{
    struct sums *u = &s->sums;
    size_t cells = u->k * u->k;
    int rc;
    QT_TRY(s->be->scale(s->be, u->shift, -1, cells, err));
    QT_TRY(s->be->download(s->be, u->h, u->gram, cells * sizeof *u->h, err));
    QT_TRY(s->be->download(s->be, u->cross, u->shift, cells * sizeof *u->cross, err));
    QT_TRY(s->be->download(s->be, u->strayed, u->apart.sum2, u->k * sizeof *u->strayed, err));
    sums_release(s); /* solving needs the room */
    *out = (struct qt_observed){u->h, u->cross, u->strayed, s->tokens};
done:
    return rc;
}

/* Tokens [at, at + m). */
static int observe_chunk(struct qt_sequential *s, int input, size_t at, size_t m,
                         struct qt_err *err)
{
    const struct qt_tap keep = {s, tap_exact}, sum = {s, tap_input};
    const size_t seqlen = s->data->seqlen;
    int rc;
    s->sums.exact_at = s->sums.seen_at = 0;
    QT_TRY(qt_block_run_to(s->exact, input, s->reference + at * s->width, m, seqlen, &keep, err));
    QT_TRY(qt_block_run_to(s->rounded, input, s->hidden + at * s->width, m, seqlen, &sum, err));
done:
    return rc;
}

int qt_sequential_observe(struct qt_observed *out, struct qt_sequential *s, int input,
                          struct qt_err *err)
{
    const size_t step = chunk_tokens(s);
    int rc;
    QT_TRY(sums_new(s, linear_with(s, input), err));
    for (size_t at = 0; at < s->tokens; at += step)
        QT_TRY(observe_chunk(s, input, at, qt_min_size(step, s->tokens - at), err));
    QT_TRY(sums_download(out, s, err));
done:
    return rc;
}
