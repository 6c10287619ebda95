/*
 * Patterns in tokenizer.json are Oniguruma patterns (Ruby syntax). They are rewritten into
 * equivalent PCRE2 patterns. A construct without an equivalent is an error that names it. The
 * differences:
 *
 *   \s   Oniguruma: White_Space. PCRE2 with UCP also takes U+180E.
 *   \w   Oniguruma: Alphabetic, M, Nd, Pc (and No below U+0100). PCRE2 before 10.43: L, N, "_".
 *   \v   Oniguruma: U+000B. PCRE2: a class. \h, \R, \K, \b...: refused.
 *   ^ $ .   Oniguruma: lines, always; a newline is U+000A only.
 *   {n}+ {n}?    Oniguruma: a second quantifier. PCRE2: possessive, lazy. Refused.
 *   [a[b]] [a&&b]   Oniguruma: nested sets, intersections. PCRE2: alternatives, lookaheads.
 *   [[:alpha:]]     refused.
 *   \p{Han}      Oniguruma: the script. PCRE2 from 10.40 on: script extensions, unless "sc:".
 *   (?i)    Oniguruma: full case folding ("ss" = U+00DF). PCRE2: simple. Refused where they differ.
 *
 * Character classes are those of Unicode 16, whatever PCRE2 has been built with (unicode.c).
 */
#include "model/tokenizer/internal.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <ctype.h>
#include <pcre2.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

enum {
    WINDOW = 4096,     /* bytes of text that the first try of a match may look at */
    MATCH_LIMIT = 256, /* backtracking steps of the first try */
    WINDOW_GROWS = 4,  /* factors to the next try */
    LIMIT_GROWS = 8,
    STEPS_MIN = 1 << 24,         /* of all tries in a text: this many, */
    STEPS_PER_BYTE = 256,        /* and this many for each byte of it */
    HEAP_LIMIT_KIB = 256 * 1024, /* of the interpreter, used without JIT */
    JIT_STACK_MIN = 32 * 1024,
    JIT_STACK_MAX = 64 * 1024 * 1024,
};

#define SPACE_RANGES                                                                               \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}"             \
    "\\x{202f}\\x{205f}\\x{3000}"
#define NO_SPACE_RANGES                                                                            \
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{"     \
    "1fff}"                                                                                        \
    "\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}"                 \
    "\\x{3001}-\\x{10ffff}"
/* Alphabetic = L + Nl + marks + the circled and squared letters among the symbols. */
#define WORD_RANGES                                                                                \
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}\\x{24b6}-\\x{24e9}"     \
    "\\x{1f130}-\\x{1f149}\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{1f189}"

/* ---- rewriting ------------------------------------------------------------------------------ */

struct rewrite {
    const char *file, *pattern;
    const char *p; /* next character */
    struct qt_text out;
    size_t depth, icase_depth; /* open parentheses; depth of the current (?i:...), or 0 */
    bool icase;
    struct qt_err *err;
};

static int refuse(struct rewrite *r, const char *what)
{
    return qt_fail(r->err, QT_E_UNSUPPORTED, r->file, NULL,
                   "%s at offset %zu of the regex '%.300s' is not supported", what,
                   (size_t)(r->p - r->pattern), r->pattern);
}

static int put(struct rewrite *r, const char *s)
{
    return qt_text_add(&r->out, s, strlen(s), r->err);
}

static int take(struct rewrite *r, size_t n)
{
    int rc = qt_text_add(&r->out, r->p, n, r->err);
    r->p += n;
    return rc;
}

/* Writes s in place of the next character. */
static int put_instead(struct rewrite *r, const char *s)
{
    r->p++;
    return put(r, s);
}

