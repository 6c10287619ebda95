/*
 * Tables of options. Parser, help, completion and manual page read the same rows. A row has the
 * offset of the value in the command's options struct.
 *
 * Accepted: --name value, --name=value, -n value, -nvalue; options and positionals in any order;
 * "--" ends the options; "-" is a positional. Abbreviated option names are not accepted. Only an
 * OPT_LIST may be given more than once.
 */
#ifndef QT_CLI_OPTS_H
#define QT_CLI_OPTS_H

#include "base/base.h"

enum opt_kind {
    OPT_FLAG,   /* bool */
    OPT_STRING, /* const char *, into argv */
    OPT_SIZE,   /* size_t, decimal, min..max */
    OPT_REAL,   /* double, decimal, min..max */
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
    size_t offset; /* of the value in the command's options struct */
    bool required;
    const char *metavar;
    const char *help;
    size_t min, max;            /* OPT_SIZE, OPT_REAL */
    const char *const *choices; /* OPT_CHOICE, NULL-terminated */
};

struct opt_positional {
    const char *metavar; /* NULL ends the table; "..." at the end of the last: one or more */
    const char *help;
};

enum { OPTS_MAX_TABLES = 2, OPTS_MAX_ROWS = 64, OPTS_MAX_ARGS = 65 };

/* What a command accepts. The rows of all tables write into one options struct. */
struct opt_syntax {
    const struct opt *tables[OPTS_MAX_TABLES]; /* unused ones NULL */
    const struct opt_positional *positionals;  /* all are required */
};

/*
 * Parses argv[0..argc), the arguments after the command's name, into *options, which has the
 * defaults, and the positionals into args, which NULL ends. Strings point into argv. QT_E_USAGE:
 * wrong arguments. The caller calls opts_free in any case: it frees the lists.
 */
int opts_parse(void *options, const char *args[OPTS_MAX_ARGS], const struct opt_syntax *syntax,
               int argc, char **argv, struct qt_err *err);
void opts_free(void *options, const struct opt_syntax *syntax);

/* Parses text as a decimal number in min..max. `what` names the value in errors. */
int opts_size(size_t *out, const char *what, const char *text, size_t min, size_t max,
              struct qt_err *err);

/* Returns QT_E_USAGE "unknown WHAT 'WORD'" and suggests the nearest of names[n] if it is close, or
 * lists them if they are few. */
int opts_unknown(const char *what, const char *word, const char *const *names, size_t n,
                 struct qt_err *err);

#endif
