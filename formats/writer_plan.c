#include "formats/writer_internal.h"

#include <string.h>

static const uint64_t default_shard_bytes = (uint64_t)4 << 30;

/* Assigns tensors in order, and starts a new shard where the next tensor would exceed the limit. */
static int assign_shards(struct qt_writer *w, const struct qt_tensor *tensors, uint64_t limit,
                         struct qt_err *err)
{
    uint64_t used = 0;
    size_t shard = 0, first = 0;
    for (size_t i = 0; i < w->count; i++) {
        uint64_t size = tensors[i].nbytes;
        if (i > first && (used > limit || size > limit - used)) {
            shard++;
            first = i;
            used = 0;
        }
        used += size;
        w->places[i].shard = shard;
        w->places[i].size = size;
        int rc = qt_string_copy(&w->places[i].name, tensors[i].name, err);
        if (rc < 0)
            return rc;
    }
    w->nshards = shard + 1;
    return QT_OK;
}

static int name_shard(struct qt_writer *w, size_t i, struct qt_err *err)
{
    char name[QT_WEIGHT_FILE_NAME];
    qt_weight_file_name(name, i, w->nshards, "safetensors");
    return qt_path_join(&w->shards[i].path, w->out.partial, name, err);
}

/* Plans the header and offsets of shard i, which holds tensors [first, first + n). */
static int plan_shard(struct qt_writer *w, size_t i, const struct qt_tensor *tensors, size_t first,
                      size_t n, const json_t *metadata, struct qt_err *err)
{
    struct qt_planned_shard *s = &w->shards[i];
    uint64_t *offsets = NULL;
    int rc;
    QT_TRY(name_shard(w, i, err));
    QT_TRY(qt_array_new(&offsets, n + 1, sizeof *offsets, err));
    QT_TRY(qt_safetensors_header(&s->header, &s->header_size, offsets, tensors + first, n, metadata,
                                 err));
    for (size_t k = 0; k < n; k++) {
        struct qt_planned_tensor *p = &w->places[first + k];
        p->offset = offsets[k];
        if (offsets[k + 1] - offsets[k] != p->size) {
            rc = qt_fail(err, QT_E_INTERNAL, NULL, p->name,
                         "planned size differs from the size of its dtype and shape");
            goto done;
        }
    }
    s->size = offsets[n];
done:
    qt_free(offsets);
    return rc;
}

int qt_writer_plan(struct qt_writer *w, const struct qt_tensor *tensors, size_t n, uint64_t limit,
                   struct qt_err *err)
{
    json_t *metadata = NULL;
    int rc;
    QT_TRY(qt_array_new(&w->places, n, sizeof *w->places, err));
    QT_TRY(qt_array_new(&w->touched, n, sizeof *w->touched, err));
    w->count = n;
    QT_TRY(assign_shards(w, tensors, limit ? limit : default_shard_bytes, err));
    struct qt_planned_shard *shards;
    QT_TRY(qt_array_new(&shards, w->nshards, sizeof *shards, err));
    for (size_t i = 0; i < w->nshards; i++)
        shards[i].fd = -1;
    w->shards = shards;
    /* Common loaders reject safetensors files that do not name a framework. */
    metadata = json_object();
    if (json_object_set_new(metadata, "format", json_string("pt")) < 0) {
        rc = qt_no_memory(err, NULL);
        goto done;
    }
    for (size_t i = 0, first = 0; i < w->nshards; i++) {
        size_t end = first;
        while (end < n && w->places[end].shard == i)
            end++;
        QT_TRY(plan_shard(w, i, tensors, first, end - first, metadata, err));
        first = end;
    }
done:
    json_decref(metadata);
    return rc;
}

/* The CRC of all headers identifies the plan: names, dtypes, shapes and offsets. */
int qt_writer_plan_digest(char **out, const struct qt_writer *w, struct qt_err *err)
{
    uint32_t crc = 0;
    for (size_t i = 0; i < w->nshards; i++)
        crc = qt_crc32(crc, w->shards[i].header, w->shards[i].header_size);
    return qt_string_format(out, err, "%08x", crc);
}

bool qt_writer_is_shard(const struct qt_writer *w, const char *name)
{
    for (size_t i = 0; i < w->nshards; i++)
        if (strcmp(qt_base_name(w->shards[i].path), name) == 0)
            return true;
    return false;
}
