/* Sharing the items of a run among ranks. */
#include "pack/run.h"

#include <math.h>
#include <string.h>

/* Source bytes that a rank quantizes between two exchanges: so much is lost if a rank is killed. */
static const double round_bytes = (double)((uint64_t)1 << 29);

int qt_run_exchange(struct qt_run *run, int rc, struct qt_err *err)
{
    if (qt_comm_size(run->opt->comm) == 1)
        return rc;
    if (rc == QT_OK)
        rc = qt_run_settle(run, err);
    rc = qt_comm_meet(run->opt->comm, rc, err);
    if (rc == QT_OK)
        rc = qt_writer_exchange(run->writer, err);
    if (rc == QT_OK)
        qt_run_resume(run);
    return rc;
}

/* The next items to make: as many as all ranks make between two exchanges. Returns their number and
 * moves *at behind them. */
static size_t next_round(size_t *item, double *cost, size_t *at, struct qt_run *run,
                         const bool *later)
{
    const double most = round_bytes * (double)qt_comm_size(run->opt->comm);
    double sum = 0;
    size_t n = 0;
    for (; *at < run->plan.count && sum < most; ++*at) {
        if ((later && later[*at]) || run->made[*at])
            continue;
        item[n] = *at;
        cost[n] = (double)run->plan.items[*at].tensor->nbytes;
        sum += cost[n++];
    }
    return n;
}

int qt_run_make_items(struct qt_run *run, const bool *later, struct qt_err *err)
{
    struct qt_comm *comm = run->opt->comm;
    size_t *item = NULL, *owner = NULL, at = 0;
    double *cost = NULL;
    int rc;
    QT_TRY(qt_array_new(&item, run->plan.count, sizeof *item, err));
    QT_TRY(qt_array_new(&owner, run->plan.count, sizeof *owner, err));
    QT_TRY(qt_array_new(&cost, run->plan.count, sizeof *cost, err));
    while (at < run->plan.count) {
        const size_t n = next_round(item, cost, &at, run, later);
        QT_TRY(qt_comm_assign(owner, cost, n, qt_comm_size(comm), err));
        for (size_t i = 0; i < n && rc == QT_OK; i++)
            if (owner[i] == qt_comm_rank(comm))
                rc = qt_run_make_item(run, item[i], err);
        QT_TRY(qt_run_exchange(run, rc, err));
    }
    QT_TRY(qt_run_settle(run, err));
done:
    qt_free(item);
    qt_free(owner);
    qt_free(cost);
    return rc;
}

size_t qt_run_unit(const struct qt_packed *p, const struct qt_backend *be)
{
    return qt_spec_method(&p->spec) == QT_METHOD_GPTQ ? qt_packed_unit(p, be) : 0;
}

/* The units of all divided matrices, one matrix after the other, are divided evenly. */
static void divide_units(size_t *end, const size_t *rows, const size_t *unit, size_t n,
                         size_t ranks)
{
    size_t all = 0, at = 0, units;
    for (size_t i = 0; i < n; i++)
        all += unit[i] ? qt_ceil_div(rows[i], unit[i]) : 0;
    for (size_t i = 0; i < n; at += units, i++) {
        units = unit[i] ? qt_ceil_div(rows[i], unit[i]) : 0;
        for (size_t r = 0; r < ranks && units; r++) {
            size_t first;
            const size_t last = qt_max_size(qt_comm_share(&first, all, r, ranks), at) - at;
            end[i * ranks + r] = qt_min_size(qt_min_size(last, units) * unit[i], rows[i]);
        }
    }
}

int qt_run_divide(size_t *end, const size_t *rows, const size_t *unit, size_t n, size_t ranks,
                  struct qt_err *err)
{
    double *cost = NULL;
    size_t *owner = NULL;
    int rc;
    QT_TRY(qt_array_new(&cost, n, sizeof *cost, err));
    QT_TRY(qt_array_new(&owner, n, sizeof *owner, err));
    for (size_t i = 0; i < n; i++)
        cost[i] = unit[i] ? 0 : (double)rows[i];
    QT_TRY(qt_comm_assign(owner, cost, n, ranks, err));
    for (size_t i = 0; i < n; i++)
        for (size_t r = 0; r < ranks; r++)
            end[i * ranks + r] = r < owner[i] ? 0 : rows[i];
    divide_units(end, rows, unit, n, ranks);
done:
    qt_free(cost);
    qt_free(owner);
    return rc;
}

