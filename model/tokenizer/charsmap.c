/*
 * SentencePiece's normalization. precompiled_charsmap: the size of a trie in bytes (32 bits), the
 * trie, and strings that end with a NUL. The trie is a double array of 32-bit units (darts-clone):
 *
 *   bits 0-7, 31   label, the byte that leads to the unit   bit 8   a leaf follows, at offset ^ 0
 *   bits 10-30     offset, times 256 if bit 9 is set        leaf    bits 0-30: place of the string
 */
#include "model/tokenizer/internal.h"

#include <string.h>
#include <utf8proc.h>

struct qt_charsmap {
    uint32_t *units;
    size_t unit_count;
    char *strings; /* [strings_size], the last byte is a NUL */
    size_t strings_size;
    struct qt_charsmap_rules rules;
};

static uint32_t load32(const char *p)
{
    const unsigned char *u = (const unsigned char *)p;
    return (uint32_t)u[0] | (uint32_t)u[1] << 8 | (uint32_t)u[2] << 16 | (uint32_t)u[3] << 24;
}

int qt_charsmap_new(struct qt_charsmap **out, const char *data, size_t size,
                    const struct qt_charsmap_rules *rules, const char *file, struct qt_err *err)
{
    struct qt_charsmap *m = NULL;
    size_t trie = size >= 4 ? load32(data) : 0;
    int rc;
    *out = NULL;
    if (size &&
        (size < 4 || trie % 4 || trie > size - 4 || size - 4 - trie == 0 || data[size - 1] != '\0'))
        return qt_fail(err, QT_E_INPUT, file, NULL, "precompiled_charsmap is damaged");
    QT_TRY(qt_array_new(&m, 1, sizeof *m, err));
    m->rules = *rules;
    m->unit_count = trie / 4;
    m->strings_size = size ? size - 4 - trie : 0;
    QT_TRY(qt_array_new(&m->units, m->unit_count + 1, sizeof *m->units, err));
    QT_TRY(qt_array_new(&m->strings, m->strings_size + 1, 1, err));
    for (size_t i = 0; i < m->unit_count; i++)
        m->units[i] = load32(data + 4 + 4 * i);
    if (size)
        memcpy(m->strings, data + 4 + trie, m->strings_size);
    *out = m;
    m = NULL;
done:
    qt_charsmap_free(m);
    return rc;
}

void qt_charsmap_free(struct qt_charsmap *map)
{
    if (!map)
        return;
    qt_free(map->units);
    qt_free(map->strings);
    qt_free(map);
}

static size_t offset_of(uint32_t unit)
{
    return (size_t)(unit >> 10) << ((unit & 1u << 9) >> 6);
}

/* The string that replaces a beginning of s[size], the shortest or the longest that the trie has;
 * NULL: none. *used = its length. */
static const char *find(size_t *used, const struct qt_charsmap *m, const char *s, size_t size,
                        bool longest)
{
    const char *found = NULL;
    size_t at = 0;
    if (m->unit_count == 0)
        return NULL;
    at = offset_of(m->units[0]);
    for (size_t i = 0; i < size && s[i]; i++) {
        at ^= (unsigned char)s[i];
        if (at >= m->unit_count || (m->units[at] & 0x800000ff) != (unsigned char)s[i])
            break;
        const uint32_t unit = m->units[at];
        at ^= offset_of(unit);
        if (!(unit >> 8 & 1) || at >= m->unit_count)
            continue;
        const uint32_t place = m->units[at] & 0x7fffffff;
        if (place >= m->strings_size)
            continue;
        found = m->strings + place;
        *used = i + 1;
        if (!longest)
            break;
    }
    return found;
}

/* ---- as the tokenizers library -------------------------------------------------------------- */

/* Appends the string for all of s[size], a grapheme cluster or a character; false: there is none. A
 * match of its beginning replaces all of it. */
static bool replace(int *rc, struct qt_text *out, const struct qt_charsmap *m, const char *s,
                    size_t size, struct qt_err *err)
{
    size_t used;
    const char *to = find(&used, m, s, size, false);
    if (to)
        *rc = qt_text_add(out, to, strlen(to), err);
    return to != NULL;
}

