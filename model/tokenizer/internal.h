/*
 * Inside the tokenizer. A text runs through a list of stages; each stage turns a piece of text into
 * pieces for the next one, at once, so that nothing but ids piles up:
 *
 *   added tokens taken verbatim -> normalizers -> added tokens in normalized text
 *     -> pre-tokenizers -> BPE
 *
 *   tokenizer.c          open, encode, BOS/EOS template
 *   tokenizer_load.c     normalizers and pre-tokenizers of tokenizer.json -> stages
 *   tokenizer_added.c    added tokens: finding them in a text
 *   tokenizer_unicode.c  characters, normalization forms
 *   pretokenize.c        running the stages
 *   pretokenize_regex.c  Oniguruma patterns by way of PCRE2
 *   bpe*.c               the model
 */
#ifndef QT_MODEL_TOKENIZER_INTERNAL_H
#define QT_MODEL_TOKENIZER_INTERNAL_H

#include "model/model.h"
#include "model/tokenizer/bpe.h"

/* ---- text ----------------------------------------------------------------------------------- */

/* Growing bytes; zero to start with. limit 0: none, else QT_E_INPUT beyond it. */
struct qt_text {
    char *data;
    size_t size, capacity, limit;
};
int qt_text_add(struct qt_text *text, const char *s, size_t size, struct qt_err *err);
int qt_text_add_char(struct qt_text *text, int32_t c, struct qt_err *err);

struct qt_piece {
    const char *text;
    size_t size;
    size_t head; /* so many of its bytes stem from the first character of the whole text */
};

/* ---- characters (tokenizer_unicode.c) ------------------------------------------------------- */

/* Offset of the first byte that is not UTF-8, or size. */
size_t qt_utf8_check(const char *s, size_t size);
/* The character at s of valid UTF-8, and its bytes. */
int32_t qt_utf8_char(size_t *bytes, const char *s);
/* Start of the character that ends at s[end], end > 0. */
size_t qt_utf8_back(const char *s, size_t end);

bool qt_char_is_space(int32_t c); /* White_Space */
bool qt_char_is_word(int32_t c);  /* \w of UTS 18: Alphabetic, M, Nd, Pc, Join_Control */

enum qt_unicode_form { QT_NFC, QT_NFD, QT_NFKC, QT_NFKD };
/* Appends the normalized text. */
int qt_unicode_normalize(struct qt_text *out, const char *s, size_t size, enum qt_unicode_form form,
                         struct qt_err *err);
/* Character by character, as Rust's char::to_lowercase (no final sigma). */
int qt_unicode_lower(struct qt_text *out, const char *s, size_t size, struct qt_err *err);

/* ---- patterns (pretokenize_regex.c) --------------------------------------------------------- */

struct qt_regex; /* immutable */
/* An Oniguruma pattern (Ruby syntax), or text to find as it is. */
int qt_regex_new(struct qt_regex **out, const char *pattern, bool literal, const char *file,
                 struct qt_err *err);
void qt_regex_free(struct qt_regex *regex);

struct qt_regex_work; /* match data and stacks of one encode call */
int qt_regex_work_new(struct qt_regex_work **out, struct qt_err *err);
void qt_regex_work_free(struct qt_regex_work *work);

/* One pass over a text. An empty match right after another match is no match. */
struct qt_regex_scan {
    const struct qt_regex *regex;
    struct qt_regex_work *work;
    const char *text;
    size_t size, from, last_end;
    bool any;
};
/* *found = false at the end. QT_E_UNSUPPORTED when the match limits are exceeded. */
int qt_regex_next(bool *found, size_t *start, size_t *end, struct qt_regex_scan *scan,
                  struct qt_err *err);

/* ---- added tokens (tokenizer_added.c) ------------------------------------------------------- */

struct qt_added {
    char *text; /* owned; normalized where `normalized` */
    size_t size;
    uint32_t id;
    size_t order; /* position in the file */
    bool single_word, lstrip, rstrip, normalized;
};

struct qt_added_set {
    struct qt_added *tokens; /* none empty; sorted by text */
    size_t count;
    uint32_t first[257]; /* tokens whose first byte is b: first[b] .. first[b+1]-1 */
};
/* Sorts; of tokens with equal text the first of the file stays. */
void qt_added_set_sort(struct qt_added_set *set);
void qt_added_set_free(struct qt_added_set *set);
/* The next occurrence at or after *from: [*start, *end) with the blanks that it swallows; NULL when
 * there is none. *from = where to go on; `done` = end of the occurrence before this one. */
const struct qt_added *qt_added_next(size_t *start, size_t *end, size_t *from, size_t done,
                                     const struct qt_added_set *set, const char *s, size_t size);

/* ---- stages (pretokenize.c) ----------------------------------------------------------------- */

enum qt_stage_kind {
    QT_STAGE_ADDED,   /* added: ids of added tokens go out, the text between goes on */
    QT_STAGE_UNICODE, /* form */
    QT_STAGE_LOWER,
    QT_STAGE_STRIP,   /* left, right */
    QT_STAGE_PREPEND, /* text, when */
    QT_STAGE_REPLACE, /* regex -> text */
    QT_STAGE_SPLIT,   /* regex, behavior, invert */
    QT_STAGE_BYTES,   /* bytes -> the printable characters of GPT-2 */
};

enum qt_prepend_when { QT_PREPEND_ALWAYS, QT_PREPEND_MISSING, QT_PREPEND_MISSING_FIRST };

enum qt_split_behavior {
    QT_SPLIT_REMOVED,
    QT_SPLIT_ISOLATED,
    QT_SPLIT_MERGED_WITH_PREVIOUS,
    QT_SPLIT_MERGED_WITH_NEXT,
    QT_SPLIT_CONTIGUOUS,
};

struct qt_stage {
    enum qt_stage_kind kind;
    struct qt_added_set added;
    enum qt_unicode_form form;
    bool left, right, invert;
    char *text; /* owned */
    size_t text_size;
    enum qt_prepend_when when;
    struct qt_regex *regex; /* owned */
    enum qt_split_behavior behavior;
};

enum { QT_MAX_STAGES = 64 }; /* stages recurse */

struct qt_stages {
    struct qt_stage *list;
    size_t count, capacity;
};
/* Appends a stage of this kind, everything else zero; *out stays valid until the next call. */
int qt_stages_add(struct qt_stage **out, struct qt_stages *stages, enum qt_stage_kind kind,
                  const char *file, struct qt_err *err);
void qt_stages_free(struct qt_stages *stages);

/* One run of text through stages; `piece` receives what comes out, `added` added tokens. */
struct qt_stage_sink {
    void *ctx;
    int (*piece)(void *ctx, const char *s, size_t size, struct qt_err *err);
    int (*added)(void *ctx, uint32_t id, struct qt_err *err);
};
int qt_stages_run(const struct qt_stages *stages, const struct qt_stage_sink *sink, const char *s,
                  size_t size, struct qt_err *err);

/* ---- sections of tokenizer.json (tokenizer_load.c) ------------------------------------------ */

int qt_normalizer_load(struct qt_stages *stages, const json_t *section, const char *file,
                       struct qt_err *err);
int qt_pretokenizer_load(struct qt_stages *stages, const json_t *section, const char *file,
                         struct qt_err *err);

#endif
