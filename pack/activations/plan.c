/* Makes and applies the activation plan (plan.h): finds the linear inputs, runs calibration windows
 * through the unquantized model layer by layer, and calls the steps of planner.h. */
#include "pack/activations/planner.h"
#include "pack/sequential.h"

#include <string.h>

enum {
    STAT_TOKENS = 1 << 14, /* of whole windows for channel statistics: at most, but one window */
    STAT_WINDOWS = 32,     /* at most */
    SAMPLES = 512,         /* at most so many tokens are sampled for qt_act_choose */
};

const struct qt_act *qt_act_plan_find(const struct qt_act_plan *p, size_t layer, int input)
{
    const size_t i = layer * QT_INPUTS + (size_t)qt_act_pooled(input);
    const struct qt_act *a = p->act ? &p->act[i] : NULL;
    return a && a->k ? a : NULL;
}

/* ---- inputs --------------------------------------------------------------------------------- */

static bool is_w4ax(const struct qt_plan_item *item)
{
    return !item->copied && item->packed->spec.scheme == &qt_scheme_w4ax;
}

/* Checks a w4ax tensor by itself. */
static int check_item(const struct qt_plan_item *item, const struct qt_model *model,
                      struct qt_err *err)
{
    const struct qt_tensor *t = item->tensor;
    const char *part = qt_model_cannot(model, QT_USE_W4AX);
    if (part)
        return qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name,
                       "w4ax does not support %s: use another scheme", part);
    if (!qt_model_is_linear(model, t->name))
        return qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name,
                       "is w4ax, but is not a linear weight of a decoder layer");
    return QT_OK;
}

/* Whether the linear counts in the multiply-accumulates of a token: of routed experts, as many as a
 * token chooses. */
static bool is_used(const struct qt_model *model, const struct qt_linear *linear)
{
    const int expert = qt_model_expert(model, linear->layer, linear->input);
    struct qt_model_details d;
    qt_model_details(&d, model);
    return expert < 0 || (size_t)expert < d.top_k || (size_t)expert >= d.routed;
}

static int add_linear(struct qt_act_planner *p, const struct qt_plan_item *item,
                      const struct qt_linear *linear, struct qt_err *err)
{
    struct qt_act_input *in = qt_act_input_at(p, linear->layer, qt_act_pooled(linear->input));
    const char *file = item ? item->tensor->file : NULL;
    bool is = item && is_w4ax(item);
    if (in->n && (in->k != 0) != is)
        return qt_fail(err, QT_E_UNSUPPORTED, file, linear->weight,
                       "either all or none of the linears that share an input must be w4ax");
    if (is && p->spec && !qt_act_same_params(p->spec, &item->packed->spec))
        return qt_fail(err, QT_E_UNSUPPORTED, file, linear->weight,
                       "is %s, but others are %s: all w4ax tensors of a model must have the same "
                       "parameters",
                       item->packed->spec.text, p->spec->text);
    if (is && in->k && in->k != linear->k)
        return qt_fail(err, QT_E_UNSUPPORTED, file, linear->weight,
                       "w4ax does not support layers whose experts have several sizes");
    if (is_used(p->model, linear))
        in->n += linear->n;
    if (is) {
        in->k = linear->k;
        p->spec = &item->packed->spec;
    }
    return QT_OK;
}

/* An input can be permuted if every linear that produces its channels is w4ax, because then their
 * rows can be stored in the same order. It can be scaled if, in addition, a norm or such rows can
 * absorb the factors. The input of experts is also that of the router, so the norm in front of it
 * must not change; channels of the same number in several experts have nothing in common. */
void qt_act_allow_changes(struct qt_act_planner *p, size_t layer)
{
    const struct qt_linear *linear;
    size_t n = qt_model_linears(&linear, p->model, layer);
    bool experts = false;
    for (size_t l = 0; l < n; l++)
        experts |= qt_model_expert(p->model, layer, linear[l].input) >= 0;
    for (int i = 0; i < QT_INPUTS; i++) {
        struct qt_act_input *in = qt_act_input_at(p, layer, i);
        in->reorder = true;
        in->scale = qt_model_input_is_norm(p->model, i);
        for (size_t l = 0; l < n; l++)
            if (qt_act_pooled(linear[l].feeds) == i) {
                const int from = qt_act_pooled(linear[l].input);
                in->reorder = in->reorder && qt_act_input_at(p, layer, from)->k;
                in->scale = in->scale || linear[l].feeds_scale;
            }
        in->reorder = in->reorder && !(experts && i == QT_INPUTS - 1);
        in->scale = in->scale && in->reorder && !(experts && i >= QT_INPUTS - 2);
    }
}

