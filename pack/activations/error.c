/*
 * Chooses the arrangement of an input's channels (order.c) and the clip ratio of its 4-bit channel
 * blocks: those with the least error at the outputs of the linears, on a sample of tokens.
 *
 * Both errors are those of the matrices as they are stored: rotated, if blocks are.
 *
 *   D[b]   error of channel block b at 4 or 8 bits:
 *          sum over tokens and linears of |(x - Q(x))_b W_b^T|^2
 *   R      error of the weights, rounded to nearest in the same arrangement:
 *          sum over tokens and linears of |x (W - Q(W))^T|^2
 */
#include "pack/activations/planner.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

enum { BLOCK2 = QT_ACT_BLOCK * QT_ACT_BLOCK, WEIGHT_TOKENS = 128 };

/* The roundings that are compared: 8 bits, and 4 bits with each clip ratio. */
static const struct qt_act_rounding roundings[] = {{8, 1},    {4, 1},     {4, 0.95f},
                                                   {4, 0.9f}, {4, 0.85f}, {4, 0.8f}};
enum { EIGHT, FOUR, ROUNDINGS = sizeof roundings / sizeof *roundings };
_Static_assert((size_t)ROUNDINGS <= (size_t)QT_ACT_ROUNDINGS,
               "more roundings than a backend compares");
/* Factors must lower the error by 2 %, so that chance does not choose between equal
 * arrangements. */
#define CLEARLY 0.98

/* An input while its arrangement is chosen. */
struct arranger {
    struct qt_act_planner *p;
    enum qt_act_precision precision;
    size_t layer, k, blocks, m;
    int i;
    const struct qt_layer *on; /* holds the weights of the linears, and its backend rounds them; or
                                * NULL */
    double *weights2;          /* [k] sums of squared weights over the linears */
    double *d;                 /* [ROUNDINGS][blocks] errors of the activations */
    /* On the host: */
    float *x;       /* [m][k] sampled tokens */
    float *g;       /* [blocks][128][128] Gram matrices of the stored weights, lower triangles */
    float *stored;  /* [m][k] x in packed order, scale and rotation */
    float *e;       /* [m][k] its rounding errors */
    float *scratch; /* [threads][scratch_floats] */
    size_t scratch_floats;
};

static float *scratch_of(const struct arranger *a, int thread)
{
    return a->scratch + (size_t)thread * a->scratch_floats;
}

static const struct qt_linear *next_linear(const struct arranger *a, size_t *at)
{
    const struct qt_linear *linear;
    const size_t count = qt_model_linears(&linear, a->p->model, a->layer);
    while (*at < count && qt_act_pooled(linear[*at].input) != a->i)
        ++*at;
    return *at < count ? &linear[(*at)++] : NULL;
}

static int load_weights(float **w, const struct arranger *a, const struct qt_linear *linear,
                        struct qt_err *err)
{
    int rc = qt_array_new(w, linear->n, linear->k * sizeof **w, err);
    return rc < 0 ? rc : a->p->source.load(a->p->source.ctx, linear->weight, *w, err);
}

struct square_job {
    struct arranger *a;
    const float *w;
    size_t n;
};

/* Adds the squares of a channel block. */
static void add_squares(void *ctx, size_t b)
{
    const struct square_job *job = ctx;
    const size_t k = job->a->k, at = b * QT_ACT_BLOCK, end = qt_min_size(at + QT_ACT_BLOCK, k);
    for (size_t r = 0; r < job->n; r++)
        for (size_t c = at; c < end; c++)
            job->a->weights2[c] += (double)job->w[r * k + c] * (double)job->w[r * k + c];
}

/* In the memory of a backend that is not the host. */
static int sum_weights2_on(struct arranger *a, struct qt_err *err)
{
    struct qt_backend *be = a->p->be;
    struct qt_channels c = {0};
    const struct qt_linear *linear;
    int rc = QT_OK;
    QT_TRY(be->alloc(be, &c.absmax, a->k * sizeof *c.absmax, err));
    QT_TRY(be->alloc(be, &c.sum2, a->k * sizeof *c.sum2, err));
    for (size_t l = 0; (linear = next_linear(a, &l));)
        QT_TRY(be->channels(be, &c, qt_layer_weight(a->on, linear->weight), linear->n, a->k, err));
    QT_TRY(be->download(be, a->weights2, c.sum2, a->k * sizeof *c.sum2, err));
done:
    qt_backend_channels_free(&c, be);
    return rc;
}

