/*
 * The divergences of models in which one group is quantized, of many groups in one pass over the
 * decoder layers: a model differs from the unquantized one from the layer of its group on.
 */
#include "verify/budget/budget.h"

#include <math.h>

enum {
    CALL_TOKENS = 2048, /* per call of a decoder layer */
    POSITIONS = 256,    /* positions whose logits are in memory at once */
};
static const size_t host_bytes = (size_t)1 << 30; /* hidden states of a pass on the host */

/* A model with one quantized group. */
struct variant {
    size_t group, layer;
    float *hidden; /* backend, [tokens][width]: behind the layers so far */
    double sum;    /* of the divergences of all tokens */
};

struct pass {
    struct budget *b;
    const struct qt_calibration *windows;
    struct qt_backend *be;
    struct qt_weights source;
    struct qt_model *model;
    struct qt_embed_head *head;
    struct qt_layer *plain, *changed; /* of the source; with a quantized group */
    size_t tokens, width;
    float *reference; /* as the hidden states of a variant, of the unquantized model */
    struct variant *variants;
    size_t count;
    float *logits, *expected; /* backend, [POSITIONS][vocab] of a variant, of the reference */
    uint32_t *targets;        /* [POSITIONS] */
    struct qt_score *scores;  /* [POSITIONS] */
};

/* How many groups have room beside the reference. */
static size_t most_variants(const struct pass *p)
{
    const size_t room = p->be->room ? p->be->room(p->be) / 2 : host_bytes;
    const size_t models = room / (p->tokens * p->width * sizeof *p->reference);
    return models > 2 ? models - 1 : 1;
}

/* Lists the groups of the layer that are to be measured. */
static void list_layer(struct pass *p, size_t layer, size_t most)
{
    const struct qt_plan *plan = &p->b->plan[0];
    const struct qt_linear *linear;
    const size_t n = qt_model_linears(&linear, p->model, layer), first = p->count;
    for (size_t l = 0; l < n && p->count < most; l++) {
        const struct qt_plan_item *item = qt_plan_find(plan, linear[l].weight);
        const size_t group = item ? p->b->group_of[item - plan->items] : SIZE_MAX;
        bool known = group == SIZE_MAX || !isnan(p->b->groups[group].kld);
        for (size_t i = first; i < p->count; i++)
            known |= p->variants[i].group == group;
        if (!known)
            p->variants[p->count++] = (struct variant){.group = group, .layer = layer};
    }
}

static int run(struct pass *p, struct qt_layer *layer, float *hidden, struct qt_err *err)
{
    const size_t seqlen = p->windows->seqlen, step = seqlen * qt_max_size(CALL_TOKENS / seqlen, 1);
    int rc = QT_OK;
    for (size_t at = 0; at < p->tokens && rc == QT_OK; at += step)
        rc = qt_layer_run(layer, hidden + at * p->width, qt_min_size(step, p->tokens - at), seqlen,
                          NULL, err);
    return rc;
}

/* Runs the layer with its group quantized on the hidden states of the unquantized model. */
static int start_variant(struct pass *p, struct variant *v, struct qt_err *err)
{
    struct budget_changed changed;
    const struct qt_weights w = budget_changed_weights(&changed, p->b, v->group);
    int rc;
    QT_TRY(qt_backend_floats(&v->hidden, p->be, p->tokens, p->width, err));
    QT_TRY(p->be->copy(p->be, v->hidden, p->reference, p->tokens * p->width * sizeof *p->reference,
                       err));
    QT_TRY(p->changed ? qt_layer_load_from(p->changed, p->plain, v->layer, &w, err)
                      : qt_layer_open(&p->changed, p->model, v->layer, &w, p->be, err));
    QT_TRY(run(p, p->changed, v->hidden, err));
done:
    return rc;
}

static int run_layer(struct pass *p, size_t layer, struct qt_err *err)
{
    const struct qt_budget_options *o = p->b->opt;
    int rc;
    if (o->interrupted && o->interrupted())
        return qt_fail(err, QT_E_INTERRUPTED, NULL, NULL, "interrupted");
    QT_TRY(p->plain ? qt_layer_load(p->plain, layer, &p->source, err)
                    : qt_layer_open(&p->plain, p->model, layer, &p->source, p->be, err));
    for (size_t i = 0; i < p->count; i++) {
        struct variant *v = &p->variants[i];
        if (v->layer < layer)
            QT_TRY(run(p, p->plain, v->hidden, err));
        else if (v->layer == layer)
            QT_TRY(start_variant(p, v, err));
    }
    QT_TRY(run(p, p->plain, p->reference, err));
done:
    return rc;
}

