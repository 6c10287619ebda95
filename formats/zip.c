/*
 * Reads zip archives as torch.save writes them (APPNOTE 6.3): stored or deflated entries, zip64,
 * one disk, no encryption. The central directory is authoritative; local headers only locate the
 * data.
 */
#include "formats/formats_internal.h"

#include <stdlib.h>
#include <zlib.h>

enum {
    END_SIZE = 22,     /* end of central directory record without comment */
    END64_SIZE = 56,   /* zip64 end of central directory record */
    LOCATOR_SIZE = 20, /* zip64 locator, directly before the end record */
    CENTRAL_SIZE = 46, /* central directory header without its variable part */
    LOCAL_SIZE = 30,   /* local header without its variable part */
    MAX_COMMENT = 65535,
    MAX_DEFLATE = 1032, /* highest expansion of deflate: 258 bytes in 2 bits (RFC 1951) */
    ENCRYPTED = 1 | 1 << 6 | 1 << 13,
};

struct reader {
    const unsigned char *data;
    size_t size;
    const char *file;
    struct qt_err *err;
};

static int bad(const struct reader *r, const char *what)
{
    return qt_fail(r->err, QT_E_INPUT, r->file, NULL, "zip: %s", what);
}

static int bad_entry(const struct reader *r, const struct qt_zip_entry *e, const char *what)
{
    return qt_fail(r->err, QT_E_INPUT, r->file, NULL, "zip entry '%.*s': %s",
                   (int)qt_min_size(e->name_size, 200), e->name, what);
}

static uint16_t u16(const unsigned char *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}
static uint32_t u32(const unsigned char *p)
{
    return (uint32_t)u16(p) | (uint32_t)u16(p + 2) << 16;
}
static uint64_t u64(const unsigned char *p)
{
    return u32(p) | (uint64_t)u32(p + 4) << 32;
}

/* True if [offset, offset + n) lies in [0, limit). */
static bool inside(uint64_t offset, uint64_t n, uint64_t limit)
{
    return offset <= limit && n <= limit - offset;
}

struct directory {
    uint64_t count, size, offset;
    size_t limit; /* offset of the records after it */
};

/* The end record is followed only by a comment of the length that it states. */
static int find_end(size_t *out, const struct reader *r)
{
    for (size_t back = END_SIZE; back <= r->size && back <= END_SIZE + MAX_COMMENT; back++) {
        const unsigned char *p = r->data + r->size - back;
        if (memcmp(p, "PK\5\6", 4) == 0 && u16(p + 20) == back - END_SIZE) {
            *out = r->size - back;
            return QT_OK;
        }
    }
    return bad(r, "no end of central directory: truncated, or not a zip archive");
}

static int read_end64(struct directory *dir, const struct reader *r, size_t end)
{
    const unsigned char *locator = r->data + end - LOCATOR_SIZE;
    uint64_t offset = u64(locator + 8);
    if (!inside(offset, END64_SIZE, end - LOCATOR_SIZE))
        return bad(r, "zip64 end record outside the file");
    const unsigned char *p = r->data + offset;
    if (memcmp(p, "PK\6\6", 4) != 0)
        return bad(r, "no zip64 end record where the locator points");
    if (u32(locator + 4) != 0 || u32(p + 16) != 0 || u32(p + 20) != 0 || u64(p + 24) != u64(p + 32))
        return bad(r, "archives of several disks are not supported");
    *dir = (struct directory){u64(p + 32), u64(p + 40), u64(p + 48), (size_t)offset};
    return QT_OK;
}

static int read_end(struct directory *dir, const struct reader *r)
{
    size_t end = 0;
    int rc = find_end(&end, r);
    if (rc < 0)
        return rc;
    const unsigned char *p = r->data + end;
    if (end >= LOCATOR_SIZE && memcmp(p - LOCATOR_SIZE, "PK\6\7", 4) == 0)
        rc = read_end64(dir, r, end);
    else if (u16(p + 4) != 0 || u16(p + 6) != 0 || u16(p + 8) != u16(p + 10))
        rc = bad(r, "archives of several disks are not supported");
    else
        *dir = (struct directory){u16(p + 10), u32(p + 12), u32(p + 16), end};
    if (rc < 0)
        return rc;
    if (!inside(dir->offset, dir->size, dir->limit))
        return bad(r, "central directory outside the file");
    if (dir->count > dir->size / CENTRAL_SIZE)
        return bad(r, "more entries than the central directory has room for");
    return QT_OK;
}