static int sum_weights2(struct arranger *a, struct qt_err *err)
{
    const struct qt_linear *linear;
    int rc = QT_OK;
    if (a->on)
        return sum_weights2_on(a, err);
    for (size_t l = 0; rc == QT_OK && (linear = next_linear(a, &l));) {
        float *w = NULL;
        rc = load_weights(&w, a, linear, err);
        if (rc == QT_OK)
            qt_parallel_for(a->blocks, add_squares, &(struct square_job){a, w, linear->n});
        qt_free(w);
    }
    return rc;
}

/* ---- error of the activations --------------------------------------------------------------- */

struct gram_job {
    const struct arranger *a;
    const struct qt_act *act;
    const struct qt_linear *linear;
    const float *w;
};

/* Adds W_b^T W_b of a linear to a Gram matrix, PIECE rows at a time. */
static int gram_block(void *ctx, size_t b, int thread, struct qt_err *err)
{
    enum { PIECE = QT_ACT_BLOCK };
    const struct gram_job *job = ctx;
    const size_t k = job->a->k, at = b * QT_ACT_BLOCK, width = qt_min_size(QT_ACT_BLOCK, k - at);
    float *rows = scratch_of(job->a, thread);
    (void)err;
    for (size_t r0 = 0, n; r0 < job->linear->n; r0 += n) {
        n = qt_min_size(PIECE, job->linear->n - r0);
        for (size_t r = 0; r < n; r++) {
            float *row = rows + r * QT_ACT_BLOCK;
            for (size_t c = 0; c < width; c++)
                row[c] = job->w[(r0 + r) * k + job->act->order[at + c]] / job->act->factor[at + c];
            if (job->act->rotate)
                qt_rotate(row, width);
        }
        cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, (int)width, (int)n, 1, rows,
                    QT_ACT_BLOCK, 1, job->a->g + b * BLOCK2, QT_ACT_BLOCK);
    }
    return QT_OK;
}

/* g[blocks][128][128] in backend memory += W_b^T W_b of the stored weights t[n][k]. block[n][128]
 * is 0 beyond the columns of the last channel block. */
static int add_grams_on(float *g, float *block, const float *t, const struct arranger *a, size_t n,
                        struct qt_err *err)
{
    struct qt_backend *be = a->p->be;
    int rc = QT_OK;
    for (size_t b = 0, at = 0; at < a->k; b++, at += QT_ACT_BLOCK) {
        const size_t width = qt_min_size(QT_ACT_BLOCK, a->k - at);
        if (width < QT_ACT_BLOCK)
            QT_TRY(be->zero(be, block, n * QT_ACT_BLOCK * sizeof *block, err));
        QT_TRY(be->copy_columns(be, block, QT_ACT_BLOCK, t + at, a->k, width, n, err));
        QT_TRY(be->linear_grad_w(be, g + b * BLOCK2, block, block, true, n, QT_ACT_BLOCK,
                                 QT_ACT_BLOCK, err));
    }
done:
    return rc;
}

/* As gram_block, for all blocks. *out: backend memory, owned by the caller. */
static int grams_on(float **out, const struct arranger *a, const struct qt_act *act,
                    struct qt_err *err)
{
    struct qt_backend *be = a->p->be;
    struct qt_act inverse = {.k = a->k, .order = act->order, .rotate = act->rotate};
    const struct qt_linear *linear;
    float *t = NULL, *block = NULL;
    int rc;
    QT_TRY(qt_array_new(&inverse.factor, a->k, sizeof *inverse.factor, err));
    for (size_t i = 0; i < a->k; i++)
        inverse.factor[i] = 1 / act->factor[i];
    QT_TRY(qt_backend_floats(out, be, a->blocks, BLOCK2, err));
    for (size_t l = 0; (linear = next_linear(a, &l));) {
        be->free(be, t);
        be->free(be, block);
        t = block = NULL;
        QT_TRY(qt_backend_floats(&t, be, linear->n, a->k, err));
        QT_TRY(qt_backend_floats(&block, be, linear->n, QT_ACT_BLOCK, err));
        QT_TRY(qt_act_arrange_on(be, t, qt_layer_weight(a->on, linear->weight), linear->n, &inverse,
                                 err));
        QT_TRY(add_grams_on(*out, block, t, a, linear->n, err));
    }
done:
    be->free(be, t);
    be->free(be, block);
    qt_free(inverse.factor);
    return rc;
}

