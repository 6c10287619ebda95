/*
 * Reading GGUF files (private to formats/gguf*.c, checkpoint.c and encodings/gguf.c).
 * pack/export/gguf.h describes the format.
 *
 *     gguf.c             keys and tensors of a file; a checkpoint of one or more files
 *     gguf_names.c       names of tensors, and what else the exporter shares
 *     gguf_config.c      keys -> config.json
 *     gguf_tokenizer.c   keys -> tokenizer.json, tokenizer_config.json
 *     encodings/gguf.c   blocks of weights -> values
 */
#ifndef QT_FORMATS_GGUF_H
#define QT_FORMATS_GGUF_H

#include "formats/formats_internal.h"

/* ---- types of tensors (encodings/gguf.c) ---------------------------------------------------- */

struct qt_gguf_block {
    const char *name;
    uint32_t id;                                          /* as llama.cpp numbers types */
    enum qt_dtype dtype;                                  /* of types that are no blocks */
    size_t count, bytes;                                  /* weights and bytes of a block */
    void (*decode)(float *w, const unsigned char *block); /* NULL: no block */
};
/* NULL: a type that cannot be read. */
const struct qt_gguf_block *qt_gguf_block_find(uint32_t id);

/* ---- keys (gguf.c) -------------------------------------------------------------------------- */

enum qt_gguf_value {
    QT_GGUF_TYPE_F32 = 6,
    QT_GGUF_TYPE_BOOL = 7,
    QT_GGUF_TYPE_STRING = 8,
    QT_GGUF_TYPE_ARRAY = 9,
};

struct qt_gguf_text {
    const char *s; /* in the mapping, not terminated */
    size_t size;
};
struct qt_gguf_key {
    struct qt_gguf_text name;
    uint32_t type; /* of the value, or of the elements */
    bool array;
    uint64_t count; /* elements; 1 for a value */
    size_t at;      /* offset of the value */
};
/* The keys of the first file. */
struct qt_gguf {
    const unsigned char *data;
    const char *path;
    struct qt_gguf_key *keys;
    size_t count, capacity;
};

/* NULL: absent. prefix: put before the name; may be "". */
const struct qt_gguf_key *qt_gguf_key(const struct qt_gguf *g, const char *prefix,
                                      const char *name);
/* True if there is such a value; the types of integers and of numbers do not matter. */
bool qt_gguf_get_size(size_t *out, const struct qt_gguf *g, const char *prefix, const char *name);
bool qt_gguf_get_real(double *out, const struct qt_gguf *g, const char *prefix, const char *name);
bool qt_gguf_get_bool(bool *out, const struct qt_gguf *g, const char *prefix, const char *name);
bool qt_gguf_get_text(struct qt_gguf_text *out, const struct qt_gguf *g, const char *prefix,
                      const char *name);
/* The string at *at of an array of strings; *at moves behind it. */
struct qt_gguf_text qt_gguf_next(const struct qt_gguf *g, size_t *at);
/* Element i of an array of 4-byte elements. */
uint32_t qt_gguf_word(const struct qt_gguf *g, const struct qt_gguf_key *array, size_t i);
bool qt_gguf_is(const struct qt_gguf_text *text, const char *s);

/* ---- names (gguf_names.c) ------------------------------------------------------------------- */

/* The tensor of a transformers checkpoint from which a GGUF tensor was made. */
struct qt_gguf_origin {
    char name[2 * QT_GGUF_NAME];
    size_t layer;
    bool rotary, plus_1, stacked; /* as of qt_gguf_place; stacked: of all experts */
    bool matrix;                  /* of a layer; GGUF stores those of one row as vectors */
};
/* False if the family has no tensor of this name. */
bool qt_gguf_origin(struct qt_gguf_origin *out, const struct qt_gguf_family *f, const char *name);

/* ---- a checkpoint --------------------------------------------------------------------------- */

bool qt_gguf_name_ok(const char *name);
/* Lists the tensors of a file under the names that they have there. */
int qt_gguf_open(struct qt_shard *shard, struct qt_err *err);
void qt_gguf_free(struct qt_gguf *g);
/*
 * Gives the tensors of all files the names of transformers, and makes the directory *dir
 * (qt_tempdir_make) with config.json, made from the keys; the tokenizer, made from the keys unless
 * `beside` has a tokenizer.json; and the other side files of `beside`.
 */
int qt_gguf_adopt(char **dir, struct qt_shard *shards, size_t count, const char *beside,
                  struct qt_err *err);
/* Facts about the tensors that config.json depends on. */
struct qt_gguf_facts {
    const struct qt_gguf_family *family;
    char prefix[32]; /* "llama." */
    size_t vocab;    /* rows of the embedding */
    enum qt_dtype dtype;
    bool head, head_norms, qkv_bias, mlp_bias;
    /* rope_freqs, or rope_factors_long and rope_factors_short; borrowed, NULL: absent. */
    const float *long_factors, *short_factors;
    size_t factors;
};
/* New objects; NULL values of *tokenizer and *settings: the file has no tokenizer. */
int qt_gguf_make_config(json_t **out, const struct qt_gguf *g, const struct qt_gguf_facts *facts,
                        struct qt_err *err);
int qt_gguf_make_tokenizer(json_t **tokenizer, json_t **settings, const struct qt_gguf *g,
                           struct qt_err *err);

#endif
