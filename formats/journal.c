#include "formats/writer_internal.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char journal_format[] = "qtool-journal";
static const size_t journal_limit = (size_t)1 << 30;

enum { JOURNAL_VERSION = 1, TRAILER = 18 /* ,"crc":"89abcdef"} */ };

/* Start of the first line; the line may be cut off after it. */
static const char start[] = "{\"format\":\"qtool-journal\"";

bool qt_container_unfinished(const char *path)
{
    char journal[PATH_MAX]; /* avoids an allocation; longer paths cannot be opened */
    int size = snprintf(journal, sizeof journal, "%s/" QT_JOURNAL_NAME, path);
    struct qt_map map;
    if (size < 0 || (size_t)size >= sizeof journal || qt_map_open(&map, journal, NULL) != QT_OK)
        return false;
    bool ours = map.size && memcmp(map.data, start, qt_min_size(map.size, sizeof start - 1)) == 0;
    qt_map_close(&map);
    return ours;
}

/* Jansson takes pointers to non-const for reference counts and iteration, even when reading. */
static json_t *unconst(const json_t *value)
{
    return (json_t *)(uintptr_t)value;
}

int qt_journal_open(struct qt_journal *j, const char *dir, bool owned, struct qt_err *err)
{
    int rc;
    *j = (struct qt_journal){.fd = -1};
    QT_TRY(qt_path_join(&j->path, dir, QT_JOURNAL_NAME, err));
    j->units = json_object();
    if (!j->units)
        return qt_no_memory(err, j->path);
    if (owned)
        QT_TRY(qt_file_create(&j->fd, j->path, true, err));
done:
    return rc;
}

void qt_journal_close(struct qt_journal *j)
{
    if (j->fd >= 0)
        close(j->fd);
    json_decref(j->units);
    qt_free(j->path);
    *j = (struct qt_journal){.fd = -1};
}

/* ---- reading -------------------------------------------------------------------------------- */

/* *out = the object of the line, or NULL if its CRC or syntax is wrong. */
static int parse_line(json_t **out, const char *line, size_t size, const char *path,
                      struct qt_err *err)
{
    char trailer[TRAILER + 1];
    struct qt_err local = {0};
    *out = NULL;
    if (size <= TRAILER)
        return QT_OK;
    snprintf(trailer, sizeof trailer, ",\"crc\":\"%08x\"}", qt_crc32(0, line, size - TRAILER));
    if (memcmp(line + size - TRAILER, trailer, TRAILER) != 0)
        return QT_OK;
    int rc = qt_json_parse(out, line, size, path, &local);
    return rc == QT_E_RESOURCE ? qt_fail(err, rc, path, NULL, "%s", local.reason) : QT_OK;
}

static int differ(struct qt_err *err, const char *file, const char *member, const json_t *before,
                  const json_t *now)
{
    const json_t *value[2] = {before, now};
    char *text[2] = {NULL, NULL};
    size_t size;
    int rc;
    for (int i = 0; i < 2; i++)
        if (value[i])
            QT_TRY(qt_json_text(&text[i], &size, value[i], JSON_ENCODE_ANY | JSON_COMPACT, err));
    rc = qt_fail(err, QT_E_RESUME, file, NULL, "cannot resume: %s was %.200s, is now %.200s",
                 member[0] ? member : "the identity", text[0] ? text[0] : "absent",
                 text[1] ? text[1] : "absent");
done:
    qt_free(text[0]);
    qt_free(text[1]);
    return rc;
}

static int compare(const char *path, const json_t *before, const json_t *now, const char *file,
                   struct qt_err *err);

static int compare_objects(const char *path, const json_t *before, const json_t *now,
                           const char *file, struct qt_err *err)
{
    const char *key, *dot = path[0] ? "." : "";
    char member[256];
    json_t *value;
    int rc;
    json_object_foreach (unconst(before), key, value) {
        snprintf(member, sizeof member, "%s%s%s", path, dot, key);
        if ((rc = compare(member, value, json_object_get(now, key), file, err)) < 0)
            return rc;
    }
    json_object_foreach (unconst(now), key, value) {
        snprintf(member, sizeof member, "%s%s%s", path, dot, key);
        if ((rc = compare(member, json_object_get(before, key), value, file, err)) < 0)
            return rc;
    }
    return QT_OK;
}

/* QT_E_RESUME, naming the path of the first member that differs, unless the values are equal. */
static int compare(const char *path, const json_t *before, const json_t *now, const char *file,
                   struct qt_err *err)
{
    char member[256];
    size_t n = json_array_size(before);
    if (before && now && json_equal(before, now))
        return QT_OK;
    if (json_is_object(before) && json_is_object(now))
        return compare_objects(path, before, now, file, err);
    if (n == 0 || json_array_size(now) != n)
        return differ(err, file, path, before, now);
    for (size_t i = 0; i < n; i++) {
        snprintf(member, sizeof member, "%s[%zu]", path, i);
        int rc = compare(member, json_array_get(before, i), json_array_get(now, i), file, err);
        if (rc < 0)
            return rc;
    }
    return QT_OK;
}

