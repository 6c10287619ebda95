/* Strict JSON by Jansson, which checks syntax, UTF-8, number ranges and duplicate keys. */
#include "formats/formats.h"

#include <ctype.h>
#include <pthread.h>
#include <string.h>

enum { MAX_DEPTH = 64 };

/*
 * Jansson ignores some failed allocations and continues with a buffer that did not grow; it reports
 * others as syntax errors. During a parse, therefore, all allocations after a failed one fail too
 * (nothing reads a short buffer), and the failure is remembered (the status is correct).
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

/* Limits the recursion of Jansson's parser, whose own limit is 2048 levels. */
static int check_depth(const char *text, size_t size, size_t line, const char *file,
                       struct qt_err *err)
{
    int depth = 0, column = 0;
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
                               "line %zu, column %d: JSON nested deeper than %d levels", line,
                               column, MAX_DEPTH);
        } else if (c == ']' || c == '}') {
            depth--;
        }
    }
    return QT_OK;
}

/* ---- Python's JSON -------------------------------------------------------------------------- */

/* A walk through a text in Python's JSON. It writes strict JSON to `out`, or only measures it if
 * out is NULL. */
struct strict {
    char *out;
    size_t size;      /* of the strict text so far */
    size_t changes;   /* literals, lone surrogates and integers replaced so far */
    size_t grown;     /* bytes that literals and integers have added to the current line */
    const char *lone; /* escape that takes the place of a lone surrogate */
};

enum { LITERALS = 3 };
static const char *const literals[LITERALS] = {"NaN", "Infinity", "-Infinity"};

/* The object that takes the place of a literal is longer than the literal by this. */
enum { LITERAL_GROWS = sizeof "{\"NaN\":0}" - sizeof "NaN" };

static void emit(struct strict *s, const char *text, size_t size)
{
    if (s->out)
        memcpy(s->out + s->size, text, size);
    s->size += size;
}

static const char *literal_at(const char *text, size_t size)
{
    for (size_t i = 0; i < LITERALS; i++)
        if (size >= strlen(literals[i]) && memcmp(text, literals[i], strlen(literals[i])) == 0)
            return literals[i];
    return NULL;
}

static void emit_literal(struct strict *s, const char *name)
{
    emit(s, "{\"", 2);
    emit(s, name, strlen(name));
    emit(s, "\":0}", 4);
    s->changes++;
    s->grown += LITERAL_GROWS;
}

/* Copies the number at text and returns its size. An integer beyond 64 bits, which Python reads and
 * Jansson does not, becomes a real number. */
static size_t emit_number(struct strict *s, const char *text, size_t size)
{
    size_t digits = 0, n;
    while (digits < size && isdigit((unsigned char)text[digits]))
        digits++;
    for (n = digits; n < size && text[n] && strchr(".eE+-0123456789", text[n]);)
        n++;
    emit(s, text, n);
    if (n == digits && (n > 19 || (n == 19 && memcmp(text, "9223372036854775807", 19) > 0))) {
        emit(s, ".0", 2);
        s->changes++;
        s->grown += 2;
    }
    return n;
}

/* Returns the surrogate \uD800 .. \uDFFF that is escaped at text, or 0. */
static unsigned surrogate_at(const char *text, size_t size)
{
    unsigned code = 0;
    if (size < 6 || text[0] != '\\' || text[1] != 'u')
        return 0;
    for (int i = 2; i < 6; i++) {
        const char *digit =
            text[i] ? strchr("0123456789abcdef", tolower((unsigned char)text[i])) : NULL;
        if (!digit)
            return 0;
        code = code << 4 | (unsigned)(digit - "0123456789abcdef");
    }
    return code >= 0xd800 && code <= 0xdfff ? code : 0;
}

/* Copies the escape at text and returns its size. */
static size_t emit_escape(struct strict *s, const char *text, size_t size)
{
    const unsigned first = surrogate_at(text, size);
    const unsigned second = first && size > 6 ? surrogate_at(text + 6, size - 6) : 0;
    size_t n = !first ? qt_min_size(size, 2) : 6;
    if (first && first < 0xdc00 && second >= 0xdc00)
        n = 12;
    emit(s, n == 6 ? s->lone : text, n);
    s->changes += n == 6;
    return n;
}

/* Walks until the strict text has `stop` bytes. */
static void make_strict(struct strict *s, const char *text, size_t size, size_t stop)
{
    bool in_string = false;
    for (size_t i = 0, n; i < size && s->size < stop; i += n) {
        const char c = text[i], *name = NULL;
        n = 1;
        if (c == '\n')
            s->grown = 0;
        if (in_string && c == '\\') {
            n = emit_escape(s, text + i, size - i);
            continue;
        }
        if (c == '"')
            in_string = !in_string;
        else if (!in_string && (c == 'N' || c == 'I' || c == '-'))
            name = literal_at(text + i, size - i);
        if (name) {
            emit_literal(s, name);
            n = strlen(name);
        } else if (!in_string && isdigit((unsigned char)c)) {
            n = emit_number(s, text + i, size - i);
        } else {
            emit(s, text + i, 1);
        }
    }
}

/* ---- parsing -------------------------------------------------------------------------------- */

