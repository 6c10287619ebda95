/*
 * A checkpoint: one file, or the files of a directory, as one list of tensors with unique names.
 * Quantized and stacked tensors are presented as ordinary ones (views.c).
 */
#include "formats/gguf.h"
#include "formats/views.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_INDEX = QT_MAX_HEADER };

struct qt_ckpt {
    char *dir;
    char *made;              /* GGUF: the temporary directory with side files, or NULL */
    struct qt_shard *shards; /* in name order; fixed once allocated: slots point into it */
    size_t shard_count;
    bool is_file; /* opened as a single file, not as a directory */
    /* Readers see these tensors: stored ones and views. */
    const struct qt_slot **in_file_order;
    const struct qt_slot **in_name_order;
    size_t count;
    struct qt_views views;
};

/* File names inside the checkpoint's directory. */
struct names {
    char **items;
    size_t count, capacity;
};

/* ---- list of files -------------------------------------------------------------------------- */

static void names_free(struct names *names)
{
    for (size_t i = 0; i < names->count; i++)
        qt_free(names->items[i]);
    qt_free(names->items);
}

static int names_add(struct names *names, const char *name, struct qt_err *err)
{
    int rc =
        qt_array_grow(&names->items, &names->capacity, names->count + 1, sizeof *names->items, err);
    if (rc == QT_OK)
        rc = qt_string_copy(&names->items[names->count], name, err);
    if (rc == QT_OK)
        names->count++;
    return rc;
}

