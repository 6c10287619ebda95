/*
 * Characters and normalization forms of Unicode 16, whatever the versions of PCRE2 and utf8proc
 * are: token ids must not depend on the machine. Both libraries agree on the characters of Unicode
 * 9, because Unicode promises not to change what has a decomposition, a class or a case.
 * unicode_tables.h has what came later; characters that came after Unicode 16 count as unassigned.
 * For PCRE2, a character that it does not know is replaced by one like it, of as many bytes.
 *
 * The tokenizers library normalizes with tables of an older Unicode: a few later characters
 * compose, decompose or reorder here and are unchanged there.
 */
#include "model/tokenizer/internal.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "model/tokenizer/unicode_tables.h"

#define LENGTH(array) (sizeof(array) / sizeof *(array))

enum { POLL_BYTES = 1 << 16 }; /* between two looks at `interrupted` */

/* ---- UTF-8 ---------------------------------------------------------------------------------- */

size_t qt_utf8_cut(const char *s, size_t size)
{
    for (size_t n = 1; n <= 3 && n <= size; n++) {
        const unsigned char c = (unsigned char)s[size - n];
        if (c >= 0xc0)
            return (c < 0xe0 ? 2u : c < 0xf0 ? 3u : 4u) > n ? n : 0;
        if (c < 0x80)
            return 0;
    }
    return 0;
}

int32_t qt_utf8_char(size_t *bytes, const char *s)
{
    const unsigned char *p = (const unsigned char *)s;
    *bytes = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    switch (*bytes) {
    case 1:
        return p[0];
    case 2:
        return (p[0] & 0x1f) << 6 | (p[1] & 0x3f);
    case 3:
        return (p[0] & 0xf) << 12 | (p[1] & 0x3f) << 6 | (p[2] & 0x3f);
    default:
        return (p[0] & 7) << 18 | (p[1] & 0x3f) << 12 | (p[2] & 0x3f) << 6 | (p[3] & 0x3f);
    }
}

size_t qt_utf8_back(const char *s, size_t end)
{
    do
        end--;
    while (end > 0 && (s[end] & 0xc0) == 0x80);
    return end;
}

int qt_text_add(struct qt_text *text, const char *s, size_t size, struct qt_err *err)
{
    size_t need;
    if (qt_add_overflow(&need, text->size, size) || (text->limit && need > text->limit))
        return qt_fail(err, QT_E_INPUT, NULL, NULL,
                       "the tokenizer's normalizers expand the text beyond %zu bytes", text->limit);
    int rc = qt_array_grow(&text->data, &text->capacity, need, 1, err);
    if (rc == QT_OK && need / POLL_BYTES != text->size / POLL_BYTES)
        rc = qt_tokenizer_poll(text->interrupted, err);
    if (rc < 0)
        return rc;
    if (size)
        memcpy(text->data + text->size, s, size);
    text->size = need;
    return QT_OK;
}

int qt_text_add_char(struct qt_text *text, int32_t c, struct qt_err *err)
{
    utf8proc_uint8_t utf8[4];
    return qt_text_add(text, (char *)utf8, (size_t)utf8proc_encode_char(c, utf8), err);
}

/* ---- Unicode 16 ----------------------------------------------------------------------------- */

/* Rows of all tables begin with a character (or the first of a range) and ascend. */
static int by_first(const void *key, const void *row)
{
    uint32_t c, first;
    memcpy(&c, key, sizeof c);
    memcpy(&first, row, sizeof first);
    return (c > first) - (c < first);
}

/* The row of c in a table of pairs, or NULL. */
static const uint32_t *find_row(const void *table, size_t n, size_t size, int32_t c)
{
    const uint32_t key = (uint32_t)c;
    return bsearch(&key, table, n, size, by_first);
}

