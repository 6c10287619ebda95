/*
 * Internals of chat templates: the subset of Jinja that published templates use.
 *
 *   chat.c     finds the template of a model, renders a conversation
 *   parse.c    text -> nodes; tokens.c: the tokens in tags
 *   render.c   statements: output, if, for, set, macro
 *   expr.c     expressions
 *   builtin.c  filters, tests, methods and functions; strings.c: those of strings;
 *              args.c: their arguments
 *   value.c    strings, truth, comparison and text of values
 *
 * Values are Jansson's; an undefined value is NULL. All values that a rendering makes live in a
 * pool until its end, so functions return them borrowed. The first error of a rendering stays in
 * run->rc, and everything after it returns at once.
 */
#ifndef QT_MODEL_CHAT_H
#define QT_MODEL_CHAT_H

#include "model/model.h"

/* ---- nodes (parse.c) ------------------------------------------------------------------------ */

enum chat_kind {
    /* Statements; kids in this order, NULL where absent: */
    CHAT_TEXT,     /* value */
    CHAT_PRINT,    /* expression */
    CHAT_LIST,     /* statements */
    CHAT_IF,       /* condition, then, else */
    CHAT_FOR,      /* iterable, filter, body, else; names: of the variables */
    CHAT_SET,      /* the member of a namespace, value; names: of the variables */
    CHAT_CAPTURE,  /* NULL, body: {% set x %}...{% endset %} */
    CHAT_MACRO,    /* body, defaults of the parameters; names: of the macro and its parameters */
    CHAT_BREAK,    /* leaves the loop */
    CHAT_CONTINUE, /* begins the next iteration */
    /* Expressions: */
    CHAT_LITERAL, /* value */
    CHAT_NAME,    /* name */
    CHAT_ARRAY,   /* elements */
    CHAT_DICT,    /* key, value, key, value, ... */
    CHAT_ATTR,    /* object; name */
    CHAT_ITEM,    /* object, index */
    CHAT_SLICE,   /* object, from, to, step */
    /* Of these three, names[i] is the keyword of argument kids[i], names[0] the node's own name. */
    CHAT_CALL,   /* callee (CHAT_NAME or CHAT_ATTR), arguments */
    CHAT_FILTER, /* object, arguments */
    CHAT_TEST,   /* object, arguments */
    CHAT_NOT,    /* operand */
    CHAT_NEGATE, /* operand */
    CHAT_BINARY, /* left, right; name: + - * / // % ** ~ == != < > <= >= in "not in" and or */
    CHAT_CHOICE, /* condition, then, else */
};

struct chat_node {
    enum chat_kind kind;
    size_t line;
    json_t *value; /* owned */
    char **names;  /* owned */
    size_t nnames;
    struct chat_node **kids; /* borrowed from the tree */
    size_t count, capacity, names_capacity;
};

struct chat_tree {
    struct chat_node **all; /* owned */
    size_t count, capacity;
    struct chat_node *root;
};

/* Parses a template. QT_E_UNSUPPORTED names a construct outside of the subset; QT_E_INPUT: it is
 * not a template. The caller calls chat_tree_free in any case. */
int chat_parse(struct chat_tree *out, const char *text, const char *file, struct qt_err *err);
void chat_tree_free(struct chat_tree *tree);

/* ---- rendering ------------------------------------------------------------------------------ */

struct chat_text {
    char *data;
    size_t size, capacity;
};

struct chat_run {
    struct qt_err *err;
    int rc;
    const char *file;
    size_t line;   /* of the node at hand */
    json_t **pool; /* owned values */
    size_t count, capacity;
    json_t *scopes[128]; /* in the pool; the innermost last */
    size_t nscopes;
    const struct chat_node *macros[64];
    size_t nmacros, depth;
    uint64_t work; /* steps and bytes so far */
    struct chat_text *out;
};

/* Records an error once. */
void chat_fail(struct chat_run *r, enum qt_status status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Counts work; fails if a template never ends or makes endless text. */
void chat_work(struct chat_run *r, size_t n);
/* Takes ownership of a new value. NULL: out of memory. */
json_t *chat_keep(struct chat_run *r, json_t *value);
void chat_emit(struct chat_run *r, struct chat_text *out, const char *s, size_t size);

/* render.c */
void chat_execute(struct chat_run *r, const struct chat_node *n);
json_t *chat_call_macro(struct chat_run *r, const struct chat_node *macro, json_t *const *args,
                        char *const *names, size_t n);
/* Sets a variable of the innermost scope; undefined removes it. */
void chat_set(struct chat_run *r, const char *name, json_t *value);

/* expr.c */
json_t *chat_eval(struct chat_run *r, const struct chat_node *n);

/* builtin.c: arguments are args[n]; names[i] is the keyword of args[i], or NULL. */
struct chat_args {
    json_t **list;
    char **names;
    size_t count;
};
json_t *chat_filter(struct chat_run *r, const char *name, json_t *value,
                    const struct chat_args *args);
bool chat_test(struct chat_run *r, const char *name, json_t *value, const struct chat_args *args);
json_t *chat_method(struct chat_run *r, json_t *object, const char *name,
                    const struct chat_args *args);
json_t *chat_function(struct chat_run *r, const char *name, const struct chat_args *args);
/* True for the names of functions and filters, which are "defined". */
bool chat_is_function(const char *name);

/* value.c */
#define CHAT_NAMESPACE   "\001" /* key of objects that namespace() makes */
#define CHAT_INTEGER_KEY "\002" /* start of keys that were integers */
bool chat_true(const json_t *v);
bool chat_equal(const json_t *a, const json_t *b);
/* <0, 0, >0; fails for values without an order. */
int chat_compare(struct chat_run *r, const json_t *a, const json_t *b);
bool chat_contains(struct chat_run *r, const json_t *container, const json_t *v);
const char *chat_type(const json_t *v);
json_t *chat_string(struct chat_run *r, const char *s, size_t size);
/* str(v) of Python */
json_t *chat_str(struct chat_run *r, const json_t *v);
/* The form of a JSON text; json.dumps of Python has the same parameters. */
struct chat_json_form {
    int indent;                /* < 0: one line */
    const char *comma, *colon; /* separators */
    bool ascii;                /* other characters become \uXXXX */
};
json_t *chat_json(struct chat_run *r, const json_t *v, const struct chat_json_form *form);
/* The key of a member as a value. */
json_t *chat_key(struct chat_run *r, const char *key);
/* The elements that a loop over v visits: of a list, keys of an object, characters of a string. */
json_t *chat_elements(struct chat_run *r, json_t *v);
/* Fails if the value is nested too deeply for recursion. */
void chat_check_depth(struct chat_run *r, const json_t *v);
/* Characters of UTF-8 text. */
size_t chat_length(const char *s, size_t size);

#endif