/* \p{L}, \p{^L}, \P{Lu}, \p{Han}: r->p is at the backslash. */
static int rewrite_property(struct rewrite *r)
{
    char name[48], text[64];
    const char *s = r->p + 2;
    bool negated = r->p[1] == 'P';
    size_t n = 0;
    if (*s != '{')
        return refuse(r, "property without braces");
    s++;
    if (*s == '^') {
        negated = !negated;
        s++;
    }
    while (n + 1 < sizeof name && (isalnum((unsigned char)s[n]) || s[n] == '_')) {
        name[n] = s[n];
        n++;
    }
    name[n] = '\0';
    if (n == 0 || s[n] != '}')
        return refuse(r, "property");
    if (r->icase && n == 2 && name[0] == 'L' && strchr("ult", name[1]))
        return refuse(r, "a case property in a case-insensitive pattern");
#if PCRE2_MAJOR == 10 && PCRE2_MINOR < 40
    const char *prefix = "";
#else
    const char *prefix = n <= 2 ? "" : "sc:";
#endif
    snprintf(text, sizeof text, "\\%c{%s%s}", negated ? 'P' : 'p', prefix, name);
    r->p = s + n + 1;
    return put(r, text);
}

static size_t hex_digits(const char *s)
{
    size_t n = 0;
    while (isxdigit((unsigned char)s[n]))
        n++;
    return n;
}

/* \x41, \x{1F600}, \u00e9 */
static int rewrite_code(struct rewrite *r)
{
    char text[16];
    bool braces = r->p[1] == 'x' && r->p[2] == '{';
    const char *s = r->p + (braces ? 3 : 2);
    size_t n = hex_digits(s);
    if (!braces)
        n = qt_min_size(n, r->p[1] == 'u' ? 4 : 2);
    bool ok = braces ? n >= 1 && n <= 6 && s[n] == '}' : r->p[1] == 'u' ? n == 4 : n == 2;
    if (ok && r->p[1] == 'x' && !braces && *s >= '8') /* a byte, not a character */
        ok = false;
    if (!ok)
        return refuse(r, "character code");
    snprintf(text, sizeof text, "\\x{%.*s}", (int)n, s);
    r->p = s + n + braces;
    return put(r, text);
}

/* *set = true for an escape that matches more than one character. */
static int rewrite_escape(bool *set, struct rewrite *r, bool in_class)
{
    char c = r->p[1];
    *set = c != '\0' && strchr("sSdDwWpP", c) != NULL;
    if (c == 'p' || c == 'P')
        return rewrite_property(r);
    if (c == 'x' || c == 'u')
        return rewrite_code(r);
    if (c == 'W' && in_class)
        return refuse(r, "\\W in a set");
    if ((c != '\0' && strchr("nrtfae", c)) || ispunct((unsigned char)c))
        return take(r, 2);
    if (c != '\0' && strchr("AzZ", c) && !in_class)
        return take(r, 2);
    r->p += 2;
    switch (c) {
    case 's':
        return put(r, in_class ? SPACE_RANGES : "[" SPACE_RANGES "]");
    case 'S':
        return put(r, in_class ? NO_SPACE_RANGES : "[^" SPACE_RANGES "]");
    case 'w':
        return put(r, in_class ? WORD_RANGES : "[" WORD_RANGES "]");
    case 'W':
        return put(r, "[^" WORD_RANGES "]");
    case 'd':
        return put(r, "\\p{Nd}");
    case 'D':
        return put(r, "\\P{Nd}");
    case 'v':
        return put(r, "\\x{b}");
    default:
        r->p -= 2;
        return refuse(r, "escape");
    }
}

static int take_char(struct rewrite *r)
{
    size_t n;
    qt_utf8_char(&n, r->p);
    if (r->icase && n > 1)
        return refuse(r, "a non-ASCII character in a case-insensitive pattern");
    return take(r, n);
}

static int rewrite_literal(struct rewrite *r)
{
    /* Full case folding maps ligatures and sharp s to these pairs of letters. */
    static const char *const folded[] = {"ss", "st", "ff", "fi", "fl"};
    for (size_t i = 0; r->icase && i < 5; i++)
        if (strncasecmp(r->p, folded[i], 2) == 0)
            return refuse(r, "a pair of letters with a ligature in a case-insensitive pattern");
    return take_char(r);
}

