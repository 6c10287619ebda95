/* A run of qt_export: what export.c plans and safetensors.c writes. */
#ifndef QT_PACK_EXPORT_RUN_H
#define QT_PACK_EXPORT_RUN_H

#include "pack/export/export.h"

/* An output tensor: one of a matrix, or a copied one. */
struct item {
    const struct qt_tensor *copied; /* NULL: a matrix */
    size_t matrix;
    size_t first; /* index of its first tensor in the list of all */
    size_t ntensors;
    uint64_t bytes;
};

struct run {
    struct qt_export x;
    struct item *items; /* in the order of the files */
    size_t nitems;
    struct qt_tensor *tensors; /* all; names borrowed from x.matrix and the container */
    size_t ntensors;
    struct qt_spec *specs; /* per matrix */
    const char **sources;  /* weight files of the container, for x.out */
    uint64_t bytes;
    unsigned char *data; /* of the matrix that is being written */
    size_t data_bytes;
};

/* Writes the files with run->items, and their index. */
int qt_export_write_shards(struct run *run, struct qt_err *err);

#endif
