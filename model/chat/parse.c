/*
 * Chat template -> nodes. The settings are those of Hugging Face transformers: trim_blocks,
 * lstrip_blocks, no trailing newline of the file.
 */
#include "model/chat/chat.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { MAX_DEPTH = 100, MAX_NODES = 1 << 20 };

enum token_kind { END_OF_TAG, NAME, STRING, INTEGER, REAL, SYMBOL };

struct token {
    enum token_kind kind;
    char text[64]; /* of names and symbols */
    json_t *value; /* of literals, owned */
};

struct parse {
    struct chat_tree *tree;
    const char *file, *text, *p; /* p: next character */
    const char *end;
    struct token token; /* the next one, inside of a tag */
    bool in_print;      /* the tag is {{ }} */
    bool trim;          /* strip white space before the next text */
    bool trim_newline;  /* skip one newline before the next text */
    size_t depth, loops;
    const char *counted; /* up to here `line` counts the lines */
    size_t line;
    struct qt_err *err;
    int rc;
};

static size_t line_of(struct parse *s)
{
    for (; s->counted < s->p; s->counted++)
        s->line += *s->counted == '\n';
    return s->line;
}

static void fail(struct parse *s, enum qt_status status, const char *what, const char *detail)
{
    if (s->rc == QT_OK)
        s->rc = qt_fail(s->err, status, s->file, NULL, "chat template, line %zu: %s%s%.100s%s",
                        line_of(s), what, *detail ? " '" : "", detail, *detail ? "'" : "");
}

static void unsupported(struct parse *s, const char *what, const char *detail)
{
    char text[80];
    snprintf(text, sizeof text, "not supported: %s", what);
    fail(s, QT_E_UNSUPPORTED, text, detail);
}

static void broken(struct parse *s, const char *what, const char *detail)
{
    fail(s, QT_E_INPUT, what, detail);
}

/* ---- nodes ---------------------------------------------------------------------------------- */

static struct chat_node *node(struct parse *s, enum chat_kind kind)
{
    struct chat_tree *t = s->tree;
    struct chat_node *n = NULL;
    if (s->rc < 0)
        return NULL;
    if (t->count == MAX_NODES)
        broken(s, "the template is too long", "");
    int rc = qt_array_new(&n, 1, sizeof *n, s->err);
    if (rc == QT_OK)
        rc = qt_array_grow(&t->all, &t->capacity, t->count + 1, sizeof *t->all, s->err);
    if (rc < 0 || s->rc < 0) {
        qt_free(n);
        s->rc = s->rc < 0 ? s->rc : rc;
        return NULL;
    }
    n->kind = kind;
    n->line = line_of(s);
    t->all[t->count++] = n;
    return n;
}

static void add(struct parse *s, struct chat_node *n, struct chat_node *kid)
{
    if (s->rc < 0)
        return;
    const int rc = qt_array_grow(&n->kids, &n->capacity, n->count + 1, sizeof *n->kids, s->err);
    if (rc < 0)
        s->rc = rc;
    else
        n->kids[n->count++] = kid;
}

/* name: NULL for an argument without a keyword. */
static void add_name(struct parse *s, struct chat_node *n, const char *name)
{
    char *copy = NULL;
    if (s->rc < 0)
        return;
    int rc = qt_array_grow(&n->names, &n->names_capacity, n->nnames + 1, sizeof *n->names, s->err);
    if (rc == QT_OK && name)
        rc = qt_string_copy(&copy, name, s->err);
    if (rc < 0)
        s->rc = rc;
    else
        n->names[n->nnames++] = copy;
}

static struct chat_node *named(struct parse *s, enum chat_kind kind, const char *name)
{
    struct chat_node *n = node(s, kind);
    add_name(s, n, name);
    return n;
}

static struct chat_node *with(struct parse *s, enum chat_kind kind, struct chat_node *a,
                              struct chat_node *b)
{
    struct chat_node *n = node(s, kind);
    add(s, n, a);
    if (b)
        add(s, n, b);
    return n;
}