/* An item of a set that is no set itself, up to the next one. */
static int rewrite_item(struct rewrite *r, bool first, bool *after_set)
{
    const char *p = r->p;
    int rc;
    if (*p == '\\')
        return rewrite_escape(after_set, r, true);
    if (*p == '-' && (first || p[1] == ']'))
        QT_TRY(put_instead(r, "\\-"));
    else if (*p == '-' && (*after_set || (p[1] == '\\' && p[2] && strchr("sSdDwWpP", p[2]))))
        return refuse(r, "a range that ends in a set");
    else
        QT_TRY(take_char(r));
    *after_set = false;
done:
    return rc;
}

static int rewrite_set(struct rewrite *r, int depth);

/* The items up to "&&" or the end of a set: a set of the plain ones, or that and nested sets as
 * alternatives. */
static int rewrite_union(struct rewrite *r, int depth)
{
    struct qt_text all = r->out, plain = {0}, nested = {0};
    bool after_set = false;
    int rc = QT_OK;
    r->out = (struct qt_text){0};
    for (bool first = true; *r->p != ']' && !(r->p[0] == '&' && r->p[1] == '&'); first = false) {
        if (*r->p == '\0') {
            rc = refuse(r, "an unterminated set");
            goto done;
        }
        if (*r->p != '[') {
            QT_TRY(rewrite_item(r, first, &after_set));
            continue;
        }
        plain = r->out;
        r->out = nested;
        nested = (struct qt_text){0};
        rc = r->out.size ? put(r, "|") : QT_OK;
        if (rc == QT_OK)
            rc = rewrite_set(r, depth + 1);
        nested = r->out;
        r->out = plain;
        plain = (struct qt_text){0};
        QT_TRY(rc);
        after_set = true;
    }
    if (!r->out.size && !nested.size) {
        rc = refuse(r, "empty set");
        goto done;
    }
    plain = r->out;
    r->out = (struct qt_text){0};
    QT_TRY(qt_text_add(&all, nested.size ? "(?:" : "", nested.size ? 3 : 0, r->err));
    if (plain.size) {
        QT_TRY(qt_text_add(&all, "[", 1, r->err));
        QT_TRY(qt_text_add(&all, plain.data, plain.size, r->err));
        QT_TRY(qt_text_add(&all, nested.size ? "]|" : "]", nested.size ? 2 : 1, r->err));
    }
    if (nested.size) {
        QT_TRY(qt_text_add(&all, nested.data, nested.size, r->err));
        QT_TRY(qt_text_add(&all, ")", 1, r->err));
    }
done:
    qt_free(plain.data);
    qt_free(nested.data);
    qt_free(r->out.data);
    r->out = all;
    return rc;
}

/* A set with nested sets or intersections: one character that all operands of && match. */
static int rewrite_set(struct rewrite *r, int depth)
{
    enum { NESTED_MAX = 16 };
    const bool negated = r->p[1] == '^';
    int rc;
    if (r->p[1] == ':' || depth > NESTED_MAX)
        return refuse(r, "POSIX name or deeply nested set");
    r->p += negated ? 2 : 1;
    QT_TRY(put(r, negated ? "(?:(?!" : "(?:"));
    for (;;) {
        struct qt_text before = r->out;
        r->out = (struct qt_text){0};
        rc = rewrite_union(r, depth);
        struct qt_text operand = r->out;
        const bool last = *r->p == ']';
        r->out = before;
        if (rc == QT_OK)
            rc = put(r, last ? "" : "(?=");
        if (rc == QT_OK)
            rc = qt_text_add(&r->out, operand.data, operand.size, r->err);
        if (rc == QT_OK)
            rc = put(r, last ? "" : ")");
        qt_free(operand.data);
        QT_TRY(rc);
        if (last)
            break;
        r->p += 2;
    }
    r->p++;
    QT_TRY(put(r, negated ? ")[\\x{0}-\\x{10ffff}])" : ")"));
done:
    return rc;
}

/* True if the set that begins at p has a set or "&&" in it. */
static bool is_nested(const char *p)
{
    for (p++; *p && *p != ']'; p++)
        if (*p == '\\' && p[1])
            p++;
        else if (*p == '[' || (p[0] == '&' && p[1] == '&'))
            return true;
    return false;
}

