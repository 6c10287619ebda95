#include "formats/writer_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t default_shard_bytes = (uint64_t)4 << 30;

/* A safetensors file of the plan. */
struct shard {
    char *path;
    int fd; /* open while it has unsynced data, else -1 */
    uint64_t size;
    char *header;
    size_t header_size;
};

/* A tensor of the plan. */
struct place {
    char *name;
    size_t shard;
    uint64_t offset; /* of the data in the shard */
    uint64_t size, written;
    bool committed;
};

struct qt_writer {
    struct qt_writer_options opt;
    struct qt_outdir out;
    struct qt_journal journal;
    json_t *unlisted; /* names of files that SHA256SUMS does not list */
    bool scrap;       /* DIR.partial holds nothing to resume from yet */
    bool resumed;     /* the journal has records of an earlier run */
    struct shard *shards;
    size_t nshards;
    struct place *places;
    size_t count;
    size_t *touched; /* tensors written since the last commit */
    size_t ntouched;
    json_t *news; /* with several ranks: lines of the units of this rank that others do not know */
};

/* Rank 0 owns DIR.partial: it creates and removes files, holds the locks and the journal, and
 * finishes. The other ranks only write tensors, at the same offsets. */
static bool owns(const struct qt_writer *w)
{
    return qt_comm_rank(w->opt.comm) == 0;
}

/* ---- plan ----------------------------------------------------------------------------------- */

/* Assigns tensors in order, and starts a new shard where the next tensor would exceed the limit. */
static int assign_shards(struct qt_writer *w, const struct qt_tensor *tensors, uint64_t limit,
                         struct qt_err *err)
{
    uint64_t used = 0;
    size_t shard = 0, first = 0;
    for (size_t i = 0; i < w->count; i++) {
        uint64_t size = tensors[i].nbytes;
        if (i > first && (used > limit || size > limit - used)) {
            shard++;
            first = i;
            used = 0;
        }
        used += size;
        w->places[i].shard = shard;
        w->places[i].size = size;
        int rc = qt_string_copy(&w->places[i].name, tensors[i].name, err);
        if (rc < 0)
            return rc;
    }
    w->nshards = shard + 1;
    return QT_OK;
}

static int name_shard(struct qt_writer *w, size_t i, struct qt_err *err)
{
    char name[QT_WEIGHT_FILE_NAME];
    qt_weight_file_name(name, i, w->nshards, "safetensors");
    return qt_path_join(&w->shards[i].path, w->out.partial, name, err);
}

/* Plans the header and offsets of shard i, which holds tensors [first, first + n). */
static int plan_shard(struct qt_writer *w, size_t i, const struct qt_tensor *tensors, size_t first,
                      size_t n, const json_t *metadata, struct qt_err *err)
{
    struct shard *s = &w->shards[i];
    uint64_t *offsets = NULL;
    int rc;
    QT_TRY(name_shard(w, i, err));
    QT_TRY(qt_array_new(&offsets, n + 1, sizeof *offsets, err));
    QT_TRY(qt_safetensors_header(&s->header, &s->header_size, offsets, tensors + first, n, metadata,
                                 err));
    for (size_t k = 0; k < n; k++) {
        struct place *p = &w->places[first + k];
        p->offset = offsets[k];
        if (offsets[k + 1] - offsets[k] != p->size) {
            rc = qt_fail(err, QT_E_INTERNAL, NULL, p->name,
                         "planned size differs from the size of its dtype and shape");
            goto done;
        }
    }
    s->size = offsets[n];
done:
    qt_free(offsets);
    return rc;
}

static int plan(struct qt_writer *w, const struct qt_tensor *tensors, size_t n, uint64_t limit,
                struct qt_err *err)
{
    json_t *metadata = NULL;
    int rc;
    QT_TRY(qt_array_new(&w->places, n, sizeof *w->places, err));
    QT_TRY(qt_array_new(&w->touched, n, sizeof *w->touched, err));
    w->count = n;
    QT_TRY(assign_shards(w, tensors, limit ? limit : default_shard_bytes, err));
    struct shard *shards;
    QT_TRY(qt_array_new(&shards, w->nshards, sizeof *shards, err));
    for (size_t i = 0; i < w->nshards; i++)
        shards[i].fd = -1;
    w->shards = shards;
    /* Common loaders reject safetensors files that do not name a framework. */
    metadata = json_object();
    if (json_object_set_new(metadata, "format", json_string("pt")) < 0) {
        rc = qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
        goto done;
    }
    for (size_t i = 0, first = 0; i < w->nshards; i++) {
        size_t end = first;
        while (end < n && w->places[end].shard == i)
            end++;
        QT_TRY(plan_shard(w, i, tensors, first, end - first, metadata, err));
        first = end;
    }
done:
    json_decref(metadata);
    return rc;
}

