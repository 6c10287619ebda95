/* Filters, tests, methods and functions of chat templates. A template that uses another one is
 * refused by its name. */
#include "model/chat/chat.h"
#include "model/tokenizer/internal.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- arguments ------------------------------------------------------------------------------ */

/* Argument `place` without a keyword, or the one with this keyword; undefined if absent. */
static json_t *arg(const struct chat_args *args, size_t place, const char *name)
{
    size_t seen = 0;
    for (size_t i = 0; i < args->count; i++) {
        if (args->names[i] ? name && strcmp(args->names[i], name) == 0 : seen == place)
            return args->list[i];
        seen += !args->names[i];
    }
    return NULL;
}

static const char *text_arg(struct chat_run *r, const struct chat_args *args, size_t place,
                            const char *name, size_t *size, const char *initial)
{
    const json_t *v = arg(args, place, name);
    *size = v ? json_string_length(v) : strlen(initial);
    if (v && !json_is_string(v) && !json_is_null(v))
        chat_fail(r, QT_E_INPUT, "an argument must be a string, not %s", chat_type(v));
    return json_is_string(v) ? json_string_value(v) : (*size = strlen(initial), initial);
}

static json_int_t integer_arg(struct chat_run *r, const struct chat_args *args, size_t place,
                              const char *name, json_int_t initial)
{
    const json_t *v = arg(args, place, name);
    if (v && !json_is_integer(v))
        chat_fail(r, QT_E_INPUT, "an argument must be an integer, not %s", chat_type(v));
    return json_is_integer(v) ? json_integer_value(v) : initial;
}

static void append(struct chat_run *r, json_t *list, json_t *v)
{
    if (r->rc == QT_OK && json_array_append(list, v ? v : json_null()) < 0)
        chat_keep(r, NULL);
}

static json_t *new_list(struct chat_run *r)
{
    return chat_keep(r, json_array());
}

static json_t *boolean(bool value)
{
    return json_boolean(value);
}

/* ---- strings -------------------------------------------------------------------------------- */

struct view {
    const char *s;
    size_t size;
};

static struct view view_of(const json_t *v)
{
    return (struct view){json_string_value(v), json_string_length(v)};
}

static json_t *from_view(struct chat_run *r, struct view v)
{
    return chat_string(r, v.s, v.size);
}

/* White space as str.strip() takes it. */
static bool is_space(int32_t c)
{
    return qt_char_is_space(c) || (c >= 0x1c && c <= 0x1f);
}

/* True if the character at s is to be stripped: one of chars, or white space if chars is NULL. */
static bool strips(const char *s, size_t n, const struct view *chars)
{
    if (!chars->s) {
        size_t bytes;
        return is_space(qt_utf8_char(&bytes, s));
    }
    for (size_t i = 0, k; i < chars->size; i += k) {
        qt_utf8_char(&k, chars->s + i);
        if (k == n && memcmp(chars->s + i, s, n) == 0)
            return true;
    }
    return false;
}

static struct view strip(struct view v, struct view chars, bool left, bool right)
{
    size_t n;
    while (left && v.size) {
        qt_utf8_char(&n, v.s);
        if (!strips(v.s, n, &chars))
            break;
        v.s += n;
        v.size -= n;
    }
    while (right && v.size) {
        const size_t at = qt_utf8_back(v.s, v.size);
        if (!strips(v.s + at, v.size - at, &chars))
            break;
        v.size = at;
    }
    return v;
}

static json_t *strip_method(struct chat_run *r, struct view v, const struct chat_args *args,
                            bool left, bool right)
{
    struct view chars = {0};
    const json_t *given = arg(args, 0, "chars");
    if (json_is_string(given))
        chars = view_of(given);
    chat_work(r, v.size);
    return from_view(r, strip(v, chars, left, right));
}

enum letter_case { LOWER, UPPER, TITLE, CAPITALIZE };

