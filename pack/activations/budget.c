/*
 * Which blocks get 8 bits. What a block's rounding error D means for the model is measured: S, the
 * divergence of the logits when that input alone has 4 bits. Blocks get 8 bits by S (D4 - D8) /
 * (sum of D4 over the input), per multiply-accumulate, largest first.
 */
#include "pack/activations/planner.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    SENSE_WINDOWS = 4, /* for divergences */
    LOGIT_POSITIONS = 256,
};

/* ---- divergences ---------------------------------------------------------------------------- */

static size_t sense_tokens(const struct qt_act_planner *p)
{
    return qt_min_size(p->data->samples, SENSE_WINDOWS) * p->data->seqlen;
}

/* With the active input at 4 bits, all others as they are. */
static int sense_input(void *ctx, struct qt_backend *be, float *y, const float *x,
                       const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err)
{
    const struct qt_act_planner *p = ctx;
    if (linear->input != p->active)
        return be->copy(be, y, x, m * k * sizeof *x, err);
    return qt_act_apply_on(be, y, x, m, qt_act_planned(p, linear->layer, linear->input), err);
}

/* Of a window. Variant 0 is the model as it is, variant 1 + QT_INPUTS * l + i has input i of block
 * l at 4 bits; each starts from variant 0 where it differs. */
static int sense_layer(struct qt_act_planner *p, size_t layer, float *variants, struct qt_err *err)
{
    size_t tokens = p->data->seqlen, step = tokens * qt_model_info(p->model)->hidden;
    struct qt_weights w = p->source;
    struct qt_layer *block = NULL;
    int rc;
    w.runtime = (struct qt_fake_quant){.ctx = p, .input = sense_input};
    QT_TRY(qt_layer_open(&block, p->model, layer, &w, p->be, err));
    for (int i = 0; i < QT_INPUTS; i++) {
        float *v = variants + (1 + layer * QT_INPUTS + (size_t)i) * step;
        p->active = qt_act_input_at(p, layer, i)->k ? i : -1;
        QT_TRY(p->be->copy(p->be, v, variants, step * sizeof *v, err));
        QT_TRY(qt_layer_run(block, v, tokens, tokens, NULL, err));
        QT_TRY(qt_act_went_on(p, tokens, err));
    }
    p->active = -1;
    for (size_t v = 0; v < 1 + layer * QT_INPUTS; v++) {
        QT_TRY(qt_layer_run(block, variants + v * step, tokens, tokens, NULL, err));
        QT_TRY(qt_act_went_on(p, tokens, err));
    }
done:
    qt_layer_close(block);
    return rc;
}

struct senses {
    struct qt_embed_head *ends;
    float *logits, *ref; /* backend, [LOGIT_POSITIONS][vocab] */
    uint32_t targets[LOGIT_POSITIONS];
    struct qt_score scores[LOGIT_POSITIONS];
};

/* Adds the divergences of positions [at, at + m) of all variants. */
static int sense_chunk(struct qt_act_planner *p, struct senses *s, const float *variants, size_t at,
                       size_t m, struct qt_err *err)
{
    const size_t tokens = p->data->seqlen;
    const struct qt_model_info *info = qt_model_info(p->model);
    int rc;
    QT_TRY(qt_head_logits(s->ends, s->ref, variants + at * info->hidden, m, err));
    for (size_t v = 0; v < p->out->layers * QT_INPUTS; v++) {
        const float *hidden = variants + ((1 + v) * tokens + at) * info->hidden;
        if (!p->inputs[v].k)
            continue;
        QT_TRY(qt_head_logits(s->ends, s->logits, hidden, m, err));
        QT_TRY(p->be->score(p->be, s->scores, s->logits, s->ref, s->targets, info->logit_softcap, m,
                            info->vocab, err));
        for (size_t i = 0; i < m; i++) {
            if (!isfinite(s->scores[i].kld)) {
                rc = qt_fail(err, QT_E_INPUT, p->source.dir, NULL,
                             "gives logits that are not finite on the calibration data");
                goto done;
            }
            p->inputs[v].sense += s->scores[i].kld / (double)sense_tokens(p);
        }
    }
done:
    return rc;
}

static int sense_logits(struct qt_act_planner *p, struct senses *s, const float *variants,
                        struct qt_err *err)
{
    size_t tokens = p->data->seqlen;
    int rc = QT_OK;
    for (size_t at = 0; at < tokens; at += LOGIT_POSITIONS) {
        QT_TRY(sense_chunk(p, s, variants, at, qt_min_size(LOGIT_POSITIONS, tokens - at), err));
        QT_TRY(qt_act_went_on(p, 0, err));
    }
done:
    return rc;
}

