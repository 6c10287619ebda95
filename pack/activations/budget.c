/*
 * Chooses the channel blocks with 8 bits. The sensitivity S of a linear input is the measured KL
 * divergence of the logits when this input alone is quantized, with 4 bits. The estimated gain of 8
 * bits for a block is
 *
 *   S (D4[b] - D8[b]) / (sum of D4 over the blocks of the input)
 *
 * with D4 and D8 of error.c. Blocks get 8 bits in descending order of gain per multiply-accumulate.
 * An input that gets none takes the arrangement that is best for 4 bits.
 */
#include "pack/activations/planner.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    SENSITIVITY_TOKENS = 512, /* if there are so many; at least, with shorter windows */
    LOGIT_POSITIONS = 256,    /* whose logits are in memory at a time */
    TOKENS_APART = 1 << 16,   /* that pass a layer between two calls of qt_act_advance, on a backend
                               * whose memory is not the host's */
};

/* ---- sensitivity ---------------------------------------------------------------------------- */

/*
 * The windows of all variants pass the layers together, one variant behind the other. Variant 0 is
 * the unquantized model. Variant 1 + QT_INPUTS * l + i has input i of layer l at 4 bits; it starts
 * as a copy of variant 0 at layer l.
 */
struct qt_act_sensitivity {
    size_t seqlen, tokens; /* of a window; of a variant: those of all windows */
    float *hidden;         /* backend, [variants][tokens][state] */
    float *logits, *ref;   /* backend, [LOGIT_POSITIONS][vocab] */
    uint32_t targets[LOGIT_POSITIONS];
    struct qt_score scores[LOGIT_POSITIONS];
};

static size_t window_length(const struct qt_calibration *data)
{
    return qt_min_size(data->seqlen, SENSITIVITY_TOKENS);
}

size_t qt_act_variant_tokens(const struct qt_calibration *data)
{
    const size_t windows = qt_ceil_div(SENSITIVITY_TOKENS, window_length(data));
    return qt_min_size(data->samples, windows) * window_length(data);
}

static float *variant(const struct qt_act_planner *p, size_t v)
{
    const struct qt_act_sensitivity *s = p->sensitivity;
    return s->hidden + v * s->tokens * qt_model_info(p->model)->state;
}

void qt_act_sensitivity_end(struct qt_act_planner *p)
{
    struct qt_act_sensitivity *s = p->sensitivity;
    if (!s)
        return;
    p->be->free(p->be, s->hidden);
    p->be->free(p->be, s->logits);
    p->be->free(p->be, s->ref);
    qt_free(s);
    p->sensitivity = NULL;
}

int qt_act_sensitivity_begin(struct qt_act_planner *p, struct qt_err *err)
{
    const size_t count = 1 + p->out->layers * QT_INPUTS;
    struct qt_act_sensitivity *s;
    size_t bytes;
    int rc;
    if (qt_act_precision(p->spec) != QT_ACT_MIXED)
        return QT_OK;                            /* nothing to choose */
    QT_TRY(qt_array_new(&s, 1, sizeof *s, err)); /* targets stay 0: only KLD is read */
    p->sensitivity = s;
    s->seqlen = window_length(p->data);
    s->tokens = qt_act_variant_tokens(p->data);
    if (qt_mul_overflow(&bytes, count * s->tokens,
                        qt_model_info(p->model)->state * sizeof *s->hidden))
        return qt_no_memory(err, NULL);
    QT_TRY(p->be->alloc(p->be, &s->hidden, bytes, err));
    QT_TRY(qt_model_embed(s->hidden, p->model, &p->source, p->be, p->data->ids, s->tokens,
                          s->seqlen, err));
done:
    return rc;
}

int qt_act_quantize_active(void *ctx, struct qt_backend *be, float *y, const float *x,
                           const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err)
{
    const struct qt_act_planner *p = ctx;
    const int input = qt_act_pooled(linear->input);
    if (input != p->active)
        return be->copy(be, y, x, m * k * sizeof *x, err);
    return qt_act_apply_on(be, y, x, m, qt_act_planned(p, linear->layer, input), err);
}