static int load(json_t **out, json_error_t *error, const char *text, size_t size, size_t flags)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install_allocator);
    parse_state = PARSING;
    *out = json_loadb(text, size, JSON_REJECT_DUPLICATES | flags, error);
    bool no_memory = parse_state == FAILED;
    parse_state = IDLE;
    if (*out && !no_memory)
        return QT_OK;
    json_decref(*out);
    *out = NULL;
    return no_memory ? QT_E_RESOURCE : QT_E_INPUT;
}

/* line: number of the first line, for errors. lone: escape that takes the place of a lone
 * surrogate; NULL: strict JSON. */
static int parse(json_t **out, const char *text, size_t size, size_t flags, size_t line,
                 const char *lone, const char *file, struct qt_err *err)
{
    struct strict s = {.lone = lone};
    json_error_t error;
    *out = NULL;
    int rc = check_depth(text, size, line, file, err);
    if (rc < 0)
        return rc;
    if (lone)
        make_strict(&s, text, size, SIZE_MAX);
    if (s.changes) {
        const size_t strict_size = s.size;
        QT_TRY(qt_array_new(&s.out, strict_size, 1, err));
        s.size = s.grown = 0;
        make_strict(&s, text, size, SIZE_MAX);
        rc = load(out, &error, s.out, strict_size, flags);
    } else {
        rc = load(out, &error, text, size, flags);
    }
    if (rc == QT_E_RESOURCE)
        qt_fail(err, QT_E_RESOURCE, file, NULL, "out of memory while parsing JSON");
    if (rc == QT_E_INPUT) {
        struct strict before = {.lone = lone};
        if (s.changes) /* the column counts what was added */
            make_strict(&before, text, size, (size_t)error.position);
        const bool nul = json_error_code(&error) == json_error_null_character;
        qt_fail(err, QT_E_INPUT, file, NULL, "line %zu, column %d: %s",
                line + (size_t)error.line - 1, error.column - (int)before.grown,
                nul ? "NUL byte in a string (\\u0000)" : error.text);
    }
done:
    qt_free(s.out);
    return rc;
}

int qt_json_parse(json_t **out, const char *text, size_t size, const char *file, struct qt_err *err)
{
    return parse(out, text, size, 0, 1, NULL, file, err);
}

int qt_json_parse_lenient(json_t **out, const char *text, size_t size, const char *file,
                          struct qt_err *err)
{
    return parse(out, text, size, 0, 1, "\\ufffd", file, err);
}

int qt_json_parse_data(json_t **out, const char *text, size_t size, size_t line, const char *lone,
                       const char *file, struct qt_err *err)
{
    return parse(out, text, size, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL | JSON_DECODE_ANY, line,
                 lone, file, err);
}

/* A download that failed may leave {"error": "Repository not found"}. */
static int check_no_server_error(const json_t *value, const char *path, struct qt_err *err)
{
    enum { MOST = 4 };
    const char *text = json_string_value(json_object_get(value, "error"));
    if (!text || json_object_size(value) > MOST)
        return QT_OK;
    return qt_fail(err, QT_E_INPUT, path, NULL,
                   "is the error message of a server: '%.200s'; download the file again", text);
}

static int load_file(json_t **out, const char *path, size_t limit, const char *lone,
                     struct qt_err *err)
{
    char *text;
    size_t size;
    *out = NULL;
    int rc = qt_file_read(&text, &size, path, limit, err);
    if (rc < 0)
        return rc;
    if (size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0)
        rc = qt_fail(err, QT_E_INPUT, path, NULL,
                     "begins with a byte order mark: save it as UTF-8 without one");
    else
        rc = parse(out, text, size, 0, 1, lone, path, err);
    if (rc == QT_E_INPUT && qt_file_kind(text, size) != QT_KIND_TEXT)
        qt_kind_expect(QT_KIND_JSON, NULL, text, size, path, err); /* a better reason */
    else if (rc == QT_OK)
        rc = check_no_server_error(*out, path, err);
    if (rc < 0) {
        json_decref(*out);
        *out = NULL;
    }
    qt_free(text);
    return rc;
}

int qt_json_load(json_t **out, const char *path, size_t limit, struct qt_err *err)
{
    return load_file(out, path, limit, NULL, err);
}

int qt_json_load_lenient(json_t **out, const char *path, size_t limit, struct qt_err *err)
{
    return load_file(out, path, limit, "\\ufffd", err);
}

const char *qt_json_literal(const json_t *v)
{
    for (size_t i = 0; i < LITERALS; i++)
        if (json_object_size(v) == 1 && json_object_get(v, literals[i]))
            return literals[i];
    return NULL;
}

const char *qt_json_type(const json_t *v)
{
    const char *literal = qt_json_literal(v);
    if (literal)
        return literal;
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

/* The member, or NULL if it is absent or null. */
static const json_t *member(const json_t *obj, const char *key)
{
    const json_t *v = json_object_get(obj, key);
    return json_is_null(v) ? NULL : v;
}

static int wrong_type(const json_t *v, const char *key, const char *expected, const char *file,
                      struct qt_err *err)
{
    return qt_fail(err, QT_E_INPUT, file, NULL, "'%s' is %s, but %s is expected", key,
                   qt_json_type(v), expected);
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