/* Only of ASCII: other letters would need the tables of some Unicode version. */
static json_t *change_case(struct chat_run *r, struct view v, enum letter_case how)
{
    struct chat_text out = {0};
    bool inside = false; /* of a word */
    for (size_t i = 0; i < v.size && r->rc == QT_OK; i++) {
        const unsigned char c = (unsigned char)v.s[i];
        const bool upper = how == UPPER || (how == TITLE && !inside) || (how == CAPITALIZE && !i);
        const char changed = (char)(upper ? toupper(c) : tolower(c));
        if (c >= 0x80)
            chat_fail(r, QT_E_UNSUPPORTED, "not supported: upper or lower case beyond ASCII");
        chat_emit(r, &out, &changed, 1);
        inside = isalpha(c);
    }
    json_t *result = chat_string(r, out.data, out.size);
    qt_free(out.data);
    return result;
}

static json_t *replace(struct chat_run *r, struct view v, const struct chat_args *args)
{
    struct view old, new;
    struct chat_text out = {0};
    old.s = text_arg(r, args, 0, "old", &old.size, "");
    new.s = text_arg(r, args, 1, "new", &new.size, "");
    json_int_t left = integer_arg(r, args, 2, "count", -1);
    if (old.size == 0)
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: replacing an empty string");
    while (r->rc == QT_OK) {
        const char *at = left ? memmem(v.s, v.size, old.s, old.size) : NULL;
        const size_t n = at ? (size_t)(at - v.s) : v.size;
        chat_emit(r, &out, v.s, n);
        if (!at)
            break;
        chat_emit(r, &out, new.s, new.size);
        chat_work(r, 8);
        v = (struct view){at + old.size, v.size - n - old.size};
        left -= left > 0;
    }
    json_t *result = chat_string(r, out.data, out.size);
    qt_free(out.data);
    return result;
}

/* split(): at white space; split(x): at every x; at most `most` times (negative: always). */
static json_t *split(struct chat_run *r, struct view v, const struct chat_args *args)
{
    const json_t *given = arg(args, 0, "sep");
    const struct view space = {0}, sep = json_is_string(given) ? view_of(given) : space;
    json_int_t most = integer_arg(r, args, 1, "maxsplit", -1);
    json_t *list = new_list(r);
    if (sep.s && sep.size == 0)
        chat_fail(r, QT_E_INPUT, "the separator of split is empty");
    if (!sep.s)
        v = strip(v, space, true, false);
    while (r->rc == QT_OK && (sep.s || v.size)) {
        size_t n = v.size, skip = 0, k;
        const char *at = sep.s && most ? memmem(v.s, v.size, sep.s, sep.size) : NULL;
        if (at) {
            n = (size_t)(at - v.s);
            skip = sep.size;
        }
        for (size_t i = 0; !sep.s && most && i < v.size && n == v.size; i += k)
            if (is_space(qt_utf8_char(&k, v.s + i)))
                n = i;
        if (!sep.s && !most)
            v = strip(v, space, false, true), n = v.size;
        append(r, list, chat_string(r, v.s, n));
        if (n == v.size && !at)
            break;
        v = (struct view){v.s + n + skip, v.size - n - skip};
        if (!sep.s)
            v = strip(v, space, true, false);
        most -= most > 0;
        chat_work(r, n + 8);
    }
    return list;
}

/* rsplit(x, n) is needed with a separator only. */
static json_t *rsplit(struct chat_run *r, struct view v, const struct chat_args *args)
{
    size_t size;
    const char *sep = text_arg(r, args, 0, "sep", &size, "");
    json_int_t most = integer_arg(r, args, 1, "maxsplit", -1);
    json_t *list = new_list(r);
    if (size == 0)
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: rsplit without a separator");
    while (r->rc == QT_OK) {
        size_t at = v.size >= size ? v.size - size + 1 : 0;
        chat_work(r, v.size);
        while (at > 0 && memcmp(v.s + at - 1, sep, size) != 0)
            at--;
        const bool found = at > 0 && most;
        const size_t from = found ? at - 1 + size : 0;
        json_t *part = chat_string(r, v.s + from, v.size - from);
        if (r->rc == QT_OK && json_array_insert(list, 0, part) < 0)
            chat_keep(r, NULL);
        if (!found)
            break;
        v.size = at - 1;
        most -= most > 0;
    }
    return list;
}

