/*
 * formats: FILE formats. Reading treats every byte as hostile; nothing here interprets what a
 * tensor means.
 *
 *   safetensors.c  one file: header, strict checks, mapped data
 *   torch.c        PyTorch .bin/.pt: zip + restricted unpickler
 *   npy.c          .npy arrays and raw .u16/.u32 token files
 *   checkpoint.c   a directory or file of any of the above as one list of tensors
 *   container.c    the qtool container: manifest, journal, planned writes
 *   json.c         strict JSON reading with errors that name the file
 */
#ifndef QT_FORMATS_H
#define QT_FORMATS_H

#include "base/base.h"
#include <jansson.h>

enum { QT_MAX_DIMS = 8 };

/* ---- JSON ------------------------------------------------------------------------------------ */

/* Parses UTF-8 JSON: no duplicate keys, at most `limit` bytes, at most 64 levels deep.
 * `file` names the source in errors. *out is owned (json_decref). QT_E_INPUT on any flaw. */
int qt_json_parse(json_t **out, const char *text, size_t size, const char *file,
                  struct qt_err *err);
int qt_json_load(json_t **out, const char *path, size_t limit, struct qt_err *err);

/* Members of an object with a type check. Missing or null: QT_E_INPUT for `need`, the default for
 * `get` (then *out is left as it is). Strings are borrowed from the object. */
int qt_json_need_string(const char **out, const json_t *obj, const char *key, const char *file,
                        struct qt_err *err);
int qt_json_need_size(size_t *out, const json_t *obj, const char *key, const char *file,
                      struct qt_err *err);
int qt_json_get_string(const char **out, const json_t *obj, const char *key, const char *file,
                       struct qt_err *err);
int qt_json_get_size(size_t *out, const json_t *obj, const char *key, const char *file,
                     struct qt_err *err);
int qt_json_get_real(double *out, const json_t *obj, const char *key, const char *file,
                     struct qt_err *err);
int qt_json_get_bool(bool *out, const json_t *obj, const char *key, const char *file,
                     struct qt_err *err);

/* ---- tensors and checkpoints ------------------------------------------------------------------ */

struct qt_tensor {
    const char *name; /* UTF-8, owned by the checkpoint */
    const char *file; /* path of the file that holds it, owned by the checkpoint */
    enum qt_dtype dtype;
    int ndim;
    size_t shape[QT_MAX_DIMS];
    size_t count;  /* elements */
    size_t nbytes; /* of the contiguous row-major data */
};

struct qt_ckpt; /* opaque; immutable once open, safe to read from several threads */

/*
 * Opens a checkpoint for reading: a .safetensors, .bin, .pt or .pth file, or a directory with
 *   model.safetensors | model.safetensors.index.json | pytorch_model.bin[.index.json], in that
 *   order of preference, else all *.safetensors of the directory when there is no index.
 * Every header is checked in full; the tensors' data is mapped, not read.
 * Errors: QT_E_INPUT (file and tensor named), QT_E_UNSUPPORTED, QT_E_RESOURCE.
 */
int qt_ckpt_open(struct qt_ckpt **out, const char *path, struct qt_err *err);
void qt_ckpt_close(struct qt_ckpt *ckpt);

/* The directory that holds config.json and tokenizer files: the path itself or the file's parent. */
const char *qt_ckpt_dir(const struct qt_ckpt *ckpt);
/* Tensors in file order (shards in name order, then by data offset). */
size_t qt_ckpt_count(const struct qt_ckpt *ckpt);
const struct qt_tensor *qt_ckpt_tensor(const struct qt_ckpt *ckpt, size_t i);
/* NULL when absent. O(log n). */
const struct qt_tensor *qt_ckpt_find(const struct qt_ckpt *ckpt, const char *name);
/* The files that make up the checkpoint, in name order: paths and sizes, for fingerprints. */
size_t qt_ckpt_file_count(const struct qt_ckpt *ckpt);
const char *qt_ckpt_file(const struct qt_ckpt *ckpt, size_t i, size_t *size);

/* Data of one tensor, contiguous row-major. Points into the mapped file when the file stores it so
 * (no copy), otherwise to owned memory. PyTorch entries are CRC-checked here. */
struct qt_blob {
    const unsigned char *data;
    size_t size;
    void *owned;
    const struct qt_map *map;
};
int qt_ckpt_read(struct qt_blob *out, const struct qt_ckpt *ckpt, const struct qt_tensor *t,
                 struct qt_err *err);
/* Frees owned memory; gives mapped pages back to the kernel, so that a checkpoint larger than
 * memory can be streamed. */
void qt_blob_free(struct qt_blob *blob);

/* ---- safetensors writing ---------------------------------------------------------------------- */

/* The header of a safetensors file for `tensors` in this order, 8-byte aligned as the format
 * recommends. Data of tensor i starts at offsets[i] from the beginning of the file; the file's size
 * is offsets[n]. *out is owned (qt_free). metadata may be NULL. */
int qt_safetensors_header(char **out, size_t *size, uint64_t *offsets,
                          const struct qt_tensor *tensors, size_t n, const json_t *metadata,
                          struct qt_err *err);

/* ---- arrays ----------------------------------------------------------------------------------- */

/* A .npy file (format 1.0-3.0, C order, little-endian or byte arrays). */
struct qt_npy {
    enum qt_dtype dtype;
    int ndim;
    size_t shape[QT_MAX_DIMS];
    size_t count;
    const unsigned char *data;
    struct qt_map map;
};
int qt_npy_open(struct qt_npy *out, const char *path, struct qt_err *err);
void qt_npy_close(struct qt_npy *npy);

/* Token ids from .u16, .u32 (raw little-endian) or .npy (1-D unsigned/signed integers). *ids is owned
 * (qt_free). Ids at or above `vocab` are refused with their position (vocab 0: no check). */
int qt_token_ids_read(uint32_t **ids, size_t *count, const char *path, size_t vocab,
                      struct qt_err *err);

#endif
