/* A weight file of a checkpoint in any format. */
#include "formats/gguf.h"

#include <stdio.h>

static bool is_torch_name(const char *name)
{
    return qt_name_ends_in(name, ".bin") || qt_name_ends_in(name, ".pt") ||
           qt_name_ends_in(name, ".pth");
}

bool qt_shard_name_ok(const char *name)
{
    return qt_name_ends_in(name, ".safetensors") || is_torch_name(name);
}

void qt_weight_file_name(char out[QT_WEIGHT_FILE_NAME], size_t i, size_t count, const char *ending)
{
    if (count == 1)
        snprintf(out, QT_WEIGHT_FILE_NAME, "model.%s", ending);
    else
        snprintf(out, QT_WEIGHT_FILE_NAME, "model-%05zu-of-%05zu.%s", i + 1, count, ending);
}

int qt_shard_open(struct qt_shard *out, const char *path, struct qt_err *err)
{
    int rc;
    *out = (struct qt_shard){0};
    QT_TRY(qt_string_copy(&out->path, path, err));
    QT_TRY(qt_map_open(&out->map, path, err));
    QT_TRY(is_torch_name(path)     ? qt_torch_open(out, err)
           : qt_gguf_name_ok(path) ? qt_gguf_open(out, err)
                                   : qt_safetensors_open(out, err));
done:
    if (rc < 0)
        qt_shard_close(out);
    return rc;
}

void qt_shard_close(struct qt_shard *shard)
{
    for (size_t i = 0; i < shard->count; i++)
        qt_free((char *)(uintptr_t)shard->slots[i].info.name);
    qt_free(shard->slots);
    qt_zip_close(&shard->zip);
    qt_gguf_free(shard->gguf);
    json_decref(shard->metadata);
    qt_map_close(&shard->map);
    qt_free(shard->path);
    *shard = (struct qt_shard){0};
}

int qt_slot_read(struct qt_blob *out, const struct qt_slot *slot, struct qt_err *err)
{
    const struct qt_tensor *t = &slot->info;
    const struct qt_map *map = &slot->shard->map;
    if (slot->entry) {
        struct qt_err why = {0}; /* allocation errors do not name file and tensor */
        int rc = qt_torch_read(out, slot, &why);
        return rc < 0 ? qt_fail(err, rc, t->file, t->name, "%s", why.reason) : QT_OK;
    }
    *out = (struct qt_blob){.data = map->data + slot->offset, .size = t->nbytes, .map = map};
    return QT_OK;
}
