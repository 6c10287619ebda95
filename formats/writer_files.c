#include "formats/writer_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* File names by enum qt_progress. */
const char *const qt_progress_names[QT_PROGRESS_KINDS] = {"progress", "activations"};

bool qt_progress_file(const char *name)
{
    for (int i = 0; i < QT_PROGRESS_KINDS; i++)
        if (strcmp(name, qt_progress_names[i]) == 0)
            return true;
    return false;
}

static const size_t progress_limit = (size_t)1 << 40;

/* Writes the data and its CRC-32 to a new file, which then replaces the old one by a rename. */
int qt_writer_save(struct qt_writer *w, enum qt_progress kind, const void *data, size_t size,
                   struct qt_err *err)
{
    char *path = NULL, *fresh = NULL;
    uint32_t crc = qt_crc32(0, data, size);
    int fd = -1, rc;
    if (!qt_writer_owns(w))
        return QT_OK;
    QT_TRY(qt_path_join(&path, w->out.partial, qt_progress_names[kind], err));
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
    QT_TRY(qt_path_join(&path, w->out.partial, qt_progress_names[kind], err));
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

int qt_writer_drop_progress(const struct qt_writer *w, struct qt_err *err)
{
    int rc = QT_OK;
    for (int i = 0; i < QT_PROGRESS_KINDS && rc == QT_OK; i++) {
        char *path;
        rc = qt_path_join(&path, w->out.partial, qt_progress_names[i], err);
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
        strcmp(name, QT_INDEX_NAME) == 0 || qt_progress_file(name) || qt_writer_is_shard(w, name))
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
        *why = qt_path_is_dir(*path) ? "is not a file" : "is a link to a file that does not exist";
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
    return rc < 0 || !qt_writer_owns(w) ? rc : qt_outdir_copy(&w->out, path, err);
}

int qt_writer_add_text(struct qt_writer *w, const char *name, const char *text, size_t size,
                       unsigned mode, struct qt_err *err)
{
    int rc = check_side_name(w, name, err);
    return rc < 0 || !qt_writer_owns(w) ? rc : qt_outdir_add(&w->out, name, text, size, mode, err);
}

int qt_writer_begin_json(struct qt_json_out *out, struct qt_writer *w, const char *name,
                         struct qt_err *err)
{
    *out = (struct qt_json_out){.fd = -1};
    int rc = check_side_name(w, name, err);
    if (rc == QT_OK && json_object_set_new(w->unlisted, name, json_true()) < 0)
        rc = qt_no_memory(err, name);
    return rc < 0 || !qt_writer_owns(w) ? rc : qt_json_out_open(out, w->out.partial, name, err);
}
