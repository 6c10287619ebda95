/* This header declares what builtin.c, strings.c and args.c share (private to model/chat/). */
#ifndef QT_MODEL_CHAT_BUILTIN_H
#define QT_MODEL_CHAT_BUILTIN_H

#include "model/chat/chat.h"

/* ---- args.c --------------------------------------------------------------------------------- */

/* Argument `place` without a keyword, or the one with this keyword; undefined if absent. */
json_t *chat_arg(const struct chat_args *args, size_t place, const char *name);
/* The same for strings and integers; `initial` if absent (a string also if it is none). Other types
 * are errors. */
const char *chat_text_arg(struct chat_run *r, const struct chat_args *args, size_t place,
                          const char *name, size_t *size, const char *initial);
json_int_t chat_integer_arg(struct chat_run *r, const struct chat_args *args, size_t place,
                            const char *name, json_int_t initial);
json_t *chat_new_list(struct chat_run *r);
/* An undefined value becomes none. */
void chat_append(struct chat_run *r, json_t *list, json_t *v);

/* ---- strings.c ------------------------------------------------------------------------------ */

/* *found = false: there is no method, or filter, of this name. */
json_t *chat_string_method(struct chat_run *r, json_t *object, const char *name,
                           const struct chat_args *args, bool *found);
json_t *chat_string_filter(struct chat_run *r, const char *name, json_t *v,
                           const struct chat_args *args, bool *found);
/* The texts of the elements of a list, or of their members, with separator[size] between them. */
json_t *chat_join(struct chat_run *r, const char *separator, size_t size, json_t *list,
                  const char *member);

#endif
