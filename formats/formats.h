/*
 * formats: FILE formats. Reading treats every byte as hostile; nothing here interprets what a
 * tensor means.
 *
 *   safetensors.c  one file: header, strict checks, mapped data
 *   torch.c        PyTorch .bin/.pt: zip.c (the archive), pickle.c (a restricted unpickler),
 *                  state_dict.c (the tensors in it)
 *   shard.c        one file of any of these formats
 *   tensors.c      the list of its tensors, and the checks that hold for all of them
 *   npy.c          .npy arrays and raw .u16/.u32 token files
 *   checkpoint.c   a directory or file of any of the above as one list of tensors
 *   container.c    the qtool container: reading and checking
 *   writer.c       the qtool container: planned writes, read back (outdir.c, journal.c,
 *                  checksums.c)
 *   qcal.c         the calibration file: reading and checking (qcal_writer.c writes it)
 *   json.c         strict JSON reading with errors that name the file
 */
#ifndef QT_FORMATS_FORMATS_H
#define QT_FORMATS_FORMATS_H

#include "base/base.h"
#include <jansson.h>

enum { QT_MAX_DIMS = 8 };

/* ---- JSON ----------------------------------------------------------------------------------- */

/* Parses UTF-8 JSON: no duplicate keys, at most 64 levels deep.
 * `file` names the source in errors. *out is owned (json_decref). QT_E_INPUT on any flaw. */
int qt_json_parse(json_t **out, const char *text, size_t size, const char *file,
                  struct qt_err *err);
/* The same of data that is not ours: strings may hold U+0000 (json_string_length), and numbers are
 * real, however large an integer. */
int qt_json_parse_data(json_t **out, const char *text, size_t size, const char *file,
                       struct qt_err *err);
/* The same as qt_json_parse of a file of at most `limit` bytes. */
int qt_json_load(json_t **out, const char *path, size_t limit, struct qt_err *err);

/* A string that may be any bytes, as paths are: where JSON cannot carry it, its ASCII part with '?'
 * for the rest, cut to 4 KiB. */
json_t *qt_json_name(const char *name);
/* "0123abcd"; NULL: out of memory. */
json_t *qt_crc_json(uint32_t crc);

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

/* ---- tensors and checkpoints ---------------------------------------------------------------- */

/* Bytes of a tensor's name, at most. */
enum { QT_TENSOR_NAME_MAX = 512 };

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
/* QT_E_INPUT when it is a file that by its name is one of several. */
int qt_ckpt_check_whole(const struct qt_ckpt *ckpt, struct qt_err *err);
void qt_ckpt_close(struct qt_ckpt *ckpt);

/* The directory that holds config.json and tokenizer files: the path itself or the file's parent.
 */
const char *qt_ckpt_dir(const struct qt_ckpt *ckpt);
/* The list of which tensor is in which file. */
#define QT_INDEX_NAME "model.safetensors.index.json"
/* Names of files that belong to a model beside its weights; NULL behind the last. */
const char *qt_side_file(size_t i);
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
/* QT_E_INPUT when a file is no longer as it was at qt_ckpt_open. */
int qt_ckpt_check_unchanged(const struct qt_ckpt *ckpt, struct qt_err *err);
/* Frees owned memory; gives mapped pages back to the kernel, so that a checkpoint larger than
 * memory can be streamed. */
void qt_blob_free(struct qt_blob *blob);

/* CRC-32 over names, types, shapes and the ends of the data of all tensors: cheap, and changes with
 * the checkpoint. */
int qt_ckpt_sample_crc(uint32_t *out, const struct qt_ckpt *ckpt, struct qt_err *err);

/* ---- safetensors writing -------------------------------------------------------------------- */

/* The header of a safetensors file for `tensors` in this order, 8-byte aligned as the format
 * recommends. Data of tensor i starts at offsets[i] from the beginning of the file; the file's size
 * is offsets[n]. *out is owned (qt_free). metadata may be NULL. */
int qt_safetensors_header(char **out, size_t *size, uint64_t *offsets,
                          const struct qt_tensor *tensors, size_t n, const json_t *metadata,
                          struct qt_err *err);

