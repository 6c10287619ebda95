/* Values as Python sees them. */
#include "model/chat/chat.h"
#include "model/tokenizer/internal.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the run -------------------------------------------------------------------------------- */

void chat_fail(struct chat_run *r, enum qt_status status, const char *fmt, ...)
{
    char text[600];
    va_list ap;
    if (r->rc < 0)
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    r->rc = qt_fail(r->err, status, r->file, NULL, "chat template, line %zu: %s", r->line, text);
}

void chat_work(struct chat_run *r, size_t n)
{
    static const uint64_t most = (uint64_t)1 << 30;
    r->work += n;
    if (r->work > most)
        chat_fail(r, QT_E_INPUT, "it takes too many steps, or makes too much text");
}

static void no_memory(struct chat_run *r)
{
    if (r->rc == QT_OK)
        r->rc = qt_fail(r->err, QT_E_RESOURCE, NULL, NULL, "out of memory (chat template)");
}

json_t *chat_keep(struct chat_run *r, json_t *value)
{
    chat_work(r, 64);
    if (!value) {
        no_memory(r);
        return NULL;
    }
    const int rc = qt_array_grow(&r->pool, &r->capacity, r->count + 1, sizeof *r->pool, r->err);
    if (rc < 0) {
        json_decref(value);
        r->rc = r->rc < 0 ? r->rc : rc;
        return NULL;
    }
    r->pool[r->count++] = value;
    return value;
}

void chat_emit(struct chat_run *r, struct chat_text *out, const char *s, size_t size)
{
    chat_work(r, size);
    if (r->rc < 0 || size == 0)
        return;
    const int rc = qt_array_grow(&out->data, &out->capacity, out->size + size, 1, r->err);
    if (rc < 0) {
        r->rc = rc;
        return;
    }
    memcpy(out->data + out->size, s, size);
    out->size += size;
}

json_t *chat_string(struct chat_run *r, const char *s, size_t size)
{
    chat_work(r, size);
    return r->rc < 0 ? NULL : chat_keep(r, json_stringn_nocheck(size ? s : "", size));
}

/* ---- properties ----------------------------------------------------------------------------- */

const char *chat_type(const json_t *v)
{
    return v ? qt_json_type(v) : "undefined";
}

bool chat_true(const json_t *v)
{
    switch (v ? json_typeof(v) : JSON_NULL) {
    case JSON_STRING:
        return json_string_length(v) > 0;
    case JSON_ARRAY:
        return json_array_size(v) > 0;
    case JSON_OBJECT:
        return json_object_size(v) > 0;
    case JSON_INTEGER:
        return json_integer_value(v) != 0;
    case JSON_REAL:
        return json_real_value(v) != 0;
    default:
        return json_is_true(v);
    }
}

/* Booleans are numbers in Python. */
static bool is_number(const json_t *v)
{
    return json_is_number(v) || json_is_boolean(v);
}

static double number(const json_t *v)
{
    return json_is_boolean(v) ? json_is_true(v) : json_number_value(v);
}

bool chat_equal(const json_t *a, const json_t *b)
{
    if (!a || !b)
        return a == b;
    if (is_number(a) && is_number(b))
        return json_is_integer(a) && json_is_integer(b)
                   ? json_integer_value(a) == json_integer_value(b)
                   : number(a) == number(b);
    return json_equal(a, b);
}

int chat_compare(struct chat_run *r, const json_t *a, const json_t *b)
{
    if (a && b && is_number(a) && is_number(b)) {
        if (json_is_integer(a) && json_is_integer(b))
            return (json_integer_value(a) > json_integer_value(b)) -
                   (json_integer_value(a) < json_integer_value(b));
        return (number(a) > number(b)) - (number(a) < number(b));
    }
    if (json_is_string(a) && json_is_string(b)) {
        const size_t n = json_string_length(a), m = json_string_length(b);
        const int c = memcmp(json_string_value(a), json_string_value(b), qt_min_size(n, m));
        return c ? c : (n > m) - (n < m);
    }
    chat_fail(r, QT_E_INPUT, "%s cannot be compared with %s", chat_type(a), chat_type(b));
    return 0;
}

bool chat_contains(struct chat_run *r, const json_t *container, const json_t *v)
{
    if (json_is_string(container) && json_is_string(v)) {
        chat_work(r, json_string_length(container));
        return memmem(json_string_value(container), json_string_length(container),
                      json_string_value(v), json_string_length(v)) != NULL;
    }
    if (json_is_object(container))
        return json_is_string(v) && json_object_get(container, json_string_value(v)) != NULL;
    if (json_is_array(container)) {
        for (size_t i = 0; i < json_array_size(container); i++)
            if (chat_equal(json_array_get(container, i), v))
                return true;
        chat_work(r, json_array_size(container));
        return false;
    }
    if (container)
        chat_fail(r, QT_E_INPUT, "'in' needs a string, list or object, not %s",
                  chat_type(container));
    return false;
}

