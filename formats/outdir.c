#include "formats/writer_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* Marks a directory that is being replaced, from before its rename to DIR.old until it is
 * removed. */
#define REPLACED "qtool-replaced"

static int io_error(struct qt_err *err, const char *path, const char *what)
{
    return qt_fail(err, QT_E_RESOURCE, path, NULL, "%s: %s", what, strerror(errno));
}

static bool is_dot(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

/* Removes all files of the directory except those for which keep(ctx, name) is true. */
static int remove_files(const char *path, bool (*keep)(const void *ctx, const char *name),
                        const void *ctx, struct qt_err *err)
{
    const struct dirent *item;
    int rc = QT_OK;
    DIR *dir = opendir(path);
    if (!dir)
        return io_error(err, path, "cannot open directory");
    while (rc == QT_OK && (item = readdir(dir)) != NULL) {
        if (is_dot(item->d_name) || keep(ctx, item->d_name))
            continue;
        if (unlinkat(dirfd(dir), item->d_name, 0) < 0)
            rc = io_error(err, path, "cannot remove files of an earlier run");
    }
    closedir(dir);
    return rc;
}

static bool is_last(const void *last, const char *name)
{
    return strcmp(name, last) == 0;
}

/* Removes the directory. The file `last` goes last, so that the remains of an interrupted removal
 * are recognized as qtool's. */
static int remove_ours(const char *path, const char *last, struct qt_err *err)
{
    int rc = remove_files(path, is_last, last, err);
    return rc < 0 ? rc : qt_dir_remove(path, err);
}

/* ---- checks before replacing ---------------------------------------------------------------- */

static int set_paths(struct qt_outdir *o, const char *dir, struct qt_err *err)
{
    int rc;
    QT_TRY(qt_string_copy(&o->dir, dir, err));
    for (size_t n = strlen(o->dir); n > 1 && o->dir[n - 1] == '/'; n--)
        o->dir[n - 1] = '\0';
    const char *name = qt_base_name(o->dir);
    if (!qt_name_is_plain(name))
        return qt_fail(err, QT_E_USAGE, dir, NULL, "not a valid name for a new directory");
    QT_TRY(qt_string_format(&o->partial, err, "%s.partial", o->dir));
    QT_TRY(qt_string_format(&o->old, err, "%s.old", o->dir));
    QT_TRY(qt_path_join(&o->mark, o->dir, REPLACED, err));
    int length = (int)(name - o->dir);
    QT_TRY(length ? qt_string_format(&o->parent, err, "%.*s", length, o->dir)
                  : qt_string_copy(&o->parent, ".", err));
done:
    return rc;
}

/* True if the file is `mark`. A journal must also have the content of one. */
static bool is_mark(const char *path, const char *name, const char *mark)
{
    return strcmp(name, mark) == 0 &&
           (strcmp(mark, QT_JOURNAL_NAME) != 0 || qt_container_unfinished(path));
}

/*
 * Checks that a directory is qtool's own before its contents are deleted, so that a mistyped output
 * directory (the source checkpoint, say) is not lost. It must have no subdirectories, and either a
 * manifest (*container), or `mark`, or be empty (*empty). A directory with just an empty journal
 * counts as empty.
 */
static int check_ours(bool *empty, bool *container, const char *path, const char *mark,
                      struct qt_err *err)
{
    const struct dirent *item;
    struct stat st;
    bool marked = false;
    int rc = QT_OK;
    DIR *dir = opendir(path);
    if (!dir)
        return io_error(err, path, "cannot open directory");
    *empty = true;
    *container = false;
    while (rc == QT_OK && (item = readdir(dir)) != NULL) {
        if (is_dot(item->d_name))
            continue;
        bool known = fstatat(dirfd(dir), item->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0;
        *empty = *empty && known && !st.st_size && strcmp(item->d_name, QT_JOURNAL_NAME) == 0;
        marked = marked || is_mark(path, item->d_name, mark);
        *container = *container || strcmp(item->d_name, QT_MANIFEST_NAME) == 0 ||
                     strcmp(item->d_name, QT_EXPORT_NAME) == 0;
        if (known && S_ISDIR(st.st_mode))
            rc = qt_fail(err, QT_E_USAGE, path, NULL,
                         "not replaced: it contains a directory '%s', which qtool did not create",
                         item->d_name);
    }
    closedir(dir);
    *container = *container && !marked;
    if (rc == QT_OK && !*empty && !marked && !*container)
        rc = qt_fail(err, QT_E_USAGE, path, NULL,
                     "not replaced: it has files but no " QT_MANIFEST_NAME " or " QT_EXPORT_NAME
                     ", so qtool did not create it");
    return rc;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* QT_E_USAGE if the entry `name` of a directory is a source, or a link to one. */
static int check_no_source_entry(const struct qt_outdir *o, DIR *dir, const char *path,
                                 const char *name, struct qt_err *err)
{
    struct stat entry, target, source;
    if (fstatat(dirfd(dir), name, &entry, AT_SYMLINK_NOFOLLOW) < 0)
        return QT_OK;
    if (fstatat(dirfd(dir), name, &target, 0) < 0)
        target = entry;
    for (size_t i = 0; i < o->opt->nsources; i++)
        if (stat(o->opt->sources[i], &source) == 0 &&
            (same_file(&source, &entry) || same_file(&source, &target)))
            return qt_fail(err, QT_E_USAGE, o->opt->sources[i], NULL,
                           "would be deleted: it is %s/%s, and %s would be replaced", path, name,
                           path);
    return QT_OK;
}

/* No file that the run reads may be deleted with the directory. */
static int check_no_source(const struct qt_outdir *o, const char *path, struct qt_err *err)
{
    const struct dirent *item;
    int rc = QT_OK;
    DIR *dir = opendir(path);
    if (!dir)
        return io_error(err, path, "cannot open directory");
    while (rc == QT_OK && (item = readdir(dir)) != NULL)
        if (!is_dot(item->d_name))
            rc = check_no_source_entry(o, dir, path, item->d_name, err);
    closedir(dir);
    return rc;
}

/* DIR.old must be absent or left by an interrupted --force (*exists). */
static int check_old(bool *exists, const struct qt_outdir *o, struct qt_err *err)
{
    struct stat st = {0};
    bool empty, container;
    *exists = false;
    if (lstat(o->old, &st) < 0 && errno == ENOENT)
        return QT_OK;
    if (!S_ISDIR(st.st_mode) || check_ours(&empty, &container, o->old, REPLACED, NULL) < 0 ||
        container)
        return qt_fail(err, QT_E_USAGE, o->old, NULL,
                       "exists already: rename or remove it; --force moves the old %s there until "
                       "the new one is complete",
                       qt_base_name(o->dir));
    *exists = true;
    return check_no_source(o, o->old, err);
}

/* st_dev does not suffice: a bind mount keeps it, and a subvolume, which can be renamed, does
 * not. */
static bool is_mounted(const char *path)
{
    struct statx st;
    return statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, 0, &st) == 0 &&
           (st.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
}

/* DIR must be absent or a container that may be replaced (*exists). */
static int check_target(bool *exists, const struct qt_outdir *o, struct qt_err *err)
{
    struct stat st;
    bool empty, container, old_exists;
    *exists = false;
    if (lstat(o->dir, &st) < 0)
        return errno == ENOENT ? QT_OK : io_error(err, o->dir, "cannot stat");
    *exists = true;
    if (!S_ISDIR(st.st_mode))
        return qt_fail(err, QT_E_USAGE, o->dir, NULL,
                       S_ISLNK(st.st_mode) ? "is a symbolic link: name the directory itself"
                                           : "exists and is not a directory");
    if (is_mounted(o->dir))
        return qt_fail(err, QT_E_USAGE, o->dir, NULL,
                       "is a mount point, which cannot be replaced: give a directory in it");
    if (!o->opt->force)
        return qt_fail(err, QT_E_USAGE, o->dir, NULL, "exists already; --force replaces it");
    int rc = check_old(&old_exists, o, err);
    if (rc == QT_OK)
        rc = check_ours(&empty, &container, o->dir, QT_MANIFEST_NAME, err);
    if (rc == QT_OK)
        rc = check_no_source(o, o->dir, err);
    /* Check now, before the work, that the old container can be emptied later. */
    if (rc == QT_OK && access(o->dir, W_OK | X_OK) < 0)
        rc = io_error(err, o->dir, "cannot be replaced");
    return rc;
}

int qt_outdir_open(struct qt_outdir *o, const char *dir, const struct qt_writer_options *opt,
                   struct qt_err *err)
{
    bool exists;
    *o = (struct qt_outdir){.opt = opt, .lock_fd = -1};
    int rc = set_paths(o, dir, err);
    /* The final rename needs access to the parent. If DIR.partial exists already, nothing before
     * the rename would fail without it. */
    if (rc == QT_OK && access(o->parent, R_OK | W_OK | X_OK) < 0)
        rc = io_error(err, o->dir, "cannot be created in its parent directory");
    return rc < 0 ? rc : check_target(&exists, o, err);
}

static void unlock(struct qt_outdir *o)
{
    if (o->lock_fd >= 0)
        close(o->lock_fd);
    o->lock_fd = -1;
}

void qt_outdir_close(struct qt_outdir *o)
{
    unlock(o);
    qt_free(o->dir);
    qt_free(o->parent);
    qt_free(o->partial);
    qt_free(o->old);
    qt_free(o->mark);
}

/* ---- DIR.partial ---------------------------------------------------------------------------- */

/* If the file system does not support locks, qtool does not detect two runs on one output. */
int qt_outdir_lock(int fd, const char *path, struct qt_err *err)
{
    if (flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK)
        return qt_fail(err, QT_E_RESOURCE, path, NULL, "in use by another process");
    return QT_OK;
}

int qt_outdir_check_finished(const struct qt_outdir *o, const char *record, const json_t *identity,
                             const char *what, struct qt_err *err)
{
    json_t *found = NULL;
    char *path;
    if (!o->finished)
        return QT_OK;
    int rc = qt_path_join(&path, o->partial, record, err);
    if (rc < 0)
        return rc;
    const bool same =
        qt_json_load(&found, path, QT_MAX_MANIFEST, NULL) == QT_OK &&
        qt_identity_check(json_object_get(found, "identity"), identity, path, NULL) == QT_OK;
    json_decref(found);
    qt_free(path);
    return same ? QT_OK
                : qt_fail(err, QT_E_USAGE, o->partial, NULL,
                          "not replaced: it is %s; rename or remove it", what);
}

/* Locks the directory, which stays the same inode until the rename. The writer also locks the
 * journal, because network file systems share locks on files but not on directories. */
int qt_outdir_take(struct qt_outdir *o, struct qt_err *err)
{
    struct stat mine, now;
    int rc;
    QT_TRY(qt_dir_make(o->partial, err));
    o->lock_fd = open(o->partial, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (o->lock_fd < 0)
        return io_error(err, o->partial, "cannot open directory");
    QT_TRY(qt_outdir_lock(o->lock_fd, o->partial, err));
    /* Another process may have renamed or removed it between open and lock. */
    if (fstat(o->lock_fd, &mine) < 0 || lstat(o->partial, &now) < 0 || mine.st_ino != now.st_ino ||
        mine.st_dev != now.st_dev)
        rc = qt_fail(err, QT_E_RESOURCE, o->partial, NULL, "in use by another process");
    else
        rc = check_ours(&o->empty, &o->finished, o->partial, QT_JOURNAL_NAME, err);
    if (rc == QT_OK)
        rc = check_no_source(o, o->partial, err);
done:
    if (rc < 0)
        unlock(o);
    return rc;
}

int qt_outdir_clear(const struct qt_outdir *o, bool (*keep)(const void *ctx, const char *name),
                    const void *ctx, struct qt_err *err)
{
    return remove_files(o->partial, keep, ctx, err);
}

void qt_outdir_discard(struct qt_outdir *o)
{
    if (o->lock_fd >= 0)
        remove_ours(o->partial, QT_JOURNAL_NAME, NULL);
    unlock(o);
}

/* ---- small files ---------------------------------------------------------------------------- */

int qt_outdir_add(const struct qt_outdir *o, const char *name, const void *data, size_t size,
                  unsigned mode, struct qt_err *err)
{
    char *path = NULL;
    int fd = -1, rc;
    QT_TRY(qt_path_join(&path, o->partial, name, err));
    QT_TRY(qt_file_create_new(&fd, path, mode, err));
    QT_TRY(qt_file_write_at(fd, path, data, size, 0, err));
    QT_TRY(qt_file_finish(&fd, path, err));
done:
    if (fd >= 0)
        close(fd);
    qt_free(path);
    return rc;
}

int qt_outdir_copy(const struct qt_outdir *o, const char *path, struct qt_err *err)
{
    struct qt_map map;
    int rc = qt_map_open(&map, path, err);
    if (rc < 0)
        return rc;
    rc = qt_outdir_add(o, qt_base_name(path), map.data, map.size, map.mode, err);
    qt_map_close(&map);
    return rc;
}

int qt_outdir_json(const struct qt_outdir *o, const char *name, const json_t *value,
                   struct qt_err *err)
{
    struct qt_json_out out;
    int rc;
    QT_TRY(qt_json_out_open(&out, o->partial, name, err));
    QT_TRY(qt_json_out_members(&out, value, err));
    QT_TRY(qt_json_out_finish(&out, err));
done:
    qt_json_out_close(&out);
    return rc;
}

/* ---- publishing ----------------------------------------------------------------------------- */

static int remove_journal(const struct qt_outdir *o, struct qt_err *err)
{
    if (unlinkat(o->lock_fd, QT_JOURNAL_NAME, 0) < 0)
        return io_error(err, o->partial, "cannot remove the journal");
    return qt_dir_sync(o->partial, err);
}

/* Removes DIR.old if it is a replaced container; leaves anything else alone. */
static int remove_old(const struct qt_outdir *o, struct qt_err *err)
{
    bool exists;
    int rc = check_old(&exists, o, NULL);
    return rc < 0 || !exists ? QT_OK : remove_ours(o->old, REPLACED, err);
}

/* A conflict that appeared during the run is not a usage error; DIR.partial stays. */
static int check_again(bool *exists, const struct qt_outdir *o, struct qt_err *err)
{
    struct qt_err why = {0};
    int rc = check_target(exists, o, &why);
    if (rc < 0)
        return qt_fail(
            err, QT_E_RESOURCE, why.file, NULL,
            "%s (since the run began); move it away, then continue from %s with --resume",
            why.reason, o->partial);
    return rc;
}

/* Moves DIR to DIR.old. A DIR.old of an earlier run is obsolete, as DIR exists. */
static int set_aside(const struct qt_outdir *o, struct qt_err *err)
{
    int rc;
    QT_TRY(remove_old(o, err));
    QT_TRY(qt_file_write(o->mark, NULL, 0, err));
    QT_TRY(qt_dir_sync(o->dir, err));
    QT_TRY(qt_path_rename(o->dir, o->old, err));
done:
    if (rc < 0)
        unlink(o->mark);
    return rc;
}

/*
 * A replaced container stays in DIR.old until the new one is in place. A kill between any two steps
 * loses neither: at worst DIR.old stays, and the next --force removes it once DIR is in place; or
 * DIR.partial stays complete, and the same command recognizes it. The journal is removed after DIR
 * was moved away: if the move fails (DIR was mounted, say), the run can still be resumed.
 */
int qt_outdir_publish(struct qt_outdir *o, struct qt_err *err)
{
    bool exists;
    int rc;
    QT_TRY(check_again(&exists, o, err));
    if (exists)
        QT_TRY(set_aside(o, err));
    rc = remove_journal(o, err);
    if (rc == QT_OK)
        rc = qt_path_rename(o->partial, o->dir, err);
    if (rc < 0) {
        if (exists && qt_path_rename(o->old, o->dir, NULL) == QT_OK)
            unlink(o->mark);
        return rc;
    }
    unlock(o);
    QT_TRY(qt_dir_sync(o->parent, err));
    if (o->opt->force)
        QT_TRY(remove_old(o, err));
done:
    return rc;
}
