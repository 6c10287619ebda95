/*
 * Chat template -> nodes. The settings are those of Hugging Face transformers: trim_blocks,
 * lstrip_blocks, no trailing newline of the file.
 */
#include "model/chat/parse.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { MAX_DEPTH = 100, MAX_NODES = 1 << 20 };

/* ---- nodes ---------------------------------------------------------------------------------- */

static struct chat_node *node(struct parse *s, enum chat_kind kind)
{
    struct chat_tree *t = s->tree;
    struct chat_node *n = NULL;
    if (s->rc < 0)
        return NULL;
    if (t->count == MAX_NODES)
        parse_broken(s, "the template is too long", "");
    int rc = qt_array_new(&n, 1, sizeof *n, s->err);
    if (rc == QT_OK)
        rc = qt_array_grow(&t->all, &t->capacity, t->count + 1, sizeof *t->all, s->err);
    if (rc < 0 || s->rc < 0) {
        qt_free(n);
        s->rc = s->rc < 0 ? s->rc : rc;
        return NULL;
    }
    n->kind = kind;
    n->line = parse_line(s);
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

/* Takes ownership of the value. */
static struct chat_node *literal(struct parse *s, json_t *value)
{
    struct chat_node *n = node(s, CHAT_LITERAL);
    if (!value)
        parse_no_memory(s);
    if (n)
        n->value = value;
    else
        json_decref(value);
    return n;
}

/* ---- expressions ---------------------------------------------------------------------------- */

static struct chat_node *expression(struct parse *s);

static bool enter(struct parse *s)
{
    if (++s->depth > MAX_DEPTH)
        parse_unsupported(s, "more than 100 nested expressions or blocks", "");
    return s->rc == QT_OK;
}

/* Elements up to the symbol `end`; *comma: there was a comma, which makes a tuple. */
static struct chat_node *elements(struct parse *s, const char *end, bool *comma)
{
    struct chat_node *n = node(s, CHAT_ARRAY);
    *comma = false;
    while (s->rc == QT_OK && !parse_at_symbol(s, end)) {
        add(s, n, expression(s));
        if (!parse_take_symbol(s, ","))
            break;
        *comma = true;
    }
    parse_need_symbol(s, end);
    return n;
}

static struct chat_node *dict(struct parse *s)
{
    struct chat_node *n = node(s, CHAT_DICT);
    while (s->rc == QT_OK && !parse_at_symbol(s, "}")) {
        add(s, n, expression(s));
        parse_need_symbol(s, ":");
        add(s, n, expression(s));
        if (!parse_take_symbol(s, ","))
            break;
    }
    parse_need_symbol(s, "}");
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
    parse_need_name(s, name);
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
        parse_next(s);
        return n;
    case STRING:
        n = literal(s, json_incref(s->token.value));
        for (parse_next(s); s->token.kind == STRING && s->rc == QT_OK; parse_next(s))
            parse_unsupported(s, "strings side by side", "");
        return n;
    default:
        break;
    }
    if (parse_take_symbol(s, "[")) {
        return elements(s, "]", &comma);
    } else if (parse_take_symbol(s, "{")) {
        return dict(s);
    } else if (parse_take_symbol(s, "(")) {
        n = elements(s, ")", &comma);
        return n && n->count == 1 && !comma ? n->kids[0] : n;
    }
    parse_broken(s, "an expression is missing before",
                 s->token.kind == SYMBOL ? s->token.text : "the end");
    return NULL;
}

/* Arguments up to ")"; the node's names are their keywords. */
static void arguments(struct parse *s, struct chat_node *n)
{
    while (s->rc == QT_OK && !parse_at_symbol(s, ")")) {
        struct chat_node *value = expression(s);
        if (value && value->kind == CHAT_NAME && parse_take_symbol(s, "=")) {
            add_name(s, n, value->names[0]);
            value = expression(s);
        } else {
            add_name(s, n, NULL);
        }
        add(s, n, value);
        if (!parse_take_symbol(s, ","))
            break;
    }
    parse_need_symbol(s, ")");
}

