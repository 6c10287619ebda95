/* The tokens in the tags of a chat template, and errors at its lines (parse.h). */
#include "model/chat/parse.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* ---- errors --------------------------------------------------------------------------------- */

size_t parse_line(struct parse *s)
{
    for (; s->counted < s->p; s->counted++)
        s->line += *s->counted == '\n';
    return s->line;
}

static void fail(struct parse *s, enum qt_status status, const char *what, const char *detail)
{
    if (s->rc == QT_OK)
        s->rc = qt_fail(s->err, status, s->file, NULL, "chat template, line %zu: %s%s%.100s%s",
                        parse_line(s), what, *detail ? " '" : "", detail, *detail ? "'" : "");
}

void parse_unsupported(struct parse *s, const char *what, const char *detail)
{
    char text[80];
    snprintf(text, sizeof text, "not supported: %s", what);
    fail(s, QT_E_UNSUPPORTED, text, detail);
}

void parse_broken(struct parse *s, const char *what, const char *detail)
{
    fail(s, QT_E_INPUT, what, detail);
}

void parse_no_memory(struct parse *s)
{
    if (s->rc == QT_OK)
        s->rc = qt_fail(s->err, QT_E_RESOURCE, NULL, NULL, "out of memory (chat template)");
}

/* ---- tokens --------------------------------------------------------------------------------- */

static size_t put_utf8(char *out, unsigned long c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3f));
        return 2;
    }
    out[0] = (char)(0xe0 | c >> 12);
    out[1] = (char)(0x80 | (c >> 6 & 0x3f));
    out[2] = (char)(0x80 | (c & 0x3f));
    return 3;
}

/* \uXXXX or \xXX at p (after the backslash); returns the digits' number, or 0. */
static size_t read_code(unsigned long *c, const char *p)
{
    const size_t n = *p == 'u' ? 4 : *p == 'x' ? 2 : 0;
    char digits[8] = "";
    for (size_t i = 0; i < n; i++) {
        if (!isxdigit((unsigned char)p[1 + i]))
            return 0;
        digits[i] = p[1 + i];
    }
    *c = n ? strtoul(digits, NULL, 16) : 0;
    return n;
}

static void read_string(struct parse *s)
{
    static const char letters[] = "nrtabfv\\'\"", bytes[] = "\n\r\t\a\b\f\v\\'\"";
    const char quote = *s->p++;
    const size_t room = (size_t)(s->end - s->p);
    char *text = NULL;
    size_t n = 0;
    const int rc = qt_array_new(&text, room + 1, 1, s->err);
    if (rc < 0) {
        s->rc = rc;
        return;
    }
    while (s->p < s->end && *s->p != quote) {
        unsigned long code;
        if (*s->p != '\\' || s->p + 1 == s->end) {
            text[n++] = *s->p++;
            continue;
        }
        const char c = *++s->p, *at = c ? strchr(letters, c) : NULL;
        const size_t digits = at ? 0 : read_code(&code, s->p);
        if (at) {
            text[n++] = bytes[at - letters];
        } else if (digits && code && (code < 0xd800 || code > 0xdfff)) {
            n += put_utf8(text + n, code);
            s->p += digits;
        } else {
            text[n++] = '\\';
            text[n++] = c;
        }
        s->p++;
    }
    if (s->p == s->end)
        parse_broken(s, "a string without end", "");
    else
        s->p++;
    s->token.kind = STRING;
    s->token.value = s->rc < 0 ? NULL : json_stringn_nocheck(text, n);
    if (!s->token.value)
        parse_no_memory(s);
    qt_free(text);
}

static void read_number(struct parse *s)
{
    char *end;
    const size_t n = strspn(s->p, "0123456789");
    const bool real = s->p[n] == '.' && isdigit((unsigned char)s->p[n + 1]);
    s->token.kind = real ? REAL : INTEGER;
    if (n > 18)
        parse_unsupported(s, "a number of more than 18 digits", "");
    s->token.value = real ? json_real(strtod(s->p, &end)) : json_integer(strtoll(s->p, &end, 10));
    s->p = end;
    if (!s->token.value)
        parse_no_memory(s);
    if (isalnum((unsigned char)*s->p) || *s->p == '_')
        parse_broken(s, "a wrong number", "");
}

/* Before the mark there may be a sign: -%} */
const char *parse_tag_end(const struct parse *s, const char *p)
{
    const char *mark = s->in_print ? "}}" : "%}";
    const size_t sign = *p == '-' || (*p == '+' && !s->in_print);
    return strncmp(p + sign, mark, 2) == 0 ? p + sign + 2 : NULL;
}

void parse_next(struct parse *s)
{
    static const char *const doubles[] = {"==", "!=", "<=", ">=", "//", "**"};
    struct token *t = &s->token;
    json_decref(t->value);
    *t = (struct token){.kind = END_OF_TAG};
    if (s->rc < 0)
        return;
    while (s->p < s->end && isspace((unsigned char)*s->p))
        s->p++;
    if (s->p == s->end) {
        parse_broken(s, "a tag without end", "");
        return;
    }
    if (parse_tag_end(s, s->p))
        return;
    if (*s->p == '"' || *s->p == '\'') {
        read_string(s);
    } else if (isdigit((unsigned char)*s->p)) {
        read_number(s);
    } else if (isalpha((unsigned char)*s->p) || *s->p == '_') {
        size_t n = 0;
        while (isalnum((unsigned char)s->p[n]) || s->p[n] == '_')
            n++;
        if (n >= sizeof t->text)
            parse_unsupported(s, "a name of 64 letters or more", "");
        t->kind = NAME;
        snprintf(t->text, sizeof t->text, "%.*s", (int)n, s->p);
        s->p += n;
    } else {
        size_t n = 1;
        for (size_t i = 0; i < sizeof doubles / sizeof *doubles; i++)
            if (strncmp(s->p, doubles[i], 2) == 0)
                n = 2;
        t->kind = SYMBOL;
        snprintf(t->text, sizeof t->text, "%.*s", (int)n, s->p);
        if (!strchr("=!<>/*+-%~|.,:()[]{}", *s->p))
            parse_broken(s, "unexpected character", t->text);
        s->p += n;
    }
}

bool parse_at_symbol(const struct parse *s, const char *text)
{
    return s->rc == QT_OK && s->token.kind == SYMBOL && strcmp(s->token.text, text) == 0;
}

bool parse_at_word(const struct parse *s, const char *text)
{
    return s->rc == QT_OK && s->token.kind == NAME && strcmp(s->token.text, text) == 0;
}

bool parse_take_symbol(struct parse *s, const char *text)
{
    const bool found = parse_at_symbol(s, text);
    if (found)
        parse_next(s);
    return found;
}

bool parse_take_word(struct parse *s, const char *text)
{
    const bool found = parse_at_word(s, text);
    if (found)
        parse_next(s);
    return found;
}

void parse_need_symbol(struct parse *s, const char *text)
{
    if (!parse_take_symbol(s, text))
        parse_broken(s, "missing", text);
}

void parse_need_name(struct parse *s, char out[64])
{
    out[0] = '\0';
    if (s->token.kind != NAME)
        parse_broken(s, "a name is missing", "");
    else
        memcpy(out, s->token.text, 64);
    parse_next(s);
}
