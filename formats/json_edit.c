/* Textual changes of a JSON object. The text is parsed first, so the walk below sees valid JSON. */
#include "formats/formats.h"

#include <stdio.h>
#include <string.h>

/* A member of an object: `{ "key": value , ...`; positions in the text. */
struct member {
    size_t before;           /* behind the '{' or ',' that precedes it */
    size_t key, colon;       /* the string, with its quotes, is [key, colon) */
    size_t value, value_end; /* without white space */
    size_t separator;        /* the ',' or '}' that follows it */
};

/* A change of one member: it is replaced, added or removed. */
struct edit {
    const char *text, *file;
    size_t size;
    size_t object; /* position of the '{' of the innermost object on the path */
    struct member member, last;
    bool found, empty; /* the member exists; the object has no members */
};

static size_t skip_space(const char *text, size_t at)
{
    return at + strspn(text + at, " \t\r\n");
}

/* The position behind the string that begins at `at`. */
static size_t skip_string(const char *text, size_t at)
{
    for (at++; text[at] != '"'; at++)
        at += text[at] == '\\';
    return at + 1;
}

/* The position behind the value that begins at `at`. */
static size_t skip_value(const char *text, size_t at)
{
    size_t depth = 0;
    if (text[at] != '"' && text[at] != '{' && text[at] != '[')
        return at + strcspn(text + at, ",]} \t\r\n");
    do {
        if (text[at] == '"') {
            at = skip_string(text, at);
            continue;
        }
        depth += text[at] == '{' || text[at] == '[';
        depth -= text[at] == '}' || text[at] == ']';
        at++;
    } while (depth);
    return at;
}

/* Sets *same if the string [at, end) of the text, which may have escapes, is `key` of `size`
 * bytes. */
static int compare_key(bool *same, const struct edit *e, size_t at, size_t end, const char *key,
                       size_t size, struct qt_err *err)
{
    json_t *string;
    if (!memchr(e->text + at, '\\', end - at)) {
        *same = end - at == size + 2 && memcmp(e->text + at + 1, key, size) == 0;
        return QT_OK;
    }
    int rc = qt_json_parse_data(&string, e->text + at, end - at, 1, "\\ufffd", e->file, err);
    if (rc < 0)
        return rc;
    *same = json_string_length(string) == size && memcmp(json_string_value(string), key, size) == 0;
    json_decref(string);
    return QT_OK;
}

/* Finds the member `key` of the object at e->object, and its last member. */
static int find_member(struct edit *e, const char *key, size_t key_size, struct qt_err *err)
{
    const char *text = e->text;
    size_t at = e->object;
    e->found = false;
    e->empty = text[skip_space(text, at + 1)] == '}';
    while (!e->empty) {
        struct member m = {.before = at + 1, .key = skip_space(text, at + 1)};
        bool same;
        m.colon = skip_string(text, m.key);
        m.value = skip_space(text, skip_space(text, m.colon) + 1);
        m.value_end = skip_value(text, m.value);
        m.separator = at = skip_space(text, m.value_end);
        int rc = compare_key(&same, e, m.key, m.colon, key, key_size, err);
        if (rc < 0)
            return rc;
        if (same)
            e->member = m;
        e->found |= same;
        e->last = m;
        if (text[at] == '}')
            break;
    }
    return QT_OK;
}

/* Checks the text and follows the path to the innermost object. *reached = false: an object on the
 * way is missing or not an object. */
static int find_path(bool *reached, struct edit *e, const char *path, struct qt_err *err)
{
    json_t *root;
    int rc = qt_json_parse_lenient(&root, e->text, e->size, e->file, err);
    if (rc < 0)
        return rc;
    if (!json_is_object(root))
        rc = qt_fail(err, QT_E_INPUT, e->file, NULL, "is %s, but an object is expected",
                     qt_json_type(root));
    json_decref(root);
    e->object = skip_space(e->text, 0);
    *reached = true;
    while (rc == QT_OK) {
        const size_t size = strcspn(path, "/");
        rc = find_member(e, path, size, err);
        if (rc < 0 || !path[size])
            break;
        *reached = e->found && e->text[e->member.value] == '{';
        if (!*reached)
            break;
        e->object = e->member.value;
        path += size + 1;
    }
    return rc;
}

