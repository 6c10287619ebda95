/*
 * Adds calibration files. Their statistics are sums over tokens, so that files of one model can be
 * added. The files are added in the order of their checksums: FP64 sums round, and the result must
 * not depend on the order of the arguments. Ranks take the inputs in turn; rank 0 writes.
 */
#include "calib/calib.h"

#include <stdlib.h>
#include <string.h>

struct merge {
    struct qt_qcal **files;
    size_t count;
    struct qt_qcal_part *parts; /* of all files */
    size_t nparts;
};

static int compare_files(const void *a, const void *b)
{
    uint32_t x = qt_qcal_crc(*(struct qt_qcal *const *)a);
    uint32_t y = qt_qcal_crc(*(struct qt_qcal *const *)b);
    return (x > y) - (x < y);
}

static int open_files(struct merge *m, const char *const *paths, size_t n, struct qt_err *err)
{
    int rc;
    QT_TRY(qt_array_new(&m->files, n, sizeof(struct qt_qcal *), err));
    for (; m->count < n; m->count++) {
        QT_TRY(qt_qcal_open(&m->files[m->count], paths[m->count], err));
        QT_TRY(qt_qcal_check_model(m->files[m->count], qt_qcal_info(m->files[0]), paths[0], err));
    }
    qsort(m->files, n, sizeof(struct qt_qcal *), compare_files);
done:
    return rc;
}

/* True if the model saw the same tokens, whatever the settings and file names. */
static bool same_windows(const struct qt_qcal_part *a, const struct qt_qcal_part *b)
{
    return a->ids_crc == b->ids_crc && a->samples == b->samples && a->seqlen == b->seqlen;
}

static int add_part(struct merge *m, const struct qt_qcal *file, const struct qt_qcal_part *part,
                    struct qt_err *err)
{
    for (size_t i = 0; i < m->nparts; i++)
        if (same_windows(&m->parts[i], part))
            return qt_fail(err, QT_E_USAGE, qt_qcal_path(file), NULL,
                           "its windows of %s are also in another of the files; they would count "
                           "twice",
                           part->data[0]);
    m->parts[m->nparts++] = *part;
    return QT_OK;
}

static int collect_parts(struct merge *m, struct qt_err *err)
{
    size_t n = 0;
    int rc;
    for (size_t f = 0; f < m->count; f++)
        n += qt_qcal_info(m->files[f])->nparts;
    QT_TRY(qt_array_new(&m->parts, n, sizeof *m->parts, err));
    for (size_t f = 0; f < m->count; f++) {
        const struct qt_qcal_info *info = qt_qcal_info(m->files[f]);
        for (size_t i = 0; i < info->nparts; i++)
            QT_TRY(add_part(m, m->files[f], &info->parts[i], err));
    }
done:
    return rc;
}

static void add_channels(struct qt_channels *sum, const struct qt_channels *c, size_t k)
{
    for (size_t j = 0; j < k; j++) {
        sum->absmax[j] = c->absmax[j] > sum->absmax[j] ? c->absmax[j] : sum->absmax[j];
        sum->sum2[j] += c->sum2[j];
    }
    for (size_t j = 0; j < k * QT_HIST_BINS; j++)
        sum->hist[j] += c->hist[j]; /* the tokens of all files are fewer than 2^32 */
}

static void add_lower(double *sum, const double *h, size_t k)
{
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j <= i; j++)
            sum[i * k + j] += h[i * k + j];
}

static int check_interrupted(const struct qt_calibrate_options *opt, const char *path,
                             struct qt_err *err)
{
    return opt->interrupted && opt->interrupted()
               ? qt_fail(err, QT_E_INTERRUPTED, path, NULL, "interrupted; no file was written")
               : QT_OK;
}

/* The sums of an input. */
struct merged {
    size_t k;
    double *h;
    struct qt_channels c;
};

static void merged_free(struct merged *sum)
{
    qt_channels_free(&sum->c);
    qt_free(sum->h);
}

static int merged_new(struct merged *sum, size_t k, struct qt_err *err)
{
    int rc;
    *sum = (struct merged){.k = k};
    QT_TRY(qt_channels_new(&sum->c, k, err));
    QT_TRY(qt_array_new(&sum->h, k, k * sizeof *sum->h, err));
done:
    return rc;
}

/* An input of a layer. */
struct place {
    size_t layer, input;
};

/* Adds up the files. */
static int merge_input(struct merged *sum, const struct merge *m, struct place at,
                       const struct qt_calibrate_options *opt, const char *path, struct qt_err *err)
{
    const size_t k = sum->k, layer = at.layer, input = at.input;
    struct qt_channels c = {0};
    double *h = NULL;
    int rc;
    QT_TRY(qt_array_new(&h, k, k * sizeof *h, err));
    for (size_t f = 0; f < m->count; f++) {
        QT_TRY(check_interrupted(opt, path, err));
        QT_TRY(qt_qcal_channels(&c, m->files[f], layer, input, err));
        QT_TRY(qt_qcal_hessian(h, m->files[f], layer, input, c.sum2, err));
        add_channels(&sum->c, &c, k);
        add_lower(sum->h, h, k);
        qt_channels_free(&c);
    }
done:
    qt_channels_free(&c);
    qt_free(h);
    return rc;
}