static json_t *split_lines(struct chat_run *r, struct view v)
{
    json_t *list = new_list(r);
    while (v.size && r->rc == QT_OK) {
        const char *end = memchr(v.s, '\n', v.size);
        const size_t n = end ? (size_t)(end - v.s) : v.size;
        append(r, list, chat_string(r, v.s, n - (end && n && v.s[n - 1] == '\r')));
        v.s += n + (end != NULL);
        v.size -= n + (end != NULL);
    }
    return list;
}

static bool has_affix(struct chat_run *r, struct view v, const json_t *affix, bool start)
{
    if (json_is_array(affix)) {
        for (size_t i = 0; i < json_array_size(affix); i++)
            if (has_affix(r, v, json_array_get(affix, i), start))
                return true;
        return false;
    }
    if (!json_is_string(affix)) {
        chat_fail(r, QT_E_INPUT, "an argument must be a string, not %s", chat_type(affix));
        return false;
    }
    const struct view a = view_of(affix);
    return a.size <= v.size && memcmp(start ? v.s : v.s + v.size - a.size, a.s, a.size) == 0;
}

static json_t *find(struct chat_run *r, struct view v, const struct chat_args *args, bool count)
{
    struct view part;
    json_int_t n = 0;
    part.s = text_arg(r, args, 0, NULL, &part.size, "");
    chat_work(r, v.size);
    const char *at = memmem(v.s, v.size, part.s, part.size);
    if (!count)
        return chat_keep(r,
                         json_integer(at ? (json_int_t)chat_length(v.s, (size_t)(at - v.s)) : -1));
    for (const char *end = v.s + v.size; at && part.size; n++)
        at = memmem(at + part.size, (size_t)(end - at) - part.size, part.s, part.size);
    return chat_keep(r, json_integer(n));
}

static json_t *join(struct chat_run *r, struct view separator, json_t *list, const char *member)
{
    struct chat_text out = {0};
    list = chat_elements(r, list);
    for (size_t i = 0; i < json_array_size(list) && r->rc == QT_OK; i++) {
        json_t *v = json_array_get(list, i);
        const json_t *s = chat_str(r, member ? json_object_get(v, member) : v);
        if (i)
            chat_emit(r, &out, separator.s, separator.size);
        if (r->rc == QT_OK)
            chat_emit(r, &out, json_string_value(s), json_string_length(s));
    }
    json_t *result = chat_string(r, out.data, out.size);
    qt_free(out.data);
    return result;
}

/* The lines after the first (or all of them) get blanks in front; empty lines only with `blank`. */
static json_t *indent(struct chat_run *r, struct view v, const struct chat_args *args)
{
    const json_t *given = arg(args, 0, "width");
    char blanks[64] = "";
    const json_int_t width = json_is_integer(given) ? json_integer_value(given) : 4;
    const bool first = chat_true(arg(args, 1, "first")), blank = chat_true(arg(args, 2, "blank"));
    struct chat_text out = {0};
    if (width < 0 || width >= (json_int_t)sizeof blanks)
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: indenting by %lld", (long long)width);
    else
        memset(blanks, ' ', (size_t)width);
    for (bool begun = false; v.size && r->rc == QT_OK; begun = true) {
        const char *end = memchr(v.s, '\n', v.size);
        const size_t n = end ? (size_t)(end - v.s) + 1 : v.size;
        if ((begun || first) && (n > (end != NULL) || blank || (!begun && first)))
            chat_emit(r, &out, blanks, strlen(blanks));
        chat_emit(r, &out, v.s, n);
        v.s += n;
        v.size -= n;
    }
    json_t *result = chat_string(r, out.data, out.size);
    qt_free(out.data);
    return result;
}

