#include "pack/sequential.h"

enum { CHUNK_TOKENS = 4096 }; /* about; whole windows that are run at once to observe */

struct qt_sequential {
    const struct qt_calibration *data;
    struct qt_backend *be;
    struct qt_weights source;
    struct qt_model *model;
    size_t tokens, width, layer;
    float *hidden;    /* backend, [tokens][width] */
    float *reference; /* the same of the unquantized model */
    bool ahead;       /* the reference has left the sublayer already */
    struct mixture {
        size_t experts;          /* 0: none, and nothing of what follows */
        bool routed;             /* the tokens, where they stand */
        float *share;            /* [tokens][experts] */
        struct qt_tokens all;    /* that go through the expert */
        struct qt_tokens tokens; /* of the chunk, numbered from its first */
    } mixture;
    struct qt_layer *rounded, *exact; /* of the layer, for either */
    struct sums {
        int of; /* an input */
        size_t k;
        double *gram, *h; /* backend, host */
        struct lack {
            size_t n;
            float *there;             /* backend, [chunk][n]: of the unquantized model; then -d */
            float *sum, *cross;       /* backend (negative until it is complete), host */
            struct qt_channels apart; /* backend: of d */
            float times;              /* d is the difference times this: what outputs make up for */
            double *square;           /* host */
        } input, state;
        size_t kept, seen; /* tokens of the chunk */
        float *weighted;   /* backend, [chunk][k]: inputs of an expert, times shares */
        size_t chose;
        double square, fourth; /* sums of powers of shares */
    } sums;
};

static size_t chunk_tokens(const struct qt_sequential *s)
{
    size_t windows = CHUNK_TOKENS / s->data->seqlen;
    return qt_min_size((windows ? windows : 1) * s->data->seqlen, s->tokens);
}

static int embed(float *hidden, const struct qt_sequential *s, const struct qt_weights *weights,
                 struct qt_err *err)
{
    return qt_model_embed(hidden, s->model, weights, s->be, s->data->ids, s->tokens,
                          s->data->seqlen, err);
}

int qt_sequential_open(struct qt_sequential **out, const struct qt_weights *source,
                       const struct qt_weights *now, const struct qt_calibration *data,
                       struct qt_err *err)
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
    QT_TRY(s->be->alloc(s->be, &s->hidden, bytes, err));
    QT_TRY(s->be->alloc(s->be, &s->reference, bytes, err));
    QT_TRY(embed(s->reference, s, source, err));
    QT_TRY(embed(s->hidden, s, now, err));
    s->mixture.experts = qt_model_info(s->model)->experts;
    if (s->mixture.experts) {
        QT_TRY(qt_array_new(&s->mixture.share, s->tokens,
                            s->mixture.experts * sizeof *s->mixture.share, err));
        QT_TRY(qt_tokens_new(&s->mixture.all, s->tokens, err));
        QT_TRY(qt_tokens_new(&s->mixture.tokens, chunk_tokens(s), err));
    }
    *out = s;
done:
    if (rc < 0)
        qt_sequential_close(s);
    return rc;
}

/* What is in backend memory. */
static void lack_release(struct lack *l, struct qt_backend *be)
{
    be->free(be, l->there);
    be->free(be, l->sum);
    be->free(be, l->apart.absmax);
    be->free(be, l->apart.sum2);
    l->there = l->sum = NULL;
    l->apart = (struct qt_channels){0};
}

static void sums_release(struct qt_sequential *s)
{
    s->be->free(s->be, s->sums.gram);
    s->be->free(s->be, s->sums.weighted);
    s->sums.gram = NULL;
    s->sums.weighted = NULL;
    lack_release(&s->sums.input, s->be);
    lack_release(&s->sums.state, s->be);
}

static void sums_free(struct qt_sequential *s)
{
    sums_release(s);
    qt_free(s->sums.h);
    qt_free(s->sums.input.cross);
    qt_free(s->sums.input.square);
    qt_free(s->sums.state.cross);
    qt_free(s->sums.state.square);
    s->sums = (struct sums){0};
}

void qt_sequential_close(struct qt_sequential *s)
{
    if (!s)
        return;
    sums_free(s);
    qt_layer_close(s->rounded);
    qt_layer_close(s->exact);
    s->be->free(s->be, s->hidden);
    s->be->free(s->be, s->reference);
    qt_free(s->mixture.share);
    qt_tokens_free(&s->mixture.all);
    qt_tokens_free(&s->mixture.tokens);
    qt_model_close(s->model);
    qt_free(s);
}

/* ---- the blocks of a layer ------------------------------------------------------------------ */

static int enter(struct qt_layer **block, struct qt_sequential *s, size_t layer,
                 const struct qt_weights *weights, struct qt_err *err)
{
    return *block ? qt_layer_load(*block, layer, weights, err)
                  : qt_layer_open(block, s->model, layer, weights, s->be, err);
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
    return qt_layer_load_linears(s->rounded, input, now, err);
}

