#include "formats/writer_internal.h"

bool qt_writer_owns(const struct qt_writer *w)
{
    return qt_comm_rank(w->opt.comm) == 0;
}

int qt_writer_contradiction(const struct qt_writer *w, const char *tensor, const char *what,
                            struct qt_err *err)
{
    if (!w->resumed)
        return qt_fail(err, QT_E_INTERNAL, w->out.dir, tensor, "%s", what);
    return qt_fail(err, QT_E_RESUME, w->journal.path, tensor,
                   "cannot resume: the records of the earlier run are wrong (%s); run again "
                   "with --force, not --resume",
                   what);
}

int qt_writer_mark(struct qt_writer *w, const char *unit, struct qt_err *err)
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
    struct qt_planned_tensor *p = &w->places[i];
    if (p->committed || offset > p->size || size > p->size - offset || size > p->size - p->written)
        return qt_writer_contradiction(w, p->name,
                                       "data beyond the end of the tensor, or written twice", err);
    if (size == 0)
        return QT_OK;
    struct qt_planned_shard *s = &w->shards[p->shard];
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
        return qt_writer_contradiction(w, i < w->count ? w->places[i].name : NULL,
                                       "it is not finished", err);
    struct qt_planned_shard *s = &w->shards[w->places[i].shard];
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
        const struct qt_planned_tensor *p = &w->places[w->touched[k]];
        if (p->written != p->size)
            return qt_fail(err, QT_E_INTERNAL, w->out.dir, p->name,
                           "only %llu of %llu bytes were written before the commit",
                           (unsigned long long)p->written, (unsigned long long)p->size);
    }
    tensors = json_array();
    for (size_t k = 0; k < w->ntouched; k++) {
        struct qt_planned_shard *s = &w->shards[w->places[w->touched[k]].shard];
        if (s->fd >= 0)
            QT_TRY(qt_file_finish(&s->fd, s->path, err));
        if (json_array_append_new(tensors, json_integer((json_int_t)w->touched[k])) < 0) {
            rc = qt_no_memory(err, w->out.dir);
            goto done;
        }
    }
    QT_TRY(qt_journal_add(&w->journal, unit, record, tensors, err));
    for (size_t k = 0; k < w->ntouched; k++)
        w->places[w->touched[k]].committed = true;
    w->ntouched = 0;
    qt_running_hashes_advance(w->running, w);
    if (w->news &&
        json_array_append_new(w->news, json_pack("{s:s, s:O, s:O}", "unit", unit, "record", record,
                                                 "tensors", tensors)) < 0)
        rc = qt_no_memory(err, w->out.dir);
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
            rc = qt_writer_mark(w, unit, err);
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
        struct qt_planned_tensor *p = &w->places[json_integer_value(json_array_get(list, k))];
        p->committed = false;
        p->written = 0;
        qt_running_hashes_restart(w->running, w, p->shard);
    }
    json_decref(line);
    json_object_del(w->journal.units, unit);
    return QT_OK;
}
