/*
 * The time that a calibrated quantize takes on the CPU: parts of the work are done on a small
 * sample and extrapolated. Processor time is measured, with one thread, so that other programs do
 * not count.
 *
 *   layer     a decoder layer observes and passes some tokens (sequential.c), without rounding
 *   factor    the Hessians of these tokens are factored
 *   solve     128 rows of each linear are rounded
 *   forward   some tokens pass the layer: for learning and the choice of activation precisions
 *   choice    of the channel order of an input, by the errors of quantized activations
 *
 * Checked against measurements by tests/large/plan_time.sh.
 */
#include "pack/activations/planner.h"
#include "pack/run.h"
#include "pack/sequential.h"

#include <math.h>
#include <time.h>

enum {
    LEAST_TOKENS = 64,
    LARGEST_K = 2048, /* of sampled products; wider inputs count by their first channels */
};
/* Multiply-accumulates that the sample's forward passes may take. */
static const double sample_macs = 4e9;
/* A learning step: forward, forward again when the layer's turn comes, and backward, which has two
 * products for each of forward. */
static const double step_forwards = 4;

struct sample {
    const struct qt_plan *plan;
    const struct qt_ckpt *ckpt;
    const struct qt_memory_options *opt;
    struct qt_weights source;
    struct qt_model *model;
    struct qt_backend *be;
    const struct qt_linear *linear;
    size_t linears, layer, tokens;
    double macs;              /* of a token in the layer */
    double enter, layer_time; /* seconds: loading the layer twice; `tokens` in it */
    double factoring;         /* seconds for all inputs of the layer */
    double factoring_some;    /* of the channels that are sampled */
    double *rounding;         /* seconds for each linear */
    double forward;           /* seconds for `tokens` */
};

static double processor_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static const struct qt_plan_item *item_of(const struct sample *s, const char *name)
{
    for (size_t i = 0; i < s->plan->count; i++)
        if (strcmp(s->plan->items[i].tensor->name, name) == 0)
            return &s->plan->items[i];
    return NULL;
}

/* ---- solving -------------------------------------------------------------------------------- */

/* *out[rows][cols] = the top left part of a matrix with k columns. */
static int top_left(void *out, const void *from, size_t rows, size_t cols, size_t k, size_t size,
                    struct qt_err *err)
{
    unsigned char *to;
    int rc = qt_array_new(&to, rows * cols, size, err);
    for (size_t i = 0; rc == QT_OK && i < rows; i++)
        memcpy(to + i * cols * size, (const unsigned char *)from + i * k * size, cols * size);
    *(void **)out = rc == QT_OK ? to : NULL;
    return rc;
}

/* The factor of the first k channels of an input, with corrections for `rows` rows. */
static int sample_factor(struct qt_factor *f, const struct qt_observed *seen,
                         const struct qt_linear *linear, const struct qt_packed *p, size_t k,
                         size_t rows, struct qt_err *err)
{
    const struct qt_factor_options opt = {.damp = QT_OBSERVED_DAMP, .group = qt_packed_group(p)};
    double *h = NULL;
    float *cross = NULL;
    const size_t errors = seen->of_outputs ? rows : k;
    int rc;
    QT_TRY(top_left(&h, seen->h, k, k, linear->k, sizeof *h, err));
    QT_TRY(top_left(&cross, seen->cross, errors, k, linear->k, sizeof *cross, err));
    QT_TRY(qt_factor_new(f, h, k, &opt, err));
    QT_TRY(seen->of_outputs ? qt_factor_correct_output_error(f, cross, rows, 1, seen->tokens, err)
                            : qt_factor_correct_input_error(f, cross, 1, seen->tokens, err));
done:
    qt_free(h);
    qt_free(cross);
    return rc;
}

/* Rounds the first rows and k channels of the linear; w->data is replaced. */
static int round_rows(const struct qt_plan_item *item, struct qt_matrix *w, const void *all,
                      size_t width, struct qt_factor *f, struct qt_err *err)
{
    const struct qt_spec *spec = &item->packed->spec;
    struct qt_solve_report report;
    struct qt_packed p = {0};
    void *data;
    int rc = top_left(&data, all, w->n, w->k, width, qt_dtype_bits(w->dtype) / 8, err);
    w->data = data;
    if (rc == QT_OK)
        rc = f ? qt_packed_solve(&p, spec, w, f, NULL, &report, err)
               : qt_packed_quantize(&p, spec, w, NULL, NULL, err);
    qt_packed_free(&p);
    qt_free(data);
    return rc;
}