/* ---- arrays --------------------------------------------------------------------------------- */

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

/* Token ids from .u16, .u32 (raw little-endian) or .npy (1-D unsigned/signed integers). *ids is
 * owned (qt_free). Ids at or above `vocab` are refused with their position (vocab 0: no check). */
int qt_token_ids_read(uint32_t **ids, size_t *count, const char *path, size_t vocab,
                      struct qt_err *err);
/* The same, of a file whose kind is told by another name than its path. */
int qt_token_ids_read_as(uint32_t **ids, size_t *count, const char *path, const char *name,
                         size_t vocab, struct qt_err *err);

/* ---- the qtool container (docs/format.md) --------------------------------------------------- */

enum { QT_MAX_SECTIONS = 16, QT_FORMAT_VERSION = 1 };

/* One quantized tensor as the manifest describes it. Everything is owned by the container. */
struct qt_entry {
    const char *name;   /* of the tensor it replaces */
    const char *spec;   /* canonical scheme text, e.g. "nf4:g=128,method=search" */
    const char *layout; /* layout id, e.g. "frag16x64/nibble" */
    size_t n, k;        /* logical shape [n][k] */
    int scale_exp2;     /* stored scales are to be multiplied by 2^scale_exp2 */
    size_t nsections;
    struct {
        const char *name;               /* "plane0"; stored as tensor "NAME.q.plane0" */
        const struct qt_tensor *tensor; /* in qt_container_ckpt */
        uint32_t crc;                   /* CRC-32 of the data */
    } section[QT_MAX_SECTIONS];
    const json_t *json; /* the whole entry, for figures */
};

struct qt_container; /* opaque; immutable once open */

/* True when `path` is a directory with a qtool.json. */
bool qt_container_probe(const char *path);
/* True when it is a directory in which qt_writer is at work, or was when it was interrupted. */
bool qt_container_unfinished(const char *path);
#define QT_CHECKSUMS_NAME "SHA256SUMS"
/* QT_E_INPUT unless every file of DIR/SHA256SUMS, and the list itself, is there and as listed, and
 * what is there of the manifest, safetensors files, their index and side files is in it. */
int qt_checksums_check(const char *dir, struct qt_err *err);
/*
 * Opens a container and checks its structure: manifest well-formed and of a known version, every
 * section present with the declared dtype and shape, no tensor unaccounted for. What sections must
 * look like for a scheme is pack's to check (qt_packed_open). QT_E_INPUT naming file and tensor.
 */
int qt_container_open(struct qt_container **out, const char *path, struct qt_err *err);
void qt_container_close(struct qt_container *c);
const char *qt_container_dir(const struct qt_container *c);
const struct qt_ckpt *qt_container_ckpt(const struct qt_container *c);
const json_t *qt_container_manifest(const struct qt_container *c);
size_t qt_container_count(const struct qt_container *c);
const struct qt_entry *qt_container_entry(const struct qt_container *c, size_t i);
const struct qt_entry *qt_container_find(const struct qt_container *c, const char *name);
/* The CRC of stored tensor i of qt_container_ckpt against the manifest; QT_E_INPUT if different. */
int qt_container_check_crc(const struct qt_container *c, size_t i, struct qt_err *err);
/* Of all of them, on all threads. */
int qt_container_check_crcs(const struct qt_container *c, struct qt_err *err);

/*
 * Writing. A container is made in DIR.partial/ and renamed to DIR when everything has been written,
 * synced, read back and compared. The caller declares all stored tensors beforehand (sizes are
 * known from the plan), then writes them in any order, in units: a unit is one source tensor and
 * what replaces it. Finished units are journalled, so that an interrupted run can go on: killed at
 * any moment and resumed, it gives the same bytes.
 *
 * One thread at a time. After an error only qt_writer_discard and qt_writer_close may follow.
 */