/* The last row that begins at or before c, or NULL. */
static const void *find_range(const void *table, size_t n, size_t size, int32_t c)
{
    size_t from = 0, to = n;
    while (from < to) {
        const size_t mid = from + (to - from) / 2;
        uint32_t first;
        memcpy(&first, (const char *)table + mid * size, sizeof first);
        if (first <= (uint32_t)c)
            from = mid + 1;
        else
            to = mid;
    }
    return from ? (const char *)table + (from - 1) * size : NULL;
}

static const struct unicode_new *find_new(int32_t c)
{
    const struct unicode_new *r =
        find_range(unicode_new, LENGTH(unicode_new), sizeof *unicode_new, c);
    return r && (uint32_t)c <= r->last ? r : NULL;
}

static bool is_unassigned(int32_t c)
{
    const uint32_t *r = find_range(unicode_gaps, LENGTH(unicode_gaps), sizeof *unicode_gaps, c);
    return r && (uint32_t)c <= r[1];
}

/* True if utf8proc may not be asked about c. */
static bool is_recent(int32_t c)
{
    return c >= (int32_t)unicode_new[0].first && (find_new(c) || is_unassigned(c));
}

static utf8proc_category_t category_of(int32_t c)
{
    const struct unicode_new *r = find_new(c);
    if (r)
        return (utf8proc_category_t)r->category;
    return is_unassigned(c) ? UTF8PROC_CATEGORY_CN : utf8proc_category(c);
}

struct qt_unicode_known qt_unicode_known_to_pcre2(void)
{
    char text[32] = "";
    struct qt_unicode_known known = {0};
    char *dot;
    if (pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, NULL) < (int)sizeof text)
        pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, text);
    const unsigned long major = strtoul(text, &dot, 10);
    const unsigned long minor = *dot == '.' ? strtoul(dot + 1, NULL, 10) : 0;
    for (unsigned i = 1; i < LENGTH(unicode_versions); i++)
        if (major > unicode_versions[i].major ||
            (major == unicode_versions[i].major && minor >= unicode_versions[i].minor))
            known.version = i;
    known.newer = major > unicode_versions[LENGTH(unicode_versions) - 1].major;
    return known;
}

/* A character that no version of Unicode assigns, of as many bytes as c. (There is none of two
 * bytes: U+0378 is unassigned in Unicode 17.) */
static int32_t nothing_like(int32_t c)
{
    return c < 0x800 ? 0x378 : c < 0x10000 ? 0xfdd0 : 0x1fffe;
}

int qt_unicode_shadow(const char **out, struct qt_text *buffer, struct qt_unicode_known known,
                      const char *s, size_t size, struct qt_err *err)
{
    const unsigned char first = 0xd5; /* lead byte of the first new character */
    int rc = QT_OK;
    *out = s;
    buffer->size = 0;
    for (size_t i = 0, n; i < size; i += n) {
        n = 1;
        if ((unsigned char)s[i] < first)
            continue;
        const int32_t c = qt_utf8_char(&n, s + i);
        const struct unicode_new *r = find_new(c);
        const int32_t stand_in = r && r->since > known.version     ? (int32_t)r->stand_in
                                 : known.newer && is_unassigned(c) ? nothing_like(c)
                                                                   : c;
        if (stand_in == c)
            continue;
        if (buffer->size == 0) {
            QT_TRY(qt_text_add(buffer, s, size, err));
            *out = buffer->data;
        }
        utf8proc_encode_char(stand_in, (utf8proc_uint8_t *)buffer->data + i);
    }
done:
    return rc;
}

/* ---- properties ----------------------------------------------------------------------------- */

bool qt_char_is_space(int32_t c)
{
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
           c == 0x205f || c == 0x3000;
}