static int compare_strings(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void names_sort_unique(struct names *names)
{
    size_t kept = 0;
    if (names->count)
        qsort(names->items, names->count, sizeof *names->items, compare_strings);
    for (size_t i = 0; i < names->count; i++)
        if (kept && strcmp(names->items[kept - 1], names->items[i]) == 0)
            qt_free(names->items[i]);
        else
            names->items[kept++] = names->items[i];
    names->count = kept;
}

/* Lists all files of the directory whose names end so. */
static int list_directory(struct names *names, const char *dir, const char *ending,
                          struct qt_err *err)
{
    int rc = QT_OK;
    struct dirent *entry;
    DIR *d = opendir(dir);
    if (!d)
        return qt_fail(err, QT_E_RESOURCE, dir, NULL, "cannot list: %s", strerror(errno));
    while (rc == QT_OK && (entry = readdir(d)) != NULL)
        if (qt_name_ends_in(entry->d_name, ending))
            rc = names_add(names, entry->d_name, err);
    closedir(d);
    return rc;
}

/* Lists the files of an index: {"metadata": ..., "weight_map": {tensor: file}}. */
static int list_index(struct names *names, json_t *index, const char *path, struct qt_err *err)
{
    json_t *map = json_object_get(index, "weight_map"), *value;
    const char *tensor;
    if (!json_is_object(map))
        return qt_fail(err, QT_E_INPUT, path, NULL, "'weight_map' must be an object");
    json_object_foreach (map, tensor, value) {
        const char *name = json_string_value(value);
        int rc = qt_tensor_check_name(tensor, strlen(tensor), path, err);
        if (rc < 0)
            return rc;
        if (!name)
            return qt_fail(err, QT_E_INPUT, path, tensor, "its file name must be a string");
        if (!qt_name_is_plain(name) || !qt_shard_name_ok(name))
            return qt_fail(err, QT_E_INPUT, path, tensor,
                           "'%s' is not the name of a checkpoint file in this directory", name);
        rc = names_add(names, name, err);
        if (rc < 0)
            return rc;
    }
    if (names->count == 0)
        return qt_fail(err, QT_E_INPUT, path, NULL, "'weight_map' is empty");
    return QT_OK;
}

/* ---- opening -------------------------------------------------------------------------------- */

static int missing_shard(const json_t *index, const char *index_path, const char *name,
                         struct qt_err *err)
{
    const char *tensor;
    json_t *value, *map = json_object_get(index, "weight_map");
    json_object_foreach (map, tensor, value)
        if (strcmp(json_string_value(value), name) == 0)
            break;
    return qt_fail(err, QT_E_INPUT, index_path, tensor, "its file '%s' does not exist", name);
}

/* index may be NULL. */
static int open_shards(struct qt_ckpt *ckpt, const struct names *names, const json_t *index,
                       const char *index_path, struct qt_err *err)
{
    int rc = qt_array_new(&ckpt->shards, names->count, sizeof *ckpt->shards, err);
    for (size_t i = 0; rc == QT_OK && i < names->count; i++) {
        char *path;
        rc = qt_path_join(&path, ckpt->dir, names->items[i], err);
        if (rc == QT_OK && index && !qt_path_exists(path))
            rc = missing_shard(index, index_path, names->items[i], err);
        if (rc == QT_OK)
            rc = qt_shard_open(&ckpt->shards[i], path, err);
        if (rc == QT_OK)
            ckpt->shard_count++;
        qt_free(path);
    }
    return rc;
}

static int compare_slot_names(const void *a, const void *b)
{
    const struct qt_slot *x = *(const struct qt_slot *const *)a;
    const struct qt_slot *y = *(const struct qt_slot *const *)b;
    return strcmp(x->info.name, y->info.name);
}

/* Sorts the list into in_name_order and checks that all names differ. */
static int sort_names(struct qt_ckpt *ckpt, struct qt_err *err)
{
    const size_t n = ckpt->count;
    memcpy(ckpt->in_name_order, ckpt->in_file_order, n * sizeof(struct qt_slot *));
    qsort(ckpt->in_name_order, n, sizeof(struct qt_slot *), compare_slot_names);
    for (size_t i = 1; i < n; i++) {
        const struct qt_slot *first = ckpt->in_name_order[i - 1], *second = ckpt->in_name_order[i];
        const struct qt_tensor *a = &first->info, *b = &second->info;
        if (strcmp(a->name, b->name) != 0)
            continue;
        if (first->view || second->view)
            return qt_fail(err, QT_E_INPUT, a->file, a->name,
                           "is stored both by itself and as a part of a stack or a quantized "
                           "tensor");
        /* The order of equal elements after qsort is unspecified. */
        const char *low = strcmp(a->file, b->file) <= 0 ? a->file : b->file;
        return qt_fail(err, QT_E_INPUT, low == a->file ? b->file : a->file, a->name,
                       "is stored more than once: also in %s", low);
    }
    return QT_OK;
}

static int list_tensors(struct qt_ckpt *ckpt, struct qt_err *err)
{
    int rc;
    size_t n = 0, bytes = sizeof(struct qt_slot *);
    for (size_t s = 0; s < ckpt->shard_count; s++)
        n += ckpt->shards[s].count;
    QT_TRY(qt_array_new(&ckpt->in_file_order, n, bytes, err));
    QT_TRY(qt_array_new(&ckpt->in_name_order, n, bytes, err));
    for (size_t s = 0; s < ckpt->shard_count; s++)
        for (size_t i = 0; i < ckpt->shards[s].count; i++)
            ckpt->in_file_order[ckpt->count++] = &ckpt->shards[s].slots[i];
    QT_TRY(sort_names(ckpt, err));
done:
    return rc;
}

/* Replaces the stored tensors by views where there are some. */
static int present_views(struct qt_ckpt *ckpt, struct qt_err *err)
{
    struct qt_views *views = &ckpt->views;
    const struct qt_slot **stored = ckpt->in_file_order;
    const size_t n = ckpt->count;
    size_t next = 0;
    int rc = qt_views_make(views, qt_ckpt_dir(ckpt), (struct qt_slot *const *)ckpt->in_name_order,
                           (struct qt_slot *const *)stored, n, err);
    if (rc < 0 || views->count == 0)
        return rc;
    ckpt->in_file_order = NULL;
    qt_free(ckpt->in_name_order);
    ckpt->in_name_order = NULL;
    ckpt->count = 0;
    QT_TRY(qt_array_new(&ckpt->in_file_order, n + views->count, sizeof *stored, err));
    QT_TRY(qt_array_new(&ckpt->in_name_order, n + views->count, sizeof *stored, err));
    for (size_t i = 0; i < n; i++) {
        if (!stored[i]->used)
            ckpt->in_file_order[ckpt->count++] = stored[i];
        for (; next < views->count && views->list[next].base->part[0] == stored[i]; next++) {
            views->list[next].slot.view = &views->list[next];
            ckpt->in_file_order[ckpt->count++] = &views->list[next].slot;
        }
    }
    QT_TRY(sort_names(ckpt, err));
done:
    qt_free(stored);
    return rc;
}

/* The index must list exactly the tensors of each file. */
static int check_index(const struct qt_ckpt *ckpt, const json_t *index, const char *path,
                       struct qt_err *err)
{
    json_t *map = json_object_get(index, "weight_map"), *value;
    const char *name;
    json_object_foreach (map, name, value) {
        const struct qt_tensor *t = qt_ckpt_find(ckpt, name);
        const char *file = json_string_value(value);
        if (!t)
            return qt_fail(err, QT_E_INPUT, path, name, "is not in '%s', where the index puts it",
                           file);
        if (strcmp(strrchr(t->file, '/') + 1, file) != 0)
            return qt_fail(err, QT_E_INPUT, t->file, name,
                           "is in this file, but the index puts it in '%s'", file);
    }
    for (size_t i = 0; i < ckpt->count; i++) {
        const struct qt_tensor *t = &ckpt->in_file_order[i]->info;
        if (!json_object_get(map, t->name))
            return qt_fail(err, QT_E_INPUT, t->file, t->name, "is not listed in %s", path);
    }
    return QT_OK;
}

static int open_index(struct qt_ckpt *ckpt, const char *name, struct qt_err *err)
{
    int rc;
    char *path = NULL;
    json_t *index = NULL;
    struct names names = {0};
    QT_TRY(qt_path_join(&path, ckpt->dir, name, err));
    QT_TRY(qt_json_load_lenient(&index, path, MAX_INDEX, err));
    QT_TRY(list_index(&names, index, path, err));
    names_sort_unique(&names);
    QT_TRY(open_shards(ckpt, &names, index, path, err));
    QT_TRY(list_tensors(ckpt, err));
    QT_TRY(check_index(ckpt, index, path, err));
done:
    names_free(&names);
    json_decref(index);
    qt_free(path);
    return rc;
}

/* Number of shards according to a file name: 2 for PREFIX00001-of-00002.safetensors, with the
 * length of PREFIX in *prefix; 0 for other names. */
static size_t shards_of(const char *name, size_t *prefix)
{
    static const char digits[] = "0123456789";
    enum { WIDTH = 5 };
    const char *of = NULL;
    for (const char *next = name; (next = strstr(next, "-of-")) != NULL; next++)
        of = next;
    if (!of || of - name < WIDTH)
        return 0;
    *prefix = (size_t)(of - name) - WIDTH;
    const char *total = of + strlen("-of-");
    return strspn(name + *prefix, digits) == WIDTH && strspn(total, digits) == WIDTH &&
                   total[WIDTH] == '.' && !strchr(total + WIDTH + 1, '.')
               ? strtoul(total, NULL, 10)
               : 0;
}

/* Without an index, only the file names show that a shard is missing. */
static int check_numbered(const struct names *names, const char *dir, struct qt_err *err)
{
    for (size_t i = 0, prefix, other; i < names->count; i++) {
        const char *name = names->items[i];
        const size_t total = shards_of(name, &prefix);
        size_t found = 0;
        for (size_t j = 0; j < names->count && total; j++)
            found += shards_of(names->items[j], &other) == total && other == prefix &&
                     memcmp(names->items[j], name, prefix) == 0;
        if (found < total)
            return qt_fail(err, QT_E_INPUT, dir, NULL,
                           "the checkpoint has no index, and only %zu of the %zu files to which %s "
                           "belongs",
                           found, total, name);
    }
    return QT_OK;
}

int qt_ckpt_check_whole(const struct qt_ckpt *ckpt, struct qt_err *err)
{
    size_t prefix, total = shards_of(qt_base_name(ckpt->shards[0].path), &prefix);
    return !ckpt->is_file || total <= 1
               ? QT_OK
               : qt_fail(err, QT_E_INPUT, ckpt->shards[0].path, NULL,
                         "is one of %zu files of a checkpoint: give the directory", total);
}

/* name: a file of the directory, or NULL for all *.safetensors files. */
static int open_files(struct qt_ckpt *ckpt, const char *name, struct qt_err *err)
{
    int rc;
    struct names names = {0};
    QT_TRY(name ? names_add(&names, name, err)
                : list_directory(&names, ckpt->dir, ".safetensors", err));
    if (names.count == 0)
        QT_TRY(qt_ckpt_none_in(ckpt->dir, err));
    names_sort_unique(&names);
    if (!name)
        QT_TRY(check_numbered(&names, ckpt->dir, err));
    QT_TRY(open_shards(ckpt, &names, NULL, NULL, err));
    QT_TRY(list_tensors(ckpt, err));
done:
    names_free(&names);
    return rc;
}

/* Removes all names but those of the files to which `name` belongs: itself, or the numbered files
 * of its set. */
static void keep_set(struct names *names, const char *name)
{
    size_t prefix = 0, other, kept = 0;
    const size_t total = shards_of(name, &prefix);
    for (size_t i = 0; i < names->count; i++) {
        char *item = names->items[i];
        const bool same = total ? shards_of(item, &other) == total && other == prefix &&
                                      memcmp(item, name, prefix) == 0
                                : strcmp(item, name) == 0;
        if (same)
            names->items[kept++] = item;
        else
            qt_free(item);
    }
    names->count = kept;
}

/* name: a file, or one of the files of a set. */
static int open_gguf(struct qt_ckpt *ckpt, const char *name, struct qt_err *err)
{
    int rc;
    struct names names = {0};
    QT_TRY(list_directory(&names, ckpt->dir, ".gguf", err));
    keep_set(&names, name);
    names_sort_unique(&names);
    QT_TRY(check_numbered(&names, ckpt->dir, err));
    if (names.count == 0) /* the file has gone */
        QT_TRY(names_add(&names, name, err));
    QT_TRY(open_shards(ckpt, &names, NULL, NULL, err));
    QT_TRY(qt_gguf_adopt(&ckpt->made, ckpt->shards, ckpt->shard_count, ckpt->dir, err));
    QT_TRY(list_tensors(ckpt, err));
done:
    names_free(&names);
    return rc;
}

/* *name = a GGUF file if the directory has only one model in such files and no *.safetensors; NULL:
 * it has none. The caller frees it with qt_free. */
static int find_gguf(char **name, const char *dir, struct qt_err *err)
{
    struct names weights = {0}, files = {0};
    int rc;
    *name = NULL;
    QT_TRY(list_directory(&weights, dir, ".safetensors", err));
    QT_TRY(list_directory(&files, dir, ".gguf", err));
    names_sort_unique(&files);
    if (weights.count || files.count == 0)
        goto done;
    QT_TRY(qt_string_copy(name, files.items[0], err));
    const size_t all = files.count;
    keep_set(&files, *name);
    if (files.count < all)
        rc = qt_fail(err, QT_E_INPUT, dir, NULL,
                     "has several GGUF files: give the name of one, such as %s/%s", dir, *name);
done:
    names_free(&weights);
    names_free(&files);
    return rc;
}

static int open_directory(struct qt_ckpt *ckpt, const char *dir, struct qt_err *err)
{
    static const struct {
        const char *name;
        int (*open)(struct qt_ckpt *ckpt, const char *name, struct qt_err *err);
    } choices[] = {
        {"model.safetensors", open_files},
        {QT_INDEX_NAME, open_index},
        {"pytorch_model.bin", open_files},
        {"pytorch_model.bin.index.json", open_index},
    };
    int rc = qt_string_copy(&ckpt->dir, dir, err);
    for (size_t i = 0; rc == QT_OK && i < sizeof choices / sizeof *choices; i++) {
        char *path;
        rc = qt_path_join(&path, dir, choices[i].name, err);
        bool exists = rc == QT_OK && qt_path_exists(path);
        qt_free(path);
        if (exists)
            return choices[i].open(ckpt, choices[i].name, err);
    }
    char *gguf = NULL;
    if (rc == QT_OK)
        rc = find_gguf(&gguf, dir, err);
    if (rc == QT_OK)
        rc = gguf ? open_gguf(ckpt, gguf, err) : open_files(ckpt, NULL, err);
    qt_free(gguf);
    return rc;
}

static int open_file(struct qt_ckpt *ckpt, const char *path, struct qt_err *err)
{
    int rc;
    const char *name = qt_base_name(path);
    const bool gguf = qt_gguf_name_ok(name);
    ckpt->is_file = !gguf;
    if (access(path, F_OK) < 0 && errno != EACCES) /* also for dangling and circular links */
        return qt_ckpt_none_at(path, errno, err);
    if (!gguf && !qt_shard_name_ok(name))
        return qt_fail(err, QT_E_INPUT, path, NULL,
                       "a directory or a .safetensors, .bin, .pt, .pth or .gguf file is expected");
    const int length = (int)(name - path);
    QT_TRY(length == 0   ? qt_string_copy(&ckpt->dir, ".", err)
           : length == 1 ? qt_string_copy(&ckpt->dir, "/", err)
                         : qt_string_format(&ckpt->dir, err, "%.*s", length - 1, path));
    if (gguf)
        return open_gguf(ckpt, name, err);
    QT_TRY(qt_array_new(&ckpt->shards, 1, sizeof *ckpt->shards, err));
    QT_TRY(qt_shard_open(&ckpt->shards[0], path, err));
    ckpt->shard_count = 1;
    QT_TRY(list_tensors(ckpt, err));
done:
    return rc;
}

int qt_ckpt_open_stored(struct qt_ckpt **out, const char *path, struct qt_err *err)
{
    int rc = qt_array_new(out, 1, sizeof **out, err);
    if (rc < 0)
        return rc;
    rc = qt_path_is_dir(path) ? open_directory(*out, path, err) : open_file(*out, path, err);
    if (rc < 0) {
        qt_ckpt_close(*out);
        *out = NULL;
    }
    return rc;
}

int qt_ckpt_open(struct qt_ckpt **out, const char *path, struct qt_err *err)
{
    int rc = qt_ckpt_open_stored(out, path, err);
    if (rc == QT_OK)
        rc = present_views(*out, err);
    if (rc < 0) {
        qt_ckpt_close(*out);
        *out = NULL;
    }
    return rc;
}

int qt_ckpt_check_readable(const struct qt_ckpt *ckpt, struct qt_err *err)
{
    const struct qt_err *why = &ckpt->views.unreadable;
    return why->status == QT_OK ? QT_OK
                                : qt_fail(err, why->status, *why->file ? why->file : NULL,
                                          *why->tensor ? why->tensor : NULL, "%s", why->reason);
}

bool qt_ckpt_is_encoded(const struct qt_ckpt *ckpt)
{
    return ckpt->views.encoded;
}

const json_t *qt_ckpt_quantization(const struct qt_ckpt *ckpt)
{
    return ckpt->views.encoded ? ckpt->views.source.section : NULL;
}

void qt_ckpt_close(struct qt_ckpt *ckpt)
{
    if (!ckpt)
        return;
    qt_views_free(&ckpt->views);
    qt_tempdir_remove(ckpt->made);
    for (size_t i = 0; i < ckpt->shard_count; i++)
        qt_shard_close(&ckpt->shards[i]);
    qt_free(ckpt->shards);
    qt_free(ckpt->in_file_order);
    qt_free(ckpt->in_name_order);
    qt_free(ckpt->dir);
    qt_free(ckpt);
}

/* ---- access --------------------------------------------------------------------------------- */

/* Keep in step with docs/format.md. */
static const char *const side_files[] = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "qwen.tiktoken",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
};

