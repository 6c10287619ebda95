/*
 * Learning (private to pack/): continuous parameters - scales, norm weights - tuned by Adam through
 * the quantized model, after all tensors have been quantized and written. What schemes have to
 * offer for it is struct qt_learnable; nothing here knows what a scale is.
 *
 *   learn.c         what is to be learned; the order of events; rewriting what has changed
 *   learn_params.c  the parameters: values, Adam, the way into packed matrices, progress on disk
 *   learn_train.c   steps, evaluations, early stopping: the loop for both scopes
 *   learn_loss.c    loss and gradient of some windows, through the model or one block
 */
#ifndef QT_PACK_LEARN_LEARN_H
#define QT_PACK_LEARN_LEARN_H

#include "pack/run.h"

struct qt_learner;

/* *out = NULL when nothing is to be learned. All refusals are here, before any work: no calibration
 * data (QT_E_USAGE), a tensor outside the decoder blocks (QT_E_UNSUPPORTED). */
int qt_learn_open(struct qt_learner **out, struct qt_run *run, struct qt_err *err);
/* What determines the result, for the identity of the run. */
json_t *qt_learn_identity(const struct qt_learner *l);
/* To be called when everything is quantized and committed. Sets run->learning. */
int qt_learn_run(struct qt_learner *l, struct qt_err *err);
void qt_learn_close(struct qt_learner *l);

/* ---- shared by the files -------------------------------------------------------------------- */

/* A quantized matrix of the model; all are decoded for the forward pass, not all learn. */
struct learn_matrix {
    size_t item;  /* of the plan */
    size_t layer; /* number of layers: not in a block */
    size_t index; /* among the block's linears */
    bool learns;
    struct qt_packed packed;
    size_t first, per_strip; /* its parameters */
};

struct learn_norm {
    size_t item, layer, index; /* as above; layer = number of layers: the final norm */
    size_t first;
};

/* value = start + unit * delta, so that steps are relative to the size of a parameter. In order of
 * layers, in a layer matrices before norms. */
struct learn_params {
    size_t count;
    float *start, *unit, *delta;
    float *m, *v; /* Adam's moments of dL/ddelta */
    float *best;  /* delta that was best on the held-out windows */
    float *grad;  /* dL/dvalue of the current step */
};

/* A row of the learning curve. Losses: mean of the training windows since the row before (0 in the
 * first), of the held-out windows. */
struct learn_point {
    uint64_t layer, step;
    double train, held_out;
};

/* Where training stands; saved as it is, in front of the parameters. */
struct learn_progress {
    char magic[8];
    uint64_t params;
    uint64_t layer; /* scope=block: the one in training */
    uint64_t step, best_step;
    double best_loss;
    double loss_sum; /* of steps since the last row of the curve */
    uint64_t loss_steps;
    uint64_t worse; /* evaluations since the best one */
    uint64_t points;
    uint64_t done; /* delta is the result, */
    uint64_t crc;  /* and this the CRC-32 of all matrices with it */
};

struct qt_learner {
    struct qt_run *run;
    struct qt_learn_options opt;
    const struct qt_calibration *data;
    struct qt_backend *be;
    struct qt_weights source, student;
    struct qt_model *model;
    struct qt_model_info info;
    struct learn_matrix *matrices;
    struct learn_norm *norms;
    size_t nmatrices, nnorms;
    struct learn_params params;
    size_t *layer_first;  /* [layers + 2] first parameter of a layer; of the final norm; count */
    size_t *train, *held; /* windows */
    size_t ntrain, nheld;
    struct learn_progress at;
    struct learn_point *points;
    size_t points_capacity;
    struct learn_work *work; /* learn_loss.c */
};

/* Adam as learn_params.c and learn_train.c do it, for the report. */
#define LEARN_OPTIMIZER "adam beta1=0.9 beta2=0.99, warm-up over 1/20 of the steps, half a cosine"

/* learn_params.c */
int learn_params_new(struct qt_learner *l, struct qt_err *err);
/* Start values from the packed matrices and the source's norms. */
int learn_params_read(struct qt_learner *l, struct qt_err *err);
/* One step of Adam on parameters [first, end), step number t = 1, 2, ... */
void learn_params_step(struct qt_learner *l, size_t first, size_t end, size_t t, double lr);
/* Parameters [first, end) into the packed matrices, whose codes are chosen anew with mode=ste. */
int learn_params_apply(struct qt_learner *l, size_t first, size_t end, struct qt_err *err);
/* Adds to params.grad of matrix `m` what dw[n][k] (host) means. */
int learn_params_grad(struct qt_learner *l, const struct learn_matrix *m, const float *dw,
                      struct qt_err *err);
/* A norm's weights as they will be stored: bytes in the source's dtype, and the same as FP32. */
int learn_norm_stored(void **bytes, float *w, const struct qt_learner *l,
                      const struct learn_norm *norm, struct qt_err *err);
int learn_params_save(struct qt_learner *l, struct qt_err *err);
/* *found is false when there is nothing to go on from. */
int learn_params_load(bool *found, struct qt_learner *l, struct qt_err *err);
void learn_params_free(struct learn_params *p);

/* learn_loss.c: loss per position of windows[n], a batch at most; its gradient into params.grad. */
int learn_work_open(struct qt_learner *l, struct qt_err *err);
void learn_work_close(struct qt_learner *l);
typedef int learn_loss_fn(double *loss, struct qt_learner *l, const size_t *windows, size_t n,
                          bool gradient, struct qt_err *err);
learn_loss_fn learn_model_loss, learn_layer_loss;
/* scope=block: goes on to block l->at.layer, with the student as it now is in front of it. */
int learn_layer_enter(struct qt_learner *l, struct qt_err *err);

/* learn_train.c: trains parameters [first, end) and leaves the best ones in delta and in the packed
 * matrices. Goes on from l->at. */
int learn_train(struct qt_learner *l, size_t first, size_t end, learn_loss_fn *loss,
                struct qt_err *err);

#endif
