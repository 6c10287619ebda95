#include "formats/writer_internal.h"

#include <string.h>
#include <unistd.h>

struct qt_output {
    struct qt_writer_options opt;
    struct qt_outdir dir;
    struct qt_journal journal; /* marks DIR.partial as qtool's; no units */
    bool scrap;                /* DIR.partial may be removed */
    char *path;                /* of the file that is being written, or NULL */
    int fd;
    uint64_t at, size; /* written and reserved bytes of it */
};

static bool keep_journal(const void *ctx, const char *name)
{
    (void)ctx;
    return strcmp(name, QT_JOURNAL_NAME) == 0;
}

int qt_output_open(struct qt_output **out, const char *dir, const json_t *identity,
                   const struct qt_writer_options *opt, struct qt_err *err)
{
    struct qt_output *o;
    *out = NULL;
    int rc = qt_array_new(&o, 1, sizeof *o, err);
    if (rc < 0)
        return rc;
    o->fd = o->journal.fd = -1;
    o->opt = *opt;
    QT_TRY(qt_outdir_open(&o->dir, dir, &o->opt, err));
    QT_TRY(qt_outdir_take(&o->dir, err));
    QT_TRY(qt_outdir_check_finished(&o->dir, QT_EXPORT_NAME, identity, "complete", err));
    o->scrap = true;
    QT_TRY(qt_journal_open(&o->journal, o->dir.partial, true, err));
    QT_TRY(qt_outdir_lock(o->journal.fd, o->journal.path, err));
    QT_TRY(qt_journal_clear(&o->journal, err));
    QT_TRY(qt_outdir_clear(&o->dir, keep_journal, NULL, err));
    QT_TRY(qt_journal_start(&o->journal, "", identity, err));
    *out = o;
done:
    if (rc < 0) {
        qt_output_discard(o);
        qt_output_close(o);
    }
    return rc;
}

/* ---- files ---------------------------------------------------------------------------------- */

static int check_name(const struct qt_output *o, const char *name, struct qt_err *err)
{
    if (!qt_name_is_plain(name) || strcmp(name, QT_EXPORT_NAME) == 0 ||
        strcmp(name, QT_JOURNAL_NAME) == 0 || strcmp(name, QT_CHECKSUMS_NAME) == 0)
        return qt_fail(err, QT_E_INTERNAL, o->dir.dir, NULL, "a file cannot be named '%s'", name);
    return QT_OK;
}

int qt_output_create(struct qt_output *o, const char *name, uint64_t size, struct qt_err *err)
{
    int rc;
    QT_TRY(check_name(o, name, err));
    QT_TRY(qt_path_join(&o->path, o->dir.partial, name, err));
    QT_TRY(qt_file_create_new(&o->fd, o->path, 0666, err));
    o->at = 0;
    o->size = size;
    QT_TRY(qt_file_reserve(o->fd, o->path, size, err));
done:
    return rc;
}

int qt_output_write(struct qt_output *o, const void *data, size_t size, struct qt_err *err)
{
    if (size > o->size - o->at)
        return qt_fail(err, QT_E_INTERNAL, o->path, NULL, "the file is larger than was planned");
    int rc = qt_file_write_at(o->fd, o->path, data, size, o->at, err);
    o->at += size;
    return rc;
}

int qt_output_pad(struct qt_output *o, size_t alignment, struct qt_err *err)
{
    static const char zeros[64];
    int rc = QT_OK;
    for (size_t rest = (alignment - o->at % alignment) % alignment; rest && rc == QT_OK;) {
        size_t n = qt_min_size(rest, sizeof zeros);
        rc = qt_output_write(o, zeros, n, err);
        rest -= n;
    }
    return rc;
}

int qt_output_end(struct qt_output *o, struct qt_err *err)
{
    if (o->at != o->size)
        return qt_fail(err, QT_E_INTERNAL, o->path, NULL, "%llu of %llu planned bytes were written",
                       (unsigned long long)o->at, (unsigned long long)o->size);
    int rc = qt_file_finish(&o->fd, o->path, err);
    qt_free(o->path);
    o->path = NULL;
    return rc;
}

int qt_output_text(struct qt_output *o, const char *name, const char *text, size_t size,
                   struct qt_err *err)
{
    int rc;
    QT_TRY(qt_output_create(o, name, size, err));
    QT_TRY(qt_output_write(o, text, size, err));
    QT_TRY(qt_output_end(o, err));
done:
    return rc;
}

int qt_output_json(struct qt_output *o, const char *name, const json_t *value, struct qt_err *err)
{
    int rc = check_name(o, name, err);
    return rc < 0 ? rc : qt_outdir_json(&o->dir, name, value, err);
}

int qt_output_copy(struct qt_output *o, const char *path, struct qt_err *err)
{
    int rc = check_name(o, qt_base_name(path), err);
    return rc < 0 ? rc : qt_outdir_copy(&o->dir, path, err);
}

/* ---- finishing ------------------------------------------------------------------------------ */

int qt_output_finish(struct qt_output *o, const json_t *record, struct qt_err *err)
{
    json_t *omit = json_pack("{s:b, s:b}", QT_JOURNAL_NAME, true, QT_CHECKSUMS_NAME, true);
    struct qt_checksums *checksums = NULL;
    int rc;
    if (!omit)
        return qt_no_memory(err, o->dir.dir);
    QT_TRY(qt_outdir_json(&o->dir, QT_EXPORT_NAME, record, err));
    QT_TRY(qt_checksums_start(&checksums, o->dir.partial, omit, NULL, err));
    QT_TRY(qt_checksums_write(checksums, err));
    QT_TRY(qt_dir_sync(o->dir.partial, err));
    QT_TRY(qt_outdir_publish(&o->dir, err));
    o->scrap = false;
done:
    qt_checksums_close(checksums);
    json_decref(omit);
    return rc;
}

void qt_output_discard(struct qt_output *o)
{
    if (o->fd >= 0)
        close(o->fd);
    o->fd = -1;
    if (o->scrap)
        qt_outdir_discard(&o->dir);
    o->scrap = false;
}

void qt_output_close(struct qt_output *o)
{
    if (!o)
        return;
    if (o->fd >= 0)
        close(o->fd);
    qt_free(o->path);
    qt_journal_close(&o->journal);
    qt_outdir_close(&o->dir);
    qt_free(o);
}