static void no_memory(struct parse *s)
{
    if (s->rc == QT_OK)
        s->rc = qt_fail(s->err, QT_E_RESOURCE, NULL, NULL, "out of memory (chat template)");
}

/* Takes ownership of the value. */
static struct chat_node *literal(struct parse *s, json_t *value)
{
    struct chat_node *n = node(s, CHAT_LITERAL);
    if (!value)
        no_memory(s);
    if (n)
        n->value = value;
    else
        json_decref(value);
    return n;
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
        broken(s, "a string without end", "");
    else
        s->p++;
    s->token.kind = STRING;
    s->token.value = s->rc < 0 ? NULL : json_stringn_nocheck(text, n);
    if (!s->token.value)
        no_memory(s);
    qt_free(text);
}

static void read_number(struct parse *s)
{
    char *end;
    const size_t n = strspn(s->p, "0123456789");
    const bool real = s->p[n] == '.' && isdigit((unsigned char)s->p[n + 1]);
    s->token.kind = real ? REAL : INTEGER;
    if (n > 18)
        unsupported(s, "a number of more than 18 digits", "");
    s->token.value = real ? json_real(strtod(s->p, &end)) : json_integer(strtoll(s->p, &end, 10));
    s->p = end;
    if (!s->token.value)
        no_memory(s);
    if (isalnum((unsigned char)*s->p) || *s->p == '_')
        broken(s, "a wrong number", "");
}

/* True if the tag ends at p, with or without a sign: -%} */
static const char *tag_end(const struct parse *s, const char *p)
{
    const char *mark = s->in_print ? "}}" : "%}";
    const size_t sign = *p == '-' || (*p == '+' && !s->in_print);
    return strncmp(p + sign, mark, 2) == 0 ? p + sign + 2 : NULL;
}

static void next(struct parse *s)
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
        broken(s, "a tag without end", "");
        return;
    }
    if (tag_end(s, s->p))
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
            unsupported(s, "a name of 64 letters or more", "");
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
            broken(s, "unexpected character", t->text);
        s->p += n;
    }
}

static bool is_symbol(const struct parse *s, const char *text)
{
    return s->rc == QT_OK && s->token.kind == SYMBOL && strcmp(s->token.text, text) == 0;
}

static bool is_word(const struct parse *s, const char *text)
{
    return s->rc == QT_OK && s->token.kind == NAME && strcmp(s->token.text, text) == 0;
}

static bool take_symbol(struct parse *s, const char *text)
{
    const bool found = is_symbol(s, text);
    if (found)
        next(s);
    return found;
}

static bool take_word(struct parse *s, const char *text)
{
    const bool found = is_word(s, text);
    if (found)
        next(s);
    return found;
}

static void need_symbol(struct parse *s, const char *text)
{
    if (!take_symbol(s, text))
        broken(s, "missing", text);
}

/* Copies a name to out and moves on. */
static void need_name(struct parse *s, char out[64])
{
    out[0] = '\0';
    if (s->token.kind != NAME)
        broken(s, "a name is missing", "");
    else
        memcpy(out, s->token.text, 64);
    next(s);
}

/* ---- expressions ---------------------------------------------------------------------------- */

static struct chat_node *expression(struct parse *s);

static bool enter(struct parse *s)
{
    if (++s->depth > MAX_DEPTH)
        unsupported(s, "more than 100 nested expressions or blocks", "");
    return s->rc == QT_OK;
}

/* Elements up to the symbol `end`; *comma: there was a comma, which makes a tuple. */
static struct chat_node *elements(struct parse *s, const char *end, bool *comma)
{
    struct chat_node *n = node(s, CHAT_ARRAY);
    *comma = false;
    while (s->rc == QT_OK && !is_symbol(s, end)) {
        add(s, n, expression(s));
        if (!take_symbol(s, ","))
            break;
        *comma = true;
    }
    need_symbol(s, end);
    return n;
}

