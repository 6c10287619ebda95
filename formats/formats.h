/*
 * formats: file formats. Readers treat every byte as hostile and do not interpret the meaning of
 * tensors.
 *
 *   safetensors.c  a safetensors file: strictly checked header, mapped data
 *   torch.c        a PyTorch .bin/.pt file: zip.c (archive), pickle.c (restricted unpickler),
 *                  state_dict.c (list of tensors)
 *   gguf.c         a GGUF file; gguf_config.c, gguf_tokenizer.c: its side files; gguf_names.c
 *   shard.c        one weight file of any format
 *   tensors.c      the list of tensors of a weight file, and the checks common to all formats
 *   npy.c          .npy arrays and raw .u16/.u32 token files
 *   checkpoint.c   a directory or file of the above as one list of tensors
 *   views.c        tensors presented in another form than they are stored: stacked.c (stacked
 *                  experts), encodings/ (quantized tensors)
 *   container.c    qtool container: reading and checking
 *   writer*.c      qtool container: planned writes with read-back (outdir.c, journal.c,
 *                  checksums.c, running_hashes.c)
 *   output.c       a directory in another format: files written one after the other
 *   qcal.c         calibration file: reading and checking (qcal_writer.c writes it)
 *   json.c         strict JSON reading; errors name the file
 *   json_parts.c   JSON read and written part by part
 *   json_edit.c    textual changes of JSON files
 *   kind.c         what a file is, by its content
 */
#ifndef QT_FORMATS_FORMATS_H
#define QT_FORMATS_FORMATS_H

#include "base/base.h"
#include <jansson.h>

enum { QT_MAX_DIMS = 8 };

/* ---- JSON ----------------------------------------------------------------------------------- */

/* Parses UTF-8 JSON without duplicate keys, at most 64 levels deep. `file` names the source in
 * errors. The caller releases *out with json_decref. QT_E_INPUT if the text is invalid. */
int qt_json_parse(json_t **out, const char *text, size_t size, const char *file,
                  struct qt_err *err);
/*
 * The same, but the text may have what Python's json module writes beyond JSON; nothing else is
 * accepted:
 *   - NaN, Infinity and -Infinity as values: the object {"NaN": 0}, {"Infinity": 0} or
 *     {"-Infinity": 0} takes their place. No reader takes it for a number, string, list or boolean,
 *     so one that needs the value refuses it by name, and one that ignores the value reads on.
 *   - escapes of lone surrogates ("\ud800") in strings: U+FFFD takes their place.
 */
int qt_json_parse_lenient(json_t **out, const char *text, size_t size, const char *file,
                          struct qt_err *err);
/* The same for user data: any value, not only an object or array; strings may contain U+0000 (use
 * json_string_length), and all numbers become reals, so that large integers are accepted. `line` is
 * the number of the text's first line, for errors. `lone` is the escape of six bytes that takes the
 * place of a lone surrogate, such as "\\ufffd". */
int qt_json_parse_data(json_t **out, const char *text, size_t size, size_t line, const char *lone,
                       const char *file, struct qt_err *err);
/* Parse a file of at most `limit` bytes like qt_json_parse and qt_json_parse_lenient. */
int qt_json_load(json_t **out, const char *path, size_t limit, struct qt_err *err);
int qt_json_load_lenient(json_t **out, const char *path, size_t limit, struct qt_err *err);
/* "NaN", "Infinity" or "-Infinity" if v stands for this literal, otherwise NULL. */
const char *qt_json_literal(const json_t *v);
/* The type of v for messages: "an object", "a negative integer", "null", "NaN". */
const char *qt_json_type(const json_t *v);

/* JSON string of a path or name. A name that is not valid UTF-8 is converted: bytes outside ASCII
 * become '?', and it is cut at 4095 bytes. NULL: out of memory. */
json_t *qt_json_name(const char *name);
/* JSON string of a CRC-32, "0123abcd". NULL: out of memory. */
json_t *qt_crc_json(uint32_t crc);

/* Read a member of an object with a type check. If it is missing or null, `need` fails with
 * QT_E_INPUT and `get` leaves *out unchanged. Strings belong to the object. */
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

/*
 * Textual changes of a JSON object, for files whose other bytes have to stay. text[size], followed
 * by a NUL (as qt_file_read gives it), is what qt_json_parse_lenient accepts. `path` is the key of
 * a member, or "text_config/quantization_config" for a member of a member; keys without escapes.
 *
 * qt_json_edit_set replaces the value of the member, or adds the member as the last one, in the
 * style of the members before it (a line for each, or all in one line). qt_json_edit_remove removes
 * the member with its comma; *out is a copy of the text if there is no such member.
 * *out[*out_size], followed by a NUL, is freed with qt_free. QT_E_INPUT if the text is not a JSON
 * object or, for qt_json_edit_set, if an object on the path is missing.
 */
int qt_json_edit_set(char **out, size_t *out_size, const char *text, size_t size, const char *path,
                     const json_t *value, const char *file, struct qt_err *err);
int qt_json_edit_remove(char **out, size_t *out_size, const char *text, size_t size,
                        const char *path, const char *file, struct qt_err *err);

/*
 * Large objects and arrays, read part by part: the members of an object or elements of an array,
 * cut from the text and parsed one by one. Cutting finds no fault within a part, only between
 * parts; every text that is cut without QT_JSON_FAULT, and of which qt_json_parse_part accepts all
 * parts, is valid JSON, except that two members may have the same key.
 */
