/* Files: mapping, reading, durable writing. Error messages include the path and strerror. */
#ifndef QT_BASE_IO_H
#define QT_BASE_IO_H

#include "base/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* Message for a truncated mapping: reads raise SIGBUS, writes from the mapping fail with EFAULT. */
#define QT_MAPPING_LOST "a file was truncated while qtool was reading it, or its disk failed"

struct qt_map {
    const unsigned char *data; /* NULL when size is 0 */
    size_t size;
    /* When the file was mapped: its identity, and the times of its last change. The second time
     * (ctime) cannot be set back. */
    uint64_t device, inode;
    struct timespec modified, changed;
    unsigned mode; /* permissions */
};

/* Maps a regular file read-only. Rejects directories, devices and pipes (QT_E_INPUT). */
int qt_map_open(struct qt_map *out, const char *path, struct qt_err *err);
void qt_map_close(struct qt_map *map);
/* Fails with QT_E_INPUT if the file at `path` is another one than was mapped, or has changed since:
 * data read from the mapping may mix old and new contents. */
int qt_map_check_unchanged(const struct qt_map *map, const char *path, struct qt_err *err);
/* Lets the kernel evict the pages around [data, data + size) from memory; data stays valid. */
void qt_map_drop(const struct qt_map *map, const void *data, size_t size);

/* Reads a whole file into *out (freed with qt_free); a NUL follows the *size bytes. QT_E_INPUT if
 * the file has more than `limit` bytes. */
int qt_file_read(char **out, size_t *size, const char *path, size_t limit, struct qt_err *err);

/* Also true if lstat fails for another reason than absence (no permission, I/O error): opening the
 * file then reports the reason. */
bool qt_path_exists(const char *path);
bool qt_path_is_dir(const char *path);
/* True for a directory and for a dangling symbolic link. */
bool qt_path_is_no_file(const char *path);
/* *out = "dir/name"; freed with qt_free. */
int qt_path_join(char **out, const char *dir, const char *name, struct qt_err *err);
/* The part after the last '/': "model.safetensors" for "a/model.safetensors". */
const char *qt_base_name(const char *path);
/* True if `ending` is a proper suffix: "a.gz" ends in ".gz", ".gz" does not. */
bool qt_name_ends_in(const char *name, const char *ending);
/* True for a plain file name: 1 to 255 bytes, no '/', not "." or "..", no control characters. */
bool qt_name_is_plain(const char *name);

/* Creates one directory level; succeeds if the directory exists. */
int qt_dir_make(const char *path, struct qt_err *err);
/* Removes a directory and the files in it; succeeds if it does not exist. QT_E_RESOURCE if it
 * contains a directory. */
int qt_dir_remove(const char *path, struct qt_err *err);
int qt_dir_sync(const char *path, struct qt_err *err);
int qt_path_rename(const char *from, const char *to, struct qt_err *err);

/* Creates a file for reading and writing, truncated unless keep_existing. Writers use file
 * descriptors because data goes to planned offsets. */
int qt_file_create(int *fd, const char *path, bool keep_existing, struct qt_err *err);
/* Creates a file that does not exist yet, with at most these permissions. */
int qt_file_create_new(int *fd, const char *path, unsigned mode, struct qt_err *err);
/* Opens a file of the output for reading and writing; QT_E_RESOURCE if it cannot be opened. */
int qt_file_open(int *fd, const char *path, struct qt_err *err);
int qt_file_write_at(int fd, const char *path, const void *data, size_t size, uint64_t offset,
                     struct qt_err *err);
/* Gives the file this size, with disk space for all of it if the file system can allocate it: then
 * a full disk is found before the work. */
int qt_file_reserve(int fd, const char *path, uint64_t size, struct qt_err *err);
/* Reads exactly `size` bytes; QT_E_INPUT if the file is shorter. */
int qt_file_read_at(int fd, const char *path, void *data, size_t size, uint64_t offset,
                    struct qt_err *err);
/* fsync + close; *fd becomes -1. */
int qt_file_finish(int *fd, const char *path, struct qt_err *err);
/* create + write + fsync + close. */
int qt_file_write(const char *path, const void *data, size_t size, struct qt_err *err);
/* Writes a whole file under a temporary name beside `path`, syncs and renames it: `path` is
 * complete, or as it was. The pieces follow one another. taken: the message of QT_E_USAGE if `path`
 * exists; NULL: it is replaced. QT_E_USAGE as well if it is not a regular file. */
struct qt_file_piece {
    const void *data;
    size_t size;
};
int qt_file_publish(const char *path, const struct qt_file_piece *piece, size_t n,
                    const char *taken, struct qt_err *err);

/* CRC-32 (zlib) of the data, continuing from crc (0 to start). Uses all threads for large data. */
uint32_t qt_crc32(uint32_t crc, const void *data, size_t size);
/* *crc = CRC-32 of data that may have to be read from disk. QT_E_INTERRUPTED on a request to
 * stop. */
int qt_crc32_file(uint32_t *crc, const void *data, size_t size, struct qt_err *err);

#endif
