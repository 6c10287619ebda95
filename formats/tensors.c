/* The tensor list of a weight file, checks common to all formats, and blobs. */
#include "formats/formats_internal.h"

#include <stdlib.h>
#include <utf8proc.h>

int qt_tensor_check_name(const char *name, size_t size, const char *file, struct qt_err *err)
{
    if (size == 0)
        return qt_fail(err, QT_E_INPUT, file, NULL, "a tensor has an empty name");
    if (size > QT_TENSOR_NAME_MAX)
        return qt_fail(err, QT_E_INPUT, file, NULL,
                       "a tensor's name has %zu bytes, but at most %d are allowed", size,
                       QT_TENSOR_NAME_MAX);
    if (size == strlen(QT_METADATA_KEY) && memcmp(name, QT_METADATA_KEY, size) == 0)
        return qt_fail(err, QT_E_INPUT, file, NULL,
                       "a tensor is named '" QT_METADATA_KEY
                       "', which safetensors reserves for metadata");
    for (size_t at = 0; at < size;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)name + at,
                                              (utf8proc_ssize_t)(size - at), &c);
        if (n < 1)
            return qt_fail(err, QT_E_INPUT, file, NULL, "a tensor's name is not UTF-8");
        if (c < 0x20 || (c >= 0x7f && c < 0xa0))
            return qt_fail(err, QT_E_INPUT, file, NULL,
                           "a tensor's name has a control character: '%.*s'", (int)size, name);
        at += (size_t)n;
    }
    return QT_OK;
}

int qt_tensor_measure(struct qt_tensor *t, struct qt_err *err)
{
    size_t span = 1, bits; /* product with empty dimensions as 1, so that strides cannot overflow */
    bool empty = false, overflow = false;
    for (int d = 0; d < t->ndim; d++) {
        empty |= t->shape[d] == 0;
        overflow |= qt_mul_overflow(&span, span, t->shape[d] ? t->shape[d] : 1);
    }
    if (overflow || qt_mul_overflow(&bits, span, qt_dtype_bits(t->dtype)))
        return qt_fail(err, QT_E_INPUT, t->file, t->name, "shape is too large");
    if (empty)
        bits = 0;
    if (bits % 8)
        return qt_fail(err, QT_E_INPUT, t->file, t->name, "%zu elements of %s end inside a byte",
                       span, qt_dtype_name(t->dtype));
    t->count = empty ? 0 : span;
    t->nbytes = bits / 8;
    return QT_OK;
}

int qt_shard_add(struct qt_slot **out, struct qt_shard *shard, const char *name, size_t name_size,
                 struct qt_err *err)
{
    char *copy;
    int rc = qt_tensor_check_name(name, name_size, shard->path, err);
    if (rc < 0)
        return rc;
    if (shard->count == QT_MAX_TENSORS)
        return qt_fail(err, QT_E_UNSUPPORTED, shard->path, NULL, "more than %d tensors",
                       QT_MAX_TENSORS);
    rc =
        qt_array_grow(&shard->slots, &shard->capacity, shard->count + 1, sizeof *shard->slots, err);
    if (rc < 0)
        return rc;
    rc = qt_string_format(&copy, err, "%.*s", (int)name_size, name);
    if (rc < 0)
        return rc;
    *out = &shard->slots[shard->count++];
    **out = (struct qt_slot){.info = {.name = copy, .file = shard->path}, .shard = shard};
    return QT_OK;
}

/* By position of the data, then by size (empty tensors first), then by name. */
static int compare_slots(const void *a, const void *b)
{
    const struct qt_slot *x = a, *y = b;
    size_t hx = x->entry ? x->entry->header : 0, hy = y->entry ? y->entry->header : 0;
    if (hx != hy)
        return hx < hy ? -1 : 1;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    if (x->info.nbytes != y->info.nbytes)
        return x->info.nbytes < y->info.nbytes ? -1 : 1;
    return strcmp(x->info.name, y->info.name);
}

void qt_shard_sort(struct qt_shard *shard)
{
    if (shard->count)
        qsort(shard->slots, shard->count, sizeof *shard->slots, compare_slots);
}

void qt_blob_free(struct qt_blob *blob)
{
    if (blob->map)
        qt_map_drop(blob->map, blob->data, blob->size);
    qt_free(blob->owned);
    *blob = (struct qt_blob){0};
}
