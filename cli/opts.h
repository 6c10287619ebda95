/*
 * Options of a command as a table: parsing, help, completion and the manual page all read the same
 * rows. A row says where in the command's own options struct the value goes.
 *
 * Accepted: --name value, --name=value, -n value, -nvalue; options and positionals in any order;
 * "--" ends the options; "-" is a positional. Options are spelled in full. Only an OPT_LIST may be
 * given more than once.
 */
#ifndef QT_CLI_OPTS_H
#define QT_CLI_OPTS_H

#include "base/base.h"

enum opt_kind {
    OPT_FLAG,   /* bool */
    OPT_STRING, /* const char *, into argv */
    OPT_SIZE,   /* size_t, decimal, min..max */
    OPT_CHOICE, /* int, index into choices */
    OPT_LIST,   /* struct opt_list */
};

struct opt_list {
    const char **items; /* into argv */
    size_t count, capacity;
};

struct opt {
    const char *name; /* without dashes; NULL ends the table */
    char letter;      /* 0 = none */
    enum opt_kind kind;
    size_t offset; /* in the command's options struct */
    bool required;
    const char *metavar;
    const char *help;
    size_t min, max;            /* OPT_SIZE */
    const char *const *choices; /* OPT_CHOICE, NULL-terminated */
};

struct opt_positional {
    const char *metavar; /* NULL ends the table; the last one may end in "...": one or more */
    const char *help;
};

enum { OPTS_MAX_TABLES = 2, OPTS_MAX_ROWS = 64, OPTS_MAX_ARGS = 65 };

/* What a command accepts: the rows of all tables write into one options struct. */
struct opt_syntax {
    const struct opt *tables[OPTS_MAX_TABLES]; /* NULL: none */
    const struct opt_positional *positionals;  /* all of them are required */
};

/*
 * Parses argv[0..argc) (after the command's name) into *options, which holds the defaults, and
 * args[OPTS_MAX_ARGS], the positionals, ended by NULL. QT_E_USAGE with "did you mean". On failure
 * the lists filled so far are kept: opts_free in any case.
 */
int opts_parse(void *options, const char *args[OPTS_MAX_ARGS], const struct opt_syntax *syntax,
               int argc, char **argv, struct qt_err *err);
void opts_free(void *options, const struct opt_syntax *syntax);

/* A decimal number within min..max, nothing before or after it. `what` names it in errors. */
int opts_size(size_t *out, const char *what, const char *text, size_t min, size_t max,
              struct qt_err *err);

/* QT_E_USAGE "unknown WHAT 'WORD'", with the nearest of the names if one is near. */
int opts_unknown(const char *what, const char *word, const char *const *names, size_t n,
                 struct qt_err *err);

#endif