static struct chat_node *dict(struct parse *s)
{
    struct chat_node *n = node(s, CHAT_DICT);
    while (s->rc == QT_OK && !is_symbol(s, "}")) {
        add(s, n, expression(s));
        need_symbol(s, ":");
        add(s, n, expression(s));
        if (!take_symbol(s, ","))
            break;
    }
    need_symbol(s, "}");
    return n;
}

static struct chat_node *word(struct parse *s)
{
    static const struct {
        const char *name;
        int value; /* 2: none */
    } constants[] = {{"true", 1},  {"True", 1}, {"false", 0},
                     {"False", 0}, {"none", 2}, {"None", 2}};
    char name[64];
    need_name(s, name);
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (strcmp(name, constants[i].name) == 0)
            return literal(s, constants[i].value == 2 ? json_null()
                                                      : json_boolean(constants[i].value));
    return named(s, CHAT_NAME, name);
}

static struct chat_node *primary(struct parse *s)
{
    struct chat_node *n;
    bool comma;
    switch (s->token.kind) {
    case NAME:
        return word(s);
    case INTEGER:
    case REAL:
        n = literal(s, json_incref(s->token.value));
        next(s);
        return n;
    case STRING:
        n = literal(s, json_incref(s->token.value));
        for (next(s); s->token.kind == STRING && s->rc == QT_OK; next(s))
            unsupported(s, "strings side by side", "");
        return n;
    default:
        break;
    }
    if (take_symbol(s, "[")) {
        return elements(s, "]", &comma);
    } else if (take_symbol(s, "{")) {
        return dict(s);
    } else if (take_symbol(s, "(")) {
        n = elements(s, ")", &comma);
        return n && n->count == 1 && !comma ? n->kids[0] : n;
    }
    broken(s, "an expression is missing before",
           s->token.kind == SYMBOL ? s->token.text : "the end");
    return NULL;
}

/* Arguments up to ")"; the node's names are their keywords. */
static void arguments(struct parse *s, struct chat_node *n)
{
    while (s->rc == QT_OK && !is_symbol(s, ")")) {
        struct chat_node *value = expression(s);
        if (value && value->kind == CHAT_NAME && take_symbol(s, "=")) {
            add_name(s, n, value->names[0]);
            value = expression(s);
        } else {
            add_name(s, n, NULL);
        }
        add(s, n, value);
        if (!take_symbol(s, ","))
            break;
    }
    need_symbol(s, ")");
}

static struct chat_node *subscript(struct parse *s, struct chat_node *object)
{
    struct chat_node *parts[3] = {NULL};
    bool slice = false;
    for (int i = 0; i < 3; i++) {
        if (!is_symbol(s, ":") && !is_symbol(s, "]"))
            parts[i] = expression(s);
        if (!take_symbol(s, ":"))
            break;
        slice = true;
    }
    need_symbol(s, "]");
    if (!slice) {
        if (!parts[0])
            broken(s, "an index is missing", "");
        return with(s, CHAT_ITEM, object, parts[0]);
    }
    struct chat_node *n = node(s, CHAT_SLICE);
    add(s, n, object);
    for (int i = 0; i < 3; i++)
        add(s, n, parts[i]);
    return n;
}

static struct chat_node *filter(struct parse *s, struct chat_node *object)
{
    char name[64];
    need_name(s, name);
    struct chat_node *n = named(s, CHAT_FILTER, name);
    add(s, n, object);
    if (take_symbol(s, "("))
        arguments(s, n);
    return n;
}

