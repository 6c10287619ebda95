/* A run of qt_export: what export.c plans and safetensors.c writes. */
#ifndef QT_PACK_EXPORT_RUN_H
#define QT_PACK_EXPORT_RUN_H

#include "pack/export/export.h"

/* A tensor that has the matrices, or biases, of all experts of a layer (stacks.c). */
struct stack {
    struct qt_stack form; /* of the first member */
    size_t tensor;        /* of a matrix */
    struct member {
        const struct qt_tensor *copied; /* NULL: a matrix */
        size_t matrix;
        size_t place; /* expert * form.parts + part */
    } * members;
    size_t count, room; /* of members */
    size_t n, k;        /* rows and columns of a member's tensor; k = 0: a bias */
    enum qt_dtype dtype;
};

/* An output tensor: one of a matrix, a copied one, or a stack. */
struct item {
    const struct qt_tensor *copied; /* NULL: a matrix */
    size_t matrix;
    size_t stack; /* 1 + index; 0: none */
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
    struct stack *stacks;
    size_t nstacks, stacks_room;
    json_t *stack_at;      /* index of a stack by its name */
    struct qt_spec *specs; /* per matrix */
    const char **sources;  /* weight files of the container, for x.out */
    uint64_t bytes;
    unsigned char *data; /* of the matrix that is being written */
    size_t data_bytes;
};

/* items[*count] = what is to be listed for this matrix or copied tensor: the item itself, or those
 * of its stacks that have none yet. */
int qt_export_stack_add(struct item items[QT_EXPORT_TENSORS], size_t *count, struct run *run,
                        const struct item *item, const char *name, struct qt_err *err);
/* Describes the tensor of a stack that has all its members. QT_E_INPUT if one is missing, has
 * another shape or is not of F16, BF16 or F32. */
int qt_export_stack_tensor(struct qt_tensor *out, struct run *run, struct stack *s,
                           struct qt_err *err);
int qt_export_stack_write(struct run *run, const struct stack *s, struct qt_err *err);
void qt_export_stacks_free(struct run *run);

/* Fills run->x.matrix[matrix].tensor[].data, which stays until the next call. */
int qt_export_convert_matrix(struct run *run, size_t matrix, struct qt_err *err);
/* Writes the files with run->items, and their index. */
int qt_export_write_shards(struct run *run, struct qt_err *err);

#endif
