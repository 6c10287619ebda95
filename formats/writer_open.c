#include "formats/writer_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static int make_shard(const struct qt_planned_shard *s, struct qt_err *err)
{
    int fd, rc;
    QT_TRY(qt_file_create(&fd, s->path, false, err));
    rc = qt_file_reserve(fd, s->path, s->size, err);
    if (rc == QT_OK)
        rc = qt_file_write_at(fd, s->path, s->header, s->header_size, 0, err);
    if (rc == QT_OK)
        return qt_file_finish(&fd, s->path, err);
    close(fd);
done:
    return rc;
}

static bool keep_journal(const void *writer, const char *name)
{
    (void)writer;
    return strcmp(name, QT_JOURNAL_NAME) == 0;
}

/* Does not keep side files: each run copies them again, so that no obsolete side file stays. */
static bool keep_progress(const void *writer, const char *name)
{
    return strcmp(name, QT_JOURNAL_NAME) == 0 || qt_progress_file(name) ||
           qt_writer_is_shard(writer, name);
}

/* Hours of work are not deleted by accident. */
static int check_unfinished(const struct qt_writer *w, struct qt_err *err)
{
    char *path;
    bool saved = false;
    size_t units;
    int rc = qt_journal_count(&units, &w->journal, err);
    for (int i = 0; i < QT_PROGRESS_KINDS && rc == QT_OK && !saved; i++) {
        rc = qt_path_join(&path, w->out.partial, qt_progress_names[i], err);
        if (rc == QT_OK)
            saved = qt_path_exists(path);
        qt_free(path);
    }
    if (rc == QT_OK && (units || saved))
        rc = qt_fail(err, QT_E_USAGE, w->out.partial, NULL,
                     "an interrupted run left %zu finished tensors here: --resume continues that "
                     "run, --force deletes them",
                     units);
    return rc;
}

