/*
 * The plan of a GGUF file (private to pack/export/gguf.c, gguf_plan.c and gguf_data.c): which
 * tensors of the container it has, under which names and in which files.
 */
#ifndef QT_PACK_EXPORT_GGUF_PLAN_H
#define QT_PACK_EXPORT_GGUF_PLAN_H

#include "pack/export/gguf.h"

/* A tensor of the container. */
struct source {
    const struct qt_export_matrix *matrix; /* or */
    const struct qt_tensor *copied;
};

/* Rows, or with `channels` channels, that change their order: within heads of `head` rows, or, from
 * number `first` on, the value heads of `size` rows. head 0, heads 0: none do. */
struct order {
    size_t head, first, size, heads, keys;
    bool channels;
};

/* A part of kv_b_proj that is a tensor: `size` rows of each head, from number `first` of its `rows`
 * on. Those of keys are transposed: [heads][rank][size]; those of values: [heads][size][rank]. */
struct latent {
    size_t rank, rows, first, size;
    bool keys;
};

struct tensor {
    char name[QT_GGUF_NAME];
    const struct qt_gguf_type *type;
    size_t rows, k; /* rows 0: a vector */
    /* [slices] tensors of all experts one after the other, or one tensor; owned. NULL: values. */
    struct source *sources;
    size_t slices;
    bool stacked;
    const float *values;
    struct order order;
    struct latent latent; /* rank 0: none */
    size_t heads;         /* of latent */
    bool plus_1, decay;
    uint64_t bytes;
};

struct gguf {
    const struct qt_export *x;
    struct qt_gguf_bytes keys;
    struct qt_gguf_factors factors;
    const struct qt_gguf_arch *arch;
    const struct qt_gguf_family *names;
    size_t layers, head_dim, experts;
    size_t heads, kv_rank, nope, latent_value; /* of latent attention */
    size_t value_heads, key_heads, value_dim;  /* of gated DeltaNet */
    bool tied;
    const char *prefix, *head; /* as of qt_model_details */
    struct tensor *tensors;
    size_t count;
    size_t files, *first; /* [files + 1] the first tensor of each file */
};

/* `plan` and `release` of the format: x->own is a struct gguf. */
int qt_gguf_plan(struct qt_export *x, uint64_t *bytes, struct qt_err *err);
void qt_gguf_release(struct qt_export *x);
/* The bytes with the padding that follows. */
uint64_t qt_gguf_padded(uint64_t bytes);

/* Writes the data of a tensor, with the padding (gguf_data.c). */
int qt_gguf_write_tensor(struct qt_export *x, struct tensor *t, struct qt_err *err);

#endif