static int rewrite_class(struct rewrite *r)
{
    bool after_set = false;
    int rc;
    if (is_nested(r->p))
        return rewrite_set(r, 0);
    QT_TRY(take(r, r->p[1] == '^' ? 2 : 1));
    if (*r->p == ']')
        return refuse(r, "empty set");
    for (bool first = true; *r->p != ']'; first = false) {
        if (*r->p == '\0')
            return refuse(r, "an unterminated set");
        QT_TRY(rewrite_item(r, first, &after_set));
    }
    QT_TRY(take(r, 1));
done:
    return rc;
}

static int rewrite_group(struct rewrite *r)
{
    static const char *const kinds[] = {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!"};
    const char *p = r->p;
    if (strncmp(p, "(?i)", 4) == 0 && p == r->pattern) {
        r->icase = true;
        return take(r, 4);
    }
    r->depth++;
    if (strncmp(p, "(?i:", 4) == 0) {
        if (!r->icase) {
            r->icase = true;
            r->icase_depth = r->depth;
        }
        return take(r, 4);
    }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strncmp(p, kinds[i], strlen(kinds[i])) == 0)
            return take(r, strlen(kinds[i]));
    if (p[1] == '?' || p[1] == '*')
        return refuse(r, "kind of group");
    return put_instead(r, "(?:"); /* captures are not used */
}

static int rewrite_group_end(struct rewrite *r)
{
    if (r->depth == 0)
        return refuse(r, "unmatched parenthesis");
    if (r->icase_depth == r->depth) {
        r->icase = false;
        r->icase_depth = 0;
    }
    r->depth--;
    return take(r, 1);
}

/* {n}, {n,} and {n,m} are quantifiers; any other brace is a literal. */
static int rewrite_brace(struct rewrite *r)
{
    const char *s = r->p + 1;
    if (*s == ',')
        return refuse(r, "interval without minimum");
    if (!isdigit((unsigned char)*s))
        return put_instead(r, "\\{");
    s += strspn(s, "0123456789");
    if (*s == ',')
        s += 1 + strspn(s + 1, "0123456789");
    if (*s != '}')
        return put_instead(r, "\\{");
    if (s[1] == '+' || s[1] == '?')
        return refuse(r, "quantifier after an interval");
    return take(r, (size_t)(s + 1 - r->p));
}

static int rewrite_next(struct rewrite *r)
{
    bool set;
    switch (*r->p) {
    case '\\':
        return rewrite_escape(&set, r, false);
    case '[':
        return rewrite_class(r);
    case '(':
        return rewrite_group(r);
    case ')':
        return rewrite_group_end(r);
    case '{':
        return rewrite_brace(r);
    case '}':
        return put_instead(r, "\\}");
    case ']':
        return put_instead(r, "\\]");
    default:
        return rewrite_literal(r);
    }
}

/* ---- compiling ------------------------------------------------------------------------------ */

struct qt_regex {
    pcre2_code *code;
    bool literal;
    const char *file; /* borrowed, for errors */
    char *pattern;
};

static void *pcre_malloc(size_t size, void *ctx)
{
    (void)ctx;
    return qt_malloc(size);
}

static void pcre_free(void *p, void *ctx)
{
    (void)ctx;
    qt_free(p);
}

static int out_of_memory(struct qt_err *err)
{
    return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory (regex)");
}

static int compile(struct qt_regex *regex, const char *text, size_t size, bool literal,
                   struct qt_err *err)
{
    int code = 0, rc = QT_OK;
    PCRE2_SIZE offset;
    pcre2_general_context *general = pcre2_general_context_create(pcre_malloc, pcre_free, NULL);
    pcre2_compile_context *ctx = general ? pcre2_compile_context_create(general) : NULL;
    if (!ctx) {
        rc = out_of_memory(err);
        goto done;
    }
    pcre2_set_newline(ctx, PCRE2_NEWLINE_LF);
    uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE);
    regex->code = pcre2_compile((PCRE2_SPTR)text, size, options, &code, &offset, ctx);
    if (!regex->code) {
        char message[128];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)message, sizeof message);
        rc = code == PCRE2_ERROR_HEAP_FAILED
                 ? out_of_memory(err)
                 : qt_fail(err, QT_E_UNSUPPORTED, regex->file, NULL, "regex '%.300s': %s",
                           regex->pattern, message);
        goto done;
    }
    /* JIT may be unavailable; matching is then slower, with the same results. */
    pcre2_jit_compile(regex->code, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
done:
    pcre2_compile_context_free(ctx);
    pcre2_general_context_free(general);
    return rc;
}