const char *qt_side_file(size_t i)
{
    return i < sizeof side_files / sizeof *side_files ? side_files[i] : NULL;
}

const char *qt_ckpt_dir(const struct qt_ckpt *ckpt)
{
    return ckpt->made ? ckpt->made : ckpt->dir;
}

const char *qt_ckpt_path(const struct qt_ckpt *ckpt)
{
    return ckpt->made ? ckpt->shards[0].path : ckpt->dir;
}

size_t qt_ckpt_count(const struct qt_ckpt *ckpt)
{
    return ckpt->count;
}

const struct qt_tensor *qt_ckpt_tensor(const struct qt_ckpt *ckpt, size_t i)
{
    return &ckpt->in_file_order[i]->info;
}

const char *qt_ckpt_shares(const struct qt_ckpt *ckpt, size_t i)
{
    return ckpt->in_file_order[i]->shares;
}

static const struct qt_slot *find_slot(const struct qt_ckpt *ckpt, const char *name)
{
    struct qt_slot key = {.info.name = name};
    const struct qt_slot *p = &key;
    const struct qt_slot *const *found = NULL;
    if (ckpt->count) /* else the list is NULL, which bsearch does not take */
        found = bsearch(&p, ckpt->in_name_order, ckpt->count, sizeof p, compare_slot_names);
    return found ? *found : NULL;
}