static struct chat_node *postfix(struct parse *s)
{
    struct chat_node *n = primary(s);
    while (s->rc == QT_OK) {
        if (take_symbol(s, ".")) {
            char name[64];
            if (s->rc == QT_OK && s->token.kind == INTEGER) { /* messages.0 is messages[0] */
                n = with(s, CHAT_ITEM, n, primary(s));
                continue;
            }
            need_name(s, name);
            struct chat_node *attr = named(s, CHAT_ATTR, name);
            add(s, attr, n);
            n = attr;
        } else if (take_symbol(s, "[")) {
            n = subscript(s, n);
        } else if (take_symbol(s, "(")) {
            struct chat_node *call = node(s, CHAT_CALL);
            if (n && n->kind != CHAT_NAME && n->kind != CHAT_ATTR)
                unsupported(s, "a call of a value", "");
            add(s, call, n);
            add_name(s, call, NULL);
            arguments(s, call);
            n = call;
        } else {
            break;
        }
    }
    return n;
}

/* "is [not] NAME", with arguments in parentheses or one argument without. */
static struct chat_node *test(struct parse *s, struct chat_node *object)
{
    const bool negated = take_word(s, "not");
    char name[64];
    need_name(s, name);
    struct chat_node *n = named(s, CHAT_TEST, name);
    add(s, n, object);
    if (take_symbol(s, "(")) {
        arguments(s, n);
    } else if ((s->token.kind == NAME && !is_word(s, "and") && !is_word(s, "or") &&
                !is_word(s, "else") && !is_word(s, "if") && !is_word(s, "is") &&
                !is_word(s, "not") && !is_word(s, "in")) ||
               s->token.kind == STRING || s->token.kind == INTEGER || s->token.kind == REAL ||
               is_symbol(s, "[")) {
        add(s, n, postfix(s));
        add_name(s, n, NULL);
    }
    return negated ? with(s, CHAT_NOT, n, NULL) : n;
}

static struct chat_node *filtered(struct parse *s, struct chat_node *n)
{
    while (s->rc == QT_OK) {
        if (take_symbol(s, "|"))
            n = filter(s, n);
        else if (take_word(s, "is"))
            n = test(s, n);
        else
            break;
    }
    return n;
}

/* Signs bind more tightly than filters. */
static struct chat_node *operand(struct parse *s)
{
    struct chat_node *n = NULL;
    if (enter(s)) {
        if (take_symbol(s, "-"))
            n = with(s, CHAT_NEGATE, operand(s), NULL);
        else if (take_symbol(s, "+"))
            n = operand(s);
        else
            n = postfix(s);
    }
    s->depth--;
    return n;
}

/* Binary operators, the loosest first; those of a row bind alike, from left to right. */
static const char *const levels[][4] = {
    {"or"}, {"and"}, {NULL}, {NULL}, {"+", "-"}, {"~"}, {"*", "/", "//", "%"}, {"**"}};
enum { NOT_LEVEL = 2, COMPARE_LEVEL = 3, LEVELS = sizeof levels / sizeof *levels };

static struct chat_node *binary(struct parse *s, size_t level);

static struct chat_node *operation(struct parse *s, const char *op, struct chat_node *a,
                                   struct chat_node *b)
{
    struct chat_node *n = named(s, CHAT_BINARY, op);
    add(s, n, a);
    add(s, n, b);
    return n;
}

/* a < b < c means a < b and b < c. */
static struct chat_node *comparison(struct parse *s)
{
    static const char *const symbols[] = {"==", "!=", "<=", ">=", "<", ">"};
    struct chat_node *left = binary(s, COMPARE_LEVEL + 1), *all = NULL;
    while (s->rc == QT_OK) {
        const char *op = NULL;
        for (size_t i = 0; i < sizeof symbols / sizeof *symbols && !op; i++)
            op = take_symbol(s, symbols[i]) ? symbols[i] : NULL;
        if (!op && take_word(s, "in"))
            op = "in";
        if (!op && take_word(s, "not")) {
            op = "not in";
            if (!take_word(s, "in"))
                broken(s, "'in' is missing after 'not'", "");
        }
        if (!op)
            break;
        struct chat_node *right = binary(s, COMPARE_LEVEL + 1);
        struct chat_node *one = operation(s, op, left, right);
        all = all ? operation(s, "and", all, one) : one;
        left = right;
    }
    return all ? all : left;
}

