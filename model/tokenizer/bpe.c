/*
 * Word -> ids. Characters become symbols in a doubly linked list; possible merges wait in a heap
 * by (rank, position). n symbols cost O(n log n), however long the word. The rules, oddities
 * included, are those of the `tokenizers` library (its models/bpe): ids must be equal to its ids.
 */
#include "model/tokenizer/bpe.h"

#include <string.h>

enum {
    CACHE_WORD_MAX = 64,      /* longer words hardly repeat */
    CACHE_WORDS_MAX = 1 << 18 /* bounds the memory, not the text */
};

struct qt_symbol {
    uint32_t id;
    uint32_t prev, next; /* index, or NONE */
    uint32_t alive;
};

struct qt_candidate {
    uint32_t rank, pos; /* of the left symbol */
    uint32_t id;        /* what it would become */
};

#define NONE UINT32_MAX

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
    *work = (struct qt_bpe_work){0};
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

static int add_symbol(struct qt_bpe_work *w, uint32_t id, struct qt_err *err)
{
    int rc = qt_array_grow(&w->symbols, &w->symbol_capacity, w->symbol_count + 1,
                           sizeof *w->symbols, err);
    if (rc < 0)
        return rc;
    uint32_t i = (uint32_t)w->symbol_count++;
    w->symbols[i] = (struct qt_symbol){id, i ? i - 1 : NONE, NONE, 1};
    if (i)
        w->symbols[i - 1].next = i;
    return QT_OK;
}

static size_t char_size(const char *s)
{
    unsigned char c = (unsigned char)*s;
    return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

/* True when every byte of the character has a "<0xNN>" token; then they have been added. */
static bool byte_fallback(int *rc, struct qt_bpe_work *w, const struct qt_bpe *bpe, const char *s,
                          size_t size, struct qt_err *err)
{
    for (size_t i = 0; i < size; i++)
        if (bpe->byte_ids[(unsigned char)s[i]] == QT_NO_ID)
            return false;
    for (size_t i = 0; i < size && *rc == QT_OK; i++)
        *rc = add_symbol(w, bpe->byte_ids[(unsigned char)s[i]], err);
    return true;
}

/*
 * A run of unknown characters is one unk symbol with fuse_unk, else one each. The pending unk is
 * written only before the next *known* character: bytes of a fallback in between overtake it.
 * Without unk token unknown characters vanish.
 */
static int add_symbols(struct qt_bpe_work *w, const struct qt_bpe *bpe, const char *word,
                       size_t size, struct qt_err *err)
{
    bool unk_pending = false;
    int rc = QT_OK;
    w->symbol_count = 0;
    for (size_t i = 0, n; i < size; i += n) {
        n = char_size(word + i);
        uint32_t id = qt_strmap_find(&bpe->vocab, word + i, n);
        if (id != QT_NO_ID) {
            if (unk_pending)
                QT_TRY(add_symbol(w, bpe->unk, err));
            unk_pending = false;
            QT_TRY(add_symbol(w, id, err));
            continue;
        }
        if (bpe->byte_fallback && byte_fallback(&rc, w, bpe, word + i, n, err)) {
            QT_TRY(rc);
            continue;
        }
        if (!bpe->has_unk)
            continue;
        if (bpe->unk == QT_NO_ID)
            return qt_fail(err, QT_E_INPUT, bpe->file, NULL,
                           "the text needs unk_token, which is not in the vocabulary");
        if (unk_pending && !bpe->fuse_unk)
            QT_TRY(add_symbol(w, bpe->unk, err));
        unk_pending = true;
    }
    if (unk_pending)
        QT_TRY(add_symbol(w, bpe->unk, err));
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
    w->heap_count = 0;
    for (size_t i = 0; i + 1 < w->symbol_count; i++)
        QT_TRY(push_pair(w, bpe, (uint32_t)i, err));
    while (w->heap_count > 0) {
        struct qt_candidate c = heap_pop(w);
        struct qt_symbol *left = &sym[c.pos];
        if (!left->alive || left->next == NONE)
            continue;
        struct qt_symbol *right = &sym[left->next];
        /* Outdated unless the pair still makes the same token. That the rank may differ by now is
         * how the tokenizers library does it, too. */
        const struct qt_merge *m = qt_bpe_merge(bpe, left->id, right->id);
        if (!m || m->id != c.id)
            continue;
        left->id = c.id;
        left->next = right->next;
        right->alive = 0;
        if (left->next != NONE)
            sym[left->next].prev = c.pos;
        QT_TRY(push_pair(w, bpe, left->prev, err));
        QT_TRY(push_pair(w, bpe, c.pos, err));
    }
done:
    return rc;
}

static int encode_word(struct qt_ids *out, struct qt_bpe_work *w, const struct qt_bpe *bpe,
                       const char *word, size_t size, struct qt_err *err)
{
    int rc;
    if (size >= NONE)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "a word of 4 GiB or more");
    QT_TRY(add_symbols(w, bpe, word, size, err));
    QT_TRY(merge_symbols(w, bpe, err));
    /* The first symbol never dies: merges keep the left one. */
    for (uint32_t i = w->symbol_count ? 0 : NONE; i != NONE; i = w->symbols[i].next)
        QT_TRY(qt_ids_add(out, w->symbols[i].id, err));
done:
    return rc;
}

/* ---- cache ---------------------------------------------------------------------------------- */

static int cache_add(struct qt_bpe_work *w, const char *word, size_t size, const uint32_t *ids,
                     size_t count, struct qt_err *err)
{
    uint32_t index = (uint32_t)w->cached.count;
    int rc;
    QT_TRY(qt_ids_add(&w->cached, (uint32_t)count, err));
    for (size_t i = 0; i < count; i++)
        QT_TRY(qt_ids_add(&w->cached, ids[i], err));
    QT_TRY(qt_strmap_add(&w->cache, word, size, index, err));
done:
    return rc;
}

static int encode_cached(struct qt_ids *out, struct qt_bpe_work *w, const struct qt_bpe *bpe,
                         const char *word, size_t size, struct qt_err *err)
{
    size_t first = out->count;
    int rc;
    if (size > CACHE_WORD_MAX)
        return encode_word(out, w, bpe, word, size, err);
    uint32_t index = qt_strmap_find(&w->cache, word, size);
    if (index != QT_NO_ID) {
        const uint32_t *hit = w->cached.data + index;
        QT_TRY(qt_array_grow(&out->data, &out->capacity, out->count + hit[0], sizeof *hit, err));
        memcpy(out->data + out->count, hit + 1, hit[0] * sizeof *hit);
        out->count += hit[0];
        return QT_OK;
    }
    QT_TRY(encode_word(out, w, bpe, word, size, err));
    if (w->cache.count < CACHE_WORDS_MAX)
        QT_TRY(cache_add(w, word, size, out->data + first, out->count - first, err));
done:
    return rc;
}

/* Where the next U+2581 after something else begins, beyond s; `end` when there is none. */
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
    const char *end = word + size;
    int rc = QT_OK;
    if (bpe->ignore_merges) {
        uint32_t id = qt_strmap_find(&bpe->vocab, word, size);
        if (id != QT_NO_ID)
            return qt_ids_add(out, id, err);
    }
    for (const char *cut; word < end; word = cut) {
        cut = bpe->cut_at_space_mark ? next_cut(word, end) : end;
        QT_TRY(encode_cached(out, work, bpe, word, (size_t)(cut - word), err));
    }
done:
    return rc;
}
