/* Expressions of chat templates. */
#include "model/chat/chat.h"
#include "model/tokenizer/internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static json_t *integer(struct chat_run *r, json_int_t value)
{
    return chat_keep(r, json_integer(value));
}

static json_t *boolean(bool value)
{
    return json_boolean(value); /* Jansson's constants need no owner */
}

/* ---- names and members ---------------------------------------------------------------------- */

static json_t *lookup(const struct chat_run *r, const char *name)
{
    json_t *v = NULL;
    for (size_t i = r->nscopes; i-- > 0 && !v;)
        v = json_object_get(r->scopes[i], name);
    return v;
}

/* An index as Python takes it: negative ones count from the end. */
static bool index_of(size_t *out, const json_t *index, size_t size)
{
    json_int_t i = json_integer_value(index);
    if (!json_is_integer(index))
        return false;
    if (i < 0)
        i += (json_int_t)size;
    *out = (size_t)i;
    return i >= 0 && *out < size;
}

/* The byte offset of character i of s. */
static size_t offset_of(const char *s, size_t size, size_t i)
{
    size_t at = 0, n;
    for (; i > 0 && at < size; i--, at += n)
        qt_utf8_char(&n, s + at);
    return at;
}

/* Integers as keys are kept as text behind a mark. */
static const json_t *text_key(struct chat_run *r, const json_t *key)
{
    char text[32];
    if (!json_is_integer(key))
        return key;
    snprintf(text, sizeof text, CHAT_INTEGER_KEY "%lld", (long long)json_integer_value(key));
    return chat_string(r, text, strlen(text));
}

static json_t *item(struct chat_run *r, json_t *object, const json_t *index)
{
    size_t i;
    if (json_is_object(object)) {
        index = text_key(r, index);
        return json_is_string(index) ? json_object_get(object, json_string_value(index)) : NULL;
    }
    if (json_is_array(object))
        return index_of(&i, index, json_array_size(object)) ? json_array_get(object, i) : NULL;
    if (json_is_string(object)) {
        const char *s = json_string_value(object);
        const size_t size = json_string_length(object);
        size_t n;
        chat_work(r, size);
        if (!index_of(&i, index, chat_length(s, size)))
            return NULL;
        i = offset_of(s, size, i);
        qt_utf8_char(&n, s + i);
        return chat_string(r, s + i, n);
    }
    if (!object)
        chat_fail(r, QT_E_INPUT, "an undefined value has no members");
    return NULL;
}

static json_t *attribute(struct chat_run *r, json_t *object, const char *name)
{
    if (!object)
        chat_fail(r, QT_E_INPUT, "an undefined value has no member '%s'", name);
    return json_object_get(object, name);
}

/* The bounds of a slice, as Python clips them; absent ones are undefined. */
static bool bound(struct chat_run *r, json_int_t *out, const struct chat_node *n, json_int_t size,
                  json_int_t initial, json_int_t low, json_int_t high)
{
    *out = initial;
    if (!n)
        return true;
    const json_t *v = chat_eval(r, n);
    if (json_is_null(v))
        return true;
    if (!json_is_integer(v)) {
        chat_fail(r, QT_E_INPUT, "a slice needs integers, not %s", chat_type(v));
        return false;
    }
    json_int_t i = json_integer_value(v);
    i += i < 0 ? size : 0;
    *out = i < low ? low : i > high ? high : i;
    return true;
}

