/*
 * State and steps of the activation planner (private to pack/). plan.h describes the plan. plan.c
 * runs the calibration windows through one decoder layer at a time and calls qt_act_choose for each
 * input of the layer and qt_act_sensitivity_layer, then, once for the model,
 * qt_act_sensitivity_score and qt_act_assign_bits.
 */
#ifndef QT_PACK_ACTIVATIONS_PLANNER_H
#define QT_PACK_ACTIVATIONS_PLANNER_H

#include "pack/activations/plan.h"
#include "pack/schemes/scheme.h"

/* Which precisions the spec allows for channel blocks. */
enum qt_act_precision { QT_ACT_ALL_4, QT_ACT_MIXED, QT_ACT_ALL_8 };
enum qt_act_precision qt_act_precision(const struct qt_spec *spec);

/* An arrangement of an input's channels with its errors (error.c). */
struct qt_act_candidate {
    struct qt_act act;
    /* [channel blocks] errors at the outputs of the linears, and squared rounding errors, at 4 and
     * 8 bits; 0: not measured */
    double *d4, *d8, *e4, *e8;
    double total4; /* sum of d4 */
    /* After error compensation: at the precision that the spec allows, with QT_ACT_MIXED one block
     * at 8 bits; and with all blocks at 4 bits, if the candidate is not chosen for that. 0: there
     * is nothing to compare, or no usable Hessian. */
    double error, error4;
};
void qt_act_candidate_free(struct qt_act_candidate *c);

/* A linear input of a decoder layer. */
struct qt_act_input {
    size_t k, n;         /* channels, k = 0: not w4ax; rows of all linears that share the input */
    bool reorder, scale; /* whether its channels may be permuted, scaled */
    /* Best arrangement, and with QT_ACT_MIXED and channels that may be permuted also the best one
     * for 4 bits in all channel blocks, in source order; else even.act.k = 0.
     * The plan takes over chosen.act. */
    struct qt_act_candidate chosen, even;
    double sensitivity; /* KL divergence, nats: qt_act_sensitivity_score */
};

struct qt_act_planner {
    struct qt_act_plan *out;
    const struct qt_model *model;
    struct qt_weights source;
    const struct qt_quantize_options *opt;
    const struct qt_calibration *data; /* opt->calibration */
    struct qt_backend *be;             /* data->backend */
    const struct qt_spec *spec;
    struct qt_act_input *inputs; /* [layers][QT_INPUTS] */
    /* Inputs of the current decoder layer: statistics of the tokens before held_out, and a sample
     * of every stride-th token from there on. */
    struct qt_channels channels[QT_INPUTS]; /* backend memory */
    float *sample[QT_INPUTS];               /* backend memory, [sampled][k] */
    double *gram[QT_INPUTS]; /* backend memory, sum of x^T x of all tokens and the channels that are
                              * judged, lower triangle; NULL: there is only one arrangement */
    float *token_factor[QT_INPUTS]; /* [tokens] by which x is multiplied; NULL: all are 1 */
    size_t sampled[QT_INPUTS], seen[QT_INPUTS], held_out, stride;
    size_t layer;                           /* that is observed */
    struct qt_act_sensitivity *sensitivity; /* budget.c; NULL: there is nothing to choose */
    int active;         /* input at 4 bits while its sensitivity is measured; -1: none */
    double done, total; /* tokens x decoder layers, for progress */
};

/* plan.c: allocates p->inputs (the caller frees the array, also on failure) and sets p->spec, NULL
 * if the plan has no w4ax linear. Reads p->model only. */
int qt_act_find_inputs(struct qt_act_planner *p, const struct qt_plan *plan, struct qt_err *err);
/* plan.c: the tokens whose statistics are observed. */
size_t qt_act_stat_tokens(const struct qt_calibration *data);
/* plan.c: sets reorder and scale of a layer's inputs. Their k must be set. */
void qt_act_allow_changes(struct qt_act_planner *p, size_t layer);

/* Adds `tokens` that passed a decoder layer to the progress. QT_E_INTERRUPTED if the caller has
 * asked to stop. */
