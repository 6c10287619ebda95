#include "calib/data.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PIECE = 1 << 20 }; /* bytes read between two looks at `interrupted` */

static bool has_gzip_header(const void *start, size_t size)
{
    enum { RESERVED_FLAGS = 0xe0 };
    const unsigned char *p = start;
    return size >= 4 && memcmp(p, "\x1f\x8b\x08", 3) == 0 && !(p[3] & RESERVED_FLAGS);
}

/* ---- pipes ---------------------------------------------------------------------------------- */

/* Opens what cannot be mapped: standard input, a named pipe. */
static int open_pipe(struct qt_stream *s, const char *path, struct qt_err *err)
{
    struct stat st;
    if (strcmp(path, "-") == 0)
        path = "/dev/stdin";
    if (stat(path, &st) < 0 || !(S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode)))
        return QT_OK; /* the mapping gives the error */
    s->pipe =
        strcmp(path, "/dev/stdin") == 0 ? dup(STDIN_FILENO) : open(path, O_RDONLY | O_CLOEXEC);
    if (s->pipe < 0)
        return qt_fail(err, QT_E_RESOURCE, s->path, NULL, "cannot open: %s", strerror(errno));
    return qt_array_new(&s->input, PIECE, 1, err);
}

/* Reads the next piece of a pipe when the last one is consumed; none at its end. */
static int read_pipe(struct qt_stream *s, struct qt_err *err)
{
    while (s->input_at == s->input_size) {
        const ssize_t n = read(s->pipe, s->input, PIECE);
        if (n < 0 && errno == EINTR && !(s->interrupted && s->interrupted()))
            continue;
        if (n < 0 && errno == EINTR)
            return qt_fail(err, QT_E_INTERRUPTED, s->path, NULL, "interrupted while it was read");
        if (n < 0)
            return qt_fail(err, QT_E_RESOURCE, s->path, NULL, "cannot read: %s", strerror(errno));
        s->input_at = 0;
        s->input_size = (size_t)n;
        if (n == 0)
            break;
    }
    return QT_OK;
}

/* The input that is at hand: the rest of the mapping, or of the piece of a pipe. */
static const unsigned char *input(const struct qt_stream *s, size_t *left)
{
    *left = s->pipe >= 0 ? s->input_size - s->input_at : s->map.size - s->at;
    return s->pipe >= 0 ? (const unsigned char *)s->input + s->input_at : s->map.data + s->at;
}

static void consume_input(struct qt_stream *s, size_t n)
{
    if (s->pipe >= 0)
        s->input_at += n;
    else
        s->at += n;
}

/* ---- streams -------------------------------------------------------------------------------- */

int qt_stream_open(struct qt_stream *s, const char *path, bool (*interrupted)(void),
                   struct qt_err *err)
{
    enum { GZIP = 16 };
    int rc;
    const bool standard = strcmp(path, "-") == 0;
    const unsigned char *start;
    size_t size;
    *s = (struct qt_stream){.path = qt_data_name(path), .interrupted = interrupted, .pipe = -1};
    QT_TRY(open_pipe(s, path, err));
    if (s->pipe >= 0)
        QT_TRY(read_pipe(s, err));
    else
        QT_TRY(qt_map_open(&s->map, standard ? "/dev/stdin" : path, err));
    start = input(s, &size);
    s->gzip = qt_name_ends_in(path, ".gz") || has_gzip_header(start, size);
    if (!s->gzip)
        return QT_OK;
    QT_TRY(qt_kind_expect(QT_KIND_GZIP, NULL, start, size, s->path, err));
    s->z = (z_stream){.zalloc = qt_zlib_alloc, .zfree = qt_zlib_free};
    if (inflateInit2(&s->z, GZIP + MAX_WBITS) != Z_OK)
        return qt_fail(err, QT_E_RESOURCE, path, NULL, "out of memory while inflating");
    s->inflating = true;
done:
    return rc;
}