int qt_act_find_inputs(struct qt_act_planner *p, const struct qt_plan *plan, struct qt_err *err)
{
    size_t layers = qt_model_info(p->model)->layers;
    bool wanted = false;
    int rc;
    QT_TRY(qt_array_new(&p->inputs, layers * QT_INPUTS, sizeof *p->inputs, err));
    for (size_t i = 0; i < plan->count; i++)
        if (is_w4ax(&plan->items[i])) {
            QT_TRY(check_item(&plan->items[i], p->model, err));
            wanted = true;
        }
    for (size_t l = 0; l < layers && wanted; l++) {
        const struct qt_linear *linear;
        size_t n = qt_model_linears(&linear, p->model, l);
        for (size_t i = 0; i < n; i++)
            QT_TRY(add_linear(p, qt_plan_find(plan, linear[i].weight), &linear[i], err));
        qt_act_allow_changes(p, l);
    }
done:
    return rc;
}

/* ---- statistics of a layer's inputs --------------------------------------------------------- */

static void observe_end(struct qt_act_planner *p)
{
    for (int i = 0; i < QT_INPUTS; i++) {
        struct qt_channels *c = &p->channels[i];
        qt_backend_channels_free(c, p->be);
        p->be->free(p->be, p->sample[i]);
        p->be->free(p->be, p->gram[i]);
        qt_free(p->token_factor[i]);
        p->sample[i] = NULL;
        p->gram[i] = NULL;
        p->token_factor[i] = NULL;
    }
}

/* True if there are several arrangements of the input. */
static bool compares(const struct qt_act_planner *p, const struct qt_act_input *in)
{
    return (in->scale && qt_spec_value(p->spec, "smooth") != 0) ||
           (in->reorder && qt_spec_value(p->spec, "order") != 0 &&
            qt_act_precision(p->spec) == QT_ACT_MIXED);
}

static int observe_begin(struct qt_act_planner *p, size_t layer, struct qt_err *err)
{
    int rc = QT_OK;
    for (int i = 0; i < QT_INPUTS; i++) {
        struct qt_channels *c = &p->channels[i];
        size_t k = qt_act_input_at(p, layer, i)->k;
        p->sampled[i] = p->seen[i] = 0;
        if (!k)
            continue;
        QT_TRY(qt_backend_channels(c, p->be, k, err));
        QT_TRY(qt_backend_floats(&p->sample[i], p->be, SAMPLES, k, err));
        if (!compares(p, qt_act_input_at(p, layer, i)))
            continue;
        const size_t judged = k / qt_act_judge_stride(k);
        QT_TRY(p->be->alloc(p->be, &p->gram[i], judged * judged * sizeof *p->gram[i], err));
    }
done:
    return rc;
}

/* Adds every stride-th row of x[m][k] from row `first` on to the sample of input i. */
static int add_sample(struct qt_act_planner *p, int i, const float *x, size_t first, size_t m,
                      size_t k, size_t stride, struct qt_err *err)
{
    if (first >= m)
        return QT_OK;
    const size_t count = qt_min_size(qt_ceil_div(m - first, stride), SAMPLES - p->sampled[i]);
    const int rc = p->be->copy_columns(p->be, p->sample[i] + p->sampled[i] * k, k, x + first * k,
                                       stride * k, k, count, err);
    p->sampled[i] += count;
    return rc;
}

/* Adds x[m][k], of which the judge of arrangements sees every stride-th channel, to the Gram matrix
 * of input i. */
static int add_gram(struct qt_act_planner *p, int i, const float *x, size_t m, size_t k,
                    struct qt_err *err)
{
    const size_t stride = qt_act_judge_stride(k), judged = k / stride;
    float *some = NULL;
    int rc = QT_OK;
    if (!p->gram[i])
        return QT_OK;
    if (stride > 1) {
        QT_TRY(qt_backend_floats(&some, p->be, m, judged, err));
        QT_TRY(p->be->copy_columns(p->be, some, 1, x, stride, 1, m * judged, err));
        x = some;
    }
    QT_TRY(p->be->gram(p->be, p->gram[i], x, m, judged, err));
done:
    p->be->free(p->be, some);
    return rc;
}