static struct chat_node *subscript(struct parse *s, struct chat_node *object)
{
    struct chat_node *parts[3] = {NULL};
    bool slice = false;
    for (int i = 0; i < 3; i++) {
        if (!parse_at_symbol(s, ":") && !parse_at_symbol(s, "]"))
            parts[i] = expression(s);
        if (!parse_take_symbol(s, ":"))
            break;
        slice = true;
    }
    parse_need_symbol(s, "]");
    if (!slice) {
        if (!parts[0])
            parse_broken(s, "an index is missing", "");
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
    parse_need_name(s, name);
    struct chat_node *n = named(s, CHAT_FILTER, name);
    add(s, n, object);
    if (parse_take_symbol(s, "("))
        arguments(s, n);
    return n;
}

static struct chat_node *postfix(struct parse *s)
{
    struct chat_node *n = primary(s);
    while (s->rc == QT_OK) {
        if (parse_take_symbol(s, ".")) {
            char name[64];
            if (s->rc == QT_OK && s->token.kind == INTEGER) { /* messages.0 is messages[0] */
                n = with(s, CHAT_ITEM, n, primary(s));
                continue;
            }
            parse_need_name(s, name);
            struct chat_node *attr = named(s, CHAT_ATTR, name);
            add(s, attr, n);
            n = attr;
        } else if (parse_take_symbol(s, "[")) {
            n = subscript(s, n);
        } else if (parse_take_symbol(s, "(")) {
            struct chat_node *call = node(s, CHAT_CALL);
            if (n && n->kind != CHAT_NAME && n->kind != CHAT_ATTR)
                parse_unsupported(s, "a call of a value", "");
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
    const bool negated = parse_take_word(s, "not");
    char name[64];
    parse_need_name(s, name);
    struct chat_node *n = named(s, CHAT_TEST, name);
    add(s, n, object);
    if (parse_take_symbol(s, "(")) {
        arguments(s, n);
    } else if ((s->token.kind == NAME && !parse_at_word(s, "and") && !parse_at_word(s, "or") &&
                !parse_at_word(s, "else") && !parse_at_word(s, "if") && !parse_at_word(s, "is") &&
                !parse_at_word(s, "not") && !parse_at_word(s, "in")) ||
               s->token.kind == STRING || s->token.kind == INTEGER || s->token.kind == REAL ||
               parse_at_symbol(s, "[")) {
        add(s, n, postfix(s));
        add_name(s, n, NULL);
    }
    return negated ? with(s, CHAT_NOT, n, NULL) : n;
}

static struct chat_node *filtered(struct parse *s, struct chat_node *n)
{
    while (s->rc == QT_OK) {
        if (parse_take_symbol(s, "|"))
            n = filter(s, n);
        else if (parse_take_word(s, "is"))
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
        if (parse_take_symbol(s, "-"))
            n = with(s, CHAT_NEGATE, operand(s), NULL);
        else if (parse_take_symbol(s, "+"))
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
            op = parse_take_symbol(s, symbols[i]) ? symbols[i] : NULL;
        if (!op && parse_take_word(s, "in"))
            op = "in";
        if (!op && parse_take_word(s, "not")) {
            op = "not in";
            if (!parse_take_word(s, "in"))
                parse_broken(s, "'in' is missing after 'not'", "");
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
    if (level == NOT_LEVEL && parse_take_word(s, "not")) {
        struct chat_node *n = enter(s) ? with(s, CHAT_NOT, binary(s, NOT_LEVEL), NULL) : NULL;
        s->depth--;
        return n;
    }
    if (level == COMPARE_LEVEL)
        return comparison(s);
    struct chat_node *left = binary(s, level + 1);
    for (size_t i = 0; i < 4 && levels[level][i];) {
        const char *op = levels[level][i];
        const bool found =
            isalpha((unsigned char)*op) ? parse_take_word(s, op) : parse_take_symbol(s, op);
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
        while (parse_take_word(s, "if")) {
            struct chat_node *n = with(s, CHAT_CHOICE, binary(s, 0), value);
            if (parse_take_word(s, "else"))
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
    if (!parse_at_symbol(s, ","))
        return first;
    n = with(s, CHAT_ARRAY, first, NULL);
    while (parse_take_symbol(s, ","))
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
    if (s->token.kind != END_OF_TAG || !(after = parse_tag_end(s, s->p))) {
        parse_broken(s, "unexpected",
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
    const bool parentheses = parse_take_symbol(s, "(");
    do {
        parse_need_name(s, name);
        add_name(s, n, name);
    } while (parse_take_symbol(s, ","));
    if (parentheses)
        parse_need_symbol(s, ")");
}

static struct chat_node *for_statement(struct parse *s)
{
    const char *which;
    struct chat_node *n = node(s, CHAT_FOR);
    targets(s, n);
    if (!parse_take_word(s, "in"))
        parse_broken(s, "'in' is missing", "");
    add(s, n, binary(s, 0)); /* no "if" of an expression: a filter may follow */
    add(s, n, parse_take_word(s, "if") ? expression(s) : NULL);
    if (parse_at_word(s, "recursive"))
        parse_unsupported(s, "a recursive loop", "");
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
    if (parse_take_symbol(
            s, ".")) { /* a member of a namespace: names are the variable and the member */
        if (s->rc == QT_OK && n->nnames != 1)
            parse_unsupported(s, "an assignment to several members", "");
        parse_need_name(s, name);
        add_name(s, n, name);
        struct chat_node *member = named(s, CHAT_ATTR, name);
        add(s, n, member);
    } else {
        add(s, n, NULL);
    }
    if (parse_take_symbol(s, "=")) {
        add(s, n, expression_list(s));
        end_tag(s);
        return n;
    }
    if (parse_at_symbol(s, "|"))
        parse_unsupported(s, "a filter of a block", "");
    if (s->rc == QT_OK && (n->nnames != 1 || n->kids[0]))
        parse_broken(s, "missing", "=");
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
    parse_need_name(s, name);
    add_name(s, n, name);
    add(s, n, NULL); /* the body */
    parse_need_symbol(s, "(");
    while (s->rc == QT_OK && !parse_at_symbol(s, ")")) {
        parse_need_name(s, name);
        add_name(s, n, name);
        add(s, n, parse_take_symbol(s, "=") ? expression(s) : NULL);
        if (!parse_take_symbol(s, ","))
            break;
    }
    parse_need_symbol(s, ")");
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
    if (parse_take_word(s, "if"))
        return if_statement(s);
    if (parse_take_word(s, "for"))
        return for_statement(s);
    if (parse_take_word(s, "set"))
        return set_statement(s);
    if (parse_take_word(s, "macro"))
        return macro_statement(s);
    if (parse_take_word(s, "generation")) { /* marks what an assistant says */
        end_tag(s);
        n = statements(s, ends, &which);
        end_tag(s);
        return n;
    }
    const bool leaves = parse_at_word(s, "break");
    if (leaves || parse_at_word(s, "continue")) {
        if (!s->loops)
            parse_broken(s, "outside of a loop", s->token.text);
        parse_next(s);
        n = node(s, leaves ? CHAT_BREAK : CHAT_CONTINUE);
        end_tag(s);
        return n;
    }
    parse_unsupported(s, "statement", s->token.text);
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
        parse_broken(s, "a comment without end", "");
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
    parse_next(s);
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
                parse_broken(s, "the end of the template comes before", ends[0]);
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
            if (parse_take_word(s, ends[i]))
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