static int solve_linear(struct sample *s, size_t i, const struct qt_observed *seen,
                        struct qt_err *err)
{
    const struct qt_linear *linear = &s->linear[i];
    const struct qt_plan_item *item = item_of(s, linear->weight);
    struct qt_factor f = {0};
    struct qt_blob blob = {0};
    struct qt_err why = {0};
    if (!item || item->copied)
        return QT_OK;
    const struct qt_tensor *t = item->tensor;
    const size_t rows = qt_min_size(QT_PANEL_ROWS, linear->n),
                 k = qt_min_size(LARGEST_K, linear->k);
    const double wider = (double)linear->k / (double)k;
    const double panels = (double)linear->n / (double)rows;
    const bool solves = qt_spec_method(&item->packed->spec) == QT_METHOD_GPTQ;
    struct qt_matrix w = {NULL, t->dtype, rows, k, t->file, t->name};
    int rc = qt_ckpt_read(&blob, s->ckpt, t, err);
    if (rc < 0)
        return rc;
    double start = processor_seconds();
    if (solves && sample_factor(&f, seen, linear, item->packed, k, rows, &why) < 0) {
        qt_factor_free(&f); /* such tensors are rounded without it */
        f = (struct qt_factor){0};
    }
    bool first = solves; /* linears with the same input share the factor */
    for (size_t j = 0; j < i && first; j++)
        first = s->linear[j].input != linear->input;
    if (first) {
        const double seconds = processor_seconds() - start;
        s->factoring += seconds * wider * wider * wider;
        s->factoring_some += seconds;
    }
    start = processor_seconds();
    rc = round_rows(item, &w, blob.data, linear->k, f.k ? &f : NULL, &why);
    s->rounding[i] = (processor_seconds() - start) * panels * (solves ? wider * wider : wider);
    if (rc == QT_E_RESOURCE || rc == QT_E_INTERRUPTED)
        *err = why;
    else
        rc = QT_OK; /* quantize will say what is wrong */
    qt_factor_free(&f);
    qt_blob_free(&blob);
    return rc;
}

/* ---- the layer ------------------------------------------------------------------------------ */

static int observe_layer(struct sample *s, const struct qt_calibration *data, struct qt_err *err)
{
    struct qt_sequential *seq;
    const int end = (int)qt_model_inputs(s->model, s->layer) - 1;
    int rc = qt_sequential_open(&seq, &s->source, &s->source, data, NULL, err);
    if (rc < 0)
        return rc;
    double start = processor_seconds();
    QT_TRY(qt_sequential_enter(seq, s->layer, &s->source, err));
    s->enter = processor_seconds() - start;
    for (int input = 0; input <= end; input++) {
        struct qt_observed seen;
        start = processor_seconds();
        QT_TRY(qt_sequential_observe(&seen, seq, input, NULL, false, err));
        s->layer_time += processor_seconds() - start;
        for (size_t i = 0; i < s->linears; i++)
            if (s->linear[i].input == input)
                QT_TRY(solve_linear(s, i, &seen, err));
        start = processor_seconds();
        if (qt_model_ends_sublayer(s->model, s->layer, input))
            QT_TRY(qt_sequential_advance(seq, input, err));
        s->layer_time += processor_seconds() - start;
    }
done:
    qt_sequential_close(seq);
    return rc;
}

static int time_forward(struct sample *s, const uint32_t *ids, struct qt_err *err)
{
    struct qt_layer *layer = NULL;
    float *hidden = NULL;
    int rc;
    QT_TRY(qt_backend_floats(&hidden, s->be, s->tokens, qt_model_info(s->model)->state, err));
    QT_TRY(qt_model_embed(hidden, s->model, &s->source, s->be, ids, s->tokens, s->tokens, err));
    QT_TRY(qt_layer_open(&layer, s->model, s->layer, &s->source, s->be, err));
    for (int i = 0; i < 2; i++) { /* the first run allocates */
        const double start = processor_seconds();
        QT_TRY(qt_layer_run(layer, hidden, s->tokens, s->tokens, NULL, err));
        s->forward = processor_seconds() - start;
    }
done:
    qt_layer_close(layer);
    s->be->free(s->be, hidden);
    return rc;
}

static int measure(struct sample *s, struct qt_err *err)
{
    const struct qt_model_info *info = qt_model_info(s->model);
    uint32_t *ids;
    s->layer = 0;
    s->linears = qt_model_linears(&s->linear, s->model, s->layer);
    int rc = qt_array_new(&s->rounding, s->linears, sizeof *s->rounding, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < s->linears; i++)
        s->macs += (double)s->linear[i].n * (double)s->linear[i].k;
    const size_t affordable = (size_t)(sample_macs / fmax(s->macs, 1));
    s->tokens = qt_min_size(s->opt->seqlen, qt_max_size(LEAST_TOKENS, affordable));
    rc = qt_array_new(&ids, s->tokens, sizeof *ids, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < s->tokens; i++)
        ids[i] = (uint32_t)(i * 7919 % info->vocab);
    const struct qt_calibration data = {
        .ids = ids, .samples = 1, .seqlen = s->tokens, .backend = s->be};
    QT_TRY(observe_layer(s, &data, err));
    QT_TRY(time_forward(s, ids, err));
done:
    qt_free(ids);
    return rc;
}

