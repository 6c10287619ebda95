/*
 * Chooses the arrangement of an input's channels (order.c) and the clip ratio of its 4-bit channel
 * blocks.
 *
 * The clip ratio is that with the least sum of the errors of all channel blocks at the outputs of
 * the linears, on a sample of tokens, with the matrices as they are stored (rotated, if blocks
 * are):
 *
 *   D[b]   error of channel block b at 4 or 8 bits:
 *          sum over tokens and linears of |(x - Q(x))_b W_b^T|^2
 *
 * The arrangement is that with the least error of the linears after error compensation
 * (compensated.c). It depends on
 *
 *   E[b]   rounding error of channel block b: sum over tokens of |(x - Q(x))_b|^2
 */
#include "pack/activations/planner.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

enum { BLOCK2 = QT_ACT_BLOCK * QT_ACT_BLOCK };

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
    const struct qt_layer *on;  /* holds the weights of the linears, and its backend rounds them; or
                                * NULL */
    double *weights2;           /* [k] sums of squared weights over the linears */
    struct qt_act_rank *ranks;  /* [k] */
    double *d;                  /* [ROUNDINGS][blocks] D */
    double *e2;                 /* [ROUNDINGS][blocks] E */
    struct qt_act_judge *judge; /* NULL: there is nothing to compare */
    /* On the host: */
    float *x;       /* [m][k] sampled tokens */
    float *g;       /* [blocks][128][128] Gram matrices of the stored weights, lower triangles */
    float *stored;  /* [m][k] x in packed order, scale and rotation */
    float *e;       /* [m][k] its rounding errors */
    float *scratch; /* [threads][BLOCK2] */
};

static float *scratch_of(const struct arranger *a, int thread)
{
    return a->scratch + (size_t)thread * BLOCK2;
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

/* As gram_block, for all blocks. *out: backend memory, owned by the caller. */
static int grams_on(float **out, const struct arranger *a, const struct qt_act *act,
                    struct qt_err *err)
{
    struct qt_backend *be = a->p->be;
    struct qt_act inverse = {.k = a->k, .order = act->order, .rotate = act->rotate};
    const struct qt_linear *linear;
    float *t = NULL;
    int rc;
    QT_TRY(qt_array_new(&inverse.factor, a->k, sizeof *inverse.factor, err));
    for (size_t i = 0; i < a->k; i++)
        inverse.factor[i] = 1 / act->factor[i];
    QT_TRY(qt_backend_floats(out, be, a->blocks, BLOCK2, err));
    for (size_t l = 0; (linear = next_linear(a, &l));) {
        be->free(be, t);
        t = NULL;
        QT_TRY(qt_backend_floats(&t, be, linear->n, a->k, err));
        QT_TRY(qt_act_arrange_on(be, t, qt_layer_weight(a->on, linear->weight), linear->n, &inverse,
                                 err));
        QT_TRY(be->block_grams(be, *out, t, linear->n, a->k, err));
    }
done:
    be->free(be, t);
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
    double *d, *e2; /* [blocks] */
};

/* d[b] = sum over tokens of e G[b] e^T = sum of G[b] E^T E, e: rounding errors of the block. e2[b]
 * = trace(E^T E). */
static int error_block(void *ctx, size_t b, int thread, struct qt_err *err)
{
    const struct error_job *job = ctx;
    const struct arranger *a = job->a;
    const size_t at = b * QT_ACT_BLOCK, width = qt_min_size(QT_ACT_BLOCK, a->k - at);
    const float *g = a->g + b * BLOCK2;
    float *ee = scratch_of(a, thread);
    double sum = 0, trace = 0;
    (void)err;
    for (size_t t = 0; t < a->m; t++) /* from rounded values to errors */
        for (size_t j = t * a->k + at; j < t * a->k + at + width; j++)
            a->e[j] -= a->stored[j];
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, (int)width, (int)a->m, 1, a->e + at,
                (int)a->k, 0, ee, QT_ACT_BLOCK);
    for (size_t i = 0; i < width; i++)
        trace += (double)ee[i * QT_ACT_BLOCK + i];
    for (size_t i = 0; i < width; i++)
        for (size_t j = 0; j <= i; j++)
            sum += (i == j ? 1 : 2) * (double)g[i * QT_ACT_BLOCK + j] *
                   (double)ee[i * QT_ACT_BLOCK + j];
    job->d[b] = sum;
    job->e2[b] = trace;
    return QT_OK;
}

static void set_rounding(struct qt_act *act, struct qt_act_rounding how)
{
    memset(act->bits, (int)how.bits, qt_ceil_div(act->k, QT_ACT_BLOCK));
    act->clip = how.clip;
}