static json_t *string_method(struct chat_run *r, json_t *object, const char *name,
                             const struct chat_args *args, bool *found)
{
    const struct view v = view_of(object);
    *found = true;
    if (strcmp(name, "strip") == 0)
        return strip_method(r, v, args, true, true);
    if (strcmp(name, "lstrip") == 0)
        return strip_method(r, v, args, true, false);
    if (strcmp(name, "rstrip") == 0)
        return strip_method(r, v, args, false, true);
    if (strcmp(name, "split") == 0)
        return split(r, v, args);
    if (strcmp(name, "rsplit") == 0)
        return rsplit(r, v, args);
    if (strcmp(name, "splitlines") == 0)
        return split_lines(r, v);
    if (strcmp(name, "startswith") == 0)
        return boolean(has_affix(r, v, arg(args, 0, NULL), true));
    if (strcmp(name, "endswith") == 0)
        return boolean(has_affix(r, v, arg(args, 0, NULL), false));
    if (strcmp(name, "replace") == 0)
        return replace(r, v, args);
    if (strcmp(name, "find") == 0 || strcmp(name, "count") == 0)
        return find(r, v, args, name[0] == 'c');
    if (strcmp(name, "join") == 0)
        return join(r, v, arg(args, 0, NULL), NULL);
    if (strcmp(name, "lower") == 0 || strcmp(name, "upper") == 0)
        return change_case(r, v, name[0] == 'l' ? LOWER : UPPER);
    if (strcmp(name, "title") == 0 || strcmp(name, "capitalize") == 0)
        return change_case(r, v, name[0] == 't' ? TITLE : CAPITALIZE);
    *found = false;
    return NULL;
}

/* ---- objects and lists ---------------------------------------------------------------------- */

enum part { KEYS, VALUES, ITEMS };

static json_t *parts(struct chat_run *r, json_t *object, enum part what)
{
    json_t *list = new_list(r), *member;
    const char *key;
    if (object && !json_is_object(object))
        chat_fail(r, QT_E_INPUT, "%s has no items", chat_type(object));
    json_object_foreach (object, key, member) {
        if (r->rc < 0)
            break;
        if (strcmp(key, CHAT_NAMESPACE) == 0)
            continue;
        json_t *name = what == VALUES ? NULL : chat_key(r, key);
        json_t *pair = what == ITEMS ? new_list(r) : NULL;
        if (pair) {
            append(r, pair, name);
            append(r, pair, member);
        }
        append(r, list, what == KEYS ? name : what == VALUES ? member : pair);
    }
    return list;
}

static json_t *object_method(struct chat_run *r, json_t *object, const char *name,
                             const struct chat_args *args, bool *found)
{
    *found = true;
    if (strcmp(name, "items") == 0)
        return parts(r, object, ITEMS);
    if (strcmp(name, "keys") == 0)
        return parts(r, object, KEYS);
    if (strcmp(name, "values") == 0)
        return parts(r, object, VALUES);
    if (strcmp(name, "get") == 0) {
        const json_t *key = arg(args, 0, NULL);
        json_t *v = json_is_string(key) ? json_object_get(object, json_string_value(key)) : NULL;
        json_t *other = arg(args, 1, NULL);
        return v ? v : other ? other : json_null();
    }
    *found = false;
    return NULL;
}

json_t *chat_method(struct chat_run *r, json_t *object, const char *name,
                    const struct chat_args *args)
{
    bool found = false;
    json_t *v = NULL;
    if (json_is_string(object))
        v = string_method(r, object, name, args, &found);
    else if (json_is_object(object))
        v = object_method(r, object, name, args, &found);
    else if (!object)
        chat_fail(r, QT_E_INPUT, "an undefined value has no method '%s'", name);
    if (!found)
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: method '%s' of %s", name, chat_type(object));
    return v;
}

/* ---- filters on lists ----------------------------------------------------------------------- */

/* The member "a" or "a.b" of v. */
static json_t *member(json_t *v, const char *path)
{
    char key[64];
    while (v && *path) {
        const size_t n = strcspn(path, ".");
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        v = json_object_get(v, key);
        path += n + (path[n] == '.');
    }
    return v;
}

/* select, reject, selectattr, rejectattr */
static json_t *choose(struct chat_run *r, json_t *list, const struct chat_args *args,
                      bool by_member, bool keep)
{
    const json_t *path = by_member ? arg(args, 0, NULL) : NULL;
    const json_t *test = arg(args, by_member, NULL);
    const size_t used = (size_t)by_member + 1;
    const struct chat_args rest = {args->list + used, args->names + used,
                                   args->count > used ? args->count - used : 0};
    json_t *out = new_list(r);
    list = chat_true(list) ? chat_elements(r, list) : NULL;
    if ((by_member && !json_is_string(path)) || (test && !json_is_string(test))) {
        chat_fail(r, QT_E_INPUT, "an argument must be a string");
        return NULL;
    }
    for (size_t i = 0; i < json_array_size(list) && r->rc == QT_OK; i++) {
        json_t *v = json_array_get(list, i);
        json_t *tested = path ? member(v, json_string_value(path)) : v;
        const bool holds =
            test ? chat_test(r, json_string_value(test), tested, &rest) : chat_true(tested);
        if (holds == keep)
            append(r, out, v);
    }
    return out;
}

