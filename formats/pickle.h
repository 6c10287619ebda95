/*
 * Private to formats: the values that a pickle describes. pickle.c makes them, state_dict.c reads
 * them. Values are nodes of an array that refer to their members by index, so that the memory of a
 * hostile pickle is at most proportional to its size.
 */
#ifndef QT_FORMATS_PICKLE_H
#define QT_FORMATS_PICKLE_H

#include "formats/formats_internal.h"

enum pickle_kind {
    MARK,
    OTHER, /* None, booleans, floats, bytes, big integers: harmless and not needed */
    INT,
    STRING,
    GLOBAL, /* a name that the table in pickle.c allows */
    TUPLE,
    LIST,
    DICT,    /* members alternate: key, value */
    STORAGE, /* members of the persistent id: 'storage', type, key, location, elements */
    TENSOR,  /* arguments of _rebuild_tensor_v2 or v3: storage, offset, size, stride, ... */
};

struct pickle_node {
    enum pickle_kind kind;
    enum qt_dtype dtype;       /* TENSOR, STORAGE (QT_DTYPE_COUNT: bytes), GLOBAL of a type */
    uint32_t first, last;      /* containers: first and last member cell, 0 = none */
    uint32_t count;            /* number of members */
    int64_t number;            /* INT: the value; STRING: its length; GLOBAL: enum global */
    const unsigned char *text; /* STRING: in the pickle, not terminated */
};

struct pickle_cell {
    uint32_t node, next;
};

struct pickle {
    struct pickle_node *nodes;
    struct pickle_cell *cells; /* cells[0] is unused */
    uint32_t root;
};

/* Runs the pickle. Strings of *out point into data. */
int qt_pickle_open(struct pickle *out, const unsigned char *data, size_t size, const char *file,
                   struct qt_err *err);
void qt_pickle_close(struct pickle *pickle);

/* Member i of a container, or NULL. */
const struct pickle_node *qt_pickle_member(const struct pickle *p,
                                           const struct pickle_node *container, unsigned i);
/* True if the node is of this kind; node may be NULL. */
bool qt_pickle_is(const struct pickle_node *node, enum pickle_kind kind);
/* True if the node, which may be NULL, is the string s. */
bool qt_pickle_is_string(const struct pickle_node *node, const char *s);

#endif
