/*
 * Word -> ids. Characters become symbols in a doubly linked list; possible merges are kept in a
 * heap ordered by (rank, position). n symbols take O(n log n) time. All rules, unusual ones
 * included, are those of models/bpe of the Hugging Face `tokenizers` library, so that the ids are
 * equal.
 */
#include "model/tokenizer/bpe.h"

#include <string.h>

enum {
    PART_BYTES = 1 << 18,     /* of a long word, encoded at a time */
    PART_TOKEN_MAX = 1 << 10, /* with longer tokens, words are encoded whole */
    POLL_MERGES = 1 << 16,    /* merges between two looks at `interrupted` */
    CACHE_WORD_MAX = 64,      /* bytes; longer words rarely repeat */
    CACHE_WORDS_MAX = 1 << 18 /* words; bounds the memory */
};

struct qt_symbol {
    uint32_t id;
    uint32_t prev, next; /* index, or NONE */
    uint32_t end; /* offset of its end in the word, or UNKNOWN: an unknown character is the last */
};

struct qt_candidate {
    uint32_t rank, pos; /* pos: index of the left symbol */
    uint32_t id;        /* id of the merged symbol */
};

#define NONE    UINT32_MAX
#define UNKNOWN 0

int qt_ids_add(struct qt_ids *ids, uint32_t id, struct qt_err *err)
{
    int rc = qt_array_grow(&ids->data, &ids->capacity, ids->count + 1, sizeof id, err);
    if (rc == QT_OK)
        ids->data[ids->count++] = id;
    return rc;
}

void qt_bpe_work_free(struct qt_bpe_work *work)
{
    qt_free(work->symbols);
    qt_free(work->heap);
    qt_strmap_free(&work->cache);
    qt_free(work->cached.data);
    qt_free(work->places.data);
    qt_free(work->cuts.data);
    qt_free(work->key);
    qt_free(work->best);
    *work = (struct qt_bpe_work){0};
}

bool qt_bpe_enough(const struct qt_ids *out, const struct qt_bpe_work *work)
{
    return work->most && out->count >= work->most;
}

int qt_tokenizer_poll(bool (*interrupted)(void), struct qt_err *err)
{
    if (interrupted && interrupted())
        return qt_fail(err, QT_E_INTERRUPTED, NULL, NULL, "interrupted while text was tokenized");
    return QT_OK;
}

/* ---- heap ----------------------------------------------------------------------------------- */

static bool comes_before(const struct qt_candidate *a, const struct qt_candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->pos < b->pos;
}