size_t chat_length(const char *s, size_t size)
{
    size_t n = 0;
    for (size_t i = 0; i < size; i++)
        n += ((unsigned char)s[i] & 0xc0) != 0x80;
    return n;
}

/* Jansson takes pointers to non-const for iteration. */
static json_t *unconst(const json_t *v)
{
    return (json_t *)(uintptr_t)v;
}

json_t *chat_key(struct chat_run *r, const char *key)
{
    return key[0] == CHAT_INTEGER_KEY[0] ? chat_keep(r, json_integer(strtoll(key + 1, NULL, 10)))
                                         : chat_string(r, key, strlen(key));
}

json_t *chat_elements(struct chat_run *r, json_t *v)
{
    const char *key;
    json_t *member, *list;
    if (json_is_array(v))
        return v;
    list = chat_keep(r, json_array());
    if (r->rc < 0 || !v)
        return list;
    if (json_is_object(v)) {
        json_object_foreach (v, key, member)
            if (strcmp(key, CHAT_NAMESPACE) != 0)
                json_array_append(list, chat_key(r, key));
    } else if (json_is_string(v)) {
        const char *s = json_string_value(v);
        for (size_t i = 0, n; i < json_string_length(v) && r->rc == QT_OK; i += n) {
            qt_utf8_char(&n, s + i);
            json_array_append(list, chat_string(r, s + i, n));
        }
    } else {
        chat_fail(r, QT_E_INPUT, "%s cannot be iterated over", chat_type(v));
    }
    return list;
}

static bool is_deep(struct chat_run *r, const json_t *v, int left)
{
    const char *key;
    json_t *member;
    chat_work(r, 1);
    if (left == 0)
        return true;
    for (size_t i = 0; i < json_array_size(v); i++)
        if (is_deep(r, json_array_get(v, i), left - 1))
            return true;
    json_object_foreach (unconst(v), key, member) {
        if (is_deep(r, member, left - 1))
            return true;
    }
    return false;
}

void chat_check_depth(struct chat_run *r, const json_t *v)
{
    enum { DEEPEST = 100 }; /* JSON of a record has at most 64 levels */
    if (r->rc == QT_OK && is_deep(r, v, DEEPEST))
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: values nested more than %d deep", DEEPEST);
}

/* ---- text ----------------------------------------------------------------------------------- */

static void emit(struct chat_run *r, struct chat_text *out, const char *s)
{
    chat_emit(r, out, s, strlen(s));
}

/* The shortest digits that read back as the same number, as Python writes it. */
static void emit_real(struct chat_run *r, struct chat_text *out, double x)
{
    char text[40];
    int digits = 1;
    do
        snprintf(text, sizeof text, "%.*g", digits, x);
    while (strtod(text, NULL) != x && ++digits <= 17);
    const char *e = strchr(text, 'e');
    const int exponent = e ? atoi(e + 1) : 0;
    if (e && exponent >= 0 && exponent < 16)
        snprintf(text, sizeof text, "%.1f", x);
    else if (!e && !strchr(text, '.'))
        snprintf(text, sizeof text, "%.1f", x);
    emit(r, out, text);
}

static void emit_repr(struct chat_run *r, struct chat_text *out, const json_t *v);

static void emit_plain(struct chat_run *r, struct chat_text *out, const json_t *v)
{
    char text[32];
    if (json_is_string(v)) {
        chat_emit(r, out, json_string_value(v), json_string_length(v));
    } else if (json_is_integer(v)) {
        snprintf(text, sizeof text, "%lld", (long long)json_integer_value(v));
        emit(r, out, text);
    } else if (json_is_real(v)) {
        emit_real(r, out, json_real_value(v));
    } else if (json_is_boolean(v)) {
        emit(r, out, json_is_true(v) ? "True" : "False");
    } else if (json_is_null(v)) {
        emit(r, out, "None");
    } else if (v) {
        emit_repr(r, out, v);
    }
}