struct qt_json_part {
    const char *text; /* not terminated */
    size_t size;
};
struct qt_json_cursor {
    const char *at, *end;
    char close;
    bool first;
};
/* Begins to cut a text that begins with `open`, '{' or '['; false if it does not. */
bool qt_json_enter(struct qt_json_cursor *c, struct qt_json_part text, char open);
/* QT_JSON_END: there are no more parts, nor other text. */
enum qt_json_step { QT_JSON_PART, QT_JSON_END, QT_JSON_FAULT };
enum qt_json_step qt_json_next(struct qt_json_part *out, struct qt_json_cursor *c);
/* True if the member has this key, written without escapes; *value is the text of its value. */
bool qt_json_part_value(struct qt_json_part *value, struct qt_json_part member, const char *key);
/* *out = the object or array (`open`) of this part alone. lenient: as qt_json_parse_lenient; errors
 * as qt_json_parse, with lines and columns counted from the part. */
int qt_json_parse_part(json_t **out, struct qt_json_part part, char open, bool lenient,
                       const char *file, struct qt_err *err);

/* Serializes a value with flags of Jansson: *size bytes and a NUL. The caller frees *out with
 * qt_free. (json_dumps of Jansson 2.14 ignores some failed allocations, and then omits text.) */
int qt_json_text(char **out, size_t *size, const json_t *value, size_t flags, struct qt_err *err);

/*
 * A file with a JSON object, written part by part, with the bytes that json_dump gives for
 * JSON_INDENT(1) and JSON_REAL_PRECISION(9). Lists do not nest. The caller closes *o, after a
 * failure as well.
 */
struct qt_json_out {
    char *path, *buffer; /* path: NULL if nothing is written, in a rank that writes no files */
    int fd;
    uint64_t at;
    size_t used;
    char close; /* of the list that is open; 0: none */
    bool first; /* no part was written yet */
};
/* key: NULL for an element of an array. */
int qt_json_out_value(struct qt_json_out *o, const char *key, const json_t *value,
                      struct qt_err *err);
/* All members of an object. */
int qt_json_out_members(struct qt_json_out *o, const json_t *object, struct qt_err *err);
/* The following parts are those of a member: an object ('{') or array ('['). */
int qt_json_out_begin(struct qt_json_out *o, const char *key, char open, struct qt_err *err);
int qt_json_out_end(struct qt_json_out *o, struct qt_err *err);
/* Completes and syncs the file. */
int qt_json_out_finish(struct qt_json_out *o, struct qt_err *err);
void qt_json_out_close(struct qt_json_out *o);

/* ---- kinds of files ------------------------------------------------------------------------- */

/* What the content of a file is. */
enum qt_kind {
    QT_KIND_UNKNOWN,
    QT_KIND_EMPTY,
    QT_KIND_ZEROS, /* begins with 1 MiB of zeros, or consists of 16 or more */
    QT_KIND_SAFETENSORS,
    QT_KIND_TORCH,  /* zip archive with data.pkl as first entry */
    QT_KIND_PICKLE, /* also PyTorch checkpoints before 1.6 */
    QT_KIND_ZIP,    /* another zip archive */
    QT_KIND_NPY,
    QT_KIND_NPZ,
    QT_KIND_JSON, /* text that begins with { or [, valid JSON or not */
    QT_KIND_TEXT, /* UTF-8 text of no other kind */
    QT_KIND_UTF16,
    QT_KIND_LFS,
    QT_KIND_HTML,
    QT_KIND_XML,
    QT_KIND_GGUF,
    QT_KIND_GGML,
    QT_KIND_ONNX,
    QT_KIND_HDF5,
    QT_KIND_MSGPACK,
    QT_KIND_TENSORFLOW,
    QT_KIND_GZIP,
    QT_KIND_ZSTD,
    QT_KIND_XZ,
    QT_KIND_BZIP2,
    QT_KIND_LZ4,
    QT_KIND_TAR,
    QT_KIND_7Z,
    QT_KIND_RAR,
    QT_KIND_PARQUET,
    QT_KIND_ARROW,
    QT_KIND_SQLITE,
    QT_KIND_PDF,
    QT_KIND_IMAGE,
    QT_KIND_MEDIA,
    QT_KIND_PROGRAM,
};
/* Finds the kind from magic numbers and the first bytes. `data` is the start of the file, at least
 * 4 KiB or all of it. The index of a TensorFlow checkpoint is found only if it is the whole
 * file. */
enum qt_kind qt_file_kind(const void *data, size_t size);
/* True if all of the data is UTF-8 text without control characters other than white space (tab,
 * line feed, ...), backspace and escape. */
bool qt_is_text(const void *data, size_t size);
/* Returns the offset of the first invalid byte of UTF-8, or size. */
size_t qt_utf8_check(const char *s, size_t size);
/* "a Git LFS pointer" */
const char *qt_kind_name(enum qt_kind kind);
/* What the user can do with such a file: "fetch the file with 'git lfs pull'"; or NULL. */
const char *qt_kind_advice(enum qt_kind kind);
/* QT_E_INPUT "not WHAT, but NAME: ADVICE" if the content is of another kind than expected; QT_OK if
 * it is of this kind or unknown. what = NULL: the name of the expected kind. */
int qt_kind_expect(enum qt_kind expected, const char *what, const void *data, size_t size,
                   const char *file, struct qt_err *err);