static struct chat_node *binary(struct parse *s, size_t level)
{
    if (level == LEVELS)
        return filtered(s, operand(s));
    if (level == NOT_LEVEL && take_word(s, "not")) {
        struct chat_node *n = enter(s) ? with(s, CHAT_NOT, binary(s, NOT_LEVEL), NULL) : NULL;
        s->depth--;
        return n;
    }
    if (level == COMPARE_LEVEL)
        return comparison(s);
    struct chat_node *left = binary(s, level + 1);
    for (size_t i = 0; i < 4 && levels[level][i];) {
        const char *op = levels[level][i];
        const bool found = isalpha((unsigned char)*op) ? take_word(s, op) : take_symbol(s, op);
        if (!found) {
            i++;
            continue;
        }
        left = operation(s, op, left, binary(s, level + 1));
        i = 0;
    }
    return left;
}

/* A value, or "A if C else B". */
static struct chat_node *expression(struct parse *s)
{
    struct chat_node *value = NULL;
    if (enter(s)) {
        value = binary(s, 0);
        while (take_word(s, "if")) {
            struct chat_node *n = with(s, CHAT_CHOICE, binary(s, 0), value);
            if (take_word(s, "else"))
                add(s, n, expression(s));
            value = n;
        }
    }
    s->depth--;
    return value;
}

/* "a" or "a, b": the latter is a tuple. */
static struct chat_node *expression_list(struct parse *s)
{
    struct chat_node *first = expression(s), *n;
    if (!is_symbol(s, ","))
        return first;
    n = with(s, CHAT_ARRAY, first, NULL);
    while (take_symbol(s, ","))
        add(s, n, expression(s));
    return n;
}

/* ---- statements ----------------------------------------------------------------------------- */

/* Ends the tag at hand. */
static void end_tag(struct parse *s)
{
    const char *after;
    if (s->rc < 0)
        return;
    if (s->token.kind != END_OF_TAG || !(after = tag_end(s, s->p))) {
        broken(s, "unexpected",
               s->token.kind == NAME || s->token.kind == SYMBOL ? s->token.text : "value");
        return;
    }
    s->trim = *s->p == '-';
    s->trim_newline = !s->in_print && *s->p != '+';
    s->p = after;
}

static struct chat_node *statements(struct parse *s, const char *const *ends, const char **which);

static const char *const end_if[] = {"elif", "else", "endif", NULL};
static const char *const only_endif[] = {"endif", NULL};
static const char *const end_for[] = {"else", "endfor", NULL};
static const char *const only_endfor[] = {"endfor", NULL};

static struct chat_node *if_statement(struct parse *s)
{
    const char *which = "elif";
    struct chat_node *first = node(s, CHAT_IF), *n = first, *other;
    while (s->rc == QT_OK) {
        add(s, n, expression(s));
        end_tag(s);
        add(s, n, statements(s, end_if, &which));
        if (s->rc < 0 || strcmp(which, "elif") != 0)
            break;
        other = node(s, CHAT_IF);
        add(s, n, other);
        n = other;
    }
    end_tag(s);
    if (s->rc == QT_OK && strcmp(which, "else") == 0) {
        add(s, n, statements(s, only_endif, &which));
        end_tag(s);
    } else {
        add(s, n, NULL);
    }
    return first;
}

static void targets(struct parse *s, struct chat_node *n)
{
    char name[64];
    const bool parentheses = take_symbol(s, "(");
    do {
        need_name(s, name);
        add_name(s, n, name);
    } while (take_symbol(s, ","));
    if (parentheses)
        need_symbol(s, ")");
}

