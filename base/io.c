#include "base/io.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/stop.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

static int io_fail(struct qt_err *err, const char *path, const char *what)
{
    int e = errno;
    bool absent = e == ENOENT || e == ENOTDIR;
    return qt_fail(err, absent ? QT_E_INPUT : QT_E_RESOURCE, path, NULL, "%s: %s", what,
                   strerror(e));
}

static int open_regular(int *fd, struct stat *st, const char *path, struct qt_err *err)
{
    /* O_NONBLOCK: open must not block on a FIFO, which the check below rejects. */
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0)
        return io_fail(err, path, "cannot open");
    if (fstat(*fd, st) < 0) {
        int rc = io_fail(err, path, "cannot stat");
        close(*fd);
        return rc;
    }
    if (!S_ISREG(st->st_mode)) {
        close(*fd);
        return qt_fail(err, QT_E_INPUT, path, NULL, "not a regular file");
    }
    return QT_OK;
}

int qt_map_open(struct qt_map *out, const char *path, struct qt_err *err)
{
    int fd;
    struct stat st;
    *out = (struct qt_map){0};
    int rc = open_regular(&fd, &st, path, err);
    if (rc < 0)
        return rc;
    *out = (struct qt_map){.device = st.st_dev,
                           .inode = st.st_ino,
                           .modified = st.st_mtim,
                           .changed = st.st_ctim,
                           .mode = st.st_mode & 0777};
    if (st.st_size) {
        size_t size = (size_t)st.st_size;
        void *p = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED)
            rc = io_fail(err, path, "cannot map");
        else
            out->data = p, out->size = size;
    }
    close(fd);
    return rc;
}

void qt_map_close(struct qt_map *map)
{
    if (map->data)
        munmap((void *)(uintptr_t)map->data, map->size);
    *map = (struct qt_map){0};
}

static bool same_time(struct timespec a, struct timespec b)
{
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

int qt_map_check_unchanged(const struct qt_map *map, const char *path, struct qt_err *err)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return io_fail(err, path, "cannot stat");
    if ((size_t)st.st_size == map->size && st.st_dev == map->device && st.st_ino == map->inode &&
        same_time(st.st_mtim, map->modified) && same_time(st.st_ctim, map->changed))
        return QT_OK;
    return qt_fail(err, QT_E_INPUT, path, NULL, "changed while it was being read");
}

void qt_map_drop(const struct qt_map *map, const void *data, size_t size)
{
    /* A page fault maps the pages around it too, in aligned windows of this size. Unless whole
     * windows are dropped, small tensors leave each other's pages in memory. */
    enum { WINDOW = 1 << 16 };
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)data;
    const uintptr_t start = (uintptr_t)map->data;
    if (!map->data || size == 0 || at < start || at - start >= map->size)
        return;
    /* Clamp to the map: dropping private pages outside it would lose their contents. */
    const uintptr_t end = (start + map->size + page - 1) & ~(page - 1);
    uintptr_t lo = at & ~(uintptr_t)(WINDOW - 1);
    uintptr_t hi = at + qt_min_size(size, map->size - (at - start));
    hi = (hi + WINDOW - 1) & ~(uintptr_t)(WINDOW - 1);
    lo = lo < start ? start : lo;
    hi = hi > end ? end : hi;
    madvise((void *)lo, hi - lo, MADV_DONTNEED); /* only advice: failure does not matter */
}

int qt_file_read(char **out, size_t *size, const char *path, size_t limit, struct qt_err *err)
{
    int fd;
    size_t have = 0;
    struct stat st;
    *out = NULL;
    int rc = open_regular(&fd, &st, path, err);
    if (rc < 0)
        return rc;
    *size = (size_t)st.st_size;
    if (*size > limit) {
        rc = qt_fail(err, QT_E_INPUT, path, NULL, "%zu bytes, at most %zu expected", *size, limit);
        goto done;
    }
    *out = qt_malloc(*size + 1);
    if (!*out) {
        rc = qt_fail(err, QT_E_RESOURCE, path, NULL, "out of memory (%zu bytes)", *size + 1);
        goto done;
    }
    while (have < *size) {
        ssize_t n = read(fd, *out + have, *size - have);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            rc = n < 0 ? io_fail(err, path, "cannot read")
                       : qt_fail(err, QT_E_INPUT, path, NULL, "file shrank while being read");
            break;
        }
        have += (size_t)n;
    }
    (*out)[have] = '\0';
done:
    close(fd);
    if (rc < 0) {
        qt_free(*out);
        *out = NULL;
    }
    return rc;
}