struct qt_writer;
struct qt_writer_options {
    bool force;  /* replace an existing DIR (only at the end, by rename): a container or empty */
    bool resume; /* continue DIR.partial if it is there; else start anew */
    uint64_t max_shard_bytes; /* 0 = 4 GiB. A tensor is never split. */
};
/*
 * identity: everything that determines the bytes (options, source fingerprint); a resume whose
 * journal holds another identity is refused (QT_E_RESUME, naming the member that differs).
 * DIR exists without force, or is no container: QT_E_USAGE. DIR.partial in use by a live process,
 * or no room on the disk: QT_E_RESOURCE, and a DIR.partial made by this call is removed again; that
 * too when a resume finds another header in one of its files than was written.
 * tensors: name, dtype, ndim, shape, nbytes are used (file, if set, in errors); names are copied.
 */
int qt_writer_open(struct qt_writer **out, const char *dir, const struct qt_tensor *tensors,
                   size_t n, const json_t *identity, const struct qt_writer_options *opt,
                   struct qt_err *err);
/* QT_OK when both identities are the same, else QT_E_RESUME as above; file: whose the first is. */
int qt_identity_check(const json_t *before, const json_t *now, const char *file,
                      struct qt_err *err);
/* The journalled record of a finished unit (borrowed), or NULL if it must be done. */
const json_t *qt_writer_done(const struct qt_writer *w, const char *unit);
/* Data [offset, offset+size) of declared tensor i; each byte once. */
int qt_writer_put(struct qt_writer *w, size_t i, const void *data, size_t size, uint64_t offset,
                  struct qt_err *err);
/* Reads tensor i of a finished unit back, all of it. */
int qt_writer_get(const struct qt_writer *w, size_t i, void *data, size_t size, struct qt_err *err);
/* Declares a unit finished: all tensors put since the last commit, which must be complete
 * (QT_E_INTERNAL if not). record (copied) must hold what the manifest will need of it. */
int qt_writer_commit(struct qt_writer *w, const char *unit, const json_t *record,
                     struct qt_err *err);
/* Declares a finished unit unfinished, so that all its tensors can be put again. Until it is
 * committed again the journal vouches for what was there before: whoever writes over that must be
 * able to do it again after a crash, from what qt_writer_save has kept. */
int qt_writer_reopen(struct qt_writer *w, const char *unit, struct qt_err *err);
/* Keeps the caller's own progress beside the journal, in place of what was kept before: on disk
 * when it returns, and there until qt_writer_finish. Load: *data is owned, NULL when there is none;
 * QT_E_RESUME when it is damaged. */
enum qt_progress { QT_PROGRESS_LEARNING, QT_PROGRESS_ACTIVATIONS, QT_PROGRESS_KINDS };
int qt_writer_save(struct qt_writer *w, enum qt_progress kind, const void *data, size_t size,
                   struct qt_err *err);
int qt_writer_load(void *data, size_t *size, const struct qt_writer *w, enum qt_progress kind,
                   struct qt_err *err);
/* Copies a side file (config.json, tokenizer.json) byte for byte under its own name. Not
 * journalled: to be done in every run, resumed or not. */
int qt_writer_copy_file(struct qt_writer *w, const char *path, struct qt_err *err);
/* Adds a side file with this JSON, which may differ from run to run: SHA256SUMS leaves it out. */
int qt_writer_add_json(struct qt_writer *w, const char *name, const json_t *value,
                       struct qt_err *err);
/* Writes the index (when sharded) and qtool.json = manifest, reads everything back against the CRCs
 * in manifest (members "tensors" / "copied"; QT_E_RESOURCE if different), writes SHA256SUMS,
 * removes the journal, renames into place (QT_E_RESOURCE when what is at DIR by now may not be
 * replaced; a resume goes on from DIR.partial then). A tensor not written and committed, or a
 * manifest that does not open as a container: QT_E_INTERNAL. By its member "identity", as given to
 * qt_writer_open, the same run knows for its own what was not renamed any more. */
int qt_writer_finish(struct qt_writer *w, const json_t *manifest, struct qt_err *err);
/* Closes and frees; a container not finished stays in DIR.partial for a resume. */
void qt_writer_close(struct qt_writer *w);
/* Removes DIR.partial of a run that failed for good (bad input): nothing half-written stays. To be
 * followed by qt_writer_close. Nothing happens after a finish that succeeded. */