bool qt_char_is_word(int32_t c)
{
    switch (category_of(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default: /* circled and squared letters; ZWNJ, ZWJ */
        return (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) ||
               (c >= 0x1f150 && c <= 0x1f169) || (c >= 0x1f170 && c <= 0x1f189) || c == 0x200c ||
               c == 0x200d;
    }
}

static int32_t lower_of(int32_t c)
{
    const uint32_t *r = find_row(unicode_lower, LENGTH(unicode_lower), sizeof *unicode_lower, c);
    return r ? (int32_t)r[1] : is_recent(c) ? c : utf8proc_tolower(c);
}

int qt_unicode_lower(struct qt_text *out, const char *s, size_t size, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0, n; i < size; i += n) {
        int32_t c = qt_utf8_char(&n, s + i);
        if (c == 0x130) /* the only character whose lower case has two characters */
            QT_TRY(qt_text_add(out, "i\xcc\x87", 3, err));
        else
            QT_TRY(qt_text_add_char(out, lower_of(c), err));
    }
done:
    return rc;
}

/* ---- normalization forms -------------------------------------------------------------------- */

struct marks {
    utf8proc_int32_t *chars;
    size_t count, capacity;
    utf8proc_int32_t *sorted;
    size_t sorted_capacity;
};

static unsigned class_of(utf8proc_int32_t c)
{
    if (!is_recent(c))
        return (unsigned)utf8proc_get_property(c)->combining_class;
    const uint32_t *r = find_row(unicode_marks, LENGTH(unicode_marks), sizeof *unicode_marks, c);
    return r ? r[1] : 0;
}

/* Canonical order: sorts a run of combining marks by class, stably. Counting sort, because
 * utf8proc's own sort is quadratic and a hostile text may consist of marks. */
static int order_run(struct marks *m, size_t first, size_t end, struct qt_err *err)
{
    bool ordered = true;
    for (size_t i = first + 1; i < end && ordered; i++)
        ordered = class_of(m->chars[i - 1]) <= class_of(m->chars[i]);
    if (ordered)
        return QT_OK;
    size_t n = end - first, at[257] = {0};
    int rc = qt_array_grow(&m->sorted, &m->sorted_capacity, n, sizeof *m->sorted, err);
    if (rc < 0)
        return rc;
    for (size_t i = first; i < end; i++)
        at[class_of(m->chars[i]) + 1]++;
    for (size_t k = 1; k < 257; k++)
        at[k] += at[k - 1];
    for (size_t i = first; i < end; i++)
        m->sorted[at[class_of(m->chars[i])]++] = m->chars[i];
    memcpy(m->chars + first, m->sorted, n * sizeof *m->sorted);
    return QT_OK;
}

static int order_marks(struct marks *m, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0, end; i < m->count; i = end + 1) {
        for (end = i; end < m->count && class_of(m->chars[end]) != 0; end++)
            ;
        QT_TRY(order_run(m, i, end, err));
    }
done:
    return rc;
}

/* Appends the decomposition of a recent character, or the character. */
static void decompose_recent(struct marks *m, int32_t c, bool compat)
{
    enum { ROWS = sizeof unicode_decompositions / sizeof *unicode_decompositions };
    const struct unicode_decomposition *found = NULL, *row = unicode_decompositions;
    /* The first of at most two rows: the other one is for compatibility. */
    size_t i = 0;
    for (size_t to = ROWS; i < to;) {
        const size_t mid = i + (to - i) / 2;
        if (row[mid].c < (uint32_t)c)
            i = mid + 1;
        else
            to = mid;
    }
    for (; i < ROWS && row[i].c == (uint32_t)c; i++)
        if (compat || !row[i].compat)
            found = &row[i];
    if (!found)
        m->chars[m->count++] = c;
    for (size_t k = 0; found && k < UNICODE_LONGEST && found->to[k]; k++)
        m->chars[m->count++] = (int32_t)found->to[k];
}