static int make_grams(struct arranger *a, const struct qt_act *act, struct qt_err *err)
{
    struct gram_job job = {.a = a, .act = act};
    int rc = QT_OK;
    memset(a->g, 0, a->blocks * BLOCK2 * sizeof *a->g);
    for (size_t l = 0; rc == QT_OK && (job.linear = next_linear(a, &l));) {
        float *w = NULL;
        rc = load_weights(&w, a, job.linear, err);
        job.w = w;
        if (rc == QT_OK)
            rc = qt_parallel(a->blocks, gram_block, &job, err);
        qt_free(w);
    }
    return rc;
}

struct error_job {
    const struct arranger *a;
    double *d; /* [blocks] */
};

/* d[b] = sum over tokens of e G[b] e^T = sum of G[b] E^T E, e: rounding errors of the block. */
static int error_block(void *ctx, size_t b, int thread, struct qt_err *err)
{
    const struct error_job *job = ctx;
    const struct arranger *a = job->a;
    const size_t at = b * QT_ACT_BLOCK, width = qt_min_size(QT_ACT_BLOCK, a->k - at);
    const float *g = a->g + b * BLOCK2;
    float *ee = scratch_of(a, thread);
    double sum = 0;
    (void)err;
    for (size_t t = 0; t < a->m; t++) /* from rounded values to errors */
        for (size_t j = t * a->k + at; j < t * a->k + at + width; j++)
            a->e[j] -= a->stored[j];
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, (int)width, (int)a->m, 1, a->e + at,
                (int)a->k, 0, ee, QT_ACT_BLOCK);
    for (size_t i = 0; i < width; i++)
        for (size_t j = 0; j <= i; j++)
            sum += (i == j ? 1 : 2) * (double)g[i * QT_ACT_BLOCK + j] *
                   (double)ee[i * QT_ACT_BLOCK + j];
    job->d[b] = sum;
    return QT_OK;
}

static void set_rounding(struct qt_act *act, struct qt_act_rounding how)
{
    memset(act->bits, (int)how.bits, qt_ceil_div(act->k, QT_ACT_BLOCK));
    act->clip = how.clip;
}

/* Sets a->d of roundings [from, end). */
static int measure(struct arranger *a, struct qt_act *act, size_t from, size_t end,
                   struct qt_err *err)
{
    int rc;
    QT_TRY(make_grams(a, act, err));
    QT_TRY(qt_act_arrange(a->stored, a->x, a->m, act, err));
    for (size_t i = from; i < end; i++) {
        set_rounding(act, roundings[i]);
        QT_TRY(qt_act_round(a->e, a->stored, a->m, act, err));
        QT_TRY(
            qt_parallel(a->blocks, error_block, &(struct error_job){a, a->d + i * a->blocks}, err));
    }
done:
    return rc;
}

/* The same where the weights and the sampled tokens are. */
static int measure_on(struct arranger *a, const struct qt_act *act, size_t from, size_t end,
                      struct qt_err *err)
{
    struct qt_backend *be = a->p->be;
    float *g = NULL;
    int rc;
    QT_TRY(grams_on(&g, a, act, err));
    QT_TRY(be->input_errors(be, a->d + from * a->blocks, a->p->sample[a->i], g, a->m, act,
                            roundings + from, end - from, err));
done:
    be->free(be, g);
    return rc;
}

/* ---- error of the weights ------------------------------------------------------------------- */

struct product_job {
    const struct arranger *a;
    const float *w; /* [n][k] */
    float *q;       /* [n][k] rounded weights, then their errors */
    size_t n, m;
    double *part; /* per piece */
};

enum { PIECE_ROWS = 64 };

