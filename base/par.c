#include "base/par.h"

#include "base/mem.h"
#include "base/stop.h"

#include <omp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

/* Number of cores that this process may use, limited by the CPU quota of its cgroup (v2): more
 * threads than the quota would be throttled, and each needs scratch memory. */
static int cores(void)
{
    int n = omp_get_num_procs();
    long quota, period;
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re"); /* "QUOTA PERIOD" or "max PERIOD" */
    if (!f)
        return n;
    if (fscanf(f, "%ld %ld", &quota, &period) == 2 && quota > 0 && period > 0 &&
        (quota + period - 1) / period < n)
        n = (int)((quota + period - 1) / period);
    fclose(f);
    return n;
}

static void *pass(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* How many of n threads can be started, by trying. OpenMP aborts the process if it cannot start a
 * thread, and containers limit their number. */
static int startable(int n)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t *threads;
    int made = 0;
    if (n <= 1 || qt_array_new(&threads, (size_t)n, sizeof *threads, NULL) < 0)
        return 1;
    pthread_mutex_lock(&gate); /* keeps all threads alive at the same time */
    while (made + 1 < n && pthread_create(&threads[made], NULL, pass, &gate) == 0)
        made++;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < made; i++)
        pthread_join(threads[i], NULL);
    qt_free(threads);
    return made + 1;
}

void qt_threads_set(int n)
{
    omp_set_num_threads(startable(n > 0 ? n : cores()));
    /* Starts the threads now, while there is memory for their stacks. The barrier keeps compilers
     * from removing the empty region. */
#pragma omp parallel
    {
#pragma omp barrier
    }
}

int qt_threads(void)
{
    return omp_get_max_threads();
}

/* The error of the lowest failed item. */
struct failure {
    size_t item;
    int rc;
    struct qt_err *err; /* may be NULL */
};

static void record_failure(struct failure *f, size_t item, int rc, const struct qt_err *local)
{
#pragma omp critical(qt_parallel_error)
    if (f->rc == QT_OK || item < f->item) {
        f->item = item;
        f->rc = rc;
        if (f->err)
            *f->err = *local;
    }
}

int qt_parallel(size_t n, int (*fn)(void *ctx, size_t item, int thread, struct qt_err *err),
                void *ctx, struct qt_err *err)
{
    atomic_int stop = 0;
    struct failure failure = {.err = err};
    /* No nested parallelism: it would start more threads than qt_threads_set allowed. */
#pragma omp parallel for schedule(dynamic, 1) if (n > 1 && !omp_in_parallel())
    for (size_t i = 0; i < n; i++) {
        struct qt_err local = {0};
        if (atomic_load_explicit(&stop, memory_order_relaxed))
            continue;
        int status = qt_stop_check(&local);
        if (status == QT_OK)
            status = fn(ctx, i, omp_get_thread_num(), &local);
        if (status < 0) {
            atomic_store(&stop, 1);
            record_failure(&failure, i, status, &local);
        }
    }
    return failure.rc;
}

void qt_parallel_for(size_t n, void (*fn)(void *ctx, size_t item), void *ctx)
{
#pragma omp parallel for schedule(dynamic, 1) if (n > 1 && !omp_in_parallel())
    for (size_t i = 0; i < n; i++)
        fn(ctx, i);
}

int qt_per_thread(int (*fn)(void *ctx, int thread, struct qt_err *err), void *ctx,
                  struct qt_err *err)
{
    struct failure failure = {.err = err};
#pragma omp parallel
    {
        struct qt_err local = {0};
        const int thread = omp_get_thread_num(), status = fn(ctx, thread, &local);
        if (status < 0)
            record_failure(&failure, (size_t)thread, status, &local);
    }
    return failure.rc;
}
