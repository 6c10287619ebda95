/* Reads texts and token ids for calibration and evaluation, and selects windows. */
#include "calib/calib.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

static const size_t MAX_TEXT = (size_t)1 << 32;

/* ---- .gz ------------------------------------------------------------------------------------ */

/*
 * Inflates a sequence of gzip members and refuses anything else. zlib's gzread would accept files
 * that are not compressed and ignore data after the last member. inflate has 32-bit counters, so
 * the input is passed in pieces.
 */
static int inflate_members(int fd, const struct qt_map *map, const char *path, struct qt_err *err)
{
    enum { GZIP = 16, PIECE = 1 << 30 };
    unsigned char buf[1 << 16];
    size_t in = map->size, at = 0;
    z_stream z = {.next_in = (Bytef *)(uintptr_t)map->data, /* zlib only reads it */
                  .zalloc = qt_zlib_alloc,
                  .zfree = qt_zlib_free};
    int status = inflateInit2(&z, GZIP + MAX_WBITS), rc = QT_OK;
    while (status == Z_OK && rc == QT_OK) {
        const uInt give = (uInt)qt_min_size(in, PIECE);
        z.avail_in = give;
        z.next_out = buf;
        z.avail_out = sizeof buf;
        status = inflate(&z, Z_NO_FLUSH);
        const size_t n = sizeof buf - z.avail_out;
        in -= give - z.avail_in;
        rc = n > MAX_TEXT - at
                 ? qt_fail(err, QT_E_INPUT, path, NULL, "unpacks to more than %zu bytes", MAX_TEXT)
                 : qt_file_write_at(fd, "a temporary file (in TMPDIR)", buf, n, at, err);
        at += n;
        if (status == Z_STREAM_END && in)
            status = inflateReset(&z);
    }
    inflateEnd(&z);
    if (rc < 0 || status == Z_STREAM_END)
        return rc;
    return status == Z_MEM_ERROR
               ? qt_fail(err, QT_E_RESOURCE, path, NULL, "out of memory while inflating")
               : qt_fail(err, QT_E_INPUT, path, NULL, "gzip: %s", z.msg ? z.msg : "ends too early");
}

/* Opens an unlinked temporary file, which disappears however the process ends. */
static int open_temporary(int *fd, struct qt_err *err)
{
    const char *dir = getenv("TMPDIR");
    char *path;
    int rc = qt_string_format(&path, err, "%s/qtoolXXXXXX", dir && *dir ? dir : "/tmp");
    if (rc < 0)
        return rc;
    *fd = mkostemp(path, O_CLOEXEC);
    if (*fd < 0)
        rc = qt_fail(err, QT_E_RESOURCE, path, NULL, "cannot create a temporary file: %s",
                     strerror(errno));
    else
        unlink(path);
    qt_free(path);
    return rc;
}

/* Decompresses `path` into a temporary file, *fd. */
static int gunzip(int *fd, const char *path, struct qt_err *err)
{
    struct qt_map map;
    int rc;
    QT_TRY(qt_map_open(&map, path, err));
    QT_TRY(open_temporary(fd, err));
    QT_TRY(inflate_members(*fd, &map, path, err));
done:
    qt_map_close(&map);
    return rc;
}

/* ---- one file ------------------------------------------------------------------------------- */

static int append_ids(struct qt_data *data, size_t *capacity, const uint32_t *ids, size_t count,
                      struct qt_err *err)
{
    int rc = qt_array_grow(&data->ids, capacity, data->count + count, sizeof *ids, err);
    if (rc < 0)
        return rc;
    if (count)
        memcpy(data->ids + data->count, ids, count * sizeof *ids);
    data->count += count;
    return QT_OK;
}

struct reader {
    struct qt_data *data;
    size_t capacity, vocab;
    const char *dir;
    struct qt_tokenizer *tok; /* opened for the first text */
};

static int append_text(struct reader *r, const char *text, size_t size, const char *path,
                       struct qt_err *err)
{
    uint32_t *ids = NULL;
    size_t count;
    int rc = QT_OK;
    if (!r->tok)
        QT_TRY(qt_tokenizer_open(&r->tok, r->dir, err));
    r->data->bos = qt_tokenizer_adds_bos(r->tok);
    rc = qt_tokenizer_encode(&ids, &count, r->tok, text, size, true, err);
    if (rc < 0 && err && !err->file[0])
        snprintf(err->file, sizeof err->file, "%s", path);
    for (size_t i = 0; rc == QT_OK && i < count; i++)
        if (r->vocab && ids[i] >= r->vocab)
            rc = qt_fail(err, QT_E_INPUT, path, NULL,
                         "the tokenizer gives id %u, but the model's vocabulary has %zu ids",
                         ids[i], r->vocab);
    if (rc == QT_OK)
        rc = append_ids(r->data, &r->capacity, ids, count, err);
done:
    qt_free(ids);
    return rc;
}

