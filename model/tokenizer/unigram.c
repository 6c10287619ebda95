/*
 * Unigram (SentencePiece): of all ways to cut a word into tokens, the one with the largest sum of
 * scores. The rules are those of models/unigram of the Hugging Face `tokenizers` library; where
 * they differ for tokenizer.model, those of the `sentencepiece` library.
 */
#include "model/tokenizer/internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define NO_PLACE SIZE_MAX

enum { UNKNOWN_PENALTY = 10 }; /* below the smallest score */

/* ---- trie ----------------------------------------------------------------------------------- */

/* An edge of the trie: slot of a hash table over (node, byte). */
struct qt_trie_edge {
    uint32_t node; /* QT_NO_ID: free slot */
    uint32_t child;
    uint8_t byte;
};

static struct qt_trie_edge *edge_slot(const struct qt_unigram *u, uint32_t node, uint8_t byte)
{
    const uint64_t h = ((uint64_t)node << 8 | byte) * 0x9e3779b97f4a7c15u;
    const size_t mask = u->edge_slots - 1;
    for (size_t i = (size_t)(h >> 32) & mask;; i = (i + 1) & mask) {
        struct qt_trie_edge *e = &u->edges[i];
        if (e->node == QT_NO_ID || (e->node == node && e->byte == byte))
            return e;
    }
}

static int add_token(struct qt_unigram *u, const char *s, size_t size, uint32_t id,
                     struct qt_err *err)
{
    uint32_t node = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < size; i++) {
        struct qt_trie_edge *e = edge_slot(u, node, (uint8_t)s[i]);
        if (e->node == QT_NO_ID) {
            *e = (struct qt_trie_edge){node, (uint32_t)u->nodes.count, (uint8_t)s[i]};
            QT_TRY(qt_ids_add(&u->nodes, QT_NO_ID, err));
        }
        node = e->child;
    }
    u->nodes.data[node] = id;
done:
    return rc;
}

/* ---- loading -------------------------------------------------------------------------------- */

static int new_trie(struct qt_unigram *u, size_t bytes, struct qt_err *err)
{
    int rc;
    for (u->edge_slots = 16; u->edge_slots < 2 * bytes;)
        u->edge_slots *= 2;
    QT_TRY(qt_array_new(&u->edges, u->edge_slots, sizeof *u->edges, err));
    for (size_t i = 0; i < u->edge_slots; i++)
        u->edges[i].node = QT_NO_ID;
    QT_TRY(qt_ids_add(&u->nodes, QT_NO_ID, err));
done:
    return rc;
}

/* An entry of "vocab" is [token, score]; its id is its place. */
static int parse_entry(const char **token, double *score, const json_t *list, size_t i,
                       const char *file, struct qt_err *err)
{
    const json_t *entry = json_array_get(list, i);
    const json_t *value = json_array_get(entry, 1);
    *token = json_string_value(json_array_get(entry, 0));
    *score = json_number_value(value);
    if (json_array_size(entry) != 2 || !*token || !json_is_number(value) || !isfinite(*score))
        return qt_fail(err, QT_E_INPUT, file, NULL,
                       "entry %zu of model.vocab is not a token and its score", i);
    return QT_OK;
}

static int load_tokens(struct qt_unigram *u, struct qt_strmap *vocab, const json_t *list,
                       const struct qt_ids *ranks, const char *file, struct qt_err *err)
{
    const size_t n = json_array_size(list);
    const char *token;
    size_t bytes = 0;
    double score;
    int rc = QT_OK;
    if (n == 0 || n >= QT_MAX_ID)
        return qt_fail(err, QT_E_INPUT, file, NULL, "model.vocab has %zu entries", n);
    QT_TRY(qt_array_new(&u->score, n, sizeof *u->score, err));
    u->least = INFINITY;
    for (size_t i = 0; i < n; i++) {
        QT_TRY(parse_entry(&token, &score, list, i, file, err));
        bytes += strlen(token);
        u->score[i] = score;
        if (i >= ranks->count || ranks->data[i] != QT_NO_ID)
            u->least = fmin(u->least, u->score[i]);
    }
    QT_TRY(new_trie(u, bytes + 1, err));
    for (size_t i = n; i-- > 0;) { /* the last of equal tokens has the id */
        QT_TRY(parse_entry(&token, &score, list, i, file, err));
        if (qt_strmap_find(vocab, token, strlen(token)) != QT_NO_ID)
            continue;
        QT_TRY(qt_strmap_add(vocab, token, strlen(token), (uint32_t)i, err));
        if (*token && (i >= ranks->count || ranks->data[i] != QT_NO_ID))
            QT_TRY(add_token(u, token, strlen(token), (uint32_t)i, err));
    }
done:
    return rc;
}

int qt_unigram_load(struct qt_unigram *u, struct qt_strmap *vocab, const json_t *model,
                    const struct qt_ids *ranks, const char *file, struct qt_err *err)
{
    const json_t *list = json_object_get(model, "vocab"), *unk = json_object_get(model, "unk_id");
    char name[8];
    int rc;
    *u = (struct qt_unigram){.file = file, .unk = QT_NO_ID, .sentencepiece = ranks->count > 0};
    if (!json_is_array(list))
        return qt_fail(err, QT_E_INPUT, file, NULL, "model.vocab is not an array");
    QT_TRY(qt_json_get_bool(&u->byte_fallback, model, "byte_fallback", file, err));
    QT_TRY(load_tokens(u, vocab, list, ranks, file, err));
    if (unk && !json_is_null(unk)) {
        if (!json_is_integer(unk) || json_integer_value(unk) < 0 ||
            (size_t)json_integer_value(unk) >= json_array_size(list))
            return qt_fail(err, QT_E_INPUT, file, NULL,
                           "model.unk_id is not an id of the vocabulary");
        u->unk = (uint32_t)json_integer_value(unk);
    }
    for (unsigned b = 0; b < 256; b++) {
        snprintf(name, sizeof name, "<0x%02X>", b);
        u->byte_ids[b] = qt_strmap_find(vocab, name, 6);
    }
done:
    return rc;
}