void qt_writer_discard(struct qt_writer *w);

/* ---- calibration files (docs/format.md) ----------------------------------------------------- */

/* Inputs that the linears of a block share (qt_linear.input in calib). */
enum { QT_INPUTS = 4 };
enum { QT_QCAL_VERSION = 1, QT_QCAL_PARTS = 4096 /* at most, in a file */ };

/* One run of a model over data. */
struct qt_qcal_part {
    size_t samples, seqlen; /* windows, and tokens of each */
    uint64_t seed;          /* that chose the windows */
    bool bos;               /* the tokenizer puts a BOS before every document */
    uint32_t ids_crc;       /* CRC-32 of all ids, u32 little-endian */
    const char *const *data;
    size_t ndata; /* files; only their base names are stored */
};

/* What a calibration was made of: model and data. */
struct qt_qcal_info {
    const char *family;
    size_t layers, hidden;
    uint32_t sample_crc;          /* qt_ckpt_sample_crc of the checkpoint */
    const size_t (*k)[QT_INPUTS]; /* [layers] channels of the inputs of a block's linears */
    const struct qt_qcal_part *parts;
    size_t nparts;
    size_t tokens; /* of all parts; derived, ignored in writing */
};

struct qt_qcal; /* opaque; immutable once open */

/* True for a name that ends in ".qcal", as those of all calibration files must. */
bool qt_qcal_probe(const char *path);
/* Opens a calibration file and checks everything but the tensors' values. QT_E_INPUT naming file
 * and tensor; QT_E_UNSUPPORTED for another version. */
int qt_qcal_open(struct qt_qcal **out, const char *path, struct qt_err *err);
void qt_qcal_close(struct qt_qcal *q);
const char *qt_qcal_path(const struct qt_qcal *q);
const struct qt_qcal_info *qt_qcal_info(const struct qt_qcal *q);
/* QT_E_INPUT naming what differs when q was made of another model than `model` (family to k) says,
 * which is that of `whose`. */
int qt_qcal_check_model(const struct qt_qcal *q, const struct qt_qcal_info *model,
                        const char *whose, struct qt_err *err);
/* CRC-32 of the metadata, which has those of all tensors: identifies the contents. */
uint32_t qt_qcal_crc(const struct qt_qcal *q);

/* The channel statistics of an input, checked: CRC, finite, in agreement with each other. Free with
 * qt_channels_free. */
int qt_qcal_channels(struct qt_channels *out, const struct qt_qcal *q, size_t layer, size_t input,
                     struct qt_err *err);
/* H = X^T X into the lower triangle of h[k][k] (the rest is left as it is), checked: CRC, finite,
 * diagonal in agreement with the channels' sum2[k]. */
int qt_qcal_hessian(double *h, const struct qt_qcal *q, size_t layer, size_t input,
                    const double *sum2, struct qt_err *err);

/* In host memory, zero. */
int qt_channels_new(struct qt_channels *out, size_t k, struct qt_err *err);
void qt_channels_free(struct qt_channels *c);

/*
 * Writing: into PATH.partial, renamed to PATH when complete. PATH exists without force, is no file,
 * or does not end in ".qcal": QT_E_USAGE. The same statistics give the same bytes.
 */
struct qt_qcal_writer;
int qt_qcal_create(struct qt_qcal_writer **out, const char *path, const struct qt_qcal_info *info,
                   bool force, struct qt_err *err);
/* Each input once, in any order. h[k][k]: the lower triangle is read and rounded to FP32.
 * QT_E_INPUT when a value is not finite (in FP32), naming `whose` activations they are. */
int qt_qcal_put(struct qt_qcal_writer *w, size_t layer, size_t input, const double *h,
                const struct qt_channels *c, const char *whose, struct qt_err *err);
/* QT_E_RESOURCE when what is at PATH by now may not be replaced; PATH.partial is complete then and
 * stays. */
int qt_qcal_finish(struct qt_qcal_writer *w, struct qt_err *err);
/* Removes PATH.partial unless finished. */
void qt_qcal_abandon(struct qt_qcal_writer *w);

#endif
