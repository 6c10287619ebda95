/* Hidden states of the calibration windows, and sums over linear inputs, in both models. */
#include "pack/sequential.h"

/* Approximately: whole windows that are observed at once; APART: in memory that is not the
 * host's. */
enum { CHUNK_TOKENS = 4096, CHUNK_TOKENS_APART = 16384 };

struct qt_sequential {
    const struct qt_calibration *data;
    struct qt_backend *be;
    struct qt_weights source;
    struct qt_model *model;
    struct qt_comm *comm;
    struct qt_sums_memory memory;
    size_t blocks, first_block; /* of all windows; the first of this rank */
    size_t all_tokens, tokens;  /* of all windows; of those of this rank */
    size_t width, layer;
    float *hidden;       /* backend, [tokens][width] */
    float *reference;    /* same, in the reference model */
    bool reference_done; /* reference is already behind the current sublayer */
    float *last_input;   /* backend, [tokens][k]: in the quantized model; NULL: not kept */
    struct moe {
        size_t experts;          /* 0: not a mixture; the rest is unused */
        bool routed;             /* routing_weight is up to date */
        float *routing_weight;   /* [experts][all_tokens] */
        struct qt_tokens all;    /* tokens of the expert, in all ranks */
        struct qt_tokens tokens; /* tokens of the expert in the chunk, numbered from its start */
    } moe;
    struct qt_layer *quantized_layer, *reference_layer; /* of the current layer */
    struct sums {
        int input_index; /* the linear input */
        const struct qt_act *act;
        size_t k;
        double *gram, *h;                          /* backend; host */
        struct qt_channels inputs, inputs_on_host; /* backend: statistics of x */
        struct errors {
            size_t n; /* k, or that of the only linear with this input */
            /* Backend: its weight, if errors of its outputs are summed; NULL: those of inputs. */
            const float *weight;
            float state_factor; /* 1 / output multiplier; 0: no hidden states are added to */
            /* Backend, [chunk]: the input [k] and the hidden states [n] of the reference model,
             * then minus their errors; minus errors of outputs [n]. NULL: not needed. */
            float *input, *state, *output;
            float *cross_sum, *cross;    /* backend: negative until the download; host */
            struct qt_channels channels; /* backend: statistics of d */
            double *square;              /* host */
        } errors;
        size_t reference_tokens, quantized_tokens; /* tokens of the chunk so far */
        float *weighted; /* backend, [chunk][k]: inputs of an expert times routing weights; else
                          * NULL */
        float *states;   /* backend, [chunk][width]: in front of an expert of the MLP; else NULL */
        /* Backend, [chunk][k]: inputs as `act` arranges them, times token_factor; NULL: neither. */
        float *arranged;
        float *token_factor; /* [chunk], of outputs that are added to hidden states; else NULL */
        size_t routed_tokens;
        double square, fourth; /* sums of powers of routing weights */
    } sums;
};

static size_t chunk_tokens(const struct qt_sequential *s)
{
    const size_t tokens = s->be->host ? CHUNK_TOKENS : CHUNK_TOKENS_APART;
    const size_t windows = tokens / s->data->seqlen;
    return qt_min_size((windows ? windows : 1) * s->data->seqlen, s->all_tokens);
}

static size_t block_start(const struct qt_sequential *s, size_t block)
{
    return qt_sums_block_start(block, s->blocks, chunk_tokens(s), s->all_tokens);
}

static void choose_tokens(struct qt_sequential *s)
{
    s->all_tokens = s->data->samples * s->data->seqlen;
    s->blocks = qt_sums_count(qt_ceil_div(s->all_tokens, chunk_tokens(s)));
    const size_t end = qt_sums_blocks(&s->first_block, s->blocks, s->comm);
    s->tokens = block_start(s, end) - block_start(s, s->first_block);
}

static int embed(float *hidden, const struct qt_sequential *s, const struct qt_weights *weights,
                 struct qt_err *err)
{
    const uint32_t *ids = s->data->ids + block_start(s, s->first_block);
    return s->tokens ? qt_model_embed(hidden, s->model, weights, s->be, ids, s->tokens,
                                      s->data->seqlen, err)
                     : QT_OK;
}

