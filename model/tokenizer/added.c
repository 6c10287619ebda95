/*
 * Finds added tokens in a text: the leftmost one, and of several at one place the longest. The
 * tokens are sorted by text, so that tokens with a common prefix form a range. Each byte of the
 * text narrows the range.
 */
#include "model/tokenizer/internal.h"

#include <stdlib.h>
#include <string.h>

static int compare(const void *pa, const void *pb)
{
    const struct qt_added *a = pa, *b = pb;
    int order = memcmp(a->text, b->text, qt_min_size(a->size, b->size));
    if (order != 0)
        return order;
    if (a->size != b->size)
        return a->size < b->size ? -1 : 1;
    return a->order < b->order ? -1 : 1;
}

void qt_added_set_sort(struct qt_added_set *set)
{
    size_t kept = 0;
    if (set->count == 0)
        return;
    qsort(set->tokens, set->count, sizeof *set->tokens, compare);
    for (size_t i = 0; i < set->count; i++) {
        struct qt_added *t = &set->tokens[i], *last = kept ? &set->tokens[kept - 1] : NULL;
        if (last && last->size == t->size && memcmp(last->text, t->text, t->size) == 0)
            qt_free(t->text);
        else
            set->tokens[kept++] = *t;
    }
    set->count = kept;
    size_t i = 0;
    for (unsigned b = 0; b <= 256; b++) {
        while (i < kept && (unsigned char)set->tokens[i].text[0] < b)
            i++;
        set->first[b] = (uint32_t)i;
    }
}

void qt_added_set_free(struct qt_added_set *set)
{
    for (size_t i = 0; i < set->count; i++)
        qt_free(set->tokens[i].text);
    qt_free(set->tokens);
    *set = (struct qt_added_set){0};
}

/* Index of the first of tokens[lo, hi) whose byte at `depth` is >= b; all are longer than depth. */
static size_t lower_bound(const struct qt_added *tokens, size_t lo, size_t hi, size_t depth,
                          unsigned b)
{
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if ((unsigned char)tokens[mid].text[depth] < b)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static const struct qt_added *longest_at(const struct qt_added_set *set, const char *s, size_t size)
{
    const struct qt_added *found = NULL;
    unsigned b = (unsigned char)s[0];
    size_t lo = set->first[b], hi = set->first[b + 1];
    for (size_t depth = 1; lo < hi; depth++) {
        if (set->tokens[lo].size == depth)
            found = &set->tokens[lo++];
        if (depth == size)
            break;
        b = (unsigned char)s[depth];
        lo = lower_bound(set->tokens, lo, hi, depth, b);
        hi = lower_bound(set->tokens, lo, hi, depth, b + 1);
    }
    return found;
}

static bool stands_alone(const char *s, size_t size, size_t start, size_t end)
{
    size_t n;
    if (start > 0 && qt_char_is_word(qt_utf8_char(&n, s + qt_utf8_back(s, start))))
        return false;
    return end == size || !qt_char_is_word(qt_utf8_char(&n, s + end));
}

const struct qt_added *qt_added_next(size_t *start, size_t *end, size_t *from, size_t done,
                                     const struct qt_added_set *set, const char *s, size_t size,
                                     bool (*interrupted)(void))
{
    for (size_t i = *from; i < size; i++) {
        if (i % 65536 == 0 && interrupted && interrupted())
            return NULL;
        const struct qt_added *t = longest_at(set, s + i, size - i);
        if (!t)
            continue;
        *start = i;
        *end = *from = i + t->size;
        if (t->single_word && !stands_alone(s, size, *start, *end)) {
            i = *end - 1; /* the search continues after this occurrence */
            continue;
        }
        if (t->lstrip) {
            *start = qt_max_size(*start, done); /* rstrip of the previous token may overlap */
            while (*start > done) {
                size_t n, before = qt_utf8_back(s, *start);
                if (!qt_char_is_space(qt_utf8_char(&n, s + before)))
                    break;
                *start = before;
            }
        }
        if (t->rstrip)
            for (size_t n; *end < size && qt_char_is_space(qt_utf8_char(&n, s + *end));)
                *end += n;
        if (*start < *end)
            return t;
        i = *from - 1; /* white space that the previous token's rstrip has consumed */
    }
    return NULL;
}
