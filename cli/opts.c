/* Option parser. */
#include "cli/opts.h"

#include "pack/pack.h"

#include <stdio.h>
#include <string.h>

enum { FEW = 8 }; /* names that an error lists */

/* The state of one parse. */
struct parse {
    const struct opt_syntax *syntax;
    char *options; /* the command's options struct */
    bool given[OPTS_MAX_TABLES][OPTS_MAX_ROWS];
    char **argv;
    int argc, next;
};

int opts_unknown(const char *what, const char *word, const char *const *names, size_t n,
                 struct qt_err *err)
{
    const char *near = qt_nearest_name(word, names, n);
    char list[200] = "";
    size_t at = 0;
    if (near)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "unknown %s '%s'; did you mean '%s'?", what,
                       word, near);
    for (size_t i = 0; n <= FEW && i < n && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%s",
                               i == 0       ? "; known: "
                               : i == n - 1 ? " and "
                                            : ", ",
                               names[i]);
    return qt_fail(err, QT_E_USAGE, NULL, NULL, "unknown %s '%s'%s", what, word, list);
}

int opts_size(size_t *out, const char *what, const char *text, size_t min, size_t max,
              struct qt_err *err)
{
    size_t value = 0;
    const char *p = text;
    bool fits = true;
    for (; *p >= '0' && *p <= '9'; p++)
        fits = fits && !qt_mul_overflow(&value, value, 10) &&
               !qt_add_overflow(&value, value, (size_t)(*p - '0'));
    if (p == text || *p || !fits || value < min || value > max)
        return min == max
                   ? qt_fail(err, QT_E_USAGE, NULL, NULL, "%s: '%s' is not supported, only %zu is",
                             what, text, min)
                   : qt_fail(err, QT_E_USAGE, NULL, NULL,
                             "%s: '%s' is not a number from %zu to %zu", what, text, min, max);
    *out = value;
    return QT_OK;
}

/* ---- rows ----------------------------------------------------------------------------------- */

struct row {
    const struct opt *opt; /* NULL: not found */
    bool *given;
};

static struct row find_row(struct parse *p, const char *name, size_t len, char letter)
{
    for (int t = 0; t < OPTS_MAX_TABLES; t++) {
        const struct opt *table = p->syntax->tables[t];
        for (int i = 0; table && table[i].name; i++) {
            bool match = name ? strlen(table[i].name) == len && !memcmp(table[i].name, name, len)
                              : table[i].letter == letter;
            if (match)
                return (struct row){&table[i], &p->given[t][i]};
        }
    }
    return (struct row){0};
}

/* Options of other tools, and how qtool writes them. */
static const struct {
    const char *word, *meaning;
} synonyms[] = {
    {"--group-size", "--scheme nf4:g=128"},
    {"--groupsize", "--scheme nf4:g=128"},
    {"--dataset", "--data"},
    {"--nsamples", "--samples"},
    {"--num-samples", "--samples"},
    {"--max-length", "--seqlen"},
    {"--ctx-size", "--seqlen"},
    {"--output", "--out"},
    {"--output-dir", "--out"},
    {"--outfile", "--out"},
    {"--overwrite", "--force"},
    {"--gpu", "--device cuda"},
    {"--cuda", "--device cuda"},
    {"--continue", "--resume"},
    {"--silent", "--quiet"},
};

/* The scheme of so many bits that users of other tools would expect. */
static const char *scheme_of_bits(const char *bits)
{
    static const char *const schemes[] = {"nf2", "nf3", "int4", "fp5", "fp6", "fp7", "int8"};
    return bits && bits[0] >= '2' && bits[0] <= '8' && !bits[1] ? schemes[bits[0] - '2'] : "int4";
}

static int suggest(const char *word, const char *option, const char *value, struct qt_err *err)
{
    return qt_fail(err, QT_E_USAGE, NULL, NULL, "unknown option '%s'; did you mean '%s%s'?", word,
                   option, value);
}

