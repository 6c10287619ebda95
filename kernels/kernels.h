/*
 * kernels: the backends behind struct qt_backend.
 */
#ifndef QT_KERNELS_H
#define QT_KERNELS_H

#include "base/base.h"

/* OpenBLAS + OpenMP. Uses the threads of qt_threads_set. Close with be->close(be). */
int qt_backend_cpu_open(struct qt_backend **out, struct qt_err *err);

#endif