void qt_stream_close(struct qt_stream *s)
{
    if (s->inflating)
        inflateEnd(&s->z);
    if (s->pipe >= 0)
        close(s->pipe);
    qt_map_close(&s->map);
    qt_free(s->input);
    qt_free(s->buffer);
    *s = (struct qt_stream){.pipe = -1};
}

/*
 * Inflates up to `room` bytes of a sequence of gzip members and refuses anything else. zlib's
 * gzread would accept files that are not compressed and ignore data after the last member. inflate
 * has 32-bit counters, so it gets the input in pieces.
 */
static int inflate_piece(struct qt_stream *s, char *out, size_t room, struct qt_err *err)
{
    int rc = QT_OK;
    size_t left;
    const unsigned char *in = input(s, &left);
    const uInt give = (uInt)qt_min_size(left, PIECE);
    s->z.next_in = (Bytef *)(uintptr_t)in; /* zlib only reads it */
    s->z.avail_in = give;
    s->z.next_out = (Bytef *)out;
    s->z.avail_out = (uInt)room;
    int status = inflate(&s->z, Z_NO_FLUSH);
    consume_input(s, give - s->z.avail_in);
    s->size += room - s->z.avail_out;
    if (status == Z_STREAM_END) {
        if (s->pipe >= 0)
            QT_TRY(read_pipe(s, err));
        input(s, &left);
        s->ended = left == 0;
        if (!s->ended)
            status = inflateReset(&s->z);
    }
    if (status == Z_OK || s->ended)
        return QT_OK;
    return status == Z_MEM_ERROR
               ? qt_fail(err, QT_E_RESOURCE, s->path, NULL, "out of memory while inflating")
               : qt_fail(err, QT_E_INPUT, s->path, NULL, "gzip: %s",
                         s->z.msg ? s->z.msg : "ends too early");
done:
    return rc;
}

static void copy_piece(struct qt_stream *s, char *out, size_t room)
{
    size_t left;
    const unsigned char *from = input(s, &left);
    const size_t n = qt_min_size(room, left);
    if (n)
        memcpy(out, from, n);
    if (n && s->pipe < 0)
        qt_map_drop(&s->map, from, n);
    consume_input(s, n);
    s->size += n;
    s->ended = s->pipe >= 0 ? left == 0 : n == left;
}

/* Makes room for `more` bytes after data[size]. */
static int make_room(struct qt_stream *s, size_t more, struct qt_err *err)
{
    if (s->size > QT_STREAM_MAX)
        return qt_fail(err, QT_E_INPUT, s->path, NULL,
                       "more than %zu bytes in one text: split it into several files or records",
                       QT_STREAM_MAX);
    if (s->data != s->buffer && s->size)
        memmove(s->buffer, s->data, s->size);
    s->data = s->buffer;
    int rc = qt_array_grow(&s->buffer, &s->capacity, s->size + more, 1, err);
    s->data = s->buffer;
    return rc;
}

int qt_stream_fill(struct qt_stream *s, size_t need, struct qt_err *err)
{
    int rc = QT_OK;
    while (s->size < need && !s->ended) {
        if (s->interrupted && s->interrupted())
            return qt_fail(err, QT_E_INTERRUPTED, s->path, NULL, "interrupted while it was read");
        QT_TRY(make_room(s, PIECE, err));
        if (s->pipe >= 0)
            QT_TRY(read_pipe(s, err));
        if (s->gzip)
            QT_TRY(inflate_piece(s, s->data + s->size, PIECE, err));
        else
            copy_piece(s, s->data + s->size, PIECE);
    }
done:
    return rc;
}

void qt_stream_consume(struct qt_stream *s, size_t n)
{
    if (n == 0)
        return;
    const char *end = s->data + n;
    for (const char *p = s->data; (p = memchr(p, '\n', (size_t)(end - p))); p++)
        s->lines++;
    s->data += n;
    s->size -= n;
}
