/* Walking a packed matrix strip by strip (private to pack/): shared by packed.c and
 * packed_round.c. */
#ifndef QT_PACK_WALK_H
#define QT_PACK_WALK_H

#include "pack/schemes/scheme.h"

struct range {
    float largest, smallest; /* absmax of groups, zero groups excluded */
};

struct walk {
    const struct qt_packed *p;
    const struct qt_matrix *w;       /* source, or NULL */
    const struct qt_matrix *targets; /* values to quantize instead of the source, arranged; or
                                      * NULL */
    bool stored;                     /* decode: columns as stored */
    float *dst;                      /* decode: output for rows [row0, row0 + rows) */
    size_t row0, rows;
    const float *importance;
    struct qt_error *errors; /* per strip, or NULL */
    struct range *ranges;    /* per strip */
    unsigned char *scratch;  /* per thread: scheme scratch, rows of w, rows of q, a spare row */
    size_t scratch_stride, rows_offset;
};

/* Allocates the scratch memory, which the caller frees. */
int walk_open(struct walk *walk, const struct qt_packed *p, struct qt_err *err);
/* Strip `index`, with this thread's scratch memory: 16 rows each of w and of q, and behind q a
 * spare row. */
struct qt_strip walk_strip(const struct walk *walk, size_t index, int thread, float **w, float **q);
size_t walk_strips(const struct qt_packed *p);
/* Source rows [row0, row0 + rows) in stored order, times 2^exp2: w[rows][k]. spare: one row. */
void walk_arranged_rows(float *w, const struct qt_packed *p, const struct qt_matrix *source,
                        size_t row0, size_t rows, int exp2, float *spare);
/* w *= 2^exp2 */
void walk_scale(float *w, size_t count, int exp2);
/* Adds the errors of a strip to those of the walk; w and q are scratch memory. */
void walk_errors(const struct walk *walk, const struct qt_strip *strip, float *w, float *q);
/* The errors of all strips, in order. */
void walk_total(struct qt_error *out, const struct walk *walk);

#endif