int qt_identity_check(const json_t *before, const json_t *now, const char *file, struct qt_err *err)
{
    return compare("", before, now, file, err);
}

static int check_header(const struct qt_journal *j, const json_t *header, const char *plan,
                        const json_t *identity, struct qt_err *err)
{
    const json_t *version = json_object_get(header, "version");
    const char *format = json_string_value(json_object_get(header, "format"));
    const char *old_plan = json_string_value(json_object_get(header, "plan"));
    if (!format || strcmp(format, journal_format) != 0 ||
        json_integer_value(version) != JOURNAL_VERSION)
        return qt_fail(err, QT_E_RESUME, j->path, NULL,
                       "cannot resume: written by another version of qtool");
    int rc = qt_identity_check(json_object_get(header, "identity"), identity, j->path, err);
    if (rc == QT_OK && (!old_plan || strcmp(old_plan, plan) != 0))
        rc = qt_fail(err, QT_E_RESUME, j->path, NULL,
                     "cannot resume: the tensors to write or the maximum shard size differ from "
                     "the earlier run");
    return rc;
}

/* The line begins at j->end, or stays in memory. */
static int add_unit(struct qt_journal *j, const char *unit, const json_t *line, struct qt_err *err)
{
    char *text = NULL;
    size_t size;
    int rc = QT_OK;
    if (j->fd < 0)
        QT_TRY(qt_json_text(&text, &size, line, JSON_COMPACT, err));
    json_t *place = text ? json_string(text) : json_integer((json_int_t)j->end);
    if (json_object_set_new(j->units, unit, place) < 0)
        rc = qt_no_memory(err, j->path);
done:
    qt_free(text);
    return rc;
}

static int load_unit(struct qt_journal *j, const json_t *line, struct qt_err *err)
{
    const char *unit = json_string_value(json_object_get(line, "unit"));
    if (!unit || !json_object_get(line, "record") ||
        !json_is_array(json_object_get(line, "tensors")))
        return qt_fail(
            err, QT_E_RESUME, j->path, NULL,
            "cannot resume: the journal is damaged; run again with --force, not --resume");
    return add_unit(j, unit, line, err);
}

/* Loads all valid lines and moves j->end past them. */
static int load_lines(bool *found, struct qt_journal *j, const char *text, size_t size,
                      const char *plan, const json_t *identity, struct qt_err *err)
{
    const char *newline;
    json_t *line = NULL;
    int rc = QT_OK;
    while ((newline = memchr(text + j->end, '\n', size - j->end)) != NULL) {
        size_t length = (size_t)(newline - text) - j->end;
        QT_TRY(parse_line(&line, text + j->end, length, j->path, err));
        if (!line)
            break;
        QT_TRY(*found ? load_unit(j, line, err) : check_header(j, line, plan, identity, err));
        json_decref(line);
        line = NULL;
        *found = true;
        j->end += length + 1;
    }
done:
    json_decref(line);
    return rc;
}

/* ---- writing -------------------------------------------------------------------------------- */

static int io_error(struct qt_err *err, const struct qt_journal *j, const char *what)
{
    return qt_fail(err, QT_E_RESOURCE, j->path, NULL, "%s: %s", what, strerror(errno));
}

/* Truncates the file to `end` and syncs. */
static int cut(struct qt_journal *j, uint64_t end, struct qt_err *err)
{
    j->end = end;
    if (ftruncate(j->fd, (off_t)end) < 0)
        return io_error(err, j, "cannot truncate");
    return fdatasync(j->fd) < 0 ? io_error(err, j, "cannot sync") : QT_OK;
}

static int append(struct qt_journal *j, const json_t *line, struct qt_err *err)
{
    char *text = NULL, *full = NULL;
    size_t size;
    int rc;
    QT_TRY(qt_json_text(&text, &size, line, JSON_COMPACT, err));
    text[--size] = '\0'; /* the closing brace comes after the CRC */
    QT_TRY(qt_string_format(&full, err, "%s,\"crc\":\"%08x\"}\n", text, qt_crc32(0, text, size)));
    size = strlen(full);
    QT_TRY(qt_file_write_at(j->fd, j->path, full, size, j->end, err));
    if (fdatasync(j->fd) < 0)
        rc = io_error(err, j, "cannot sync");
    else
        j->end += size;
done:
    qt_free(text);
    qt_free(full);
    return rc;
}

