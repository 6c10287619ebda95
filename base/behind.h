/*
 * A background thread that does jobs in the order in which they are added, while the caller goes
 * on. At most QT_BEHIND_JOBS wait or run when one is added, or QT_BEHIND_SMALL_JOBS if it is small:
 * callers bound the memory of what waits. After a failed job the others are not run.
 */
#ifndef QT_BASE_BEHIND_H
#define QT_BASE_BEHIND_H

#include "base/status.h"
#include <stdbool.h>
#include <stddef.h>

enum { QT_BEHIND_JOBS = 3, QT_BEHIND_SMALL_JOBS = 32 };

/* Both functions are called in the background thread, `drop` last and always. */
struct qt_behind_job {
    int (*run)(void *ctx, struct qt_err *err);
    void (*drop)(void *ctx);
    void *ctx;
    bool small;
};

struct qt_behind;
/* Parallel loops in jobs use as many threads as the caller's (base/par.h). If no thread can be
 * started, jobs run in qt_behind_add. */
int qt_behind_open(struct qt_behind **out, struct qt_err *err);
/* Waits until there is room. Returns the error of an earlier job; then this one is dropped. */
int qt_behind_add(struct qt_behind *b, const struct qt_behind_job *job, struct qt_err *err);
/* Waits until all jobs are done. Returns the error of the one that failed. */
int qt_behind_wait(struct qt_behind *b, struct qt_err *err);
/* Number of jobs that have run without an error so far. */
size_t qt_behind_done(struct qt_behind *b);
/* Waits for the jobs. Accepts NULL. */
void qt_behind_close(struct qt_behind *b);

#endif
