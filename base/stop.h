/*
 * Stopping on request. A signal handler makes the request; long work polls it and returns
 * QT_E_INTERRUPTED. qt_parallel polls before every item, so that most code need not.
 */
#ifndef QT_BASE_STOP_H
#define QT_BASE_STOP_H

#include "base/status.h"
#include <stdbool.h>

/* Asks all work of the process to stop. Async-signal-safe. */
void qt_stop_request(void);
/* True after a request; the request then counts as heard. */
bool qt_stop_requested(void);
/* QT_E_INTERRUPTED after a request. */
int qt_stop_check(struct qt_err *err);
/* True if a request was made and some work has seen it. Async-signal-safe. */
bool qt_stop_heard(void);
/* For tests: takes the request back. */
void qt_stop_reset(void);

#endif
