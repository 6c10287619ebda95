/* Scratch memory of the CPU backend, and its limit on matrix widths. */
#include "kernels/cpu/internal.h"

#include <limits.h>

int cpu_scratch_need(struct cpu_scratch *s, size_t per_thread, struct qt_err *err)
{
    size_t threads = (size_t)qt_threads(), count;
    per_thread = qt_round_up(per_thread, 16); /* a cache line belongs to one thread */
    if (qt_mul_overflow(&count, per_thread, threads))
        return qt_no_memory(err, NULL);
    s->per_thread = per_thread;
    if (count <= s->count)
        return QT_OK;
    qt_free(s->data);
    s->count = 0;
    int rc = qt_array_new(&s->data, count, sizeof *s->data, err);
    if (rc == QT_OK)
        s->count = count;
    return rc;
}

int cpu_check_width(size_t n, struct qt_err *err)
{
    if (n <= INT_MAX)
        return QT_OK;
    return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                   "a matrix has width %zu, at most %d is supported", n, INT_MAX);
}