/* Sets a->d and a->e2 of roundings [from, end). */
static int measure(struct arranger *a, struct qt_act *act, size_t from, size_t end,
                   struct qt_err *err)
{
    int rc;
    QT_TRY(make_grams(a, act, err));
    QT_TRY(qt_act_arrange(a->stored, a->x, a->m, act, err));
    for (size_t i = from; i < end; i++) {
        set_rounding(act, roundings[i]);
        QT_TRY(qt_act_round(a->e, a->stored, a->m, act, err));
        struct error_job job = {a, a->d + i * a->blocks, a->e2 + i * a->blocks};
        QT_TRY(qt_parallel(a->blocks, error_block, &job, err));
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
    QT_TRY(be->input_errors(be, a->d + from * a->blocks, a->e2 + from * a->blocks,
                            a->p->sample[a->i], g, a->m, act, roundings + from, end - from, err));
done:
    be->free(be, g);
    return rc;
}

/* ---- choice --------------------------------------------------------------------------------- */

void qt_act_candidate_free(struct qt_act_candidate *c)
{
    qt_act_free(&c->act);
    qt_free(c->d4);
    qt_free(c->d8);
    qt_free(c->e4);
    qt_free(c->e8);
    *c = (struct qt_act_candidate){0};
}

static double total_error(const struct arranger *a, size_t rounding)
{
    double total = 0;
    for (size_t b = 0; b < a->blocks; b++)
        total += a->d[rounding * a->blocks + b];
    return total;
}

/* Copies the errors of a rounding. */
static void take_errors(double *d, double *e2, const struct arranger *a, size_t rounding)
{
    memcpy(d, a->d + rounding * a->blocks, a->blocks * sizeof *d);
    memcpy(e2, a->e2 + rounding * a->blocks, a->blocks * sizeof *e2);
}

/* The error after compensation with all channel blocks at 4 or 8 bits, or with the block that gains
 * most at 8 bits and the others at 4. */
static int judge(double *error, const struct qt_act_candidate *c, const struct arranger *a,
                 enum qt_act_precision precision, struct qt_err *err)
{
    double *e2 = NULL;
    size_t most = 0;
    int rc;
    *error = 0;
    if (!a->judge)
        return QT_OK;
    QT_TRY(qt_array_new(&e2, a->blocks, sizeof *e2, err));
    for (size_t b = 1; b < a->blocks && precision == QT_ACT_MIXED; b++)
        most = c->d4[b] - c->d8[b] > c->d4[most] - c->d8[most] ? b : most;
    for (size_t b = 0; b < a->blocks; b++) {
        const bool eight = precision == QT_ACT_ALL_8 || (precision == QT_ACT_MIXED && b == most);
        e2[b] = (eight ? c->e8[b] : c->e4[b]) / (double)a->m;
    }
    QT_TRY(qt_act_judge_error(error, a->judge, &c->act, e2, err));
done:
    qt_free(e2);
    return rc;
}

/* Sets the errors, and the clip ratio with the least error D of 4-bit blocks. */
static int measure_candidate(struct qt_act_candidate *c, struct arranger *a, struct qt_err *err)
{
    const size_t from = a->precision == QT_ACT_ALL_4 ? FOUR : EIGHT,
                 end = a->precision == QT_ACT_ALL_8 ? FOUR : ROUNDINGS;
    size_t best = from;
    int rc;
    QT_TRY(a->on ? measure_on(a, &c->act, from, end, err) : measure(a, &c->act, from, end, err));
    if (from == EIGHT)
        take_errors(c->d8, c->e8, a, EIGHT);
    if (end > FOUR) {
        best = FOUR;
        for (size_t i = FOUR + 1; i < end; i++)
            best = total_error(a, i) < total_error(a, best) ? i : best;
        take_errors(c->d4, c->e4, a, best);
        c->total4 = total_error(a, best);
    }
    set_rounding(&c->act, roundings[best]);
    QT_TRY(judge(&c->error, c, a, a->precision, err));
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
    QT_TRY(qt_array_new(&out->e4, a->blocks, sizeof *out->e4, err));
    QT_TRY(qt_array_new(&out->e8, a->blocks, sizeof *out->e8, err));
    QT_TRY(qt_act_order(&out->act, a->p, a->i, a->ranks, sorted, smoothed, err));
    QT_TRY(measure_candidate(out, a, err));
done:
    if (rc < 0)
        qt_act_candidate_free(out);
    return rc;
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
    if (smoothed.error < CLEARLY * best->error) {
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
    QT_TRY(qt_array_new(&a->scratch, (size_t)qt_threads(), BLOCK2 * sizeof *a->scratch, err));
done:
    return rc;
}

int qt_act_choose(struct qt_act_planner *p, size_t layer, int i, const struct qt_layer *handle,
                  struct qt_err *err)
{
    struct qt_act_input *in = qt_act_input_at(p, layer, i);
    struct arranger a = {.p = p,
                         .layer = layer,
                         .i = i,
                         .k = in->k,
                         .m = p->sampled[i],
                         .blocks = qt_ceil_div(in->k, QT_ACT_BLOCK)};
    const enum qt_act_precision precision = qt_act_precision(p->spec);
    const bool sorts = in->reorder && qt_spec_value(p->spec, "order") != 0;
    int rc = QT_OK;
    openblas_set_num_threads(1);
    a.on = rounds_there(&a) ? handle : NULL;
    QT_TRY(qt_array_new(&a.weights2, a.k, sizeof *a.weights2, err));
    QT_TRY(qt_array_new(&a.d, ROUNDINGS, a.blocks * sizeof *a.d, err));
    QT_TRY(qt_array_new(&a.e2, ROUNDINGS, a.blocks * sizeof *a.e2, err));
    if (!a.on)
        QT_TRY(arranger_on_host(&a, err));
    QT_TRY(sum_weights2(&a, err));
    QT_TRY(qt_act_ranks_new(&a.ranks, p, layer, i, a.weights2, err));
    if (p->gram[i])
        QT_TRY(qt_act_judge_new(&a.judge, p, layer, i, handle, err));
    QT_TRY(choose(&in->chosen, &a, sorts && precision == QT_ACT_MIXED, precision, err));
    if (sorts && precision == QT_ACT_MIXED) {
        QT_TRY(judge(&in->chosen.error4, &in->chosen, &a, QT_ACT_ALL_4, err));
        QT_TRY(choose(&in->even, &a, false, QT_ACT_ALL_4, err));
    }
done:
    qt_free(a.weights2);
    qt_free(a.ranks);
    qt_free(a.g);
    qt_free(a.x);
    qt_free(a.stored);
    qt_free(a.e);
    qt_free(a.d);
    qt_free(a.e2);
    qt_act_judge_free(a.judge);
    qt_free(a.scratch);
    return rc;
}