size_t qt_run_first_rank(const size_t *end)
{
    size_t r = 0;
    while (end[r] == 0)
        r++;
    return r;
}

/* Sends the shares of a section to the first rank. */
static void send_shares(struct qt_comm *comm, unsigned char *data, const size_t *end, size_t first)
{
    for (size_t r = first + 1; r < comm->size; r++) {
        unsigned char *share = data + end[r - 1];
        const size_t bytes = end[r] - end[r - 1];
        if (bytes && comm->rank == r)
            qt_comm_shift(comm, share, bytes, first, NULL, 0, first);
        else if (bytes && comm->rank == first)
            qt_comm_shift(comm, NULL, 0, r, share, bytes, r);
    }
}

int qt_run_join_packed(const struct qt_packed *packed, struct qt_comm *comm, const size_t *end,
                       bool to_all, struct qt_err *err)
{
    const size_t strips = qt_ceil_div(packed->n, QT_FRAG_ROWS), divided = qt_packed_divided(packed),
                 first = qt_run_first_rank(end);
    size_t *bytes = NULL;
    int rc = qt_comm_meet(comm, qt_array_new(&bytes, comm->size, sizeof *bytes, err), err);
    for (size_t i = 0; i < packed->nsections && rc == QT_OK; i++) {
        const struct qt_section *s = &packed->section[i];
        for (size_t r = 0; r < comm->size; r++)
            bytes[r] = i < divided ? qt_ceil_div(end[r], QT_FRAG_ROWS) * (s->bytes / strips)
                       : r < first ? 0
                                   : s->bytes;
        if (to_all)
            rc = qt_comm_join(comm, s->data, bytes, err);
        else
            send_shares(comm, s->data, bytes, first);
    }
    qt_free(bytes);
    return rc;
}

int qt_run_gather_seconds(struct qt_run *run, struct qt_err *err)
{
    const size_t n = run->plan.count, size = qt_comm_size(run->opt->comm);
    double *all = NULL;
    int rc = QT_OK;
    if (size == 1)
        return QT_OK;
    QT_TRY(qt_array_new(&all, n, size * sizeof *all, err));
    QT_TRY(qt_comm_gather(run->opt->comm, all, run->seconds, n * sizeof *all, err));
    for (size_t i = 0; i < n * size; i++)
        if (all[i] > 0)
            run->seconds[i % n] = all[i];
done:
    qt_free(all);
    return rc;
}

int qt_run_log_ranks(const struct qt_run *run, double seconds, struct qt_err *err)
{
    struct qt_comm *comm = run->opt->comm;
    struct spent {
        double waited, moved, bytes;
    } mine, *all = NULL, least, most;
    int rc;
    if (qt_comm_size(comm) == 1)
        return QT_OK;
    mine = least = most = (struct spent){comm->waited, comm->moved, comm->bytes};
    QT_TRY(qt_array_new(&all, comm->size, sizeof *all, err));
    QT_TRY(qt_comm_gather(comm, all, &mine, sizeof mine, err));
    for (size_t i = 0; i < comm->size; i++) {
        least.waited = fmin(least.waited, all[i].waited);
        most.waited = fmax(most.waited, all[i].waited);
        most.moved = fmax(most.moved, all[i].moved);
        most.bytes = fmax(most.bytes, all[i].bytes);
    }
    qt_log_message(run->opt->log, QT_LOG_INFO,
                   "%zu ranks: in %.1f s they waited %.1f to %.1f s for others, and moved up to "
                   "%.2f GB in %.1f s",
                   comm->size, seconds, least.waited, most.waited, most.bytes / 1e9, most.moved);
done:
    qt_free(all);
    return rc;
}