static json_t *map(struct chat_run *r, json_t *list, const struct chat_args *args)
{
    const json_t *path = arg(args, SIZE_MAX, "attribute"), *name = arg(args, 0, NULL);
    json_t *other = arg(args, SIZE_MAX, "default"), *out = new_list(r);
    const struct chat_args rest = {args->list + 1, args->names + 1,
                                   args->count ? args->count - 1 : 0};
    list = chat_true(list) ? chat_elements(r, list) : NULL;
    if (!json_is_string(path) && !json_is_string(name)) {
        chat_fail(r, QT_E_INPUT, "map needs a filter or attribute=");
        return NULL;
    }
    for (size_t i = 0; i < json_array_size(list) && r->rc == QT_OK; i++) {
        json_t *v = json_array_get(list, i);
        if (path)
            v = member(v, json_string_value(path));
        else
            v = chat_filter(r, json_string_value(name), v, &rest);
        append(r, out, v ? v : other);
    }
    return out;
}

static json_t *reversed(struct chat_run *r, json_t *v)
{
    json_t *list = chat_elements(r, v), *out = new_list(r);
    for (size_t i = json_array_size(list); i-- > 0 && r->rc == QT_OK;)
        append(r, out, json_array_get(list, i));
    if (!json_is_string(v))
        return out;
    return join(r, (struct view){"", 0}, out, NULL);
}

/* A stable sort by insertion: lists in templates are short. key: of dictsort's pairs, or NULL. */
static json_t *sorted(struct chat_run *r, json_t *list, const char *path, bool reverse, bool pairs)
{
    json_t *out = new_list(r);
    for (size_t i = 0; i < json_array_size(list) && r->rc == QT_OK; i++) {
        json_t *v = json_array_get(list, i);
        const json_t *key = pairs ? json_array_get(v, 0) : path ? member(v, path) : v;
        size_t at = json_array_size(out);
        for (; at > 0 && r->rc == QT_OK; at--) {
            json_t *before = json_array_get(out, at - 1);
            const json_t *other = pairs  ? json_array_get(before, 0)
                                  : path ? member(before, path)
                                         : before;
            const int c = chat_compare(r, other, key);
            chat_work(r, 8);
            if (reverse ? c >= 0 : c <= 0)
                break;
        }
        if (r->rc == QT_OK && json_array_insert(out, at, v) < 0)
            chat_keep(r, NULL);
    }
    return out;
}

static json_t *unique(struct chat_run *r, json_t *list)
{
    json_t *out = new_list(r);
    for (size_t i = 0; i < json_array_size(list) && r->rc == QT_OK; i++)
        if (!chat_contains(r, out, json_array_get(list, i)))
            append(r, out, json_array_get(list, i));
    return out;
}

static json_t *extreme(struct chat_run *r, json_t *list, bool largest)
{
    json_t *best = NULL;
    for (size_t i = 0; i < json_array_size(list) && r->rc == QT_OK; i++) {
        json_t *v = json_array_get(list, i);
        const int c = best ? chat_compare(r, v, best) : 0;
        if (!best || (largest ? c > 0 : c < 0))
            best = v;
    }
    return best;
}

/* ---- filters on numbers --------------------------------------------------------------------- */

static json_t *to_number(struct chat_run *r, json_t *v, bool integer, const json_t *other)
{
    double x = 0;
    char *end;
    if (json_is_integer(v))
        return integer ? v : chat_keep(r, json_real((double)json_integer_value(v)));
    if (json_is_real(v)) {
        x = json_real_value(v);
    } else if (json_is_boolean(v)) {
        x = json_is_true(v);
    } else if (json_is_string(v)) {
        x = strtod(json_string_value(v), &end);
        if (end == json_string_value(v) || *end)
            return other ? (json_t *)(uintptr_t)other
                         : chat_keep(r, integer ? json_integer(0) : json_real(0));
    }
    if (!(fabs(x) < 9e18))
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: a number beyond 64 bits");
    return r->rc < 0 ? NULL : chat_keep(r, integer ? json_integer((json_int_t)x) : json_real(x));
}