int qt_regex_new(struct qt_regex **out, const char *pattern, bool literal, const char *file,
                 struct qt_err *err)
{
    struct rewrite r = {.file = file, .pattern = pattern, .p = pattern, .err = err};
    int rc;
    *out = NULL;
    if (!*pattern)
        return qt_fail(err, QT_E_UNSUPPORTED, file, NULL, "empty pattern");
    QT_TRY(qt_array_new(out, 1, sizeof **out, err));
    (*out)->file = file;
    (*out)->literal = literal;
    QT_TRY(qt_string_copy(&(*out)->pattern, pattern, err));
    while (!literal && *r.p)
        QT_TRY(rewrite_next(&r));
    if (literal)
        rc = compile(*out, pattern, strlen(pattern), true, err);
    else
        rc = compile(*out, r.out.data, r.out.size, false, err);
done:
    qt_free(r.out.data);
    if (rc < 0) {
        qt_regex_free(*out);
        *out = NULL;
    }
    return rc;
}

void qt_regex_free(struct qt_regex *regex)
{
    if (!regex)
        return;
    pcre2_code_free(regex->code);
    qt_free(regex->pattern);
    qt_free(regex);
}

bool qt_regex_is_literal(const struct qt_regex *regex)
{
    return regex->literal;
}

/* ---- matching ------------------------------------------------------------------------------- */

struct qt_regex_work {
    pcre2_general_context *general;
    pcre2_match_context *match;
    pcre2_match_data *data;
    pcre2_jit_stack *stack;
    const char *text; /* of the whole call */
    size_t size;
    uint64_t steps; /* left for this text */
    bool (*interrupted)(void);
};

int qt_regex_work_new(struct qt_regex_work **out, const char *text, size_t size,
                      bool (*interrupted)(void), struct qt_err *err)
{
    struct qt_regex_work *w;
    int rc = qt_array_new(out, 1, sizeof **out, err);
    if (rc < 0)
        return rc;
    w = *out;
    w->text = text;
    w->size = size;
    w->steps = STEPS_MIN + (uint64_t)STEPS_PER_BYTE * size;
    w->interrupted = interrupted;
    w->general = pcre2_general_context_create(pcre_malloc, pcre_free, NULL);
    if (w->general) {
        w->match = pcre2_match_context_create(w->general);
        w->data = pcre2_match_data_create(1, w->general);
        w->stack = pcre2_jit_stack_create(JIT_STACK_MIN, JIT_STACK_MAX, w->general);
    }
    /* Without a JIT stack, PCRE2 uses 32 KiB of the machine stack. */
    if (!w->match || !w->data) {
        qt_regex_work_free(w);
        *out = NULL;
        return out_of_memory(err);
    }
    pcre2_set_heap_limit(w->match, HEAP_LIMIT_KIB);
    if (w->stack)
        pcre2_jit_stack_assign(w->match, NULL, w->stack);
    return QT_OK;
}

void qt_regex_work_free(struct qt_regex_work *work)
{
    if (!work)
        return;
    pcre2_jit_stack_free(work->stack);
    pcre2_match_data_free(work->data);
    pcre2_match_context_free(work->match);
    pcre2_general_context_free(work->general);
    qt_free(work);
}

static int match_failed(const struct qt_regex *regex, int code, struct qt_err *err)
{
    char message[128];
    if (code == PCRE2_ERROR_NOMEMORY)
        return out_of_memory(err);
    pcre2_get_error_message(code, (PCRE2_UCHAR *)message, sizeof message);
    return qt_fail(err, QT_E_UNSUPPORTED, regex->file, NULL,
                   "matching the regex '%.300s' against this text failed: %s", regex->pattern,
                   message);
}

