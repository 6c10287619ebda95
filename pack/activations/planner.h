/*
 * The parts of act_plan.c (private to pack/): what they share while a plan is made, in the order in
 * which they run.
 */
#ifndef QT_PACK_ACTIVATIONS_PLANNER_H
#define QT_PACK_ACTIVATIONS_PLANNER_H

#include "pack/activations/plan.h"
#include "pack/schemes/scheme.h"

/* An input of a block's linears. */
struct qt_act_input {
    size_t k, n;         /* n: rows of all of them; k = 0: not w4ax */
    bool reorder, scale; /* what may be done to its channels */
    double *d4, *d8;     /* [blocks], by qt_act_measure */
    double sense;        /* by qt_act_sense */
};

struct qt_act_planner {
    struct qt_act_plan *out;
    const struct qt_model *model;
    struct qt_weights source;
    const struct qt_quantize_options *opt;
    const struct qt_calibration *data; /* the options'; be: its backend */
    struct qt_backend *be;
    const struct qt_spec *spec;
    struct qt_act_input *inputs; /* [layers][QT_INPUTS] */
    /* Of the block that runs. */
    struct qt_channels channels[QT_INPUTS]; /* backend */
    float *sample[QT_INPUTS];               /* host, [sampled][k] */
    size_t sampled[QT_INPUTS], seen[QT_INPUTS], stride;
    int active;         /* the input that has 4 bits while divergences are measured; -1: none */
    double done, total; /* tokens through blocks, for progress */
};

/* act_plan.c: makes p->inputs (the caller's to free, also on failure) and finds p->spec, NULL where
 * the plan has no w4ax linear. Of p only the model counts. */
int qt_act_find_inputs(struct qt_act_planner *p, const struct qt_plan *plan, struct qt_err *err);
/* Sets what may be done to the inputs of a layer, from their k. */
void qt_act_allow_changes(struct qt_act_planner *p, size_t layer);

/* So many tokens more have gone through a block. QT_E_INTERRUPTED when the caller has asked to
 * stop.
 */
static inline int qt_act_went_on(struct qt_act_planner *p, size_t tokens, struct qt_err *err)
{
    p->done += (double)tokens;
    qt_log_progress(p->opt->log, "activations", p->done, p->total);
    if (p->opt->interrupted && p->opt->interrupted())
        return qt_fail(err, QT_E_INTERRUPTED, p->opt->out_dir, NULL,
                       "interrupted while the precision of activations was being chosen");
    return QT_OK;
}

static inline struct qt_act_input *qt_act_input_at(const struct qt_act_planner *p, size_t layer,
                                                   int i)
{
    return &p->inputs[layer * QT_INPUTS + (size_t)i];
}

static inline struct qt_act *qt_act_planned(const struct qt_act_planner *p, size_t layer, int i)
{
    return &p->out->act[layer * QT_INPUTS + (size_t)i];
}

/* act_order.c: order and factors of an input's channels, from the statistics of the block. */
int qt_act_order(struct qt_act_planner *p, size_t layer, int i, struct qt_err *err);

/* act_error.c: rounding errors of each block at 4 and 8 bits, from the samples; the clip ratio. */
int qt_act_measure(struct qt_act_planner *p, size_t layer, int i, struct qt_err *err);

/* act_budget.c. sense_tokens: what sense will report to qt_act_went_on. sense: what each input at 4
 * bits means for the logits. spend: which blocks get 8 bits; *left is the divergence that remains,
 * estimated. */
double qt_act_sense_tokens(const struct qt_act_planner *p);
int qt_act_sense(struct qt_act_planner *p, struct qt_err *err);
int qt_act_spend(struct qt_act_planner *p, double *left, struct qt_err *err);

#endif
