/* Replaces comm_mpi.c in builds without MPI: a process that mpirun started refuses to work, because
 * every rank would do all of it. */
#include "cli/cli.h"

#include <stdlib.h>

bool comm_built(void)
{
    return false;
}

int comm_open(struct qt_comm **out, struct qt_err *err)
{
    *out = NULL;
    return comm_wanted() ? qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                                   "started as one of several ranks, but this qtool was built "
                                   "without MPI (docs/cluster.md)")
                         : QT_OK;
}
