/*
 * PyTorch checkpoints (torch.save since 1.6): a zip archive
 *
 *   NAME/data.pkl     pickle of the state dict; tensors refer to storages by key
 *   NAME/data/KEY     one storage
 *   NAME/byteorder    "little" (absent in older files, which are little-endian)
 *
 * Several tensors may share a storage (tied weights). A tensor is a view of its storage with any
 * strides.
 */
#include "formats/formats_internal.h"

static int bad(const struct qt_tensor *t, struct qt_err *err, const char *what)
{
    return qt_fail(err, QT_E_INPUT, t->file, t->name, "%s", what);
}

/* ---- opening -------------------------------------------------------------------------------- */

static int refuse_other_formats(const struct qt_shard *shard, struct qt_err *err)
{
    const struct qt_map *map = &shard->map;
    switch (qt_file_kind(map->data, map->size)) {
    case QT_KIND_TORCH:
    case QT_KIND_ZIP: /* data.pkl need not be the first entry */
        return QT_OK;
    case QT_KIND_PICKLE: /* the format before 1.6 is a plain sequence of pickles */
        return qt_fail(err, QT_E_UNSUPPORTED, shard->path, NULL,
                       "written by PyTorch before 1.6: load it with torch.load and save it again");
    case QT_KIND_UNKNOWN:
        return qt_fail(err, QT_E_INPUT, shard->path, NULL,
                       "not a PyTorch checkpoint (a zip archive is expected)");
    default:
        return qt_kind_expect(QT_KIND_TORCH, NULL, map->data, map->size, shard->path, err);
    }
}

/* Finds the entry NAME/data.pkl, where NAME is the only top-level folder. */
static int find_pickle(struct qt_zip_entry **out, const struct qt_shard *shard, struct qt_err *err)
{
    static const char ending[] = "/data.pkl";
    const size_t n = sizeof ending - 1;
    *out = NULL;
    for (size_t i = 0; i < shard->zip.count; i++) {
        struct qt_zip_entry *e = &shard->zip.entries[i];
        const char *slash = memchr(e->name, '/', e->name_size);
        if (e->name_size <= n || slash != e->name + e->name_size - n || memcmp(slash, ending, n))
            continue;
        if (*out)
            return qt_fail(err, QT_E_INPUT, shard->path, NULL,
                           "the archive has more than one data.pkl");
        *out = e;
    }
    if (!*out)
        return qt_fail(err, QT_E_INPUT, shard->path, NULL,
                       "not a PyTorch checkpoint: no data.pkl in the archive of %zu files",
                       shard->zip.count);
    return QT_OK;
}

/* Finds the entry `name` in the folder of data.pkl; *out = NULL if absent. */
static int find_beside(struct qt_zip_entry **out, const struct qt_shard *shard,
                       const struct qt_zip_entry *pickle, const char *name, size_t name_size,
                       struct qt_err *err)
{
    char *path;
    size_t folder = pickle->name_size - strlen("data.pkl");
    int rc =
        qt_string_format(&path, err, "%.*s%.*s", (int)folder, pickle->name, (int)name_size, name);
    if (rc == QT_OK)
        *out = qt_zip_find(&shard->zip, path);
    qt_free(path);
    return rc;
}

static int check_byteorder(const struct qt_shard *shard, const struct qt_zip_entry *pickle,
                           struct qt_err *err)
{
    enum { LONGEST = 20 };
    static const char name[] = "byteorder";
    struct qt_zip_entry *entry = NULL;
    struct qt_blob text;
    int rc = find_beside(&entry, shard, pickle, name, sizeof name - 1, err);
    if (rc < 0 || !entry)
        return rc;
    if (entry->size > LONGEST)
        return qt_fail(err, QT_E_UNSUPPORTED, shard->path, NULL,
                       "byteorder has %zu bytes, but at most %d are allowed", entry->size, LONGEST);
    rc = qt_zip_read(&text, entry, &shard->map, shard->path, err);
    if (rc < 0)
        return rc;
    if (text.size != 6 || memcmp(text.data, "little", 6) != 0)
        rc = qt_fail(err, QT_E_UNSUPPORTED, shard->path, NULL,
                     "byte order '%.*s': only little-endian files can be read", (int)text.size,
                     (const char *)text.data);
    qt_blob_free(&text);
    return rc;
}