int qt_sequential_advance(struct qt_sequential *s, int input, struct qt_err *err)
{
    const size_t step = chunk_tokens(s), seqlen = s->data->seqlen;
    int rc = QT_OK;
    /* In the steps of observe, where the reference may have moved: the same bits either way. */
    for (size_t at = 0; at < s->tokens; at += step) {
        const size_t m = qt_min_size(step, s->tokens - at), row = at * s->width;
        QT_TRY(qt_layer_run_sublayer(s->rounded, input, s->hidden + row, m, seqlen, NULL, err));
        if (!s->ahead)
            QT_TRY(
                qt_layer_run_sublayer(s->exact, input, s->reference + row, m, seqlen, NULL, err));
    }
    s->ahead = s->mixture.routed = false;
done:
    return rc;
}

/* ---- an input ------------------------------------------------------------------------------- */

/* NULL: all count alike. */
static const float *share_of(const struct qt_sequential *s, size_t token)
{
    return s->sums.weighted ? s->mixture.tokens.share + token : NULL;
}

/* The chunk on its way through the unquantized block: kept until the other comes. */
static int tap_exact(void *ctx, int input, const float *z, size_t m, size_t k, struct qt_err *err)
{
    struct qt_sequential *s = ctx;
    const size_t at = s->sums.kept;
    const float *share = share_of(s, at);
    if (input != s->sums.of)
        return QT_OK;
    s->sums.kept += m;
    float *there = s->sums.input.there + at * k;
    return share ? s->be->gather_rows(s->be, there, z, NULL, share, m, k, err)
                 : s->be->copy(s->be, there, z, m * k * sizeof *z, err);
}

/* here[m][n] of the quantized model, for inputs x[m][k]; `at` tokens of the chunk were before. */
static int lack_add(struct lack *l, struct qt_backend *be, const float *here, const float *x,
                    size_t at, size_t m, size_t k, struct qt_err *err)
{
    float *d = l->there + at * l->n;
    int rc;
    QT_TRY(be->scale(be, d, -1, m * l->n, err));
    QT_TRY(be->add(be, d, here, m * l->n, err));
    if (l->times != 1)
        QT_TRY(be->scale(be, d, l->times, m * l->n, err));
    QT_TRY(be->linear_grad_w(be, l->sum, d, x, m, l->n, k, err));
    QT_TRY(be->channels(be, &l->apart, d, m, l->n, err));
done:
    return rc;
}

/* The same chunk with the inputs that the linears will get. */
struct arriving {
    struct qt_sequential *s;
    const float *hidden; /* of the chunk */
};