static void emit_repr_string(struct chat_run *r, struct chat_text *out, const char *s, size_t size)
{
    const char quote = memchr(s, '\'', size) && !memchr(s, '"', size) ? '"' : '\'';
    char text[8];
    chat_emit(r, out, &quote, 1);
    for (size_t i = 0; i < size; i++) {
        const unsigned char c = (unsigned char)s[i];
        if (c == '\\' || c == quote)
            snprintf(text, sizeof text, "\\%c", c);
        else if (c == '\n' || c == '\r' || c == '\t')
            snprintf(text, sizeof text, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (c < 0x20 || c == 0x7f)
            snprintf(text, sizeof text, "\\x%02x", c);
        else
            snprintf(text, sizeof text, "%c", c);
        emit(r, out, text);
    }
    chat_emit(r, out, &quote, 1);
}

static void emit_repr(struct chat_run *r, struct chat_text *out, const json_t *v)
{
    const char *key;
    json_t *member;
    if (json_is_string(v)) {
        emit_repr_string(r, out, json_string_value(v), json_string_length(v));
    } else if (json_is_array(v)) {
        emit(r, out, "[");
        for (size_t i = 0; i < json_array_size(v) && r->rc == QT_OK; i++) {
            emit(r, out, i ? ", " : "");
            emit_repr(r, out, json_array_get(v, i));
        }
        emit(r, out, "]");
    } else if (json_is_object(v)) {
        bool first = true;
        emit(r, out, "{");
        json_object_foreach (unconst(v), key, member) {
            emit(r, out, first ? "" : ", ");
            emit_repr_string(r, out, key, strlen(key));
            emit(r, out, ": ");
            emit_repr(r, out, member);
            first = false;
        }
        emit(r, out, "}");
    } else {
        emit_plain(r, out, v);
    }
}

static json_t *take_text(struct chat_run *r, struct chat_text *text)
{
    json_t *v = chat_string(r, text->data, text->size);
    qt_free(text->data);
    return v;
}

json_t *chat_str(struct chat_run *r, const json_t *v)
{
    struct chat_text text = {0};
    if (json_is_string(v))
        return unconst(v);
    emit_plain(r, &text, v);
    return take_text(r, &text);
}

/* ---- JSON ----------------------------------------------------------------------------------- */

/* Writes the character at s as \\uXXXX, beyond 16 bits as two surrogates; returns its bytes. */
static size_t put_escaped(struct chat_run *r, struct chat_text *out, const char *s)
{
    size_t bytes;
    char text[16];
    const unsigned c = (unsigned)qt_utf8_char(&bytes, s);
    if (c > 0xffff)
        snprintf(text, sizeof text, "\\u%04x\\u%04x", 0xd7c0 + (c >> 10), 0xdc00 + (c & 0x3ff));
    else
        snprintf(text, sizeof text, "\\u%04x", c);
    emit(r, out, text);
    return bytes;
}

static bool is_plain(char c, bool ascii)
{
    const unsigned char u = (unsigned char)c;
    return u >= 0x20 && u != '"' && u != '\\' && (u < 0x7f || !ascii);
}

static void json_string_text(struct chat_run *r, struct chat_text *out, const char *s, size_t size,
                             bool ascii)
{
    static const char special[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    emit(r, out, "\"");
    for (size_t i = 0, plain; i < size;) {
        for (plain = i; plain < size && is_plain(s[plain], ascii); plain++)
            ;
        chat_emit(r, out, s + i, plain - i);
        i = plain;
        if (i == size)
            break;
        const char *at = s[i] ? strchr(special, s[i]) : NULL;
        if (at) {
            chat_emit(r, out, (const char[]){'\\', letters[at - special]}, 2);
            i++;
        } else {
            i += put_escaped(r, out, s + i);
        }
    }
    emit(r, out, "\"");
}

static void new_line(struct chat_run *r, struct chat_text *out, const struct chat_json_form *form,
                     size_t depth)
{
    if (form->indent < 0)
        return;
    emit(r, out, "\n");
    for (size_t i = 0; i < depth * (size_t)form->indent && r->rc == QT_OK; i++)
        emit(r, out, " ");
}

static void json_text(struct chat_run *r, struct chat_text *out, const json_t *v,
                      const struct chat_json_form *form, size_t depth)
{
    const char *key;
    json_t *member;
    bool first = true;
    if (r->rc < 0)
        return;
    if (json_is_string(v)) {
        json_string_text(r, out, json_string_value(v), json_string_length(v), form->ascii);
    } else if (json_is_array(v) && json_array_size(v)) {
        emit(r, out, "[");
        for (size_t i = 0; i < json_array_size(v); i++) {
            emit(r, out, i ? form->comma : "");
            new_line(r, out, form, depth + 1);
            json_text(r, out, json_array_get(v, i), form, depth + 1);
        }
        new_line(r, out, form, depth);
        emit(r, out, "]");
    } else if (json_is_object(v) && json_object_size(v)) {
        emit(r, out, "{");
        json_object_foreach (unconst(v), key, member) {
            emit(r, out, first ? "" : form->comma);
            new_line(r, out, form, depth + 1);
            json_string_text(r, out, key, strlen(key), form->ascii);
            emit(r, out, form->colon);
            json_text(r, out, member, form, depth + 1);
            first = false;
        }
        new_line(r, out, form, depth);
        emit(r, out, "}");
    } else if (json_is_boolean(v) || json_is_null(v)) {
        emit(r, out, json_is_null(v) ? "null" : json_is_true(v) ? "true" : "false");
    } else if (v) {
        emit(r, out, json_is_array(v) ? "[]" : json_is_object(v) ? "{}" : "");
        if (json_is_number(v))
            emit_plain(r, out, v);
    } else {
        chat_fail(r, QT_E_INPUT, "an undefined value cannot be written as JSON");
    }
}

json_t *chat_json(struct chat_run *r, const json_t *v, const struct chat_json_form *form)
{
    struct chat_text text = {0};
    json_text(r, &text, v, form, 0);
    return take_text(r, &text);
}
