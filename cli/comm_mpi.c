/* The ranks of mpirun or srun. MPI moves the data and does nothing else. Its functions end all
 * ranks on errors, which is its default. */
#include "cli/cli.h"

#include <mpi.h>

#include <stdlib.h>

/* Counts of MPI are ints. */
static const size_t piece = (size_t)1 << 30;

bool comm_built(void)
{
    return true;
}

static void mpi_broadcast(struct qt_comm *c, void *data, size_t bytes, size_t from)
{
    (void)c;
    for (size_t at = 0; at < bytes; at += piece)
        MPI_Bcast((char *)data + at, (int)qt_min_size(piece, bytes - at), MPI_BYTE, (int)from,
                  MPI_COMM_WORLD);
}

static void mpi_gather(struct qt_comm *c, void *all, const void *mine, size_t bytes)
{
    (void)c;
    MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
}

static void mpi_shift(struct qt_comm *c, const void *out, size_t out_bytes, size_t to, void *in,
                      size_t in_bytes, size_t from)
{
    (void)c;
    for (size_t at = 0; at < out_bytes || at < in_bytes; at += piece) {
        MPI_Request request[2];
        int n = 0;
        if (at < in_bytes)
            MPI_Irecv((char *)in + at, (int)qt_min_size(piece, in_bytes - at), MPI_BYTE, (int)from,
                      0, MPI_COMM_WORLD, &request[n++]);
        if (at < out_bytes)
            MPI_Isend((const char *)out + at, (int)qt_min_size(piece, out_bytes - at), MPI_BYTE,
                      (int)to, 0, MPI_COMM_WORLD, &request[n++]);
        MPI_Waitall(n, request, MPI_STATUSES_IGNORE);
    }
}

static void mpi_end(struct qt_comm *c, const struct qt_err *err)
{
    char text[2048];
    qt_err_format(text, sizeof text, err);
    fprintf(stderr, "qtool: rank %zu: %s\n", c->rank, text);
    MPI_Abort(MPI_COMM_WORLD, qt_exit_code(err->status));
}

static void mpi_close(struct qt_comm *c)
{
    MPI_Barrier(MPI_COMM_WORLD); /* rank 0 has printed its error before any rank ends */
    MPI_Finalize();
    qt_free(c);
}

static size_t local_rank(void)
{
    MPI_Comm host;
    int rank;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_rank(host, &rank);
    MPI_Comm_free(&host);
    return (size_t)rank;
}

int comm_open(struct qt_comm **out, struct qt_err *err)
{
    int rank, size;
    *out = NULL;
    if (!comm_wanted())
        return QT_OK;
    int rc = qt_array_new(out, 1, sizeof **out, err);
    if (rc < 0)
        return rc;
    if (MPI_Init(NULL, NULL) != MPI_SUCCESS) {
        qt_free(*out);
        *out = NULL;
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "MPI does not start");
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    **out = (struct qt_comm){.rank = (size_t)rank,
                             .size = (size_t)size,
                             .local_rank = local_rank(),
                             .broadcast = mpi_broadcast,
                             .gather = mpi_gather,
                             .shift = mpi_shift,
                             .end = mpi_end,
                             .close = mpi_close};
    return QT_OK;
}
