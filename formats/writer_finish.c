#include "formats/writer_internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

static int check_complete(const struct qt_writer *w, struct qt_err *err)
{
    for (size_t i = 0; i < w->count; i++) {
        const struct qt_planned_tensor *p = &w->places[i];
        if (p->size != 0 && !p->committed)
            return qt_writer_contradiction(w, p->name, "was never committed", err);
    }
    return QT_OK;
}

static int write_index(const struct qt_writer *w, struct qt_err *err)
{
    struct qt_json_out out;
    json_t *head = NULL, *file = NULL;
    uint64_t total = 0;
    int rc;
    for (size_t i = 0; i < w->count; i++)
        total += w->places[i].size;
    QT_TRY(qt_json_out_open(&out, w->out.partial, QT_INDEX_NAME, err));
    head = json_pack("{s:{s:I}}", "metadata", "total_size", (json_int_t)total);
    QT_TRY(head ? QT_OK : qt_no_memory(err, w->out.dir));
    QT_TRY(qt_json_out_members(&out, head, err));
    QT_TRY(qt_json_out_begin(&out, "weight_map", '{', err));
    for (size_t i = 0; i < w->count; i++) {
        file = json_string(qt_base_name(w->shards[w->places[i].shard].path));
        QT_TRY(file ? QT_OK : qt_no_memory(err, w->out.dir));
        QT_TRY(qt_json_out_value(&out, w->places[i].name, file, err));
        json_decref(file);
        file = NULL;
    }
    QT_TRY(qt_json_out_end(&out, err));
    QT_TRY(qt_json_out_finish(&out, err));
done:
    qt_json_out_close(&out);
    json_decref(head);
    json_decref(file);
    return rc;
}

/* Drops the cached pages, so that what follows reads the disk if the kernel follows the advice. */
static int drop_cached(const struct qt_writer *w, struct qt_err *err)
{
    int fd, rc = QT_OK;
    for (size_t i = 0; i < w->nshards && rc == QT_OK; i++) {
        rc = qt_file_open(&fd, w->shards[i].path, err);
        if (rc < 0)
            break;
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    return rc;
}

/* Opens and checks the container like a reader. */
static int read_back(const struct qt_writer *w, struct qt_err *err)
{
    struct qt_container *c = NULL;
    struct qt_err why = {0};
    int rc = qt_container_open(&c, w->out.partial, &why);
    if (rc == QT_OK)
        rc = qt_container_check_crcs(c, &why);
    if (rc == QT_E_RESOURCE || rc == QT_E_INTERRUPTED) {
        if (err)
            *err = why;
    } else if (rc < 0 && c) {
        rc = qt_fail(err, QT_E_RESOURCE, why.file, why.tensor,
                     "data read back differs from what was written (%s); run again with --force, "
                     "not --resume",
                     why.reason);
    } else if (rc < 0) {
        char what[sizeof why.reason + 40];
        snprintf(what, sizeof what, "the written container does not open: %s", why.reason);
        rc = qt_writer_contradiction(w, why.tensor, what, err);
    }
    qt_container_close(c);
    return rc;
}

int qt_writer_begin_manifest(struct qt_json_out *out, struct qt_writer *w, struct qt_err *err)
{
    int rc;
    *out = (struct qt_json_out){.fd = -1};
    QT_TRY(qt_comm_meet(w->opt.comm, QT_OK, err)); /* before that a rank could fail */
    if (!qt_writer_owns(w))
        return QT_OK;
    QT_TRY(check_complete(w, err));
    QT_TRY(qt_writer_drop_progress(w, err));
    if (w->nshards > 1)
        QT_TRY(write_index(w, err));
    QT_TRY(qt_json_out_open(out, w->out.partial, QT_MANIFEST_NAME, err));
done:
    return rc;
}

static int finish(struct qt_writer *w, struct qt_err *err)
{
    struct qt_checksums *checksums = NULL;
    int rc;
    QT_TRY(drop_cached(w, err));
    QT_TRY(qt_running_hashes_settle(w->running, err));
    QT_TRY(qt_checksums_start(&checksums, w->out.partial, w->unlisted, w->running, err));
    QT_TRY(read_back(w, err));
    QT_TRY(qt_checksums_write(checksums, err));
    QT_TRY(qt_dir_sync(w->out.partial, err));
    QT_TRY(qt_outdir_publish(&w->out, err));
done:
    qt_checksums_close(checksums);
    return rc;
}

int qt_writer_finish(struct qt_writer *w, struct qt_err *err)
{
    return qt_comm_meet(w->opt.comm, qt_writer_owns(w) ? finish(w, err) : QT_OK, err);
}

void qt_writer_discard(struct qt_writer *w)
{
    if (w)
        qt_outdir_discard(&w->out);
}

void qt_writer_close(struct qt_writer *w)
{
    if (!w)
        return;
    qt_running_hashes_close(w->running);
    for (size_t i = 0; w->shards && i < w->nshards; i++) {
        if (w->shards[i].fd >= 0)
            close(w->shards[i].fd);
        qt_free(w->shards[i].path);
        qt_free(w->shards[i].header);
    }
    for (size_t i = 0; i < w->count; i++)
        qt_free(w->places[i].name);
    json_decref(w->unlisted);
    json_decref(w->news);
    qt_journal_close(&w->journal);
    qt_outdir_close(&w->out);
    qt_free(w->shards);
    qt_free(w->places);
    qt_free(w->touched);
    qt_free(w);
}
