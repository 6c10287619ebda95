#include "formats/writer_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* In a directory that is being replaced, from before it makes room until the last of it goes. */
#define REPLACED "qtool-replaced"

static int io_error(struct qt_err *err, const char *path, const char *what)
{
    return qt_fail(err, QT_E_RESOURCE, path, NULL, "%s: %s", what, strerror(errno));
}

static bool is_dot(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

/* Removes all files of the directory but those for which keep(ctx, name). */
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

/* Removes the directory, but its file `last` only when all others are gone: what a kill leaves is
 * known by that for ours. */
static int remove_ours(const char *path, const char *last, struct qt_err *err)
{
    int rc = remove_files(path, is_last, last, err);
    return rc < 0 ? rc : qt_dir_remove(path, err);
}

/* ---- what may be replaced ------------------------------------------------------------------- */

static int set_paths(struct qt_outdir *o, const char *dir, struct qt_err *err)
{
    int rc;
    QT_TRY(qt_string_copy(&o->dir, dir, err));
    for (size_t n = strlen(o->dir); n > 1 && o->dir[n - 1] == '/'; n--)
        o->dir[n - 1] = '\0';
    const char *name = qt_base_name(o->dir);
    if (!qt_name_is_plain(name))
        return qt_fail(err, QT_E_USAGE, dir, NULL, "not a name for a directory to be made");
    QT_TRY(qt_string_format(&o->partial, err, "%s.partial", o->dir));
    QT_TRY(qt_string_format(&o->old, err, "%s.old", o->dir));
    QT_TRY(qt_path_join(&o->mark, o->dir, REPLACED, err));
    int length = (int)(name - o->dir);
    QT_TRY(length ? qt_string_format(&o->parent, err, "%.*s", length, o->dir)
                  : qt_string_copy(&o->parent, ".", err));
done:
    return rc;
}

/* Anybody may call a file a journal: its content tells. */
static bool is_mark(const char *path, const char *name, const char *mark)
{
    return strcmp(name, mark) == 0 &&
           (strcmp(mark, QT_JOURNAL_NAME) != 0 || qt_container_unfinished(path));
}

/*
 * What is about to be deleted must be qtool's own: no directories, and among the files a manifest
 * (*container), or `mark`, or nothing at all (*empty), as which an empty journal counts: it never
 * is that beside other files. Otherwise a mistyped output directory (the source checkpoint!) would
 * cost its owner the contents.
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
        *container = *container || strcmp(item->d_name, QT_MANIFEST_NAME) == 0;
        if (known && S_ISDIR(st.st_mode))
            rc = qt_fail(err, QT_E_USAGE, path, NULL,
                         "not replaced: it holds a directory '%s', which is not qtool's",
                         item->d_name);
    }
    closedir(dir);
    *container = *container && !marked;
    if (rc == QT_OK && !*empty && !marked && !*container)
        rc = qt_fail(err, QT_E_USAGE, path, NULL,
                     "not replaced: it has files but no " QT_MANIFEST_NAME ", so is not qtool's");
    return rc;
}

/* DIR.old: absent, or what --force once put there and a kill has left. *left tells which. */
static int check_old(bool *left, const struct qt_outdir *o, struct qt_err *err)
{
    struct stat st = {0};
    bool empty, container;
    *left = false;
    if (lstat(o->old, &st) < 0 && errno == ENOENT)
        return QT_OK;
    if (!S_ISDIR(st.st_mode) || check_ours(&empty, &container, o->old, REPLACED, NULL) < 0 ||
        container)
        return qt_fail(err, QT_E_USAGE, o->old, NULL,
                       "is in the way: rename or remove it; %s has to wait there until it is "
                       "replaced",
                       qt_base_name(o->dir));
    *left = true;
    return QT_OK;
}

/* st_dev would not tell: bind mounts keep it, and subvolumes, which can be renamed, do not. */
static bool is_mounted(const char *path)
{
    struct statx st;
    return statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, 0, &st) == 0 &&
           (st.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
}

/* DIR: absent, or a container that may be replaced. *exists tells which. */
static int check_target(bool *exists, const struct qt_outdir *o, struct qt_err *err)
{
    struct stat st;
    bool empty, container, left;
    *exists = false;
    if (lstat(o->dir, &st) < 0)
        return errno == ENOENT ? QT_OK : io_error(err, o->dir, "cannot stat");
    *exists = true;
    if (!S_ISDIR(st.st_mode))
        return qt_fail(err, QT_E_USAGE, o->dir, NULL, "exists and is not a directory");
    if (is_mounted(o->dir))
        return qt_fail(err, QT_E_USAGE, o->dir, NULL,
                       "is a mount point, which cannot be replaced: give a directory in it");
    if (!o->force)
        return qt_fail(err, QT_E_USAGE, o->dir, NULL, "exists already; --force replaces it");
    int rc = check_old(&left, o, err);
    if (rc == QT_OK)
        rc = check_ours(&empty, &container, o->dir, QT_MANIFEST_NAME, err);
    /* Before the work: what is replaced has to be emptied then. */
    if (rc == QT_OK && access(o->dir, W_OK | X_OK) < 0)
        rc = io_error(err, o->dir, "cannot be replaced");
    return rc;
}

int qt_outdir_open(struct qt_outdir *o, const char *dir, bool force, struct qt_err *err)
{
    bool exists;
    *o = (struct qt_outdir){.force = force, .lock_fd = -1};
    int rc = set_paths(o, dir, err);
    /* Made, found, renamed and synced there; an OUT.partial of an earlier run asks for none of it
     * before the end. */
    if (rc == QT_OK && access(o->parent, R_OK | W_OK | X_OK) < 0)
        rc = io_error(err, o->dir, "cannot be made in its directory");
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

/* Where the file system cannot lock, two runs on one output are the user's care. */
int qt_outdir_lock(int fd, const char *path, struct qt_err *err)
{
    if (flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK)
        return qt_fail(err, QT_E_RESOURCE, path, NULL, "in use by another process");
    return QT_OK;
}

/* The directory is what stays the same file from the first moment to the rename; the journal, which
 * is locked as well (network file systems share locks on files, not those on directories), goes
 * before. */
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

/* ---- the end -------------------------------------------------------------------------------- */

static int remove_journal(const struct qt_outdir *o, struct qt_err *err)
{
    if (unlinkat(o->lock_fd, QT_JOURNAL_NAME, 0) < 0)
        return io_error(err, o->partial, "cannot remove the journal");
    return qt_dir_sync(o->partial, err);
}

/* What was replaced; anything else under its name is let be. */
static int remove_old(const struct qt_outdir *o, struct qt_err *err)
{
    bool left;
    int rc = check_old(&left, o, NULL);
    return rc < 0 || !left ? QT_OK : remove_ours(o->old, REPLACED, err);
}

/* What has come into the way during the run is no mistake of the command's: the work stays. */
static int check_again(bool *exists, const struct qt_outdir *o, struct qt_err *err)
{
    struct qt_err why = {0};
    int rc = check_target(exists, o, &why);
    if (rc < 0)
        return qt_fail(err, QT_E_RESOURCE, why.file, NULL,
                       "%s (since the run began); once it is moved away, --resume goes on from %s",
                       why.reason, o->partial);
    return rc;
}

/* What an earlier run has left goes first: DIR is there. */
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
 * A container that is replaced waits under DIR.old until the new one is in place. A kill between
 * any two steps loses neither: at worst DIR.old stays, which the next --force removes once DIR is
 * in place, or DIR.partial is complete, which the same run takes for its own then. The journal goes
 * when DIR has made room: where it cannot (it has been mounted, say) the run can still be resumed.
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
    if (o->force)
        QT_TRY(remove_old(o, err));
done:
    return rc;
}
