#include "formats/formats_internal.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SECTION_NAME_LIMIT = 32, SCALE_EXP2_LIMIT = 1000 };

/* A tensor of the safetensors files. `claimed`: the manifest lists it. */
struct stored {
    const struct qt_tensor *tensor;
    uint32_t crc;
    bool claimed;
    struct qt_json_part json; /* of a copied tensor: its member of the manifest */
};

/* An object of the manifest whose members are read one by one. */
struct list {
    struct qt_json_part text;
    size_t count;
};

struct qt_container {
    char *dir;
    char *manifest_path;
    char *text; /* of the manifest */
    struct list tensors, copied;
    json_t *manifest; /* the other members */
    json_t *words;    /* object: its keys are strings that many entries have */
    int version;
    struct qt_ckpt *ckpt;
    struct stored *stored; /* sorted by name */
    struct qt_entry *entries;
    const struct qt_entry **by_name;
    size_t count;
};

/* ---- small parts of the manifest ------------------------------------------------------------ */

static int bad(struct qt_err *err, const struct qt_container *c, const char *tensor,
               const char *reason)
{
    return qt_fail(err, QT_E_INPUT, c->manifest_path, tensor, "%s", reason);
}

/* Adds the tensor name to the errors of the JSON helper. */
static int need_string(const char **out, const struct qt_container *c, const json_t *obj,
                       const char *key, const char *tensor, struct qt_err *err)
{
    struct qt_err local = {0};
    int rc = qt_json_need_string(out, obj, key, c->manifest_path, &local);
    return rc < 0 ? qt_fail(err, rc, c->manifest_path, tensor, "%s", local.reason) : QT_OK;
}