/* Checks that all elements of the view lie in the storage. */
static int check_view(const struct qt_slot *slot, const struct qt_pickle_tensor *p,
                      struct qt_err *err)
{
    const struct qt_tensor *t = &slot->info;
    size_t last = p->offset, step;
    if (t->count == 0)
        return QT_OK;
    for (int d = 0; d < p->ndim; d++)
        if (qt_mul_overflow(&step, p->shape[d] - 1, p->stride[d]) ||
            qt_add_overflow(&last, last, step))
            return bad(t, err, "strides are too large");
    if (last >= p->storage)
        return qt_fail(err, QT_E_INPUT, t->file, t->name,
                       "reaches element %zu of a storage of %zu elements", last, p->storage);
    /* Overlapping elements (stride 0): a small file could request any amount of memory. */
    if (t->count > p->storage)
        return qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name,
                       "%zu elements expanded from a storage of %zu", t->count, p->storage);
    return QT_OK;
}

static int find_storage(struct qt_slot *slot, const struct qt_pickle_tensor *p,
                        const struct qt_zip_entry *pickle, struct qt_err *err)
{
    const struct qt_tensor *t = &slot->info;
    char *name;
    size_t bytes;
    int rc = qt_string_format(&name, err, "data/%.*s", (int)p->key_size, p->key);
    if (rc == QT_OK)
        rc = find_beside(&slot->entry, slot->shard, pickle, name, strlen(name), err);
    qt_free(name);
    if (rc < 0)
        return rc;
    if (!slot->entry)
        return qt_fail(err, QT_E_INPUT, t->file, t->name, "storage '%.*s' is not in the archive",
                       (int)qt_min_size(p->key_size, 100), p->key);
    if (qt_mul_overflow(&bytes, p->storage, qt_dtype_bits(t->dtype) / 8) ||
        bytes != slot->entry->size)
        return qt_fail(err, QT_E_INPUT, t->file, t->name,
                       "storage '%.*s' has %zu bytes, but %zu elements of %s are stated",
                       (int)qt_min_size(p->key_size, 100), p->key, slot->entry->size, p->storage,
                       qt_dtype_name(t->dtype));
    return QT_OK;
}

static int add_tensor(struct qt_shard *shard, const struct qt_pickle_tensor *p,
                      const struct qt_zip_entry *pickle, struct qt_err *err)
{
    struct qt_slot *slot;
    int rc = qt_shard_add(&slot, shard, p->name, p->name_size, err);
    if (rc < 0)
        return rc;
    slot->info.dtype = p->dtype;
    slot->info.ndim = p->ndim;
    memcpy(slot->info.shape, p->shape, sizeof p->shape);
    memcpy(slot->stride, p->stride, sizeof p->stride);
    rc = qt_tensor_measure(&slot->info, err);
    if (rc == QT_OK)
        rc = find_storage(slot, p, pickle, err);
    if (rc == QT_OK)
        rc = check_view(slot, p, err);
    if (rc == QT_OK && slot->info.count)
        slot->offset = p->offset * (qt_dtype_bits(p->dtype) / 8);
    return rc;
}

/* Bytes from the first to the last element of a view; 0 if it leaves any out in between. */
static size_t dense_bytes(const struct qt_slot *slot)
{
    const struct qt_tensor *t = &slot->info;
    size_t last = 0;
    for (int d = 0; d < t->ndim && t->count; d++)
        last += (t->shape[d] - 1) * slot->stride[d]; /* check_view: no overflow */
    return last + 1 == t->count ? t->nbytes : 0;
}

