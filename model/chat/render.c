/* Statements of chat templates. */
#include "model/chat/chat.h"

#include <string.h>

enum { MAX_DEPTH = 60 }; /* of macros that call each other */

enum leave { STAY, LEAVE_ITERATION, LEAVE_LOOP };

static enum leave execute(struct chat_run *r, const struct chat_node *n);

/* ---- variables ------------------------------------------------------------------------------ */

static bool push_scope(struct chat_run *r)
{
    if (r->nscopes == sizeof r->scopes / sizeof *r->scopes) {
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: more than %zu nested loops and macros",
                  r->nscopes);
        return false;
    }
    r->scopes[r->nscopes] = chat_keep(r, json_object());
    r->nscopes += r->rc == QT_OK;
    return r->rc == QT_OK;
}

void chat_set(struct chat_run *r, const char *name, json_t *value)
{
    json_t *scope = r->scopes[r->nscopes - 1];
    if (r->rc < 0)
        return;
    if (!value)
        json_object_del(scope, name);
    else if (json_object_set_nocheck(scope, name, value) < 0)
        chat_keep(r, NULL);
}

/* A list that is spread over several variables. */
static void set_names(struct chat_run *r, char *const *names, size_t n, json_t *value)
{
    if (n == 1) {
        chat_set(r, names[0], value);
        return;
    }
    if (json_array_size(value) != n) {
        chat_fail(r, QT_E_INPUT, "%zu variables, but not as many values", n);
        return;
    }
    for (size_t i = 0; i < n; i++)
        chat_set(r, names[i], json_array_get(value, i));
}

/* ns.x = value. A namespace holds no namespace: neither cycles nor endless nesting can arise. */
static bool may_hold(const json_t *value, int depth)
{
    const char *key;
    json_t *member;
    if (depth == 0 || json_object_get(value, CHAT_NAMESPACE))
        return false;
    for (size_t i = 0; i < json_array_size(value); i++)
        if (!may_hold(json_array_get(value, i), depth - 1))
            return false;
    json_object_foreach ((json_t *)(uintptr_t)value, key, member) {
        if (!may_hold(member, depth - 1))
            return false;
    }
    return true;
}

static void set_member(struct chat_run *r, const char *object, const char *name, json_t *value)
{
    enum { NESTING = 80 };
    json_t *ns = NULL;
    for (size_t i = r->nscopes; i-- > 0 && !ns;)
        ns = json_object_get(r->scopes[i], object);
    if (!json_object_get(ns, CHAT_NAMESPACE))
        chat_fail(r, QT_E_INPUT, "'%s' is not a namespace", object);
    else if (!may_hold(value, NESTING))
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: a namespace in a namespace");
    else if (!value)
        json_object_del(ns, name);
    else if (r->rc == QT_OK && json_object_set_nocheck(ns, name, value) < 0)
        chat_keep(r, NULL);
}

/* ---- statements ----------------------------------------------------------------------------- */

static void loop_set(struct chat_run *r, json_t *loop, const char *name, json_t *value)
{
    if (r->rc == QT_OK && value && json_object_set_nocheck(loop, name, value) < 0)
        chat_keep(r, NULL);
}

/* The variable "loop" of iteration i of n. */
static void set_loop(struct chat_run *r, const json_t *list, size_t i)
{
    const size_t n = json_array_size(list);
    json_t *loop = chat_keep(r, json_object());
    loop_set(r, loop, "index0", chat_keep(r, json_integer((json_int_t)i)));
    loop_set(r, loop, "index", chat_keep(r, json_integer((json_int_t)i + 1)));
    loop_set(r, loop, "revindex0", chat_keep(r, json_integer((json_int_t)(n - i) - 1)));
    loop_set(r, loop, "revindex", chat_keep(r, json_integer((json_int_t)(n - i))));
    loop_set(r, loop, "length", chat_keep(r, json_integer((json_int_t)n)));
    loop_set(r, loop, "first", json_boolean(i == 0));
    loop_set(r, loop, "last", json_boolean(i + 1 == n));
    if (i > 0)
        loop_set(r, loop, "previtem", json_array_get(list, i - 1));
    if (i + 1 < n)
        loop_set(r, loop, "nextitem", json_array_get(list, i + 1));
    chat_set(r, "loop", loop);
}

/* The elements for which the condition of the loop is true. */
static json_t *filtered(struct chat_run *r, const struct chat_node *n, json_t *list)
{
    json_t *kept = chat_keep(r, json_array());
    for (size_t i = 0; i < json_array_size(list) && r->rc == QT_OK; i++) {
        if (!push_scope(r))
            break;
        set_names(r, n->names, n->nnames, json_array_get(list, i));
        if (chat_true(chat_eval(r, n->kids[1])) && r->rc == QT_OK &&
            json_array_append(kept, json_array_get(list, i)) < 0)
            chat_keep(r, NULL);
        r->nscopes--;
    }
    return kept;
}