/* ---- tensors and checkpoints ---------------------------------------------------------------- */

/* Maximum length of a tensor name in bytes. */
enum { QT_TENSOR_NAME_MAX = 512 };

struct qt_tensor {
    const char *name; /* UTF-8, owned by the checkpoint */
    const char *file; /* path of its file, owned by the checkpoint */
    enum qt_dtype dtype;
    int ndim;
    size_t shape[QT_MAX_DIMS];
    size_t count;  /* number of elements */
    size_t nbytes; /* size of the contiguous row-major data */
    /* How a quantized checkpoint stores the tensor: "fp8", "nvfp4"; dtype and nbytes are those of
     * the dequantized tensor. NULL: the tensor is not quantized. */
    const char *encoding;
};

struct qt_ckpt; /* opaque; immutable after opening, so several threads can read it */

/*
 * Opens a checkpoint for reading: a .safetensors, .bin, .pt, .pth or .gguf file, or a directory
 * with model.safetensors, model.safetensors.index.json, pytorch_model.bin or
 * pytorch_model.bin.index.json (the first that exists), or else all *.safetensors files of the
 * directory, or else the GGUF file or the numbered GGUF files. Checks every header in full; maps
 * the data without reading it. A GGUF file is presented like the checkpoint that it was made from;
 * its side files are in a temporary directory until qt_ckpt_close.
 *
 * Tensors of quantized checkpoints (formats/encodings/) are presented dequantized, in the dtype
 * that the model computes in, and without the scales beside them; reading one computes value times
 * scale in FP32 and rounds once. Stacked experts are presented as a matrix for each expert and
 * projection, NAME.experts.E.gate_proj.weight, and matrices stored as [input][output] transposed. A
 * quantized tensor that cannot be read stays as it is stored: see qt_ckpt_check_readable. Errors:
 * QT_E_INPUT (names file and tensor), QT_E_UNSUPPORTED, QT_E_RESOURCE.
 */
int qt_ckpt_open(struct qt_ckpt **out, const char *path, struct qt_err *err);
/* The same, but all tensors are presented as they are stored. */
int qt_ckpt_open_stored(struct qt_ckpt **out, const char *path, struct qt_err *err);
/* True for a matrix that checkpoints of this model_type (or NULL) store as [input][output]. */
bool qt_stored_transposed(const char *model_type, const char *name);
/* The tensor in which checkpoints of a model_type have a matrix or bias of all experts. The rows of
 * an expert are those of `parts` matrices (gate and up, or one), one after the other or, if
 * interleaved, row by row in turn: [experts][rows][columns], transposed [experts][columns][rows];
 * biases [experts][rows]. */
struct qt_stack {
    char name[QT_TENSOR_NAME_MAX + 1];
    size_t expert, part, parts;
    bool transposed, interleaved;
};
/* False if such checkpoints have the presented tensor `name` by itself, or may have it in several
 * forms. model_type may be NULL. */
bool qt_stored_in_stack(struct qt_stack *out, const char *model_type, const char *name);
/* QT_E_INPUT or QT_E_UNSUPPORTED, with the reason, if quantized tensors cannot be dequantized. */
int qt_ckpt_check_readable(const struct qt_ckpt *ckpt, struct qt_err *err);
/* True if some tensors are dequantized on reading. */
bool qt_ckpt_is_encoded(const struct qt_ckpt *ckpt);
/* The section of config.json, or of a quantizer's file, that describes the tensors that are
 * dequantized, owned by the checkpoint; NULL: there is none. */
const json_t *qt_ckpt_quantization(const struct qt_ckpt *ckpt);
/* Paths, as for qt_json_edit_remove, at which config.json may have the section. NULL-terminated. */
extern const char *const qt_quantization_paths[];
/* QT_E_INPUT if the checkpoint was opened as one file whose name ("-00001-of-00002") shows that it
 * is one of several. */
int qt_ckpt_check_whole(const struct qt_ckpt *ckpt, struct qt_err *err);
void qt_ckpt_close(struct qt_ckpt *ckpt);

/* Directory of config.json and the tokenizer files: the path itself, the parent of the file, or for
 * GGUF the temporary directory. */
const char *qt_ckpt_dir(const struct qt_ckpt *ckpt);
/* The directory or file that was opened, for messages. */
const char *qt_ckpt_path(const struct qt_ckpt *ckpt);
/* The index of a sharded checkpoint: maps tensors to files. */
#define QT_INDEX_NAME "model.safetensors.index.json"
/* A member of config.json that says how weights are quantized. */
#define QT_QUANTIZATION_KEY "quantization_config"
/* Names of side files: files of a checkpoint that are not weights. NULL after the last. */
const char *qt_side_file(size_t i);
/* Tensors in file order: files by name, then by data offset. */
size_t qt_ckpt_count(const struct qt_ckpt *ckpt);
const struct qt_tensor *qt_ckpt_tensor(const struct qt_ckpt *ckpt, size_t i);
/* Name of an earlier tensor that has data in common with tensor i, as views of one PyTorch storage
 * have; NULL: there is none. */
const char *qt_ckpt_shares(const struct qt_ckpt *ckpt, size_t i);
/* NULL if absent; O(log n). */
const struct qt_tensor *qt_ckpt_find(const struct qt_ckpt *ckpt, const char *name);
/* The weight files, sorted by name. qt_ckpt_file returns the path of file i, which belongs to the
 * checkpoint, and sets *size, in bytes. */
