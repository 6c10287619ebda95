#include "base/stop.h"

#include <stdatomic.h>
#include <stddef.h>

/* Global because a signal handler has no context, and a request concerns the whole process. */
static atomic_int state;

enum { RUNNING, REQUESTED, HEARD };

_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "a signal handler may only use lock-free atomics");

void qt_stop_request(void)
{
    int expected = RUNNING;
    atomic_compare_exchange_strong(&state, &expected, REQUESTED);
}

bool qt_stop_requested(void)
{
    if (atomic_load_explicit(&state, memory_order_relaxed) == RUNNING)
        return false;
    atomic_store(&state, HEARD);
    return true;
}

int qt_stop_check(struct qt_err *err)
{
    return qt_stop_requested() ? qt_fail(err, QT_E_INTERRUPTED, NULL, NULL, "interrupted") : QT_OK;
}

bool qt_stop_heard(void)
{
    return atomic_load(&state) == HEARD;
}

void qt_stop_reset(void)
{
    atomic_store(&state, RUNNING);
}