static int append_json_line(struct reader *r, const char *line, size_t size, const char *path,
                            size_t number, struct qt_err *err)
{
    json_t *root = NULL;
    const json_t *text;
    struct qt_err inner = {0};
    int rc = qt_json_parse_data(&root, line, size, 1, "\\ufffd", path, &inner);
    if (rc < 0)
        return qt_fail(err, rc, path, NULL, "line %zu: %s", number, inner.reason);
    text = json_object_get(root, "text");
    if (json_is_string(text))
        rc = append_text(r, json_string_value(text), json_string_length(text), path, err);
    else
        rc = qt_fail(err, QT_E_INPUT, path, NULL, "line %zu has no string \"text\"", number);
    json_decref(root);
    return rc;
}

static int append_jsonl(struct reader *r, const char *text, size_t size, const char *path,
                        struct qt_err *err)
{
    size_t number = 0;
    for (size_t at = 0, len; at < size; at += len + 1) {
        const char *end = memchr(text + at, '\n', size - at);
        len = end ? (size_t)(end - (text + at)) : size - at;
        number++;
        if (strspn(text + at, " \t\r") >= len)
            continue;
        int rc = append_json_line(r, text + at, len, path, number, err);
        if (rc < 0)
            return rc;
    }
    return QT_OK;
}

/* name: its extension selects the kind of file. */
static int read_file(struct reader *r, const char *path, const char *name, struct qt_err *err)
{
    char *text = NULL;
    uint32_t *ids = NULL;
    size_t size;
    int rc;
    if (qt_name_ends_in(name, ".u16") || qt_name_ends_in(name, ".u32") ||
        qt_name_ends_in(name, ".npy")) {
        QT_TRY(qt_token_ids_read_as(&ids, &size, path, name, r->vocab, err));
        QT_TRY(append_ids(r->data, &r->capacity, ids, size, err));
    } else {
        QT_TRY(qt_file_read(&text, &size, path, MAX_TEXT, err));
        const size_t mark = size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0; /* BOM */
        rc = qt_name_ends_in(name, ".jsonl") ? append_jsonl(r, text + mark, size - mark, path, err)
                                             : append_text(r, text + mark, size - mark, path, err);
    }
done:
    qt_free(text);
    qt_free(ids);
    return rc;
}

static int read_gzip(struct reader *r, const char *path, struct qt_err *err)
{
    char *name = NULL, *unpacked = NULL;
    int fd = -1, rc;
    QT_TRY(qt_string_format(&name, err, "%.*s", (int)(strlen(path) - strlen(".gz")), path));
    QT_TRY(gunzip(&fd, path, err));
    QT_TRY(qt_string_format(&unpacked, err, "/proc/self/fd/%d", fd));
    rc = read_file(r, unpacked, name, err);
    if (rc < 0 && err && strcmp(err->file, unpacked) == 0)
        snprintf(err->file, sizeof err->file, "%s", path);
done:
    if (fd >= 0)
        close(fd);
    qt_free(unpacked);
    qt_free(name);
    return rc;
}

int qt_data_read(struct qt_data *out, const char *const *paths, size_t n, const char *dir,
                 size_t vocab, struct qt_err *err)
{
    struct reader r = {.data = out, .vocab = vocab, .dir = dir};
    int rc = QT_OK;
    *out = (struct qt_data){.first = n ? paths[0] : NULL};
    for (size_t i = 0; i < n && rc == QT_OK; i++)
        rc = qt_name_ends_in(paths[i], ".gz") ? read_gzip(&r, paths[i], err)
                                              : read_file(&r, paths[i], paths[i], err);
    qt_tokenizer_close(r.tok);
    if (rc < 0)
        qt_data_free(out);
    return rc;
}

void qt_data_free(struct qt_data *data)
{
    qt_free(data->ids);
    *data = (struct qt_data){0};
}

/* ---- windows -------------------------------------------------------------------------------- */

/* Chooses windows in ascending order. seed = 0: even spacing; else selection sampling (Knuth 3.4.2,
 * algorithm S). */
static void choose(size_t *chosen, size_t samples, size_t windows, uint64_t seed)
{
    for (size_t i = 0, taken = 0; i < windows && taken < samples; i++) {
        bool take = seed ? qt_splitmix64(&seed) % (windows - i) < samples - taken
                         : i == taken * windows / samples;
        if (take)
            chosen[taken++] = i;
    }
}

int qt_data_windows(uint32_t **out, const struct qt_data *data, size_t samples, size_t seqlen,
                    uint64_t seed, struct qt_err *err)
{
    size_t windows = seqlen ? data->count / seqlen : 0, *chosen = NULL;
    int rc = QT_OK;
    *out = NULL;
    if (samples == 0 || samples > windows)
        return qt_fail(err, QT_E_INPUT, data->first, NULL,
                       "%zu tokens make %zu windows of %zu, but %zu are wanted; lower %s--seqlen, "
                       "or give more data",
                       data->count, windows, seqlen, samples, windows ? "--samples or " : "");
    QT_TRY(qt_array_new(&chosen, samples, sizeof *chosen, err));
    QT_TRY(qt_array_new(out, samples * seqlen, sizeof **out, err)); /* at most data->count */
    choose(chosen, samples, windows, seed);
    for (size_t i = 0; i < samples; i++)
        memcpy(*out + i * seqlen, data->ids + chosen[i] * seqlen, seqlen * sizeof **out);
done:
    qt_free(chosen);
    return rc;
}
