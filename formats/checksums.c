/*
 * SHA256SUMS in the format of sha256sum, for verifying downloads and for signing. The CRCs of the
 * manifest detect damage but not forgery.
 */
#include "formats/writer_internal.h"

#include <dirent.h>
#include <errno.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEX = 2 * SHA256_DIGEST_SIZE };

struct sum {
    char *path;
    const char *name;                /* last component of path */
    const char *expected;            /* hexadecimal digits from the list being checked */
    struct qt_running_hash *running; /* of its start; NULL: nothing is known yet */
    char hex[HEX + 1];
};

struct sums {
    struct sum *items;
    size_t count, capacity;
};

static void write_hex(struct sum *sum, const uint8_t digest[SHA256_DIGEST_SIZE])
{
    for (size_t i = 0; i < SHA256_DIGEST_SIZE; i++)
        snprintf(sum->hex + 2 * i, 3, "%02x", digest[i]);
}

/* Sums what is behind the start of the file. */
static int sum_rest(struct sum *sum, size_t size, struct qt_err *err)
{
    uint8_t digest[SHA256_DIGEST_SIZE];
    int rc = qt_running_hash_add(sum->running, size, err);
    qt_running_hash_digest(sum->running, digest);
    write_hex(sum, digest);
    return rc;
}

static int sum_file(void *ctx, size_t item, int thread, struct qt_err *err)
{
    enum { PIECE = 1 << 24 };
    struct sum *sum = &((struct sums *)ctx)->items[item];
    struct sha256_ctx sha;
    struct qt_map map;
    uint8_t digest[SHA256_DIGEST_SIZE];
    (void)thread;
    int rc = qt_map_open(&map, sum->path, err);
    if (rc < 0)
        return rc;
    if (sum->running) {
        rc = sum_rest(sum, map.size, err);
        qt_map_close(&map);
        return rc;
    }
    sha256_init(&sha);
    for (size_t at = 0; at < map.size && rc == QT_OK; at += PIECE) {
        size_t n = qt_min_size(PIECE, map.size - at);
        sha256_update(&sha, n, map.data + at);
        qt_map_drop(&map, map.data + at, n);
        rc = qt_stop_check(err);
    }
    sha256_digest(&sha, sizeof digest, digest);
    write_hex(sum, digest);
    qt_map_close(&map);
    return rc;
}

static int add_file(struct sums *s, const char *dir, const char *name, struct qt_err *err)
{
    int rc = qt_array_grow(&s->items, &s->capacity, s->count + 1, sizeof *s->items, err);
    if (rc < 0)
        return rc;
    s->items[s->count] = (struct sum){0};
    rc = qt_path_join(&s->items[s->count].path, dir, name, err);
    if (rc == QT_OK) {
        s->items[s->count].name = qt_base_name(s->items[s->count].path);
        s->count++;
    }
    return rc;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct sum *)a)->name, ((const struct sum *)b)->name);
}

static void sort_by_name(struct sums *s)
{
    if (s->count)
        qsort(s->items, s->count, sizeof *s->items, compare_names);
}

static int list_files(struct sums *s, const char *dir, bool hidden, const json_t *omit,
                      struct qt_err *err)
{
    const struct dirent *item;
    int rc = QT_OK;
    DIR *d = opendir(dir);
    if (!d)
        return qt_fail(err, QT_E_RESOURCE, dir, NULL, "cannot list: %s", strerror(errno));
    while (rc == QT_OK && (item = readdir(d)) != NULL)
        if ((hidden || item->d_name[0] != '.') && !json_object_get(omit, item->d_name))
            rc = add_file(s, dir, item->d_name, err);
    closedir(d);
    sort_by_name(s);
    return rc;
}

static int write_sums(const struct sums *s, const char *path, struct qt_err *err)
{
    size_t room = 1, used = 0;
    char *text;
    for (size_t i = 0; i < s->count; i++)
        room += HEX + strlen(s->items[i].name) + 3;
    int rc = qt_array_new(&text, room, 1, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < s->count; i++)
        used += (size_t)snprintf(text + used, room - used, "%s  %s\n", s->items[i].hex,
                                 s->items[i].name);
    rc = qt_file_write(path, text, used, err);
    qt_free(text);
    return rc;
}

static void sums_free(struct sums *s)
{
    for (size_t i = 0; i < s->count; i++)
        qt_free(s->items[i].path);
    qt_free(s->items);
}

struct qt_checksums {
    struct sums sums;
    char *path;
    struct qt_behind *behind;
};

static int sum_files(void *ctx, struct qt_err *err)
{
    struct sums *s = ctx;
    return qt_parallel(s->count, sum_file, s, err);
}

static void drop_nothing(void *ctx)
{
    (void)ctx;
}