/* Marks the tensors that share data with an earlier one, in the order of qt_shard_sort. */
static void mark_shared(struct qt_shard *shard)
{
    const struct qt_slot *widest = NULL; /* reaches furthest in its storage */
    size_t end = 0;
    for (size_t i = 0; i < shard->count; i++) {
        struct qt_slot *slot = &shard->slots[i];
        const size_t bytes = dense_bytes(slot);
        if (bytes == 0)
            continue;
        if (widest && widest->entry == slot->entry && slot->offset < end)
            slot->shares = widest->info.name;
        if (!widest || widest->entry != slot->entry || slot->offset + bytes > end) {
            widest = slot;
            end = slot->offset + bytes;
        }
    }
}

int qt_torch_open(struct qt_shard *shard, struct qt_err *err)
{
    int rc;
    struct qt_zip_entry *pickle;
    struct qt_blob text = {0};
    struct qt_pickle_tensor *tensors = NULL;
    size_t count;
    QT_TRY(refuse_other_formats(shard, err));
    QT_TRY(qt_zip_open(&shard->zip, &shard->map, shard->path, err));
    QT_TRY(find_pickle(&pickle, shard, err));
    QT_TRY(check_byteorder(shard, pickle, err));
    if (pickle->size > QT_MAX_HEADER) {
        rc = qt_fail(err, QT_E_UNSUPPORTED, shard->path, NULL,
                     "data.pkl has %zu bytes, but at most %d are supported", pickle->size,
                     QT_MAX_HEADER);
        goto done;
    }
    QT_TRY(qt_zip_read(&text, pickle, &shard->map, shard->path, err));
    QT_TRY(qt_state_dict_read(&tensors, &count, text.data, text.size, shard->path, err));
    for (size_t i = 0; i < count; i++)
        QT_TRY(add_tensor(shard, &tensors[i], pickle, err));
    qt_shard_sort(shard);
    mark_shared(shard);
done:
    qt_free(tensors);
    qt_blob_free(&text);
    return rc;
}

/* ---- reading -------------------------------------------------------------------------------- */

/* The strides of dimensions of size 1 do not matter. */
static bool is_contiguous(const struct qt_slot *slot)
{
    size_t expected = 1;
    for (int d = slot->info.ndim - 1; d >= 0; d--) {
        if (slot->info.shape[d] != 1 && slot->stride[d] != expected)
            return false;
        expected *= slot->info.shape[d];
    }
    return true;
}

/* Copies rows along the last dimension while an odometer counts the other indices. */
static void gather(unsigned char *dst, const unsigned char *src, const struct qt_slot *slot)
{
    const struct qt_tensor *t = &slot->info;
    const size_t item = qt_dtype_bits(t->dtype) / 8, *stride = slot->stride;
    const int last = t->ndim - 1; /* >= 0: a tensor without dimensions is contiguous */
    size_t index[QT_MAX_DIMS] = {0}, from = 0;
    for (size_t rows = t->count / t->shape[last]; rows > 0; rows--) {
        for (size_t i = 0; i < t->shape[last]; i++, dst += item)
            memcpy(dst, src + (from + i * stride[last]) * item, item);
        for (int d = last - 1; d >= 0; d--) {
            from += stride[d];
            if (++index[d] < t->shape[d])
                break;
            from -= index[d] * stride[d];
            index[d] = 0;
        }
    }
}

int qt_torch_read(struct qt_blob *out, const struct qt_slot *slot, struct qt_err *err)
{
    const struct qt_tensor *t = &slot->info;
    struct qt_blob storage, copy = {.size = t->nbytes};
    int rc = qt_zip_read(&storage, slot->entry, &slot->shard->map, t->file, err);
    if (rc < 0)
        return rc;
    if (t->count == 0 || is_contiguous(slot)) {
        *out = storage;
        out->data += slot->offset;
        out->size = t->nbytes;
        return QT_OK;
    }
    rc = qt_array_new(&copy.owned, t->nbytes, 1, err);
    if (rc == QT_OK) {
        gather(copy.owned, storage.data + slot->offset, slot);
        copy.data = copy.owned;
        *out = copy;
    }
    qt_blob_free(&storage);
    return rc;
}
