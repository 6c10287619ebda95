/* JSON whose values take too much memory together: Jansson's take ten times that of the text. */
#include "formats/writer_internal.h"

#include <string.h>
#include <unistd.h>

/* ---- reading -------------------------------------------------------------------------------- */

static void skip_space(struct qt_json_cursor *c)
{
    while (c->at < c->end && *c->at && strchr(" \t\n\r", *c->at))
        c->at++;
}

static bool accept(struct qt_json_cursor *c, char expected)
{
    skip_space(c);
    if (c->at == c->end || *c->at != expected)
        return false;
    c->at++;
    return true;
}

/* Moves behind a string that begins at c->at. */
static void skip_string(struct qt_json_cursor *c)
{
    for (c->at++; c->at < c->end && *c->at != '"'; c->at++)
        c->at += *c->at == '\\' && c->at + 1 < c->end;
    c->at += c->at < c->end;
}

/* Moves to the comma or bracket after a part. */
static void skip_part(struct qt_json_cursor *c)
{
    for (int depth = 0; c->at < c->end;) {
        const char ch = *c->at;
        if (depth == 0 && (ch == ',' || ch == '}' || ch == ']'))
            return;
        depth += (ch == '{' || ch == '[') - (ch == '}' || ch == ']');
        if (ch == '"')
            skip_string(c);
        else
            c->at++;
    }
}

bool qt_json_enter(struct qt_json_cursor *c, struct qt_json_part text, char open)
{
    *c = (struct qt_json_cursor){text.text, text.text + text.size, open == '{' ? '}' : ']', true};
    return accept(c, open);
}

enum qt_json_step qt_json_next(struct qt_json_part *out, struct qt_json_cursor *c)
{
    const bool first = c->first;
    c->first = false;
    if (accept(c, c->close)) {
        skip_space(c);
        return c->at == c->end ? QT_JSON_END : QT_JSON_FAULT;
    }
    if (!first && !accept(c, ','))
        return QT_JSON_FAULT;
    skip_space(c);
    out->text = c->at;
    skip_part(c);
    out->size = (size_t)(c->at - out->text);
    return QT_JSON_PART;
}

bool qt_json_part_value(struct qt_json_part *value, struct qt_json_part member, const char *key)
{
    const size_t n = strlen(key);
    struct qt_json_cursor c = {member.text, member.text + member.size, 0, false};
    if (member.size < n + 2 || member.text[0] != '"' || memcmp(member.text + 1, key, n) != 0 ||
        member.text[n + 1] != '"')
        return false;
    c.at += n + 2;
    if (!accept(&c, ':'))
        return false;
    skip_space(&c);
    *value = (struct qt_json_part){c.at, (size_t)(c.end - c.at)};
    return true;
}

int qt_json_parse_part(json_t **out, struct qt_json_part part, char open, bool lenient,
                       const char *file, struct qt_err *err)
{
    char *text;
    *out = NULL;
    int rc = qt_array_new(&text, part.size + 3, 1, err);
    if (rc < 0)
        return rc;
    text[0] = open;
    memcpy(text + 1, part.text, part.size);
    text[part.size + 1] = open == '{' ? '}' : ']';
    rc = (lenient ? qt_json_parse_lenient : qt_json_parse)(out, text, part.size + 2, file, err);
    qt_free(text);
    if (rc == QT_OK && (open == '{' ? json_object_size(*out) : json_array_size(*out)) != 1) {
        json_decref(*out);
        *out = NULL;
        rc = qt_fail(err, QT_E_INPUT, file, NULL, "invalid JSON");
    }
    return rc;
}

/* ---- writing -------------------------------------------------------------------------------- */

int qt_json_text(char **out, size_t *size, const json_t *value, size_t flags, struct qt_err *err)
{
    *out = NULL;
    *size = json_dumpb(value, NULL, 0, flags);
    if (*size == 0)
        return qt_no_memory(err, NULL);
    int rc = qt_array_new(out, *size + 1, 1, err);
    if (rc < 0)
        return rc;
    if (json_dumpb(value, *out, *size, flags) != *size) { /* allocates and may fail */
        qt_free(*out);
        *out = NULL;
        return qt_no_memory(err, NULL);
    }
    return QT_OK;
}

enum { BUFFER = 1 << 16 };

static int flush(struct qt_json_out *o, struct qt_err *err)
{
    if (!o->path)
        return QT_OK;
    int rc = qt_file_write_at(o->fd, o->path, o->buffer, o->used, o->at, err);
    o->at += o->used;
    o->used = 0;
    return rc;
}