static size_t cluster_size(const char *s, size_t size)
{
    utf8proc_int32_t state = 0;
    size_t n, at;
    int32_t c = qt_utf8_char(&at, s);
    while (at < size) {
        const int32_t next = qt_utf8_char(&n, s + at);
        if (utf8proc_grapheme_break_stateful(c, next, &state))
            break;
        c = next;
        at += n;
    }
    return at;
}

static int run_clusters(struct qt_text *out, size_t *head, const struct qt_charsmap *m,
                        const char *s, size_t size, struct qt_err *err)
{
    enum { CLUSTER_MAX = 6 }; /* longer clusters are taken character by character */
    int rc = QT_OK;
    for (size_t at = 0, n; at < size; at += n) {
        n = (unsigned char)s[at] < 0x80 && at + 1 < size && (unsigned char)s[at + 1] < 0x80 &&
                    s[at] != '\r'
                ? 1
                : cluster_size(s + at, size - at);
        if (n < CLUSTER_MAX && replace(&rc, out, m, s + at, n, err)) {
            QT_TRY(rc);
        } else {
            for (size_t i = 0, bytes; i < n; i += bytes) {
                qt_utf8_char(&bytes, s + at + i);
                if (!replace(&rc, out, m, s + at + i, bytes, err))
                    rc = qt_text_add(out, s + at + i, bytes, err);
                QT_TRY(rc);
            }
        }
        if (at == 0)
            *head = out->size;
    }
done:
    return rc;
}

/* ---- as the sentencepiece library ----------------------------------------------------------- */

#define SPACE_MARK "\xe2\x96\x81" /* U+2581 */

/* What stands for the beginning of s[size]; *used = its length. */
static const char *next_part(size_t *bytes, size_t *used, const struct qt_charsmap *m,
                             const char *s, size_t size)
{
    const char *to = find(used, m, s, size, true);
    if (to) {
        *bytes = strlen(to);
        return to;
    }
    qt_utf8_char(used, s);
    *bytes = *used;
    return s;
}

static int add_part(struct qt_text *out, const char *s, size_t size, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < size; i++)
        QT_TRY(s[i] == ' ' ? qt_text_add(out, SPACE_MARK, 3, err)
                           : qt_text_add(out, s + i, 1, err));
done:
    return rc;
}

static int run_text(struct qt_text *out, const struct qt_charsmap *m, const char *s, size_t size,
                    bool first, struct qt_err *err)
{
    const bool collapse = m->rules.collapse;
    bool after_space = collapse && first;
    size_t at = 0, used, bytes, start = out->size;
    int rc = QT_OK;
    while (first && collapse && at < size) {
        const char *part = next_part(&bytes, &used, m, s + at, size - at);
        if (bytes != 1 || *part != ' ')
            break;
        at += used;
    }
    if (first && m->rules.prefix && at < size)
        QT_TRY(qt_text_add(out, SPACE_MARK, 3, err));
    for (; at < size; at += used) {
        const char *part = next_part(&bytes, &used, m, s + at, size - at);
        for (; after_space && bytes && *part == ' '; part++)
            bytes--;
        QT_TRY(add_part(out, part, bytes, err));
        if (bytes)
            after_space = collapse && part[bytes - 1] == ' ';
    }
    while (collapse && out->size - start >= 3 &&
           memcmp(out->data + out->size - 3, SPACE_MARK, 3) == 0)
        out->size -= 3;
done:
    return rc;
}

int qt_charsmap_run(struct qt_text *out, size_t *head, const struct qt_charsmap *map, const char *s,
                    size_t size, struct qt_err *err)
{
    const bool first = *head > 0;
    size_t all = 0;
    int rc = map->rules.whole ? run_text(out, map, s, size, first, err)
                              : run_clusters(out, &all, map, s, size, err);
    *head = !first ? 0 : map->rules.whole ? out->size : all;
    return rc;
}