int qt_checksums_start(struct qt_checksums **out, const char *dir, const json_t *omit,
                       struct qt_running_hashes *running, struct qt_err *err)
{
    struct qt_checksums *c;
    int rc = qt_array_new(out, 1, sizeof **out, err);
    if (rc < 0)
        return rc;
    c = *out;
    QT_TRY(qt_path_join(&c->path, dir, QT_CHECKSUMS_NAME, err));
    QT_TRY(list_files(&c->sums, dir, false, omit, err));
    for (size_t i = 0; i < c->sums.count; i++)
        c->sums.items[i].running = qt_running_hashes_of(running, c->sums.items[i].path);
    QT_TRY(qt_behind_open(&c->behind, err));
    rc = qt_behind_add(
        c->behind, &(struct qt_behind_job){.run = sum_files, .drop = drop_nothing, .ctx = &c->sums},
        err);
done:
    if (rc < 0) {
        qt_checksums_close(c);
        *out = NULL;
    }
    return rc;
}

int qt_checksums_write(struct qt_checksums *c, struct qt_err *err)
{
    int rc = qt_behind_wait(c->behind, err);
    return rc < 0 ? rc : write_sums(&c->sums, c->path, err);
}

void qt_checksums_close(struct qt_checksums *c)
{
    if (!c)
        return;
    qt_behind_close(c->behind);
    sums_free(&c->sums);
    qt_free(c->path);
    qt_free(c);
}

/* Parses a line "HEX  NAME" or "HEX *NAME": sets *hex, moves *text past the line and returns the
 * name, or NULL if the line is neither. */
static const char *parse_line(const char **hex, char **text)
{
    char *line = *text, *end = strchr(line, '\n'), *name;
    if (!end || end - line <= HEX + 2 || line[HEX] != ' ' ||
        (line[HEX + 1] != ' ' && line[HEX + 1] != '*') || strspn(line, "0123456789abcdef") != HEX)
        return NULL;
    *end = line[HEX] = '\0';
    *text = end + 1;
    *hex = line;
    name = line + HEX + 2;
    return qt_name_is_plain(name) ? name : NULL;
}

/* True for files that readers of a container use. Other files, such as a README, may be added
 * without being listed. */
static bool must_be_listed(const char *name)
{
    const char *side;
    if (qt_name_ends_in(name, ".safetensors"))
        return true;
    for (size_t i = 0; (side = qt_side_file(i)) != NULL; i++)
        if (strcmp(name, side) == 0)
            return true;
    return strcmp(name, QT_MANIFEST_NAME) == 0 || strcmp(name, QT_INDEX_NAME) == 0;
}

static int check_all_listed(struct sums *listed, const char *dir, struct qt_err *err)
{
    struct sums present = {0};
    int rc = list_files(&present, dir, true, NULL, err);
    sort_by_name(listed);
    for (size_t i = 0; i < present.count && rc == QT_OK; i++) {
        const struct sum *file = &present.items[i];
        if (must_be_listed(file->name) &&
            !(listed->count &&
              bsearch(file, listed->items, listed->count, sizeof *listed->items, compare_names)))
            rc = qt_fail(err, QT_E_INPUT, file->path, NULL, "is not listed in " QT_CHECKSUMS_NAME);
    }
    sums_free(&present);
    return rc;
}

/* small: only files that are not weight files, which have CRCs in the manifest. */
static int check(const char *dir, bool small, struct qt_err *err)
{
    enum { LIMIT = 1 << 24 };
    struct sums s = {0};
    char *path = NULL, *text = NULL, *at;
    const char *hex, *name;
    size_t size, line = 0, kept = 0;
    int rc;
    QT_TRY(qt_path_join(&path, dir, QT_CHECKSUMS_NAME, err));
    QT_TRY(qt_file_read(&text, &size, path, LIMIT, err));
    for (at = text; at < text + size;) {
        name = parse_line(&hex, &at);
        line++;
        if (!name) {
            rc = qt_fail(err, QT_E_INPUT, path, NULL,
                         "line %zu is not a SHA-256 checksum and a file name", line);
            goto done;
        }
        QT_TRY(add_file(&s, dir, name, err));
        s.items[s.count - 1].expected = hex;
    }
    QT_TRY(check_all_listed(&s, dir, err));
    for (size_t i = 0; i < s.count && small; i++) { /* the others to the end */
        struct sum swap = s.items[i];
        if (qt_name_ends_in(swap.name, ".safetensors"))
            continue;
        s.items[i] = s.items[kept];
        s.items[kept++] = swap;
    }
    const size_t total = s.count;
    s.count = small ? kept : total;
    rc = qt_parallel(s.count, sum_file, &s, err);
    for (size_t i = 0; i < s.count && rc == QT_OK; i++)
        if (strcmp(s.items[i].hex, s.items[i].expected) != 0)
            rc = qt_fail(err, QT_E_INPUT, s.items[i].path, NULL,
                         "differs from its checksum in " QT_CHECKSUMS_NAME);
    s.count = total;
done:
    sums_free(&s);
    qt_free(text);
    qt_free(path);
    return rc;
}

int qt_checksums_check(const char *dir, struct qt_err *err)
{
    return check(dir, false, err);
}

int qt_checksums_check_small(const char *dir, struct qt_err *err)
{
    return check(dir, true, err);
}