int qt_writer_check(const char *dir, const struct qt_writer_options *opt, struct qt_err *err)
{
    struct qt_writer w = {.opt = *opt, .journal.fd = -1};
    int rc, fd = -1;
    QT_TRY(qt_outdir_open(&w.out, dir, &w.opt, err));
    QT_TRY(qt_journal_open(&w.journal, w.out.partial, false, err));
    fd = open(w.journal.path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        goto done; /* there is no OUT.partial, or it is refused later */
    /* Shared: other ranks check at the same time. */
    if (flock(fd, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK)
        rc = qt_fail(err, QT_E_RESOURCE, w.out.partial, NULL, "in use by another process");
    else if (!opt->force && !opt->resume)
        rc = check_unfinished(&w, err);
done:
    if (fd >= 0)
        close(fd);
    qt_journal_close(&w.journal);
    qt_outdir_close(&w.out);
    return rc;
}

static int start_over(struct qt_writer *w, const char *digest, const json_t *identity,
                      struct qt_err *err)
{
    int rc;
    w->scrap = true;
    QT_TRY(qt_journal_clear(&w->journal, err));
    QT_TRY(qt_outdir_clear(&w->out, keep_journal, w, err));
    for (size_t i = 0; i < w->nshards; i++)
        QT_TRY(make_shard(&w->shards[i], err));
    QT_TRY(qt_dir_sync(w->out.partial, err));
    QT_TRY(qt_journal_start(&w->journal, digest, identity, err));
    w->scrap = false;
done:
    return rc;
}

/* Checks the size and header of a shard. The data needs no check: it was synced before its journal
 * line, and readers check its CRCs. */
static int check_shard(const struct qt_planned_shard *s, struct qt_err *err)
{
    struct stat st;
    struct qt_map map;
    if (lstat(s->path, &st) < 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size != s->size)
        return qt_fail(err, QT_E_RESUME, s->path, NULL,
                       "cannot resume: the file is missing or has changed; run again with "
                       "--force, not --resume");
    int rc = qt_map_open(&map, s->path, err);
    if (rc < 0)
        return rc;
    if (map.size != s->size || memcmp(map.data, s->header, s->header_size) != 0)
        rc = qt_fail(
            err, QT_E_RESOURCE, s->path, NULL,
            "header read back differs from what was written; run again with --force, not --resume");
    qt_map_close(&map);
    return rc;
}

static int mark_all_committed(struct qt_writer *w, struct qt_err *err)
{
    const char *unit;
    json_t *place;
    int rc = QT_OK;
    json_object_foreach (w->journal.units, unit, place) {
        if ((rc = qt_writer_mark(w, unit, err)) < 0)
            return rc;
    }
    return rc;
}

static int continue_earlier(struct qt_writer *w, struct qt_err *err)
{
    int rc;
    for (size_t i = 0; i < w->nshards; i++)
        if ((rc = check_shard(&w->shards[i], err)) < 0)
            return rc;
    rc = mark_all_committed(w, err);
    return rc < 0 ? rc : qt_outdir_clear(&w->out, keep_progress, w, err);
}

/* Gives all ranks the text of rank 0, whose status is rc. The caller frees *text, in every rank. */
static int share_text(struct qt_writer *w, char **text, size_t *size, int rc, struct qt_err *err)
{
    struct qt_comm *comm = w->opt.comm;
    QT_TRY(qt_comm_meet(comm, rc, err));
    QT_TRY(qt_comm_broadcast(comm, size, sizeof *size, 0, err));
    if (!qt_writer_owns(w))
        rc = qt_array_new(text, *size + 1, 1, err);
    QT_TRY(qt_comm_meet(comm, rc, err));
    rc = qt_comm_broadcast(comm, *text, *size, 0, err);
done:
    return rc;
}

/* QT_E_INPUT, naming the rank and the difference, unless all ranks would write the same. */
static int check_same(struct qt_writer *w, const char *digest, const json_t *identity,
                      struct qt_err *err)
{
    char *text = NULL;
    size_t size = 0;
    struct qt_err why = {0};
    json_t *here = NULL, *there = NULL;
    int rc;
    here = json_pack("{s:O, s:s}", "identity", identity, "plan", digest);
    rc = here ? QT_OK : qt_no_memory(err, w->out.dir);
    if (rc == QT_OK && qt_writer_owns(w))
        rc = qt_json_text(&text, &size, here, JSON_COMPACT, err);
    QT_TRY(share_text(w, &text, &size, rc, err));
    rc = qt_json_parse(&there, text, size, w->out.dir, err);
    if (rc == QT_OK && qt_identity_check(there, here, NULL, &why) < 0)
        rc = qt_fail(err, QT_E_INPUT, w->out.dir, NULL, "has another input than rank 0: %s",
                     strchr(why.reason, ':') ? strchr(why.reason, ':') + 2 : why.reason);
    rc = qt_comm_meet(w->opt.comm, rc, err);
done:
    json_decref(here);
    json_decref(there);
    qt_free(text);
    return rc;
}

/* Rank 0 tells the others which units an earlier run finished. */
static int share_units(struct qt_writer *w, struct qt_err *err)
{
    char *text = NULL;
    size_t size = 0;
    int rc = QT_OK;
    if (qt_writer_owns(w))
        rc = qt_journal_text(&text, &size, &w->journal, err);
    QT_TRY(share_text(w, &text, &size, rc, err));
    QT_TRY(qt_comm_broadcast(w->opt.comm, &w->resumed, sizeof w->resumed, 0, err));
    if (!qt_writer_owns(w)) {
        QT_TRY(qt_journal_take(&w->journal, text, size, err));
        rc = mark_all_committed(w, err);
    }
done:
    qt_free(text);
    return rc;
}

/* Takes DIR.partial, empty or as an earlier run left it. */
static int take(struct qt_writer *w, const char *digest, const json_t *identity, struct qt_err *err)
{
    bool found = false;
    int rc;
    QT_TRY(qt_outdir_take(&w->out, err));
    QT_TRY(
        qt_outdir_check_finished(&w->out, QT_MANIFEST_NAME, identity, "a complete container", err));
    w->scrap = w->out.empty;
    QT_TRY(qt_journal_open(&w->journal, w->out.partial, true, err));
    QT_TRY(qt_outdir_lock(w->journal.fd, w->journal.path, err));
    if (w->opt.resume)
        QT_TRY(qt_journal_load(&found, &w->journal, digest, identity, err));
    else if (!w->opt.force)
        QT_TRY(check_unfinished(w, err));
    QT_TRY(found ? continue_earlier(w, err) : start_over(w, digest, identity, err));
    w->resumed = found;
done:
    return rc;
}

int qt_writer_open(struct qt_writer **out, const char *dir, const struct qt_tensor *tensors,
                   size_t n, const json_t *identity, const struct qt_writer_options *opt,
                   struct qt_err *err)
{
    struct qt_writer *w;
    char *digest = NULL;
    *out = NULL;
    int rc = qt_array_new(&w, 1, sizeof *w, err);
    if (rc < 0)
        return rc;
    w->journal.fd = -1;
    w->opt = *opt;
    w->unlisted = json_pack("{s:b, s:b}", QT_JOURNAL_NAME, true, QT_CHECKSUMS_NAME, true);
    if (!w->unlisted) {
        qt_free(w);
        return qt_no_memory(err, dir);
    }
    if (qt_comm_size(opt->comm) > 1 && !(w->news = json_array())) {
        rc = qt_no_memory(err, dir);
        goto done;
    }
    QT_TRY(qt_outdir_open(&w->out, dir, &w->opt, err));
    QT_TRY(qt_writer_plan(w, tensors, n, opt->max_shard_bytes, err));
    QT_TRY(qt_writer_plan_digest(&digest, w, err));
    if (qt_comm_size(opt->comm) > 1)
        QT_TRY(check_same(w, digest, identity, err));
    rc = qt_writer_owns(w) ? take(w, digest, identity, err)
                           : qt_journal_open(&w->journal, w->out.partial, false, err);
    if (rc == QT_OK && qt_comm_size(opt->comm) > 1)
        rc = share_units(w, err);
    if (rc == QT_OK && qt_comm_size(opt->comm) == 1)
        rc = qt_running_hashes_open(&w->running, w, err);
    if (rc < 0)
        goto done;
    *out = w;
done:
    qt_free(digest);
    if (rc < 0) {
        if (w->scrap)
            qt_writer_discard(w);
        qt_writer_close(w);
    }
    return rc;
}
