#include "base/par.h"

#include <omp.h>
#include <stdatomic.h>

void qt_threads_set(int n)
{
    omp_set_num_threads(n > 0 ? n : omp_get_num_procs());
}

int qt_threads(void)
{
    return omp_get_max_threads();
}

int qt_parallel(size_t n, int (*fn)(void *ctx, size_t item, int thread, struct qt_err *err),
                void *ctx, struct qt_err *err)
{
    atomic_int stop = 0;
    size_t failed_item = n;
    int rc = QT_OK;
#pragma omp parallel for schedule(dynamic, 1) if (n > 1)
    for (size_t i = 0; i < n; i++) {
        struct qt_err local = {0};
        if (atomic_load_explicit(&stop, memory_order_relaxed))
            continue;
        int status = fn(ctx, i, omp_get_thread_num(), &local);
        if (status < 0) {
            atomic_store(&stop, 1);
#pragma omp critical(qt_parallel_error)
            if (i < failed_item) {
                failed_item = i;
                rc = status;
                if (err)
                    *err = local;
            }
        }
    }
    return rc;
}
