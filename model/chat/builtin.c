/* Filters, tests, methods and functions of chat templates. A template that uses another one is
 * refused by its name. */
#include "model/chat/builtin.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- objects and lists ---------------------------------------------------------------------- */

enum part { KEYS, VALUES, ITEMS };

static json_t *parts(struct chat_run *r, json_t *object, enum part what)
{
    json_t *list = chat_new_list(r), *member;
    const char *key;
    if (object && !json_is_object(object))
        chat_fail(r, QT_E_INPUT, "%s has no items", chat_type(object));
    json_object_foreach (object, key, member) {
        if (r->rc < 0)
            break;
        if (strcmp(key, CHAT_NAMESPACE) == 0)
            continue;
        json_t *name = what == VALUES ? NULL : chat_key(r, key);
        json_t *pair = what == ITEMS ? chat_new_list(r) : NULL;
        if (pair) {
            chat_append(r, pair, name);
            chat_append(r, pair, member);
        }
        chat_append(r, list, what == KEYS ? name : what == VALUES ? member : pair);
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
        const json_t *key = chat_arg(args, 0, NULL);
        json_t *v = json_is_string(key) ? json_object_get(object, json_string_value(key)) : NULL;
        json_t *other = chat_arg(args, 1, NULL);
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
        v = chat_string_method(r, object, name, args, &found);
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
    const json_t *path = by_member ? chat_arg(args, 0, NULL) : NULL;
    const json_t *test = chat_arg(args, by_member, NULL);
    const size_t used = (size_t)by_member + 1;
    const struct chat_args rest = {args->list + used, args->names + used,
                                   args->count > used ? args->count - used : 0};
    json_t *out = chat_new_list(r);
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
            chat_append(r, out, v);
    }
    return out;
}

static json_t *map(struct chat_run *r, json_t *list, const struct chat_args *args)
{
    const json_t *path = chat_arg(args, SIZE_MAX, "attribute"), *name = chat_arg(args, 0, NULL);
    json_t *other = chat_arg(args, SIZE_MAX, "default"), *out = chat_new_list(r);
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
        chat_append(r, out, v ? v : other);
    }
    return out;
}

static json_t *reversed(struct chat_run *r, json_t *v)
{
    json_t *list = chat_elements(r, v), *out = chat_new_list(r);
    for (size_t i = json_array_size(list); i-- > 0 && r->rc == QT_OK;)
        chat_append(r, out, json_array_get(list, i));
    if (!json_is_string(v))
        return out;
    return chat_join(r, "", 0, out, NULL);
}

/* A stable sort by insertion: lists in templates are short. key: of dictsort's pairs, or NULL. */
static json_t *sorted(struct chat_run *r, json_t *list, const char *path, bool reverse, bool pairs)
{
    json_t *out = chat_new_list(r);
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
    json_t *out = chat_new_list(r);
    for (size_t i = 0; i < json_array_size(list) && r->rc == QT_OK; i++)
        if (!chat_contains(r, out, json_array_get(list, i)))
            chat_append(r, out, json_array_get(list, i));
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
    const json_t *width = chat_arg(args, 1, "indent"), *marks = chat_arg(args, 2, "separators");
    const bool narrow = json_is_integer(width);
    struct chat_json_form form = {-1, narrow ? "," : ", ", ": ",
                                  chat_true(chat_arg(args, 0, known[0]))};
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
        const json_t *path = chat_arg(args, SIZE_MAX, "attribute");
        return sorted(r, chat_elements(r, v), json_string_value(path),
                      chat_true(chat_arg(args, 0, "reverse")), false);
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
        const bool replaced = !v || (chat_true(chat_arg(args, 1, "boolean")) && !chat_true(v));
        json_t *other = chat_arg(args, 0, "default_value");
        return !replaced ? v : other ? other : chat_string(r, "", 0);
    }
    if (strcmp(name, "length") == 0 || strcmp(name, "count") == 0)
        return length(r, v);
    if (strcmp(name, "tojson") == 0)
        return to_json(r, v, args);
    if (strcmp(name, "int") == 0 || strcmp(name, "float") == 0)
        return to_number(r, v, name[0] == 'i', chat_arg(args, 0, "default"));
    if (strcmp(name, "abs") == 0)
        return absolute(r, v);
    if (strcmp(name, "join") == 0) {
        const json_t *path = chat_arg(args, 1, "attribute");
        const char *separator = chat_text_arg(r, args, 0, "d", &size, "");
        return chat_join(r, separator, size, v, json_string_value(path));
    }
    if (strcmp(name, "string") == 0 || strcmp(name, "safe") == 0)
        return chat_str(r, v);
    *found = false;
    return NULL;
}

json_t *chat_filter(struct chat_run *r, const char *name, json_t *value,
                    const struct chat_args *args)
{
    bool found;
    json_t *v = list_filter(r, name, value, args, &found);
    if (!found)
        v = other_filter(r, name, value, args, &found);
    if (!found)
        v = chat_string_filter(r, name, value, args, &found);
    if (!found)
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: filter '%s'", name);
    return v;
}

/* ---- tests ---------------------------------------------------------------------------------- */

bool chat_test(struct chat_run *r, const char *name, json_t *v, const struct chat_args *args)
{
    static const char *const equal[] = {"equalto", "eq", "==", "sameas"};
    json_t *other = chat_arg(args, 0, NULL);
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
    const json_int_t from = both ? chat_integer_arg(r, args, 0, NULL, 0) : 0;
    const json_int_t to = chat_integer_arg(r, args, both, NULL, 0);
    const json_int_t step = chat_integer_arg(r, args, 2, NULL, 1);
    json_t *list = chat_new_list(r);
    if (step == 0)
        chat_fail(r, QT_E_INPUT, "the step of range is 0");
    for (json_int_t i = from; (step > 0 ? i < to : i > to) && r->rc == QT_OK;) {
        chat_append(r, list, chat_keep(r, json_integer(i)));
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
    const char *format = chat_text_arg(r, args, 0, "format", &size, "");
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
        const json_t *message = chat_str(r, chat_arg(args, 0, NULL));
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