/* part = sum over tokens and rows of the piece of |x (W - Q(W))^T|^2. */
static int product_piece(void *ctx, size_t item, int thread, struct qt_err *err)
{
    const struct product_job *job = ctx;
    const size_t k = job->a->k, r0 = item * PIECE_ROWS, n = qt_min_size(PIECE_ROWS, job->n - r0);
    float *y = scratch_of(job->a, thread);
    (void)err;
    for (size_t j = r0 * k; j < (r0 + n) * k; j++)
        job->q[j] -= job->w[j];
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)job->m, (int)n, (int)k, 1, job->a->x,
                (int)k, job->q + r0 * k, (int)k, 0, y, (int)n);
    for (size_t j = 0; j < job->m * n; j++)
        job->part[item] += (double)y[j] * (double)y[j];
    return QT_OK;
}

static int add_weight_error(double *sum, const struct arranger *a, const struct qt_act *act,
                            const struct qt_linear *linear, struct qt_err *err)
{
    const size_t n = linear->n, k = a->k, pieces = qt_ceil_div(n, PIECE_ROWS);
    const struct qt_arrange arrange = {.input = act};
    struct qt_spec spec = *a->p->spec;
    struct product_job job = {.a = a, .n = n, .m = qt_min_size(a->m, WEIGHT_TOKENS)};
    struct qt_packed packed = {0};
    float *w = NULL, *q = NULL;
    int rc = QT_OK;
    qt_spec_set_method(&spec, QT_METHOD_RTN);
    spec.arrange = &arrange;
    QT_TRY(load_weights(&w, a, linear, err));
    QT_TRY(qt_array_new(&q, n, k * sizeof *q, err));
    QT_TRY(qt_array_new(&job.part, pieces, sizeof *job.part, err));
    const struct qt_matrix matrix = {.data = w,
                                     .dtype = QT_F32,
                                     .n = n,
                                     .k = k,
                                     .file = a->p->source.dir,
                                     .name = linear->weight};
    QT_TRY(qt_packed_quantize(&packed, &spec, &matrix, NULL, NULL, err));
    QT_TRY(qt_packed_decode(q, &packed, 0, n, err)); /* rows are in source order */
    job.w = w;
    job.q = q;
    QT_TRY(qt_parallel(pieces, product_piece, &job, err));
    for (size_t i = 0; i < pieces; i++)
        *sum += job.part[i] * (double)a->m / (double)job.m;
done:
    qt_packed_free(&packed);
    qt_free(job.part);
    qt_free(w);
    qt_free(q);
    return rc;
}

/* *sum += the squares of y[m][n], backend memory. */
static int add_squares_on(double *sum, struct qt_backend *be, const float *y, size_t m, size_t n,
                          struct qt_err *err)
{
    struct qt_channels c = {0};
    double *host = NULL;
    int rc;
    QT_TRY(be->alloc(be, &c.absmax, n * sizeof *c.absmax, err));
    QT_TRY(be->alloc(be, &c.sum2, n * sizeof *c.sum2, err));
    QT_TRY(be->channels(be, &c, y, m, n, err));
    QT_TRY(qt_array_new(&host, n, sizeof *host, err));
    QT_TRY(be->download(be, host, c.sum2, n * sizeof *host, err));
    for (size_t i = 0; i < n; i++)
        *sum += host[i];
done:
    qt_backend_channels_free(&c, be);
    qt_free(host);
    return rc;
}

/* The same where the weights are. */
static int add_weight_error_on(double *sum, const struct arranger *a, const struct qt_act *act,
                               const struct qt_linear *linear, struct qt_err *err)
{
    struct qt_backend *be = a->p->be;
    const size_t n = linear->n, k = a->k, m = qt_min_size(a->m, WEIGHT_TOKENS);
    const struct qt_arrange arrange = {.input = act};
    const struct qt_matrix matrix = {
        .dtype = QT_F32, .n = n, .k = k, .file = a->p->source.dir, .name = linear->weight};
    struct qt_place place = {.w = qt_layer_weight(a->on, linear->weight), .only_rounded = true};
    struct qt_spec spec = *a->p->spec;
    struct qt_packed packed = {0};
    float *y = NULL;
    double part = 0;
    int rc;
    qt_spec_set_method(&spec, QT_METHOD_RTN);
    spec.arrange = &arrange;
    QT_TRY(qt_backend_floats(&place.rounded, be, n, k, err));
    QT_TRY(qt_packed_round(&packed, &spec, &matrix, NULL, be, &place, NULL, NULL, err));
    QT_TRY(be->scale(be, place.rounded, -1, n * k, err));
    QT_TRY(be->add(be, place.rounded, place.w, n * k, err));
    QT_TRY(qt_backend_floats(&y, be, m, n, err));
    QT_TRY(be->linear(be, y, a->p->sample[a->i], place.rounded, NULL, m, n, k, err));
    QT_TRY(add_squares_on(&part, be, y, m, n, err));
    *sum += part * (double)a->m / (double)m;
done:
    be->free(be, place.rounded);
    be->free(be, y);
    qt_packed_free(&packed);
    return rc;
}