int qt_sequential_open(struct qt_sequential **out, const struct qt_weights *source,
                       const struct qt_weights *current, const struct qt_calibration *data,
                       struct qt_comm *comm, struct qt_err *err)
{
    struct qt_sequential *s = NULL;
    size_t bytes;
    int rc;
    *out = NULL;
    QT_TRY(qt_array_new(&s, 1, sizeof *s, err));
    s->data = data;
    s->comm = comm;
    s->be = data->backend;
    s->source = *source;
    QT_TRY(qt_model_open(&s->model, source, err));
    s->width = qt_model_info(s->model)->state;
    if (data->seqlen > qt_model_info(s->model)->max_positions) {
        rc = qt_fail(err, QT_E_USAGE, NULL, NULL,
                     "windows of %zu tokens exceed the model's %zu positions: reduce --seqlen",
                     data->seqlen, qt_model_info(s->model)->max_positions);
        goto done;
    }
    choose_tokens(s);
    if (qt_mul_overflow(&bytes, s->tokens, s->width * sizeof *s->hidden)) {
        rc = qt_no_memory(err, NULL);
        goto done;
    }
    QT_TRY(s->be->alloc(s->be, &s->hidden, bytes, err));
    QT_TRY(s->be->alloc(s->be, &s->reference, bytes, err));
    QT_TRY(embed(s->reference, s, source, err));
    QT_TRY(embed(s->hidden, s, current, err));
    s->moe.experts = qt_model_info(s->model)->experts;
    if (s->moe.experts) {
        QT_TRY(qt_array_new(&s->moe.routing_weight, s->all_tokens,
                            s->moe.experts * sizeof *s->moe.routing_weight, err));
        QT_TRY(qt_tokens_new(&s->moe.all, s->all_tokens, err));
        QT_TRY(qt_tokens_new(&s->moe.tokens, chunk_tokens(s), err));
    }
    *out = s;
done:
    if (rc < 0)
        qt_sequential_close(s);
    return rc;
}

static void forget_last_input(struct qt_sequential *s)
{
    s->be->free(s->be, s->last_input);
    s->last_input = NULL;
}

/* Frees what only the observation needs. */
static void errors_close(struct errors *e, struct qt_backend *be)
{
    be->free(be, e->input);
    be->free(be, e->state);
    be->free(be, e->output);
    e->input = e->state = e->output = NULL;
}

/* Frees backend memory. */
static void errors_release(struct errors *e, struct qt_backend *be)
{
    errors_close(e, be);
    be->free(be, e->cross_sum);
    be->free(be, e->channels.absmax);
    be->free(be, e->channels.sum2);
    e->cross_sum = NULL;
    e->channels = (struct qt_channels){0};
}

static void sums_release(struct qt_sequential *s)
{
    s->be->free(s->be, s->sums.gram);
    s->be->free(s->be, s->sums.weighted);
    s->be->free(s->be, s->sums.states);
    qt_backend_channels_free(&s->sums.inputs, s->be);
    s->be->free(s->be, s->sums.arranged);
    s->sums.gram = NULL;
    s->sums.weighted = s->sums.states = s->sums.arranged = NULL;
    errors_release(&s->sums.errors, s->be);
}

static void sums_free(struct qt_sequential *s)
{
    sums_release(s);
    qt_free(s->sums.h);
    qt_free(s->sums.token_factor);
    qt_channels_free(&s->sums.inputs_on_host);
    qt_free(s->sums.errors.cross);
    qt_free(s->sums.errors.square);
    s->sums = (struct sums){0};
}

