#include "base/comm.h"

#include "base/backend.h"
#include "base/log.h"
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

/* Puts the number of the rank before the reason. */
static void name_rank(struct qt_err *err, size_t rank)
{
    const struct qt_err copy = *err;
    qt_fail_record(err, copy.status, copy.file[0] ? copy.file : NULL, copy.tensor, "rank %zu: %s",
                   rank, copy.reason);
}

int qt_comm_meet(struct qt_comm *c, int rc, struct qt_err *err)
{
    struct qt_err record = {.status = QT_E_INTERNAL};
    int *all;
    size_t failed = 0, first = 0;
    if (!c || c->size == 1 || c->over)
        return rc;
    if (rc < 0 && err)
        record = *err;
    /* A rank without these few bytes cannot even say so; then the whole run ends. */
    if (qt_array_new(&all, c->size, sizeof *all, &record) < 0)
        abort();
    const double start = qt_clock();
    c->gather(c, all, &rc, sizeof rc);
    c->waited += qt_clock() - start;
    for (size_t i = c->size; i-- > 0;)
        if (all[i] < 0) {
            failed++;
            first = i;
        }
    rc = all[first];
    qt_free(all);
    if (failed == 0)
        return QT_OK;
    c->broadcast(c, &record, sizeof record, first);
    if (failed < c->size)
        name_rank(&record, first);
    c->over = true;
    if (err)
        *err = record;
    return rc;
}

static void broadcast(struct qt_comm *c, void *data, size_t bytes, size_t from)
{
    const double start = qt_clock();
    c->broadcast(c, data, bytes, from);
    c->moved += qt_clock() - start;
    c->bytes += (double)bytes;
}

void qt_comm_shift(struct qt_comm *c, const void *out, size_t out_bytes, size_t to, void *in,
                   size_t in_bytes, size_t from)
{
    const double start = qt_clock();
    c->shift(c, out, out_bytes, to, in, in_bytes, from);
    c->moved += qt_clock() - start;
    c->bytes += (double)out_bytes + (double)in_bytes;
}

int qt_comm_broadcast(struct qt_comm *c, void *data, size_t bytes, size_t from, struct qt_err *err)
{
    int rc = qt_comm_meet(c, QT_OK, err);
    if (rc == QT_OK && qt_comm_size(c) > 1)
        broadcast(c, data, bytes, from);
    return rc;
}

/* Through host memory, in pieces. */
static int broadcast_staged(struct qt_comm *c, struct qt_backend *be, char *data, size_t bytes,
                            size_t from, struct qt_err *err)
{
    const size_t piece = (size_t)1 << 26;
    double start;
    char *host = NULL;
    int rc = qt_array_new(&host, qt_min_size(piece, bytes), 1, err);
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t n = qt_min_size(piece, bytes - at);
        start = qt_clock();
        if (rc == QT_OK && c->rank == from)
            rc = be->download(be, host, data + at, n, err);
        c->moved += qt_clock() - start;
        QT_TRY(qt_comm_meet(c, rc, err));
        broadcast(c, host, n, from);
        start = qt_clock();
        if (c->rank != from)
            rc = be->upload(be, data + at, host, n, err);
        c->moved += qt_clock() - start;
    }
    rc = qt_comm_meet(c, rc, err);
done:
    qt_free(host);
    return rc;
}

int qt_comm_broadcast_on(struct qt_comm *c, struct qt_backend *be, void *data, size_t bytes,
                         size_t from, struct qt_err *err)
{
    int rc = qt_comm_meet(c, QT_OK, err);
    if (rc < 0 || qt_comm_size(c) == 1)
        return rc;
    if (be->host)
        broadcast(c, data, bytes, from);
    else if (!be->linked)
        return broadcast_staged(c, be, data, bytes, from, err);
    else {
        const double start = qt_clock();
        rc = be->broadcast(be, data, bytes, from, err);
        c->moved += qt_clock() - start;
        c->bytes += (double)bytes;
    }
    return rc;
}

int qt_comm_shift_on(struct qt_comm *c, struct qt_backend *be, const void *out, size_t out_bytes,
                     size_t to, void *in, size_t in_bytes, size_t from, struct qt_err *err)
{
    const double start = qt_clock();
    int rc = be->shift(be, out, out_bytes, to, in, in_bytes, from, err);
    c->moved += qt_clock() - start;
    c->bytes += (double)out_bytes + (double)in_bytes;
    return rc;
}

int qt_comm_gather(struct qt_comm *c, void *all, const void *mine, size_t bytes, struct qt_err *err)
{
    int rc = qt_comm_meet(c, QT_OK, err);
    if (rc < 0)
        return rc;
    if (qt_comm_size(c) > 1)
        c->gather(c, all, mine, bytes);
    else
        memcpy(all, mine, bytes);
    return QT_OK;
}

int qt_comm_collect(struct qt_comm *c, char **all, size_t *sizes, const void *mine, size_t bytes,
                    struct qt_err *err)
{
    size_t total = 1;
    int rc = qt_comm_gather(c, sizes, &bytes, sizeof bytes, err);
    *all = NULL;
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < qt_comm_size(c); i++)
        total += sizes[i];
    rc = qt_comm_meet(c, qt_array_new(all, total, 1, err), err);
    for (size_t i = 0, at = 0; rc == QT_OK && i < qt_comm_size(c); at += sizes[i++]) {
        if (i == qt_comm_rank(c) && bytes)
            memcpy(*all + at, mine, bytes);
        if (qt_comm_size(c) > 1 && sizes[i])
            broadcast(c, *all + at, sizes[i], i);
    }
    if (rc < 0) {
        qt_free(*all);
        *all = NULL;
    }
    return rc;
}

int qt_comm_join(struct qt_comm *c, void *all, const size_t *end, struct qt_err *err)
{
    int rc = qt_comm_meet(c, QT_OK, err);
    for (size_t i = 0, at = 0; rc == QT_OK && qt_comm_size(c) > 1 && i < c->size; at = end[i++])
        if (end[i] > at)
            broadcast(c, (char *)all + at, end[i] - at, i);
    return rc;
}

size_t qt_comm_share(size_t *first, size_t n, size_t rank, size_t size)
{
    const size_t each = n / size, more = n % size;
    *first = rank * each + qt_min_size(rank, more);
    return *first + each + (rank < more);
}

struct job {
    double cost;
    size_t index;
};

/* Most expensive first. */
static int compare_jobs(const void *a, const void *b)
{
    const struct job *x = a, *y = b;
    if (x->cost != y->cost)
        return x->cost > y->cost ? -1 : 1;
    return (x->index > y->index) - (x->index < y->index);
}

int qt_comm_assign(size_t *owner, const double *cost, size_t n, size_t size, struct qt_err *err)
{
    struct job *jobs = NULL;
    double *work = NULL;
    int rc;
    QT_TRY(qt_array_new(&jobs, n, sizeof *jobs, err));
    QT_TRY(qt_array_new(&work, size, sizeof *work, err));
    for (size_t i = 0; i < n; i++)
        jobs[i] = (struct job){cost[i], i};
    qsort(jobs, n, sizeof *jobs, compare_jobs);
    for (size_t i = 0; i < n; i++) {
        size_t least = 0;
        for (size_t r = 1; r < size; r++)
            if (work[r] < work[least])
                least = r;
        owner[jobs[i].index] = least;
        work[least] += jobs[i].cost;
    }
done:
    qt_free(jobs);
    qt_free(work);
    return rc;
}
