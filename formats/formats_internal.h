/*
 * Private to formats: open weight files, and declarations that the readers share.
 *
 *                safetensors.c -----------------------------.
 *   tensors.c -> pickle.c -> state_dict.c, zip.c -> torch.c +-> shard.c (one file) -> checkpoint.c
 *                                                   gguf.c -'
 *                                           encodings/ -> stacked.c -> views.c -> checkpoint.c
 */
#ifndef QT_FORMATS_FORMATS_INTERNAL_H
#define QT_FORMATS_FORMATS_INTERNAL_H

#include "formats/formats.h"
#include <stdatomic.h>

/* All formats are little-endian, and mapped data is used without conversion. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "little-endian hosts only");

/* Largest header of a weight file (the limit of safetensors, also used for PyTorch files). */
enum { QT_MAX_HEADER = 100 * 1000 * 1000, QT_MAX_TENSORS = 1 << 20 };

/* The manifest of a container: container.c reads it, writer.c writes it. */
#define QT_MANIFEST_NAME "qtool.json"
enum { QT_MAX_MANIFEST = 1 << 28 };

/* ---- zip.c ---------------------------------------------------------------------------------- */

struct qt_zip_entry {
    const char *name; /* in the mapping, not terminated */
    size_t name_size;
    size_t header; /* offset of the local header */
    size_t data;   /* offset of the stored or deflated bytes */
    size_t packed; /* number of stored or deflated bytes */
    size_t size;   /* number of bytes after inflating */
    uint32_t crc;
    bool deflated;
    atomic_bool checked; /* stored entry whose CRC has been verified */
};

struct qt_zip {
    struct qt_zip_entry *entries; /* sorted by name */
    size_t count;
};

/* Reads and checks the central directory: entries must lie inside the file, not overlap, and have
 * distinct names. */
int qt_zip_open(struct qt_zip *out, const struct qt_map *map, const char *file, struct qt_err *err);
void qt_zip_close(struct qt_zip *zip);
/* NULL if absent. */
struct qt_zip_entry *qt_zip_find(const struct qt_zip *zip, const char *name);
/* Reads an entry and checks its CRC (once for stored entries, as many tensors may be views of one).
 * Deflated entries are inflated into owned memory. */
int qt_zip_read(struct qt_blob *out, struct qt_zip_entry *entry, const struct qt_map *map,
                const char *file, struct qt_err *err);

/* ---- state_dict.c --------------------------------------------------------------------------- */

/* A tensor as a torch pickle describes it. Only the types of its members have been checked. */
struct qt_pickle_tensor {
    const char *name, *key; /* in the pickle, not terminated; key names the storage */
    size_t name_size, key_size;
    enum qt_dtype dtype;
    size_t storage; /* number of elements of the storage */
    size_t offset;  /* index of the tensor's first element in the storage */
    int ndim;
    size_t shape[QT_MAX_DIMS], stride[QT_MAX_DIMS];
};

/* Lists the tensors of the state dict in a pickle. The caller frees *out with qt_free; its names
 * point into data. */
int qt_state_dict_read(struct qt_pickle_tensor **out, size_t *count, const unsigned char *data,
                       size_t size, const char *file, struct qt_err *err);

/* ---- tensors.c ------------------------------------------------------------------------------ */

/* Key of the metadata in a safetensors header, beside the tensor names. */
#define QT_METADATA_KEY "__metadata__"

/* A tensor and the location of its data. */
struct qt_slot {
    struct qt_tensor info;
    const struct qt_shard *shard;
    struct qt_zip_entry *entry; /* torch: the storage; safetensors: NULL */
    size_t offset;              /* bytes from the start of the file, or of the storage */
    size_t stride[QT_MAX_DIMS]; /* torch: in elements */
    const char *shares;         /* torch: name of an earlier tensor with common data; NULL */
    /* GGUF: blocks of weights, NULL: none (info then is U8 [rows][bytes]); rows of a head, whose
     * order is that of qt_gguf_row, 0: all rows keep their order; 1 is added to all values. */
    const struct qt_gguf_block *block;
    size_t head;
    bool plus_1;
    const struct qt_view *view; /* the slot is that of a view, which has no place in a file; NULL */
    bool used;                  /* by a view, so that it is not presented itself */
};

/* One open weight file of a checkpoint. */
struct qt_shard {
    char *path;
    struct qt_map map;
    struct qt_zip zip;    /* torch */
    json_t *metadata;     /* safetensors: the object __metadata__, or NULL */
    struct qt_gguf *gguf; /* GGUF: the keys; NULL */
    struct qt_slot *slots;
    size_t count, capacity;
};

/* Adds a slot, valid until the next call, with a copy of the checked name. */
int qt_shard_add(struct qt_slot **out, struct qt_shard *shard, const char *name, size_t name_size,
                 struct qt_err *err);
/* Sorts the slots by the position of their data. */
void qt_shard_sort(struct qt_shard *shard);
/* QT_E_INPUT unless the name is UTF-8, has 1 to 512 bytes and no control characters, and is not
 * QT_METADATA_KEY. */
int qt_tensor_check_name(const char *name, size_t size, const char *file, struct qt_err *err);
/* Sets count and nbytes from dtype and shape; QT_E_INPUT if they overflow. */
int qt_tensor_measure(struct qt_tensor *t, struct qt_err *err);

/* ---- shard.c -------------------------------------------------------------------------------- */

/* True for a file name with the ending of a weight file. */
bool qt_shard_name_ok(const char *name);
/* Maps a weight file and lists its tensors by the position of their data. The slots point to *out,
 * which must not move. */
int qt_shard_open(struct qt_shard *out, const char *path, struct qt_err *err);
void qt_shard_close(struct qt_shard *shard);

/* Reads a stored tensor. */
int qt_slot_read(struct qt_blob *out, const struct qt_slot *slot, struct qt_err *err);

int qt_safetensors_open(struct qt_shard *shard, struct qt_err *err);
int qt_torch_open(struct qt_shard *shard, struct qt_err *err);
int qt_torch_read(struct qt_blob *out, const struct qt_slot *slot, struct qt_err *err);

/* ---- no_checkpoint.c ------------------------------------------------------------------------ */

/* Errors for a path that cannot be opened (why: errno), and a directory without weight files, with
 * advice if the path is the name of a model or of its cache. */
int qt_ckpt_none_at(const char *path, int why, struct qt_err *err);
int qt_ckpt_none_in(const char *dir, struct qt_err *err);

#endif
