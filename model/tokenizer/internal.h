/*
 * Internals of the tokenizer. Text passes through a list of stages. Each stage turns a piece of
 * text into pieces and passes each of them to the next stage immediately, so that only ids
 * accumulate:
 *
 *   added tokens in raw text -> normalizers -> added tokens in normalized text
 *     -> pre-tokenizers -> the model: BPE, Unigram, WordPiece, WordLevel
 *
 *   tokenizer.c          open, encode, BOS/EOS template
 *   load.c               normalizers and pre-tokenizers of tokenizer.json -> stages
 *   added.c              finds added tokens in a text
 *   unicode.c            characters, normalization forms (unicode_tables.h)
 *   pretokenize.c        runs the stages
 *   pretokenize_regex.c  translates Oniguruma patterns to PCRE2 and matches them
 *   words.c              the model; bpe*.c, unigram.c: two kinds of it
 *   files.c              finds and reads the tokenizer's file; tiktoken.c, sentencepiece.c:
 *                        other formats than tokenizer.json
 *   charsmap.c           SentencePiece's normalization tables
 *   decode.c             ids -> text
 */
#ifndef QT_MODEL_TOKENIZER_INTERNAL_H
#define QT_MODEL_TOKENIZER_INTERNAL_H

#include "model/model.h"
#include "model/tokenizer/bpe.h"

/* The largest published tokenizer.json files have about 35 MB. */
#define QT_TOKENIZER_LIMIT ((size_t)256 << 20)

/* Qwen (1): the name says whose pattern and special tokens belong to the file. */
#define QT_QWEN_TOKENS "qwen.tiktoken"

/* ---- files (files.c) ------------------------------------------------------------------------ */

struct qt_tokenizer_file {
    char *path;   /* owned */
    json_t *root; /* owned: the contents of tokenizer.json, or another format's in this form */
    /* Empty for tokenizer.json. Else ranks->data[id] is the rank of the merges that make a token,
     * and QT_NO_ID if no text becomes this token. */
    struct qt_ids ranks;
};
/* Reads the first of tokenizer.json, tekken.json, tiktoken.model and tokenizer.model in dir.
 * QT_E_INPUT names tokenizer.json if there is none. *out is freed by qt_tokenizer_file_close. */
int qt_tokenizer_file_open(struct qt_tokenizer_file *out, const char *dir, struct qt_err *err);
void qt_tokenizer_file_close(struct qt_tokenizer_file *file);

/* Fill root and ranks. data[size]: the contents of file->path. */
int qt_tekken_read(struct qt_tokenizer_file *file, const json_t *json, struct qt_err *err);
/* config: tokenizer_config.json, or NULL. */
int qt_tiktoken_read(struct qt_tokenizer_file *file, const char *data, size_t size,
                     const json_t *config, struct qt_err *err);
int qt_sentencepiece_read(struct qt_tokenizer_file *file, const char *data, size_t size,
                          struct qt_err *err);
/* *out = the bytes of base64 text[size] (with a NUL behind them), freed with qt_free. */
int qt_base64_decode(char **out, size_t *bytes, const char *text, size_t size, const char *file,
                     struct qt_err *err);

/* ---- models: word -> ids (words.c, bpe.c, unigram.c) ---------------------------------------- */

struct qt_trie_edge;
struct qt_unigram {
    const char *file; /* borrowed, for errors */
    struct qt_trie_edge *edges;
    size_t edge_slots;      /* a power of two */
    struct qt_ids nodes;    /* for each node the id of the token that ends there, or QT_NO_ID */
    double *score, least;   /* by id; the smallest */
    uint32_t byte_ids[256]; /* of "<0x00>".."<0xFF>"; QT_NO_ID where missing */
    uint32_t unk;           /* QT_NO_ID: none */
    bool byte_fallback;
    bool sentencepiece; /* a run of unknown characters never is a token of the vocabulary */
};
/* Fills *u and the vocabulary. On failure, too, *u is freed by qt_unigram_free. */
int qt_unigram_load(struct qt_unigram *u, struct qt_strmap *vocab, const json_t *model,
                    const struct qt_ids *ranks, const char *file, struct qt_err *err);
void qt_unigram_free(struct qt_unigram *u);
int qt_unigram_encode(struct qt_ids *out, struct qt_bpe_work *work, const struct qt_unigram *u,
                      const struct qt_strmap *vocab, const char *word, size_t size,
                      struct qt_err *err);