/* The character that a and b compose, or 0. */
static int32_t composite(int32_t a, int32_t b)
{
    utf8proc_int32_t pair[3] = {a, b, 0};
    for (size_t i = 0; i < LENGTH(unicode_pairs); i++)
        if (unicode_pairs[i][0] == (uint32_t)a && unicode_pairs[i][1] == (uint32_t)b)
            return (int32_t)unicode_pairs[i][2];
    if (is_recent(a) || is_recent(b) ||
        utf8proc_normalize_utf32(pair, 2, UTF8PROC_COMPOSE | UTF8PROC_STABLE) != 1)
        return 0;
    return pair[0];
}

/* Canonical composition of n characters in canonical order. Returns their number. */
static size_t compose(int32_t *chars, size_t n)
{
    size_t out = 0, starter = SIZE_MAX;
    unsigned last = 0; /* class of the last mark that was kept after the starter */
    for (size_t i = 0; i < n; i++) {
        const int32_t c = chars[i];
        const unsigned class = class_of(c);
        const bool reached = starter != SIZE_MAX && (out == starter + 1 || last < class);
        const int32_t whole = reached ? composite(chars[starter], c) : 0;
        if (whole) {
            chars[starter] = whole;
            continue;
        }
        if (class == 0)
            starter = out;
        last = class;
        chars[out++] = c;
    }
    return out;
}

static int decompose(struct marks *m, const char *s, size_t size, bool compat,
                     bool (*interrupted)(void), struct qt_err *err)
{
    enum { LONGEST = 32 }; /* Unicode's longest compatibility decomposition has 18 characters */
    utf8proc_option_t options =
        (utf8proc_option_t)(UTF8PROC_DECOMPOSE | (compat ? UTF8PROC_COMPAT : 0));
    int rc = QT_OK, boundary = 0;
    for (size_t i = 0, n; i < size; i += n) {
        int32_t c = qt_utf8_char(&n, s + i);
        if (i / POLL_BYTES != (i + n) / POLL_BYTES)
            QT_TRY(qt_tokenizer_poll(interrupted, err));
        QT_TRY(qt_array_grow(&m->chars, &m->capacity, m->count + LONGEST, sizeof c, err));
        if (is_recent(c)) {
            decompose_recent(m, c, compat);
            continue;
        }
        utf8proc_ssize_t k =
            utf8proc_decompose_char(c, m->chars + m->count, LONGEST, options, &boundary);
        if (k < 0 || k > LONGEST) {
            rc = qt_fail(err, QT_E_INTERNAL, NULL, NULL, "utf8proc: U+%04X", (unsigned)c);
            goto done;
        }
        m->count += (size_t)k;
    }
done:
    return rc;
}

static int normalize_span(struct qt_text *out, struct marks *m, const char *s, size_t size,
                          enum qt_unicode_form form, struct qt_err *err)
{
    int rc;
    m->count = 0;
    QT_TRY(decompose(m, s, size, form == QT_NFKC || form == QT_NFKD, out->interrupted, err));
    QT_TRY(order_marks(m, err));
    if (form == QT_NFC || form == QT_NFKC)
        m->count = compose(m->chars, m->count);
    for (size_t i = 0; i < m->count; i++)
        QT_TRY(qt_text_add_char(out, m->chars[i], err));
done:
    return rc;
}

/* ASCII characters never change and never compose with the preceding character. Only spans of other
 * characters are normalized, each with the ASCII character before it, a possible base. */
int qt_unicode_normalize(struct qt_text *out, const char *s, size_t size, enum qt_unicode_form form,
                         struct qt_err *err)
{
    struct marks m = {0};
    int rc = QT_OK;
    for (size_t i = 0, plain, end; i < size; i = end) {
        for (plain = i; plain < size && !(s[plain] & 0x80); plain++)
            ;
        for (end = plain; end < size && (s[end] & 0x80); end++)
            ;
        size_t span = end > plain && plain > i ? plain - 1 : plain;
        QT_TRY(qt_text_add(out, s + i, span - i, err));
        QT_TRY(normalize_span(out, &m, s + span, end - span, form, err));
    }
done:
    qt_free(m.chars);
    qt_free(m.sorted);
    return rc;
}
