/*
 * Sequential calibration (private to pack/). The hidden states of all calibration windows pass
 * through the decoder twice: through the reference (unquantized) model and through the partly
 * quantized model. Within a decoder layer the linear inputs are observed in order of use. Each is
 * computed with the linears before it already quantized.
 *
 * In a mixture of experts the router of the quantized model selects the tokens of an expert. The
 * same tokens go through this expert in the reference model, for comparison. A token is weighted by
 * the square of its routing weight, like its error. If fewer tokens than QT_MIN_TOKENS_PER_CHANNEL
 * for each input channel select an expert, others are added (qt_tokens_of_expert).
 */
#ifndef QT_PACK_SEQUENTIAL_H
#define QT_PACK_SEQUENTIAL_H

#include "pack/activations/plan.h"

struct qt_sequential;

/* Embeds the windows, with several ranks those of this rank: all ranks call the functions below
 * together, and observe the sums of all windows. source: the reference model, without simulated
 * quantization. current: the partly quantized model. */
int qt_sequential_open(struct qt_sequential **out, const struct qt_weights *source,
                       const struct qt_weights *current, const struct qt_calibration *data,
                       struct qt_comm *comm, struct qt_err *err);
void qt_sequential_close(struct qt_sequential *s);

/* Loads the weights of `layer`, in front of which the hidden states are. current: the weights of
 * the partly quantized model, with simulated quantization of activations. */
int qt_sequential_enter(struct qt_sequential *s, size_t layer, const struct qt_weights *current,
                        struct qt_err *err);

/* Sums over all tokens; `h` and `cross` may be in backend memory. x is the linear input in the
 * quantized model, z that of the reference model. The error d of x is z - x. If a single linear has
 * this input, d can be the error that its output should make up for: (z - x) W^T, plus the
 * difference of the hidden states that the output is added to, divided by the output multiplier
 * (qt_model_output_scale). */
struct qt_observed {
    size_t k;
    const double *h; /* [k][k] sum of x^T x, lower triangle */
    size_t errors;   /* 0: no sums of d[errors] */
    bool of_outputs;
    const float *cross;   /* [errors][k] sum of d^T x */
    const double *square; /* [errors] sum of d^2 */
    /* Effective number of tokens: the number of equally weighted tokens with the same variance. */
    size_t tokens;
    size_t routed_tokens;  /* tokens that pass through these linears */
    size_t missing_tokens; /* of an expert: how many more its Hessian needs */
    bool on_backend;
    /* Statistics of x, in host memory; an expert's x is not yet multiplied by the routing weights.
     * NULL if x has none. */
    const struct qt_channels *channels;
};
/* The only linear with this input, if errors of its outputs are summed: if they are added to hidden
 * states, whose errors it corrects as well, or where that takes less. Else NULL. */
const struct qt_linear *qt_sequential_linear_of_errors(const struct qt_model *model, size_t layer,
                                                       int input);
/* Observes a linear input of the sublayer that the hidden states are in front of. Inputs are
 * observed in order of use (experts have no order), each at most once. act: x is brought to this
 * order, scale and rotation first; NULL: to none. on_backend: h and cross stay in backend memory.
 * *out is valid until the next call. */
int qt_sequential_observe(struct qt_observed *out, struct qt_sequential *s, int input,
                          const struct qt_act *act, bool on_backend, struct qt_err *err);
/* observed.c: factor[m] (host memory) = 1 / RMS of each row of the hidden states [m][n] behind a
 * sublayer, in backend memory: an error at a token counts relative to what it is added to, because
 * the norms that follow divide by that. The RMS of `scale` times the errors [m][n] (NULL: none)
 * replaces a smaller one of the hidden states: a token with massive activations in the quantized
 * model only would outweigh all others. 1 for rows of zeros. */
int qt_token_factors(float *factor, struct qt_backend *be, const float *hidden, const float *errors,
                     float scale, size_t m, size_t n, struct qt_err *err);
#define QT_OBSERVED_DAMP 0.01 /* damping of H */
/* Factors H for a linear with this input that is quantized as p describes, and corrects the targets
 * (observed.c). f: zeros, or the factor of another linear with this input, which is kept if the
 * group size is the same. QT_E_UNSUPPORTED as qt_factor_new. */
int qt_observed_factor(struct qt_factor *f, const struct qt_observed *seen,
                       const struct qt_packed *p, struct qt_backend *be, struct qt_err *err);
/* Where the weights of a linear of this layer are in both models. */
struct qt_place qt_sequential_place(const struct qt_sequential *s, const char *weight);
/* Reloads the linears with this input after they were quantized, unless all of them were rounded in
 * place. */
int qt_sequential_reload(struct qt_sequential *s, int input, const struct qt_weights *current,
                         struct qt_err *err);
/* Moves the hidden states through the sublayer with this input. */
int qt_sequential_advance(struct qt_sequential *s, int input, struct qt_err *err);

#endif