static json_t *slice(struct chat_run *r, const struct chat_node *n)
{
    json_t *object = chat_eval(r, n->kids[0]), *result;
    json_int_t from, to, step = 1;
    const bool text = json_is_string(object);
    if (!text && !json_is_array(object)) {
        chat_fail(r, QT_E_INPUT, "%s cannot be sliced", chat_type(object));
        return NULL;
    }
    json_t *list = chat_elements(r, object);
    const json_int_t size = (json_int_t)json_array_size(list);
    if (n->kids[3]) {
        const json_t *v = chat_eval(r, n->kids[3]);
        step = json_is_integer(v) ? json_integer_value(v) : json_is_null(v) ? 1 : 0;
        if (step == 0 || step > size + 1 || step < -size - 1) {
            chat_fail(r, QT_E_INPUT, "the step of a slice is 0 or too large");
            return NULL;
        }
    }
    const json_int_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
    if (!bound(r, &from, n->kids[1], size, step > 0 ? low : high, low, high) ||
        !bound(r, &to, n->kids[2], size, step > 0 ? high : low, low, high))
        return NULL;
    struct chat_text out = {0};
    result = text ? NULL : chat_keep(r, json_array());
    for (json_int_t i = from; (step > 0 ? i < to : i > to) && r->rc == QT_OK; i += step) {
        const json_t *v = json_array_get(list, (size_t)i);
        chat_work(r, 8);
        if (text)
            chat_emit(r, &out, json_string_value(v), json_string_length(v));
        else if (json_array_append(result, json_array_get(list, (size_t)i)) < 0)
            chat_keep(r, NULL);
    }
    if (text)
        result = chat_string(r, out.data, out.size);
    qt_free(out.data);
    return result;
}

/* ---- operators ------------------------------------------------------------------------------ */

static json_t *concatenate(struct chat_run *r, const json_t *a, const json_t *b)
{
    const json_t *x = chat_str(r, a), *y = chat_str(r, b);
    struct chat_text text = {0};
    if (r->rc < 0)
        return NULL;
    chat_emit(r, &text, json_string_value(x), json_string_length(x));
    chat_emit(r, &text, json_string_value(y), json_string_length(y));
    json_t *v = chat_string(r, text.data, text.size);
    qt_free(text.data);
    return v;
}

static json_t *join_lists(struct chat_run *r, json_t *a, json_t *b)
{
    json_t *list = chat_keep(r, json_array());
    chat_work(r, 8 * (json_array_size(a) + json_array_size(b)));
    if (r->rc == QT_OK && (json_array_extend(list, a) < 0 || json_array_extend(list, b) < 0))
        chat_keep(r, NULL);
    return list;
}

static json_t *repeat(struct chat_run *r, const json_t *text, json_int_t times)
{
    struct chat_text out = {0};
    for (json_int_t i = 0; i < times && r->rc == QT_OK; i++) {
        chat_work(r, 8);
        chat_emit(r, &out, json_string_value(text), json_string_length(text));
    }
    json_t *v = chat_string(r, out.data, out.size);
    qt_free(out.data);
    return v;
}