static enum leave execute_for(struct chat_run *r, const struct chat_node *n)
{
    json_t *list = chat_elements(r, chat_eval(r, n->kids[0]));
    enum leave leave = STAY;
    if (r->rc == QT_OK && n->kids[1])
        list = filtered(r, n, list);
    if (r->rc == QT_OK && json_array_size(list) == 0 && n->kids[3])
        return execute(r, n->kids[3]);
    for (size_t i = 0; i < json_array_size(list) && r->rc == QT_OK && leave != LEAVE_LOOP; i++) {
        if (!push_scope(r))
            break;
        set_loop(r, list, i);
        set_names(r, n->names, n->nnames, json_array_get(list, i));
        leave = execute(r, n->kids[2]);
        r->nscopes--;
    }
    return STAY;
}

/* Runs the statements and returns what they print. */
static json_t *capture(struct chat_run *r, const struct chat_node *n)
{
    struct chat_text text = {0}, *out = r->out;
    r->out = &text;
    chat_execute(r, n);
    r->out = out;
    json_t *v = chat_string(r, text.data, text.size);
    qt_free(text.data);
    return v;
}

static void define_macro(struct chat_run *r, const struct chat_node *n)
{
    enum { MOST = sizeof r->macros / sizeof *r->macros };
    size_t i = 0;
    while (i < r->nmacros && strcmp(r->macros[i]->names[0], n->names[0]) != 0)
        i++;
    if (i == MOST) {
        chat_fail(r, QT_E_UNSUPPORTED, "not supported: more than %d macros", (int)MOST);
        return;
    }
    r->macros[i] = n;
    r->nmacros += i == r->nmacros;
}

static enum leave execute_list(struct chat_run *r, const struct chat_node *n)
{
    enum leave leave = STAY;
    for (size_t i = 0; i < n->count && r->rc == QT_OK && leave == STAY; i++)
        leave = execute(r, n->kids[i]);
    return leave;
}

static enum leave execute(struct chat_run *r, const struct chat_node *n)
{
    json_t *v;
    if (!n || r->rc < 0)
        return STAY;
    r->line = n->line;
    chat_work(r, 8);
    switch (n->kind) {
    case CHAT_TEXT:
        chat_emit(r, r->out, json_string_value(n->value), json_string_length(n->value));
        return STAY;
    case CHAT_PRINT:
        v = chat_str(r, chat_eval(r, n->kids[0]));
        if (r->rc == QT_OK)
            chat_emit(r, r->out, json_string_value(v), json_string_length(v));
        return STAY;
    case CHAT_LIST:
        return execute_list(r, n);
    case CHAT_IF:
        return execute(r, n->kids[chat_true(chat_eval(r, n->kids[0])) ? 1 : 2]);
    case CHAT_FOR:
        return execute_for(r, n);
    case CHAT_SET:
        v = chat_eval(r, n->kids[1]);
        if (r->rc == QT_OK && n->kids[0])
            set_member(r, n->names[0], n->names[1], v);
        else if (r->rc == QT_OK)
            set_names(r, n->names, n->nnames, v);
        return STAY;
    case CHAT_CAPTURE:
        chat_set(r, n->names[0], capture(r, n->kids[1]));
        return STAY;
    case CHAT_MACRO:
        define_macro(r, n);
        return STAY;
    case CHAT_BREAK:
        return LEAVE_LOOP;
    case CHAT_CONTINUE:
        return LEAVE_ITERATION;
    default:
        chat_fail(r, QT_E_INTERNAL, "unknown statement");
        return STAY;
    }
}

void chat_execute(struct chat_run *r, const struct chat_node *n)
{
    execute(r, n);
}

/* ---- macros --------------------------------------------------------------------------------- */

/* The value of parameter i (names[i + 1]), or its default. */
static json_t *argument(struct chat_run *r, const struct chat_node *macro, size_t i,
                        json_t *const *args, char *const *names, size_t n)
{
    size_t place = 0;
    for (size_t k = 0; k < n; k++) {
        if (names[k] ? strcmp(names[k], macro->names[i + 1]) == 0 : place == i)
            return args[k];
        place += !names[k];
    }
    return macro->kids[i + 1] ? chat_eval(r, macro->kids[i + 1]) : NULL;
}

/* A macro sees its parameters and the variables of the template's top level. */
json_t *chat_call_macro(struct chat_run *r, const struct chat_node *macro, json_t *const *args,
                        char *const *names, size_t n)
{
    json_t *saved[sizeof r->scopes / sizeof *r->scopes], *result = NULL;
    const size_t nscopes = r->nscopes, line = r->line;
    if (n > macro->nnames - 1) {
        chat_fail(r, QT_E_INPUT, "macro '%s' has only %zu parameters", macro->names[0],
                  macro->nnames - 1);
        return NULL;
    }
    if (++r->depth > MAX_DEPTH) {
        chat_fail(r, QT_E_INPUT, "macros call each other more than %d deep", MAX_DEPTH);
        return NULL;
    }
    memcpy(saved, r->scopes, sizeof saved);
    r->nscopes = qt_min_size(nscopes, 2); /* builtin and top-level variables */
    if (push_scope(r)) {
        for (size_t i = 0; i + 1 < macro->nnames; i++)
            chat_set(r, macro->names[i + 1], argument(r, macro, i, args, names, n));
        result = capture(r, macro->kids[0]);
    }
    memcpy(r->scopes, saved, sizeof saved);
    r->nscopes = nscopes;
    r->line = line;
    r->depth--;
    return result;
}
