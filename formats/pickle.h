/*
 * Private to formats: the values a pickle describes. pickle.c makes them, state_dict.c reads them.
 * They are nodes in an array and refer to their members by index, so that a hostile pickle can at
 * worst use memory in proportion to its size.
 */
#ifndef QT_FORMATS_PICKLE_H
#define QT_FORMATS_PICKLE_H

#include "formats/formats_internal.h"

enum pickle_kind {
    MARK,
    OTHER, /* None, booleans, floats, bytes, big integers: harmless and of no use here */
    INT,
    STRING,
    GLOBAL, /* a name the table in pickle.c allows */
    TUPLE,
    LIST,
    DICT,    /* members alternate: key, value */
    STORAGE, /* members of the persistent id: 'storage', type, key, location, elements */
    TENSOR,  /* arguments of _rebuild_tensor_v2: storage, offset, size, stride, ... */
};

struct pickle_node {
    enum pickle_kind kind;
    enum qt_dtype dtype;       /* STORAGE, and the GLOBAL that is its type */
    uint32_t first, last;      /* containers: cells of the members, 0 = none */
    uint32_t count;            /* of members */
    int64_t number;            /* INT: the value; STRING: bytes; GLOBAL: which */
    const unsigned char *text; /* STRING: in the pickle, not terminated */
};

struct pickle_cell {
    uint32_t node, next;
};

struct pickle {
    struct pickle_node *nodes;
    struct pickle_cell *cells; /* cells[0] is not used */
    uint32_t root;
};

/* Runs the pickle. Its strings stay in data. */
int qt_pickle_open(struct pickle *out, const unsigned char *data, size_t size, const char *file,
                   struct qt_err *err);
void qt_pickle_close(struct pickle *pickle);

/* Member i of a container, or NULL. */
const struct pickle_node *qt_pickle_member(const struct pickle *p,
                                           const struct pickle_node *container, unsigned i);
/* node may be NULL. */
bool qt_pickle_is(const struct pickle_node *node, enum pickle_kind kind);
/* Is the node this string? */
bool qt_pickle_is_string(const struct pickle_node *node, const char *s);

#endif