size_t qt_ckpt_file_count(const struct qt_ckpt *ckpt);
const char *qt_ckpt_file(const struct qt_ckpt *ckpt, size_t i, size_t *size);

/* Contiguous row-major data of one tensor. `data` points into the mapped file if the file stores
 * the presented tensor contiguously, otherwise to `owned` memory. Freed with qt_blob_free. */
struct qt_blob {
    const unsigned char *data;
    size_t size;
    void *owned;
    const struct qt_map *map;
};
/* Reads a tensor; checks the CRC of PyTorch data. */
int qt_ckpt_read(struct qt_blob *out, const struct qt_ckpt *ckpt, const struct qt_tensor *t,
                 struct qt_err *err);
/* *crc = the CRC-32 of a tensor's data. QT_E_INTERRUPTED if the user interrupts the program. */
int qt_ckpt_crc(uint32_t *crc, const struct qt_ckpt *ckpt, const struct qt_tensor *t,
                struct qt_err *err);
/* QT_E_INPUT if a file has changed since qt_ckpt_open. */
int qt_ckpt_check_unchanged(const struct qt_ckpt *ckpt, struct qt_err *err);
/* Frees owned memory and lets the kernel evict mapped pages, so that checkpoints larger than memory
 * can be streamed. */
void qt_blob_free(struct qt_blob *blob);

/* A cheap fingerprint: CRC-32 over names, dtypes, shapes, and the first and last 4 KiB of data of
 * all tensors as they are stored. */
int qt_ckpt_sample_crc(uint32_t *out, const struct qt_ckpt *ckpt, struct qt_err *err);

/* ---- safetensors writing -------------------------------------------------------------------- */

enum { QT_WEIGHT_FILE_NAME = 64 };
/* Name of weight file i of `count`, from 0: "model.safetensors", or
 * "model-00001-of-00002.safetensors". ending: "safetensors" or "gguf". */
void qt_weight_file_name(char out[QT_WEIGHT_FILE_NAME], size_t i, size_t count, const char *ending);

/* Makes the header of a safetensors file for n tensors in this order, padded to 8 bytes as the
 * format recommends. Sets offsets[n + 1], in bytes: offsets[i] is the position of the data of
 * tensor i in the file, offsets[n] the size of the file. The caller frees *out with qt_free.
 * metadata may be NULL. */
int qt_safetensors_header(char **out, size_t *size, uint64_t *offsets,
                          const struct qt_tensor *tensors, size_t n, const json_t *metadata,
                          struct qt_err *err);

/* ---- GGUF ----------------------------------------------------------------------------------- */

/*
 * Names in the files of llama.cpp, for the families that qtool reads and writes. gguf.c reads such
 * files, pack/export writes them.
 */
enum {
    QT_GGUF_BIAS = 1,   /* the module may have a bias */
    QT_GGUF_ROTARY = 2, /* rows of heads that the rotary embedding turns */
    QT_GGUF_EXACT = 4,  /* F32, as llama.cpp's own converter has it */
    QT_GGUF_BARE = 8,   /* the source's name has no ending; the target's is part of it */
    /* Gated DeltaNet: rows, or channels, of value heads, which GGUF has in another order
     * (qt_gguf_value_head); a norm without an added 1; A_log, of which GGUF has -exp. */
    QT_GGUF_VALUES = 16,
    QT_GGUF_VALUE_CHANNELS = 32,
    QT_GGUF_PLAIN = 64,
    QT_GGUF_DECAY = 128,
    /* kv_b_proj of latent attention: two tensors, whose names begin with the target. */
    QT_GGUF_LATENT = 256,
    QT_GGUF_NAME = 64,
};
/* A module of a decoder layer. source: its name after "model.layers.N."; '#' stands for the number
 * of an expert. target: its name after "blk.N.". */
struct qt_gguf_part {
    const char *source, *target;
    unsigned flags;
};
struct qt_gguf_family {
    const char *family, *name; /* model_type of config.json; general.architecture */
    const char *class;         /* of transformers; NULL: only for writing */
    const struct qt_gguf_part *parts;
    /* The rotary embedding turns channels 2i and 2i + 1, so that rows i and i + d/2 of a head of d
     * channels become neighbours. */
    bool permuted;
    bool norms_plus_1; /* norms are stored with 1 added */
};
/* Family number i; NULL past the end. Files are read as the first family with their architecture;
 * the first architecture of a family is written. */
const struct qt_gguf_family *qt_gguf_family_at(size_t i);
/* NULL: not in the table. */
const struct qt_gguf_family *qt_gguf_family_find(const char *family);

/* The GGUF tensor that a checkpoint's tensor becomes. */
struct qt_gguf_place {
    char name[QT_GGUF_NAME];
    size_t layer;                               /* 0: of none */
    bool skip;                                  /* not stored: a head that is the embedding */
    bool rotary;                                /* the rows of a head are reordered: qt_gguf_row */
    bool plus_1;                                /* 1 is added */
    bool exact;                                 /* always F32 */
    bool values, value_channels, decay, latent; /* see the flags */
    bool stacked;                               /* slice `expert` of a tensor of all experts */
    size_t expert;
};
/* False if the family has no place for the tensor. tied: the head is the embedding. */
bool qt_gguf_place(struct qt_gguf_place *out, const struct qt_gguf_family *f, const char *tensor,
                   bool tied);