void qt_unigram_free(struct qt_unigram *u)
{
    qt_free(u->edges);
    qt_free(u->nodes.data);
    qt_free(u->score);
    *u = (struct qt_unigram){0};
}

/* ---- encoding ------------------------------------------------------------------------------- */

/* The best cut of the word up to a place. */
struct qt_best {
    double score;
    size_t from; /* where its last token begins; NO_PLACE: none yet */
    uint32_t id; /* of its last token */
};

static void offer(struct qt_best *to, double score, size_t from, uint32_t id)
{
    if (to->from == NO_PLACE || score > to->score)
        *to = (struct qt_best){score, from, id};
}

/* Offers all tokens that begin at `from`, or the unknown token where none is a single character. */
static int extend(struct qt_best *best, const struct qt_unigram *u, const char *word, size_t size,
                  size_t from, size_t first, struct qt_err *err)
{
    bool single = false;
    uint32_t node = 0;
    for (size_t i = from; i < size; i++) {
        const struct qt_trie_edge *e = edge_slot(u, node, (uint8_t)word[i]);
        if (e->node == QT_NO_ID)
            break;
        node = e->child;
        const uint32_t id = u->nodes.data[node];
        if (id == QT_NO_ID)
            continue;
        offer(&best[i + 1], u->score[id] + best[from].score, from, id);
        single = single || i + 1 - from == first;
    }
    if (single)
        return QT_OK;
    if (u->unk == QT_NO_ID)
        return qt_fail(err, QT_E_INPUT, u->file, NULL,
                       "the text needs an unknown token, but model.unk_id is missing");
    offer(&best[from + first], u->least - UNKNOWN_PENALTY + best[from].score, from, u->unk);
    return QT_OK;
}

/* Appends the ids of a run of unknown characters, s[size]. */
static int add_unknown(struct qt_ids *out, const struct qt_unigram *u,
                       const struct qt_strmap *vocab, const char *s, size_t size,
                       struct qt_err *err)
{
    const uint32_t known = u->sentencepiece ? QT_NO_ID : qt_strmap_find(vocab, s, size);
    bool bytes = u->byte_fallback && known == QT_NO_ID;
    int rc = QT_OK;
    for (size_t i = 0; bytes && i < size; i++)
        bytes = u->byte_ids[(uint8_t)s[i]] != QT_NO_ID;
    if (!bytes)
        return qt_ids_add(out, known != QT_NO_ID ? known : u->unk, err);
    for (size_t i = 0; i < size; i++)
        QT_TRY(qt_ids_add(out, u->byte_ids[(uint8_t)s[i]], err));
done:
    return rc;
}

/* Appends the tokens of the best cut. w->places: where its tokens end, the last one first. */
static int append(struct qt_ids *out, struct qt_bpe_work *w, const struct qt_unigram *u,
                  const struct qt_strmap *vocab, const struct qt_best *best, const char *word,
                  size_t size, struct qt_err *err)
{
    size_t unknown = NO_PLACE; /* where a run of unknown characters begins */
    int rc = QT_OK;
    w->places.count = 0;
    for (size_t at = size; at > 0; at = best[at].from)
        QT_TRY(qt_ids_add(&w->places, (uint32_t)at, err));
    for (size_t i = w->places.count; i-- > 0;) {
        const size_t end = w->places.data[i], from = best[end].from;
        if (best[end].id == u->unk) {
            unknown = unknown == NO_PLACE ? from : unknown;
            continue;
        }
        if (unknown != NO_PLACE)
            QT_TRY(add_unknown(out, u, vocab, word + unknown, from - unknown, err));
        unknown = NO_PLACE;
        QT_TRY(qt_ids_add(out, best[end].id, err));
    }
    if (unknown != NO_PLACE)
        QT_TRY(add_unknown(out, u, vocab, word + unknown, size - unknown, err));
done:
    return rc;
}

int qt_unigram_encode(struct qt_ids *out, struct qt_bpe_work *w, const struct qt_unigram *u,
                      const struct qt_strmap *vocab, const char *word, size_t size,
                      struct qt_err *err)
{
    enum { POLL = 1 << 16 };
    int rc = QT_OK;
    if (size >= QT_NO_ID)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "a word of 4 GiB or more is not supported");
    QT_TRY(qt_array_grow(&w->best, &w->best_capacity, size + 1, sizeof *w->best, err));
    for (size_t i = 0; i <= size; i++)
        w->best[i] = (struct qt_best){.from = NO_PLACE};
    for (size_t at = 0, n; at < size; at += n) {
        qt_utf8_char(&n, word + at);
        QT_TRY(extend(w->best, u, word, size, at, n, err));
        if (at / POLL != (at + n) / POLL)
            QT_TRY(qt_tokenizer_poll(w->interrupted, err));
    }
    QT_TRY(append(out, w, u, vocab, w->best, word, size, err));
done:
    return rc;
}