/* Takes steps from what is left for the text; QT_E_INPUT if that is not enough. */
static int spend(const struct qt_regex_scan *scan, size_t steps, struct qt_err *err)
{
    struct qt_regex_work *w = scan->work;
    if (steps <= w->steps) {
        w->steps -= steps;
        return QT_OK;
    }
    const uintptr_t at = (uintptr_t)scan->text + scan->from, start = (uintptr_t)w->text;
    char place[64] = "in the normalized text";
    if (at >= start && at - start <= w->size)
        snprintf(place, sizeof place, "at byte %zu of the text", (size_t)(at - start));
    return qt_fail(err, QT_E_INPUT, scan->regex->file, NULL,
                   "the regex '%.300s' takes too many steps %s", scan->regex->pattern, place);
}

/* The end of a window of `size` bytes from scan->from on, which splits no character. */
static size_t window_end(const struct qt_regex_scan *scan, size_t size)
{
    if (size >= scan->size - scan->from)
        return scan->size;
    size_t end = scan->from + size;
    while (end > scan->from && ((unsigned char)scan->text[end] & 0xc0) == 0x80)
        end--;
    return end;
}

/*
 * Finds the first match at or after scan->from, [at[0], at[1]); *found = false if there is none
 * before *end, which is the end of the text only if all of it was searched.
 *
 * PCRE2 counts neither the steps of all matches in a text nor the bytes that they look at. So each
 * try sees a window of the text and has few steps. A try that would look beyond its window (PCRE2
 * then gives PCRE2_ERROR_PARTIAL) or take more steps is repeated with more of them, and what it
 * took is counted. The result is that of a search in the whole text.
 */
static int search(bool *found, size_t at[2], size_t *end, const struct qt_regex_scan *scan,
                  struct qt_err *err)
{
    size_t window = WINDOW, limit = MATCH_LIMIT;
    int rc;
    *found = false;
    for (;;) {
        *end = window_end(scan, window);
        pcre2_set_match_limit(scan->work->match, (uint32_t)limit);
        QT_TRY(qt_tokenizer_poll(scan->work->interrupted, err));
        const bool all = *end == scan->size;
        const int code =
            pcre2_match(scan->regex->code, (PCRE2_SPTR)(scan->seen ? scan->seen : scan->text), *end,
                        scan->from, PCRE2_NO_UTF_CHECK | (all ? 0 : PCRE2_PARTIAL_HARD),
                        scan->work->data, scan->work->match);
        if (code == PCRE2_ERROR_PARTIAL) {
            QT_TRY(spend(scan, *end - scan->from, err));
            window *= WINDOW_GROWS;
        } else if (code == PCRE2_ERROR_MATCHLIMIT) {
            QT_TRY(spend(scan, limit, err));
            limit = qt_min_size(limit * LIMIT_GROWS, UINT32_MAX);
        } else if (code == PCRE2_ERROR_NOMATCH) {
            return QT_OK;
        } else if (code < 0) {
            return match_failed(scan->regex, code, err);
        } else {
            const PCRE2_SIZE *range = pcre2_get_ovector_pointer(scan->work->data);
            at[0] = range[0];
            at[1] = range[1];
            *found = all || at[0] < *end; /* an empty match at the end may become another one */
            return QT_OK;
        }
    }
done:
    return rc;
}

int qt_regex_next(bool *found, size_t *start, size_t *end, struct qt_regex_scan *scan,
                  struct qt_err *err)
{
    size_t at[2] = {0}, searched;
    int rc = QT_OK;
    *found = false;
    while (scan->from <= scan->size) {
        QT_TRY(search(found, at, &searched, scan, err));
        if (!*found && searched == scan->size)
            break;
        if (!*found) {
            scan->from = searched;
            continue;
        }
        if (at[0] == at[1] && scan->any && at[1] == scan->last_end) {
            size_t n = 1;
            if (scan->from < scan->size)
                qt_utf8_char(&n, scan->text + scan->from);
            scan->from += n;
            *found = false;
            continue;
        }
        *start = at[0];
        *end = scan->from = scan->last_end = at[1];
        scan->any = true;
        break;
    }
done:
    return rc;
}