static int tap_input(void *ctx, int input, const float *x, size_t m, size_t k, struct qt_err *err)
{
    const struct arriving *a = ctx;
    struct qt_backend *be = a->s->be;
    struct sums *u = &a->s->sums;
    const size_t at = u->seen;
    int rc;
    (void)input;
    u->seen += m;
    if (u->weighted) {
        QT_TRY(be->gather_rows(be, u->weighted, x, NULL, share_of(a->s, at), m, k, err));
        x = u->weighted;
    }
    QT_TRY(be->gram(be, u->gram, x, m, k, err));
    QT_TRY(lack_add(&u->input, be, x, x, at, m, k, err));
    if (u->state.n)
        QT_TRY(lack_add(&u->state, be, a->hidden + at * u->state.n, x, at, m, k, err));
done:
    return rc;
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

static int lack_new(struct lack *l, struct qt_sequential *s, size_t n, size_t k, float times,
                    struct qt_err *err)
{
    struct qt_backend *be = s->be;
    int rc;
    l->n = n;
    l->times = times;
    QT_TRY(qt_array_new(&l->cross, n, k * sizeof *l->cross, err));
    QT_TRY(qt_array_new(&l->square, n, sizeof *l->square, err));
    QT_TRY(be->alloc(be, &l->there, chunk_tokens(s) * n * sizeof *l->there, err));
    QT_TRY(be->alloc(be, &l->sum, n * k * sizeof *l->sum, err));
    QT_TRY(be->alloc(be, &l->apart.absmax, n * sizeof *l->apart.absmax, err));
    QT_TRY(be->alloc(be, &l->apart.sum2, n * sizeof *l->apart.sum2, err));
done:
    return rc;
}

static int sums_new(struct qt_sequential *s, const struct qt_linear *linear, struct qt_err *err)
{
    struct sums *u = &s->sums;
    const float output_scale = qt_model_output_scale(s->model, s->layer, linear->input);
    size_t k = linear->k, cells, bytes;
    int rc;
    sums_free(s);
    if (qt_mul_overflow(&cells, k, k) || qt_mul_overflow(&bytes, cells, sizeof *u->h))
        return qt_fail(err, QT_E_RESOURCE, NULL, linear->weight, "out of memory");
    u->of = linear->input;
    u->k = k;
    QT_TRY(qt_array_new(&u->h, cells, sizeof *u->h, err));
    QT_TRY(s->be->alloc(s->be, &u->gram, bytes, err));
    QT_TRY(lack_new(&u->input, s, k, k, 1, err));
    if (qt_model_expert(s->model, s->layer, linear->input) >= 0)
        QT_TRY(s->be->alloc(s->be, &u->weighted, chunk_tokens(s) * k * sizeof *u->weighted, err));
    if (output_scale > 0)
        QT_TRY(lack_new(&u->state, s, s->width, k, 1 / output_scale, err));
done:
    return rc;
}

static int lack_download(struct qt_lack *out, struct lack *l, struct qt_backend *be, size_t k,
                         struct qt_err *err)
{
    int rc;
    QT_TRY(be->scale(be, l->sum, -1, l->n * k, err));
    QT_TRY(be->download(be, l->cross, l->sum, l->n * k * sizeof *l->cross, err));
    QT_TRY(be->download(be, l->square, l->apart.sum2, l->n * sizeof *l->square, err));
    *out = (struct qt_lack){l->n, l->cross, l->square};
done:
    return rc;
}

static int sums_download(struct qt_observed *out, struct qt_sequential *s, struct qt_err *err)
{
    struct sums *u = &s->sums;
    int rc;
    *out = (struct qt_observed){.h = u->h, .tokens = s->tokens, .chose = s->tokens};
    if (u->weighted) {
        out->tokens = u->fourth > 0 ? (size_t)(u->square * u->square / u->fourth) : 0;
        out->chose = u->chose;
    }
    QT_TRY(s->be->download(s->be, u->h, u->gram, u->k * u->k * sizeof *u->h, err));
    QT_TRY(lack_download(&out->input, &u->input, s->be, u->k, err));
    if (u->state.n)
        QT_TRY(lack_download(&out->state, &u->state, s->be, u->k, err));
    sums_release(s); /* solving needs the room */
done:
    return rc;
}

static int route(struct qt_sequential *s, struct qt_err *err)
{
    const size_t step = chunk_tokens(s);
    int rc = QT_OK;
    for (size_t at = 0; at < s->tokens && !s->mixture.routed; at += step)
        QT_TRY(qt_layer_route(s->mixture.share + at * s->mixture.experts, s->rounded,
                              s->hidden + at * s->width, qt_min_size(step, s->tokens - at),
                              s->data->seqlen, err));
    s->mixture.routed = true;
done:
    return rc;
}

/* Those that go through the expert. */
static int list_tokens(struct qt_sequential *s, size_t expert, struct qt_err *err)
{
    struct qt_tokens *t = &s->mixture.all;
    int rc = route(s, err);
    if (rc < 0)
        return rc;
    s->sums.chose = qt_tokens_of_expert(t, s->mixture.share, s->tokens, s->mixture.experts, expert,
                                        QT_FEW_TOKENS * s->sums.k);
    for (size_t i = 0; i < t->count; i++) {
        const double square = (double)t->share[i] * (double)t->share[i];
        s->sums.square += square;
        s->sums.fourth += square * square;
    }
    return QT_OK;
}

/* Tokens [at, at + m). For the last input of a sublayer the reference goes all the way: nobody
 * needs it where it was any more. */
static int observe_chunk(struct qt_sequential *s, int input, size_t at, size_t m,
                         struct qt_err *err)
{
    float *hidden = s->hidden + at * s->width, *reference = s->reference + at * s->width;
    struct arriving arriving = {s, hidden};
    const struct qt_hook keep = {s, tap_exact}, sum = {&arriving, tap_input};
    const size_t seqlen = s->data->seqlen;
    struct sums *u = &s->sums;
    const struct qt_tokens *tokens = u->weighted ? &s->mixture.tokens : NULL;
    int rc;
    u->kept = u->seen = 0;
    if (tokens)
        qt_tokens_slice(&s->mixture.tokens, &s->mixture.all, at, m);
    if (u->state.n)
        QT_TRY(s->be->copy(s->be, u->state.there, reference, m * s->width * sizeof *hidden, err));
    QT_TRY(s->ahead ? qt_layer_run_sublayer(s->exact, input, reference, m, seqlen, &keep, err)
                    : qt_layer_run_to(s->exact, input, reference, m, seqlen, tokens, &keep, err));
    QT_TRY(qt_layer_run_to(s->rounded, input, hidden, m, seqlen, tokens, &sum, err));
done:
    return rc;
}

int qt_sequential_observe(struct qt_observed *out, struct qt_sequential *s, int input,
                          struct qt_err *err)
{
    const size_t step = chunk_tokens(s);
    int rc;
    QT_TRY(sums_new(s, linear_with(s, input), err));
    if (s->sums.weighted)
        QT_TRY(list_tokens(s, (size_t)qt_model_expert(s->model, s->layer, input), err));
    s->ahead = input % 2 && !s->sums.weighted;
    for (size_t at = 0; at < s->tokens; at += step)
        QT_TRY(observe_chunk(s, input, at, qt_min_size(step, s->tokens - at), err));
    QT_TRY(sums_download(out, s, err));
done:
    return rc;
}