/* The tokens of an expert: the first half are observed; of the others so many are sampled that all
 * experts together have about as many samples as another input. */
static int observe_expert(struct qt_act_planner *p, int i, const float *x, size_t m, size_t k,
                          struct qt_err *err)
{
    const size_t half = qt_ceil_div(m, 2);
    struct qt_model_details d;
    qt_model_details(&d, p->model);
    const size_t used = d.top_k + qt_model_info(p->model)->experts - d.routed;
    int rc;
    QT_TRY(add_gram(p, i, x, m, k, err));
    p->seen[i] += m;
    QT_TRY(p->be->channels(p->be, &p->channels[i], x, half, k, err));
    QT_TRY(add_sample(p, i, x, half, m, k, p->stride * used, err));
done:
    return rc;
}

/* Hook: adds x[m][k] to the statistics of input i up to token p->held_out, and every stride-th
 * token after that to its sample. So the tokens that errors are measured on have no part in the
 * statistics that orders and factors come from. */
static int observe_input(void *ctx, int input, const float *x, size_t m, size_t k,
                         struct qt_err *err)
{
    struct qt_act_planner *p = ctx;
    const int i = qt_act_pooled(input);
    const size_t seen = p->seen[i];
    const size_t observed = seen < p->held_out ? qt_min_size(p->held_out - seen, m) : 0;
    const float *factor = p->token_factor[i];
    float *scaled = NULL;
    int rc = QT_OK;
    if (!p->sample[i] || m == 0)
        return QT_OK;
    if (qt_model_expert(p->model, p->layer, input) >= 0)
        return observe_expert(p, i, x, m, k, err);
    if (factor) {
        QT_TRY(qt_backend_floats(&scaled, p->be, m, k, err));
        QT_TRY(p->be->gather_rows(p->be, scaled, x, NULL, factor + seen, m, k, err));
        x = scaled;
    }
    QT_TRY(add_gram(p, i, x, m, k, err));
    if (observed)
        QT_TRY(p->be->channels(p->be, &p->channels[i], x, observed, k, err));
    const size_t past = seen + observed - p->held_out; /* used if m > observed */
    const size_t first = observed + (p->stride - past % p->stride) % p->stride;
    QT_TRY(add_sample(p, i, x, first, m, k, p->stride, err));
    p->seen[i] += m;
done:
    p->be->free(p->be, scaled);
    return rc;
}

/* ---- the pass over the layers --------------------------------------------------------------- */

size_t qt_act_stat_tokens(const struct qt_calibration *data)
{
    const size_t most = qt_min_size(STAT_WINDOWS, qt_max_size(STAT_TOKENS / data->seqlen, 1));
    return qt_min_size(data->samples, most) * data->seqlen;
}

/* Sets the tokens' factors of inputs whose outputs are added to hidden states. These are in front
 * of the layer, and stay there. */
static int weigh_tokens(struct qt_act_planner *p, struct qt_layer *handle, const float *hidden,
                        size_t tokens, struct qt_err *err)
{
    const size_t width = qt_model_info(p->model)->state;
    float *ahead = NULL;
    int rc;
    QT_TRY(qt_backend_floats(&ahead, p->be, tokens, width, err));
    QT_TRY(p->be->copy(p->be, ahead, hidden, tokens * width * sizeof *ahead, err));
    const int inputs = (int)qt_min_size(qt_model_inputs(p->model, p->layer), QT_INPUTS);
    for (int i = 0; i < inputs; i++) {
        if (!qt_model_ends_sublayer(p->model, p->layer, i))
            continue;
        QT_TRY(qt_layer_run_sublayer(handle, i, ahead, tokens, p->data->seqlen, NULL, err));
        if (!(qt_model_output_scale(p->model, p->layer, i) > 0) || !p->sample[i])
            continue;
        QT_TRY(qt_array_new(&p->token_factor[i], tokens, sizeof *p->token_factor[i], err));
        QT_TRY(qt_token_factors(p->token_factor[i], p->be, ahead, NULL, 0, tokens, width, err));
    }
done:
    p->be->free(p->be, ahead);
    return rc;
}

