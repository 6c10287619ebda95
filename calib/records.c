#include "calib/data.h"

#include <stdio.h>
#include <string.h>

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

/* ---- does a text begin as JSON? ------------------------------------------------------------- */

static size_t skip_blanks(const char *s, size_t size, size_t at)
{
    while (at < size && is_blank(s[at]))
        at++;
    return at;
}

/* The place after the string that begins at `at`, or 0. */
static size_t skip_string(const char *s, size_t size, size_t at)
{
    for (at++; at < size && s[at] != '\n'; at++)
        if (s[at] == '\\')
            at++;
        else if (s[at] == '"')
            return at + 1;
    return 0;
}

/* "{}", or a brace, a string and a colon. */
static bool is_object(const char *s, size_t size, size_t at)
{
    at = skip_blanks(s, size, at + 1);
    if (at < size && s[at] == '}')
        return true;
    at = at < size && s[at] == '"' ? skip_string(s, size, at) : 0;
    if (!at)
        return false;
    at = skip_blanks(s, size, at);
    return at < size && s[at] == ':';
}

/* Numbers in brackets; after the bracket that matches the first one only other arrays. */
static bool is_number_array(const char *s, size_t size, size_t at)
{
    size_t depth = 0;
    for (; at < size; at++) {
        if (depth == 0 && s[at] != '[')
            return is_blank(s[at]) && (at = skip_blanks(s, size, at), at == size || s[at] == '[');
        if (s[at] == '[')
            depth++;
        else if (s[at] == ']')
            depth--;
        else if (!is_blank(s[at]) && !strchr("+-.,eE0123456789", s[at]))
            return false;
    }
    return true;
}

bool qt_text_is_json(const char *s, size_t size)
{
    size_t at = skip_blanks(s, size, 0);
    if (at < size && s[at] == '{')
        return is_object(s, size, at);
    if (at == size || s[at] != '[')
        return false;
    const size_t open = at;
    at = skip_blanks(s, size, at + 1);
    if (at < size && s[at] == '{')
        return is_object(s, size, at);
    if (at == size || s[at] != '"')
        return is_number_array(s, size, open);
    at = skip_string(s, size, at);
    at = at ? skip_blanks(s, size, at) : size;
    if (at < size && s[at] == ']') { /* ["one string"], and nothing more on the line */
        at += 1 + strcspn(s + at + 1, "\n");
        for (at--; at > open && is_blank(s[at]); at--)
            ;
        return s[at] == ']';
    }
    return at < size && s[at] == ',';
}

/* ---- one record ----------------------------------------------------------------------------- */

/* Names the members of a record that has no "text". */
static int no_text(const json_t *record, size_t line, const char *file, struct qt_err *err)
{
    char names[200] = "";
    const char *key;
    json_t *value;
    size_t n = 0;
    json_object_foreach ((json_t *)(uintptr_t)record, key, value) {
        if (n < sizeof names - 1)
            n += (size_t)snprintf(names + n, sizeof names - n, "%s\"%.40s\"", n ? ", " : "", key);
    }
    return qt_fail(err, QT_E_INPUT, file, NULL,
                   "line %zu: the record has no \"text\" or \"messages\", but %s%s", line,
                   *names ? names : "no members", n >= sizeof names - 1 ? "..." : "");
}

/* True if the text holds U+FFFD in place of a lone surrogate, not as it was written. */
static bool lost_surrogate(const json_t *text, const char *record, size_t size, const char *file)
{
    json_t *other = NULL;
    if (!memmem(json_string_value(text), json_string_length(text), "\xef\xbf\xbd", 3))
        return false;
    if (qt_json_parse_data(&other, record, size, 1, "\\ufffe", file, NULL) < 0)
        return true;
    const bool lost =
        !json_equal(text, json_is_string(other) ? other : json_object_get(other, "text"));
    json_decref(other);
    return lost;
}