/* The row of a GGUF file that has row `row` of the checkpoint. head: rows of a head; 0: rows keep
 * their order. */
size_t qt_gguf_row(size_t row, size_t head);

/* The value head of a GGUF file that is head number `head` of the checkpoint, where each of `keys`
 * key heads has `heads` / `keys` value heads: GGUF begins with the first one of all key heads. */
size_t qt_gguf_value_head(size_t head, size_t heads, size_t keys);

/* A splitting of text before byte-level BPE, by its name in llama.cpp. */
struct qt_gguf_pre {
    const char *name;
    /* A line for each pre-tokenizer of tokenizer.json: "words" and "bytes" (ByteLevel with and
     * without its regex), "digits" (Digits, individual), "split REGEX" (Split, isolated). */
    const char *steps;
    bool ignore_merges; /* a word that is a token stays whole */
    bool bos;           /* files that do not say so have a BOS before a text */
};
/* Splitting number i; NULL past the end. A splitting may have several names, the usual one
 * first. */
const struct qt_gguf_pre *qt_gguf_pre_at(size_t i);

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
/* Writes x[rows][columns] to a new .npy file of FP32; no file is left after an error. */
int qt_npy_write(const char *path, const float *x, size_t rows, size_t columns, struct qt_err *err);

/* Reads token ids from a .u16 or .u32 file (raw little-endian) or a .npy file (integers, one
 * dimension). The caller frees *ids with qt_free. QT_E_INPUT, with the position, for an id >= vocab
 * (vocab 0: no check). */
int qt_token_ids_read(uint32_t **ids, size_t *count, const char *path, size_t vocab,
                      struct qt_err *err);
struct qt_token_ids_options {
    size_t vocab, most; /* 0: no limit; with `most`, ids after the first `most` are not looked at */
    bool (*interrupted)(void); /* polled; may be NULL */
};
/* The same for a file that is in memory: `name` ends in .u16 or .u32, or the file is a .npy file.
 * `path` is for messages. */
int qt_token_ids_parse(uint32_t **ids, size_t *count, const void *file, size_t size,
                       const char *name, const struct qt_token_ids_options *opt, const char *path,
                       struct qt_err *err);

/* ---- the qtool container (docs/format.md) --------------------------------------------------- */

/* Versions 1 to QT_FORMAT_VERSION can be read; docs/format.md says which containers have which. */
enum { QT_MAX_SECTIONS = 16, QT_FORMAT_VERSION = 2 };

/* Manifest entry of one quantized tensor. The container owns everything. */
struct qt_entry {
    const char *name;         /* of the checkpoint's tensor */
    const char *spec;         /* canonical scheme text, e.g. "nf4:g=128,method=search" */
    const char *layout;       /* layout id, e.g. "frag16x64/nibble" */
    size_t n, k;              /* logical shape [n][k] */
    int scale_exp2;           /* true scale = stored scale * 2^scale_exp2 */
    const char *source_dtype; /* name of a dtype; NULL: it is not recorded */
    size_t nsections;
    struct {
        const char *name;               /* "plane0"; stored as tensor "NAME.q.plane0" */
        const struct qt_tensor *tensor; /* in qt_container_ckpt */
        uint32_t crc;                   /* CRC-32 of the data */
    } section[QT_MAX_SECTIONS];
    struct qt_json_part json; /* the whole entry, for qt_entry_json */
};

struct qt_container; /* opaque; immutable after opening */

/* True if `path` is a directory with a qtool.json. */
bool qt_container_probe(const char *path);
/* True if `path` is the directory of a running or interrupted qt_writer: it has a journal. */
bool qt_container_unfinished(const char *path);
#define QT_CHECKSUMS_NAME "SHA256SUMS"
/* Checks DIR/SHA256SUMS. QT_E_INPUT if the list or a listed file is missing, if a file differs from
 * its checksum, or if a manifest, safetensors file, index or side file is not listed. */
int qt_checksums_check(const char *dir, struct qt_err *err);
/* The same, but for weight files it checks only that they are listed: their data is checked with
 * the CRCs of the manifest. */
int qt_checksums_check_small(const char *dir, struct qt_err *err);
/*
 * Opens a container and checks its structure: the manifest is well-formed and of a known version,
 * every section exists with the declared dtype and shape, and the manifest lists every tensor.
 * qt_packed_open in pack checks the sections against their scheme. QT_E_INPUT names file and
 * tensor.
 */
int qt_container_open(struct qt_container **out, const char *path, struct qt_err *err);
void qt_container_close(struct qt_container *c);
const char *qt_container_dir(const struct qt_container *c);
const struct qt_ckpt *qt_container_ckpt(const struct qt_container *c);
/* The members of the manifest except `tensors` and `copied`. */
const json_t *qt_container_manifest(const struct qt_container *c);
/* *out = the manifest's object for a quantized tensor; the caller releases it with json_decref. */
int qt_entry_json(json_t **out, const struct qt_entry *e, struct qt_err *err);
/* True for the name of a copied tensor, and its object in the manifest, as from qt_entry_json. */
bool qt_container_is_copied(const struct qt_container *c, const char *name);
int qt_container_copied_json(json_t **out, const struct qt_container *c, const char *name,
                             struct qt_err *err);
/* CRC-32 of the file qtool.json. It identifies the contents, as the manifest has the CRCs of all
 * tensors. */
