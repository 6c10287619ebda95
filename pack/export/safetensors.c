/* The safetensors files of an export. */
#include "pack/export/run.h"

#include <stdio.h>
#include <string.h>

static const uint64_t default_shard_bytes = (uint64_t)4 << 30;

/* Zeroed memory for the tensors of a matrix. It is kept from one matrix to the next: fresh pages
 * cost as much as the conversion. */
static int reserve(struct run *run, struct qt_export_matrix *m, struct qt_err *err)
{
    size_t need = 0;
    for (size_t i = 0; i < m->ntensors; i++)
        need += qt_round_up(m->tensor[i].bytes, 64);
    if (need > run->data_bytes) {
        qt_free(run->data);
        run->data_bytes = 0;
        int rc = qt_array_new(&run->data, need, 1, err);
        if (rc < 0)
            return rc;
        run->data_bytes = need;
    } else {
        memset(run->data, 0, need);
    }
    unsigned char *at = run->data;
    for (size_t i = 0; i < m->ntensors; i++) {
        m->tensor[i].data = at;
        at += qt_round_up(m->tensor[i].bytes, 64);
    }
    return QT_OK;
}

int qt_export_convert_matrix(struct run *run, size_t matrix, struct qt_err *err)
{
    struct qt_export_matrix *m = &run->x.matrix[matrix];
    int rc = reserve(run, m, err);
    return rc < 0 ? rc : qt_export_panels(&run->x, m, run->x.format->convert, err);
}

static int write_matrix(struct run *run, const struct item *item, struct qt_err *err)
{
    const struct qt_export *x = &run->x;
    const struct qt_export_matrix *m = &x->matrix[item->matrix];
    int rc;
    QT_TRY(qt_export_convert_matrix(run, item->matrix, err));
    for (size_t i = 0; i < m->ntensors; i++)
        QT_TRY(qt_output_write(x->out, m->tensor[i].data, m->tensor[i].bytes, err));
done:
    return rc;
}

int qt_export_read_copied(struct qt_blob *out, const struct qt_export *x, const struct qt_tensor *t,
                          struct qt_err *err)
{
    char found[9], crc[9];
    json_t *entry;
    int rc = qt_container_copied_json(&entry, x->container, t->name, err);
    if (rc < 0)
        return rc;
    snprintf(crc, sizeof crc, "%s", json_string_value(json_object_get(entry, "crc32")));
    json_decref(entry);
    rc = qt_ckpt_read(out, qt_container_ckpt(x->container), t, err);
    if (rc < 0)
        return rc;
    snprintf(found, sizeof found, "%08x", qt_crc32(0, out->data, out->size));
    if (strcmp(crc, found) == 0)
        return QT_OK;
    qt_blob_free(out);
    return qt_export_damaged(t, err);
}

static int write_copied(struct run *run, const struct item *item, struct qt_err *err)
{
    struct qt_blob blob;
    int rc = qt_export_read_copied(&blob, &run->x, item->copied, err);
    if (rc < 0)
        return rc;
    rc = qt_export_is_turned(&run->x, item->copied)
             ? qt_export_write_turned(&run->x, item->copied, blob.data, err)
             : qt_output_write(run->x.out, blob.data, blob.size, err);
    qt_blob_free(&blob);
    return rc;
}

/* Number of items from `first` on that share a file. */
static size_t shard_items(const struct run *run, size_t first)
{
    const uint64_t limit =
        run->x.opt->max_shard_bytes ? run->x.opt->max_shard_bytes : default_shard_bytes;
    uint64_t used = run->items[first].bytes;
    size_t n = 1;
    for (; first + n < run->nitems; n++) {
        const uint64_t more = run->items[first + n].bytes;
        if (used > limit || more > limit - used)
            break;
        used += more;
    }
    return n;
}

static size_t shard_count(const struct run *run)
{
    size_t count = 0;
    for (size_t i = 0; i < run->nitems; i += shard_items(run, i))
        count++;
    return count;
}

static int write_shard(struct run *run, const char *name, size_t first, size_t n,
                       struct qt_err *err)
{
    const struct qt_tensor *tensors = run->tensors + run->items[first].first;
    const struct item *last = &run->items[first + n - 1];
    const size_t count = last->first + last->ntensors - run->items[first].first;
    json_t *metadata = json_pack("{s:s}", "format", "pt");
    uint64_t *offsets = NULL;
    char *header = NULL;
    size_t size;
    int rc;
    if (!metadata)
        return qt_no_memory(err, NULL);
    QT_TRY(qt_array_new(&offsets, count + 1, sizeof *offsets, err));
    QT_TRY(qt_safetensors_header(&header, &size, offsets, tensors, count, metadata, err));
    QT_TRY(qt_output_create(run->x.out, name, offsets[count], err));
    QT_TRY(qt_output_write(run->x.out, header, size, err));
    for (size_t i = first; i < first + n; i++) {
        const struct item *item = &run->items[i];
        QT_TRY(qt_stop_check(err));
        QT_TRY(item->stack    ? qt_export_stack_write(run, &run->stacks[item->stack - 1], err)
               : item->copied ? write_copied(run, item, err)
                              : write_matrix(run, item, err));
        qt_log_progress(run->x.opt->log, "export", (double)(i + 1), (double)run->nitems);
    }
    QT_TRY(qt_output_end(run->x.out, err));
done:
    qt_free(header);
    qt_free(offsets);
    json_decref(metadata);
    return rc;
}

static int add_to_index(json_t *map, const struct run *run, const char *name, size_t first,
                        size_t n, struct qt_err *err)
{
    for (size_t i = first; i < first + n; i++)
        for (size_t k = 0; k < run->items[i].ntensors; k++)
            if (json_object_set_new(map, run->tensors[run->items[i].first + k].name,
                                    json_string(name)) < 0)
                return qt_no_memory(err, NULL);
    return QT_OK;
}

int qt_export_write_shards(struct run *run, struct qt_err *err)
{
    const size_t count = shard_count(run);
    json_t *map = json_object();
    char name[QT_WEIGHT_FILE_NAME];
    int rc = map ? QT_OK : qt_no_memory(err, NULL);
    for (size_t first = 0, i = 0; rc == QT_OK && first < run->nitems; i++) {
        const size_t n = shard_items(run, first);
        qt_weight_file_name(name, i, count, "safetensors");
        QT_TRY(add_to_index(map, run, name, first, n, err));
        QT_TRY(write_shard(run, name, first, n, err));
        first += n;
    }
    if (rc == QT_OK && count > 1) {
        json_t *index = json_pack("{s:{s:I}, s:O}", "metadata", "total_size",
                                  (json_int_t)run->bytes, "weight_map", map);
        rc =
            index ? qt_output_json(run->x.out, QT_INDEX_NAME, index, err) : qt_no_memory(err, NULL);
        json_decref(index);
    }
done:
    json_decref(map);
    return rc;
}