/* ---- extrapolation -------------------------------------------------------------------------- */

/* Attention grows with the length of a window: its share beyond that of the sample, of a forward
 * pass. */
static double longer(const struct sample *s)
{
    const struct qt_model_info *info = qt_model_info(s->model);
    const double width = (double)(info->heads * info->head_dim);
    const double more = (double)(s->opt->seqlen - s->tokens) * width; /* half of QK^T and of PV */
    return 1 + more / s->macs;
}

/* Learning, for forward passes of a token in all layers. */
static double learning(const struct sample *s, double token)
{
    const struct qt_model_info *info = qt_model_info(s->model);
    struct qt_learn_options learn;
    const double head = (double)info->vocab * (double)info->hidden /
                        (s->macs * (double)info->layers); /* as a share of all layers */
    if (qt_learn_parse(&learn, "", NULL) < 0)
        return 0;
    const double passes = (double)learn.passes * (1 - learn.held_out) +
                          (double)(learn.passes + 1) * learn.held_out / step_forwards;
    return token * (1 + passes * step_forwards) * (1 + head);
}

/* Weights that the choice of arrangements (activations/error.c) reads for an input. */
static double choice_weights(const struct qt_act_planner *p, int i)
{
    const struct qt_act_input *in = qt_act_input_at(p, 0, i);
    const bool smooths = in->scale && qt_spec_value(p->spec, "smooth") > 0;
    return (double)in->n * (double)in->k * (smooths ? 2 : 1);
}

/* Seconds for the arrangements of a decoder layer's inputs: input 0 without factors. */
static int time_choice(double *seconds, struct qt_act_planner *p, struct qt_err *err)
{
    enum { MOST = 512 /* sampled tokens (activations/plan.c) */ };
    struct qt_act_input *in = qt_act_input_at(p, 0, 0);
    const size_t k = in->k, all = p->data->samples * p->data->seqlen / 2;
    double weights = 0;
    int rc;
    *seconds = 0;
    if (!k)
        return QT_OK;
    p->sampled[0] = qt_min_size(MOST, qt_max_size(all, 1));
    QT_TRY(qt_backend_floats(&p->sample[0], p->be, p->sampled[0], k, err));
    for (size_t i = 0; i < p->sampled[0] * k; i++) /* the CPU backend: memory of the host */
        p->sample[0][i] = sinf((float)i);
    QT_TRY(qt_backend_channels(&p->channels[0], p->be, k, err));
    QT_TRY(p->be->channels(p->be, &p->channels[0], p->sample[0], p->sampled[0], k, err));
    for (int i = 0; i < QT_INPUTS; i++)
        weights += choice_weights(p, i);
    in->scale = false;
    const double start = processor_seconds();
    QT_TRY(qt_act_choose(p, 0, 0, NULL, err));
    *seconds = (processor_seconds() - start) * weights / choice_weights(p, 0);
done:
    p->be->free(p->be, p->sample[0]);
    qt_backend_channels_free(&p->channels[0], p->be);
    qt_act_candidate_free(&in->chosen);
    qt_act_candidate_free(&in->even);
    return rc;
}

/* Seconds for the errors of a layer's arrangements after compensation: a factor and some rows for
 * each, and one more factor. */
static double comparing(const struct sample *s, const struct qt_spec *spec)
{
    const bool mixed = qt_act_precision(spec) == QT_ACT_MIXED && qt_spec_value(spec, "order") != 0;
    const double factors = qt_spec_value(spec, "smooth") > 0 ? 2 : 1;
    const double compared = mixed ? 2 * factors + 1 : factors;
    double rows = 0;
    for (size_t i = 0; i < s->linears; i++) {
        double all = 0;
        for (size_t j = 0; j < s->linears; j++)
            all += s->linear[j].input == s->linear[i].input ? (double)s->linear[j].n : 0;
        const double stride = (double)qt_act_judge_stride(s->linear[i].k);
        rows += s->rounding[i] * fmin(1, QT_ACT_JUDGE_ROWS / all) / (stride * stride);
    }
    const double factor = s->factoring_some;
    return compared > 1 ? factor + compared * (factor + rows) : 0;
}

