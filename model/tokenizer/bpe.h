/*
 * Byte-pair encoding, the model behind most tokenizers.
 *
 *   bpe_map.c   string -> number (vocabulary, cache of encoded words)
 *   bpe_load.c  "model" section of tokenizer.json -> struct qt_bpe
 *   bpe.c       word -> ids
 */
#ifndef QT_MODEL_TOKENIZER_BPE_H
#define QT_MODEL_TOKENIZER_BPE_H

#include "base/base.h"
#include "formats/formats.h"

#define QT_NO_ID UINT32_MAX

/* Ids at or above this are refused: the largest vocabularies in use have about 2^18 entries. */
#define QT_MAX_ID (1u << 24)

/* ---- string -> number ----------------------------------------------------------------------- */

struct qt_strmap_slot {
    uint32_t hash, offset, size, value; /* value QT_NO_ID: free slot */
};

/* Hash table with linear probing, at most 2/3 full. `text` holds copies of all keys. */
struct qt_strmap {
    struct qt_strmap_slot *slots;
    size_t slot_count; /* a power of two, or 0 */
    size_t count;
    char *text;
    size_t text_size, text_capacity;
};

/* Returns the value of the key s[size], or QT_NO_ID. */
uint32_t qt_strmap_find(const struct qt_strmap *map, const char *s, size_t size);
/* Adds a key that is not in the map; value < QT_NO_ID. */
int qt_strmap_add(struct qt_strmap *map, const char *s, size_t size, uint32_t value,
                  struct qt_err *err);
void qt_strmap_free(struct qt_strmap *map);

/* ---- the model ------------------------------------------------------------------------------ */

struct qt_merge {
    uint32_t left, right; /* left QT_NO_ID: free slot */
    uint32_t rank;        /* lower merges first */
    uint32_t id;          /* of the merged token */
};

struct qt_bpe {
    const char *file; /* borrowed, for errors */
    struct qt_strmap vocab;
    uint32_t max_id;         /* largest id of the vocabulary */
    size_t longest;          /* bytes of the longest token that a merge makes */
    struct qt_merge *merges; /* hash table over (left, right) */
    size_t merge_slots;      /* a power of two */
    uint32_t byte_ids[256];  /* of "<0x00>".."<0xFF>"; QT_NO_ID where missing */
    uint32_t unk;            /* QT_NO_ID: none, or not in the vocabulary */
    bool has_unk, byte_fallback, fuse_unk, ignore_merges;
    /* No merge joins U+2581 to a preceding character other than U+2581. A text without
     * pre-tokenizer is then cut before U+2581: same ids, but short words that fit the cache. */
    bool cut_at_space_mark;
    /* Added in front of all characters of a word but the first, and behind the last; NULL:
     * nothing. */
    char *prefix, *suffix;
};

struct qt_ids {
    uint32_t *data;
    size_t count, capacity;
};
int qt_ids_add(struct qt_ids *ids, uint32_t id, struct qt_err *err);

/* Loads the "model" section of tokenizer.json. `file` is borrowed for messages and must outlive
 * bpe. ranks, if not empty, takes the place of "merges": two tokens that make token `id` together
 * merge with rank ranks->data[id]; QT_NO_ID: no merge makes it. On failure *bpe is empty; otherwise
 * it is freed by qt_bpe_free. */
int qt_bpe_load(struct qt_bpe *bpe, const json_t *model, const struct qt_ids *ranks,
                const char *file, struct qt_err *err);
/* Reads an object of tokens and ids into bpe->vocab and max_id. */
int qt_vocab_load(struct qt_bpe *bpe, const json_t *vocab, struct qt_err *err);
void qt_bpe_free(struct qt_bpe *bpe);
/* Returns the merge of a pair of ids, or NULL. */
const struct qt_merge *qt_bpe_merge(const struct qt_bpe *bpe, uint32_t left, uint32_t right);

/* ---- encoding ------------------------------------------------------------------------------- */

struct qt_symbol;
struct qt_candidate;
struct qt_best;

/* Working memory of one encode call; zero-initialized but for the first two members. */
struct qt_bpe_work {
    bool (*interrupted)(void); /* NULL: the call cannot be stopped */
    size_t most;               /* stop once there are this many ids; 0: no limit */
    struct qt_symbol *symbols;
    size_t symbol_count, symbol_capacity;
    struct qt_candidate *heap; /* binary min-heap by (rank, position) */
    size_t heap_count, heap_capacity;
    struct qt_strmap cache; /* word -> index into cached */
    struct qt_ids cached;   /* for each cached word: count, ids... */
    struct qt_ids places;   /* parts of a long word: where tokens may begin, */
    struct qt_ids cuts;     /* and where they do, as offsets in the part */
    char *key;              /* a character or word with its affixes */
    size_t key_capacity;
    struct qt_best *best; /* Unigram: the best cut up to each place */
    size_t best_capacity;
};
void qt_bpe_work_free(struct qt_bpe_work *work);

/* Appends the ids of a word that the cache holds (*found), or adds a word and its ids to it, unless
 * it is too long or the cache full. */
int qt_word_cache_get(bool *found, struct qt_ids *out, const struct qt_bpe_work *work,
                      const char *word, size_t size, struct qt_err *err);
int qt_word_cache_add(struct qt_bpe_work *work, const char *word, size_t size, const uint32_t *ids,
                      size_t count, struct qt_err *err);

/* True if `out` has as many ids as are wanted. */
bool qt_bpe_enough(const struct qt_ids *out, const struct qt_bpe_work *work);
/* QT_E_INTERRUPTED if `interrupted` (may be NULL) returns true. */
int qt_tokenizer_poll(bool (*interrupted)(void), struct qt_err *err);
/* Appends the ids of one pre-tokenized word (valid UTF-8) to `out`; of a long word at least as many
 * as are wanted. */
int qt_bpe_encode(struct qt_ids *out, struct qt_bpe_work *work, const struct qt_bpe *bpe,
                  const char *word, size_t size, struct qt_err *err);
/* The same without ignore_merges. */
int qt_bpe_encode_by_merges(struct qt_ids *out, struct qt_bpe_work *work, const struct qt_bpe *bpe,
                            const char *word, size_t size, struct qt_err *err);

#endif
