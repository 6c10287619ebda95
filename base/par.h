/* Parallel loops. Results do not depend on the number of threads: callers divide the work into
 * items of a fixed size and reduce across items in item order. */
#ifndef QT_BASE_PAR_H
#define QT_BASE_PAR_H

#include "base/status.h"
#include <stddef.h>

/* Starts n worker threads for all later loops (0: one per available core), or as many as the system
 * allows. Callers of OpenBLAS set it to one thread, because sums by its threads would depend on
 * their number. */
void qt_threads_set(int n);
int qt_threads(void);

/*
 * Calls fn(ctx, item, thread, err) for item = 0..n-1 on the worker threads; thread < qt_threads().
 * Scheduling is dynamic: a thread may get no item or all of them. After a failure no new items
 * start; the result is the error of the lowest failed item. A request to stop (base/stop.h) counts
 * as a failure with QT_E_INTERRUPTED. A call inside another parallel loop runs on the calling
 * thread only.
 */
int qt_parallel(size_t n, int (*fn)(void *ctx, size_t item, int thread, struct qt_err *err),
                void *ctx, struct qt_err *err);

/* The same for a function that cannot fail and needs no per-thread scratch; goes on after a request
 * to stop, so n items should take less than a second. */
void qt_parallel_for(size_t n, void (*fn)(void *ctx, size_t item), void *ctx);

/* Calls fn(ctx, thread, err) exactly once on each worker thread. The result is the error of the
 * lowest failed thread. */
int qt_per_thread(int (*fn)(void *ctx, int thread, struct qt_err *err), void *ctx,
                  struct qt_err *err);

/* Maps an item number to a tile of a lower triangle, counted row by row. */
static inline void qt_triangle_tile(size_t *row, size_t *col, size_t item)
{
    *row = 0;
    while (item > *row)
        item -= ++*row;
    *col = item;
}

#endif
