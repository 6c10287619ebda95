/* Parallel loops. Results never depend on the number of threads: work is cut by the caller into
 * items of a fixed size, and whatever is reduced across items is reduced in item order. */
#ifndef QT_BASE_PAR_H
#define QT_BASE_PAR_H

#include "base/status.h"
#include <stddef.h>

/* Starts the worker threads of all later loops; 0 = one per available core. Fewer where so many
 * cannot be started. Whoever calls OpenBLAS sets it to one thread itself: parallelism is ours, or
 * sums would depend on the number of threads. */
void qt_threads_set(int n);
int qt_threads(void);

/*
 * Calls fn(ctx, item, thread, err) for item = 0..n-1 on the worker threads, thread < qt_threads().
 * Items are handed out dynamically. After a failure no new items start; the error returned is that
 * of the lowest failing item among those run.
 */
int qt_parallel(size_t n, int (*fn)(void *ctx, size_t item, int thread, struct qt_err *err),
                void *ctx, struct qt_err *err);

/* The same with a function that cannot fail and needs no scratch per thread. */
void qt_parallel_for(size_t n, void (*fn)(void *ctx, size_t item), void *ctx);

/* Item number -> row and column of the lower triangle of tiles, row by row. */
static inline void qt_triangle_tile(size_t *row, size_t *col, size_t item)
{
    *row = 0;
    while (item > *row)
        item -= ++*row;
    *col = item;
}

#endif
