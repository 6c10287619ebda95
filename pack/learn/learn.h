/*
 * Learning (private to pack/): after all tensors are quantized and written, Adam tunes continuous
 * parameters (scales, zero-points of mix24, norm weights) by gradients through the quantized model,
 * the student. Ranks share the windows of a batch; all make the same steps, and rank 0 saves.
 * Schemes provide their parameters by struct qt_learnable; this folder does not know their meaning.
 *
 *   learn.c   finds the parameters; runs training; rewrites the tensors that changed
 *   params.c  parameter values, Adam, conversion from and to packed matrices, progress on disk
 *   train.c   steps, evaluations, early stopping: the loop for both scopes
 *   loss.c    loss and gradient of a batch of windows, through the model or one decoder layer
 *   coded.c   matrices whose codes stay in backend memory, where it is not the host's
 */
#ifndef QT_PACK_LEARN_LEARN_H
#define QT_PACK_LEARN_LEARN_H

#include "pack/run.h"

struct qt_learner;

/* Finds what to learn; *out = NULL if there is nothing, else the caller closes it. Reports all
 * usage errors before any work: QT_E_USAGE (no calibration data, fewer than 2 windows, window
 * length), QT_E_UNSUPPORTED (parts of the model, norms that are not copied). */
int qt_learn_open(struct qt_learner **out, struct qt_run *run, struct qt_err *err);
/* Returns the options that determine the result, for the identity of the run. Owned. */
json_t *qt_learn_identity(const struct qt_learner *l);
/* Trains, and rewrites the tensors that changed. All tensors must be quantized and committed. Sets
 * run->learning. */
int qt_learn_run(struct qt_learner *l, struct qt_err *err);
void qt_learn_close(struct qt_learner *l);

/* ---- shared by the files -------------------------------------------------------------------- */

/* A quantized matrix of the model. All are decoded for the forward pass; some have parameters. */
struct learn_matrix {
    size_t item;  /* index of the plan item */
    size_t layer; /* info.layers: outside of the decoder layers */
    size_t index; /* among the layer's linears */
    bool learns;
    struct qt_packed packed;
    size_t first, per_strip;    /* first parameter; parameters per strip */
    struct learn_coded *coded;  /* NULL: decoded by the host */
    bool new_codes, new_scales; /* those in backend memory are not those of `packed` */
};

struct learn_norm {
    size_t item, layer, index; /* as above; layer = info.layers: the final norm */
    size_t first;
};

/* value = start + unit * delta: Adam steps in delta, so steps are relative to the size of a
 * parameter. Parameters are ordered by layer; within a layer matrices precede norms. */
struct learn_params {
    size_t count;
    float *start, *unit, *delta;
    float *m, *v; /* Adam's moments of dL/ddelta */
    float *best;  /* delta with the lowest held-out loss */
    float *grad;  /* dL/dvalue of the current step */
    /* While a matrix is coded, its gradients are in backend memory only, and so are the latest
     * delta, m, v and best. */
};

/* The arrays that determine how training goes on, in the order of the progress file. */
enum learn_state {
    LEARN_START,
    LEARN_UNIT,
    LEARN_DELTA,
    LEARN_M,
    LEARN_V,
    LEARN_BEST,
    LEARN_STATES
};

/* A row of the learning curve: mean loss of the training windows since the previous row (0 in the
 * first row), and mean loss of the held-out windows. */
struct learn_point {
    uint64_t layer, step;
    double train, held_out;
};

/* State of training. The progress file holds these bytes, then the parameters and the curve. */
struct learn_progress {
    char magic[8];
    uint64_t params;
    uint64_t layer; /* scope=block: the layer in training */
    uint64_t step, best_step;
    double best_loss;
    double loss_sum; /* losses of the steps since the last row of the curve */
    uint64_t loss_steps;
    uint64_t stale; /* evaluations since the best one */
    uint64_t points;
    uint64_t done; /* 1: training has ended, delta is the result */
    uint64_t crc;  /* once done: CRC-32 of the sections of all matrices with that delta */
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
    size_t ncoded; /* matrices that the backend decodes; those of the latest run */
    struct learn_params params;
    size_t *layer_first;  /* [layers + 2] first parameter of each layer, of the final norm; count */
    size_t *train, *held; /* indices of the training and the held-out windows */
    size_t ntrain, nheld;
    struct learn_progress at;
    struct learn_point *points;
    size_t points_capacity;
    double saved_at; /* time of the latest save of the progress, or of the start (qt_clock) */
    double seconds;  /* of steps and evaluations, since training was started or resumed */
    struct learn_work *work; /* loss.c */
};

/* Description of Adam (params.c) and the learning rate (train.c), for the report. */
#define LEARN_OPTIMIZER "adam beta1=0.9 beta2=0.99, warm-up over 1/20 of the steps, half a cosine"