static int read_record(bool *stop, const struct qt_record_sink *sink, const char *record,
                       size_t size, size_t line, const char *file, struct qt_err *err)
{
    json_t *root = NULL;
    int rc;
    QT_TRY(qt_json_parse_data(&root, record, size, line, "\\ufffd", file, err));
    const json_t *text = json_is_string(root) ? root : json_object_get(root, "text");
    const char *key;
    if (qt_json_literal(root) || (!json_is_object(root) && !json_is_string(root)))
        rc = qt_fail(err, QT_E_INPUT, file, NULL,
                     "line %zu: a record must be a string or an object with \"text\", not %s", line,
                     qt_json_type(root));
    else if (!text && qt_chat_list(root, &key))
        rc = sink->chat(sink->ctx, stop, root, line, err);
    else if (!text)
        rc = no_text(root, line, file, err);
    else if (!json_is_string(text))
        rc = qt_fail(err, QT_E_INPUT, file, NULL, "line %zu: \"text\" must be a string, not %s",
                     line, qt_json_type(text));
    else if (lost_surrogate(text, record, size, file))
        rc = qt_fail(err, QT_E_INPUT, file, NULL,
                     "line %zu: \"text\" has a lone surrogate (\\ud800 to \\udfff), which is no "
                     "character: write \\ufffd instead",
                     line);
    else
        rc = sink->text(sink->ctx, stop, json_string_value(text), json_string_length(text), line,
                        err);
done:
    json_decref(root);
    return rc;
}

/* ---- finding records ------------------------------------------------------------------------ */

static int skip(struct qt_stream *s, struct qt_err *err)
{
    int rc;
    for (;;) {
        QT_TRY(qt_stream_fill(s, 1, err));
        const size_t n = skip_blanks(s->data, s->size, 0);
        if (n == 0)
            break;
        qt_stream_consume(s, n);
    }
done:
    return rc;
}

/*
 * *size = bytes of the value at the start of the stream, valid or not, which has `line` lines. In
 * an array it ends where it is complete. Otherwise it ends with a line; an object or array goes on
 * in the next line if that is indented or begins with a closing bracket.
 */
static int find_value(size_t *size, struct qt_stream *s, bool in_array, struct qt_err *err)
{
    bool in_string = false;
    size_t depth = 0, i = 0;
    int rc = QT_OK;
    for (;; i++) {
        QT_TRY(qt_stream_fill(s, i + 2, err));
        if (i == s->size)
            break;
        const char c = s->data[i];
        const char next = i + 1 < s->size ? s->data[i + 1] : '\0';
        if (c == '\n') {
            const bool goes_on =
                depth && !in_string && next && (in_array || strchr(" \t\r\n]}", next));
            if (!goes_on && (!in_array || in_string))
                break;
        }
        if (in_string) {
            if (c == '"')
                in_string = false;
            else if (c == '\\' && next && next != '\n')
                i++;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if ((c == '}' || c == ']') && depth) {
            depth--;
        } else if (in_array && depth == 0 && (is_blank(c) || c == ',' || c == ']')) {
            break;
        }
        if (in_array && !in_string && depth == 0 && (c == '"' || c == '}' || c == ']')) {
            i++;
            break;
        }
    }
    *size = i;
done:
    return rc;
}

static int expected(const struct qt_stream *s, const char *what, struct qt_err *err)
{
    return qt_fail(err, QT_E_INPUT, s->path, NULL, "line %zu: %s", s->lines + 1, what);
}

/* The elements of an array, after its bracket. */
static int read_elements(struct qt_stream *s, const struct qt_record_sink *sink, bool *stop,
                         struct qt_err *err)
{
    size_t size;
    int rc;
    QT_TRY(skip(s, err));
    for (bool first = true; !(s->size && s->data[0] == ']'); first = false) {
        if (!first && s->size && s->data[0] != ',')
            return expected(s, "',' or ']' expected after an element of the array", err);
        if (!first && s->size) {
            qt_stream_consume(s, 1);
            QT_TRY(skip(s, err));
        }
        if (!s->size)
            return expected(s, "the array does not end: the file is truncated", err);
        QT_TRY(find_value(&size, s, true, err));
        if (size == 0)
            return expected(s, "the array lacks an element", err);
        QT_TRY(read_record(stop, sink, s->data, size, s->lines + 1, s->path, err));
        if (*stop)
            return QT_OK;
        qt_stream_consume(s, size);
        QT_TRY(skip(s, err));
    }
    qt_stream_consume(s, 1);
    QT_TRY(skip(s, err));
    if (s->size)
        return expected(s, "more data after the array", err);
done:
    return rc;
}

int qt_records_read(struct qt_stream *s, const struct qt_record_sink *sink, struct qt_err *err)
{
    bool stop = false;
    size_t size;
    int rc;
    QT_TRY(skip(s, err));
    if (s->size && s->data[0] == '[') {
        qt_stream_consume(s, 1);
        return read_elements(s, sink, &stop, err);
    }
    while (s->size && !stop) {
        QT_TRY(find_value(&size, s, false, err));
        QT_TRY(read_record(&stop, sink, s->data, size, s->lines + 1, s->path, err));
        qt_stream_consume(s, size);
        QT_TRY(skip(s, err));
    }
done:
    return rc;
}