const struct qt_tensor *qt_ckpt_find(const struct qt_ckpt *ckpt, const char *name)
{
    const struct qt_slot *slot = find_slot(ckpt, name);
    return slot ? &slot->info : NULL;
}

size_t qt_ckpt_file_count(const struct qt_ckpt *ckpt)
{
    return ckpt->shard_count;
}

const char *qt_ckpt_file(const struct qt_ckpt *ckpt, size_t i, size_t *size)
{
    *size = ckpt->shards[i].map.size;
    return ckpt->shards[i].path;
}

int qt_ckpt_read(struct qt_blob *out, const struct qt_ckpt *ckpt, const struct qt_tensor *t,
                 struct qt_err *err)
{
    const struct qt_slot *slot = find_slot(ckpt, t->name);
    *out = (struct qt_blob){0};
    if (!slot)
        return qt_fail(err, QT_E_INTERNAL, t->file, t->name, "is not in this checkpoint");
    return slot->view ? qt_view_read(out, slot->view, err) : qt_slot_read(out, slot, err);
}

int qt_ckpt_crc(uint32_t *crc, const struct qt_ckpt *ckpt, const struct qt_tensor *t,
                struct qt_err *err)
{
    struct qt_blob blob;
    int rc = qt_ckpt_read(&blob, ckpt, t, err);
    if (rc < 0)
        return rc;
    rc = qt_crc32_file(crc, blob.data, blob.size, err);
    qt_blob_free(&blob);
    return rc;
}