int qt_act_sensitivity_layer(struct qt_act_planner *p, size_t layer, struct qt_layer *handle,
                             struct qt_err *err)
{
    const struct qt_act_sensitivity *s = p->sensitivity;
    const size_t variants = 1 + layer * QT_INPUTS;
    int rc = QT_OK;
    if (!s)
        return QT_OK;
    const size_t bytes = s->tokens * qt_model_info(p->model)->state * sizeof *s->hidden;
    const size_t at_a_time = p->be->host ? 1 : qt_max_size(TOKENS_APART / s->tokens, 1);
    for (int i = 0; i < QT_INPUTS; i++) {
        const size_t k = qt_act_input_at(p, layer, i)->k;
        float *v = variant(p, variants + (size_t)i);
        if (k)
            memset(qt_act_planned(p, layer, i)->bits, 4, qt_ceil_div(k, QT_ACT_BLOCK));
        p->active = k ? i : -1;
        QT_TRY(p->be->copy(p->be, v, variant(p, 0), bytes, err));
        QT_TRY(qt_layer_run(handle, v, s->tokens, s->seqlen, NULL, err));
        QT_TRY(qt_act_advance(p, s->tokens, err));
    }
    p->active = -1;
    for (size_t v = 0, n; v < variants; v += n) {
        n = qt_min_size(at_a_time, variants - v);
        QT_TRY(qt_layer_run(handle, variant(p, v), n * s->tokens, s->seqlen, NULL, err));
        QT_TRY(qt_act_advance(p, n * s->tokens, err));
    }
done:
    p->active = -1;
    return rc;
}

/* Adds the mean divergence of positions [at, at + m) to the sensitivities of all inputs. */
static int score_chunk(struct qt_act_planner *p, struct qt_embed_head *head, size_t at, size_t m,
                       struct qt_err *err)
{
    struct qt_act_sensitivity *s = p->sensitivity;
    const struct qt_model_info *info = qt_model_info(p->model);
    int rc;
    QT_TRY(qt_head_logits(head, s->ref, variant(p, 0) + at * info->state, m, err));
    for (size_t v = 0; v < p->out->layers * QT_INPUTS; v++) {
        if (!p->inputs[v].k)
            continue;
        QT_TRY(qt_head_logits(head, s->logits, variant(p, 1 + v) + at * info->state, m, err));
        QT_TRY(p->be->score(p->be, s->scores, s->logits, s->ref, s->targets, info->logit_softcap, m,
                            info->vocab, err));
        for (size_t i = 0; i < m; i++) {
            if (!isfinite(s->scores[i].kld)) {
                rc = qt_fail(err, QT_E_INPUT, p->source.dir, NULL,
                             "gives logits that are not finite on the calibration data");
                goto done;
            }
            p->inputs[v].sensitivity += s->scores[i].kld / (double)s->tokens;
        }
    }
done:
    return rc;
}

int qt_act_sensitivity_score(struct qt_act_planner *p, struct qt_err *err)
{
    struct qt_act_sensitivity *s = p->sensitivity;
    const size_t bytes = LOGIT_POSITIONS * qt_model_info(p->model)->vocab * sizeof *s->logits;
    struct qt_embed_head *head = NULL;
    int rc = QT_OK;
    if (!s)
        return QT_OK;
    QT_TRY(qt_embed_head_open(&head, p->model, &p->source, p->be, err));
    QT_TRY(p->be->alloc(p->be, &s->logits, bytes, err));
    QT_TRY(p->be->alloc(p->be, &s->ref, bytes, err));
    qt_act_windows(p, true);
    for (size_t at = 0; at < s->tokens && rc == QT_OK; at += LOGIT_POSITIONS) {
        rc = score_chunk(p, head, at, qt_min_size(LOGIT_POSITIONS, s->tokens - at), err);
        if (rc == QT_OK)
            rc = qt_act_advance(p, 0, err);
    }
    qt_act_windows(p, false);
done:
    qt_embed_head_close(head);
    return rc;
}

double qt_act_sensitivity_tokens(const struct qt_act_planner *p)
{
    double layers = (double)p->out->layers, inputs = QT_INPUTS;
    if (qt_act_precision(p->spec) != QT_ACT_MIXED)
        return 0;
    return (double)qt_act_variant_tokens(p->data) * layers *
           (1 + inputs + inputs * (layers - 1) / 2);
}

double qt_act_scored_tokens(const struct qt_act_planner *p)
{
    if (qt_act_precision(p->spec) != QT_ACT_MIXED)
        return 0;
    return (double)qt_act_variant_tokens(p->data) * (1 + (double)p->out->layers * QT_INPUTS);
}

/* ---- the budget ----------------------------------------------------------------------------- */

struct choice {
    double gain;               /* estimated reduction of the divergence */
    size_t macs, input, block; /* macs: multiply-accumulates per token */
};

