/* Methods and filters of strings in chat templates (builtin.h). */
#include "model/chat/builtin.h"
#include "model/tokenizer/internal.h"

#include <ctype.h>
#include <string.h>

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
    const json_t *given = chat_arg(args, 0, "chars");
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
    old.s = chat_text_arg(r, args, 0, "old", &old.size, "");
    new.s = chat_text_arg(r, args, 1, "new", &new.size, "");
    json_int_t left = chat_integer_arg(r, args, 2, "count", -1);
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
    const json_t *given = chat_arg(args, 0, "sep");
    const struct view space = {0}, sep = json_is_string(given) ? view_of(given) : space;
    json_int_t most = chat_integer_arg(r, args, 1, "maxsplit", -1);
    json_t *list = chat_new_list(r);
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
        chat_append(r, list, chat_string(r, v.s, n));
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
    const char *sep = chat_text_arg(r, args, 0, "sep", &size, "");
    json_int_t most = chat_integer_arg(r, args, 1, "maxsplit", -1);
    json_t *list = chat_new_list(r);
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
    json_t *list = chat_new_list(r);
    while (v.size && r->rc == QT_OK) {
        const char *end = memchr(v.s, '\n', v.size);
        const size_t n = end ? (size_t)(end - v.s) : v.size;
        chat_append(r, list, chat_string(r, v.s, n - (end && n && v.s[n - 1] == '\r')));
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
    part.s = chat_text_arg(r, args, 0, NULL, &part.size, "");
    chat_work(r, v.size);
    const char *at = memmem(v.s, v.size, part.s, part.size);
    if (!count)
        return chat_keep(r,
                         json_integer(at ? (json_int_t)chat_length(v.s, (size_t)(at - v.s)) : -1));
    for (const char *end = v.s + v.size; at && part.size; n++)
        at = memmem(at + part.size, (size_t)(end - at) - part.size, part.s, part.size);
    return chat_keep(r, json_integer(n));
}

json_t *chat_join(struct chat_run *r, const char *separator, size_t size, json_t *list,
                  const char *member)
{
    struct chat_text out = {0};
    list = chat_elements(r, list);
    for (size_t i = 0; i < json_array_size(list) && r->rc == QT_OK; i++) {
        json_t *v = json_array_get(list, i);
        const json_t *s = chat_str(r, member ? json_object_get(v, member) : v);
        if (i)
            chat_emit(r, &out, separator, size);
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
    const json_t *given = chat_arg(args, 0, "width");
    char blanks[64] = "";
    const json_int_t width = json_is_integer(given) ? json_integer_value(given) : 4;
    const bool first = chat_true(chat_arg(args, 1, "first")),
               blank = chat_true(chat_arg(args, 2, "blank"));
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

json_t *chat_string_method(struct chat_run *r, json_t *object, const char *name,
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
        return json_boolean(has_affix(r, v, chat_arg(args, 0, NULL), true));
    if (strcmp(name, "endswith") == 0)
        return json_boolean(has_affix(r, v, chat_arg(args, 0, NULL), false));
    if (strcmp(name, "replace") == 0)
        return replace(r, v, args);
    if (strcmp(name, "find") == 0 || strcmp(name, "count") == 0)
        return find(r, v, args, name[0] == 'c');
    if (strcmp(name, "join") == 0)
        return chat_join(r, v.s, v.size, chat_arg(args, 0, NULL), NULL);
    if (strcmp(name, "lower") == 0 || strcmp(name, "upper") == 0)
        return change_case(r, v, name[0] == 'l' ? LOWER : UPPER);
    if (strcmp(name, "title") == 0 || strcmp(name, "capitalize") == 0)
        return change_case(r, v, name[0] == 't' ? TITLE : CAPITALIZE);
    *found = false;
    return NULL;
}

json_t *chat_string_filter(struct chat_run *r, const char *name, json_t *v,
                           const struct chat_args *args, bool *found)
{
    static const char *const same[] = {"lower", "upper", "title", "capitalize", "replace"};
    const json_t *s;
    *found = true;
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (strcmp(name, same[i]) == 0) {
            json_t *text = chat_str(r, v);
            return r->rc < 0 ? NULL : chat_string_method(r, text, name, args, found);
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