/* Moves the sums of rank `from` to rank 0. */
static void send_merged(struct merged *sum, struct qt_comm *comm, size_t from)
{
    const struct {
        void *data;
        size_t bytes;
    } part[] = {{sum->h, sum->k * sum->k * sizeof *sum->h},
                {sum->c.absmax, sum->k * sizeof *sum->c.absmax},
                {sum->c.sum2, sum->k * sizeof *sum->c.sum2},
                {sum->c.hist, sum->k * QT_HIST_BINS * sizeof *sum->c.hist}};
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        if (comm->rank == from)
            qt_comm_shift(comm, part[i].data, part[i].bytes, 0, NULL, 0, 0);
        else if (comm->rank == 0)
            qt_comm_shift(comm, NULL, 0, from, part[i].data, part[i].bytes, from);
}

/* Merges up to one input per rank, [at, at + n); rank 0 writes them. */
static int merge_round(struct qt_qcal_writer *w, const struct merge *m, const struct place *at,
                       size_t n, const struct qt_calibrate_options *opt, const char *path,
                       struct qt_err *err)
{
    const struct qt_qcal_layer *layers = qt_qcal_info(m->files[0])->layer;
    const size_t rank = qt_comm_rank(opt->comm);
    int rc = QT_OK;
    struct merged sum = {0};
    if (rank < n)
        rc = merged_new(&sum, layers[at[rank].layer].k[at[rank].input], err);
    if (rc == QT_OK && rank < n)
        rc = merge_input(&sum, m, at[rank], opt, path, err);
    for (size_t i = 0; i < n; i++) {
        if (i > 0 && rank == 0 && rc == QT_OK) {
            merged_free(&sum);
            rc = merged_new(&sum, layers[at[i].layer].k[at[i].input], err);
        }
        QT_TRY(qt_comm_meet(opt->comm, rc, err));
        if (i > 0)
            send_merged(&sum, opt->comm, i);
        if (rank == 0)
            rc = qt_qcal_put(w, at[i].layer, at[i].input, sum.h, &sum.c, qt_qcal_path(m->files[0]),
                             err);
    }
done:
    merged_free(&sum);
    return rc;
}

/* Merges all inputs of all layers. */
static int merge_inputs(struct qt_qcal_writer *w, const struct merge *m,
                        const struct qt_calibrate_options *opt, const char *path,
                        struct qt_err *err)
{
    const struct qt_qcal_info *info = qt_qcal_info(m->files[0]);
    const size_t ranks = qt_comm_size(opt->comm);
    struct place *at = NULL;
    size_t n = 0;
    int rc;
    for (size_t l = 0; l < info->layers; l++)
        n += info->layer[l].inputs;
    QT_TRY(qt_array_new(&at, n, sizeof *at, err));
    n = 0;
    for (size_t l = 0; l < info->layers; l++)
        for (size_t i = 0; i < info->layer[l].inputs; i++)
            at[n++] = (struct place){l, i};
    for (size_t i = 0; i < n; i += ranks) {
        QT_TRY(merge_round(w, m, at + i, qt_min_size(ranks, n - i), opt, path, err));
        qt_log_progress(opt->log, "merge", (double)qt_min_size(i + ranks, n), (double)n);
    }
done:
    qt_free(at);
    return rc;
}

/* Adds the numbers of tokens that chose each expert of a layer. */
static int merge_routed(struct qt_qcal_writer *w, const struct merge *m, size_t layer,
                        struct qt_err *err)
{
    const size_t experts = qt_qcal_info(m->files[0])->layer[layer].experts;
    uint32_t *sum = NULL, *routed = NULL;
    int rc;
    if (!experts)
        return QT_OK;
    QT_TRY(qt_array_new(&sum, experts, sizeof *sum, err));
    QT_TRY(qt_array_new(&routed, experts, sizeof *routed, err));
    for (size_t f = 0; f < m->count; f++) {
        QT_TRY(qt_qcal_routed(routed, m->files[f], layer, err));
        for (size_t e = 0; e < experts; e++)
            sum[e] += routed[e];
    }
    QT_TRY(qt_qcal_put_routed(w, layer, sum, err));
done:
    qt_free(sum);
    qt_free(routed);
    return rc;
}

int qt_calibrate_merge(const char *path, const char *const *paths, size_t n,
                       const struct qt_calibrate_options *opt, struct qt_err *err)
{
    const bool writes = qt_comm_rank(opt->comm) == 0;
    struct merge m = {0};
    struct qt_qcal_writer *w = NULL;
    struct qt_qcal_info info;
    int rc;
    QT_TRY(open_files(&m, paths, n, err));
    QT_TRY(collect_parts(&m, err));
    info = *qt_qcal_info(m.files[0]);
    info.parts = m.parts;
    info.nparts = m.nparts;
    if (writes)
        QT_TRY(qt_qcal_create(&w, path, &info, opt->force, err));
    QT_TRY(merge_inputs(w, &m, opt, path, err));
    for (size_t l = 0; l < info.layers && writes; l++)
        QT_TRY(merge_routed(w, &m, l, err));
    if (writes)
        QT_TRY(qt_qcal_finish(w, err));
done:
    qt_qcal_abandon(w);
    for (size_t f = 0; m.files && f < n; f++)
        qt_qcal_close(m.files[f]);
    qt_free(m.files);
    qt_free(m.parts);
    return rc;
}