void qt_sequential_close(struct qt_sequential *s)
{
    if (!s)
        return;
    sums_free(s);
    forget_last_input(s);
    qt_layer_close(s->quantized_layer);
    qt_layer_close(s->reference_layer);
    s->be->free(s->be, s->hidden);
    s->be->free(s->be, s->reference);
    qt_free(s->memory.p);
    qt_free(s->moe.routing_weight);
    qt_tokens_free(&s->moe.all);
    qt_tokens_free(&s->moe.tokens);
    qt_model_close(s->model);
    qt_free(s);
}

/* ---- the layer in both models --------------------------------------------------------------- */

static int load_layer(struct qt_layer **dst, struct qt_sequential *s, size_t layer,
                      const struct qt_weights *weights, struct qt_err *err)
{
    return *dst ? qt_layer_load(*dst, layer, weights, err)
                : qt_layer_open(dst, s->model, layer, weights, s->be, err);
}

int qt_sequential_enter(struct qt_sequential *s, size_t layer, const struct qt_weights *current,
                        struct qt_err *err)
{
    int rc = load_layer(&s->reference_layer, s, layer, &s->source, err);
    s->layer = layer;
    if (rc < 0)
        return rc;
    return s->quantized_layer
               ? qt_layer_load_from(s->quantized_layer, s->reference_layer, layer, current, err)
               : load_layer(&s->quantized_layer, s, layer, current, err);
}

struct qt_place qt_sequential_place(const struct qt_sequential *s, const char *weight)
{
    return (struct qt_place){.w = qt_layer_weight(s->reference_layer, weight),
                             .rounded = qt_layer_weight(s->quantized_layer, weight)};
}

int qt_sequential_reload(struct qt_sequential *s, int input, const struct qt_weights *current,
                         struct qt_err *err)
{
    return qt_layer_load_linears(s->quantized_layer, input, current, err);
}

/* While windows run through the layer: products in half precision, with weights that stay. */
static void run_windows(struct qt_backend *be, bool begin)
{
    be->half = be->same_weights = begin;
}

int qt_sequential_advance(struct qt_sequential *s, int input, struct qt_err *err)
{
    const size_t step = chunk_tokens(s), seqlen = s->data->seqlen, k = s->sums.k;
    int rc = QT_OK;
    run_windows(s->be, true);
    /* The same steps as observe, which may have moved the reference or kept the last input: results
     * are the same bit for bit. */
    for (size_t at = 0; at < s->tokens; at += step) {
        const size_t m = qt_min_size(step, s->tokens - at), row = at * s->width;
        QT_TRY(s->last_input ? qt_layer_run_from(s->quantized_layer, input, s->hidden + row,
                                                 s->last_input + at * k, m, seqlen, err)
                             : qt_layer_run_sublayer(s->quantized_layer, input, s->hidden + row, m,
                                                     seqlen, NULL, err));
        if (!s->reference_done)
            QT_TRY(qt_layer_run_sublayer(s->reference_layer, input, s->reference + row, m, seqlen,
                                         NULL, err));
    }
    s->reference_done = s->moe.routed = false;
done:
    run_windows(s->be, false);
    forget_last_input(s);
    return rc;
}

/* ---- one linear input ----------------------------------------------------------------------- */

/* Routing weights of the chunk's tokens, which multiply an expert's output; NULL: all are 1. */
static const float *share_of(const struct qt_sequential *s, size_t token)
{
    return s->sums.weighted && !qt_model_scales_expert_inputs(s->model)
               ? s->moe.tokens.weight + token
               : NULL;
}

/* Hook in the reference model: keeps the linear input until the quantized model reaches it. */
static int hook_reference(void *ctx, int input, const float *z, size_t m, size_t k,
                          struct qt_err *err)
{
    struct qt_sequential *s = ctx;
    const struct errors *e = &s->sums.errors;
    const size_t at = s->sums.reference_tokens;
    const float *share = share_of(s, at);
    const bool arranged = s->sums.act && !e->weight;
    if (input != s->sums.input_index)
        return QT_OK;
    s->sums.reference_tokens += m;
    float *reference = e->input + at * k, *weighted = arranged ? s->sums.weighted : reference;
    int rc = QT_OK;
    if (share) {
        QT_TRY(s->be->gather_rows(s->be, weighted, z, NULL, share, m, k, err));
        z = weighted;
    }
    if (arranged)
        QT_TRY(qt_act_arrange_on(s->be, reference, z, m, s->sums.act, err));
    else if (!share)
        QT_TRY(s->be->copy(s->be, reference, z, m * k * sizeof *z, err));
done:
    return rc;
}

