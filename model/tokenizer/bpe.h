/*
 * Byte-pair encoding: the model behind every tokenizer that qtool reads.
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

/* Open addressing, linear probing, at most 2/3 full. Keys are copied into one block of text. */
struct qt_strmap {
    struct qt_strmap_slot *slots;
    size_t slot_count; /* a power of two, or 0 */
    size_t count;
    char *text;
    size_t text_size, text_capacity;
};

/* The value of s[size], or QT_NO_ID. */
uint32_t qt_strmap_find(const struct qt_strmap *map, const char *s, size_t size);
/* Adds a key that is not there yet; value < QT_NO_ID. */
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
    struct qt_merge *merges; /* hash table over (left, right) */
    size_t merge_slots;      /* a power of two */
    uint32_t byte_ids[256];  /* of "<0x00>".."<0xFF>"; QT_NO_ID where missing */
    uint32_t unk;            /* QT_NO_ID: none, or not in the vocabulary */
    bool has_unk, byte_fallback, fuse_unk, ignore_merges;
    /* No merge joins U+2581 to anything before it but another U+2581, so that a text without
     * pre-tokenizer can be cut there: same ids, but short words that the cache can hold. */
    bool cut_at_space_mark;
};

/* `model` is the section of that name; `file` must outlive bpe. Frees what it made on failure. */
int qt_bpe_load(struct qt_bpe *bpe, const json_t *model, const char *file, struct qt_err *err);
void qt_bpe_free(struct qt_bpe *bpe);
/* NULL when there is none. */
const struct qt_merge *qt_bpe_merge(const struct qt_bpe *bpe, uint32_t left, uint32_t right);

/* ---- encoding ------------------------------------------------------------------------------- */

struct qt_ids {
    uint32_t *data;
    size_t count, capacity;
};
int qt_ids_add(struct qt_ids *ids, uint32_t id, struct qt_err *err);

struct qt_symbol;
struct qt_candidate;

/* Working memory of one encode call; all zero to start with. */
struct qt_bpe_work {
    struct qt_symbol *symbols;
    size_t symbol_count, symbol_capacity;
    struct qt_candidate *heap; /* binary min-heap by (rank, position) */
    size_t heap_count, heap_capacity;
    struct qt_strmap cache; /* word -> index into cached */
    struct qt_ids cached;   /* count, ids... of each cached word */
};
void qt_bpe_work_free(struct qt_bpe_work *work);

/* Appends the ids of one pre-tokenized word (valid UTF-8) to `out`. */
int qt_bpe_encode(struct qt_ids *out, struct qt_bpe_work *work, const struct qt_bpe *bpe,
                  const char *word, size_t size, struct qt_err *err);

#endif