/* params.c: assigns parameter indices and allocates the arrays of l->params. */
int learn_params_new(struct qt_learner *l, struct qt_err *err);
/* Sets start and unit from the packed matrices and the source's norms. */
int learn_params_read(struct qt_learner *l, struct qt_err *err);
/* The following work on parameters [first, end). clear: params.grad = 0. finite: of params.grad. */
void learn_params_clear(struct qt_learner *l, size_t first, size_t end);
bool learn_params_finite(const struct qt_learner *l, size_t first, size_t end);
/* Makes one step of Adam; t = 1, 2, ... is its number. The matrices then have the new
 * parameters. */
int learn_params_step(struct qt_learner *l, size_t first, size_t end, size_t t, double lr,
                      struct qt_err *err);
/* best = delta */
int learn_params_keep(struct qt_learner *l, size_t first, size_t end, struct qt_err *err);
/* Brings the latest parameters of coded matrices to host memory. */
int learn_params_fetch(struct qt_learner *l, size_t first, size_t end, struct qt_err *err);
/* Stores parameters [first, end) in the packed matrices. mode=ste: also chooses the codes again,
 * nearest to the source weights. */
int learn_params_apply(struct qt_learner *l, size_t first, size_t end, struct qt_err *err);
/* Adds dL/dvalue of the parameters of strips [first, end) of matrix `m` to params.grad. dw[rows][k]
 * = dL/dW of their rows, host memory. */
int learn_params_grad(struct qt_learner *l, const struct learn_matrix *m, const float *dw,
                      size_t first, size_t end, struct qt_err *err);
/* Returns a norm's weights as they will be stored: *bytes (owned) in the source's dtype, and w[n]
 * the same values as FP32. */
int learn_norm_stored(void **bytes, float *w, const struct qt_learner *l,
                      const struct learn_norm *norm, struct qt_err *err);
/* Sets arrays[state] to the array of params. */
void learn_params_state(float *arrays[LEARN_STATES], const struct learn_params *p);
/* Saves progress, parameters and curve (rank 0). All ranks call it. */
int learn_params_save(struct qt_learner *l, struct qt_err *err);
/* Loads them; *found is false if none were saved. QT_E_RESUME if they belong to another run. */
int learn_params_load(bool *found, struct qt_learner *l, struct qt_err *err);
void learn_params_free(struct learn_params *p);

/* loss.c: opens l->work, the buffers of the loss functions. */
int learn_work_open(struct qt_learner *l, struct qt_err *err);
void learn_work_close(struct qt_learner *l);
/* Returns the mean loss of windows[n], n <= opt.batch. gradient: also adds its gradient to
 * params.grad. All ranks call it, and have the same result. */
typedef int learn_loss_fn(double *loss, struct qt_learner *l, const size_t *windows, size_t n,
                          bool gradient, struct qt_err *err);
learn_loss_fn learn_model_loss, learn_layer_loss;
/* scope=block: advances to layer l->at.layer: its inputs from the present student, its target
 * outputs from the source. */
int learn_layer_enter(struct qt_learner *l, struct qt_err *err);

/* coded.c: copies codes and scales of all matrices of decoder layers to backend memory, if it has
 * functions for them and enough room; the host decodes the others. */
int learn_coded_open(struct qt_learner *l, struct qt_err *err);
void learn_coded_close(struct qt_learner *l);
/* w (backend memory) = the matrix, which has m->coded. */
int learn_coded_decode(float *w, struct qt_learner *l, struct learn_matrix *m, struct qt_err *err);
/* Its codes and scales in backend memory. */
const struct qt_coded *learn_coded_of(const struct learn_matrix *m);
/* Number of its scales, which are [n][groups]. */
size_t learn_coded_scales(const struct learn_matrix *m);
/* Takes dscale, dL/dscale in backend memory, as the gradients of the next step. */
int learn_coded_grad(struct qt_learner *l, const struct learn_matrix *m, const float *dscale,
                     struct qt_err *err);
/* The functions learn_params_step, _keep and _fetch for one coded matrix. */
int learn_coded_step(struct qt_learner *l, struct learn_matrix *m, const struct qt_adam *step,
                     struct qt_err *err);
int learn_coded_keep(struct qt_learner *l, struct learn_matrix *m, struct qt_err *err);
int learn_coded_fetch(struct qt_learner *l, struct learn_matrix *m, struct qt_err *err);

/* train.c: trains parameters [first, end), starting from l->at. Returns with the best ones in delta
 * and in the packed matrices. */
int learn_train(struct qt_learner *l, size_t first, size_t end, learn_loss_fn *loss,
                struct qt_err *err);

#endif