int qt_ckpt_check_unchanged(const struct qt_ckpt *ckpt, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; rc == QT_OK && i < ckpt->shard_count; i++)
        rc = qt_map_check_unchanged(&ckpt->shards[i].map, ckpt->shards[i].path, err);
    return rc;
}

/* Adds a stored tensor. */
static int sample_slot(uint32_t *crc, const struct qt_slot *slot, struct qt_err *err)
{
    enum { SAMPLE = 4096 };
    const struct qt_tensor *t = &slot->info;
    struct qt_blob blob;
    int rc = qt_stop_check(err);
    if (rc == QT_OK)
        rc = qt_slot_read(&blob, slot, err);
    if (rc < 0)
        return rc;
    const size_t n = qt_min_size(SAMPLE, blob.size);
    *crc = qt_crc32(*crc, t->name, strlen(t->name) + 1);
    *crc = qt_crc32(*crc, &t->dtype, sizeof t->dtype);
    *crc = qt_crc32(*crc, t->shape, (size_t)t->ndim * sizeof *t->shape);
    *crc = qt_crc32(*crc, blob.data, n);
    *crc = qt_crc32(*crc, blob.data + blob.size - n, n);
    qt_blob_free(&blob);
    return QT_OK;
}

int qt_ckpt_sample_crc(uint32_t *out, const struct qt_ckpt *ckpt, struct qt_err *err)
{
    int rc = QT_OK;
    *out = 0;
    for (size_t s = 0; s < ckpt->shard_count; s++)
        for (size_t i = 0; i < ckpt->shards[s].count && rc == QT_OK; i++)
            rc = sample_slot(out, &ckpt->shards[s].slots[i], err);
    return rc;
}