static json_t *absolute(struct chat_run *r, json_t *v)
{
    if (json_is_integer(v) && json_integer_value(v) != INT64_MIN)
        return json_integer_value(v) < 0 ? chat_keep(r, json_integer(-json_integer_value(v))) : v;
    if (json_is_real(v))
        return chat_keep(r, json_real(fabs(json_real_value(v))));
    chat_fail(r, QT_E_INPUT, "abs cannot be applied to %s", chat_type(v));
    return NULL;
}

static json_t *length(struct chat_run *r, const json_t *v)
{
    size_t n = 0;
    if (json_is_string(v))
        n = chat_length(json_string_value(v), json_string_length(v));
    else if (json_is_array(v) || json_is_object(v))
        n = json_is_array(v) ? json_array_size(v) : json_object_size(v);
    else if (v)
        chat_fail(r, QT_E_INPUT, "%s has no length", chat_type(v));
    return chat_keep(r, json_integer((json_int_t)n));
}

/* The parameters are those of the filter of transformers, in its order. */
static json_t *to_json(struct chat_run *r, const json_t *v, const struct chat_args *args)
{
    static const char *const known[] = {"ensure_ascii", "indent", "separators"};
    const json_t *width = arg(args, 1, "indent"), *marks = arg(args, 2, "separators");
    const bool narrow = json_is_integer(width);
    struct chat_json_form form = {-1, narrow ? "," : ", ", ": ", chat_true(arg(args, 0, known[0]))};
    for (size_t i = 0, k; i < args->count; i++) {
        for (k = 0; k < 3 && args->names[i] && strcmp(args->names[i], known[k]) != 0; k++)
            ;
        if (k == 3)
            chat_fail(r, QT_E_UNSUPPORTED, "not supported: tojson with '%s'", args->names[i]);
    }
    if (narrow) {
        if (json_integer_value(width) < 0 || json_integer_value(width) > 64)
            chat_fail(r, QT_E_INPUT, "indent is out of range");
        form.indent = (int)json_integer_value(width);
    }
    if (marks && !json_is_null(marks)) {
        form.comma = json_string_value(json_array_get(marks, 0));
        form.colon = json_string_value(json_array_get(marks, 1));
        if (json_array_size(marks) != 2 || !form.comma || !form.colon)
            chat_fail(r, QT_E_INPUT, "separators must be two strings");
    }
    return r->rc < 0 ? NULL : chat_json(r, v, &form);
}

/* ---- filters -------------------------------------------------------------------------------- */

static json_t *list_filter(struct chat_run *r, const char *name, json_t *v,
                           const struct chat_args *args, bool *found)
{
    *found = true;
    if (strncmp(name, "select", 6) == 0 || strncmp(name, "reject", 6) == 0) {
        const bool by_member = strcmp(name + 6, "attr") == 0;
        if (by_member || !name[6])
            return choose(r, v, args, by_member, name[0] == 's');
    }
    if (strcmp(name, "map") == 0)
        return map(r, v, args);
    if (strcmp(name, "list") == 0)
        return chat_elements(r, v);
    if (strcmp(name, "first") == 0)
        return json_array_get(chat_elements(r, v), 0);
    if (strcmp(name, "last") == 0) {
        json_t *list = chat_elements(r, v);
        return json_array_size(list) ? json_array_get(list, json_array_size(list) - 1) : NULL;
    }
    if (strcmp(name, "reverse") == 0)
        return reversed(r, v);
    if (strcmp(name, "unique") == 0)
        return unique(r, chat_elements(r, v));
    if (strcmp(name, "min") == 0 || strcmp(name, "max") == 0)
        return extreme(r, chat_elements(r, v), name[1] == 'a');
    if (strcmp(name, "sort") == 0) {
        const json_t *path = arg(args, SIZE_MAX, "attribute");
        return sorted(r, chat_elements(r, v), json_string_value(path),
                      chat_true(arg(args, 0, "reverse")), false);
    }
    if (strcmp(name, "dictsort") == 0)
        return sorted(r, parts(r, v, ITEMS), NULL, false, true);
    if (strcmp(name, "items") == 0)
        return parts(r, v, ITEMS);
    *found = false;
    return NULL;
}

