/* Conversations -> the messages that chat templates take. */
#include "calib/data.h"

#include <stdio.h>
#include <string.h>

/* Who speaks, in records of ShareGPT's form and its descendants. */
static const struct {
    const char *from, *role;
} speakers[] = {
    {"human", "user"},          {"user", "user"},           {"prompter", "user"},
    {"gpt", "assistant"},       {"assistant", "assistant"}, {"model", "assistant"},
    {"chatgpt", "assistant"},   {"bot", "assistant"},       {"system", "system"},
    {"developer", "developer"}, {"tool", "tool"},           {"observation", "tool"},
    {"function", "tool"},
};

static const char *role_of(const char *from)
{
    for (size_t i = 0; from && i < sizeof speakers / sizeof *speakers; i++)
        if (strcmp(from, speakers[i].from) == 0)
            return speakers[i].role;
    return NULL;
}

/* A copy in which whole numbers are integers again: the reader makes all numbers reals. */
static json_t *with_integers(const json_t *v)
{
    const double x = json_real_value(v), most = 9007199254740992; /* 2^53 */
    const char *key;
    json_t *member, *copy;
    if (json_is_real(v) && x == (double)(json_int_t)(x > -most && x < most ? x : 0.5))
        return json_integer((json_int_t)x);
    if (json_is_array(v)) {
        copy = json_array();
        for (size_t i = 0; copy && i < json_array_size(v); i++)
            if (json_array_append_new(copy, with_integers(json_array_get(v, i))) < 0) {
                json_decref(copy);
                return NULL;
            }
        return copy;
    }
    if (!json_is_object(v))
        return json_copy((json_t *)(uintptr_t)v);
    copy = json_object();
    json_object_foreach ((json_t *)(uintptr_t)v, key, member) {
        if (copy && json_object_set_new_nocheck(copy, key, with_integers(member)) < 0) {
            json_decref(copy);
            return NULL;
        }
    }
    return copy;
}

/* As transformers passes a message to a template: members that are null are absent (data sets that
 * were tables have all members in all messages), and reasoning has all its names. */
static int complete(json_t *message)
{
    static const char *const names[] = {"reasoning_content", "thinking", "reasoning"};
    json_t *member, *reasoning = NULL;
    const char *key;
    void *next;
    json_object_foreach_safe(message, next, key, member) if (json_is_null(member))
        json_object_del(message, key);
    for (size_t i = 0; i < sizeof names / sizeof *names && !reasoning; i++)
        reasoning = json_object_get(message, names[i]);
    if (!reasoning)
        return 0;
    if (!json_object_get(message, "thinking") &&
        json_object_set(message, "thinking", reasoning) < 0)
        return -1;
    return json_object_set(message, "reasoning_content", reasoning);
}

/* *out: the message of a record; `key` is the member that has the list. */
static int read_message(json_t **out, const json_t *item, size_t i, const char *key, size_t line,
                        const char *file, struct qt_err *err)
{
    const json_t *from = json_object_get(item, "from"), *value = json_object_get(item, "value");
    *out = NULL;
    if (!json_is_object(item))
        return qt_fail(err, QT_E_INPUT, file, NULL,
                       "line %zu: \"%s\"[%zu] must be an object, not %s", line, key, i,
                       qt_json_type(item));
    if (json_is_string(json_object_get(item, "role"))) {
        *out = with_integers(item);
        if (*out && complete(*out) < 0) {
            json_decref(*out);
            *out = NULL;
        }
        return *out ? QT_OK : qt_no_memory(err, NULL);
    }
    if (!json_is_string(from) || !json_is_string(value))
        return qt_fail(
            err, QT_E_INPUT, file, NULL,
            "line %zu: \"%s\"[%zu] has neither \"role\" and \"content\" nor \"from\" and "
            "\"value\"",
            line, key, i);
    const char *role = role_of(json_string_value(from));
    if (!role)
        return qt_fail(err, QT_E_INPUT, file, NULL,
                       "line %zu: \"%s\"[%zu] is \"from\" '%.40s', which is no known speaker", line,
                       key, i, json_string_value(from));
    *out = json_pack("{s:s, s:O}", "role", role, "content", value);
    return *out ? QT_OK : qt_no_memory(err, NULL);
}

const json_t *qt_chat_list(const json_t *record, const char **key)
{
    static const char *const keys[] = {"messages", "conversations", "conversation"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const json_t *list = json_object_get(record, keys[i]);
        *key = keys[i];
        if (list)
            return list;
    }
    return NULL;
}

int qt_chat_read(json_t **messages, json_t **tools, const json_t *record, size_t line,
                 const char *file, struct qt_err *err)
{
    const char *key;
    const json_t *list = qt_chat_list(record, &key), *given = json_object_get(record, "tools");
    int rc = QT_OK;
    *messages = *tools = NULL;
    if (!json_is_array(list) || !json_array_size(list))
        return qt_fail(err, QT_E_INPUT, file, NULL,
                       "line %zu: \"%s\" must be an array with messages, not %s", line, key,
                       json_is_array(list) ? "an empty one" : qt_json_type(list));
    *messages = json_array();
    if (!*messages)
        return qt_no_memory(err, NULL);
    for (size_t i = 0; i < json_array_size(list) && rc == QT_OK; i++) {
        json_t *message;
        rc = read_message(&message, json_array_get(list, i), i, key, line, file, err);
        if (rc == QT_OK && json_array_append_new(*messages, message) < 0)
            rc = qt_no_memory(err, NULL);
    }
    if (rc == QT_OK && json_is_array(given) && !(*tools = with_integers(given)))
        rc = qt_no_memory(err, NULL);
    if (rc < 0) {
        json_decref(*messages);
        *messages = NULL;
    }
    return rc;
}