/* The zip64 extra field holds the values, in the order size, packed size, offset, that did not fit
 * into the header (where they are all ones). */
static int read_extra(struct qt_zip_entry *e, const struct reader *r, const unsigned char *p,
                      size_t size)
{
    size_t *field[3] = {&e->size, &e->packed, &e->header};
    bool missing = e->size == UINT32_MAX || e->packed == UINT32_MAX || e->header == UINT32_MAX;
    for (size_t at = 0; missing && size - at >= 4;) {
        size_t id = u16(p + at), n = u16(p + at + 2);
        at += 4;
        if (n > size - at)
            return bad_entry(r, e, "extra field beyond its end");
        for (size_t i = 0, from = at; id == 1 && i < 3; i++) {
            if (*field[i] != UINT32_MAX)
                continue;
            if (at + n - from < 8)
                return bad_entry(r, e, "zip64 field too short");
            *field[i] = u64(p + from);
            from += 8;
        }
        missing &= id != 1;
        at += n;
    }
    return missing ? bad_entry(r, e, "zip64 field missing") : QT_OK;
}

/* limit: offset of the central directory, before which local header and data must end. */
static int read_local(struct qt_zip_entry *e, const struct reader *r, size_t limit)
{
    if (!inside(e->header, LOCAL_SIZE, limit))
        return bad_entry(r, e, "header outside the file");
    const unsigned char *p = r->data + e->header;
    if (memcmp(p, "PK\3\4", 4) != 0)
        return bad_entry(r, e, "no local header where the directory points");
    size_t name_size = u16(p + 26), extra_size = u16(p + 28);
    e->data = e->header + LOCAL_SIZE + name_size + extra_size;
    if (!inside(e->data, e->packed, limit))
        return bad_entry(r, e, "data outside the file");
    if (name_size != e->name_size || memcmp(p + LOCAL_SIZE, e->name, name_size) != 0)
        return bad_entry(r, e, "its local header has another name");
    return QT_OK;
}

static int check_sizes(const struct qt_zip_entry *e, const struct reader *r)
{
    if (!e->deflated && e->size != e->packed)
        return bad_entry(r, e, "stored with two different sizes");
    if (e->deflated && e->size / MAX_DEFLATE > e->packed)
        return bad_entry(r, e, "claims to inflate to more than deflate can express");
    return QT_OK;
}

static int read_entry(struct qt_zip_entry *e, size_t *used, const struct reader *r,
                      const unsigned char *p, size_t room, size_t limit)
{
    if (room < CENTRAL_SIZE || memcmp(p, "PK\1\2", 4) != 0)
        return bad(r, "central directory is damaged");
    unsigned flags = u16(p + 8), method = u16(p + 10);
    size_t name_size = u16(p + 28), extra_size = u16(p + 30);
    *used = CENTRAL_SIZE + name_size + extra_size + u16(p + 32);
    if (*used > room)
        return bad(r, "central directory is damaged");
    *e = (struct qt_zip_entry){
        .name = (const char *)p + CENTRAL_SIZE,
        .name_size = name_size,
        .header = u32(p + 42),
        .packed = u32(p + 20),
        .size = u32(p + 24),
        .crc = u32(p + 16),
        .deflated = method == 8,
    };
    if (flags & ENCRYPTED)
        return bad_entry(r, e, "encrypted");
    if (method != 0 && method != 8)
        return qt_fail(r->err, QT_E_UNSUPPORTED, r->file, NULL,
                       "zip entry '%.*s': compression method %u is not supported",
                       (int)qt_min_size(name_size, 200), e->name, method);
    int rc = read_extra(e, r, p + CENTRAL_SIZE + name_size, extra_size);
    if (rc == QT_OK)
        rc = check_sizes(e, r);
    return rc < 0 ? rc : read_local(e, r, limit);
}

static int compare_offsets(const void *a, const void *b)
{
    const struct qt_zip_entry *x = a, *y = b;
    return (x->header > y->header) - (x->header < y->header);
}

static int compare_names(const void *a, const void *b)
{
    const struct qt_zip_entry *x = a, *y = b;
    int order = memcmp(x->name, y->name, qt_min_size(x->name_size, y->name_size));
    return order ? order : (x->name_size > y->name_size) - (x->name_size < y->name_size);
}