static int put(struct qt_json_out *o, const char *text, size_t size, struct qt_err *err)
{
    int rc = QT_OK;
    while (o->path && size && rc == QT_OK) {
        const size_t n = qt_min_size(size, BUFFER - o->used);
        memcpy(o->buffer + o->used, text, n);
        o->used += n;
        text += n;
        size -= n;
        if (o->used == BUFFER)
            rc = flush(o, err);
    }
    return rc;
}

/* A line break and the indent of a part of the object, or of the list in it. */
static int new_line(struct qt_json_out *o, bool in_list, struct qt_err *err)
{
    return put(o, "\n  ", in_list ? 3 : 2, err);
}

/* Text of several lines, each but the first indented. */
static int put_lines(struct qt_json_out *o, const char *text, size_t size, bool in_list,
                     struct qt_err *err)
{
    const char *end;
    int rc;
    while ((end = memchr(text, '\n', size)) != NULL) {
        QT_TRY(put(o, text, (size_t)(end - text), err));
        QT_TRY(new_line(o, in_list, err));
        size -= (size_t)(end + 1 - text);
        text = end + 1;
    }
    QT_TRY(put(o, text, size, err));
done:
    return rc;
}

static int put_value(struct qt_json_out *o, const json_t *value, struct qt_err *err)
{
    char *text;
    size_t size;
    /* 9 digits distinguish all FP32 values; a fixed number gives the same text everywhere. */
    int rc = qt_json_text(&text, &size, value,
                          JSON_INDENT(1) | JSON_REAL_PRECISION(9) | JSON_ENCODE_ANY, err);
    if (rc == QT_OK)
        rc = put_lines(o, text, size, o->close != 0, err);
    qt_free(text);
    return rc;
}

/* Writes the comma after the part before, a new line, and the key, if there is one. */
static int put_key(struct qt_json_out *o, const char *key, struct qt_err *err)
{
    json_t *string = key ? json_string(key) : NULL;
    int rc = key && !string ? qt_no_memory(err, o->path) : QT_OK;
    QT_TRY(rc);
    if (!o->first)
        QT_TRY(put(o, ",", 1, err));
    o->first = false;
    QT_TRY(new_line(o, o->close != 0, err));
    if (key) {
        QT_TRY(put_value(o, string, err));
        QT_TRY(put(o, ": ", 2, err));
    }
done:
    json_decref(string);
    return rc;
}

int qt_json_out_open(struct qt_json_out *o, const char *dir, const char *name, struct qt_err *err)
{
    int rc;
    *o = (struct qt_json_out){.fd = -1, .first = true};
    QT_TRY(qt_path_join(&o->path, dir, name, err));
    QT_TRY(qt_array_new(&o->buffer, BUFFER, 1, err));
    QT_TRY(qt_file_create(&o->fd, o->path, false, err));
    QT_TRY(put(o, "{", 1, err));
done:
    return rc;
}

int qt_json_out_value(struct qt_json_out *o, const char *key, const json_t *value,
                      struct qt_err *err)
{
    int rc = put_key(o, key, err);
    return rc < 0 ? rc : put_value(o, value, err);
}

int qt_json_out_members(struct qt_json_out *o, const json_t *object, struct qt_err *err)
{
    const char *key;
    json_t *value;
    int rc;
    json_object_foreach ((json_t *)(uintptr_t)object, key, value) {
        if ((rc = qt_json_out_value(o, key, value, err)) < 0)
            return rc;
    }
    return QT_OK;
}

int qt_json_out_begin(struct qt_json_out *o, const char *key, char open, struct qt_err *err)
{
    int rc = put_key(o, key, err);
    o->first = true;
    o->close = open == '{' ? '}' : ']';
    return rc < 0 ? rc : put(o, &open, 1, err);
}

int qt_json_out_end(struct qt_json_out *o, struct qt_err *err)
{
    const char close = o->close;
    int rc = o->first ? QT_OK : new_line(o, false, err);
    o->close = 0;
    o->first = false;
    return rc < 0 ? rc : put(o, &close, 1, err);
}

int qt_json_out_finish(struct qt_json_out *o, struct qt_err *err)
{
    int rc;
    QT_TRY(put(o, o->first ? "}\n" : "\n}\n", o->first ? 2 : 3, err));
    QT_TRY(flush(o, err));
    if (o->path)
        QT_TRY(qt_file_finish(&o->fd, o->path, err));
done:
    return rc;
}

void qt_json_out_close(struct qt_json_out *o)
{
    if (o->path && o->fd >= 0)
        close(o->fd);
    qt_free(o->path);
    qt_free(o->buffer);
    *o = (struct qt_json_out){.fd = -1};
}