bool qt_path_exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

bool qt_path_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool qt_path_is_no_file(const char *path)
{
    struct stat st;
    if (lstat(path, &st) < 0)
        return false;
    if (S_ISLNK(st.st_mode) && stat(path, &st) < 0)
        return errno == ENOENT;
    return S_ISDIR(st.st_mode);
}

int qt_path_join(char **out, const char *dir, const char *name, struct qt_err *err)
{
    size_t n = strlen(dir);
    return qt_string_format(out, err, "%s%s%s", dir, n && dir[n - 1] == '/' ? "" : "/", name);
}

const char *qt_base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

bool qt_name_ends_in(const char *name, const char *ending)
{
    const size_t n = strlen(name), m = strlen(ending);
    return n > m && strcmp(name + n - m, ending) == 0;
}

bool qt_name_is_plain(const char *name)
{
    if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strlen(name) > 255)
        return false;
    for (const char *p = name; *p; p++)
        if (*p == '/' || qt_control_size(p))
            return false;
    return true;
}

int qt_dir_make(const char *path, struct qt_err *err)
{
    if (mkdir(path, 0777) == 0 || (errno == EEXIST && qt_path_is_dir(path)))
        return QT_OK;
    int e = errno;
    return qt_fail(err, QT_E_RESOURCE, path, NULL, "cannot create directory: %s", strerror(e));
}

int qt_dir_remove(const char *path, struct qt_err *err)
{
    DIR *dir = opendir(path);
    struct dirent *entry;
    int rc = QT_OK;
    if (!dir)
        return errno == ENOENT ? QT_OK : io_fail(err, path, "cannot open directory");
    while (rc == QT_OK && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0) < 0)
            rc = io_fail(err, path, entry->d_name);
    }
    closedir(dir);
    if (rc == QT_OK && rmdir(path) < 0)
        rc = io_fail(err, path, "cannot remove directory");
    return rc;
}

int qt_dir_sync(const char *path, struct qt_err *err)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return io_fail(err, path, "cannot open directory");
    int rc = fsync(fd) < 0 ? io_fail(err, path, "cannot sync directory") : QT_OK;
    close(fd);
    return rc;
}

int qt_path_rename(const char *from, const char *to, struct qt_err *err)
{
    return rename(from, to) < 0 ? io_fail(err, to, "cannot rename into place") : QT_OK;
}

static int create(int *fd, const char *path, int flags, mode_t mode, struct qt_err *err)
{
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | flags, mode);
    if (*fd >= 0)
        return QT_OK;
    int e = errno;
    return qt_fail(err, QT_E_RESOURCE, path, NULL, "cannot create: %s", strerror(e));
}

int qt_file_create(int *fd, const char *path, bool keep_existing, struct qt_err *err)
{
    return create(fd, path, keep_existing ? 0 : O_TRUNC, 0666, err);
}

int qt_file_create_new(int *fd, const char *path, unsigned mode, struct qt_err *err)
{
    return create(fd, path, O_EXCL, (mode_t)mode & 0666, err);
}

int qt_file_open(int *fd, const char *path, struct qt_err *err)
{
    *fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (*fd >= 0)
        return QT_OK;
    int e = errno;
    return qt_fail(err, QT_E_RESOURCE, path, NULL, "cannot open: %s", strerror(e));
}

int qt_file_write_at(int fd, const char *path, const void *data, size_t size, uint64_t offset,
                     struct qt_err *err)
{
    const unsigned char *p = data;
    while (size) {
        ssize_t n = pwrite(fd, p, size, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EFAULT) /* data is in a mapping whose file was truncated */
            return qt_fail(err, QT_E_RESOURCE, NULL, NULL, QT_MAPPING_LOST);
        if (n <= 0)
            return io_fail(err, path, "cannot write");
        p += n;
        size -= (size_t)n;
        offset += (uint64_t)n;
    }
    return QT_OK;
}

int qt_file_reserve(int fd, const char *path, uint64_t size, struct qt_err *err)
{
    int lacking;
    do {
        lacking = size && fallocate(fd, 0, 0, (off_t)size) < 0 ? errno : 0;
    } while (lacking == EINTR);
    if (lacking == EOPNOTSUPP || lacking == ENOSYS)
        lacking = ftruncate(fd, (off_t)size) < 0 ? errno : 0;
    return lacking
               ? qt_fail(err, QT_E_RESOURCE, path, NULL, "no room for the %llu bytes needed: %s",
                         (unsigned long long)size, strerror(lacking))
               : QT_OK;
}

