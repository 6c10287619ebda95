/*
 * safetensors: u64 size of the header, a JSON header, then the data of the tensors.
 *
 *   {"__metadata__": {string: string}, NAME: {"dtype", "shape", "data_offsets": [begin, end)}}
 *
 * data_offsets count from the end of the header and must cover the rest of the file exactly.
 */
#include "formats/formats_internal.h"

#include <stdlib.h>

/* ---- reading -------------------------------------------------------------------------------- */

static int bad(const struct qt_tensor *t, struct qt_err *err, const char *what)
{
    return qt_fail(err, QT_E_INPUT, t->file, t->name, "%s", what);
}

static bool read_size(size_t *out, const json_t *v)
{
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return false;
    *out = (size_t)json_integer_value(v);
    return true;
}

static int read_shape(struct qt_tensor *t, const json_t *shape, struct qt_err *err)
{
    if (!json_is_array(shape))
        return bad(t, err, "'shape' must be an array");
    if (json_array_size(shape) > QT_MAX_DIMS)
        return qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name,
                       "has %zu dimensions, but at most %d are supported", json_array_size(shape),
                       QT_MAX_DIMS);
    t->ndim = (int)json_array_size(shape);
    for (int d = 0; d < t->ndim; d++)
        if (!read_size(&t->shape[d], json_array_get(shape, (size_t)d)))
            return bad(t, err, "'shape' must hold non-negative integers");
    return qt_tensor_measure(t, err);
}

static int read_offsets(struct qt_slot *slot, const json_t *pair, size_t data, struct qt_err *err)
{
    const struct qt_tensor *t = &slot->info;
    size_t begin, end, room = slot->shard->map.size - data;
    if (json_array_size(pair) != 2 || !read_size(&begin, json_array_get(pair, 0)) ||
        !read_size(&end, json_array_get(pair, 1)))
        return bad(t, err, "'data_offsets' must be two non-negative integers");
    if (begin > end)
        return bad(t, err, "'data_offsets' run backwards");
    if (end > room)
        return qt_fail(
            err, QT_E_INPUT, t->file, t->name,
            "data ends at byte %zu, but the file has only %zu bytes of data: the file is "
            "truncated",
            end, room);
    if (end - begin != t->nbytes)
        return qt_fail(err, QT_E_INPUT, t->file, t->name,
                       "dtype and shape need %zu bytes, but 'data_offsets' span %zu", t->nbytes,
                       end - begin);
    slot->offset = data + begin;
    return QT_OK;
}

/* data: offset of the data section in the file. */
static int read_entry(struct qt_slot *slot, const json_t *entry, size_t data, struct qt_err *err)
{
    struct qt_tensor *t = &slot->info;
    const json_t *dtype = json_object_get(entry, "dtype");
    const json_t *shape = json_object_get(entry, "shape");
    const json_t *offsets = json_object_get(entry, "data_offsets");
    if (!dtype || !shape || !offsets || json_object_size(entry) != 3)
        return bad(t, err, "exactly 'dtype', 'shape' and 'data_offsets' are expected");
    if (!json_is_string(dtype))
        return bad(t, err, "'dtype' must be a string");
    if (!qt_dtype_parse(&t->dtype, json_string_value(dtype)))
        return qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name, "unknown dtype '%s'",
                       json_string_value(dtype));
    int rc = read_shape(t, shape, err);
    return rc < 0 ? rc : read_offsets(slot, offsets, data, err);
}

static int check_metadata(json_t *metadata, const char *file, struct qt_err *err)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        return qt_fail(err, QT_E_INPUT, file, NULL, "'__metadata__' must be an object");
    json_object_foreach (metadata, key, value)
        if (!json_is_string(value))
            return qt_fail(err, QT_E_INPUT, file, NULL, "'__metadata__': '%s' must be a string",
                           key);
    return QT_OK;
}

/* Sorted tensors must be contiguous: no other data may hide in the file. */
static int check_layout(const struct qt_shard *shard, size_t data, struct qt_err *err)
{
    size_t at = data;
    for (size_t i = 0; i < shard->count; i++) {
        const struct qt_slot *slot = &shard->slots[i];
        const struct qt_tensor *t = &slot->info;
        if (slot->offset > at)
            return qt_fail(err, QT_E_INPUT, t->file, t->name,
                           "%zu bytes before its data belong to no tensor", slot->offset - at);
        if (slot->offset < at)
            return qt_fail(err, QT_E_INPUT, t->file, t->name, "data overlaps that of '%s'",
                           slot[-1].info.name);
        at += t->nbytes;
    }
    if (at != shard->map.size)
        return qt_fail(err, QT_E_INPUT, shard->path, NULL,
                       "%zu bytes at the end belong to no tensor", shard->map.size - at);
    return QT_OK;
}

