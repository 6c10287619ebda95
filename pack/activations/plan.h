/*
 * The activation plan of a model with w4ax linears (private to pack/): how each linear input is
 * quantized. The plan is made before any weight is quantized, from calibration data that runs
 * through the unquantized model. For each linear input the planner decides:
 *
 *   1. an arrangement (order.c): the channel order and the powers of two that channels are divided
 *      by: those with the least error at the outputs of the linears after error compensation
 *      (compensated.c), and the clip ratio of 4-bit channel blocks (error.c);
 *   2. block precisions (budget.c), over the whole model: 8 bits for the channel blocks that reduce
 *      the KL divergence of the logits most per multiply-accumulate, 4 bits for all others.
 *
 * Steps 1 and 2 are based on the fine-grained mixed-precision quantization (FMPQ) of COMET (arXiv
 * 2410.12168): channel permutation, then a precision for each block of 128 channels. Differences
 * from the paper: channel blocks are rotated (rotate.c); factors and clip ratios are added; a
 * measured divergence and a budget (a8max, bound) choose the 8-bit blocks, not the presence of
 * outliers; the permutation of attention outputs and MLP products is folded into the rows of the
 * linears that produce them.
 */
#ifndef QT_PACK_ACTIVATIONS_PLAN_H
#define QT_PACK_ACTIVATIONS_PLAN_H

#include "pack/pack.h"

struct qt_act_plan {
    size_t layers;
    struct qt_act *act; /* [layers][QT_INPUTS], owned; k = 0: the input is not quantized */
    json_t *report;     /* fractions of multiply-accumulates at 8 bits, estimated divergence;
                         * owned; NULL: the model has no w4ax linear */
};

/*
 * The experts of a layer have inputs of their own, but one plan: that of input 2 for all gate and
 * up projections, which get the same channels of a token, in the same order, and that of input 3
 * for all down projections, in source order. Returns the input in the plan.
 */
static inline int qt_act_pooled(int input)
{
    return input < QT_INPUTS ? input : QT_INPUTS - 2 + input % 2;
}

/* Checks without data whether a plan can be made. QT_E_UNSUPPORTED if linears that share an input
 * do not have the same w4ax parameters, or if a w4ax tensor is not a linear of a decoder layer. */
int qt_act_plan_check(const struct qt_plan *plan, const struct qt_model *model, struct qt_err *err);
/* Makes the plan on opt->calibration; the plan is empty if there is no w4ax linear. Errors: those
 * of qt_act_plan_check, QT_E_INTERRUPTED, QT_E_RESOURCE, QT_E_INPUT for logits that are not finite.
 * The caller frees *out after success. */
int qt_act_plan_new(struct qt_act_plan *out, const struct qt_plan *plan,
                    const struct qt_model *model, const struct qt_weights *source,
                    const struct qt_quantize_options *opt, struct qt_err *err);
void qt_act_plan_free(struct qt_act_plan *p);

/* saved.c: saves a plan beside the journal, and loads it when a run is resumed; *found is false if
 * none was saved. QT_E_RESUME, naming `dir`, if the saved plan is damaged or belongs to another
 * quantization plan or model. */
int qt_act_plan_save(const struct qt_act_plan *p, struct qt_writer *w, struct qt_err *err);
int qt_act_plan_load(bool *found, struct qt_act_plan *out, const struct qt_plan *plan,
                     const struct qt_model *model, const struct qt_writer *w, const char *dir,
                     struct qt_err *err);

/* Callback `input` of struct qt_fake_quant; ctx is a struct qt_act_plan. Writes the quantized
 * x[m][k] to y (backend memory). */
int qt_act_plan_input(void *ctx, struct qt_backend *be, float *y, const float *x,
                      const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err);
/* Returns NULL if the input is not quantized. */
const struct qt_act *qt_act_plan_find(const struct qt_act_plan *p, size_t layer, int input);

/* Returns in *out the order and factors of the rows and columns of a linear as it is stored;
 * out->input = NULL: source order. out->input points into the plan; the row arrays are owned. */
int qt_act_plan_arrange(struct qt_arrange *out, const struct qt_act_plan *p,
                        const struct qt_model *model, const struct qt_linear *linear,
                        struct qt_err *err);
void qt_act_plan_arrange_free(struct qt_arrange *a);

/* agree.c: true if w4ax matrices with these specs may be in one model: all parameters are equal
 * except `method`, which only says how codes were found (a matrix without a usable Hessian is
 * quantized by search). The planner and qt_act_agree both use it. */
bool qt_act_same_params(const struct qt_spec *a, const struct qt_spec *b);

/* act.c: the steps of qt_act_apply_stored. Host memory; y may be x. */
int qt_act_arrange(float *y, const float *x, size_t m, const struct qt_act *a, struct qt_err *err);
/* qt_act_arrange in backend memory; y is not x. */
int qt_act_arrange_on(struct qt_backend *be, float *y, const float *x, size_t m,
                      const struct qt_act *a, struct qt_err *err);
int qt_act_round(float *y, const float *x, size_t m, const struct qt_act *a, struct qt_err *err);

/* act.c: reads a section of a container's tensor into dst; QT_E_INPUT if the section is missing or
 * its size is not `bytes`. */
int qt_act_section(void *dst, size_t bytes, const struct qt_container *c, const struct qt_entry *e,
                   const char *name, struct qt_err *err);
bool qt_entry_is_w4ax(const struct qt_entry *e);

#endif