int qt_file_read_at(int fd, const char *path, void *data, size_t size, uint64_t offset,
                    struct qt_err *err)
{
    unsigned char *p = data;
    while (size) {
        ssize_t n = pread(fd, p, size, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return io_fail(err, path, "cannot read");
        if (n == 0)
            return qt_fail(err, QT_E_INPUT, path, NULL, "the file is truncated");
        p += n;
        size -= (size_t)n;
        offset += (uint64_t)n;
    }
    return QT_OK;
}

int qt_file_finish(int *fd, const char *path, struct qt_err *err)
{
    int rc = QT_OK;
    if (fsync(*fd) < 0)
        rc = io_fail(err, path, "cannot sync");
    if (close(*fd) < 0 && rc == QT_OK)
        rc = io_fail(err, path, "cannot close");
    *fd = -1;
    return rc;
}

int qt_file_write(const char *path, const void *data, size_t size, struct qt_err *err)
{
    int fd;
    int rc = qt_file_create(&fd, path, false, err);
    if (rc < 0)
        return rc;
    rc = qt_file_write_at(fd, path, data, size, 0, err);
    int end = qt_file_finish(&fd, path, rc < 0 ? NULL : err);
    return rc < 0 ? rc : end;
}

static int check_free(const char *path, const char *taken, struct qt_err *err)
{
    struct stat st;
    if (lstat(path, &st) < 0)
        return QT_OK;
    if (!S_ISREG(st.st_mode))
        return qt_fail(err, QT_E_USAGE, path, NULL, "exists and is not a file");
    return taken ? qt_fail(err, QT_E_USAGE, path, NULL, "%s", taken) : QT_OK;
}

int qt_file_publish(const char *path, const struct qt_file_piece *piece, size_t n,
                    const char *taken, struct qt_err *err)
{
    char *partial = NULL;
    uint64_t at = 0;
    bool created = false;
    int fd = -1, rc;
    QT_TRY(check_free(path, taken, err));
    QT_TRY(qt_string_format(&partial, err, "%s.%ld.partial", path, (long)getpid()));
    QT_TRY(qt_file_create_new(&fd, partial, 0666, err));
    created = true;
    for (size_t i = 0; i < n; at += piece[i++].size)
        QT_TRY(qt_file_write_at(fd, partial, piece[i].data, piece[i].size, at, err));
    QT_TRY(qt_file_finish(&fd, partial, err));
    QT_TRY(check_free(path, taken, err));
    QT_TRY(qt_path_rename(partial, path, err));
    created = false;
done:
    if (fd >= 0)
        close(fd);
    if (created)
        unlink(partial);
    qt_free(partial);
    return rc;
}

enum { CRC_PIECE = 4 << 20, CRC_PIECES = 64 };

struct crc_job {
    const unsigned char *data;
    size_t size;
    uLong crc[CRC_PIECES];
};

static size_t crc_piece_size(const struct crc_job *job, size_t item)
{
    return qt_min_size(CRC_PIECE, job->size - item * CRC_PIECE);
}

static void crc_piece(void *ctx, size_t item)
{
    struct crc_job *job = ctx;
    job->crc[item] = crc32_z(0, job->data + item * CRC_PIECE, crc_piece_size(job, item));
}

uint32_t qt_crc32(uint32_t crc, const void *data, size_t size)
{
    const size_t most = (size_t)CRC_PIECE * CRC_PIECES;
    uLong sum = crc;
    if (size <= CRC_PIECE)
        return (uint32_t)crc32_z(sum, data, size);
    for (size_t at = 0; at < size; at += most) {
        struct crc_job job = {(const unsigned char *)data + at, qt_min_size(most, size - at), {0}};
        const size_t pieces = qt_ceil_div(job.size, CRC_PIECE);
        qt_parallel_for(pieces, crc_piece, &job);
        for (size_t i = 0; i < pieces; i++)
            sum = crc32_combine(sum, job.crc[i], (z_off_t)crc_piece_size(&job, i));
    }
    return (uint32_t)sum;
}

int qt_crc32_file(uint32_t *crc, const void *data, size_t size, struct qt_err *err)
{
    enum { PIECE = 1 << 24 };
    int rc = QT_OK;
    *crc = 0;
    for (size_t at = 0; at < size && rc == QT_OK; at += PIECE) {
        *crc = qt_crc32(*crc, (const unsigned char *)data + at, qt_min_size(PIECE, size - at));
        rc = qt_stop_check(err);
    }
    return rc;
}