/* The CRC of all headers identifies the plan: names, dtypes, shapes and offsets. */
static int plan_digest(char **out, const struct qt_writer *w, struct qt_err *err)
{
    uint32_t crc = 0;
    for (size_t i = 0; i < w->nshards; i++)
        crc = qt_crc32(crc, w->shards[i].header, w->shards[i].header_size);
    return qt_string_format(out, err, "%08x", crc);
}

static bool is_shard(const struct qt_writer *w, const char *name)
{
    for (size_t i = 0; i < w->nshards; i++)
        if (strcmp(qt_base_name(w->shards[i].path), name) == 0)
            return true;
    return false;
}

/* ---- opening -------------------------------------------------------------------------------- */

/* Allocates the disk space if the file system can, so that a full disk is found before the work. */
static int make_shard(const struct shard *s, struct qt_err *err)
{
    int fd, rc, lacking;
    QT_TRY(qt_file_create(&fd, s->path, false, err));
    do {
        lacking = fallocate(fd, 0, 0, (off_t)s->size) < 0 ? errno : 0;
    } while (lacking == EINTR);
    if (lacking == EOPNOTSUPP || lacking == ENOSYS)
        lacking = ftruncate(fd, (off_t)s->size) < 0 ? errno : 0;
    if (lacking)
        rc = qt_fail(err, QT_E_RESOURCE, s->path, NULL, "no room for the %llu bytes needed: %s",
                     (unsigned long long)s->size, strerror(lacking));
    else
        rc = qt_file_write_at(fd, s->path, s->header, s->header_size, 0, err);
    if (rc == QT_OK)
        return qt_file_finish(&fd, s->path, err);
    close(fd);
done:
    return rc;
}

/* File names by enum qt_progress. */
static const char *const progress_names[QT_PROGRESS_KINDS] = {"progress", "activations"};

static bool is_progress(const char *name)
{
    for (int i = 0; i < QT_PROGRESS_KINDS; i++)
        if (strcmp(name, progress_names[i]) == 0)
            return true;
    return false;
}

static bool keep_journal(const void *writer, const char *name)
{
    (void)writer;
    return strcmp(name, QT_JOURNAL_NAME) == 0;
}

/* Does not keep side files: each run copies them again, so that no obsolete side file stays. */
static bool keep_progress(const void *writer, const char *name)
{
    return strcmp(name, QT_JOURNAL_NAME) == 0 || is_progress(name) || is_shard(writer, name);
}

/* A complete container in DIR.partial may be deleted only if this run would make the same one. */
static int check_finished(const struct qt_writer *w, const json_t *identity, struct qt_err *err)
{
    json_t *manifest = NULL;
    char *path;
    if (!w->out.finished)
        return QT_OK;
    int rc = qt_path_join(&path, w->out.partial, QT_MANIFEST_NAME, err);
    if (rc < 0)
        return rc;
    bool same =
        qt_json_load(&manifest, path, QT_MAX_MANIFEST, NULL) == QT_OK &&
        qt_identity_check(json_object_get(manifest, "identity"), identity, path, NULL) == QT_OK;
    json_decref(manifest);
    qt_free(path);
    return same ? QT_OK
                : qt_fail(err, QT_E_USAGE, w->out.partial, NULL,
                          "not replaced: it is a complete container; rename or remove it");
}

