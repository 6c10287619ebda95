/* Refuses checkpoints that should not be quantized (private to pack/). */
#ifndef QT_PACK_GUARD_H
#define QT_PACK_GUARD_H

#include "pack/pack.h"

/*
 * QT_E_UNSUPPORTED, with the evidence: the weights are quantized in a way that qtool cannot read,
 * the checkpoint is an adapter, or (no_linears) nothing in it can be quantized. QT_E_INPUT:
 * config.json cannot be read, scales of quantized weights do not fit, or a matrix has no elements.
 */
int qt_guard_check(const struct qt_plan *plan, const struct qt_ckpt *ckpt, bool no_linears,
                   struct qt_err *err);

#endif
