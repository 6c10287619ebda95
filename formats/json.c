/* Strict JSON on top of Jansson, which checks syntax, UTF-8, number ranges and duplicate keys. */
#include "formats/formats.h"

#include <pthread.h>

enum { MAX_DEPTH = 64 };

/*
 * Jansson ignores some failed allocations and then reads on in a buffer that never grew, and
 * reports others as syntax errors. Therefore, during a parse, the first failed allocation makes all
 * later ones fail (nothing is read from a short buffer), and is remembered (the status is right).
 */
static _Thread_local enum { IDLE, PARSING, FAILED } parse_state;

static void *json_memory(size_t size)
{
    void *p = parse_state == FAILED ? NULL : qt_malloc(size);
    if (!p && parse_state == PARSING)
        parse_state = FAILED;
    return p;
}

static void install_allocator(void)
{
    json_set_alloc_funcs(json_memory, qt_free);
}

/* Jansson's parser recurses; its own limit (2048 levels) is far beyond any real file. */
static int check_depth(const char *text, size_t size, const char *file, struct qt_err *err)
{
    int depth = 0, line = 1, column = 0;
    bool in_string = false;
    for (size_t i = 0; i < size; i++) {
        char c = text[i];
        column += ((unsigned char)c & 0xc0) != 0x80; /* count characters, not bytes */
        if (c == '\n') {
            line++;
            column = 0;
        } else if (in_string) {
            if (c == '\\')
                i++, column++;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            if (++depth > MAX_DEPTH)
                return qt_fail(err, QT_E_INPUT, file, NULL,
                               "line %d, column %d: JSON nested deeper than %d levels", line,
                               column, MAX_DEPTH);
        } else if (c == ']' || c == '}') {
            depth--;
        }
    }
    return QT_OK;
}

static int parse(json_t **out, const char *text, size_t size, size_t flags, const char *file,
                 struct qt_err *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    json_error_t error;
    *out = NULL;
    int rc = check_depth(text, size, file, err);
    if (rc < 0)
        return rc;
    pthread_once(&once, install_allocator);
    parse_state = PARSING;
    *out = json_loadb(text, size, JSON_REJECT_DUPLICATES | flags, &error);
    bool no_memory = parse_state == FAILED;
    parse_state = IDLE;
    if (*out && !no_memory)
        return QT_OK;
    json_decref(*out);
    *out = NULL;
    if (no_memory)
        return qt_fail(err, QT_E_RESOURCE, file, NULL, "out of memory while parsing JSON");
    const bool nul = json_error_code(&error) == json_error_null_character;
    return qt_fail(err, QT_E_INPUT, file, NULL, "line %d, column %d: %s", error.line, error.column,
                   nul ? "NUL byte in a string (\\u0000)" : error.text);
}

int qt_json_parse(json_t **out, const char *text, size_t size, const char *file, struct qt_err *err)
{
    return parse(out, text, size, 0, file, err);
}

int qt_json_parse_data(json_t **out, const char *text, size_t size, const char *file,
                       struct qt_err *err)
{
    return parse(out, text, size, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, file, err);
}

int qt_json_load(json_t **out, const char *path, size_t limit, struct qt_err *err)
{
    char *text;
    size_t size;
    *out = NULL;
    int rc = qt_file_read(&text, &size, path, limit, err);
    if (rc == QT_OK)
        rc = qt_json_parse(out, text, size, path, err);
    qt_free(text);
    return rc;
}

static const char *type_name(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return json_integer_value(v) < 0 ? "a negative integer" : "an integer";
    case JSON_REAL:
        return "a real number";
    case JSON_NULL:
        return "null";
    default:
        return "a boolean";
    }
}

/* The member, or NULL when it is absent or null. */
static const json_t *member(const json_t *obj, const char *key)
{
    const json_t *v = json_object_get(obj, key);
    return json_is_null(v) ? NULL : v;
}

static int wrong_type(const json_t *v, const char *key, const char *expected, const char *file,
                      struct qt_err *err)
{
    return qt_fail(err, QT_E_INPUT, file, NULL, "'%s' is %s, but %s is expected", key, type_name(v),
                   expected);
}

static int need_member(const json_t *obj, const char *key, const char *file, struct qt_err *err)
{
    if (!json_is_object(obj))
        return qt_fail(err, QT_E_INPUT, file, NULL, "an object with '%s' is expected", key);
    if (!member(obj, key))
        return qt_fail(err, QT_E_INPUT, file, NULL, "'%s' is missing", key);
    return QT_OK;
}

json_t *qt_json_name(const char *name)
{
    char ascii[4096];
    size_t n = 0;
    json_t *text = json_string(name);
    if (text)
        return text;
    for (; name[n] && n + 1 < sizeof ascii; n++)
        ascii[n] = (unsigned char)name[n] < 0x80 ? name[n] : '?';
    ascii[n] = '\0';
    return json_string(ascii);
}

json_t *qt_crc_json(uint32_t crc)
{
    return json_sprintf("%08x", crc);
}

int qt_json_need_string(const char **out, const json_t *obj, const char *key, const char *file,
                        struct qt_err *err)
{
    int rc = need_member(obj, key, file, err);
    return rc < 0 ? rc : qt_json_get_string(out, obj, key, file, err);
}

int qt_json_need_size(size_t *out, const json_t *obj, const char *key, const char *file,
                      struct qt_err *err)
{
    int rc = need_member(obj, key, file, err);
    return rc < 0 ? rc : qt_json_get_size(out, obj, key, file, err);
}

int qt_json_get_string(const char **out, const json_t *obj, const char *key, const char *file,
                       struct qt_err *err)
{
    const json_t *v = member(obj, key);
    if (v && !json_is_string(v))
        return wrong_type(v, key, "a string", file, err);
    if (v)
        *out = json_string_value(v);
    return QT_OK;
}

int qt_json_get_size(size_t *out, const json_t *obj, const char *key, const char *file,
                     struct qt_err *err)
{
    const json_t *v = member(obj, key);
    if (v && (!json_is_integer(v) || json_integer_value(v) < 0))
        return wrong_type(v, key, "a non-negative integer", file, err);
    if (v)
        *out = (size_t)json_integer_value(v);
    return QT_OK;
}

int qt_json_get_real(double *out, const json_t *obj, const char *key, const char *file,
                     struct qt_err *err)
{
    const json_t *v = member(obj, key);
    if (v && !json_is_number(v))
        return wrong_type(v, key, "a number", file, err);
    if (v)
        *out = json_number_value(v);
    return QT_OK;
}

int qt_json_get_bool(bool *out, const json_t *obj, const char *key, const char *file,
                     struct qt_err *err)
{
    const json_t *v = member(obj, key);
    if (v && !json_is_boolean(v))
        return wrong_type(v, key, "true or false", file, err);
    if (v)
        *out = json_is_true(v);
    return QT_OK;
}