int qt_container_crc(uint32_t *out, const struct qt_container *c, struct qt_err *err);
/* Format version of the manifest. */
int qt_container_version(const struct qt_container *c);
size_t qt_container_count(const struct qt_container *c);
const struct qt_entry *qt_container_entry(const struct qt_container *c, size_t i);
const struct qt_entry *qt_container_find(const struct qt_container *c, const char *name);
/* Compares the CRC of stored tensor i of qt_container_ckpt with the manifest; QT_E_INPUT if it
 * differs. */
int qt_container_check_crc(const struct qt_container *c, size_t i, struct qt_err *err);
/* The same for all stored tensors, on all threads. */
int qt_container_check_crcs(const struct qt_container *c, struct qt_err *err);

/*
 * Writing. The writer makes a container in DIR.partial and renames it to DIR after everything was
 * written, synced, read back and compared. The caller declares all stored tensors first, then
 * writes them in any order in units; a unit is one source tensor with its stored tensors. A journal
 * records finished units, so that a run that was killed at any moment can resume and gives the same
 * bytes.
 *
 * Not thread-safe. After an error only qt_writer_discard and qt_writer_close may be called.
 */
struct qt_writer;
struct qt_writer_options {
    /* Replace DIR, which must be a container or empty, by the rename at the end; delete the work
     * of an interrupted run in DIR.partial, unless `resume`. */
    bool force;
    bool resume;              /* continue DIR.partial if it exists */
    uint64_t max_shard_bytes; /* 0 = 4 GiB; a tensor is never split */
    /* Files that the caller reads, borrowed until qt_writer_close. QT_E_USAGE if one is in a
     * directory that would be replaced, whatever links lead there. */
    const char *const *sources;
    size_t nsources;
    /* Ranks that write the container together, on one file system; NULL: one process. */
    struct qt_comm *comm;
};
/*
 * With several ranks, all call qt_writer_open, qt_writer_exchange, qt_writer_begin_manifest and
 * qt_writer_finish together.
 * Each puts and commits units of its own; rank 0 does everything else. A rank sees and rank 0
 * journals the units of other ranks after the next qt_writer_exchange.
 *
 * identity: everything that determines the output bytes (options, source fingerprint). tensors:
 * name, dtype, ndim, shape and nbytes are used, and file, if set, in errors; names are copied.
 * QT_E_RESUME, naming the member that differs, if the journal of a resume has another identity.
 * QT_E_USAGE if DIR exists and force is false, if DIR is not a container, or if DIR.partial has
 * finished units and both force and resume are false. QT_E_RESOURCE if
 * another process uses DIR.partial or the disk is full (a DIR.partial that this call created is
 * removed), or if a resume finds a file header that differs from the one written. QT_E_INPUT,
 * naming the rank and the member that differs, if the ranks have different identities or tensors.
 */
int qt_writer_open(struct qt_writer **out, const char *dir, const struct qt_tensor *tensors,
                   size_t n, const json_t *identity, const struct qt_writer_options *opt,
                   struct qt_err *err);
/* The checks of qt_writer_open that need no tensors, for callers with long work before it. Creates
 * nothing. QT_E_USAGE if DIR, or finished units in DIR.partial, may not be replaced. QT_E_RESOURCE
 * if another process uses DIR.partial. */
int qt_writer_check(const char *dir, const struct qt_writer_options *opt, struct qt_err *err);
/* QT_E_RESUME, naming the member that differs, unless the identities are equal. `file` is the file
 * that holds `before`. */
int qt_identity_check(const json_t *before, const json_t *now, const char *file,
                      struct qt_err *err);
/* True for a finished unit. qt_writer_record reads its record from the journal; the caller releases
 * it with json_decref. QT_E_RESOURCE if the journal reads back wrong. */
bool qt_writer_done(const struct qt_writer *w, const char *unit);
int qt_writer_record(json_t **out, const struct qt_writer *w, const char *unit, struct qt_err *err);
/* Writes bytes [offset, offset + size) of declared tensor i. Each byte is written once. */
int qt_writer_put(struct qt_writer *w, size_t i, const void *data, size_t size, uint64_t offset,
                  struct qt_err *err);
/* Reads all of tensor i of a finished unit. */
int qt_writer_get(const struct qt_writer *w, size_t i, void *data, size_t size, struct qt_err *err);
/* Finishes a unit, which consists of all tensors put since the last commit; QT_E_INTERNAL if one is
 * incomplete. record must hold all that the manifest will state about the unit. */
int qt_writer_commit(struct qt_writer *w, const char *unit, const json_t *record,
                     struct qt_err *err);
/* With several ranks: tells all of them the units that each committed since the last call. */
int qt_writer_exchange(struct qt_writer *w, struct qt_err *err);
/* Makes a finished unit unfinished, so that all its tensors can be put again. Until the next commit
 * the journal still lists the unit as finished: the caller must be able to repeat its writes after
 * a crash, from data kept by qt_writer_save. */
int qt_writer_reopen(struct qt_writer *w, const char *unit, struct qt_err *err);
/* Stores the caller's own progress beside the journal, replacing the previous one. The data is on
 * disk on return and stays there until qt_writer_finish. qt_writer_load: `data` is the address of a
 * pointer, which is set to the loaded bytes (freed with qt_free), or to NULL if none are stored;
 * QT_E_RESUME if they are damaged. */
enum qt_progress { QT_PROGRESS_LEARNING, QT_PROGRESS_ACTIVATIONS, QT_PROGRESS_KINDS };
int qt_writer_save(struct qt_writer *w, enum qt_progress kind, const void *data, size_t size,
                   struct qt_err *err);
