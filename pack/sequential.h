/*
 * Calibration block by block (private to pack/). The hidden states of all calibration windows go
 * through the decoder twice: through the unquantized model, and through the model as far as it is
 * quantized. Within a block it goes by inputs of linears, in order of use: each is observed as the
 * linears before it, quantized, have made it.
 *
 * In a mixture of experts the tokens of an expert are those that the router gives it in the
 * quantized model; they go through the same expert of the unquantized model, to compare. A token
 * counts by the square of its share, as its error does. If fewer tokens choose an expert than
 * QT_FEW_TOKENS for each channel of its input, others that came near to it are added.
 */
#ifndef QT_PACK_SEQUENTIAL_H
#define QT_PACK_SEQUENTIAL_H

#include "pack/pack.h"

enum { QT_FEW_TOKENS = 4 }; /* for a channel: with fewer a Hessian fits these tokens alone */

struct qt_sequential;

/* Embeds the windows. source: of the unquantized model, without a runtime; now: of the quantized
 * one, as far as there are any. */
int qt_sequential_open(struct qt_sequential **out, const struct qt_weights *source,
                       const struct qt_weights *now, const struct qt_calibration *data,
                       struct qt_err *err);
void qt_sequential_close(struct qt_sequential *s);

/* The hidden states stand in front of this layer. now: the quantized model's weights as far as
 * there are any, the source's elsewhere, and its runtime. */
int qt_sequential_enter(struct qt_sequential *s, size_t layer, const struct qt_weights *now,
                        struct qt_err *err);

/* Sums over all tokens, in host memory. x: what the linears of an input will get; d[n]: something
 * as the unquantized model has it, less the same of the quantized one. */
struct qt_lack {
    size_t n;             /* 0: it is not known */
    const float *cross;   /* [n][k] d^T x */
    const double *square; /* [n] d^2 */
};
struct qt_observed {
    const double *h;      /* [k][k] x^T x, lower triangle */
    struct qt_lack input; /* of x itself: n = k */
    /* Of the hidden states, where the linear's output is added to them, divided by what it is
     * multiplied by there (qt_model_output_scale). */
    struct qt_lack state;
    /* What regressions on these sums are worth: how many tokens that count alike would make them.
     */
    size_t tokens;
    size_t chose; /* tokens that go through these linears */
};
/* Of an input of the sublayer that the hidden states stand in front of; its inputs in order, each
 * at most once. Valid until the next call. */
int qt_sequential_observe(struct qt_observed *out, struct qt_sequential *s, int input,
                          struct qt_err *err);
/* The linears with this input have other weights now. */
int qt_sequential_renew(struct qt_sequential *s, int input, const struct qt_weights *now,
                        struct qt_err *err);
/* Moves the hidden states through the sublayer with this input. */
int qt_sequential_advance(struct qt_sequential *s, int input, struct qt_err *err);

#endif
