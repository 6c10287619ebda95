/*
 * The tokens of a tokenizer, which become keys of a GGUF file (private to
 * pack/export/gguf_tokenizer.c, gguf_bpe.c and gguf_pieces.c).
 */
#ifndef QT_PACK_EXPORT_GGUF_TOKENS_H
#define QT_PACK_EXPORT_GGUF_TOKENS_H

#include "pack/export/gguf.h"

enum {
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN = 2,
    TOKEN_CONTROL = 3,
    TOKEN_USER = 4, /* found in the text before anything else */
    TOKEN_UNUSED = 5,
    TOKEN_BYTE = 6,
};

#define SPACE_MARK "\xe2\x96\x81" /* U+2581 */

struct token {
    const char *text; /* borrowed from tokenizer.json, or owned */
    char *owned;
    int32_t type;
    float score;
};

struct tokens {
    const struct qt_export *x;
    const struct qt_tokenizer *tok;
    char *path;                           /* of tokenizer.json, for messages */
    json_t *root, *settings, *generation; /* settings: tokenizer_config.json; NULL: none */
    struct token *list;                   /* by id */
    size_t count;
    struct qt_err *err;
};

/* QT_E_UNSUPPORTED: llama.cpp has no WHAT. */
int qt_gguf_no_tokenizer(const struct tokens *t, const char *what);
/* The member of a section of tokenizer.json; `missing` if it is no boolean. */
bool qt_gguf_flag(const json_t *object, const char *key, bool missing);
/* The "type" of a section, or "". */
const char *qt_gguf_section(const json_t *section);
bool qt_gguf_is_string(const json_t *v, const char *s);
/* A merge is "a b" or ["a", "b"]; qt_tokenizer_open has checked it. *joined: "a b", owned. */
int qt_gguf_merge(char **joined, const struct tokens *t, const json_t *merge);
/* True for the line that names the version of a list of merges. */
bool qt_gguf_is_version(const json_t *merge);
/* Appends texts and types of all tokens. */
void qt_gguf_write_tokens(struct qt_gguf_bytes *b, const struct tokens *t);

/* Append the keys of the algorithm: byte-level BPE (gguf_bpe.c), the BPE of SentencePiece
 * (gguf_pieces.c), which also sets types of tokens. */
int qt_gguf_write_bpe(struct qt_gguf_bytes *b, const struct tokens *t);
int qt_gguf_write_pieces(struct qt_gguf_bytes *b, struct tokens *t);

#endif