/* Seconds for the choice of activation precisions. forward: of a token in a layer. */
static int choosing(double *seconds, const struct sample *s, double forward, struct qt_err *err)
{
    const struct qt_calibration data = {.samples = s->opt->samples, .seqlen = s->opt->seqlen};
    struct qt_act_plan out = {.layers = qt_model_info(s->model)->layers};
    struct qt_act_planner p = {
        .model = s->model, .source = s->source, .data = &data, .be = s->be, .out = &out};
    const struct qt_model_info *info = qt_model_info(s->model);
    const double head = (double)info->vocab * (double)info->hidden / s->macs; /* per layer */
    double choice = 0;
    int rc = qt_act_find_inputs(&p, s->plan, err);
    *seconds = 0;
    if (rc == QT_OK && p.spec)
        rc = time_choice(&choice, &p, err);
    if (rc == QT_OK && p.spec)
        *seconds = (double)out.layers * (choice + comparing(s, p.spec)) +
                   forward * (2 * (double)out.layers * (double)qt_act_stat_tokens(&data) +
                              qt_act_sensitivity_tokens(&p) + head * qt_act_scored_tokens(&p));
    qt_act_plan_free(&out);
    qt_free(p.inputs);
    return rc;
}

/* Adds the rounding of the linears with this input, shared out as layers.c does. */
static int round_input(double *seconds, const struct sample *s, int input, size_t ranks,
                       struct qt_err *err)
{
    size_t *rows = NULL, *unit = NULL, *index = NULL, *end = NULL, n = 0;
    double longest = 0;
    int rc;
    QT_TRY(qt_array_new(&rows, s->linears, sizeof *rows, err));
    QT_TRY(qt_array_new(&unit, s->linears, sizeof *unit, err));
    QT_TRY(qt_array_new(&index, s->linears, sizeof *index, err));
    QT_TRY(qt_array_new(&end, s->linears, ranks * sizeof *end, err));
    for (size_t i = 0; i < s->linears; i++)
        if (s->linear[i].input == input && !item_of(s, s->linear[i].weight)->copied) {
            rows[n] = s->linear[i].n;
            unit[n] = qt_run_unit(item_of(s, s->linear[i].weight)->packed, s->be);
            index[n++] = i;
        }
    QT_TRY(qt_run_divide(end, rows, unit, n, ranks, err));
    for (size_t r = 0; r < ranks; r++) {
        double own = 0;
        for (size_t i = 0; i < n; i++) {
            const size_t first = r ? end[i * ranks + r - 1] : 0;
            own += s->rounding[index[i]] * (double)(end[i * ranks + r] - first) / (double)rows[i];
        }
        longest = fmax(longest, own);
    }
    *seconds += longest;
done:
    qt_free(rows);
    qt_free(unit);
    qt_free(index);
    qt_free(end);
    return rc;
}

static int extrapolate(double *seconds, const struct sample *s, int threads, struct qt_err *err)
{
    const double layers = (double)qt_model_info(s->model)->layers;
    const size_t ranks = qt_max_size(s->opt->ranks, 1);
    size_t blocks;
    const double tokens = (double)qt_plan_rank_tokens(&blocks, s->opt);
    const double forward = s->forward / (double)s->tokens * longer(s);
    const double layer = s->layer_time / (double)s->tokens * longer(s);
    double chosen, solving = s->factoring;
    bool learns = false;
    int rc = choosing(&chosen, s, forward, err);
    for (int i = 0; rc == QT_OK && i < (int)qt_model_inputs(s->model, s->layer); i++)
        rc = round_input(&solving, s, i, ranks, err);
    for (size_t i = 0; i < s->plan->count; i++)
        learns |= !s->plan->items[i].copied && qt_spec_learns(&s->plan->items[i].packed->spec);
    *seconds = layers * (s->enter + tokens * layer + solving) + chosen;
    if (learns)
        *seconds += learning(s, tokens * layers * forward);
    *seconds /= threads;
    return rc;
}

int qt_plan_time(double *seconds, const struct qt_plan *plan, const struct qt_ckpt *ckpt,
                 const struct qt_memory_options *opt, struct qt_backend *cpu, struct qt_err *err)
{
    const int threads = qt_threads();
    struct sample s = {.plan = plan, .ckpt = ckpt, .opt = opt, .be = cpu};
    int rc;
    *seconds = NAN;
    s.source = qt_weights_of_ckpt(ckpt);
    if (!opt->samples || opt->file)
        return QT_OK;
    QT_TRY(qt_model_open(&s.model, &s.source, err));
    if (qt_model_info(s.model)->experts)
        goto done;
    qt_threads_set(1);
    rc = measure(&s, err);
    if (rc == QT_OK)
        rc = extrapolate(seconds, &s, threads, err);
    qt_threads_set(threads);
done:
    qt_free(s.rounding);
    qt_model_close(s.model);
    return rc;
}