enum qt_words_kind { QT_WORDS_BPE, QT_WORDS_UNIGRAM, QT_WORDS_PIECES, QT_WORDS_LEVEL };
struct qt_words {
    enum qt_words_kind kind;
    struct qt_bpe bpe; /* of the other kinds only the vocabulary */
    struct qt_unigram unigram;
    char *prefix; /* owned; WordPiece: of tokens that continue a word */
    size_t most_chars;
    uint32_t unk; /* WordPiece, WordLevel; QT_NO_ID: none */
};
/* Loads the "model" section. On failure, too, *out is freed by qt_words_free. */
int qt_words_load(struct qt_words *out, const json_t *model, const struct qt_ids *ranks,
                  const char *file, struct qt_err *err);
void qt_words_free(struct qt_words *w);
/* Appends the ids of one pre-tokenized word (valid UTF-8), like qt_bpe_encode. */
int qt_words_encode(struct qt_ids *out, struct qt_bpe_work *work, const struct qt_words *w,
                    const char *word, size_t size, struct qt_err *err);

/* ---- text ----------------------------------------------------------------------------------- */

/* A growing byte string; zero-initialized, data freed by qt_free. Growing beyond `limit` bytes is
 * QT_E_INPUT; limit = 0: no limit. */
struct qt_text {
    char *data;
    size_t size, capacity, limit;
    bool (*interrupted)(void); /* polled while the text grows; may be NULL */
};
int qt_text_add(struct qt_text *text, const char *s, size_t size, struct qt_err *err);
int qt_text_add_char(struct qt_text *text, int32_t c, struct qt_err *err);

struct qt_piece {
    const char *text;
    size_t size;
    size_t head; /* the first `head` bytes come from the first character of the whole text */
};

/* ---- characters (unicode.c) ----------------------------------------------------------------- */

/* Returns the character at s (valid UTF-8); *bytes = its length. */
int32_t qt_utf8_char(size_t *bytes, const char *s);
/* Returns the start of the character that ends at s[end], end > 0. */
size_t qt_utf8_back(const char *s, size_t end);

/* *out = the text as PCRE2 is to see it, of the same size: s, or a copy in `buffer` where
 * characters that PCRE2 knows otherwise than Unicode 16 are replaced by others of the same kind. */
struct qt_unicode_known {
    unsigned version; /* index of the newest version whose characters are known */
    bool newer;       /* true: more characters than those of Unicode 16 are known */
};
struct qt_unicode_known qt_unicode_known_to_pcre2(void);
int qt_unicode_shadow(const char **out, struct qt_text *buffer, struct qt_unicode_known known,
                      const char *s, size_t size, struct qt_err *err);

/* The character that stands for a byte in GPT-2's vocabulary: printable Latin-1 bytes map to
 * themselves, the others to U+0100, U+0101, ... in order. */
int32_t qt_byte_char(int32_t b);

bool qt_char_is_space(int32_t c); /* White_Space */
bool qt_char_is_word(int32_t c);  /* \w of UTS 18: Alphabetic, M, Nd, Pc, Join_Control */

enum qt_unicode_form { QT_NFC, QT_NFD, QT_NFKC, QT_NFKD };
/* Appends the normalized text to *out. */
int qt_unicode_normalize(struct qt_text *out, const char *s, size_t size, enum qt_unicode_form form,
                         struct qt_err *err);
/* Appends the lower case of each character, as Rust's char::to_lowercase (no final sigma). */
int qt_unicode_lower(struct qt_text *out, const char *s, size_t size, struct qt_err *err);

/* ---- SentencePiece's normalization (charsmap.c) --------------------------------------------- */

/* whole: all of the normalization as in the sentencepiece library: the longest match is replaced,
 * spaces become U+2581, with `collapse` runs of spaces become one and those at the ends disappear,
 * and with `prefix` U+2581 comes in front of the text. Else as in the tokenizers library: grapheme
 * clusters and characters are replaced, nothing else. */
struct qt_charsmap_rules {
    bool whole, prefix, collapse;
};
struct qt_charsmap;
/* data[size]: precompiled_charsmap; empty: no replacements. */
int qt_charsmap_new(struct qt_charsmap **out, const char *data, size_t size,
                    const struct qt_charsmap_rules *rules, const char *file, struct qt_err *err);
void qt_charsmap_free(struct qt_charsmap *map);
/* Appends the normalized text to *out, which is empty. *head: see struct qt_piece. */
int qt_charsmap_run(struct qt_text *out, size_t *head, const struct qt_charsmap *map, const char *s,
                    size_t size, struct qt_err *err);

/* ---- patterns (pretokenize_regex.c) --------------------------------------------------------- */

struct qt_regex; /* immutable */
/* Compiles an Oniguruma pattern (Ruby syntax); literal: a string to find verbatim. `file` is
 * borrowed for messages. QT_E_UNSUPPORTED names a construct that cannot be translated to PCRE2. */