static json_t *other_filter(struct chat_run *r, const char *name, json_t *v,
                            const struct chat_args *args, bool *found)
{
    size_t size;
    *found = true;
    if (strcmp(name, "default") == 0 || strcmp(name, "d") == 0) {
        const bool replaced = !v || (chat_true(arg(args, 1, "boolean")) && !chat_true(v));
        json_t *other = arg(args, 0, "default_value");
        return !replaced ? v : other ? other : chat_string(r, "", 0);
    }
    if (strcmp(name, "length") == 0 || strcmp(name, "count") == 0)
        return length(r, v);
    if (strcmp(name, "tojson") == 0)
        return to_json(r, v, args);
    if (strcmp(name, "int") == 0 || strcmp(name, "float") == 0)
        return to_number(r, v, name[0] == 'i', arg(args, 0, "default"));
    if (strcmp(name, "abs") == 0)
        return absolute(r, v);
    if (strcmp(name, "join") == 0) {
        const json_t *path = arg(args, 1, "attribute");
        const char *separator = text_arg(r, args, 0, "d", &size, "");
        return join(r, (struct view){separator, size}, v, json_string_value(path));
    }
    if (strcmp(name, "string") == 0 || strcmp(name, "safe") == 0)
        return chat_str(r, v);
    *found = false;
    return NULL;
}

static json_t *string_filter(struct chat_run *r, const char *name, json_t *v,
                             const struct chat_args *args, bool *found)
{
    static const char *const same[] = {"lower", "upper", "title", "capitalize", "replace"};
    const json_t *s;
    *found = true;
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (strcmp(name, same[i]) == 0) {
            json_t *text = chat_str(r, v);
            return r->rc < 0 ? NULL : string_method(r, text, name, args, found);
        }
    *found = strcmp(name, "trim") == 0 || strcmp(name, "indent") == 0;
    if (!*found)
        return NULL;
    s = chat_str(r, v);
    if (r->rc < 0)
        return NULL;
    return name[0] == 't' ? strip_method(r, view_of(s), args, true, true)
                          : indent(r, view_of(s), args);
}

json_t *chat_filter(struct chat_run *r, const char *name, json_t *value,
                    const struct chat_args *args)
{
    bool found;
    json_t *v = list_filter(r, name, value, args, &found);
    if (!found)
        v = other_filter(r, name, value, args, &found);
    if (!found)
        v = string_filter(r, name, value, args, &found);
    if (!found)
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: filter '%s'", name);
    return v;
}

/* ---- tests ---------------------------------------------------------------------------------- */

bool chat_test(struct chat_run *r, const char *name, json_t *v, const struct chat_args *args)
{
    static const char *const equal[] = {"equalto", "eq", "==", "sameas"};
    json_t *other = arg(args, 0, NULL);
    if (strcmp(name, "defined") == 0)
        return v != NULL;
    if (strcmp(name, "undefined") == 0)
        return v == NULL;
    if (strcmp(name, "none") == 0)
        return json_is_null(v);
    if (strcmp(name, "string") == 0)
        return json_is_string(v);
    if (strcmp(name, "mapping") == 0)
        return json_is_object(v);
    if (strcmp(name, "iterable") == 0 || strcmp(name, "sequence") == 0)
        return json_is_string(v) || json_is_array(v) || json_is_object(v) || (!v && name[0] == 'i');
    if (strcmp(name, "number") == 0)
        return json_is_number(v) || json_is_boolean(v);
    if (strcmp(name, "integer") == 0)
        return json_is_integer(v);
    if (strcmp(name, "float") == 0)
        return json_is_real(v);
    if (strcmp(name, "boolean") == 0)
        return json_is_boolean(v);
    if (strcmp(name, "true") == 0 || strcmp(name, "false") == 0)
        return name[0] == 't' ? json_is_true(v) : json_is_false(v);
    for (size_t i = 0; i < sizeof equal / sizeof *equal; i++)
        if (strcmp(name, equal[i]) == 0)
            return chat_equal(v, other);
    if (strcmp(name, "ne") == 0)
        return !chat_equal(v, other);
    if (strcmp(name, "in") == 0)
        return chat_contains(r, other, v);
    if (strcmp(name, "gt") == 0 || strcmp(name, "greaterthan") == 0)
        return chat_compare(r, v, other) > 0;
    if (strcmp(name, "lt") == 0 || strcmp(name, "lessthan") == 0)
        return chat_compare(r, v, other) < 0;
    if (strcmp(name, "odd") == 0 || strcmp(name, "even") == 0)
        return json_is_integer(v) && (json_integer_value(v) % 2 != 0) == (name[0] == 'o');
    if (strcmp(name, "divisibleby") == 0)
        return json_is_integer(v) && json_is_integer(other) && json_integer_value(other) > 0 &&
               json_integer_value(v) % json_integer_value(other) == 0;
    chat_fail(r, QT_E_UNSUPPORTED, "not supported: test '%s'", name);
    return false;
}