static json_int_t floor_divide(json_int_t a, json_int_t b)
{
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

static json_t *integers(struct chat_run *r, char op, bool twice, json_int_t a, json_int_t b)
{
    json_int_t result = 0;
    bool overflow = false;
    if ((op == '/' || op == '%') && (b == 0 || b == -1)) {
        if (b == 0) {
            chat_fail(r, QT_E_INPUT, "division by zero");
            return NULL;
        }
        overflow = __builtin_sub_overflow((json_int_t)0, a, &result);
        result = op == '%' ? 0 : result;
    } else if (op == '/') {
        result = floor_divide(a, b);
    } else if (op == '%') {
        result = a - b * floor_divide(a, b);
    } else if (op == '+') {
        overflow = __builtin_add_overflow(a, b, &result);
    } else if (op == '-') {
        overflow = __builtin_sub_overflow(a, b, &result);
    } else if (!twice) {
        overflow = __builtin_mul_overflow(a, b, &result);
    } else {
        result = 1;
        for (overflow = b < 0 || b > 64; b > 0 && !overflow; b--)
            overflow = __builtin_mul_overflow(result, a, &result);
    }
    if (overflow)
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: integers beyond 64 bits");
    return integer(r, result);
}

static json_t *reals(struct chat_run *r, char op, bool twice, double a, double b)
{
    double result = op == '+' ? a + b : op == '-' ? a - b : op == '/' ? a / b : a * b;
    if (op == '/' && twice)
        result = floor(result);
    if (op == '%')
        result = a - b * floor(a / b);
    if (op == '*' && twice)
        result = pow(a, b);
    if (!isfinite(result)) {
        chat_fail(r, QT_E_INPUT, "the result of '%c' is not a finite number", op);
        return NULL;
    }
    return chat_keep(r, json_real(result));
}

static json_t *arithmetic(struct chat_run *r, const char *op, json_t *a, json_t *b)
{
    const bool twice = op[1] != '\0';
    if (json_is_integer(a) && json_is_integer(b) && (op[0] != '/' || twice))
        return integers(r, op[0], twice, json_integer_value(a), json_integer_value(b));
    if (json_is_number(a) && json_is_number(b))
        return reals(r, op[0], twice, json_number_value(a), json_number_value(b));
    if (strcmp(op, "+") == 0 && json_is_string(a) && json_is_string(b))
        return concatenate(r, a, b);
    if (strcmp(op, "+") == 0 && json_is_array(a) && json_is_array(b))
        return join_lists(r, a, b);
    if (strcmp(op, "*") == 0 && json_is_string(a) && json_is_integer(b))
        return repeat(r, a, json_integer_value(b));
    chat_fail(r, QT_E_INPUT, "'%s' cannot be applied to %s and %s", op, chat_type(a), chat_type(b));
    return NULL;
}

static json_t *binary(struct chat_run *r, const struct chat_node *n)
{
    const char *op = n->names[0];
    json_t *a = chat_eval(r, n->kids[0]);
    if (r->rc < 0)
        return NULL;
    if (strcmp(op, "and") == 0)
        return chat_true(a) ? chat_eval(r, n->kids[1]) : a;
    if (strcmp(op, "or") == 0)
        return chat_true(a) ? a : chat_eval(r, n->kids[1]);
    json_t *b = chat_eval(r, n->kids[1]);
    if (r->rc < 0)
        return NULL;
    if (strcmp(op, "==") == 0)
        return boolean(chat_equal(a, b));
    if (strcmp(op, "!=") == 0)
        return boolean(!chat_equal(a, b));
    if (strcmp(op, "in") == 0)
        return boolean(chat_contains(r, b, a));
    if (strcmp(op, "not in") == 0)
        return boolean(!chat_contains(r, b, a));
    if (op[0] == '<' || op[0] == '>') {
        const int c = chat_compare(r, a, b);
        return boolean(op[0] == '<' ? c < 0 || (op[1] && c == 0) : c > 0 || (op[1] && c == 0));
    }
    return op[0] == '~' ? concatenate(r, a, b) : arithmetic(r, op, a, b);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static bool eval_arguments(struct chat_run *r, struct chat_args *out, const struct chat_node *n)
{
    *out = (struct chat_args){.names = n->names + 1, .count = n->count - 1};
    const int rc = qt_array_new(&out->list, out->count, sizeof *out->list, r->err);
    if (rc < 0)
        r->rc = rc;
    for (size_t i = 0; i < out->count && r->rc == QT_OK; i++)
        out->list[i] = chat_eval(r, n->kids[i + 1]);
    return r->rc == QT_OK;
}

static json_t *call(struct chat_run *r, const struct chat_node *n)
{
    const struct chat_node *callee = n->kids[0], *macro = NULL;
    struct chat_args args;
    json_t *result = NULL, *object = NULL;
    const bool method = callee->kind == CHAT_ATTR;
    if (method)
        object = chat_eval(r, callee->kids[0]);
    if (eval_arguments(r, &args, n)) {
        for (size_t i = 0; i < r->nmacros && !method; i++)
            if (strcmp(r->macros[i]->names[0], callee->names[0]) == 0)
                macro = r->macros[i];
        if (method)
            result = chat_method(r, object, callee->names[0], &args);
        else if (macro)
            result = chat_call_macro(r, macro, args.list, args.names, args.count);
        else
            result = chat_function(r, callee->names[0], &args);
    }
    qt_free(args.list);
    return result;
}

static json_t *filter(struct chat_run *r, const struct chat_node *n)
{
    struct chat_args args;
    json_t *value = chat_eval(r, n->kids[0]), *result = NULL;
    if (eval_arguments(r, &args, n))
        result = chat_filter(r, n->names[0], value, &args);
    qt_free(args.list);
    return result;
}

/* "x is defined" also holds for the names of functions and macros. */
static bool is_defined(const struct chat_run *r, const struct chat_node *n, const json_t *value)
{
    if (value || n->kind != CHAT_NAME)
        return value != NULL;
    for (size_t i = 0; i < r->nmacros; i++)
        if (strcmp(r->macros[i]->names[0], n->names[0]) == 0)
            return true;
    return chat_is_function(n->names[0]);
}

static json_t *test(struct chat_run *r, const struct chat_node *n)
{
    struct chat_args args;
    json_t *value = chat_eval(r, n->kids[0]);
    bool result = false;
    const char *name = n->names[0];
    if (strcmp(name, "defined") == 0 || strcmp(name, "undefined") == 0)
        return boolean(is_defined(r, n->kids[0], value) == (name[0] == 'd'));
    if (eval_arguments(r, &args, n))
        result = chat_test(r, name, value, &args);
    qt_free(args.list);
    return boolean(result);
}

/* ---- values --------------------------------------------------------------------------------- */

static json_t *array(struct chat_run *r, const struct chat_node *n)
{
    json_t *list = chat_keep(r, json_array());
    for (size_t i = 0; i < n->count && r->rc == QT_OK; i++) {
        json_t *v = chat_eval(r, n->kids[i]);
        if (r->rc == QT_OK && json_array_append(list, v ? v : json_null()) < 0)
            chat_keep(r, NULL);
    }
    chat_check_depth(r, list);
    return list;
}

static json_t *dict(struct chat_run *r, const struct chat_node *n)
{
    json_t *object = chat_keep(r, json_object());
    for (size_t i = 0; i + 1 < n->count && r->rc == QT_OK; i += 2) {
        const json_t *key = text_key(r, chat_eval(r, n->kids[i]));
        json_t *v = chat_eval(r, n->kids[i + 1]);
        if (r->rc < 0)
            break;
        if (!json_is_string(key) || strlen(json_string_value(key)) != json_string_length(key)) {
            chat_fail(r, QT_E_UNSUPPORTED, "not supported: a key that is %s", chat_type(key));
            break;
        }
        if (json_object_set_nocheck(object, json_string_value(key), v ? v : json_null()) < 0)
            chat_keep(r, NULL);
    }
    chat_check_depth(r, object);
    return object;
}

static json_t *negate(struct chat_run *r, const json_t *v)
{
    if (json_is_integer(v) && json_integer_value(v) != INT64_MIN)
        return integer(r, -json_integer_value(v));
    if (json_is_real(v))
        return chat_keep(r, json_real(-json_real_value(v)));
    chat_fail(r, QT_E_INPUT, "'-' cannot be applied to %s", chat_type(v));
    return NULL;
}

json_t *chat_eval(struct chat_run *r, const struct chat_node *n)
{
    if (r->rc < 0)
        return NULL;
    chat_work(r, 8);
    switch (n->kind) {
    case CHAT_LITERAL:
        return n->value;
    case CHAT_NAME:
        return lookup(r, n->names[0]);
    case CHAT_ARRAY:
        return array(r, n);
    case CHAT_DICT:
        return dict(r, n);
    case CHAT_ATTR:
        return attribute(r, chat_eval(r, n->kids[0]), n->names[0]);
    case CHAT_ITEM: {
        json_t *object = chat_eval(r, n->kids[0]);
        return item(r, object, chat_eval(r, n->kids[1]));
    }
    case CHAT_SLICE:
        return slice(r, n);
    case CHAT_CALL:
        return call(r, n);
    case CHAT_FILTER:
        return filter(r, n);
    case CHAT_TEST:
        return test(r, n);
    case CHAT_NOT:
        return boolean(!chat_true(chat_eval(r, n->kids[0])));
    case CHAT_NEGATE:
        return negate(r, chat_eval(r, n->kids[0]));
    case CHAT_BINARY:
        return binary(r, n);
    case CHAT_CHOICE:
        return chat_true(chat_eval(r, n->kids[0])) ? chat_eval(r, n->kids[1])
               : n->count > 2                      ? chat_eval(r, n->kids[2])
                                                   : NULL;
    default:
        chat_fail(r, QT_E_INTERNAL, "unknown expression");
        return NULL;
    }
}
