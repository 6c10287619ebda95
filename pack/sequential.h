/*
 * Calibration block by block (private to pack/): the hidden states of all calibration windows go
 * through the decoder, and every block sees what the blocks before it really give once quantized.
 */
#ifndef QT_PACK_SEQUENTIAL_H
#define QT_PACK_SEQUENTIAL_H

#include "pack/pack.h"

struct qt_sequential;

/* Embeds the windows. `source`: the unquantized weights. */
int qt_sequential_open(struct qt_sequential **out, const struct qt_weights *source,
                       const struct qt_calibration *data, struct qt_err *err);
void qt_sequential_close(struct qt_sequential *s);
const struct qt_model *qt_sequential_model(const struct qt_sequential *s);

/* H = X^T X (lower triangle, host memory) of a block's linear inputs: input i of h[QT_INPUTS], NULL
 * where no linear has it. Valid until the next call. The hidden states stay where they are. */
int qt_sequential_observe(const double *const **h, struct qt_sequential *s, size_t layer,
                          struct qt_err *err);
/* Moves the hidden states through the block with the given weights. */
int qt_sequential_advance(struct qt_sequential *s, size_t layer, const struct qt_weights *quantized,
                          struct qt_err *err);

#endif