/* ---- functions ------------------------------------------------------------------------------ */

static json_t *range(struct chat_run *r, const struct chat_args *args)
{
    const bool both = args->count > 1;
    const json_int_t from = both ? integer_arg(r, args, 0, NULL, 0) : 0;
    const json_int_t to = integer_arg(r, args, both, NULL, 0);
    const json_int_t step = integer_arg(r, args, 2, NULL, 1);
    json_t *list = new_list(r);
    if (step == 0)
        chat_fail(r, QT_E_INPUT, "the step of range is 0");
    for (json_int_t i = from; (step > 0 ? i < to : i > to) && r->rc == QT_OK;) {
        append(r, list, chat_keep(r, json_integer(i)));
        if (__builtin_add_overflow(i, step, &i))
            break;
    }
    return list;
}

static json_t *make_namespace(struct chat_run *r, const struct chat_args *args, bool marked)
{
    json_t *ns = chat_keep(r, json_object());
    if (r->rc < 0 || (marked && json_object_set_new(ns, CHAT_NAMESPACE, json_true()) < 0))
        return chat_keep(r, NULL);
    for (size_t i = 0; i < args->count && r->rc == QT_OK; i++) {
        if (!args->names[i] && !json_is_object(args->list[i]))
            chat_fail(r, QT_E_UNSUPPORTED, "not supported: namespace of %s",
                      chat_type(args->list[i]));
        else if (!args->names[i] ? json_object_update(ns, args->list[i]) < 0
                                 : args->list[i] && json_object_set_nocheck(ns, args->names[i],
                                                                            args->list[i]) < 0)
            chat_keep(r, NULL);
    }
    return ns;
}

/* The date is always the same, because results must not depend on the day. */
static json_t *date(struct chat_run *r, const struct chat_args *args)
{
    const struct tm day = {
        .tm_year = 124, .tm_mon = 6, .tm_mday = 26, .tm_wday = 5, .tm_yday = 207};
    char text[200];
    size_t size;
    const char *format = text_arg(r, args, 0, "format", &size, "");
    if (size > 100)
        chat_fail(r, QT_E_INPUT, "the format of a date is too long");
    return r->rc < 0 ? NULL : chat_string(r, text, strftime(text, sizeof text, format, &day));
}

bool chat_is_function(const char *name)
{
    static const char *const names[] = {"raise_exception", "namespace", "range", "strftime_now",
                                        "dict"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

json_t *chat_function(struct chat_run *r, const char *name, const struct chat_args *args)
{
    if (strcmp(name, "raise_exception") == 0) {
        const json_t *message = chat_str(r, arg(args, 0, NULL));
        chat_fail(r, QT_E_INPUT, "the template refuses the conversation: %s",
                  message ? json_string_value(message) : "");
        return NULL;
    }
    if (strcmp(name, "namespace") == 0 || strcmp(name, "dict") == 0)
        return make_namespace(r, args, name[0] == 'n');
    if (strcmp(name, "range") == 0)
        return range(r, args);
    if (strcmp(name, "strftime_now") == 0)
        return date(r, args);
    chat_fail(r, QT_E_UNSUPPORTED, "not supported: function '%s'", name);
    return NULL;
}
