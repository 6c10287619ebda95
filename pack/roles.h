/*
 * What a tensor is by name, dtype and shape (private to pack/). No config.json is needed, so this
 * works for architectures that qtool cannot run.
 */
#ifndef QT_PACK_ROLES_H
#define QT_PACK_ROLES_H

#include "pack/pack.h"

struct qt_role {
    /* Reason to copy the tensor unless a rule names it, a static string; NULL: a matrix to
     * quantize. */
    const char *why;
    /* A linear weight of a decoder layer, whether it can be quantized or not. */
    bool linear;
};

struct qt_role qt_role_of(const struct qt_ckpt *ckpt, const struct qt_tensor *t);

/* True for the weights of an adapter (LoRA and similar), and for the state of an optimizer. */
bool qt_name_is_adapter(const char *name);
bool qt_name_is_optimizer(const char *name);

/* True for the tensors of vision and audio modules. */
bool qt_name_is_multimodal(const char *name);
/* True for the tensors of MTP layers, which qtool does not run. */
bool qt_name_is_mtp(const struct qt_ckpt *ckpt, const char *name);

/* True if a component of the dotted name equals one of the words, which end with NULL. A word that
 * ends in '*' matches components that begin with the rest of it. */
bool qt_name_has_component(const char *name, const char *const *words);

#endif