/* Suggestions for the options of other tools, if this command has the option that is meant. */
static int unknown_synonym(struct parse *p, const char *word, const char *value, struct qt_err *err)
{
    static const char *const bits[] = {"--bits", "--wbits", "--w-bits", "--nbits"};
    for (size_t i = 0; i < sizeof bits / sizeof *bits; i++)
        if (strcmp(word, bits[i]) == 0 && find_row(p, "scheme", strlen("scheme"), 0).opt)
            return suggest(word, "--scheme ", scheme_of_bits(value), err);
    for (size_t i = 0; i < sizeof synonyms / sizeof *synonyms; i++) {
        const char *option = synonyms[i].meaning;
        if (strcmp(word, synonyms[i].word) == 0 &&
            find_row(p, option + 2, strcspn(option + 2, " "), 0).opt)
            return suggest(word, option, "", err);
    }
    return QT_OK;
}

static int unknown_option(struct parse *p, const char *word, const char *value, struct qt_err *err)
{
    const int rc = unknown_synonym(p, word, value, err);
    if (rc < 0)
        return rc;
    char dashed[OPTS_MAX_TABLES * OPTS_MAX_ROWS][32];
    const char *names[OPTS_MAX_TABLES * OPTS_MAX_ROWS];
    size_t n = 0;
    for (int t = 0; t < OPTS_MAX_TABLES; t++) {
        const struct opt *table = p->syntax->tables[t];
        for (int i = 0; table && table[i].name; i++, n++) {
            snprintf(dashed[n], sizeof dashed[n], "--%s", table[i].name);
            names[n] = dashed[n];
        }
    }
    return opts_unknown("option", word, names, n, err);
}

static int store_choice(int *out, const struct opt *opt, const char *value, struct qt_err *err)
{
    char what[64];
    size_t n = 0;
    for (; opt->choices[n]; n++) {
        if (strcmp(opt->choices[n], value) == 0) {
            *out = (int)n;
            return QT_OK;
        }
    }
    snprintf(what, sizeof what, "value of --%s", opt->name);
    return opts_unknown(what, value, opt->choices, n, err);
}

static int store_real(double *out, const struct opt *opt, const char *value, struct qt_err *err)
{
    char *end;
    const size_t plain = strspn(value, "0123456789.");
    *out = strtod(value, &end);
    if (!*value || value[plain] || *end || *out < (double)opt->min || *out > (double)opt->max)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--%s '%s' is not a number from %zu to %zu",
                       opt->name, value, opt->min, opt->max);
    return QT_OK;
}

static int store_list(struct opt_list *list, const char *value, struct qt_err *err)
{
    int rc =
        qt_array_grow(&list->items, &list->capacity, list->count + 1, sizeof *list->items, err);
    if (rc == QT_OK)
        list->items[list->count++] = value;
    return rc;
}

/* value is NULL for a flag. */
static int store(struct parse *p, struct row row, const char *value, struct qt_err *err)
{
    const struct opt *opt = row.opt;
    void *target = p->options + opt->offset;
    char what[64];
    if (*row.given && opt->kind != OPT_LIST)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--%s is given more than once", opt->name);
    *row.given = true;
    switch (opt->kind) {
    case OPT_FLAG:
        *(bool *)target = true;
        return QT_OK;
    case OPT_STRING:
        *(const char **)target = value;
        return QT_OK;
    case OPT_SIZE:
        snprintf(what, sizeof what, "--%s", opt->name);
        return opts_size(target, what, value, opt->min, opt->max, err);
    case OPT_REAL:
        return store_real(target, opt, value, err);
    case OPT_CHOICE:
        return store_choice(target, opt, value, err);
    case OPT_LIST:
        return store_list(target, value, err);
    }
    return qt_fail(err, QT_E_INTERNAL, NULL, NULL, "unknown option kind of --%s", opt->name);
}

/* ---- arguments ------------------------------------------------------------------------------ */