static struct chat_node *for_statement(struct parse *s)
{
    const char *which;
    struct chat_node *n = node(s, CHAT_FOR);
    targets(s, n);
    if (!take_word(s, "in"))
        broken(s, "'in' is missing", "");
    add(s, n, binary(s, 0)); /* no "if" of an expression: a filter may follow */
    add(s, n, take_word(s, "if") ? expression(s) : NULL);
    if (is_word(s, "recursive"))
        unsupported(s, "a recursive loop", "");
    end_tag(s);
    s->loops++;
    add(s, n, statements(s, end_for, &which));
    s->loops--;
    end_tag(s);
    if (s->rc == QT_OK && strcmp(which, "else") == 0) {
        add(s, n, statements(s, only_endfor, &which));
        end_tag(s);
    } else {
        add(s, n, NULL);
    }
    return n;
}

static struct chat_node *set_statement(struct parse *s)
{
    static const char *const ends[] = {"endset", NULL};
    const char *which;
    char name[64];
    struct chat_node *n = node(s, CHAT_SET);
    targets(s, n);
    if (take_symbol(s, ".")) { /* a member of a namespace: names are the variable and the member */
        if (s->rc == QT_OK && n->nnames != 1)
            unsupported(s, "an assignment to several members", "");
        need_name(s, name);
        add_name(s, n, name);
        struct chat_node *member = named(s, CHAT_ATTR, name);
        add(s, n, member);
    } else {
        add(s, n, NULL);
    }
    if (take_symbol(s, "=")) {
        add(s, n, expression_list(s));
        end_tag(s);
        return n;
    }
    if (is_symbol(s, "|"))
        unsupported(s, "a filter of a block", "");
    if (s->rc == QT_OK && (n->nnames != 1 || n->kids[0]))
        broken(s, "missing", "=");
    end_tag(s);
    if (n)
        n->kind = CHAT_CAPTURE;
    add(s, n, statements(s, ends, &which));
    end_tag(s);
    return n;
}

static struct chat_node *macro_statement(struct parse *s)
{
    static const char *const ends[] = {"endmacro", NULL};
    const char *which;
    char name[64];
    struct chat_node *n = node(s, CHAT_MACRO);
    need_name(s, name);
    add_name(s, n, name);
    add(s, n, NULL); /* the body */
    need_symbol(s, "(");
    while (s->rc == QT_OK && !is_symbol(s, ")")) {
        need_name(s, name);
        add_name(s, n, name);
        add(s, n, take_symbol(s, "=") ? expression(s) : NULL);
        if (!take_symbol(s, ","))
            break;
    }
    need_symbol(s, ")");
    end_tag(s);
    const size_t loops = s->loops;
    s->loops = 0;
    struct chat_node *body = statements(s, ends, &which);
    s->loops = loops;
    if (s->rc == QT_OK)
        n->kids[0] = body;
    end_tag(s);
    return n;
}

static struct chat_node *statement(struct parse *s)
{
    static const char *const ends[] = {"endgeneration", NULL};
    const char *which;
    struct chat_node *n;
    if (take_word(s, "if"))
        return if_statement(s);
    if (take_word(s, "for"))
        return for_statement(s);
    if (take_word(s, "set"))
        return set_statement(s);
    if (take_word(s, "macro"))
        return macro_statement(s);
    if (take_word(s, "generation")) { /* marks what an assistant says */
        end_tag(s);
        n = statements(s, ends, &which);
        end_tag(s);
        return n;
    }
    const bool leaves = is_word(s, "break");
    if (leaves || is_word(s, "continue")) {
        if (!s->loops)
            broken(s, "outside of a loop", s->token.text);
        next(s);
        n = node(s, leaves ? CHAT_BREAK : CHAT_CONTINUE);
        end_tag(s);
        return n;
    }
    unsupported(s, "statement", s->token.text);
    return NULL;
}

/* ---- text ----------------------------------------------------------------------------------- */

static bool is_blank(char c)
{
    return c == ' ' || c == '\t';
}