int qt_journal_load(bool *found, struct qt_journal *j, const char *plan, const json_t *identity,
                    struct qt_err *err)
{
    char *text = NULL;
    size_t size;
    int rc;
    *found = false;
    QT_TRY(qt_file_read(&text, &size, j->path, journal_limit, err));
    QT_TRY(load_lines(found, j, text, size, plan, identity, err));
    if (*found)
        QT_TRY(cut(j, j->end, err));
done:
    qt_free(text);
    return rc;
}

/* Reads the line at an offset; *line = NULL if it is damaged. */
static int read_line(json_t **line, const struct qt_journal *j, uint64_t at, struct qt_err *err)
{
    enum { PIECE = 4096 };
    const char *newline = NULL;
    char *text = NULL;
    size_t size = 0, capacity = 0;
    int rc = QT_OK;
    while (!newline && at + size < j->end) {
        const size_t n = qt_min_size(PIECE, (size_t)(j->end - at) - size);
        QT_TRY(qt_array_grow(&text, &capacity, size + n, 1, err));
        QT_TRY(qt_file_read_at(j->fd, j->path, text + size, n, at + size, err));
        newline = memchr(text + size, '\n', n);
        size += n;
    }
    if (newline)
        rc = parse_line(line, text, (size_t)(newline - text), j->path, err);
done:
    qt_free(text);
    return rc;
}

int qt_journal_read(json_t **line, const struct qt_journal *j, const char *unit, struct qt_err *err)
{
    const json_t *place = json_object_get(j->units, unit);
    const char *text = json_string_value(place);
    *line = NULL;
    int rc = text ? qt_json_parse(line, text, strlen(text), j->path, err)
                  : read_line(line, j, (uint64_t)json_integer_value(place), err);
    const char *name = json_string_value(json_object_get(*line, "unit"));
    if (rc == QT_OK && (!name || strcmp(name, unit) != 0)) {
        json_decref(*line);
        *line = NULL;
        rc = qt_fail(err, QT_E_RESOURCE, j->path, unit,
                     "data read back differs from what was written");
    }
    return rc;
}

int qt_journal_text(char **text, size_t *size, const struct qt_journal *j, struct qt_err *err)
{
    *text = NULL;
    *size = (size_t)j->end;
    int rc = qt_array_new(text, *size + 1, 1, err);
    return rc < 0 ? rc : qt_file_read_at(j->fd, j->path, *text, *size, 0, err);
}

int qt_journal_take(struct qt_journal *j, const char *text, size_t size, struct qt_err *err)
{
    const char *newline;
    int rc = QT_OK;
    for (size_t at = 0; rc == QT_OK && (newline = memchr(text + at, '\n', size - at)) != NULL;) {
        json_t *line;
        const size_t length = (size_t)(newline - text) - at;
        rc = parse_line(&line, text + at, length, j->path, err);
        if (json_object_get(line, "unit")) /* not the first line */
            rc = load_unit(j, line, err);
        json_decref(line);
        at += length + 1;
    }
    return rc;
}

int qt_journal_count(size_t *units, const struct qt_journal *j, struct qt_err *err)
{
    char *text = NULL;
    size_t size, lines = 0;
    int rc;
    *units = 0;
    QT_TRY(qt_file_read(&text, &size, j->path, journal_limit, err));
    for (size_t i = 0; i < size; i++)
        lines += text[i] == '\n';
    *units = lines ? lines - 1 : 0;
done:
    qt_free(text);
    return rc;
}

int qt_journal_clear(struct qt_journal *j, struct qt_err *err)
{
    int rc = qt_file_write_at(j->fd, j->path, start, sizeof start - 1, 0, err);
    if (rc == QT_OK)
        rc = cut(j, sizeof start - 1, err);
    j->end = 0; /* the next first line overwrites it */
    return rc;
}

int qt_journal_start(struct qt_journal *j, const char *plan, const json_t *identity,
                     struct qt_err *err)
{
    int rc;
    json_t *line = json_object();
    if (json_object_set_new(line, "format", json_string(journal_format)) < 0 ||
        json_object_set_new(line, "version", json_integer(JOURNAL_VERSION)) < 0 ||
        json_object_set_new(line, "plan", json_string(plan)) < 0 ||
        json_object_set(line, "identity", unconst(identity)) < 0)
        rc = qt_no_memory(err, j->path);
    else
        rc = append(j, line, err);
    json_decref(line);
    return rc;
}

int qt_journal_add(struct qt_journal *j, const char *unit, const json_t *record, json_t *tensors,
                   struct qt_err *err)
{
    int rc;
    json_t *line = json_object();
    if (json_object_set_new(line, "unit", json_string(unit)) < 0 ||
        json_object_set(line, "record", unconst(record)) < 0 ||
        json_object_set(line, "tensors", tensors) < 0)
        rc = qt_no_memory(err, j->path);
    else
        rc = add_unit(j, unit, line, err);
    if (rc == QT_OK && j->fd >= 0)
        rc = append(j, line, err);
    json_decref(line);
    return rc;
}