static int header_size(size_t *out, const struct qt_map *map, const char *file, struct qt_err *err)
{
    uint64_t size;
    int rc = qt_kind_expect(QT_KIND_SAFETENSORS, NULL, map->data, map->size, file, err);
    if (rc < 0)
        return rc;
    if (map->size < sizeof size + 2)
        return qt_fail(err, QT_E_INPUT, file, NULL, "%zu bytes are too few for safetensors",
                       map->size);
    memcpy(&size, map->data, sizeof size);
    if (size < 2 || size > QT_MAX_HEADER)
        return qt_fail(err, QT_E_INPUT, file, NULL,
                       "a header of %llu bytes: not a safetensors file (2 to %d expected)",
                       (unsigned long long)size, QT_MAX_HEADER);
    if (size > map->size - sizeof size)
        return qt_fail(
            err, QT_E_INPUT, file, NULL,
            "the header of %llu bytes goes beyond the end of the file (%zu bytes): the file "
            "is truncated",
            (unsigned long long)size, map->size);
    if (map->data[sizeof size] != '{')
        return qt_fail(err, QT_E_INPUT, file, NULL, "the header does not start with '{'");
    *out = (size_t)size;
    return QT_OK;
}

/* ---- header, member by member --------------------------------------------------------------- */

/*
 * The JSON values of a million tensors take a gigabyte. So the header is parsed member by member.
 * If that fails, or a name occurs twice, the whole is parsed, which finds the fault and its line
 * and column.
 */

/* Adds the members of an object: tensors, or the metadata. data: offset of the data section. */
static int add_members(struct qt_shard *shard, json_t *object, size_t data, struct qt_err *err)
{
    const char *name;
    json_t *value;
    struct qt_slot *slot;
    int rc = QT_OK;
    json_object_foreach (object, name, value) {
        if (strcmp(name, QT_METADATA_KEY) == 0) {
            QT_TRY(check_metadata(value, shard->path, err));
            json_decref(shard->metadata);
            shard->metadata = json_incref(value);
            continue;
        }
        QT_TRY(qt_shard_add(&slot, shard, name, strlen(name), err));
        QT_TRY(read_entry(slot, value, data, err));
    }
done:
    return rc;
}

/* *sound = false if the member is not one member of a JSON object. */
static int add_member(bool *sound, struct qt_shard *shard, struct qt_json_part member, size_t data,
                      struct qt_err *err)
{
    json_t *object;
    int rc = qt_json_parse_part(&object, member, '{', true, shard->path, err);
    *sound = rc == QT_OK;
    if (*sound && json_object_get(object, QT_METADATA_KEY) && shard->metadata)
        *sound = false; /* twice */
    rc = *sound ? add_members(shard, object, data, err) : rc == QT_E_RESOURCE ? rc : QT_OK;
    json_decref(object);
    return rc;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int check_names_differ(bool *differ, const struct qt_shard *shard, struct qt_err *err)
{
    const char **names;
    int rc = qt_array_new(&names, shard->count, sizeof *names, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < shard->count; i++)
        names[i] = shard->slots[i].info.name;
    qsort(names, shard->count, sizeof *names, compare_names);
    *differ = true;
    for (size_t i = 1; i < shard->count; i++)
        *differ &= strcmp(names[i - 1], names[i]) != 0;
    qt_free(names);
    return QT_OK;
}

static int read_members(bool *sound, struct qt_shard *shard, struct qt_json_part text, size_t data,
                        struct qt_err *err)
{
    struct qt_json_cursor c;
    struct qt_json_part member;
    enum qt_json_step step = QT_JSON_FAULT;
    int rc = QT_OK;
    *sound = qt_json_enter(&c, text, '{');
    while (*sound && rc == QT_OK && (step = qt_json_next(&member, &c)) == QT_JSON_PART)
        rc = add_member(sound, shard, member, data, err);
    *sound = *sound && step == QT_JSON_END;
    return rc == QT_OK && *sound ? check_names_differ(sound, shard, err) : rc;
}

/* Finds what is wrong with the syntax of a header that read_members has not taken. */
static int explain_header(struct qt_shard *shard, const char *text, size_t size, struct qt_err *err)
{
    json_t *header = NULL;
    int rc = qt_json_parse_lenient(&header, text, size, shard->path, err);
    json_decref(header);
    return rc;
}

int qt_safetensors_open(struct qt_shard *shard, struct qt_err *err)
{
    int rc;
    size_t size = 0;
    bool sound;
    QT_TRY(header_size(&size, &shard->map, shard->path, err));
    const char *text = (const char *)shard->map.data + 8;
    rc = read_members(&sound, shard, (struct qt_json_part){text, size}, 8 + size, err);
    if (rc == QT_E_INPUT || rc == QT_E_UNSUPPORTED) { /* faults of the syntax come first */
        struct qt_err syntax = {0};
        const int earlier = explain_header(shard, text, size, &syntax);
        if (earlier < 0)
            rc = qt_fail(err, earlier, shard->path, NULL, "%s", syntax.reason);
    } else if (rc == QT_OK && !sound) {
        rc = explain_header(shard, text, size, err);
        if (rc == QT_OK)
            rc = qt_fail(err, QT_E_INPUT, shard->path, NULL, "the header is not a JSON object");
    }
    if (rc < 0)
        goto done;
    qt_shard_sort(shard);
    QT_TRY(check_layout(shard, 8 + size, err));
done:
    return rc;
}

/* ---- writing -------------------------------------------------------------------------------- */

static json_t *header_entry(const struct qt_tensor *t, uint64_t begin, uint64_t end)
{
    json_t *entry = json_pack("{s:s, s:[], s:[I, I]}", "dtype", qt_dtype_name(t->dtype), "shape",
                              "data_offsets", (json_int_t)begin, (json_int_t)end);
    json_t *shape = json_object_get(entry, "shape");
    for (int d = 0; entry && d < t->ndim; d++)
        if (json_array_append_new(shape, json_integer((json_int_t)t->shape[d])) < 0) {
            json_decref(entry);
            return NULL;
        }
    return entry;
}

/* The text of a header, which grows. */
struct header {
    char *text;
    size_t size, capacity;
};

static int append(struct header *h, const char *text, size_t size, struct qt_err *err)
{
    if (size > QT_MAX_HEADER - h->size)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "the safetensors header is too large");
    int rc = qt_array_grow(&h->text, &h->capacity, h->size + size, 1, err);
    if (rc == QT_OK)
        memcpy(h->text + h->size, text, size);
    if (rc == QT_OK)
        h->size += size;
    return rc;
}