/* *d = minus the errors of m tokens, `at` tokens into the chunk: of inputs, or of the outputs that
 * they make together with those of the hidden states. x[m][k], hidden[m][n]: in the quantized
 * model. */
static int find_errors(const float **d, const struct errors *e, struct qt_backend *be,
                       const float *x, const float *hidden, size_t at, size_t m, size_t k,
                       struct qt_err *err)
{
    float *input = e->input + at * k;
    int rc;
    *d = input;
    QT_TRY(be->subtract(be, input, x, m * k, err));
    if (!e->weight)
        return QT_OK;
    *d = e->output;
    QT_TRY(be->linear(be, e->output, input, e->weight, NULL, m, e->n, k, err));
    if (e->state) {
        float *state = e->state + at * e->n;
        QT_TRY(be->subtract(be, state, hidden, m * e->n, err));
        if (e->state_factor != 1)
            QT_TRY(be->scale(be, state, e->state_factor, m * e->n, err));
        QT_TRY(be->add(be, e->output, state, m * e->n, err));
    }
done:
    return rc;
}

/* State of hook_quantized. */
struct hook_state {
    struct qt_sequential *s;
    /* These are the hidden states of the chunk: those of the quantized model in front of the
     * sublayer, and those of the reference model as observe_chunk has left them. */
    const float *hidden, *reference;
    float *last_input; /* of the chunk, or NULL */
};