/* Checks for overlaps and equal names; leaves the entries sorted by name. */
static int check_entries(const struct qt_zip *zip, const struct reader *r)
{
    struct qt_zip_entry *e = zip->entries;
    qsort(e, zip->count, sizeof *e, compare_offsets);
    for (size_t i = 1; i < zip->count; i++)
        if (e[i].header < e[i - 1].data + e[i - 1].packed)
            return bad_entry(r, &e[i], "overlaps another entry");
    qsort(e, zip->count, sizeof *e, compare_names);
    for (size_t i = 1; i < zip->count; i++)
        if (compare_names(&e[i - 1], &e[i]) == 0)
            return bad_entry(r, &e[i], "occurs twice");
    return QT_OK;
}

int qt_zip_open(struct qt_zip *out, const struct qt_map *map, const char *file, struct qt_err *err)
{
    int rc;
    struct reader r = {map->data, map->size, file, err};
    struct directory dir = {0};
    *out = (struct qt_zip){0};
    QT_TRY(read_end(&dir, &r));
    QT_TRY(qt_array_new(&out->entries, dir.count, sizeof *out->entries, err));
    size_t at = dir.offset, end = dir.offset + dir.size, used = 0;
    for (; out->count < dir.count; out->count++, at += used)
        QT_TRY(read_entry(&out->entries[out->count], &used, &r, r.data + at, end - at, dir.offset));
    QT_TRY(at == end ? QT_OK : bad(&r, "central directory has more entries than stated"));
    QT_TRY(check_entries(out, &r));
done:
    if (rc < 0)
        qt_zip_close(out);
    return rc;
}

void qt_zip_close(struct qt_zip *zip)
{
    qt_free(zip->entries);
    *zip = (struct qt_zip){0};
}

struct qt_zip_entry *qt_zip_find(const struct qt_zip *zip, const char *name)
{
    struct qt_zip_entry key = {.name = name, .name_size = strlen(name)};
    return bsearch(&key, zip->entries, zip->count, sizeof *zip->entries, compare_names);
}

/* ---- data ----------------------------------------------------------------------------------- */

/* Inflates exactly e->size bytes to dst, in pieces, as zlib counts in 32 bits. */
static int inflate_entry(unsigned char *dst, const struct qt_zip_entry *e, const struct reader *r)
{
    enum { PIECE = 1 << 30 };
    z_stream z = {.zalloc = qt_zlib_alloc, .zfree = qt_zlib_free};
    size_t in = e->packed, out = e->size;
    int status = inflateInit2(&z, -MAX_WBITS);
    if (status != Z_OK)
        return qt_fail(r->err, QT_E_RESOURCE, r->file, NULL, "out of memory while inflating");
    z.next_in = (Bytef *)(uintptr_t)(r->data + e->data); /* zlib does not write to it */
    z.next_out = dst;
    while (status == Z_OK) {
        uInt give = (uInt)qt_min_size(in, PIECE), room = (uInt)qt_min_size(out, PIECE);
        z.avail_in = give;
        z.avail_out = room;
        status = inflate(&z, Z_NO_FLUSH);
        in -= give - z.avail_in;
        out -= room - z.avail_out;
    }
    inflateEnd(&z);
    if (status == Z_MEM_ERROR)
        return qt_fail(r->err, QT_E_RESOURCE, r->file, NULL, "out of memory while inflating");
    if (status != Z_STREAM_END || in != 0 || out != 0)
        return bad_entry(r, e, "deflated data is damaged or has another size than stated");
    return QT_OK;
}

int qt_zip_read(struct qt_blob *out, struct qt_zip_entry *entry, const struct qt_map *map,
                const char *file, struct qt_err *err)
{
    int rc = QT_OK;
    struct reader r = {map->data, map->size, file, err};
    *out = (struct qt_blob){.data = map->data + entry->data, .size = entry->size};
    if (entry->deflated) {
        QT_TRY(qt_array_new(&out->owned, entry->size, 1, err));
        QT_TRY(inflate_entry(out->owned, entry, &r));
        qt_map_drop(map, out->data, entry->packed);
        out->data = out->owned;
    } else {
        out->map = map;
    }
    if (atomic_load(&entry->checked))
        return QT_OK;
    QT_TRY(qt_crc32(0, out->data, out->size) == entry->crc
               ? QT_OK
               : bad_entry(&r, entry, "checksum (CRC-32) is wrong: the file is damaged"));
    atomic_store(&entry->checked, !entry->deflated);
done:
    if (rc < 0)
        qt_blob_free(out);
    return rc;
}