/* Hours of work are not deleted by accident. */
static int check_unfinished(const struct qt_writer *w, struct qt_err *err)
{
    char *path;
    bool saved = false;
    size_t units;
    int rc = qt_journal_count(&units, &w->journal, err);
    for (int i = 0; i < QT_PROGRESS_KINDS && rc == QT_OK && !saved; i++) {
        rc = qt_path_join(&path, w->out.partial, progress_names[i], err);
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

static int mark_committed(struct qt_writer *w, const char *unit, struct qt_err *err)
{
    json_t *line;
    int rc = qt_journal_read(&line, &w->journal, unit, err);
    const json_t *list = json_object_get(line, "tensors");
    for (size_t k = 0; rc == QT_OK && k < json_array_size(list); k++) {
        const json_t *item = json_array_get(list, k);
        json_int_t i = json_is_integer(item) ? json_integer_value(item) : -1;
        if (i < 0 || (size_t)i >= w->count || w->places[i].committed) {
            rc = qt_fail(
                err, QT_E_RESUME, w->journal.path, NULL,
                "cannot resume: the journal is damaged; run again with --force, not --resume");
            break;
        }
        w->places[i].committed = true;
        w->places[i].written = w->places[i].size;
    }
    json_decref(line);
    return rc;
}

/* Checks the size and header of a shard. The data needs no check: it was synced before its journal
 * line, and readers check its CRCs. */
static int check_shard(const struct shard *s, struct qt_err *err)
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
        if ((rc = mark_committed(w, unit, err)) < 0)
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
    if (!owns(w))
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
    rc = here ? QT_OK : qt_fail(err, QT_E_RESOURCE, w->out.dir, NULL, "out of memory");
    if (rc == QT_OK && owns(w))
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
    if (owns(w))
        rc = qt_journal_text(&text, &size, &w->journal, err);
    QT_TRY(share_text(w, &text, &size, rc, err));
    QT_TRY(qt_comm_broadcast(w->opt.comm, &w->resumed, sizeof w->resumed, 0, err));
    if (!owns(w)) {
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
    QT_TRY(check_finished(w, identity, err));
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
        return qt_fail(err, QT_E_RESOURCE, dir, NULL, "out of memory");
    }
    if (qt_comm_size(opt->comm) > 1 && !(w->news = json_array())) {
        rc = qt_fail(err, QT_E_RESOURCE, dir, NULL, "out of memory");
        goto done;
    }
    QT_TRY(qt_outdir_open(&w->out, dir, &w->opt, err));
    QT_TRY(plan(w, tensors, n, opt->max_shard_bytes, err));
    QT_TRY(plan_digest(&digest, w, err));
    if (qt_comm_size(opt->comm) > 1)
        QT_TRY(check_same(w, digest, identity, err));
    rc = owns(w) ? take(w, digest, identity, err)
                 : qt_journal_open(&w->journal, w->out.partial, false, err);
    if (rc == QT_OK && qt_comm_size(opt->comm) > 1)
        rc = share_units(w, err);
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

/* ---- writing -------------------------------------------------------------------------------- */

/* What only a wrong caller can cause; in a resumed run also wrong records of the journal. */
static int contradiction(const struct qt_writer *w, const char *tensor, const char *what,
                         struct qt_err *err)
{
    if (!w->resumed)
        return qt_fail(err, QT_E_INTERNAL, w->out.dir, tensor, "%s", what);
    return qt_fail(err, QT_E_RESUME, w->journal.path, tensor,
                   "cannot resume: the records of the earlier run are wrong (%s); run again "
                   "with --force, not --resume",
                   what);
}

bool qt_writer_done(const struct qt_writer *w, const char *unit)
{
    return json_object_get(w->journal.units, unit) != NULL;
}

int qt_writer_record(json_t **out, const struct qt_writer *w, const char *unit, struct qt_err *err)
{
    json_t *line;
    int rc = qt_journal_read(&line, &w->journal, unit, err);
    *out = json_incref(json_object_get(line, "record"));
    json_decref(line);
    return rc;
}

int qt_writer_put(struct qt_writer *w, size_t i, const void *data, size_t size, uint64_t offset,
                  struct qt_err *err)
{
    int rc;
    if (i >= w->count)
        return qt_fail(err, QT_E_INTERNAL, w->out.dir, NULL, "tensor %zu is not in the plan", i);
    struct place *p = &w->places[i];
    if (p->committed || offset > p->size || size > p->size - offset || size > p->size - p->written)
        return contradiction(w, p->name, "data beyond the end of the tensor, or written twice",
                             err);
    if (size == 0)
        return QT_OK;
    struct shard *s = &w->shards[p->shard];
    if (s->fd < 0)
        QT_TRY(qt_file_open(&s->fd, s->path, err));
    if (p->written == 0)
        w->touched[w->ntouched++] = i;
    p->written += size;
    QT_TRY(qt_file_write_at(s->fd, s->path, data, size, p->offset + offset, err));
done:
    return rc;
}

int qt_writer_get(const struct qt_writer *w, size_t i, void *data, size_t size, struct qt_err *err)
{
    if (i >= w->count || !w->places[i].committed || size != w->places[i].size)
        return contradiction(w, i < w->count ? w->places[i].name : NULL, "it is not finished", err);
    struct shard *s = &w->shards[w->places[i].shard];
    int rc = s->fd < 0 ? qt_file_open(&s->fd, s->path, err) : QT_OK;
    return rc < 0 ? rc : qt_file_read_at(s->fd, s->path, data, size, w->places[i].offset, err);
}

/* Syncs the data first, then the journal line. */
int qt_writer_commit(struct qt_writer *w, const char *unit, const json_t *record,
                     struct qt_err *err)
{
    json_t *tensors = NULL;
    int rc;
    if (json_object_get(w->journal.units, unit))
        return qt_fail(err, QT_E_INTERNAL, w->out.dir, unit, "unit committed twice");
    for (size_t k = 0; k < w->ntouched; k++) {
        const struct place *p = &w->places[w->touched[k]];
        if (p->written != p->size)
            return qt_fail(err, QT_E_INTERNAL, w->out.dir, p->name,
                           "only %llu of %llu bytes were written before the commit",
                           (unsigned long long)p->written, (unsigned long long)p->size);
    }
    tensors = json_array();
    for (size_t k = 0; k < w->ntouched; k++) {
        struct shard *s = &w->shards[w->places[w->touched[k]].shard];
        if (s->fd >= 0)
            QT_TRY(qt_file_finish(&s->fd, s->path, err));
        if (json_array_append_new(tensors, json_integer((json_int_t)w->touched[k])) < 0) {
            rc = qt_fail(err, QT_E_RESOURCE, w->out.dir, NULL, "out of memory");
            goto done;
        }
    }
    QT_TRY(qt_journal_add(&w->journal, unit, record, tensors, err));
    for (size_t k = 0; k < w->ntouched; k++)
        w->places[w->touched[k]].committed = true;
    w->ntouched = 0;
    if (w->news &&
        json_array_append_new(w->news, json_pack("{s:s, s:O, s:O}", "unit", unit, "record", record,
                                                 "tensors", tensors)) < 0)
        rc = qt_fail(err, QT_E_RESOURCE, w->out.dir, NULL, "out of memory");
done:
    json_decref(tensors);
    return rc;
}

/* Journals the units of another rank. */
static int add_news(struct qt_writer *w, const char *text, size_t size, struct qt_err *err)
{
    json_t *news = NULL, *line;
    size_t i;
    int rc = qt_json_parse(&news, text, size, w->journal.path, err);
    json_array_foreach (news, i, line) {
        const char *unit = json_string_value(json_object_get(line, "unit"));
        if (rc == QT_OK)
            rc = qt_journal_add(&w->journal, unit, json_object_get(line, "record"),
                                json_object_get(line, "tensors"), err);
        if (rc == QT_OK)
            rc = mark_committed(w, unit, err);
    }
    json_decref(news);
    return rc;
}

int qt_writer_exchange(struct qt_writer *w, struct qt_err *err)
{
    struct qt_comm *comm = w->opt.comm;
    char *text = NULL, *all = NULL;
    size_t *sizes = NULL, size = 0;
    int rc;
    if (!w->news)
        return QT_OK;
    rc = qt_json_text(&text, &size, w->news, JSON_COMPACT, err);
    if (rc == QT_OK)
        rc = qt_array_new(&sizes, qt_comm_size(comm), sizeof *sizes, err);
    QT_TRY(qt_comm_meet(comm, rc, err));
    QT_TRY(qt_comm_collect(comm, &all, sizes, text, size, err));
    json_array_clear(w->news);
    for (size_t rank = 0, at = 0; rank < qt_comm_size(comm); at += sizes[rank++])
        if (rank != qt_comm_rank(comm))
            QT_TRY(add_news(w, all + at, sizes[rank], err));
done:
    qt_free(text);
    qt_free(all);
    qt_free(sizes);
    return rc;
}

int qt_writer_reopen(struct qt_writer *w, const char *unit, struct qt_err *err)
{
    json_t *line;
    if (!qt_writer_done(w, unit) || w->ntouched)
        return qt_fail(err, QT_E_INTERNAL, w->out.dir, unit,
                       "unit is not finished, or another one is open");
    int rc = qt_journal_read(&line, &w->journal, unit, err);
    if (rc < 0)
        return rc;
    const json_t *list = json_object_get(line, "tensors");
    for (size_t k = 0; k < json_array_size(list); k++) {
        struct place *p = &w->places[json_integer_value(json_array_get(list, k))];
        p->committed = false;
        p->written = 0;
    }
    json_decref(line);
    json_object_del(w->journal.units, unit);
    return QT_OK;
}

/* ---- progress of the caller ----------------------------------------------------------------- */

static const size_t progress_limit = (size_t)1 << 40;

/* Writes the data and its CRC-32 to a new file, which then replaces the old one by a rename. */
int qt_writer_save(struct qt_writer *w, enum qt_progress kind, const void *data, size_t size,
                   struct qt_err *err)
{
    char *path = NULL, *fresh = NULL;
    uint32_t crc = qt_crc32(0, data, size);
    int fd = -1, rc;
    if (!owns(w))
        return QT_OK;
    QT_TRY(qt_path_join(&path, w->out.partial, progress_names[kind], err));
    QT_TRY(qt_string_format(&fresh, err, "%s.new", path));
    QT_TRY(qt_file_create(&fd, fresh, false, err));
    QT_TRY(qt_file_write_at(fd, fresh, data, size, 0, err));
    QT_TRY(qt_file_write_at(fd, fresh, &crc, sizeof crc, size, err));
    QT_TRY(qt_file_finish(&fd, fresh, err));
    QT_TRY(qt_path_rename(fresh, path, err));
    QT_TRY(qt_dir_sync(w->out.partial, err));
done:
    if (fd >= 0)
        close(fd);
    qt_free(path);
    qt_free(fresh);
    return rc;
}

int qt_writer_load(void *data, size_t *size, const struct qt_writer *w, enum qt_progress kind,
                   struct qt_err *err)
{
    char *path = NULL, *text = NULL;
    uint32_t crc;
    int rc;
    memset(data, 0, sizeof text);
    *size = 0;
    QT_TRY(qt_path_join(&path, w->out.partial, progress_names[kind], err));
    if (!qt_path_exists(path))
        goto done;
    QT_TRY(qt_file_read(&text, size, path, progress_limit, err));
    if (*size >= sizeof crc)
        memcpy(&crc, text + *size - sizeof crc, sizeof crc);
    if (*size < sizeof crc || crc != qt_crc32(0, text, *size - sizeof crc)) {
        rc = qt_fail(err, QT_E_RESUME, path, NULL,
                     "cannot resume: the file is damaged; run again with --force, not --resume");
        goto done;
    }
    *size -= sizeof crc;
    memcpy(data, &text, sizeof text);
    text = NULL;
done:
    qt_free(text);
    qt_free(path);
    return rc;
}

static int drop_progress(const struct qt_writer *w, struct qt_err *err)
{
    int rc = QT_OK;
    for (int i = 0; i < QT_PROGRESS_KINDS && rc == QT_OK; i++) {
        char *path;
        rc = qt_path_join(&path, w->out.partial, progress_names[i], err);
        if (rc == QT_OK && unlink(path) < 0 && errno != ENOENT)
            rc = qt_fail(err, QT_E_RESOURCE, path, NULL, "cannot remove: %s", strerror(errno));
        qt_free(path);
    }
    return rc;
}

/* Side files must not have the name of another file of the container. */
static int check_side_name(const struct qt_writer *w, const char *name, struct qt_err *err)
{
    if (!qt_name_is_plain(name) || strcmp(name, QT_MANIFEST_NAME) == 0 ||
        strcmp(name, QT_JOURNAL_NAME) == 0 || strcmp(name, QT_CHECKSUMS_NAME) == 0 ||
        strcmp(name, QT_INDEX_NAME) == 0 || is_progress(name) || is_shard(w, name))
        return qt_fail(err, QT_E_INTERNAL, name, NULL,
                       "a side file cannot be named '%s': the container uses this name", name);
    return QT_OK;
}

/* True if the path leads out of the directory. */
static bool leads_out(const char *path, const char *dir)
{
    char *to = realpath(path, NULL), *from = realpath(dir, NULL);
    const size_t n = from ? strlen(from) : 0;
    const bool out = !to || !from || strncmp(to, from, n) != 0 || (n > 1 && to[n] != '/');
    free(to);
    free(from);
    return out;
}

int qt_side_file_find(char **path, const char **why, const char *dir, const char *name,
                      struct qt_err *err)
{
    struct qt_map map = {0};
    *why = NULL;
    int rc = qt_path_join(path, dir, name, err);
    if (rc < 0)
        return rc;
    if (!qt_path_exists(*path))
        goto leave;
    if (qt_path_is_no_file(*path)) {
        *why = "is not a file";
        goto leave;
    }
    /* The tokenizer of SentencePiece is binary, and caches of checkpoints consist of links. */
    if (!leads_out(*path, dir) || strcmp(name, "tokenizer.model") == 0)
        return QT_OK;
    rc = qt_map_open(&map, *path, err);
    if (rc == QT_OK && !qt_is_text(map.data, map.size))
        *why = "is a link out of the checkpoint, to a file that is not text";
    qt_map_close(&map);
    if (rc == QT_OK && !*why)
        return QT_OK;
leave:
    qt_free(*path);
    *path = NULL;
    return rc;
}

int qt_writer_copy_file(struct qt_writer *w, const char *path, struct qt_err *err)
{
    int rc = check_side_name(w, qt_base_name(path), err);
    return rc < 0 || !owns(w) ? rc : qt_outdir_copy(&w->out, path, err);
}

int qt_writer_add_text(struct qt_writer *w, const char *name, const char *text, size_t size,
                       unsigned mode, struct qt_err *err)
{
    int rc = check_side_name(w, name, err);
    return rc < 0 || !owns(w) ? rc : qt_outdir_add(&w->out, name, text, size, mode, err);
}

int qt_writer_begin_json(struct qt_json_out *out, struct qt_writer *w, const char *name,
                         struct qt_err *err)
{
    *out = (struct qt_json_out){.fd = -1};
    int rc = check_side_name(w, name, err);
    if (rc == QT_OK && json_object_set_new(w->unlisted, name, json_true()) < 0)
        rc = qt_fail(err, QT_E_RESOURCE, name, NULL, "out of memory");
    return rc < 0 || !owns(w) ? rc : qt_json_out_open(out, w->out.partial, name, err);
}

/* ---- finishing ------------------------------------------------------------------------------ */

static int check_complete(const struct qt_writer *w, struct qt_err *err)
{
    for (size_t i = 0; i < w->count; i++) {
        const struct place *p = &w->places[i];
        if (p->size != 0 && !p->committed)
            return contradiction(w, p->name, "was never committed", err);
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
    QT_TRY(head ? QT_OK : qt_fail(err, QT_E_RESOURCE, w->out.dir, NULL, "out of memory"));
    QT_TRY(qt_json_out_members(&out, head, err));
    QT_TRY(qt_json_out_begin(&out, "weight_map", '{', err));
    for (size_t i = 0; i < w->count; i++) {
        file = json_string(qt_base_name(w->shards[w->places[i].shard].path));
        QT_TRY(file ? QT_OK : qt_fail(err, QT_E_RESOURCE, w->out.dir, NULL, "out of memory"));
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
        rc = contradiction(w, why.tensor, what, err);
    }
    qt_container_close(c);
    return rc;
}

int qt_writer_begin_manifest(struct qt_json_out *out, struct qt_writer *w, struct qt_err *err)
{
    int rc;
    *out = (struct qt_json_out){.fd = -1};
    QT_TRY(qt_comm_meet(w->opt.comm, QT_OK, err)); /* before that a rank could fail */
    if (!owns(w))
        return QT_OK;
    QT_TRY(check_complete(w, err));
    QT_TRY(drop_progress(w, err));
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
    QT_TRY(qt_checksums_start(&checksums, w->out.partial, w->unlisted, err));
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
    return qt_comm_meet(w->opt.comm, owns(w) ? finish(w, err) : QT_OK, err);
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
