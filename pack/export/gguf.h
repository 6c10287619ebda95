/*
 * GGUF (private to pack/export/gguf*.c), the file format of llama.cpp. All numbers little-endian:
 *
 *     "GGUF"  u32 version = 3  u64 tensors  u64 keys
 *     keys:    string name  u32 type  value
 *     tensors: string name  u32 dims  u64 size[dims], fastest first  u32 type  u64 offset
 *     padding to 32 bytes; then the data, each tensor at a multiple of 32 bytes
 *
 *     gguf.c             the format: what it holds, its files and their headers
 *     gguf_plan.c        which tensors: names, types, order of rows (gguf_plan.h)
 *     gguf_data.c        the data of the tensors
 *     gguf_blocks.c      types of tensors: blocks of 32 weights
 *     gguf_keys.c        a growing list of keys
 *     gguf_arch.c        the table of architectures: keys, what is refused
 *     gguf_rope.c        the same for the rotary embedding
 *     gguf_tokenizer.c   tokenizer.json -> keys: tokens, chat template (gguf_tokens.h)
 *     gguf_bpe.c         keys of byte-level BPE: merges, the splitting of text
 *     gguf_pieces.c      keys of SentencePiece's BPE: scores
 *
 * formats/gguf_names.c has the names, which the reader (formats/gguf.c) shares.
 */
#ifndef QT_PACK_EXPORT_GGUF_H
#define QT_PACK_EXPORT_GGUF_H

#include "model/model.h"
#include "pack/export/export.h"

enum { QT_GGUF_ALIGN = 32, QT_GGUF_BLOCK = 32 };

/* ---- keys (gguf_keys.c) --------------------------------------------------------------------- */

/* A growing byte string. After the first failure `rc` is negative and all calls do nothing. */
struct qt_gguf_bytes {
    unsigned char *data; /* owned: qt_free */
    size_t size, capacity;
    uint64_t keys;
    int rc;
    struct qt_err *err;
};
enum qt_gguf_value {
    QT_GGUF_U16 = 2,
    QT_GGUF_U32 = 4,
    QT_GGUF_I32 = 5,
    QT_GGUF_F32 = 6,
    QT_GGUF_BOOL = 7,
    QT_GGUF_STRING = 8,
    QT_GGUF_ARRAY = 9,
};
/* Append a key with its value. prefix: put before the name; may be "". */
void qt_gguf_u16(struct qt_gguf_bytes *b, const char *name, uint16_t value);
void qt_gguf_u32(struct qt_gguf_bytes *b, const char *prefix, const char *name, uint32_t value);
void qt_gguf_i32(struct qt_gguf_bytes *b, const char *name, int32_t value);
void qt_gguf_f32(struct qt_gguf_bytes *b, const char *prefix, const char *name, float value);
void qt_gguf_bool(struct qt_gguf_bytes *b, const char *name, bool value);
void qt_gguf_string(struct qt_gguf_bytes *b, const char *prefix, const char *name,
                    const char *value);
/* Begins an array of `count` elements, which the caller appends. */
void qt_gguf_array(struct qt_gguf_bytes *b, const char *name, enum qt_gguf_value type,
                   size_t count);
void qt_gguf_raw(struct qt_gguf_bytes *b, const void *data, size_t size);
void qt_gguf_text(struct qt_gguf_bytes *b, const char *s, size_t size);

/* ---- types of tensors (gguf_blocks.c) ------------------------------------------------------- */

struct qt_gguf_type {
    const char *name;
    uint32_t id,
        file_type;       /* as llama.cpp numbers them; file_type: of a model that has it mostly */
    size_t count, bytes; /* weights of a block and their bytes */
    /* Blocks: encodes QT_GGUF_BLOCK codes that share a scale. decoded: NULL, or what the runtime
     * will decode. */
    void (*encode)(unsigned char *dst, const uint8_t *code, float scale, float zero,
                   float *decoded);
};
/* The type that holds matrices of a scheme; NULL: none. *fit and *why as qt_export_format.fit. */
const struct qt_gguf_type *qt_gguf_type_of(enum qt_export_fit *fit, const char **why,
                                           const struct qt_spec *spec);
/* The type of unquantized tensors; NULL: none. */
const struct qt_gguf_type *qt_gguf_type_plain(enum qt_dtype dtype);

/* ---- architectures (gguf_arch.c) ------------------------------------------------------------ */

struct qt_gguf_arch; /* a row of the table */
/* NULL: not in the table. */
const struct qt_gguf_arch *qt_gguf_arch_find(const char *family);
/* The families of the table, for messages. */
void qt_gguf_arch_names(char *out, size_t size);

/* Divisors of the frequencies of the rotary embedding, which are stored as tensors. */
struct qt_gguf_factors {
    size_t count;
    float *list[2]; /* [count], owned: qt_free; NULL: none */
    const char *name[2];
};
/* Appends the keys of the architecture. QT_E_UNSUPPORTED if llama.cpp computes something else than
 * the model. */
int qt_gguf_arch_keys(struct qt_gguf_bytes *b, struct qt_gguf_factors *factors,
                      const struct qt_gguf_arch *arch, const struct qt_model *model,
                      const struct qt_export *x, struct qt_err *err);

/* ---- tokenizer (gguf_tokenizer.c) ----------------------------------------------------------- */

/* Appends the keys of the container's tokenizer, for a model of `vocab` tokens. QT_E_UNSUPPORTED,
 * naming the component, if llama.cpp would tokenize in another way. */
int qt_gguf_tokenizer(struct qt_gguf_bytes *b, const struct qt_export *x, size_t vocab,
                      struct qt_err *err);

#endif