/* Appends a member, with the comma before it. Takes ownership of the value, also on failure. */
static int append_member(struct header *h, const char *key, json_t *value, struct qt_err *err)
{
    json_t *object = json_pack("{s:o}", key, value);
    char *text;
    size_t size;
    int rc = qt_json_text(&text, &size, object, JSON_COMPACT, err);
    json_decref(object);
    if (rc == QT_OK && h->size > 1)
        rc = append(h, ",", 1, err);
    if (rc == QT_OK)
        rc = append(h, text + 1, size - 2, err);
    qt_free(text);
    return rc;
}

/* Appends the tensors and sets offsets, relative to the data section. */
static int append_tensors(struct header *h, uint64_t *offsets, const struct qt_tensor *tensors,
                          size_t n, struct qt_err *err)
{
    offsets[0] = 0;
    for (size_t i = 0; i < n; i++) {
        struct qt_tensor t = tensors[i];
        int rc = qt_tensor_check_name(t.name, strlen(t.name), t.file, err);
        if (rc == QT_OK)
            rc = qt_tensor_measure(&t, err);
        if (rc < 0)
            return rc;
        if (t.nbytes > INT64_MAX - offsets[i])
            return qt_fail(err, QT_E_UNSUPPORTED, t.file, t.name, "the file would be too large");
        offsets[i + 1] = offsets[i] + t.nbytes;
        rc = append_member(h, t.name, header_entry(&t, offsets[i], offsets[i + 1]), err);
        if (rc < 0)
            return rc;
    }
    return QT_OK;
}

static int check_written_once(const struct qt_tensor *tensors, size_t n, struct qt_err *err)
{
    const char **names;
    int rc = qt_array_new(&names, n, sizeof *names, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < n; i++)
        names[i] = tensors[i].name;
    qsort(names, n, sizeof *names, compare_names);
    for (size_t i = 1; i < n && rc == QT_OK; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            rc = qt_fail(err, QT_E_INTERNAL, NULL, names[i], "written twice into one file");
    qt_free(names);
    return rc;
}

int qt_safetensors_header(char **out, size_t *size, uint64_t *offsets,
                          const struct qt_tensor *tensors, size_t n, const json_t *metadata,
                          struct qt_err *err)
{
    struct header h = {0};
    int rc;
    *out = NULL;
    QT_TRY(check_written_once(tensors, n, err));
    QT_TRY(append(&h, "{", 1, err));
    if (metadata)
        QT_TRY(append_member(&h, QT_METADATA_KEY, json_incref((json_t *)(uintptr_t)metadata), err));
    QT_TRY(append_tensors(&h, offsets, tensors, n, err));
    QT_TRY(append(&h, "}", 1, err));
    uint64_t padded = qt_round_up(h.size, 8);
    *size = 8 + (size_t)padded;
    QT_TRY(qt_array_new(out, *size, 1, err));
    memcpy(*out, &padded, sizeof padded);
    memset(*out + 8, ' ', (size_t)padded);
    memcpy(*out + 8, h.text, h.size);
    for (size_t i = 0; i <= n; i++)
        offsets[i] += *size;
done:
    qt_free(h.text);
    return rc;
}
