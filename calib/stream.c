#include "calib/data.h"

#include <string.h>

enum { PIECE = 1 << 20 }; /* bytes read between two looks at `interrupted` */

static bool has_gzip_header(const struct qt_map *map)
{
    enum { RESERVED_FLAGS = 0xe0 };
    return map->size >= 4 && memcmp(map->data, "\x1f\x8b\x08", 3) == 0 &&
           !(map->data[3] & RESERVED_FLAGS);
}

int qt_stream_open(struct qt_stream *s, const char *path, bool (*interrupted)(void),
                   struct qt_err *err)
{
    enum { GZIP = 16 };
    int rc;
    *s = (struct qt_stream){.path = path, .interrupted = interrupted};
    QT_TRY(qt_map_open(&s->map, path, err));
    s->gzip = qt_name_ends_in(path, ".gz") || has_gzip_header(&s->map);
    if (!s->gzip)
        return QT_OK;
    QT_TRY(qt_kind_expect(QT_KIND_GZIP, NULL, s->map.data, s->map.size, path, err));
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
    qt_map_close(&s->map);
    qt_free(s->buffer);
    *s = (struct qt_stream){0};
}

/*
 * Inflates up to `room` bytes of a sequence of gzip members and refuses anything else. zlib's
 * gzread would accept files that are not compressed and ignore data after the last member. inflate
 * has 32-bit counters, so it gets the input in pieces.
 */
static int inflate_piece(struct qt_stream *s, char *out, size_t room, struct qt_err *err)
{
    const size_t left = s->map.size - s->at;
    const uInt give = (uInt)qt_min_size(left, PIECE);
    s->z.next_in = (Bytef *)(uintptr_t)(s->map.data + s->at); /* zlib only reads it */
    s->z.avail_in = give;
    s->z.next_out = (Bytef *)out;
    s->z.avail_out = (uInt)room;
    int status = inflate(&s->z, Z_NO_FLUSH);
    s->at += give - s->z.avail_in;
    s->size += room - s->z.avail_out;
    if (status == Z_STREAM_END) {
        s->ended = s->at == s->map.size;
        if (!s->ended)
            status = inflateReset(&s->z);
    }
    if (status == Z_OK || s->ended)
        return QT_OK;
    return status == Z_MEM_ERROR
               ? qt_fail(err, QT_E_RESOURCE, s->path, NULL, "out of memory while inflating")
               : qt_fail(err, QT_E_INPUT, s->path, NULL, "gzip: %s",
                         s->z.msg ? s->z.msg : "ends too early");
}

static void copy_piece(struct qt_stream *s, char *out, size_t room)
{
    const size_t n = qt_min_size(room, s->map.size - s->at);
    if (n) {
        const unsigned char *from = s->map.data + s->at;
        memcpy(out, from, n);
        qt_map_drop(&s->map, from, n);
    }
    s->at += n;
    s->size += n;
    s->ended = s->at == s->map.size;
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