static int weight_error(double *sum, const struct arranger *a, const struct qt_act *act,
                        struct qt_err *err)
{
    const struct qt_linear *linear;
    int rc = QT_OK;
    *sum = 0;
    for (size_t l = 0; rc == QT_OK && (linear = next_linear(a, &l));)
        rc = a->on ? add_weight_error_on(sum, a, act, linear, err)
                   : add_weight_error(sum, a, act, linear, err);
    return rc;
}

/* ---- choice --------------------------------------------------------------------------------- */

void qt_act_candidate_free(struct qt_act_candidate *c)
{
    qt_act_free(&c->act);
    qt_free(c->d4);
    qt_free(c->d8);
    *c = (struct qt_act_candidate){0};
}

static double total_error(const struct arranger *a, size_t rounding)
{
    double total = 0;
    for (size_t b = 0; b < a->blocks; b++)
        total += a->d[rounding * a->blocks + b];
    return total;
}

/* Copies the errors of a rounding; returns their sum. */
static double take_errors(double *d, const struct arranger *a, size_t rounding)
{
    memcpy(d, a->d + rounding * a->blocks, a->blocks * sizeof *d);
    return total_error(a, rounding);
}

/* Sets the errors, and the clip ratio with the least error of 4-bit blocks. */
static int measure_candidate(struct qt_act_candidate *c, struct arranger *a, struct qt_err *err)
{
    const size_t from = a->precision == QT_ACT_ALL_4 ? FOUR : EIGHT,
                 end = a->precision == QT_ACT_ALL_8 ? FOUR : ROUNDINGS;
    size_t best = from;
    int rc;
    QT_TRY(a->on ? measure_on(a, &c->act, from, end, err) : measure(a, &c->act, from, end, err));
    if (from == EIGHT)
        c->total8 = take_errors(c->d8, a, EIGHT);
    if (end > FOUR) {
        best = FOUR;
        for (size_t i = FOUR + 1; i < end; i++)
            best = total_error(a, i) < total_error(a, best) ? i : best;
        c->total4 = take_errors(c->d4, a, best);
    }
    set_rounding(&c->act, roundings[best]);
    QT_TRY(weight_error(&c->weights, a, &c->act, err));
done:
    return rc;
}

static int candidate_new(struct qt_act_candidate *out, struct arranger *a, bool sorted,
                         bool smoothed, struct qt_err *err)
{
    int rc;
    *out = (struct qt_act_candidate){0};
    QT_TRY(qt_act_new(&out->act, a->k, 4, err));
    qt_act_set_spec(&out->act, a->p->spec);
    QT_TRY(qt_array_new(&out->d4, a->blocks, sizeof *out->d4, err));
    QT_TRY(qt_array_new(&out->d8, a->blocks, sizeof *out->d8, err));
    QT_TRY(qt_act_order(&out->act, a->p, a->layer, a->i, a->weights2, sorted, smoothed, err));
    QT_TRY(measure_candidate(out, a, err));
done:
    if (rc < 0)
        qt_act_candidate_free(out);
    return rc;
}

/* Error at the outputs with all channel blocks at 4 or 8 bits, or with the block that gains most at
 * 8 bits and the others at 4. */
static double score(const struct qt_act_candidate *c, enum qt_act_precision precision)
{
    if (precision != QT_ACT_MIXED)
        return c->weights + (precision == QT_ACT_ALL_8 ? c->total8 : c->total4);
    double gain = 0;
    for (size_t b = 0; b < qt_ceil_div(c->act.k, QT_ACT_BLOCK); b++)
        gain = fmax(gain, c->d4[b] - c->d8[b]);
    return c->weights + c->total4 - gain;
}