static int parse_shape(size_t *shape, int *ndim, const struct qt_container *c, const json_t *obj,
                       const char *tensor, struct qt_err *err)
{
    const json_t *list = json_object_get(obj, "shape");
    size_t n = json_array_size(list);
    if (!json_is_array(list) || n > QT_MAX_DIMS)
        return qt_fail(err, QT_E_INPUT, c->manifest_path, tensor,
                       "'shape' must be an array of at most %d integers", QT_MAX_DIMS);
    for (size_t i = 0; i < n; i++) {
        const json_t *dim = json_array_get(list, i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return bad(err, c, tensor, "'shape' must hold integers that are not negative");
        shape[i] = (size_t)json_integer_value(dim);
    }
    *ndim = (int)n;
    return QT_OK;
}

static int parse_crc(uint32_t *crc, const struct qt_container *c, const json_t *obj,
                     const char *tensor, struct qt_err *err)
{
    const char *text;
    int rc = need_string(&text, c, obj, "crc32", tensor, err);
    if (rc < 0)
        return rc;
    if (strlen(text) != 8 || strspn(text, "0123456789abcdef") != 8)
        return bad(err, c, tensor, "'crc32' must be 8 lower-case hexadecimal digits");
    *crc = (uint32_t)strtoul(text, NULL, 16);
    return QT_OK;
}

static bool section_name_ok(const char *name)
{
    size_t n = strlen(name);
    return n >= 1 && n <= SECTION_NAME_LIMIT &&
           strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_") == n;
}

/* ---- stored tensors ------------------------------------------------------------------------- */

static int compare_stored(const void *a, const void *b)
{
    return strcmp(((const struct stored *)a)->tensor->name,
                  ((const struct stored *)b)->tensor->name);
}

static int compare_stored_name(const void *name, const void *item)
{
    return strcmp(name, ((const struct stored *)item)->tensor->name);
}

static struct stored *stored_find(const struct qt_container *c, const char *name)
{
    return bsearch(name, c->stored, qt_ckpt_count(c->ckpt), sizeof *c->stored, compare_stored_name);
}

/* Claims the stored tensor `name` for an entry of the manifest. The tensor must exist, must not be
 * claimed yet, and must have the dtype and shape that `obj` declares. */
static int claim(struct stored **out, struct qt_container *c, const char *name, const json_t *obj,
                 struct qt_err *err)
{
    const char *dtype_name;
    enum qt_dtype dtype;
    size_t shape[QT_MAX_DIMS];
    int ndim, rc;
    uint32_t crc = 0;
    if ((rc = need_string(&dtype_name, c, obj, "dtype", name, err)) < 0 ||
        (rc = parse_shape(shape, &ndim, c, obj, name, err)) < 0 ||
        (rc = parse_crc(&crc, c, obj, name, err)) < 0)
        return rc;
    if (!qt_dtype_parse(&dtype, dtype_name))
        return bad(err, c, name, "'dtype' is not a known dtype");
    struct stored *s = stored_find(c, name);
    if (!s)
        return bad(err, c, name, "is in the manifest but not in the safetensors files");
    if (s->claimed)
        return bad(err, c, name, "is in the manifest twice");
    const struct qt_tensor *t = s->tensor;
    if (t->dtype != dtype)
        return qt_fail(err, QT_E_INPUT, t->file, name, "dtype is %s, but the manifest says %s",
                       qt_dtype_name(t->dtype), qt_dtype_name(dtype));
    if (t->ndim != ndim || memcmp(t->shape, shape, (size_t)ndim * sizeof *shape) != 0)
        return qt_fail(err, QT_E_INPUT, t->file, name, "shape differs from the manifest's");
    s->claimed = true;
    s->crc = crc;
    *out = s;
    return QT_OK;
}

static int list_stored(struct qt_container *c, struct qt_err *err)
{
    size_t n = qt_ckpt_count(c->ckpt);
    int rc = qt_array_new(&c->stored, n, sizeof *c->stored, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < n; i++)
        c->stored[i].tensor = qt_ckpt_tensor(c->ckpt, i);
    qsort(c->stored, n, sizeof *c->stored, compare_stored);
    return QT_OK;
}

static int check_all_claimed(const struct qt_container *c, struct qt_err *err)
{
    for (size_t i = 0; i < qt_ckpt_count(c->ckpt); i++) {
        const struct qt_tensor *t = c->stored[i].tensor;
        if (!c->stored[i].claimed)
            return qt_fail(err, QT_E_INPUT, t->file, t->name,
                           "is not listed in 'tensors', 'copied' or 'kv' of qtool.json");
    }
    return QT_OK;
}

/* ---- entries -------------------------------------------------------------------------------- */

/* *word = a copy of itself that the container owns. */
static int keep_word(const char **word, struct qt_container *c, struct qt_err *err)
{
    if (!json_object_get(c->words, *word) && json_object_set_new(c->words, *word, json_true()) < 0)
        return qt_no_memory(err, c->manifest_path);
    *word = json_object_iter_key(json_object_iter_at(c->words, *word));
    return QT_OK;
}

static int parse_section(struct qt_entry *e, struct qt_container *c, const json_t *obj,
                         struct qt_err *err)
{
    const char *name;
    struct stored *s;
    char *stored_name = NULL;
    int rc = need_string(&name, c, obj, "name", e->name, err);
    if (rc < 0)
        return rc;
    if (!section_name_ok(name))
        return qt_fail(err, QT_E_INPUT, c->manifest_path, e->name,
                       "section name '%s' must be 1 to %d characters of a-z 0-9 _", name,
                       SECTION_NAME_LIMIT);
    QT_TRY(qt_string_format(&stored_name, err, "%s.q.%s", e->name, name));
    QT_TRY(claim(&s, c, stored_name, obj, err));
    QT_TRY(keep_word(&name, c, err));
    e->section[e->nsections].name = name;
    e->section[e->nsections].tensor = s->tensor;
    e->section[e->nsections].crc = s->crc;
    e->nsections++;
done:
    qt_free(stored_name);
    return rc;
}

static int parse_sections(struct qt_entry *e, struct qt_container *c, const json_t *obj,
                          struct qt_err *err)
{
    const json_t *list = json_object_get(obj, "sections");
    size_t n = json_array_size(list);
    if (n < 1 || n > QT_MAX_SECTIONS)
        return qt_fail(err, QT_E_INPUT, c->manifest_path, e->name,
                       "'sections' must be an array of 1 to %d sections", QT_MAX_SECTIONS);
    for (size_t i = 0; i < n; i++) {
        int rc = parse_section(e, c, json_array_get(list, i), err);
        if (rc < 0)
            return rc;
    }
    return QT_OK;
}

static int parse_entry(struct qt_entry *e, struct qt_container *c, const json_t *obj,
                       struct qt_err *err)
{
    const json_t *exp2 = json_object_get(obj, "scale_exp2");
    size_t shape[QT_MAX_DIMS], count;
    int ndim, rc;
    if (!json_is_object(obj) || !e->name[0])
        return bad(err, c, e->name, "an entry of 'tensors' must be a named object");
    if (qt_container_is_copied(c, e->name))
        return bad(err, c, e->name, "is in both 'tensors' and 'copied'");
    if ((rc = need_string(&e->spec, c, obj, "scheme", e->name, err)) < 0 ||
        (rc = need_string(&e->layout, c, obj, "layout", e->name, err)) < 0 ||
        (rc = keep_word(&e->spec, c, err)) < 0 || (rc = keep_word(&e->layout, c, err)) < 0 ||
        (rc = parse_shape(shape, &ndim, c, obj, e->name, err)) < 0)
        return rc;
    if (ndim != 2 || shape[0] == 0 || shape[1] == 0 || qt_mul_overflow(&count, shape[0], shape[1]))
        return bad(err, c, e->name, "'shape' must be two positive integers N, K");
    e->n = shape[0];
    e->k = shape[1];
    e->source_dtype = json_string_value(json_object_get(obj, "source_dtype"));
    if (e->source_dtype && (rc = keep_word(&e->source_dtype, c, err)) < 0)
        return rc;
    if (!json_is_integer(exp2) || json_integer_value(exp2) < -SCALE_EXP2_LIMIT ||
        json_integer_value(exp2) > SCALE_EXP2_LIMIT)
        return qt_fail(err, QT_E_INPUT, c->manifest_path, e->name,
                       "'scale_exp2' must be an integer from -%d to %d", SCALE_EXP2_LIMIT,
                       SCALE_EXP2_LIMIT);
    e->scale_exp2 = (int)json_integer_value(exp2);
    return parse_sections(e, c, obj, err);
}

static int compare_entries(const void *a, const void *b)
{
    return strcmp((*(const struct qt_entry *const *)a)->name,
                  (*(const struct qt_entry *const *)b)->name);
}

static int compare_entry_name(const void *name, const void *item)
{
    return strcmp(name, (*(const struct qt_entry *const *)item)->name);
}

/* Adds the member of `tensors` that `object` has. */
static int add_entry(struct qt_container *c, json_t *object, struct qt_json_part json,
                     struct qt_err *err)
{
    struct qt_entry *e = &c->entries[c->count];
    const void *member = json_object_iter(object);
    char *name;
    int rc = qt_string_copy(&name, json_object_iter_key((void *)(uintptr_t)member), err);
    if (rc < 0)
        return rc;
    e->name = name;
    e->json = json;
    c->by_name[c->count++] = e;
    return parse_entry(e, c, json_object_iter_value((void *)(uintptr_t)member), err);
}

/* Claims a stored tensor that is not a section; `what` is "copied" or "kv.tensors". */
static int claim_member(struct stored **out, struct qt_container *c, const char *name,
                        const json_t *value, const char *what, struct qt_err *err)
{
    if (!json_is_object(value) || !name[0])
        return qt_fail(err, QT_E_INPUT, c->manifest_path, name,
                       "an entry of '%s' must be a named object", what);
    return claim(out, c, name, value, err);
}

static int add_copied(struct qt_container *c, json_t *object, struct qt_json_part json,
                      struct qt_err *err)
{
    void *member = json_object_iter(object);
    struct stored *s;
    int rc = claim_member(&s, c, json_object_iter_key(member), json_object_iter_value(member),
                          "copied", err);
    if (rc == QT_OK)
        s->json = json;
    return rc;
}

static int parse_list(struct qt_container *c, const struct list *list,
                      int (*add)(struct qt_container *c, json_t *object, struct qt_json_part json,
                                 struct qt_err *err),
                      struct qt_err *err)
{
    struct qt_json_cursor cursor;
    struct qt_json_part part;
    json_t *object;
    int rc = QT_OK;
    qt_json_enter(&cursor, list->text, '{');
    while (rc == QT_OK && qt_json_next(&part, &cursor) == QT_JSON_PART) {
        rc = qt_json_parse_part(&object, part, '{', false, c->manifest_path, err);
        if (rc == QT_OK)
            rc = add(c, object, part, err);
        json_decref(object);
    }
    return rc;
}

static int parse_kv(struct qt_container *c, struct qt_err *err)
{
    json_t *list = json_object_get(json_object_get(c->manifest, "kv"), "tensors"), *value;
    const char *name;
    struct stored *s;
    int rc;
    if (!json_is_object(list))
        return bad(err, c, NULL, "'kv.tensors' must be an object");
    json_object_foreach (list, name, value) {
        if ((rc = claim_member(&s, c, name, value, "kv.tensors", err)) < 0)
            return rc;
    }
    return QT_OK;
}

static int parse_entries(struct qt_container *c, struct qt_err *err)
{
    const size_t n = c->tensors.count;
    int rc;
    QT_TRY(qt_array_new(&c->entries, n, sizeof *c->entries, err));
    QT_TRY(qt_array_new(&c->by_name, n, sizeof *c->by_name, err));
    QT_TRY(parse_list(c, &c->tensors, add_entry, err));
    qsort(c->by_name, n, sizeof *c->by_name, compare_entries);
done:
    return rc;
}

/* ---- cutting the manifest ------------------------------------------------------------------- */

static int no_json(struct qt_err *err, const struct qt_container *c)
{
    return bad(err, c, NULL, "invalid JSON");
}

/* Leaves *list empty if the text is not an object. */
static int cut_list(struct list *list, const struct qt_container *c, struct qt_json_part text,
                    struct qt_err *err)
{
    struct qt_json_cursor cursor;
    struct qt_json_part part;
    enum qt_json_step step;
    if (!qt_json_enter(&cursor, text, '{'))
        return QT_OK;
    if (list->text.text) /* the same key twice */
        return no_json(err, c);
    list->text = text;
    while ((step = qt_json_next(&part, &cursor)) == QT_JSON_PART)
        list->count++;
    return step == QT_JSON_END ? QT_OK : no_json(err, c);
}

/* Adds a member of the manifest that is not a list. */
static int add_member(struct qt_container *c, struct qt_json_part part, struct qt_err *err)
{
    json_t *object;
    int rc = qt_json_parse_part(&object, part, '{', false, c->manifest_path, err);
    if (rc < 0)
        return rc;
    if (json_object_get(c->manifest, json_object_iter_key(json_object_iter(object))))
        rc = no_json(err, c);
    else if (json_object_update(c->manifest, object) < 0)
        rc = qt_no_memory(err, c->manifest_path);
    json_decref(object);
    return rc;
}

static int cut_manifest(struct qt_container *c, struct qt_json_part text, struct qt_err *err)
{
    struct qt_json_cursor cursor;
    struct qt_json_part part, value;
    enum qt_json_step step;
    int rc = QT_OK;
    if (!qt_json_enter(&cursor, text, '{'))
        return bad(err, c, NULL, "the manifest must be a JSON object");
    while ((step = qt_json_next(&part, &cursor)) == QT_JSON_PART && rc == QT_OK)
        rc = qt_json_part_value(&value, part, "tensors")  ? cut_list(&c->tensors, c, value, err)
             : qt_json_part_value(&value, part, "copied") ? cut_list(&c->copied, c, value, err)
                                                          : add_member(c, part, err);
    return rc < 0 || step == QT_JSON_END ? rc : no_json(err, c);
}

/* Replaces *err by the fault of the manifest's syntax, if it has one: that comes first. */
static int explain(const struct qt_container *c, int rc, struct qt_err *err)
{
    json_t *whole = NULL;
    struct qt_err syntax = {0};
    int earlier = qt_json_load(&whole, c->manifest_path, QT_MAX_MANIFEST, &syntax);
    json_decref(whole);
    if (earlier == QT_OK)
        return rc;
    if (err)
        *err = syntax;
    return earlier;
}

static bool has_twins(const struct qt_container *c)
{
    for (size_t i = 1; i < c->count; i++)
        if (strcmp(c->by_name[i - 1]->name, c->by_name[i]->name) == 0)
            return true;
    return false;
}

/* ---- opening -------------------------------------------------------------------------------- */

/* Must come before all other checks: another version may differ in anything else. */
static int read_version(struct qt_container *c, struct qt_err *err)
{
    const char *format;
    size_t version;
    int rc;
    if ((rc = need_string(&format, c, c->manifest, "format", NULL, err)) < 0 ||
        (rc = qt_json_need_size(&version, c->manifest, "format_version", c->manifest_path, err)) <
            0)
        return rc;
    if (strcmp(format, "qtool") != 0)
        return bad(err, c, NULL, "not a qtool manifest: 'format' is not \"qtool\"");
    if (version < 1 || version > QT_FORMAT_VERSION)
        return qt_fail(err, QT_E_UNSUPPORTED, c->manifest_path, NULL,
                       "format version %zu, but this qtool (%s) reads versions 1 to %d: use the "
                       "qtool that wrote it, or quantize again",
                       version, QT_VERSION, QT_FORMAT_VERSION);
    c->version = (int)version;
    return QT_OK;
}

static int check_files(const struct qt_container *c, struct qt_err *err)
{
    static const char suffix[] = ".safetensors";
    for (size_t i = 0; i < qt_ckpt_file_count(c->ckpt); i++) {
        size_t size;
        const char *path = qt_ckpt_file(c->ckpt, i, &size), *dot = strrchr(path, '.');
        if (!dot || strcmp(dot, suffix) != 0)
            return qt_fail(err, QT_E_INPUT, path, NULL,
                           "the tensors of a container must be in safetensors files");
    }
    return QT_OK;
}

static int load(struct qt_container *c, struct qt_err *err)
{
    int rc;
    size_t size;
    QT_TRY(qt_file_read(&c->text, &size, c->manifest_path, QT_MAX_MANIFEST, err));
    c->manifest = json_object();
    c->words = json_object();
    if (!c->manifest || !c->words)
        return qt_no_memory(err, c->manifest_path);
    QT_TRY(cut_manifest(c, (struct qt_json_part){c->text, size}, err));
    QT_TRY(read_version(c, err));
    if (!c->tensors.text.text)
        return bad(err, c, NULL, "'tensors' must be an object");
    if (!c->copied.text.text)
        return bad(err, c, NULL, "'copied' must be an object");
    QT_TRY(qt_ckpt_open_stored(&c->ckpt, c->dir, err));
    QT_TRY(check_files(c, err));
    QT_TRY(list_stored(c, err));
    QT_TRY(parse_list(c, &c->copied, add_copied, err));
    QT_TRY(parse_entries(c, err));
    if (has_twins(c))
        return no_json(err, c);
    if (json_object_get(c->manifest, "kv"))
        QT_TRY(parse_kv(c, err));
    QT_TRY(check_all_claimed(c, err));
done:
    return rc;
}

bool qt_container_probe(const char *path)
{
    char manifest[PATH_MAX]; /* avoids an allocation; longer paths cannot be opened */
    int size = snprintf(manifest, sizeof manifest, "%s/qtool.json", path);
    return qt_path_is_dir(path) && size > 0 && (size_t)size < sizeof manifest &&
           qt_path_exists(manifest);
}

int qt_container_open(struct qt_container **out, const char *path, struct qt_err *err)
{
    struct qt_container *c;
    *out = NULL;
    int rc = qt_array_new(&c, 1, sizeof *c, err);
    if (rc < 0)
        return rc;
    rc = qt_string_copy(&c->dir, path, err);
    if (rc == QT_OK)
        rc = qt_path_join(&c->manifest_path, path, QT_MANIFEST_NAME, err);
    if (rc == QT_OK)
        rc = load(c, err);
    if (rc == QT_E_INPUT || rc == QT_E_UNSUPPORTED)
        rc = explain(c, rc, err);
    if (rc < 0)
        qt_container_close(c);
    else
        *out = c;
    return rc;
}

void qt_container_close(struct qt_container *c)
{
    if (!c)
        return;
    qt_ckpt_close(c->ckpt);
    for (size_t i = 0; i < c->count; i++)
        qt_free((void *)(uintptr_t)c->entries[i].name);
    json_decref(c->manifest);
    json_decref(c->words);
    qt_free(c->text);
    qt_free(c->dir);
    qt_free(c->manifest_path);
    qt_free(c->stored);
    qt_free(c->entries);
    qt_free(c->by_name);
    qt_free(c);
}

const char *qt_container_dir(const struct qt_container *c)
{
    return c->dir;
}

const struct qt_ckpt *qt_container_ckpt(const struct qt_container *c)
{
    return c->ckpt;
}

const json_t *qt_container_manifest(const struct qt_container *c)
{
    return c->manifest;
}

/* The value of the only member of the part; it was parsed before. */
static int member_json(json_t **out, struct qt_json_part part, struct qt_err *err)
{
    json_t *object;
    int rc = qt_json_parse_part(&object, part, '{', false, QT_MANIFEST_NAME, err);
    *out = json_incref(json_object_iter_value(json_object_iter(object)));
    json_decref(object);
    return rc;
}

int qt_entry_json(json_t **out, const struct qt_entry *e, struct qt_err *err)
{
    return member_json(out, e->json, err);
}

bool qt_container_is_copied(const struct qt_container *c, const char *name)
{
    const struct stored *s = stored_find(c, name);
    return s && s->json.text;
}

int qt_container_copied_json(json_t **out, const struct qt_container *c, const char *name,
                             struct qt_err *err)
{
    *out = NULL;
    return member_json(out, stored_find(c, name)->json, err);
}

int qt_container_crc(uint32_t *out, const struct qt_container *c, struct qt_err *err)
{
    struct qt_map map;
    int rc = qt_map_open(&map, c->manifest_path, err);
    if (rc < 0)
        return rc;
    *out = qt_crc32(0, map.data, map.size);
    qt_map_close(&map);
    return QT_OK;
}

int qt_container_version(const struct qt_container *c)
{
    return c->version;
}

size_t qt_container_count(const struct qt_container *c)
{
    return c->count;
}

const struct qt_entry *qt_container_entry(const struct qt_container *c, size_t i)
{
    return &c->entries[i];
}

const struct qt_entry *qt_container_find(const struct qt_container *c, const char *name)
{
    const struct qt_entry **found =
        bsearch(name, c->by_name, c->count, sizeof *c->by_name, compare_entry_name);
    return found ? *found : NULL;
}

int qt_container_check_crc(const struct qt_container *c, size_t i, struct qt_err *err)
{
    const struct qt_tensor *t = qt_ckpt_tensor(c->ckpt, i);
    const struct stored *s = stored_find(c, t->name);
    uint32_t crc;
    int rc = qt_ckpt_crc(&crc, c->ckpt, t, err);
    if (rc < 0)
        return rc;
    if (crc != s->crc)
        return qt_fail(err, QT_E_INPUT, t->file, t->name,
                       "the data's CRC-32 is %08x, the manifest's %08x: the file is damaged", crc,
                       s->crc);
    return QT_OK;
}

static int check_one(void *container, size_t i, int thread, struct qt_err *err)
{
    (void)thread;
    return qt_container_check_crc(container, i, err);
}

int qt_container_check_crcs(const struct qt_container *c, struct qt_err *err)
{
    return qt_parallel(qt_ckpt_count(c->ckpt), check_one, (void *)(uintptr_t)c, err);
}