static int hook_quantized(void *ctx, int input, const float *x, size_t m, size_t k,
                          struct qt_err *err)
{
    const struct hook_state *a = ctx;
    struct qt_backend *be = a->s->be;
    struct sums *u = &a->s->sums;
    struct errors *e = &u->errors;
    const size_t at = u->quantized_tokens;
    const float *hidden = a->hidden + at * a->s->width, *d = NULL;
    int rc;
    (void)input;
    u->quantized_tokens += m;
    QT_TRY(be->channels(be, &u->inputs, x, m, k, err));
    if (a->last_input)
        QT_TRY(be->copy(be, a->last_input + at * k, x, m * k * sizeof *x, err));
    if (u->weighted) {
        QT_TRY(be->gather_rows(be, u->weighted, x, NULL, share_of(a->s, at), m, k, err));
        x = u->weighted;
    }
    if (e->weight) /* is not arranged */
        QT_TRY(find_errors(&d, e, be, x, hidden, at, m, k, err));
    if (u->act) {
        QT_TRY(qt_act_arrange_on(be, u->arranged, x, m, u->act, err));
        x = u->arranged;
    }
    if (!e->weight)
        QT_TRY(find_errors(&d, e, be, x, hidden, at, m, k, err));
    if (u->token_factor) {
        float *factor = u->token_factor + at;
        QT_TRY(qt_token_factors(factor, be, a->reference + at * a->s->width, d, 1 / e->state_factor,
                                m, e->n, err));
        QT_TRY(be->gather_rows(be, e->output, e->output, NULL, factor, m, e->n, err));
        QT_TRY(be->gather_rows(be, u->arranged, x, NULL, factor, m, k, err));
        x = u->arranged;
    }
    QT_TRY(be->channels(be, &e->channels, d, m, e->n, err));
    QT_TRY(be->gram(be, u->gram, x, m, k, err));
    QT_TRY(be->linear_grad_w(be, e->cross_sum, d, x, true, m, e->n, k, err));
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

const struct qt_linear *qt_sequential_linear_of_errors(const struct qt_model *model, size_t layer,
                                                       int input)
{
    const struct qt_linear *linear, *only = NULL;
    const size_t n = qt_model_linears(&linear, model, layer);
    for (size_t i = 0; i < n; i++) {
        if (linear[i].input != input)
            continue;
        if (only)
            return NULL;
        only = &linear[i];
    }
    return only && (qt_model_output_scale(model, layer, input) > 0 || only->n < only->k) ? only
                                                                                         : NULL;
}

static int errors_new(struct errors *e, struct qt_sequential *s, size_t k, struct qt_err *err)
{
    const int input = s->sums.input_index;
    const struct qt_linear *linear = qt_sequential_linear_of_errors(s->model, s->layer, input);
    const float output_scale = qt_model_output_scale(s->model, s->layer, input);
    const size_t tokens = chunk_tokens(s);
    struct qt_backend *be = s->be;
    int rc;
    e->weight = linear ? qt_layer_weight(s->reference_layer, linear->weight) : NULL;
    e->n = e->weight ? linear->n : k;
    QT_TRY(qt_array_new(&e->square, e->n, sizeof *e->square, err));
    QT_TRY(be->alloc(be, &e->input, tokens * k * sizeof *e->input, err));
    if (e->weight)
        QT_TRY(be->alloc(be, &e->output, tokens * e->n * sizeof *e->output, err));
    if (e->weight && output_scale > 0) {
        e->state_factor = 1 / output_scale;
        QT_TRY(be->alloc(be, &e->state, tokens * e->n * sizeof *e->state, err));
    }
    QT_TRY(be->alloc(be, &e->cross_sum, e->n * k * sizeof *e->cross_sum, err));
    QT_TRY(be->alloc(be, &e->channels.absmax, e->n * sizeof *e->channels.absmax, err));
    QT_TRY(be->alloc(be, &e->channels.sum2, e->n * sizeof *e->channels.sum2, err));
done:
    return rc;
}

static int sums_new(struct qt_sequential *s, const struct qt_linear *linear,
                    const struct qt_act *act, struct qt_err *err)
{
    struct sums *u = &s->sums;
    size_t k = linear->k, cells, bytes;
    int rc;
    sums_free(s);
    if (qt_mul_overflow(&cells, k, k) || qt_mul_overflow(&bytes, cells, sizeof *u->h))
        return qt_fail(err, QT_E_RESOURCE, NULL, linear->weight, "out of memory");
    u->input_index = linear->input;
    u->k = k;
    u->act = act;
    QT_TRY(s->be->alloc(s->be, &u->gram, bytes, err));
    QT_TRY(qt_backend_channels(&u->inputs, s->be, k, err));
    QT_TRY(errors_new(&u->errors, s, k, err));
    if (qt_model_expert(s->model, s->layer, linear->input) >= 0)
        QT_TRY(qt_backend_floats(&u->weighted, s->be, chunk_tokens(s), k, err));
    if (u->weighted && linear->input >= qt_model_mlp_input(s->model, s->layer))
        QT_TRY(qt_backend_floats(&u->states, s->be, chunk_tokens(s), s->width, err));
    if (u->errors.state && s->reference_done)
        QT_TRY(qt_array_new(&u->token_factor, chunk_tokens(s), sizeof *u->token_factor, err));
    if (act || u->token_factor)
        QT_TRY(s->be->alloc(s->be, &u->arranged, chunk_tokens(s) * k * sizeof *u->arranged, err));
done:
    return rc;
}

/* out->cross stays in backend memory. */
static int errors_finish(struct qt_observed *out, struct errors *e, struct qt_backend *be, size_t k,
                         struct qt_err *err)
{
    int rc;
    QT_TRY(be->scale(be, e->cross_sum, -1, e->n * k, err));
    QT_TRY(be->download(be, e->square, e->channels.sum2, e->n * sizeof *e->square, err));
    errors_close(e, be);
    out->errors = e->n;
    out->of_outputs = e->weight != NULL;
    out->cross = e->cross_sum;
    out->square = e->square;
done:
    return rc;
}

/* Brings the statistics of x to the host, and adds up those of all ranks. */
static int channels_finish(struct qt_observed *out, struct qt_sequential *s, struct qt_err *err)
{
    const struct qt_channels *from = &s->sums.inputs;
    struct qt_channels *c = &s->sums.inputs_on_host;
    struct qt_backend *be = s->be;
    const size_t k = s->sums.k, size = qt_comm_size(s->comm);
    double *sum2 = NULL;
    int rc;
    QT_TRY(qt_channels_new(c, k, err));
    QT_TRY(be->download(be, c->absmax, from->absmax, k * sizeof *c->absmax, err));
    QT_TRY(be->download(be, c->sum2, from->sum2, k * sizeof *c->sum2, err));
    QT_TRY(be->download(be, c->hist, from->hist, k * QT_HIST_BINS * sizeof *c->hist, err));
    qt_backend_channels_free(&s->sums.inputs, be);
    out->channels = c;
    if (size == 1)
        return QT_OK;
    QT_TRY(qt_channels_join(c, k, s->comm, err));
    QT_TRY(qt_array_new(&sum2, size, k * sizeof *sum2, err));
    QT_TRY(qt_comm_gather(s->comm, sum2, c->sum2, k * sizeof *sum2, err));
    memset(c->sum2, 0, k * sizeof *c->sum2);
    for (size_t i = 0; i < size * k; i++)
        c->sum2[i % k] += sum2[i];
done:
    qt_free(sum2);
    return rc;
}

/* Copies the sums to the host and frees those in backend memory: the solver needs it. */
static int sums_download(struct qt_observed *out, struct qt_sequential *s, struct qt_err *err)
{
    struct sums *u = &s->sums;
    const size_t bytes = u->k * u->k * sizeof *u->h;
    int rc;
    QT_TRY(qt_array_new(&u->h, bytes, 1, err));
    QT_TRY(s->be->download(s->be, u->h, u->gram, bytes, err));
    out->h = u->h;
    const size_t cells = u->errors.n * u->k;
    QT_TRY(qt_array_new(&u->errors.cross, cells, sizeof *u->errors.cross, err));
    QT_TRY(s->be->download(s->be, u->errors.cross, u->errors.cross_sum,
                           cells * sizeof *u->errors.cross, err));
    out->cross = u->errors.cross;
    sums_release(s);
done:
    return rc;
}

static int sums_finish(struct qt_observed *out, struct qt_sequential *s, bool on_backend,
                       struct qt_err *err)
{
    struct sums *u = &s->sums;
    int rc;
    *out = (struct qt_observed){.h = u->gram,
                                .k = u->k,
                                .tokens = s->all_tokens,
                                .routed_tokens = s->all_tokens,
                                .on_backend = on_backend};
    if (u->weighted) {
        out->tokens = u->fourth > 0 ? (size_t)(u->square * u->square / u->fourth) : 0;
        out->routed_tokens = u->routed_tokens;
    }
    QT_TRY(channels_finish(out, s, err));
    QT_TRY(errors_finish(out, &u->errors, s->be, u->k, err));
    if (!on_backend)
        QT_TRY(sums_download(out, s, err));
done:
    return rc;
}

/* The first token of this rank. */
static size_t first_token(const struct qt_sequential *s)
{
    return block_start(s, s->first_block);
}

struct by_expert {
    float *to; /* [experts][tokens] */
    const float *from;
    size_t tokens, experts;
};

static void gather_expert(void *ctx, size_t expert)
{
    const struct by_expert *t = ctx;
    for (size_t i = 0; i < t->tokens; i++)
        t->to[expert * t->tokens + i] = t->from[i * t->experts + expert];
}

static int route(struct qt_sequential *s, struct qt_err *err)
{
    const size_t step = chunk_tokens(s), experts = s->moe.experts;
    float *weights = NULL; /* [all_tokens][experts] */
    int rc = QT_OK;
    if (s->moe.routed)
        return QT_OK;
    QT_TRY(qt_array_new(&weights, s->all_tokens, experts * sizeof *weights, err));
    for (size_t at = 0; at < s->tokens; at += step)
        QT_TRY(qt_layer_route(weights + (first_token(s) + at) * experts, s->quantized_layer,
                              s->sums.input_index, s->hidden + at * s->width,
                              qt_min_size(step, s->tokens - at), s->data->seqlen, err));
    /* All ranks choose the same tokens for an expert. */
    QT_TRY(qt_sums_join_rows(weights, experts * sizeof *weights, s->blocks, step, s->all_tokens,
                             s->comm, err));
    qt_parallel_for(experts, gather_expert,
                    &(struct by_expert){s->moe.routing_weight, weights, s->all_tokens, experts});
    s->moe.routed = true;
done:
    qt_free(weights);
    return rc;
}

/* Lists the tokens of an expert. */
static int list_tokens(struct qt_sequential *s, size_t expert, struct qt_err *err)
{
    struct qt_tokens *t = &s->moe.all;
    int rc = route(s, err);
    if (rc < 0)
        return rc;
    s->sums.routed_tokens =
        qt_tokens_of_expert(t, s->moe.routing_weight + expert * s->all_tokens, s->all_tokens, 1, 0,
                            QT_MIN_TOKENS_PER_CHANNEL * s->sums.k);
    for (size_t i = 0; i < t->count; i++) {
        const double square = (double)t->weight[i] * (double)t->weight[i];
        s->sums.square += square;
        s->sums.fourth += square * square;
    }
    return QT_OK;
}

/* Runs a layer to an input of an expert. Only the expert's tokens of the chunk pass the norm in
 * front of an MLP, as sequences of one token each. */
static int run_to_expert(struct qt_layer *layer, const struct qt_sequential *s, int input,
                         float *hidden, size_t m, const struct qt_hook *hook, struct qt_err *err)
{
    const struct qt_tokens *t = &s->moe.tokens;
    float *states = s->sums.states;
    uint32_t *all = NULL;
    int rc = QT_OK;
    if (!states)
        return qt_layer_run_to(layer, input, hidden, m, s->data->seqlen, t, hook, err);
    if (t->count == 0)
        return QT_OK;
    QT_TRY(qt_array_new(&all, t->count, sizeof *all, err));
    for (size_t i = 0; i < t->count; i++)
        all[i] = (uint32_t)i;
    QT_TRY(s->be->gather_rows(s->be, states, hidden, t->row, NULL, t->count, s->width, err));
    QT_TRY(qt_layer_run_to(layer, input, states, t->count, 1,
                           &(struct qt_tokens){t->count, all, t->weight}, hook, err));
done:
    qt_free(all);
    return rc;
}

/* Observes tokens [at, at + m). For the last input of a sublayer the reference runs to the end of
 * the sublayer, because its state in front of it is not needed again. The quantized model cannot do
 * that, but its last input is kept if there is memory. */
static int observe_chunk(struct qt_sequential *s, int input, size_t at, size_t m,
                         struct qt_err *err)
{
    float *hidden = s->hidden + at * s->width, *reference = s->reference + at * s->width;
    struct hook_state hook_state = {s, hidden, reference,
                                    s->last_input ? s->last_input + at * s->sums.k : NULL};
    const struct qt_hook reference_hook = {s, hook_reference};
    const struct qt_hook quantized_hook = {&hook_state, hook_quantized};
    const size_t seqlen = s->data->seqlen;
    struct sums *u = &s->sums;
    int rc;
    u->reference_tokens = u->quantized_tokens = 0;
    if (u->weighted) {
        qt_tokens_slice(&s->moe.tokens, &s->moe.all, first_token(s) + at, m);
        QT_TRY(run_to_expert(s->reference_layer, s, input, reference, m, &reference_hook, err));
        return run_to_expert(s->quantized_layer, s, input, hidden, m, &quantized_hook, err);
    }
    if (u->errors.state)
        QT_TRY(s->be->copy(s->be, u->errors.state, reference, m * s->width * sizeof *hidden, err));
    QT_TRY(s->reference_done ? qt_layer_run_sublayer(s->reference_layer, input, reference, m,
                                                     seqlen, &reference_hook, err)
                             : qt_layer_run_to(s->reference_layer, input, reference, m, seqlen,
                                               NULL, &reference_hook, err));
    QT_TRY(
        qt_layer_run_to(s->quantized_layer, input, hidden, m, seqlen, NULL, &quantized_hook, err));
done:
    return rc;
}

/* Order of the arrays that are added up. */
enum { GRAM, SQUARES, CROSS, SUMS };

/* Lets the hooks add to these arrays. */
static void add_to(struct sums *u, void *const *array)
{
    u->gram = array[GRAM];
    u->errors.channels.sum2 = array[SQUARES];
    u->errors.cross_sum = array[CROSS];
}

static int observe_block(void *ctx, size_t block, void *const *into, struct qt_err *err)
{
    struct qt_sequential *s = ctx;
    const size_t step = chunk_tokens(s), start = first_token(s);
    const size_t end = block_start(s, block + 1) - start;
    int rc = QT_OK;
    add_to(&s->sums, into);
    for (size_t at = block_start(s, block) - start; at < end && rc == QT_OK; at += step)
        rc = observe_chunk(s, s->sums.input_index, at, qt_min_size(step, end - at), err);
    return rc;
}

static int observe_all(struct qt_sequential *s, struct qt_err *err)
{
    struct sums *u = &s->sums;
    const size_t k = u->k, n = u->errors.n;
    struct qt_sums sums = {.be = s->be,
                           .comm = s->comm,
                           .memory = &s->memory,
                           .blocks = s->blocks,
                           .count = SUMS,
                           .sum = {[GRAM] = {u->gram, k * k, k, true},
                                   [SQUARES] = {u->errors.channels.sum2, n, 0, true},
                                   [CROSS] = {u->errors.cross_sum, n * k, 0, false}},
                           .block = observe_block,
                           .ctx = s};
    void *own[QT_SUM_ARRAYS];
    for (size_t i = 0; i < sums.count; i++)
        own[i] = sums.sum[i].data;
    int rc = qt_sums_run(&sums, err);
    add_to(u, own);
    return rc;
}

/* True if nothing runs behind this input any more. */
static bool is_final(const struct qt_sequential *s, int input)
{
    return s->layer + 1 == qt_model_info(s->model)->layers &&
           input + 1 == (int)qt_model_inputs(s->model, s->layer);
}

/* Makes room for the inputs of all tokens if that leaves the solver SOLVER bytes per value of H. */
static void keep_last_input(struct qt_sequential *s, int input)
{
    enum { SOLVER = 64 };
    const size_t k = s->sums.k;
    size_t bytes, solver;
    if (!s->be->room || is_final(s, input) || !qt_model_can_run_from(s->model, s->layer, input) ||
        qt_mul_overflow(&bytes, s->tokens, k * sizeof *s->last_input) ||
        qt_mul_overflow(&solver, k * SOLVER, k) || s->be->room(s->be) < bytes ||
        s->be->room(s->be) - bytes < solver)
        return;
    if (s->be->alloc(s->be, &s->last_input, bytes, NULL) < 0)
        s->last_input = NULL; /* the sublayer is run twice */
}

int qt_sequential_observe(struct qt_observed *out, struct qt_sequential *s, int input,
                          const struct qt_act *act, bool on_backend, struct qt_err *err)
{
    const int expert = qt_model_expert(s->model, s->layer, input);
    int rc;
    s->reference_done = expert < 0 && qt_model_ends_sublayer(s->model, s->layer, input);
    QT_TRY(sums_new(s, linear_with(s, input), act, err));
    if (s->sums.weighted)
        QT_TRY(list_tokens(s, (size_t)expert, err));
    keep_last_input(s, input);
    run_windows(s->be, true);
    rc = observe_all(s, err);
    run_windows(s->be, false);
    QT_TRY(rc);
    QT_TRY(sums_finish(out, s, on_backend, err));
done:
    return rc;
}