/* Sets *best to the better of the arrangements with and without factors. */
static int choose(struct qt_act_candidate *best, struct arranger *a, bool sorted,
                  enum qt_act_precision precision, struct qt_err *err)
{
    const struct qt_act_input *in = qt_act_input_at(a->p, a->layer, a->i);
    struct qt_act_candidate smoothed;
    a->precision = precision;
    int rc = candidate_new(best, a, sorted, false, err);
    if (rc < 0 || !in->scale || qt_spec_value(a->p->spec, "smooth") == 0)
        return rc;
    rc = candidate_new(&smoothed, a, sorted, true, err);
    if (rc < 0)
        return rc;
    if (score(&smoothed, precision) < CLEARLY * score(best, precision)) {
        const struct qt_act_candidate worse = *best;
        *best = smoothed;
        smoothed = worse;
    }
    qt_act_candidate_free(&smoothed);
    return QT_OK;
}

/* True if the linears of the input are rounded on the planner's backend, apart from the host. */
static bool rounds_there(const struct arranger *a)
{
    struct qt_packed packed;
    const struct qt_linear *linear;
    bool all = !a->p->be->host;
    for (size_t l = 0; all && (linear = next_linear(a, &l));)
        all = qt_packed_describe(&packed, a->p->spec, linear->n, linear->k, NULL) == QT_OK &&
              qt_packed_rounds_on(&packed, a->p->be);
    return all;
}

/* The arrays of the host, and the sampled tokens. */
static int arranger_on_host(struct arranger *a, struct qt_err *err)
{
    struct qt_backend *be = a->p->be;
    const size_t bytes = a->k * sizeof *a->x;
    int rc;
    QT_TRY(qt_array_new(&a->g, a->blocks, BLOCK2 * sizeof *a->g, err));
    QT_TRY(qt_array_new(&a->x, a->m, bytes, err));
    QT_TRY(be->download(be, a->x, a->p->sample[a->i], a->m * bytes, err));
    QT_TRY(qt_array_new(&a->stored, a->m, bytes, err));
    QT_TRY(qt_array_new(&a->e, a->m, bytes, err));
    QT_TRY(qt_array_new(&a->scratch, (size_t)qt_threads(), a->scratch_floats * sizeof *a->scratch,
                        err));
done:
    return rc;
}

int qt_act_choose(struct qt_act_planner *p, size_t layer, int i, const struct qt_layer *handle,
                  struct qt_err *err)
{
    struct qt_act_input *in = qt_act_input_at(p, layer, i);
    struct arranger a = {
        .p = p,
        .layer = layer,
        .i = i,
        .k = in->k,
        .m = p->sampled[i],
        .blocks = qt_ceil_div(in->k, QT_ACT_BLOCK),
        .scratch_floats =
            qt_max_size(BLOCK2, qt_min_size(p->sampled[i], WEIGHT_TOKENS) * (size_t)PIECE_ROWS)};
    const enum qt_act_precision precision = qt_act_precision(p->spec);
    const bool sorts = in->reorder && qt_spec_value(p->spec, "order") != 0;
    int rc = QT_OK;
    openblas_set_num_threads(1);
    a.on = rounds_there(&a) ? handle : NULL;
    QT_TRY(qt_array_new(&a.weights2, a.k, sizeof *a.weights2, err));
    QT_TRY(qt_array_new(&a.d, ROUNDINGS, a.blocks * sizeof *a.d, err));
    if (!a.on)
        QT_TRY(arranger_on_host(&a, err));
    QT_TRY(sum_weights2(&a, err));
    QT_TRY(choose(&in->chosen, &a, sorts && precision == QT_ACT_MIXED, precision, err));
    if (sorts && precision == QT_ACT_MIXED)
        QT_TRY(choose(&in->even, &a, false, QT_ACT_ALL_4, err));
done:
    qt_free(a.weights2);
    qt_free(a.g);
    qt_free(a.x);
    qt_free(a.stored);
    qt_free(a.e);
    qt_free(a.d);
    qt_free(a.scratch);
    return rc;
}