int qt_writer_load(void *data, size_t *size, const struct qt_writer *w, enum qt_progress kind,
                   struct qt_err *err);
/* Finds the side file `name` of a checkpoint's directory. Sets *path if it must be copied; the
 * caller frees it with qt_free. Otherwise *path = NULL, and *why is the reason, or NULL if the file
 * does not exist. Not copied: anything but regular files, and symbolic links to a file outside of
 * the directory that is not text. */
int qt_side_file_find(char **path, const char **why, const char *dir, const char *name,
                      struct qt_err *err);
/* Copies a side file (config.json, tokenizer.json) under its own name, with its permissions or
 * fewer. Side files are not in the journal: every run must copy them, resumed or not. */
int qt_writer_copy_file(struct qt_writer *w, const char *path, struct qt_err *err);
/* Adds a side file with this content and at most these permissions. */
int qt_writer_add_text(struct qt_writer *w, const char *name, const char *text, size_t size,
                       unsigned mode, struct qt_err *err);
/* Begins a JSON side file that may differ from run to run: SHA256SUMS does not list it. */
int qt_writer_begin_json(struct qt_json_out *out, struct qt_writer *w, const char *name,
                         struct qt_err *err);
/* Writes the index (if sharded) and begins qtool.json. The manifest must have the identity of
 * qt_writer_open as member "identity": a later run uses it to recognize a container that was
 * complete but not yet renamed. QT_E_INTERNAL if a tensor was not committed. */
int qt_writer_begin_manifest(struct qt_json_out *out, struct qt_writer *w, struct qt_err *err);
/* Reads everything back and compares it with the CRCs of the manifest, writes SHA256SUMS, removes
 * the journal, and renames DIR.partial to DIR. QT_E_RESOURCE if the read-back differs, or if DIR
 * now may not be replaced (a resume then continues from DIR.partial). QT_E_INTERNAL if the result
 * does not open as a container. */
int qt_writer_finish(struct qt_writer *w, struct qt_err *err);
/* Frees the writer; an unfinished container stays in DIR.partial for a resume. */
void qt_writer_close(struct qt_writer *w);
/* Removes DIR.partial after a permanent failure (bad input); does nothing after a successful
 * finish. Call qt_writer_close afterwards. */
void qt_writer_discard(struct qt_writer *w);

/* ---- directories in other formats ----------------------------------------------------------- */

/*
 * Writes the files of a directory in DIR.partial, one after the other, and renames it to DIR when
 * all are on disk. A run that was killed leaves DIR.partial, which the next run replaces: nothing
 * is resumed. QT_EXPORT_NAME in a directory says that qtool made it, so that --force may replace
 * it.
 *
 * Not thread-safe. After an error only qt_output_discard and qt_output_close may be called.
 */
#define QT_EXPORT_NAME "qtool-export.json"
struct qt_output;
/* identity: what determines the output bytes. Errors and options as for qt_writer_open; `resume`
 * and `max_shard_bytes` have no meaning here. */
int qt_output_open(struct qt_output **out, const char *dir, const json_t *identity,
                   const struct qt_writer_options *opt, struct qt_err *err);
/* Begins the file `name` and reserves `size` bytes for it; QT_E_RESOURCE if there is no room. */
int qt_output_create(struct qt_output *o, const char *name, uint64_t size, struct qt_err *err);
/* Appends to the file. */
int qt_output_write(struct qt_output *o, const void *data, size_t size, struct qt_err *err);
/* Appends zeros up to a multiple of `alignment`. */
int qt_output_pad(struct qt_output *o, size_t alignment, struct qt_err *err);
/* Completes the file. QT_E_INTERNAL if its size is not the one that was reserved. */
int qt_output_end(struct qt_output *o, struct qt_err *err);
/* Whole files: text[size], a JSON value, a copy under the same name. */
int qt_output_text(struct qt_output *o, const char *name, const char *text, size_t size,
                   struct qt_err *err);
int qt_output_json(struct qt_output *o, const char *name, const json_t *value, struct qt_err *err);
int qt_output_copy(struct qt_output *o, const char *path, struct qt_err *err);
/* Writes QT_EXPORT_NAME = record, which must have the identity as member "identity", and
 * SHA256SUMS; renames DIR.partial to DIR. Statuses as for qt_writer_finish. */
int qt_output_finish(struct qt_output *o, const json_t *record, struct qt_err *err);
/* Removes DIR.partial; does nothing after qt_output_finish. */
void qt_output_discard(struct qt_output *o);
void qt_output_close(struct qt_output *o);

/* ---- calibration files (docs/format.md) ----------------------------------------------------- */

/* Number of linear inputs of a decoder layer with attention and one MLP. */
enum { QT_INPUTS = 4 };
enum {
    QT_QCAL_VERSION = 2,     /* the newest that is written and read */
    QT_QCAL_PARTS = 4096,    /* most parts of a file */
    QT_QCAL_INPUTS = 1 << 14 /* most linear inputs of a decoder layer */
};

/*
 * The linear inputs of a decoder layer, numbered as in struct qt_linear (model/model.h): those of
 * the mixer, then the two of the MLP or of each expert. With experts, the input that all routed
 * experts share is the last one: the statistics of all tokens. Those of an expert are of the tokens
 * that it processes, times their routing weights.
 */