static inline int qt_act_advance(struct qt_act_planner *p, size_t tokens, struct qt_err *err)
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

/* order.c: *out = what orders and factors of input i depend on, an array with an entry per channel,
 * from its statistics. weights2[k]: sum of squared weights of each channel. The caller frees it. */
struct qt_act_rank;
int qt_act_ranks_new(struct qt_act_rank **out, const struct qt_act_planner *p, size_t layer, int i,
                     const double *weights2, struct qt_err *err);
/* order.c: sets order and factors of act. sorted: by quantile; else source order. smoothed: with
 * factors; else all are 1. */
int qt_act_order(struct qt_act *act, const struct qt_act_planner *p, int i,
                 const struct qt_act_rank *ranks, bool sorted, bool smoothed, struct qt_err *err);

/* At most so many rows of the linears with an input, and channels of it, are judged. */
enum { QT_ACT_JUDGE_ROWS = 192, QT_ACT_JUDGE_CHANNELS = 2048 };

/* Every stride-th of k channels is judged: a divisor of k. 1 if there is none that leaves about as
 * many channels as there may be. */
static inline size_t qt_act_judge_stride(size_t k)
{
    const size_t least = qt_ceil_div(k, QT_ACT_JUDGE_CHANNELS);
    size_t stride = least;
    while (k % stride && stride < 2 * least)
        stride++;
    return k % stride ? 1 : stride;
}

/* compensated.c: what the estimates of errors after compensation need of input i; *out is NULL if
 * its Hessian cannot be used. handle: the layer in the backend's memory. */
struct qt_act_judge;
int qt_act_judge_new(struct qt_act_judge **out, const struct qt_act_planner *p, size_t layer, int i,
                     const struct qt_layer *handle, struct qt_err *err);
void qt_act_judge_free(struct qt_act_judge *j);
/* *error = estimate for an arrangement of the input. energy[channel blocks]: mean over the tokens
 * of the squared rounding errors of each block. */
int qt_act_judge_error(double *error, const struct qt_act_judge *j, const struct qt_act *act,
                       const double *energy, struct qt_err *err);

/* error.c: sets in->chosen and in->even of input i from the sampled tokens. handle: the layer in
 * the backend's memory. */
int qt_act_choose(struct qt_act_planner *p, size_t layer, int i, const struct qt_layer *handle,
                  struct qt_err *err);

/* While windows pass a layer: products in half precision, with weights that stay. */
static inline void qt_act_windows(struct qt_act_planner *p, bool begin)
{
    p->be->half = p->be->same_weights = begin;
}

/* budget.c: `begin` starts the measurement of sensitivities, `layer` lets its windows pass a
 * decoder layer whose inputs are planned, `score` sets the sensitivities of all inputs. `end`: also
 * after an error. handle: the layer in the backend's memory, with the callback
 * qt_act_quantize_active. */
int qt_act_sensitivity_begin(struct qt_act_planner *p, struct qt_err *err);
int qt_act_sensitivity_layer(struct qt_act_planner *p, size_t layer, struct qt_layer *handle,
                             struct qt_err *err);
int qt_act_sensitivity_score(struct qt_act_planner *p, struct qt_err *err);
void qt_act_sensitivity_end(struct qt_act_planner *p);
/* Callback `input` of struct qt_fake_quant; ctx is the planner. Quantizes the active input only. */
int qt_act_quantize_active(void *ctx, struct qt_backend *be, float *y, const float *x,
                           const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err);
/* The tokens of a variant of the model that sensitivities are measured with. */
size_t qt_act_variant_tokens(const struct qt_calibration *data);
/* The tokens that qt_act_sensitivity_layer will pass to qt_act_advance, in all layers. */
double qt_act_sensitivity_tokens(const struct qt_act_planner *p);
/* The tokens whose logits qt_act_sensitivity_score will compute. */
double qt_act_scored_tokens(const struct qt_act_planner *p);
/* budget.c: sets the precision of all channel blocks, and the arrangement of inputs without 8-bit
 * blocks. */
int qt_act_assign_bits(struct qt_act_planner *p, struct qt_err *err);

#endif
