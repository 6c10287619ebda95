#include "verify/verify.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NAME = 64 };

enum relation { AT_MOST, AT_LEAST, BELOW, ABOVE };

static const char *const relation_text[] = {"<=", ">=", "<", ">"};

struct condition {
    char name[MAX_NAME];
    enum relation relation;
    double limit;
};

static const char *skip_space(const char *p)
{
    while (isspace((unsigned char)*p))
        p++;
    return p;
}

static int syntax_error(const char *expr, const char *at, const char *expected, struct qt_err *err)
{
    return qt_fail(err, QT_E_USAGE, NULL, NULL, "gate '%s': expected %s at '%s'", expr, expected,
                   at);
}

static const char *parse_name(char name[MAX_NAME], const char *p)
{
    size_t n = 0;
    while (isalnum((unsigned char)p[n]) || p[n] == '_')
        n++;
    if (n == 0 || n >= MAX_NAME)
        return NULL;
    memcpy(name, p, n);
    name[n] = '\0';
    return p + n;
}

/* The two-character relations come first in the table, so that "<=" is not read as "<". */
static const char *parse_relation(enum relation *out, const char *p)
{
    for (int i = AT_MOST; i <= ABOVE; i++) {
        size_t n = strlen(relation_text[i]);
        if (strncmp(p, relation_text[i], n) == 0) {
            *out = (enum relation)i;
            return p + n;
        }
    }
    return NULL;
}

/* One condition at *cursor, which moves past it and the comma that follows. */
static int parse_condition(struct condition *out, const char **cursor, const char *expr,
                           struct qt_err *err)
{
    const char *p = skip_space(*cursor), *next = parse_name(out->name, p);
    char *end;
    if (!next)
        return syntax_error(expr, p, "the name of a figure", err);
    p = skip_space(next);
    next = parse_relation(&out->relation, p);
    if (!next)
        return syntax_error(expr, p, "<=, >=, < or >", err);
    p = skip_space(next);
    out->limit = strtod(p, &end);
    if (end == p || !isfinite(out->limit))
        return syntax_error(expr, p, "a number", err);
    p = skip_space(end);
    if (*p == ',' && *skip_space(p + 1))
        p++;
    else if (*p)
        return syntax_error(expr, p, "',' and another condition, or the end", err);
    *cursor = p;
    return QT_OK;
}

static void append(char *buf, size_t size, const char *text)
{
    size_t n = strlen(buf);
    snprintf(buf + n, size - n, "%s", text);
}

static int unknown_figure(const char *name, const struct qt_figure *figures, size_t n,
                          struct qt_err *err)
{
    char known[512] = "";
    for (size_t i = 0; i < n; i++) {
        append(known, sizeof known, i ? ", " : "");
        append(known, sizeof known, figures[i].name);
    }
    return qt_fail(err, QT_E_USAGE, NULL, NULL, "gate: no figure '%s' here; there are: %s", name,
                   known);
}

static const struct qt_figure *find_figure(const char *name, const struct qt_figure *figures,
                                           size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(figures[i].name, name) == 0)
            return &figures[i];
    return NULL;
}

/* NaN meets no condition: a figure that could not be measured must not pass. */
static bool holds(const struct condition *c, double value)
{
    switch (c->relation) {
    case AT_MOST:
        return value <= c->limit;
    case AT_LEAST:
        return value >= c->limit;
    case BELOW:
        return value < c->limit;
    default:
        return value > c->limit;
    }
}

int qt_gate_check(const char *expr, const struct qt_figure *figures, size_t n, struct qt_err *err)
{
    char failed[1000] = "";
    const char *cursor = expr;
    /* The whole expression is read even after a failed condition: a mistake in it is a mistake of
     * the caller's whatever was measured. */
    do {
        struct condition c;
        char text[160];
        int rc = parse_condition(&c, &cursor, expr, err);
        if (rc < 0)
            return rc;
        const struct qt_figure *figure = find_figure(c.name, figures, n);
        if (!figure)
            return unknown_figure(c.name, figures, n, err);
        if (holds(&c, figure->value))
            continue;
        snprintf(text, sizeof text, "%s%s is %.9g, required %s %.9g", failed[0] ? "; " : "", c.name,
                 figure->value, relation_text[c.relation], c.limit);
        append(failed, sizeof failed, text);
    } while (*cursor);
    if (failed[0])
        return qt_fail(err, QT_E_GATE, NULL, NULL, "gate failed: %s", failed);
    return QT_OK;
}