static int heap_push(struct qt_bpe_work *w, struct qt_candidate c, struct qt_err *err)
{
    int rc = qt_array_grow(&w->heap, &w->heap_capacity, w->heap_count + 1, sizeof c, err);
    if (rc < 0)
        return rc;
    size_t i = w->heap_count++;
    for (; i > 0 && comes_before(&c, &w->heap[(i - 1) / 2]); i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = c;
    return QT_OK;
}

static struct qt_candidate heap_pop(struct qt_bpe_work *w)
{
    struct qt_candidate top = w->heap[0], last = w->heap[--w->heap_count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < w->heap_count; i = child) {
        if (child + 1 < w->heap_count && comes_before(&w->heap[child + 1], &w->heap[child]))
            child++;
        if (!comes_before(&w->heap[child], &last))
            break;
        w->heap[i] = w->heap[child];
    }
    w->heap[i] = last;
    return top;
}

/* ---- characters -> symbols ------------------------------------------------------------------ */

static int add_symbol(struct qt_bpe_work *w, uint32_t id, size_t end, struct qt_err *err)
{
    int rc = qt_array_grow(&w->symbols, &w->symbol_capacity, w->symbol_count + 1,
                           sizeof *w->symbols, err);
    if (rc < 0)
        return rc;
    uint32_t i = (uint32_t)w->symbol_count++;
    w->symbols[i] = (struct qt_symbol){id, i ? i - 1 : NONE, NONE, (uint32_t)end};
    if (i)
        w->symbols[i - 1].next = i;
    return QT_OK;
}

static size_t char_size(const char *s)
{
    unsigned char c = (unsigned char)*s;
    return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

/* The start of the character that covers s[at]. */
static size_t char_start(const char *s, size_t at)
{
    while (at > 0 && ((unsigned char)s[at] & 0xc0) == 0x80)
        at--;
    return at;
}

/* Adds the "<0xNN>" tokens of the character's bytes; false if one of them has no such token. */
static bool byte_fallback(int *rc, struct qt_bpe_work *w, const struct qt_bpe *bpe, const char *s,
                          size_t size, struct qt_err *err)
{
    for (size_t i = 0; i < size; i++)
        if (bpe->byte_ids[(unsigned char)s[i]] == QT_NO_ID)
            return false;
    for (size_t i = 0; i < size && *rc == QT_OK; i++)
        *rc = add_symbol(w, bpe->byte_ids[(unsigned char)s[i]], UNKNOWN, err);
    return true;
}

/* Replaces the character *s by the same with the affixes of its place in the word. */
static int add_affixes(const char **s, size_t *size, struct qt_bpe_work *w,
                       const struct qt_bpe *bpe, bool first, bool last, struct qt_err *err)
{
    const size_t before = first || !bpe->prefix ? 0 : strlen(bpe->prefix);
    const size_t after = last && bpe->suffix ? strlen(bpe->suffix) : 0;
    int rc = qt_array_grow(&w->key, &w->key_capacity, before + *size + after, 1, err);
    if (rc < 0)
        return rc;
    if (before)
        memcpy(w->key, bpe->prefix, before);
    memcpy(w->key + before, *s, *size);
    if (after)
        memcpy(w->key + before + *size, bpe->suffix, after);
    *s = w->key;
    *size += before + after;
    return QT_OK;
}

/*
 * A run of unknown characters becomes one unk symbol with fuse_unk, else one symbol per character.
 * As in the tokenizers library, a pending unk is added only before the next known character, after
 * the byte fallback symbols in between. Without an unk token, unknown characters are dropped.
 */
static int add_symbols(struct qt_bpe_work *w, const struct qt_bpe *bpe, const char *word,
                       size_t size, struct qt_err *err)
{
    bool unk_pending = false;
    int rc = QT_OK;
    w->symbol_count = 0;
    for (size_t i = 0, n; i < size; i += n) {
        n = char_size(word + i);
        const char *s = word + i;
        size_t bytes = n;
        if (bpe->prefix || bpe->suffix)
            QT_TRY(add_affixes(&s, &bytes, w, bpe, i == 0, i + n == size, err));
        uint32_t id = qt_strmap_find(&bpe->vocab, s, bytes);
        if (id != QT_NO_ID) {
            if (unk_pending)
                QT_TRY(add_symbol(w, bpe->unk, UNKNOWN, err));
            unk_pending = false;
            QT_TRY(add_symbol(w, id, i + n, err));
            continue;
        }
        if (bpe->byte_fallback && byte_fallback(&rc, w, bpe, s, bytes, err)) {
            QT_TRY(rc);
            continue;
        }
        if (!bpe->has_unk)
            continue;
        if (bpe->unk == QT_NO_ID)
            return qt_fail(err, QT_E_INPUT, bpe->file, NULL,
                           "the text needs unk_token, which is not in the vocabulary");
        if (unk_pending && !bpe->fuse_unk)
            QT_TRY(add_symbol(w, bpe->unk, UNKNOWN, err));
        unk_pending = true;
    }
    if (unk_pending)
        QT_TRY(add_symbol(w, bpe->unk, UNKNOWN, err));
done:
    return rc;
}

/* ---- merging -------------------------------------------------------------------------------- */

static int push_pair(struct qt_bpe_work *w, const struct qt_bpe *bpe, uint32_t left,
                     struct qt_err *err)
{
    uint32_t right = left == NONE ? NONE : w->symbols[left].next;
    if (right == NONE)
        return QT_OK;
    const struct qt_merge *m = qt_bpe_merge(bpe, w->symbols[left].id, w->symbols[right].id);
    return m ? heap_push(w, (struct qt_candidate){m->rank, left, m->id}, err) : QT_OK;
}

static int merge_symbols(struct qt_bpe_work *w, const struct qt_bpe *bpe, struct qt_err *err)
{
    struct qt_symbol *sym = w->symbols;
    int rc = QT_OK;
    size_t popped = 0;
    w->heap_count = 0;
    for (size_t i = 0; i + 1 < w->symbol_count; i++)
        QT_TRY(push_pair(w, bpe, (uint32_t)i, err));
    while (w->heap_count > 0) {
        struct qt_candidate c = heap_pop(w);
        struct qt_symbol *left = &sym[c.pos];
        if (++popped % POLL_MERGES == 0)
            QT_TRY(qt_tokenizer_poll(w->interrupted, err));
        if (left->id == QT_NO_ID || left->next == NONE)
            continue;
        struct qt_symbol *right = &sym[left->next];
        /* The candidate is stale unless the pair still merges to the same token. The rank is not
         * compared, as in the tokenizers library. */
        const struct qt_merge *m = qt_bpe_merge(bpe, left->id, right->id);
        if (!m || m->id != c.id)
            continue;
        left->id = c.id;
        left->next = right->next;
        left->end = right->end;
        right->id = QT_NO_ID;
        if (left->next != NONE)
            sym[left->next].prev = c.pos;
        QT_TRY(push_pair(w, bpe, left->prev, err));
        QT_TRY(push_pair(w, bpe, c.pos, err));
    }
done:
    return rc;
}

/* Encodes the text into a list of symbols. The first one always stays: merges keep the left one. */
static int encode_symbols(struct qt_bpe_work *w, const struct qt_bpe *bpe, const char *text,
                          size_t size, struct qt_err *err)
{
    int rc;
    if (size >= NONE)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                       "a word of 4 GiB or more is not supported");
    QT_TRY(add_symbols(w, bpe, text, size, err));
    QT_TRY(merge_symbols(w, bpe, err));
done:
    return rc;
}

static int append_symbols(struct qt_ids *out, const struct qt_bpe_work *w, struct qt_err *err)
{
    int rc = QT_OK;
    for (uint32_t i = w->symbol_count ? 0 : NONE; i != NONE; i = w->symbols[i].next)
        QT_TRY(qt_ids_add(out, w->symbols[i].id, err));
done:
    return rc;
}

/* ---- long words ----------------------------------------------------------------------------- */

/*
 * A long word is encoded in parts, so that the working memory does not grow with the word. The ids
 * are those of the whole word:
 *
 *   Where no merge crosses a place, the merges on its two sides do not depend on each other. So if
 *   the encoding of a text has a boundary at p, it is the encoding of the text before p, followed
 *   by that of the text from p on.
 *
 *   Take any place `end`. The encoding of the text has a boundary at `end`, or at the beginning p
 *   of the token that covers it. There are few such places: a token of the vocabulary must stand at
 *   p and reach beyond `end`. A boundary that the encodings of the texts before all of these places
 *   have in common is a boundary of the whole text.
 */

/* True if the `n` characters before and after the place are in the vocabulary: then every token
 * that covers the place is a string of the text. */
static bool all_known(const struct qt_bpe *bpe, const char *word, size_t size, size_t place,
                      size_t n)
{
    size_t at = place;
    for (size_t i = 0; i < n && at < size; i++) {
        const size_t bytes = char_size(word + at);
        if (qt_strmap_find(&bpe->vocab, word + at, bytes) == QT_NO_ID)
            return false;
        at += bytes;
    }
    at = place;
    for (size_t i = 0; i < n && at > 0; i++) {
        const size_t before = char_start(word, at - 1);
        if (qt_strmap_find(&bpe->vocab, word + before, at - before) == QT_NO_ID)
            return false;
        at = before;
    }
    return true;
}

/* w->places = `end` and all places before it at which a token begins that reaches beyond it. */
static int find_places(struct qt_bpe_work *w, const struct qt_bpe *bpe, const char *word,
                       size_t size, size_t end, struct qt_err *err)
{
    int rc;
    w->places.count = 0;
    QT_TRY(qt_ids_add(&w->places, (uint32_t)end, err));
    for (size_t p = end; p > 0 && end - p < bpe->longest;) {
        bool found = false;
        p = char_start(word, p - 1);
        const size_t most = qt_min_size(bpe->longest, size - p);
        for (size_t n = end - p + 1; n <= most && !found; n++)
            found = qt_strmap_find(&bpe->vocab, word + p, n) != QT_NO_ID;
        if (found)
            QT_TRY(qt_ids_add(&w->places, (uint32_t)p, err));
    }
done:
    return rc;
}

/* Chooses among some ends of a part of about `part` bytes the one with the fewest places; 0 if none
 * is suitable. */
static int choose_end(size_t *end, struct qt_bpe_work *w, const struct qt_bpe *bpe,
                      const char *word, size_t size, size_t part, struct qt_err *err)
{
    enum { TRIES = 8 };
    size_t fewest = SIZE_MAX;
    int rc = QT_OK;
    *end = 0;
    for (size_t i = 0; i < TRIES && fewest > 1; i++) {
        const size_t at = char_start(word, part - i * (part / 64) / TRIES);
        if (!all_known(bpe, word, size, at, bpe->longest))
            continue;
        QT_TRY(find_places(w, bpe, word, size, at, err));
        if (w->places.count < fewest) {
            fewest = w->places.count;
            *end = at;
        }
    }
    if (*end)
        QT_TRY(find_places(w, bpe, word, size, *end, err));
done:
    return rc;
}

/* Keeps of w->cuts (all: true: replaces them by) the boundaries of the symbols. */
static int keep_cuts(struct qt_bpe_work *w, bool all, struct qt_err *err)
{
    size_t kept = 0, k = 0;
    int rc = QT_OK;
    if (all)
        w->cuts.count = 0;
    for (uint32_t i = w->symbol_count ? 0 : NONE; i != NONE; i = w->symbols[i].next) {
        const uint32_t end = w->symbols[i].end;
        if (end == UNKNOWN)
            continue;
        if (all)
            QT_TRY(qt_ids_add(&w->cuts, end, err));
        while (!all && k < w->cuts.count && w->cuts.data[k] < end)
            k++;
        if (!all && k < w->cuts.count && w->cuts.data[k] == end)
            w->cuts.data[kept++] = end;
    }
    if (!all)
        w->cuts.count = kept;
done:
    return rc;
}

/* Appends the ids of the longest part of the word that is certain and sets *done to its size; 0: no
 * such part of at most `part` bytes was found. part < size. */
static int encode_part(size_t *done, struct qt_ids *out, struct qt_bpe_work *w,
                       const struct qt_bpe *bpe, const char *word, size_t size, size_t part,
                       struct qt_err *err)
{
    size_t end;
    int rc;
    *done = 0;
    QT_TRY(choose_end(&end, w, bpe, word, size, part, err));
    if (!end)
        goto done;
    for (size_t i = 0; i < w->places.count; i++) {
        QT_TRY(encode_symbols(w, bpe, word, w->places.data[i], err));
        QT_TRY(keep_cuts(w, i == 0, err));
    }
    if (w->cuts.count == 0 || w->cuts.data[w->cuts.count - 1] < part / 2) /* keeps it linear */
        goto done;
    *done = w->cuts.data[w->cuts.count - 1];
    if (w->places.count > 1)
        QT_TRY(encode_symbols(w, bpe, word, *done, err));
    QT_TRY(append_symbols(out, w, err));
done:
    return rc;
}

static int encode_word(struct qt_ids *out, struct qt_bpe_work *w, const struct qt_bpe *bpe,
                       const char *word, size_t size, struct qt_err *err)
{
    const bool whole = bpe->longest > PART_TOKEN_MAX || bpe->prefix || bpe->suffix;
    int rc;
    for (size_t part = PART_BYTES, done; part < size && !whole;) {
        QT_TRY(qt_tokenizer_poll(w->interrupted, err));
        QT_TRY(encode_part(&done, out, w, bpe, word, size, part, err));
        if (qt_bpe_enough(out, w))
            return QT_OK;
        part = done ? PART_BYTES : 2 * part;
        word += done;
        size -= done;
    }
    QT_TRY(encode_symbols(w, bpe, word, size, err));
    QT_TRY(append_symbols(out, w, err));
done:
    return rc;
}

/* ---- cache ---------------------------------------------------------------------------------- */

int qt_word_cache_add(struct qt_bpe_work *w, const char *word, size_t size, const uint32_t *ids,
                      size_t count, struct qt_err *err)
{
    uint32_t index = (uint32_t)w->cached.count;
    int rc;
    if (size > CACHE_WORD_MAX || w->cache.count >= CACHE_WORDS_MAX)
        return QT_OK;
    QT_TRY(qt_ids_add(&w->cached, (uint32_t)count, err));
    for (size_t i = 0; i < count; i++)
        QT_TRY(qt_ids_add(&w->cached, ids[i], err));
    QT_TRY(qt_strmap_add(&w->cache, word, size, index, err));
done:
    return rc;
}

int qt_word_cache_get(bool *found, struct qt_ids *out, const struct qt_bpe_work *w,
                      const char *word, size_t size, struct qt_err *err)
{
    const uint32_t index = size > CACHE_WORD_MAX ? QT_NO_ID : qt_strmap_find(&w->cache, word, size);
    *found = index != QT_NO_ID;
    if (!*found)
        return QT_OK;
    const uint32_t *hit = w->cached.data + index;
    int rc = qt_array_grow(&out->data, &out->capacity, out->count + hit[0], sizeof *hit, err);
    if (rc < 0)
        return rc;
    memcpy(out->data + out->count, hit + 1, hit[0] * sizeof *hit);
    out->count += hit[0];
    return QT_OK;
}

static int encode_cached(struct qt_ids *out, struct qt_bpe_work *w, const struct qt_bpe *bpe,
                         const char *word, size_t size, struct qt_err *err)
{
    size_t first = out->count;
    bool found;
    int rc;
    QT_TRY(qt_word_cache_get(&found, out, w, word, size, err));
    if (found)
        return QT_OK;
    QT_TRY(encode_word(out, w, bpe, word, size, err));
    rc = qt_word_cache_add(w, word, size, out->data + first, out->count - first, err);
done:
    return rc;
}

/* Returns the first U+2581 after s that follows another character, or `end`. */
static const char *next_cut(const char *s, const char *end)
{
    const char *mark = s;
    while ((mark = memmem(mark, (size_t)(end - mark), "\xe2\x96\x81", 3))) {
        if (mark > s && (mark - s < 3 || memcmp(mark - 3, "\xe2\x96\x81", 3) != 0))
            return mark;
        mark += 3;
    }
    return end;
}

int qt_bpe_encode(struct qt_ids *out, struct qt_bpe_work *work, const struct qt_bpe *bpe,
                  const char *word, size_t size, struct qt_err *err)
{
    if (bpe->ignore_merges) {
        uint32_t id = qt_strmap_find(&bpe->vocab, word, size);
        if (id != QT_NO_ID)
            return qt_ids_add(out, id, err);
    }
    return qt_bpe_encode_by_merges(out, work, bpe, word, size, err);
}

int qt_bpe_encode_by_merges(struct qt_ids *out, struct qt_bpe_work *work, const struct qt_bpe *bpe,
                            const char *word, size_t size, struct qt_err *err)
{
    const char *end = word + size;
    int rc = QT_OK;
    for (const char *cut; word < end && !qt_bpe_enough(out, work); word = cut) {
        QT_TRY(qt_tokenizer_poll(work->interrupted, err));
        cut = bpe->cut_at_space_mark ? next_cut(word, end) : end;
        QT_TRY(encode_cached(out, work, bpe, word, (size_t)(cut - word), err));
    }
done:
    return rc;
}