/* The text before the tag at `tag`; its sign decides what white space goes. */
static void add_text(struct parse *s, struct chat_node *list, const char *tag)
{
    const char *from = s->p, *end = tag;
    const bool block = tag < s->end && tag[1] != '{';
    if (s->trim_newline && from < end && *from == '\n')
        from++;
    if (s->trim)
        while (from < end && isspace((unsigned char)*from))
            from++;
    if (tag < s->end && tag[2] == '-') {
        while (end > from && isspace((unsigned char)end[-1]))
            end--;
    } else if (block && tag[2] != '+') { /* blanks between the start of the line and the tag */
        const char *p = end;
        while (p > from && is_blank(p[-1]))
            p--;
        if (p == s->text || p[-1] == '\n')
            end = p;
    }
    s->trim = s->trim_newline = false;
    if (end > from) {
        struct chat_node *n = literal(s, json_stringn_nocheck(from, (size_t)(end - from)));
        if (n)
            n->kind = CHAT_TEXT;
        add(s, list, n);
    }
    s->p = tag;
}

/* The next "{{", "{%" or "{#", or the end. */
static const char *find_tag(const struct parse *s)
{
    const char *p = s->p;
    while ((p = memchr(p, '{', (size_t)(s->end - p))) != NULL) {
        if (p[1] == '{' || p[1] == '%' || p[1] == '#')
            return p;
        p++;
    }
    return s->end;
}

static void skip_comment(struct parse *s)
{
    const char *end = strstr(s->p + 2, "#}");
    if (!end) {
        broken(s, "a comment without end", "");
        return;
    }
    s->trim = end[-1] == '-';
    s->trim_newline = true;
    s->p = end + 2;
}

static void begin_tag(struct parse *s)
{
    s->in_print = s->p[1] == '{';
    s->p += 2;
    if (*s->p == '-' || (*s->p == '+' && !s->in_print))
        s->p++;
    next(s);
}

/* Statements up to a tag that begins with one of ends[], whose name is then *which and has been
 * taken; ends = NULL: up to the end of the text. */
static struct chat_node *statements(struct parse *s, const char *const *ends, const char **which)
{
    struct chat_node *list = node(s, CHAT_LIST);
    *which = "";
    if (!enter(s))
        return NULL;
    while (s->rc == QT_OK) {
        const char *tag = find_tag(s);
        add_text(s, list, tag);
        if (s->p == s->end) {
            if (ends)
                broken(s, "the end of the template comes before", ends[0]);
            break;
        }
        if (tag[1] == '#') {
            skip_comment(s);
            continue;
        }
        begin_tag(s);
        if (s->in_print) {
            add(s, list, with(s, CHAT_PRINT, expression_list(s), NULL));
            end_tag(s);
            continue;
        }
        for (size_t i = 0; ends && ends[i] && !**which; i++)
            if (take_word(s, ends[i]))
                *which = ends[i];
        if (**which)
            break;
        add(s, list, statement(s));
    }
    s->depth--;
    return list;
}

int chat_parse(struct chat_tree *out, const char *text, const char *file, struct qt_err *err)
{
    struct parse s = {
        .tree = out, .file = file, .text = text, .p = text, .counted = text, .line = 1, .err = err};
    const char *which;
    size_t n = strlen(text);
    *out = (struct chat_tree){0};
    if (n && text[n - 1] == '\n')
        n--;
    s.end = text + n;
    out->root = statements(&s, NULL, &which);
    json_decref(s.token.value);
    return s.rc;
}

void chat_tree_free(struct chat_tree *tree)
{
    for (size_t i = 0; i < tree->count; i++) {
        struct chat_node *n = tree->all[i];
        json_decref(n->value);
        for (size_t j = 0; j < n->nnames; j++)
            qt_free(n->names[j]);
        qt_free(n->names);
        qt_free(n->kids);
        qt_free(n);
    }
    qt_free(tree->all);
    *tree = (struct chat_tree){0};
}
