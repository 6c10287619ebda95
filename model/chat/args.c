/* Arguments of filters, tests, methods and functions of chat templates (builtin.h). */
#include "model/chat/builtin.h"

#include <string.h>

json_t *chat_arg(const struct chat_args *args, size_t place, const char *name)
{
    size_t seen = 0;
    for (size_t i = 0; i < args->count; i++) {
        if (args->names[i] ? name && strcmp(args->names[i], name) == 0 : seen == place)
            return args->list[i];
        seen += !args->names[i];
    }
    return NULL;
}

const char *chat_text_arg(struct chat_run *r, const struct chat_args *args, size_t place,
                          const char *name, size_t *size, const char *initial)
{
    const json_t *v = chat_arg(args, place, name);
    *size = v ? json_string_length(v) : strlen(initial);
    if (v && !json_is_string(v) && !json_is_null(v))
        chat_fail(r, QT_E_INPUT, "an argument must be a string, not %s", chat_type(v));
    return json_is_string(v) ? json_string_value(v) : (*size = strlen(initial), initial);
}

json_int_t chat_integer_arg(struct chat_run *r, const struct chat_args *args, size_t place,
                            const char *name, json_int_t initial)
{
    const json_t *v = chat_arg(args, place, name);
    if (v && !json_is_integer(v))
        chat_fail(r, QT_E_INPUT, "an argument must be an integer, not %s", chat_type(v));
    return json_is_integer(v) ? json_integer_value(v) : initial;
}

void chat_append(struct chat_run *r, json_t *list, json_t *v)
{
    if (r->rc == QT_OK && json_array_append(list, v ? v : json_null()) < 0)
        chat_keep(r, NULL);
}

json_t *chat_new_list(struct chat_run *r)
{
    return chat_keep(r, json_array());
}