static int plan_layer(struct qt_act_planner *p, size_t layer, float *hidden, size_t tokens,
                      struct qt_err *err)
{
    const struct qt_hook hook = {p, observe_input};
    struct qt_layer *handle = NULL;
    int rc;
    struct qt_weights weights = p->source;
    p->layer = layer;
    if (p->sensitivity)
        weights.fake_quant = (struct qt_fake_quant){.ctx = p, .input = qt_act_quantize_active};
    QT_TRY(observe_begin(p, layer, err));
    QT_TRY(qt_layer_open(&handle, p->model, layer, &weights, p->be, err));
    qt_act_windows(p, true);
    rc = weigh_tokens(p, handle, hidden, tokens, err);
    if (rc == QT_OK)
        rc = qt_layer_run(handle, hidden, tokens, p->data->seqlen, &hook, err);
    qt_act_windows(p, false);
    QT_TRY(rc);
    QT_TRY(qt_act_advance(p, tokens, err));
    for (int i = 0; i < QT_INPUTS; i++) {
        struct qt_act_input *in = qt_act_input_at(p, layer, i);
        if (!in->k)
            continue;
        QT_TRY(qt_act_choose(p, layer, i, handle, err));
        *qt_act_planned(p, layer, i) = in->chosen.act;
        in->chosen.act = (struct qt_act){0};
        QT_TRY(qt_act_advance(p, 0, err));
    }
    observe_end(p);
    qt_act_windows(p, true);
    rc = qt_act_sensitivity_layer(p, layer, handle, err);
    qt_act_windows(p, false);
done:
    observe_end(p);
    qt_layer_close(handle);
    return rc;
}

static int plan_layers(struct qt_act_planner *p, struct qt_err *err)
{
    size_t tokens = qt_act_stat_tokens(p->data), bytes;
    float *hidden = NULL;
    int rc = QT_OK;
    p->held_out = tokens / 2;
    p->stride = qt_ceil_div(tokens - p->held_out, SAMPLES);
    if (qt_mul_overflow(&bytes, tokens, qt_model_info(p->model)->state * sizeof *hidden))
        return qt_no_memory(err, NULL);
    QT_TRY(p->be->alloc(p->be, &hidden, bytes, err));
    QT_TRY(qt_model_embed(hidden, p->model, &p->source, p->be, p->data->ids, tokens,
                          p->data->seqlen, err));
    for (size_t l = 0; l < p->out->layers; l++)
        QT_TRY(plan_layer(p, l, hidden, tokens, err));
done:
    p->be->free(p->be, hidden);
    return rc;
}

/* ---- report --------------------------------------------------------------------------------- */

struct macs {
    double all, at8;
};

static void add_input(struct macs *sum, const struct qt_act_input *in, const struct qt_act *act)
{
    for (size_t b = 0, at = 0; at < in->k; b++, at += QT_ACT_BLOCK) {
        double macs = (double)in->n * (double)qt_min_size(QT_ACT_BLOCK, in->k - at);
        sum->all += macs;
        sum->at8 += act->bits[b] == 8 ? macs : 0;
    }
}

static json_t *macs_json(const struct macs *sum)
{
    return json_pack("{s:f}", "a8_macs", sum->all > 0 ? sum->at8 / sum->all : 0.0);
}

static int make_report(struct qt_act_planner *p, struct qt_err *err)
{
    struct macs all = {0};
    json_t *layers = json_array();
    bool failed = !layers;
    for (size_t l = 0; l < p->out->layers; l++) {
        struct macs one = {0};
        for (int i = 0; i < QT_INPUTS; i++) {
            add_input(&one, qt_act_input_at(p, l, i), qt_act_planned(p, l, i));
            add_input(&all, qt_act_input_at(p, l, i), qt_act_planned(p, l, i));
        }
        failed |= json_array_append_new(layers, macs_json(&one)) < 0;
    }
    p->out->report = macs_json(&all);
    failed |= json_object_set_new(p->out->report, "layers", layers) < 0;
    return failed ? qt_no_memory(err, NULL) : QT_OK;
}

/* ---- the plan ------------------------------------------------------------------------------- */

int qt_act_plan_check(const struct qt_plan *plan, const struct qt_model *model, struct qt_err *err)
{
    struct qt_act_planner p = {.model = model};
    int rc = qt_act_find_inputs(&p, plan, err);
    qt_free(p.inputs);
    return rc;
}

