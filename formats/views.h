/*
 * Views (private to formats/): tensors that a checkpoint presents in another form than it stores
 * them. A quantized tensor becomes one of F16, BF16 or F32 (encodings/); a stack of experts becomes
 * a matrix for each expert and projection; a matrix stored as [input][output] becomes
 * [output][input] (stacked.c).
 *
 *     views.c    makes the views of a checkpoint and reads them
 *     stacked.c  names of stacked experts, of transposed matrices and of renamed tensors
 */
#ifndef QT_FORMATS_VIEWS_H
#define QT_FORMATS_VIEWS_H

#include "formats/encodings/encoding.h"

/* A part of the matrix base->[rows][cols]. */
struct qt_view {
    struct qt_slot slot; /* as presented; slot.view = this; owns its name */
    const struct qt_encoded *base;
    /* View row i is base row first + i * step; if transposed, it is column first + i * step of the
     * rows from `top` on. */
    size_t first, step, top;
    bool transposed;
};

/* What stacked.c makes of a base tensor: at most two views per expert. */
struct qt_pieces {
    size_t experts;      /* 0: there is one view of the whole tensor */
    size_t count;        /* views per expert */
    const char *name[2]; /* "gate_proj" */
    const char *ending;  /* ".weight" or ".bias" */
    size_t prefix;       /* bytes of the base's name before the number of the expert ... */
    const char *between; /* ... and what is put between them: "" or "experts." */
    size_t n, k;         /* shape of a view; k = 0: a vector */
    bool transposed, interleaved;
    const char *from, *to; /* text of the name to replace; NULL: none */
};

/* All base tensors of a checkpoint by name. */
struct qt_bases {
    struct qt_encoded **list;
    size_t count, capacity;
};
const struct qt_encoded *qt_bases_find(const struct qt_bases *bases, const char *name, size_t size,
                                       const char *ending);

/* True if the tensor may be more than one view, or presented under another name or transposed. */
bool qt_stack_is_candidate(const struct qt_source *source, const struct qt_tensor *t);
/* Decides how the base is presented, from its name and from the shapes of those beside it. */
void qt_stack_split(struct qt_pieces *out, const struct qt_source *source,
                    const struct qt_bases *bases, const struct qt_encoded *base);

/* The views of a checkpoint. */
struct qt_views {
    struct qt_bases bases;
    struct qt_view *list; /* in the order of their first parts in the files */
    size_t count, capacity;
    bool encoded; /* some tensors are dequantized */
    struct qt_source source;
    struct qt_err unreadable; /* why a quantized tensor has no view; status 0: there is none */
};
/*
 * Makes the views of the stored tensors, and sets `used` of the slots that are parts of views, or
 * that only a quantized model needs. by_name: sorted; in_order: as in the files. QT_E_RESOURCE
 * only: other reasons are in out->unreadable.
 */
int qt_views_make(struct qt_views *out, const char *dir, struct qt_slot *const *by_name,
                  struct qt_slot *const *in_order, size_t count, struct qt_err *err);
void qt_views_free(struct qt_views *v);
int qt_view_read(struct qt_blob *out, const struct qt_view *view, struct qt_err *err);

#endif