/* attached: the value in the same argument ("--name=value", "-nvalue"), or NULL. */
static int parse_value(struct parse *p, struct row row, const char *attached, struct qt_err *err)
{
    if (row.opt->kind == OPT_FLAG) {
        if (attached)
            return qt_fail(err, QT_E_USAGE, NULL, NULL, "--%s takes no value", row.opt->name);
        return store(p, row, NULL, err);
    }
    if (!attached && p->next == p->argc)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--%s needs a value (%s)", row.opt->name,
                       row.opt->metavar);
    return store(p, row, attached ? attached : p->argv[p->next++], err);
}

static int parse_option(struct parse *p, const char *arg, struct qt_err *err)
{
    char word[64];
    struct row row;
    const char *attached = NULL;
    size_t len = strcspn(arg, "=");
    if (arg[1] == '-') {
        row = find_row(p, arg + 2, len - 2, 0);
        attached = arg[len] ? arg + len + 1 : NULL;
    } else {
        row = find_row(p, NULL, 0, arg[1]);
        attached = arg[2] ? arg + 2 : NULL;
    }
    if (row.opt)
        return parse_value(p, row, attached, err);
    snprintf(word, sizeof word, "%.*s", (int)qt_min_size(len, sizeof word - 1), arg);
    if (!attached && p->next < p->argc)
        attached = p->argv[p->next];
    return unknown_option(p, word, attached, err);
}

static size_t count_positionals(const struct opt_positional *table)
{
    size_t n = 0;
    while (table[n].metavar)
        n++;
    return n;
}

/* True if another positional may follow the first n. */
static bool takes_argument(const struct opt_positional *table, size_t n)
{
    size_t rows = count_positionals(table);
    const char *more = rows ? strstr(table[rows - 1].metavar, "...") : NULL;
    return n < rows || (more && n + 1 < OPTS_MAX_ARGS);
}

static int check_complete(struct parse *p, size_t nargs, struct qt_err *err)
{
    const struct opt_positional *table = p->syntax->positionals;
    if (nargs < count_positionals(table))
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "%s is missing (%s)", table[nargs].metavar,
                       table[nargs].help);
    for (int t = 0; t < OPTS_MAX_TABLES; t++) {
        const struct opt *rows = p->syntax->tables[t];
        for (int i = 0; rows && rows[i].name; i++)
            if (rows[i].required && !p->given[t][i])
                return qt_fail(err, QT_E_USAGE, NULL, NULL, "--%s %s is missing (%s)", rows[i].name,
                               rows[i].metavar, rows[i].help);
    }
    return QT_OK;
}

int opts_parse(void *options, const char *args[OPTS_MAX_ARGS], const struct opt_syntax *syntax,
               int argc, char **argv, struct qt_err *err)
{
    struct parse p = {.syntax = syntax, .options = options, .argv = argv, .argc = argc};
    bool options_over = false;
    size_t nargs = 0;
    while (p.next < argc) {
        const char *arg = argv[p.next++];
        int rc = QT_OK;
        if (!options_over && strcmp(arg, "--") == 0)
            options_over = true;
        else if (!options_over && arg[0] == '-' && arg[1])
            rc = parse_option(&p, arg, err);
        else if (takes_argument(syntax->positionals, nargs))
            args[nargs++] = arg;
        else
            rc = qt_fail(err, QT_E_USAGE, NULL, NULL, "unexpected argument '%s'", arg);
        if (rc < 0)
            return rc;
    }
    args[nargs] = NULL;
    return check_complete(&p, nargs, err);
}

void opts_free(void *options, const struct opt_syntax *syntax)
{
    for (int t = 0; t < OPTS_MAX_TABLES; t++) {
        const struct opt *table = syntax->tables[t];
        for (int i = 0; table && table[i].name; i++) {
            if (table[i].kind != OPT_LIST)
                continue;
            struct opt_list *list = (void *)((char *)options + table[i].offset);
            qt_free(list->items);
            *list = (struct opt_list){0};
        }
    }
}