int qt_act_plan_new(struct qt_act_plan *out, const struct qt_plan *plan,
                    const struct qt_model *model, const struct qt_weights *source,
                    const struct qt_quantize_options *opt, struct qt_err *err)
{
    struct qt_act_planner p = {.out = out,
                               .model = model,
                               .source = *source,
                               .opt = opt,
                               .data = opt->calibration,
                               .be = opt->calibration->backend,
                               .active = -1};
    size_t layers = qt_model_info(model)->layers;
    int rc;
    *out = (struct qt_act_plan){.layers = layers};
    QT_TRY(qt_act_find_inputs(&p, plan, err));
    if (!p.spec)
        goto done;
    p.total = (double)layers * (double)qt_act_stat_tokens(p.data) + qt_act_sensitivity_tokens(&p);
    QT_TRY(qt_array_new(&out->act, layers * QT_INPUTS, sizeof *out->act, err));
    QT_TRY(qt_act_sensitivity_begin(&p, err));
    QT_TRY(plan_layers(&p, err));
    QT_TRY(qt_act_sensitivity_score(&p, err));
    QT_TRY(qt_act_assign_bits(&p, err));
    QT_TRY(make_report(&p, err));
    qt_log_message(opt->log, QT_LOG_INFO,
                   "activations: %.1f %% of the multiply-accumulates at 8 bits",
                   100 * json_real_value(json_object_get(out->report, "a8_macs")));
done:
    qt_act_sensitivity_end(&p);
    for (size_t v = 0; p.inputs && v < layers * QT_INPUTS; v++) {
        qt_act_candidate_free(&p.inputs[v].chosen);
        qt_act_candidate_free(&p.inputs[v].even);
    }
    qt_free(p.inputs);
    if (rc < 0)
        qt_act_plan_free(out);
    return rc;
}

void qt_act_plan_free(struct qt_act_plan *p)
{
    for (size_t v = 0; p->act && v < p->layers * QT_INPUTS; v++)
        qt_act_free(&p->act[v]);
    qt_free(p->act);
    json_decref(p->report);
    *p = (struct qt_act_plan){0};
}

int qt_act_plan_input(void *ctx, struct qt_backend *be, float *y, const float *x,
                      const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err)
{
    const struct qt_act *act = qt_act_plan_find(ctx, linear->layer, linear->input);
    return act ? qt_act_apply_on(be, y, x, m, act, err)
               : be->copy(be, y, x, m * k * sizeof *x, err);
}

int qt_act_plan_arrange(struct qt_arrange *out, const struct qt_act_plan *p,
                        const struct qt_model *model, const struct qt_linear *linear,
                        struct qt_err *err)
{
    const struct qt_act *fed =
        linear->feeds >= 0 ? qt_act_plan_find(p, linear->layer, linear->feeds) : NULL;
    uint32_t *order = NULL;
    float *factor = NULL;
    int rc = QT_OK;
    *out = (struct qt_arrange){.input = qt_act_plan_find(p, linear->layer, linear->input)};
    if (!fed || !out->input)
        return QT_OK;
    QT_TRY(qt_array_new(&order, linear->n, sizeof *order, err));
    QT_TRY(qt_array_new(&factor, linear->n, sizeof *factor, err));
    for (size_t i = 0; i < linear->n; i++) {
        order[i] = (uint32_t)i;
        factor[i] = 1;
    }
    for (size_t first = linear->feeds_from; first < linear->n; first += linear->feeds_rows) {
        const bool scaled = linear->feeds_scale && first + linear->feeds_rows == linear->n;
        for (size_t c = 0; c < fed->k; c++) {
            size_t row = first + qt_model_feed_row(model, linear->feeds, c);
            size_t from = first + qt_model_feed_row(model, linear->feeds, fed->order[c]);
            order[row] = (uint32_t)from;
            factor[row] = scaled ? fed->factor[c] : 1;
        }
    }
    out->row_order = order;
    out->row_factor = factor;
done:
    if (rc < 0) {
        qt_free(order);
        qt_free(factor);
    }
    return rc;
}

void qt_act_plan_arrange_free(struct qt_arrange *a)
{
    qt_free((void *)(uintptr_t)a->row_order);
    qt_free((void *)(uintptr_t)a->row_factor);
    *a = (struct qt_arrange){0};
}
