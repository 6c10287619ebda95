/*
 * How the inputs of w4ax linears will be quantized (private to pack/), decided for the whole model
 * before any weight is: which channels share blocks, which are scaled down, how 4-bit blocks are
 * clipped, and which blocks get 8 bits.
 */
#ifndef QT_PACK_ACTIVATIONS_PLAN_H
#define QT_PACK_ACTIVATIONS_PLAN_H

#include "pack/pack.h"

struct qt_act_plan {
    size_t layers;
    struct qt_act *act; /* [layers][QT_INPUTS]; k = 0: as they are */
    json_t *report; /* shares of multiply-accumulates at 8 bits, divergence left; NULL: no w4ax */
};

/* QT_E_UNSUPPORTED: linears that share an input do not all have the same w4ax scheme, or a w4ax
 * tensor is no linear of the decoder's blocks. */
int qt_act_plan_check(const struct qt_plan *plan, const struct qt_model *model, struct qt_err *err);
/* On opt->calibration; empty when the plan has no w4ax linear. Fails as the check does, and with
 * QT_E_INTERRUPTED. */
int qt_act_plan_new(struct qt_act_plan *out, const struct qt_plan *plan,
                    const struct qt_model *model, const struct qt_weights *source,
                    const struct qt_quantize_options *opt, struct qt_err *err);
void qt_act_plan_free(struct qt_act_plan *p);

/* act_saved.c: keeps a plan beside the journal; gives it back to a run that goes on, *found false
 * if there is none. QT_E_RESUME, of `dir`: it is damaged, or not of this plan and model. */
int qt_act_plan_save(const struct qt_act_plan *p, struct qt_writer *w, struct qt_err *err);
int qt_act_plan_load(bool *found, struct qt_act_plan *out, const struct qt_plan *plan,
                     const struct qt_model *model, const struct qt_writer *w, const char *dir,
                     struct qt_err *err);

/* For struct qt_fake_quant; ctx is a struct qt_act_plan. */
int qt_act_plan_input(void *ctx, struct qt_backend *be, float *y, const float *x,
                      const struct qt_linear *linear, size_t m, size_t k, struct qt_err *err);
const struct qt_act *qt_act_plan_find(const struct qt_act_plan *p, size_t layer, int input);

/* How a linear is stored under the plan; input NULL: as it stands. */
int qt_act_plan_arrange(struct qt_arrange *out, const struct qt_act_plan *p,
                        const struct qt_model *model, const struct qt_linear *linear,
                        struct qt_err *err);
void qt_act_plan_arrange_free(struct qt_arrange *a);

/* act.c: a section of a container's tensor into dst; QT_E_INPUT unless it has so many bytes. */
int qt_act_section(void *dst, size_t bytes, const struct qt_container *c, const struct qt_entry *e,
                   const char *name, struct qt_err *err);
bool qt_entry_is_w4ax(const struct qt_entry *e);

#endif