static int by_gain(const void *a, const void *b)
{
    const struct choice *x = a, *y = b;
    double gx = x->gain / (double)x->macs, gy = y->gain / (double)y->macs;
    if (gx != gy)
        return gx < gy ? 1 : -1;
    if (x->input != y->input)
        return x->input > y->input ? 1 : -1;
    return (x->block > y->block) - (x->block < y->block);
}

/* Fills choice[], one for each channel block. *total: all multiply-accumulates; *divergence: the
 * estimate with all blocks at 4 bits. */
static void list_choices(struct choice *choice, size_t *total, double *divergence,
                         const struct qt_act_planner *p)
{
    size_t n = 0;
    *total = 0;
    *divergence = 0;
    for (size_t v = 0; v < p->out->layers * QT_INPUTS; v++) {
        const struct qt_act_input *in = &p->inputs[v];
        size_t blocks = qt_ceil_div(in->k, QT_ACT_BLOCK);
        const double sum = in->chosen.total4;
        for (size_t b = 0; b < blocks; b++, n++) {
            const double saved = in->chosen.d4[b] - in->chosen.d8[b];
            const double gain = sum > 0 ? in->sensitivity * saved / sum : 0;
            const size_t macs = in->n * qt_min_size(QT_ACT_BLOCK, in->k - b * QT_ACT_BLOCK);
            choice[n] = (struct choice){gain, macs, v, b};
            *total += macs;
        }
        *divergence += in->k ? in->sensitivity : 0;
    }
}

enum qt_act_precision qt_act_precision(const struct qt_spec *spec)
{
    const double budget = qt_spec_value(spec, "a8max"), bound = qt_spec_value(spec, "bound");
    if (qt_spec_value(spec, "scales") == QT_ACT_SCALES_ROW || (budget == 1 && bound == 0))
        return QT_ACT_ALL_8;
    return budget == 0 ? QT_ACT_ALL_4 : QT_ACT_MIXED;
}

/* Chooses blocks in order of gain until the budget is spent or the estimate is at the bound. */
static int choose_blocks(struct qt_act_planner *p, struct qt_err *err)
{
    const double budget = qt_spec_value(p->spec, "a8max");
    const double bound = qt_spec_value(p->spec, "bound");
    size_t count = 0, total, used = 0;
    struct choice *choice = NULL;
    double remaining;
    for (size_t v = 0; v < p->out->layers * QT_INPUTS; v++)
        count += qt_ceil_div(p->inputs[v].k, QT_ACT_BLOCK);
    int rc = qt_array_new(&choice, count, sizeof *choice, err);
    if (rc < 0)
        return rc;
    list_choices(choice, &total, &remaining, p);
    qsort(choice, count, sizeof *choice, by_gain);
    for (size_t i = 0; i < count && (bound == 0 || remaining > bound); i++) {
        if ((double)(used + choice[i].macs) > budget * (double)total * (1 + 1e-12))
            continue;
        used += choice[i].macs;
        remaining -= choice[i].gain;
        p->out->act[choice[i].input].bits[choice[i].block] = 8;
    }
    qt_free(choice);
    return QT_OK;
}

/* Gives an input without 8-bit blocks the arrangement that is best for it. */
static void rearrange(struct qt_act_planner *p, size_t v)
{
    struct qt_act_input *in = &p->inputs[v];
    struct qt_act *act = &p->out->act[v];
    if (!in->even.act.k || memchr(act->bits, 8, qt_ceil_div(in->k, QT_ACT_BLOCK)) ||
        in->even.error >= in->chosen.error4)
        return;
    const struct qt_act worse = *act;
    *act = in->even.act;
    in->even.act = worse;
}

int qt_act_assign_bits(struct qt_act_planner *p, struct qt_err *err)
{
    const enum qt_act_precision precision = qt_act_precision(p->spec);
    const size_t inputs = p->out->layers * QT_INPUTS;
    for (size_t v = 0; v < inputs; v++)
        if (p->inputs[v].k)
            memset(p->out->act[v].bits, precision == QT_ACT_ALL_8 ? 8 : 4,
                   qt_ceil_div(p->inputs[v].k, QT_ACT_BLOCK));
    if (precision != QT_ACT_MIXED)
        return QT_OK;
    int rc = choose_blocks(p, err);
    for (size_t v = 0; rc == QT_OK && v < inputs; v++)
        if (p->inputs[v].k)
            rearrange(p, v);
    return rc;
}