struct qt_qcal_layer {
    size_t inputs;   /* at least 4 */
    const size_t *k; /* [inputs] channels */
    size_t experts;  /* 0: one MLP */
};
/* The expert that has this linear input; -1: none. */
static inline int qt_qcal_expert(const struct qt_qcal_layer *l, size_t input)
{
    const size_t first = l->inputs - (2 * l->experts + 1);
    return l->experts && input >= first && input + 1 < l->inputs ? (int)((input - first) / 2) : -1;
}
/* Returns the kind of a linear input: 0: attention reads it, or a step within the mixer; 1: the
 * output projection; 2: the MLP or an expert; 3: a down projection. */
size_t qt_qcal_input_kind(const struct qt_qcal_layer *l, size_t input);
/* Writes its name: "attention in", "expert 3 down", ... */
enum { QT_QCAL_INPUT_NAME = 40 };
void qt_qcal_input_name(char name[QT_QCAL_INPUT_NAME], const struct qt_qcal_layer *l, size_t input);

/* One run of a model over calibration data. */
struct qt_qcal_part {
    size_t samples, seqlen; /* number of windows, tokens per window */
    uint64_t seed;          /* of the choice of windows */
    bool bos;               /* a BOS was put before every document of text */
    uint32_t ids_crc;       /* CRC-32 of all token ids, u32 little-endian */
    const char *const *data;
    size_t ndata; /* number of data files; only their base names are stored */
};

/* Model and data of a calibration. */
struct qt_qcal_info {
    const char *family;
    size_t layers, hidden;
    uint32_t sample_crc;               /* qt_ckpt_sample_crc of the checkpoint */
    const struct qt_qcal_layer *layer; /* [layers] */
    const struct qt_qcal_part *parts;
    size_t nparts;
    size_t tokens; /* of all parts; set by the reader, ignored by the writer */
};

struct qt_qcal; /* opaque; immutable after opening */

/* True for a name that ends in ".qcal": all calibration files must. */
bool qt_qcal_probe(const char *path);
/* Opens a calibration file and checks everything but the values of the tensors. QT_E_INPUT names
 * file and tensor; QT_E_UNSUPPORTED for another version. */
int qt_qcal_open(struct qt_qcal **out, const char *path, struct qt_err *err);
void qt_qcal_close(struct qt_qcal *q);
const char *qt_qcal_path(const struct qt_qcal *q);
const struct qt_qcal_info *qt_qcal_info(const struct qt_qcal *q);
/* QT_E_INPUT, naming the difference, unless q was made from the given model. Compares the members
 * family, layers, hidden, sample_crc and layer. `whose` is the path of the model for the
 * message. */
int qt_qcal_check_model(const struct qt_qcal *q, const struct qt_qcal_info *model,
                        const char *whose, struct qt_err *err);
/* CRC-32 of the metadata. It identifies the contents, as the metadata has the CRCs of all
 * tensors. */
uint32_t qt_qcal_crc(const struct qt_qcal *q);

/* Reads the channel statistics of a linear input; checks that CRCs are right and values finite and
 * consistent. The caller frees *out with qt_channels_free. */
int qt_qcal_channels(struct qt_channels *out, const struct qt_qcal *q, size_t layer, size_t input,
                     struct qt_err *err);
/* Reads H = X^T X into the lower triangle of h[k][k]; the rest of h does not change. Checks that
 * the CRC is right, values are finite, and the diagonal agrees with the channels' sum2[k]. */
int qt_qcal_hessian(double *h, const struct qt_qcal *q, size_t layer, size_t input,
                    const double *sum2, struct qt_err *err);
/* Reads routed[experts] of a layer with experts: how many tokens chose each one. Checks the CRC,
 * and that there are no more tokens than in the file. */
int qt_qcal_routed(uint32_t *routed, const struct qt_qcal *q, size_t layer, struct qt_err *err);

/* Allocates zeroed channel statistics in host memory. */
int qt_channels_new(struct qt_channels *out, size_t k, struct qt_err *err);
void qt_channels_free(struct qt_channels *c);

/*
 * Writing: to PATH.partial, which is renamed to PATH when complete. The same statistics give the
 * same bytes. QT_E_USAGE if PATH exists and force is false, if PATH exists and is not a regular
 * file, or if PATH does not end in ".qcal".
 */
struct qt_qcal_writer;
int qt_qcal_create(struct qt_qcal_writer **out, const char *path, const struct qt_qcal_info *info,
                   bool force, struct qt_err *err);
/* Writes one linear input; each is written once, in any order. Only the lower triangle of h[k][k]
 * is read, and is rounded to FP32. QT_E_INPUT if a value is not finite in FP32; `whose` is the path
 * of the model for the message. */
int qt_qcal_put(struct qt_qcal_writer *w, size_t layer, size_t input, const double *h,
                const struct qt_channels *c, const char *whose, struct qt_err *err);
/* Writes routed[experts] of a layer with experts, once. */
int qt_qcal_put_routed(struct qt_qcal_writer *w, size_t layer, const uint32_t *routed,
                       struct qt_err *err);
/* Completes and renames the file. QT_E_RESOURCE if PATH now may not be replaced; the complete
 * PATH.partial then stays. */
int qt_qcal_finish(struct qt_qcal_writer *w, struct qt_err *err);
/* Frees the writer and removes PATH.partial unless it was finished. */
void qt_qcal_abandon(struct qt_qcal_writer *w);

#endif