/* *out = the text with [from, to) replaced. */
static int replace(char **out, size_t *out_size, const struct edit *e, size_t from, size_t to,
                   const char *by, struct qt_err *err)
{
    const size_t n = strlen(by), tail = e->size - to;
    int rc = qt_array_new(out, from + n + tail + 1, 1, err);
    if (rc < 0)
        return rc;
    memcpy(*out, e->text, from);
    memcpy(*out + from, by, n);
    memcpy(*out + from + n, e->text + to, tail);
    *out_size = from + n + tail;
    return QT_OK;
}

/* The value as text. Where members have lines of their own, so have those of the value, indented
 * by `space`, the white space before the member. */
static int format_value(char **out, const json_t *value, const char *space, size_t space_size,
                        struct qt_err *err)
{
    enum { WIDTH = 2 };
    size_t line = space_size; /* where the last line of `space` begins */
    while (line && space[line - 1] != '\n')
        line--;
    const size_t indent = space_size - line;
    char *text;
    size_t size, at = 0;
    *out = NULL;
    int rc =
        qt_json_text(&text, &size, value, JSON_ENCODE_ANY | (line ? JSON_INDENT(WIDTH) : 0), err);
    if (rc < 0)
        return rc;
    for (const char *c = text; *c; c++)
        size += *c == '\n' ? indent : 0;
    rc = qt_array_new(out, size + 1, 1, err);
    for (const char *c = text; rc == QT_OK && *c; c++) {
        (*out)[at++] = *c;
        if (*c == '\n') {
            memcpy(*out + at, space + line, indent);
            at += indent;
        }
    }
    qt_free(text);
    return rc;
}

int qt_json_edit_set(char **out, size_t *out_size, const char *text, size_t size, const char *path,
                     const json_t *value, const char *file, struct qt_err *err)
{
    struct edit e = {.text = text, .size = size, .file = file};
    char *formatted = NULL, *member = NULL;
    const char *key = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    bool reached;
    int rc;
    *out = NULL;
    QT_TRY(find_path(&reached, &e, path, err));
    if (!reached) {
        rc = qt_fail(err, QT_E_INPUT, file, NULL, "'%s' has no place: an object is missing", path);
        goto done;
    }
    const struct member *m = e.found ? &e.member : &e.last;
    const char *space = e.empty ? "" : text + m->before;
    const size_t space_size = e.empty ? 0 : m->key - m->before;
    QT_TRY(format_value(&formatted, value, space, space_size, err));
    if (e.found) {
        QT_TRY(replace(out, out_size, &e, m->value, m->value_end, formatted, err));
        goto done;
    }
    const size_t at = e.empty ? e.object + 1 : m->value_end;
    QT_TRY(qt_string_format(&member, err, "%s%.*s\"%s\": %s", e.empty ? "" : ",", (int)space_size,
                            space, key, formatted));
    QT_TRY(replace(out, out_size, &e, at, at, member, err));
done:
    qt_free(formatted);
    qt_free(member);
    return rc;
}

int qt_json_edit_remove(char **out, size_t *out_size, const char *text, size_t size,
                        const char *path, const char *file, struct qt_err *err)
{
    struct edit e = {.text = text, .size = size, .file = file};
    bool reached;
    *out = NULL;
    int rc = find_path(&reached, &e, path, err);
    if (rc < 0)
        return rc;
    if (!reached || !e.found)
        return replace(out, out_size, &e, 0, 0, "", err);
    const struct member *m = &e.member;
    if (text[m->separator] == ',') /* the next member keeps the white space before it */
        return replace(out, out_size, &e, m->before, m->separator + 1, "", err);
    /* The last member: the comma before it goes too. */
    const size_t from = text[m->before - 1] == ',' ? m->before - 1 : m->before;
    return replace(out, out_size, &e, from, m->value_end, "", err);
}