/* Adds the divergences of tokens [at, at + m). */
static int score(struct pass *p, size_t at, size_t m, struct qt_err *err)
{
    const struct qt_model_info *info = qt_model_info(p->model);
    int rc;
    QT_TRY(qt_head_logits(p->head, p->expected, p->reference + at * p->width, m, err));
    for (size_t i = 0; i < p->count; i++) {
        struct variant *v = &p->variants[i];
        QT_TRY(qt_head_logits(p->head, p->logits, v->hidden + at * p->width, m, err));
        QT_TRY(p->be->score(p->be, p->scores, p->logits, p->expected, p->targets,
                            info->logit_softcap, m, info->vocab, err));
        for (size_t j = 0; j < m; j++)
            v->sum += p->scores[j].kld;
    }
done:
    return rc;
}

static int score_all(struct pass *p, struct qt_err *err)
{
    const size_t vocab = qt_model_info(p->model)->vocab;
    int rc;
    QT_TRY(qt_backend_floats(&p->logits, p->be, POSITIONS, vocab, err));
    QT_TRY(qt_backend_floats(&p->expected, p->be, POSITIONS, vocab, err));
    QT_TRY(qt_array_new(&p->targets, POSITIONS, sizeof *p->targets, err));
    QT_TRY(qt_array_new(&p->scores, POSITIONS, sizeof *p->scores, err));
    for (size_t at = 0; at < p->tokens; at += POSITIONS)
        QT_TRY(score(p, at, qt_min_size(POSITIONS, p->tokens - at), err));
    for (size_t i = 0; i < p->count; i++) {
        const double kld = p->variants[i].sum / (double)p->tokens;
        if (!isfinite(kld))
            QT_TRY(qt_fail(err, QT_E_INPUT, p->source.dir, NULL,
                           "the logits of the model in which %s is quantized are not finite",
                           p->b->groups[p->variants[i].group].key));
        p->b->groups[p->variants[i].group].kld = kld;
    }
done:
    return rc;
}

static void pass_close(struct pass *p)
{
    for (size_t i = 0; i < p->count; i++)
        p->be->free(p->be, p->variants[i].hidden);
    p->be->free(p->be, p->reference);
    p->be->free(p->be, p->logits);
    p->be->free(p->be, p->expected);
    qt_layer_close(p->plain);
    qt_layer_close(p->changed);
    qt_embed_head_close(p->head);
    qt_model_close(p->model);
    qt_free(p->variants);
    qt_free(p->targets);
    qt_free(p->scores);
}

/* Lists the groups of the pass. */
static int list_groups(struct pass *p, struct qt_err *err)
{
    const struct qt_model_info *info;
    int rc;
    QT_TRY(qt_model_open(&p->model, &p->source, err));
    info = qt_model_info(p->model);
    p->tokens = p->windows->samples * p->windows->seqlen;
    p->width = info->state;
    const size_t most = qt_min_size(most_variants(p), p->b->ngroups);
    QT_TRY(qt_array_new(&p->variants, most, sizeof *p->variants, err));
    for (size_t layer = 0; layer < info->layers && info->predicts == QT_PREDICTS_NEXT; layer++)
        list_layer(p, layer, most);
done:
    return rc;
}

int budget_measure_pass(size_t *measured, struct budget *b, struct qt_err *err)
{
    struct pass p = {.b = b,
                     .windows = &b->opt->measured,
                     .be = b->opt->measured.backend,
                     .source = qt_weights_of_ckpt(b->ckpt)};
    int rc;
    *measured = 0;
    QT_TRY(list_groups(&p, err));
    if (!p.count)
        goto done;
    QT_TRY(qt_embed_head_open(&p.head, p.model, &p.source, p.be, err));
    QT_TRY(qt_backend_floats(&p.reference, p.be, p.tokens, p.width, err));
    QT_TRY(qt_embed_tokens(p.head, p.reference, p.windows->ids, p.tokens, p.windows->seqlen, err));
    const size_t layers = qt_model_info(p.model)->layers;
    for (size_t layer = 0; layer < layers; layer++) {
        qt_log_progress(b->opt->log, "measure", (double)layer, (double)layers);
        QT_TRY(run_layer(&p, layer, err));
    }
    QT_TRY(score_all(&p, err));
    *measured = p.count;
done:
    pass_close(&p);
    return rc;
}
