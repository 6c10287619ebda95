/*
 * Ranks: the processes that share the work of one run, started by mpirun. All ranks run the same
 * code on the same input and call the functions below in the same order; in between each does its
 * own share. A rank that fails leaves its work and calls qt_comm_meet, so that the next call of all
 * others returns its error: no rank waits for one that has given up.
 *
 * struct qt_comm only moves bytes; sums are formed by the callers, in an order that does not depend
 * on the number of ranks. Everywhere NULL stands for one process alone.
 */
#ifndef QT_BASE_COMM_H
#define QT_BASE_COMM_H

#include "base/status.h"
#include <stdbool.h>
#include <stddef.h>

struct qt_comm {
    size_t rank, size;
    size_t local_rank; /* number of this rank among those of its host */
    bool over;         /* all ranks know of a failure: nothing may be moved any more */
    double waited;     /* seconds in which this rank waited for others to meet it */
    double moved;      /* seconds in which data was moved */
    double bytes;      /* that this rank has sent or received */
    void *ctx;
    /* Movement of data. These do not return if it fails: the implementation ends all ranks. */
    void (*broadcast)(struct qt_comm *c, void *data, size_t bytes, size_t from);
    /* all[size][bytes] = mine[bytes] of every rank, in the order of ranks */
    void (*gather)(struct qt_comm *c, void *all, const void *mine, size_t bytes);
    /* Sends to one rank while it receives from one; 0 bytes: it does not. What a rank sends to
     * another is received in the same order and sizes. */
    void (*shift)(struct qt_comm *c, const void *out, size_t out_bytes, size_t to, void *in,
                  size_t in_bytes, size_t from);
    /* Ends all ranks with this error, because ranks may wait that cannot be told; does not
     * return. */
    void (*end)(struct qt_comm *c, const struct qt_err *err);
    void (*close)(struct qt_comm *c);
};

static inline size_t qt_comm_rank(const struct qt_comm *c)
{
    return c ? c->rank : 0;
}
static inline size_t qt_comm_size(const struct qt_comm *c)
{
    return c ? c->size : 1;
}

/*
 * All ranks meet, each with the status of its work and, if that is a failure, its error. Returns
 * QT_OK if all bring QT_OK. Otherwise every rank returns the error of the lowest rank that failed,
 * whose reason begins with the number of the rank unless all ranks failed; c->over is then true.
 */
int qt_comm_meet(struct qt_comm *c, int rc, struct qt_err *err);

/* The functions below meet first, and return the error of another rank. */

/* Copies data[bytes] of rank `from` to all ranks. */
int qt_comm_broadcast(struct qt_comm *c, void *data, size_t bytes, size_t from, struct qt_err *err);
/* The same for data in the memory of a backend, which is linked or not. */
struct qt_backend;
int qt_comm_broadcast_on(struct qt_comm *c, struct qt_backend *be, void *data, size_t bytes,
                         size_t from, struct qt_err *err);
/* all[size][bytes] = mine[bytes] of every rank. */
int qt_comm_gather(struct qt_comm *c, void *all, const void *mine, size_t bytes,
                   struct qt_err *err);
/* The same for data of different sizes: *all is the data of all ranks one after the other and a
 * NUL, sizes[size] are their sizes. The caller frees *all with qt_free. */
int qt_comm_collect(struct qt_comm *c, char **all, size_t *sizes, const void *mine, size_t bytes,
                    struct qt_err *err);

/* all is divided among the ranks in order; the share of rank i ends behind byte end[i]. Every rank
 * has its own share there and receives those of the others. */
int qt_comm_join(struct qt_comm *c, void *all, const size_t *end, struct qt_err *err);

/* Moves data without a meeting, by the function `shift`: no rank may fail in between. */
void qt_comm_shift(struct qt_comm *c, const void *out, size_t out_bytes, size_t to, void *in,
                   size_t in_bytes, size_t from);

/* The same for the memory of a linked backend. */
int qt_comm_shift_on(struct qt_comm *c, struct qt_backend *be, const void *out, size_t out_bytes,
                     size_t to, void *in, size_t in_bytes, size_t from, struct qt_err *err);

/* The share of `rank` of n items in order: items [*first, result). */
size_t qt_comm_share(size_t *first, size_t n, size_t rank, size_t size);
/* Distributes n items with the given costs: the next most expensive item always goes to the rank
 * with the least work, the lower number first. owner[n]: ranks. */
int qt_comm_assign(size_t *owner, const double *cost, size_t n, size_t size, struct qt_err *err);

#endif
