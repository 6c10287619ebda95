/* The files that load a model share these declarations, which are private to them. */
#ifndef QT_VERIFY_RUNTIME_LOAD_H
#define QT_VERIFY_RUNTIME_LOAD_H

#include "verify/runtime/runtime.h"

struct rt_loader {
    struct qt_runtime *rt;
    const struct qt_weights *w;
    const struct qt_container *container;
    const struct qt_model *model;
    float *values; /* host */
    uint16_t *halves;
    size_t values_capacity, halves_capacity;
};

/* How a stored vector becomes that of the runtime. */
struct rt_adjust {
    bool plus_1;
    const struct qt_act *act;    /* a norm: of the linears behind it; NULL or k 0: none */
    const struct qt_entry *rows; /* a bias: its w4ax matrix; NULL: none */
};

/* ---- load.c --------------------------------------------------------------------------------- */

/* The packed matrix of a part, or NULL. */
const struct qt_entry *rt_entry_of(const struct rt_loader *l, const struct qt_part *part);
/* Reads a tensor of `count` values to l->values. */
int rt_load_values(struct rt_loader *l, const char *name, size_t count, struct qt_err *err);
/* *out = a vector of FP32, or NULL if name is NULL. how NULL: as it is stored. */
int rt_load_vector(const float **out, struct rt_loader *l, const char *name,
                   const struct qt_part *part, const struct rt_adjust *how, struct qt_err *err);
/* Writes rows [part->first, part->first + part->n) as FP16 to device memory. */
int rt_upload_rows(void *dst, struct rt_loader *l, const struct qt_part *part, struct qt_err *err);
int rt_load_norm(struct qtool_decoder_norm *out, struct rt_loader *l, const struct qt_part *part,
                 enum qt_norm_kind kind, const struct qt_act *act, struct qt_err *err);
/* *out = a matrix in FP16, or NULL if the model has no such part. */
int rt_load_table(const void **out, struct rt_loader *l, const struct qt_part *part,
                  struct qt_err *err);
/* Loads the parts (row ranges of one tensor, or whole tensors), packed as they are. act: of the
 * input; NULL or k 0: not quantized. */
int rt_load_group(struct rt_group *out, struct rt_loader *l, const struct qt_part *const *parts,
                  size_t count, const struct qt_act *act, struct qt_err *err);

/* ---- load_inputs.c -------------------------------------------------------------------------- */

/* Table, projection and norm of the inputs of single layers, and the sublayer that reads them. */
int rt_load_inputs(struct rt_loader *l, const struct qt_outer *outer, struct qt_err *err);
int rt_load_layer_inputs(struct rt_layer *out, struct rt_loader *l, const struct qt_block *b,
                         enum qt_norm_kind kind, struct qt_err *err);

/* ---- load_runs.c ---------------------------------------------------------------------------- */

/* The parts are rows in runs of one packed matrix, whose strips are copied in the order of the
 * parts. */
int rt_load_runs(struct rt_group *out, struct rt_loader *l, const struct qt_entry *entry,
                 const struct qt_part *const *parts, size_t count, struct qt_err *err);

/* ---- load_experts.c ------------------------------------------------------------------------- */

/* Router and gate of the shared expert are the rows of one matrix. */
int rt_load_mixture(struct rt_mixture *out, struct rt_loader *l, const struct qt_mixture *m,
                    size_t layer, struct qt_err *err);

#endif
