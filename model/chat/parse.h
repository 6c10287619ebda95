/* This header declares what parse.c and tokens.c share (private to model/chat/). */
#ifndef QT_MODEL_CHAT_PARSE_H
#define QT_MODEL_CHAT_PARSE_H

#include "model/chat/chat.h"

enum token_kind { END_OF_TAG, NAME, STRING, INTEGER, REAL, SYMBOL };

struct token {
    enum token_kind kind;
    char text[64]; /* of names and symbols */
    json_t *value; /* of literals, owned */
};

struct parse {
    struct chat_tree *tree;
    const char *file, *text, *p; /* p: next character */
    const char *end;
    struct token token; /* the next one, inside of a tag */
    bool in_print;      /* the tag is {{ }} */
    bool trim;          /* strip white space before the next text */
    bool trim_newline;  /* skip one newline before the next text */
    size_t depth, loops;
    const char *counted; /* up to here `line` counts the lines */
    size_t line;
    struct qt_err *err;
    int rc;
};

/* The line at s->p, counted from 1. */
size_t parse_line(struct parse *s);
/* These set s->rc and *s->err, unless an error came before. detail: quoted, unless it is "". */
void parse_unsupported(struct parse *s, const char *what, const char *detail);
void parse_broken(struct parse *s, const char *what, const char *detail);
void parse_no_memory(struct parse *s);

/* Reads the next token of a tag; END_OF_TAG after an error, too. */
void parse_next(struct parse *s);
/* The end of a tag that ends at p, behind its mark; else NULL. */
const char *parse_tag_end(const struct parse *s, const char *p);
/* True if the token is this symbol or name. `take` then reads the next token, too; `need` makes it
 * an error if it is not. */
bool parse_at_symbol(const struct parse *s, const char *text);
bool parse_at_word(const struct parse *s, const char *text);
bool parse_take_symbol(struct parse *s, const char *text);
bool parse_take_word(struct parse *s, const char *text);
void parse_need_symbol(struct parse *s, const char *text);
/* Copies a name to out and reads the next token. */
void parse_need_name(struct parse *s, char out[64]);

#endif
