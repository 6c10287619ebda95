/* Files: mapping, whole reads, durable writes. Errors carry the path and errno's text. */
#ifndef QT_BASE_IO_H
#define QT_BASE_IO_H

#include "base/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* Of a mapping: where it is read that is a SIGBUS, where it is written from EFAULT. */
#define QT_MAPPING_LOST "a file that is being read became shorter, or its disk failed"

struct qt_map {
    const unsigned char *data; /* NULL when size is 0 */
    size_t size;
    struct timespec modified; /* as it was when mapped */
};

/* Maps a regular file read-only. Refuses directories, devices, pipes (QT_E_INPUT). */
int qt_map_open(struct qt_map *out, const char *path, struct qt_err *err);
void qt_map_close(struct qt_map *map);
/* QT_E_INPUT when the file at `path` is no longer as it was when it was mapped from there: what has
 * been read of it may be neither the old nor the new contents. */
int qt_map_check_unchanged(const struct qt_map *map, const char *path, struct qt_err *err);
/* Lets the kernel drop the pages of [data, data+size) from our resident set; data stays valid. */
void qt_map_drop(const struct qt_map *map, const void *data, size_t size);

/* Whole file into *out (qt_free), NUL-terminated beyond *size; QT_E_INPUT above `limit` bytes. */
int qt_file_read(char **out, size_t *size, const char *path, size_t limit, struct qt_err *err);

/* True also when it cannot be told (no permission, I/O error): opening it then says why. */
bool qt_path_exists(const char *path);
bool qt_path_is_dir(const char *path);
/* A directory, or a link to nothing: something is there, but no file, of whatever kind. */
bool qt_path_is_no_file(const char *path);
/* "dir/name"; free with qt_free. */
int qt_path_join(char **out, const char *dir, const char *name, struct qt_err *err);
/* "model.safetensors" of "a/model.safetensors". */
const char *qt_base_name(const char *path);
/* True when there is something before the ending: "a.gz", not ".gz". */
bool qt_name_ends_in(const char *name, const char *ending);
/* True for a plain file name: not empty, no '/', not "." or "..", no control characters. */
bool qt_name_is_plain(const char *name);

/* mkdir, one level; an existing directory is fine. */
int qt_dir_make(const char *path, struct qt_err *err);
/* Removes a directory and the files in it; QT_E_RESOURCE if it holds a directory. One that is not
 * there is fine. */
int qt_dir_remove(const char *path, struct qt_err *err);
int qt_dir_sync(const char *path, struct qt_err *err);
int qt_path_rename(const char *from, const char *to, struct qt_err *err);

/* Writing. fd-based so that data can be placed at planned offsets. */
int qt_file_create(int *fd, const char *path, bool keep_existing, struct qt_err *err);
/* For reading and writing a file of ours, which must be there (QT_E_RESOURCE). */
int qt_file_open(int *fd, const char *path, struct qt_err *err);
int qt_file_write_at(int fd, const char *path, const void *data, size_t size, uint64_t offset,
                     struct qt_err *err);
/* Exactly size bytes; a file that ends before is QT_E_INPUT. */
int qt_file_read_at(int fd, const char *path, void *data, size_t size, uint64_t offset,
                    struct qt_err *err);
/* fsync + close. *fd becomes -1. */
int qt_file_finish(int *fd, const char *path, struct qt_err *err);
/* create + write + fsync + close. */
int qt_file_write(const char *path, const void *data, size_t size, struct qt_err *err);

/* CRC-32 (zlib) of any length, continuing from crc (0 to start); of much by all threads. */
uint32_t qt_crc32(uint32_t crc, const void *data, size_t size);

#endif
