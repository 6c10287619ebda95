/*
 * Calibration block by block (private to pack/): the hidden states of all calibration windows go
 * through the decoder, and every block sees what the blocks before it really give once quantized.
 */
#ifndef QT_PACK_SEQUENTIAL_H
#define QT_PACK_SEQUENTIAL_H

#include "pack/pack.h"

struct qt_sequential;

/* Embeds the windows. `source`: the unquantized weights, with the runtime that the quantized model
 * will have. */
int qt_sequential_open(struct qt_sequential **out, const struct qt_weights *source,
                       const struct qt_calibration *data, struct qt_err *err);
void qt_sequential_close(struct qt_sequential *s);
const struct qt_model *qt_sequential_model(const struct qt_sequential *s);

/* Sums over all tokens of a block's linear inputs, in host memory: input i, NULL where no linear
 * has it. x is what the linears will get, z what the unquantized model gives them. */
struct qt_observed {
    const double *h[QT_INPUTS];       /* x^T x, lower triangle */
    const float *cross[QT_INPUTS];    /* (z - x)^T x */
    const double *strayed[QT_INPUTS]; /* (z - x)^2 by channel */
    size_t tokens;
};
/* Valid until the next call. The hidden states stay where they are. */
int qt_sequential_observe(struct qt_observed *out, struct qt_sequential *s, size_t layer,
                          struct qt_err *err);
/* Moves the hidden states through the block with the given weights. */
int qt_sequential_advance(struct qt_sequential *s, size_t layer, const struct qt_weights *quantized,
                          struct qt_err *err);

#endif