int qt_regex_new(struct qt_regex **out, const char *pattern, bool literal, const char *file,
                 struct qt_err *err);
void qt_regex_free(struct qt_regex *regex);
bool qt_regex_is_literal(const struct qt_regex *regex);

struct qt_regex_work; /* match data and stacks of one encode call */
/* text: of the whole call. All matches in it and in what becomes of it may take a number of steps
 * that is proportional to its size. */
int qt_regex_work_new(struct qt_regex_work **out, const char *text, size_t size,
                      bool (*interrupted)(void), struct qt_err *err);
void qt_regex_work_free(struct qt_regex_work *work);

/* A scan for all matches in text[size]. An empty match right after another match is skipped. */
struct qt_regex_scan {
    const struct qt_regex *regex;
    struct qt_regex_work *work;
    const char *text;
    const char *seen; /* by PCRE2: of qt_unicode_shadow; NULL: text */
    size_t size, from, last_end;
    bool any;
};
/* Finds the next match [*start, *end); *found = false at the end of the text. QT_E_INPUT names the
 * pattern and the place in the text if the text takes too many steps. */
int qt_regex_next(bool *found, size_t *start, size_t *end, struct qt_regex_scan *scan,
                  struct qt_err *err);

/* ---- added tokens (added.c) ----------------------------------------------------------------- */

struct qt_added {
    char *text; /* owned; normalized if `normalized` */
    size_t size;
    uint32_t id;
    size_t order; /* position in the file */
    bool single_word, lstrip, rstrip, normalized;
};

struct qt_added_set {
    struct qt_added *tokens; /* none empty; sorted by text */
    size_t count;
    uint32_t first[257]; /* tokens first[b] .. first[b+1]-1 begin with the byte b */
};
/* Sorts the tokens, drops all but the first (in file order) of equal texts, and fills `first`. */
void qt_added_set_sort(struct qt_added_set *set);
void qt_added_set_free(struct qt_added_set *set);
/* Finds the next occurrence of a token at or after *from; NULL if there is none, or if
 * `interrupted` (may be NULL) returns true. [*start, *end)
 * includes the white space that lstrip and rstrip remove. *from is set to where the search
 * continues; `done` is the end of the previous occurrence. */
const struct qt_added *qt_added_next(size_t *start, size_t *end, size_t *from, size_t done,
                                     const struct qt_added_set *set, const char *s, size_t size,
                                     bool (*interrupted)(void));

/* ---- stages (pretokenize.c) ----------------------------------------------------------------- */

enum qt_stage_kind {
    QT_STAGE_ADDED,   /* added: emits ids of added tokens, passes on the text between them */
    QT_STAGE_UNICODE, /* form */
    QT_STAGE_LOWER,
    QT_STAGE_STRIP,    /* left, right */
    QT_STAGE_PREPEND,  /* text, when */
    QT_STAGE_REPLACE,  /* regex -> text */
    QT_STAGE_SPLIT,    /* regex, behavior, invert */
    QT_STAGE_BYTES,    /* bytes -> the printable characters of GPT-2 */
    QT_STAGE_CHARSMAP, /* charsmap */
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
    struct qt_charsmap *charsmap; /* owned */
};

enum { QT_MAX_STAGES = 64 }; /* stages recurse */

struct qt_stages {
    struct qt_stage *list;
    size_t count, capacity;
};
/* Appends a stage of this kind with all other fields zero; *out is valid until the next call. */
int qt_stages_add(struct qt_stage **out, struct qt_stages *stages, enum qt_stage_kind kind,
                  const char *file, struct qt_err *err);
void qt_stages_free(struct qt_stages *stages);

/* Callbacks of a run: `piece` gets each piece after the last stage, `added` the id of each added
 * token, both in text order. `interrupted` is polled; may be NULL. */
struct qt_stage_sink {
    void *ctx;
    bool (*interrupted)(void);
    int (*piece)(void *ctx, const char *s, size_t size, struct qt_err *err);
    int (*added)(void *ctx, uint32_t id, struct qt_err *err);
};
int qt_stages_run(const struct qt_stages *stages, const struct qt_stage_sink *sink, const char *s,
                  size_t size, struct qt_err *err);

/* ---- sections of tokenizer.json (load.c) ---------------------------------------------------- */

/* Append the stages of a section; a missing or null section has none. */

int qt_normalizer_load(struct qt_stages *stages, const json_t *section, const char *file,
                       struct qt_err *err);
int qt_pretokenizer_load(struct qt_stages *stages, const json_t *section, const char *file,
                         struct qt_err *err);

#endif