static int senses_open(struct senses **out, struct qt_act_planner *p, struct qt_err *err)
{
    size_t bytes = LOGIT_POSITIONS * qt_model_info(p->model)->vocab * sizeof(float);
    int rc;
    QT_TRY(qt_array_new(out, 1, sizeof **out, err)); /* targets 0: only divergences are read */
    QT_TRY(qt_embed_head_open(&(*out)->ends, p->model, &p->source, p->be, err));
    QT_TRY(p->be->alloc(p->be, &(*out)->logits, bytes, err));
    QT_TRY(p->be->alloc(p->be, &(*out)->ref, bytes, err));
done:
    return rc;
}

static void senses_close(struct senses *s, struct qt_act_planner *p)
{
    if (!s)
        return;
    p->be->free(p->be, s->logits);
    p->be->free(p->be, s->ref);
    qt_embed_head_close(s->ends);
    qt_free(s);
}

double qt_act_sense_tokens(const struct qt_act_planner *p)
{
    double layers = (double)p->out->layers, inputs = QT_INPUTS;
    return (double)sense_tokens(p) * layers * (1 + inputs + inputs * (layers - 1) / 2);
}

/* One window at a time: variants are many. */
int qt_act_sense(struct qt_act_planner *p, struct qt_err *err)
{
    size_t tokens = p->data->seqlen, windows = sense_tokens(p) / tokens, bytes;
    size_t count = 1 + p->out->layers * QT_INPUTS;
    struct senses *s = NULL;
    float *variants = NULL;
    int rc = QT_OK;
    if (qt_mul_overflow(&bytes, count * tokens, qt_model_info(p->model)->hidden * sizeof *variants))
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
    QT_TRY(p->be->alloc(p->be, &variants, bytes, err));
    QT_TRY(senses_open(&s, p, err));
    for (size_t v = 0; v < p->out->layers * QT_INPUTS; v++)
        if (p->out->act[v].k)
            memset(p->out->act[v].bits, 4, qt_ceil_div(p->out->act[v].k, QT_ACT_BLOCK));
    for (size_t w = 0; w < windows; w++) {
        QT_TRY(qt_embed_tokens(s->ends, variants, p->data->ids + w * tokens, tokens, tokens, err));
        for (size_t l = 0; l < p->out->layers; l++)
            QT_TRY(sense_layer(p, l, variants, err));
        QT_TRY(sense_logits(p, s, variants, err));
    }
done:
    senses_close(s, p);
    p->be->free(p->be, variants);
    return rc;
}

/* ---- the budget ----------------------------------------------------------------------------- */

struct choice {
    double gain;               /* of divergence, estimated */
    size_t macs, input, block; /* macs: multiply-accumulates of a token */
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

/* Fills choice[]; returns their number, *total their multiply-accumulates, *left the divergence of
 * all at 4 bits.
 */
static size_t list_choices(struct choice *choice, size_t *total, double *left,
                           const struct qt_act_planner *p)
{
    size_t n = 0;
    *total = 0;
    *left = 0;
    for (size_t v = 0; v < p->out->layers * QT_INPUTS; v++) {
        const struct qt_act_input *in = &p->inputs[v];
        size_t blocks = qt_ceil_div(in->k, QT_ACT_BLOCK);
        double sum = 0;
        for (size_t b = 0; b < blocks; b++)
            sum += in->d4[b];
        for (size_t b = 0; b < blocks; b++, n++) {
            double gain = sum > 0 ? in->sense * (in->d4[b] - in->d8[b]) / sum : 0;
            const size_t macs = in->n * qt_min_size(QT_ACT_BLOCK, in->k - b * QT_ACT_BLOCK);
            choice[n] = (struct choice){gain, macs, v, b};
            *total += macs;
        }
        *left += in->k ? in->sense : 0;
    }
    return n;
}

int qt_act_spend(struct qt_act_planner *p, double *left, struct qt_err *err)
{
    bool all = qt_spec_value(p->spec, "scales") == QT_ACT_SCALES_ROW;
    double share = all ? 1 : qt_spec_value(p->spec, "a8max");
    double bound = all ? 0 : qt_spec_value(p->spec, "bound");
    size_t count = 0, total, used = 0;
    struct choice *choice = NULL;
    for (size_t v = 0; v < p->out->layers * QT_INPUTS; v++)
        count += qt_ceil_div(p->inputs[v].k, QT_ACT_BLOCK);
    int rc = qt_array_new(&choice, count, sizeof *choice, err);
    if (rc < 0)
        return rc;
    list_choices(choice, &total, left, p);
    qsort(choice, count, sizeof *choice, by_gain);
    for (size_t i = 0; i < count && (bound == 0 || *left > bound); i++) {
        if ((double)(used + choice[i].macs) > share * (double)total * (1 + 1e-12))
            continue;
        used += choice[i].macs;
        *left -= choice[i].gain;
        p->out->act[choice[i].input].bits[choice[i].block] = 8;
    }
    qt_free(choice);
    return QT_OK;
}
