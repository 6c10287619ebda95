/*
 * Private to formats: a checkpoint's files once they are open, and what the readers share.
 *
 *                safetensors.c -----------------------------.
 *   tensors.c -> pickle.c -> state_dict.c, zip.c -> torch.c +-> shard.c (one file) -> checkpoint.c
 */
#ifndef QT_FORMATS_FORMATS_INTERNAL_H
#define QT_FORMATS_FORMATS_INTERNAL_H

#include "formats/formats.h"
#include <stdatomic.h>

/* All formats here are little-endian, and data is used as it lies in the file. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "little-endian hosts only");

/* Largest description of a file's tensors (safetensors' own limit, and ours for the rest). */
enum { QT_MAX_HEADER = 100 * 1000 * 1000, QT_MAX_TENSORS = 1 << 20 };

/* What a container says of its tensors (container.c reads it, writer.c writes it). */
#define QT_MANIFEST_NAME "qtool.json"
enum { QT_MAX_MANIFEST = 1 << 28 };

/* ---- zip.c ---------------------------------------------------------------------------------- */

struct qt_zip_entry {
    const char *name; /* in the map, not terminated */
    size_t name_size;
    size_t header; /* offset of the local header */
    size_t data;   /* offset of the stored or deflated bytes */
    size_t packed; /* their number */
    size_t size;   /* bytes once inflated */
    uint32_t crc;
    bool deflated;
    atomic_bool checked; /* stored: its data had that CRC */
};

struct qt_zip {
    struct qt_zip_entry *entries; /* in name order */
    size_t count;
};

/* Checks the whole directory: every entry inside the file, none overlapping, no name twice. */
int qt_zip_open(struct qt_zip *out, const struct qt_map *map, const char *file, struct qt_err *err);
void qt_zip_close(struct qt_zip *zip);
/* NULL when absent. */
struct qt_zip_entry *qt_zip_find(const struct qt_zip *zip, const char *name);
/* The bytes of an entry, CRC-checked (stored ones once: many tensors can be views of them);
 * inflated into owned memory where needed. */
int qt_zip_read(struct qt_blob *out, struct qt_zip_entry *entry, const struct qt_map *map,
                const char *file, struct qt_err *err);

/* ---- state_dict.c --------------------------------------------------------------------------- */

/* A tensor as a torch pickle describes it. Nothing but the types has been checked. */
struct qt_pickle_tensor {
    const char *name, *key; /* in the pickle's text, not terminated; key names the storage */
    size_t name_size, key_size;
    enum qt_dtype dtype;
    size_t storage; /* elements of the storage */
    size_t offset;  /* first element of the tensor in it */
    int ndim;
    size_t shape[QT_MAX_DIMS], stride[QT_MAX_DIMS];
};

/* The state dict in a pickle. *out is owned (qt_free); its names point into data. */
int qt_state_dict_read(struct qt_pickle_tensor **out, size_t *count, const unsigned char *data,
                       size_t size, const char *file, struct qt_err *err);

/* ---- tensors.c ------------------------------------------------------------------------------ */

/* Stands among the tensors of a safetensors header. */
#define QT_METADATA_KEY "__metadata__"

/* A tensor and where its data lies. */
struct qt_slot {
    struct qt_tensor info;
    const struct qt_shard *shard;
    struct qt_zip_entry *entry; /* torch: the storage; safetensors: NULL */
    size_t offset;              /* bytes from the start of the file, or of the storage */
    size_t stride[QT_MAX_DIMS]; /* torch: in elements */
};

/* One open file of a checkpoint. */
struct qt_shard {
    char *path;
    struct qt_map map;
    struct qt_zip zip; /* torch */
    json_t *metadata;  /* safetensors: __metadata__, strings by name, or NULL */
    struct qt_slot *slots;
    size_t count, capacity;
};

/* A new slot (valid until the next call) with a copy of the name, which is checked: UTF-8, 1 to 512
 * bytes, no control characters, not QT_METADATA_KEY. */
int qt_shard_add(struct qt_slot **out, struct qt_shard *shard, const char *name, size_t name_size,
                 struct qt_err *err);
/* Brings the slots into the order of their data; the formats' open functions end with it. */
void qt_shard_sort(struct qt_shard *shard);
int qt_tensor_check_name(const char *name, size_t size, const char *file, struct qt_err *err);
/* Sets count and nbytes from dtype and shape, all products checked. */
int qt_tensor_measure(struct qt_tensor *t, struct qt_err *err);

/* ---- shard.c -------------------------------------------------------------------------------- */

/* True for a file name with an ending that qt_shard_open knows. */
bool qt_shard_name_ok(const char *name);
/* Maps the file and lists its tensors in the order of their data. *out must stay where it is. */
int qt_shard_open(struct qt_shard *out, const char *path, struct qt_err *err);
void qt_shard_close(struct qt_shard *shard);

int qt_safetensors_open(struct qt_shard *shard, struct qt_err *err);
int qt_torch_open(struct qt_shard *shard, struct qt_err *err);
int qt_torch_read(struct qt_blob *out, const struct qt_slot *slot, struct qt_err *err);

#endif
