/* --gate expressions: parser and evaluation. */
#include "verify/verify.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NAME = 64, MAX_NAMED = 3 /* tensors named per failed condition */ };

enum relation { AT_MOST, AT_LEAST, BELOW, ABOVE };

static const char *const relation_text[] = {"<=", ">=", "<", ">"};

struct condition {
    char name[MAX_NAME];
    const char *regex; /* REGEX of NAME[REGEX], inside the expression; NULL: plain NAME */
    size_t regex_size;
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

/* Parses "[REGEX]" up to the matching bracket. Nested brackets count, escaped ones do not. */
static const char *parse_regex(struct condition *out, const char *p)
{
    int depth = 1;
    out->regex = ++p;
    for (; *p; p++) {
        if (*p == '\\' && p[1])
            p++;
        else if (*p == '[')
            depth++;
        else if (*p == ']' && --depth == 0)
            break;
    }
    out->regex_size = (size_t)(p - out->regex);
    return *p && out->regex_size ? p + 1 : NULL;
}

/* Accepts decimal numbers only; strtod also takes hexadecimal ones, inf and nan. */
static const char *parse_number(double *out, const char *p)
{
    char *end;
    *out = strtod(p, &end);
    const size_t n = (size_t)(end - p);
    return n > 0 && n <= strspn(p, "+-.0123456789eE") && isfinite(*out) ? end : NULL;
}

/* Parses one condition at *cursor and moves the cursor past it and a following comma. */
static int parse_condition(struct condition *out, const char **cursor, const char *expr,
                           struct qt_err *err)
{
    const char *p = skip_space(*cursor), *next = parse_name(out->name, p);
    if (!next)
        return syntax_error(expr, p, "the name of a figure", err);
    out->regex = NULL;
    if (*next == '[') {
        p = next;
        next = parse_regex(out, p);
        if (!next)
            return syntax_error(expr, p, "[REGEX]", err);
    }
    p = skip_space(next);
    next = parse_relation(&out->relation, p);
    if (!next)
        return syntax_error(expr, p, "<=, >=, < or >", err);
    p = skip_space(next);
    next = parse_number(&out->limit, p);
    if (!next)
        return syntax_error(expr, p, "a number", err);
    p = skip_space(next);
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

static int unknown_figure(const struct condition *c, const struct qt_figure *figures, size_t n,
                          struct qt_err *err)
{
    char known[512] = "";
    for (size_t i = 0; i < n; i++) {
        append(known, sizeof known, i ? ", " : "");
        append(known, sizeof known, figures[i].name);
    }
    return qt_fail(err, QT_E_USAGE, NULL, NULL, "gate: unknown %sfigure '%s'; known figures: %s",
                   c->regex ? "tensor " : "", c->name, n ? known : "none");
}

static const struct qt_figure *find_figure(const char *name, const struct qt_figure *figures,
                                           size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(figures[i].name, name) == 0)
            return &figures[i];
    return NULL;
}

/* NaN satisfies no condition: a figure that could not be measured must not pass. */
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

/* ---- evaluation ----------------------------------------------------------------------------- */

/* Message of a failed gate: as many failures as fit, and the number of the others. */
struct verdict {
    char failed[1000];
    size_t more;
    struct qt_gate_result current; /* of the condition at hand */
};
enum { MAX_TEXT = 900 }; /* limit for failures; leaves space for "and N more tensors" */

static void fail_condition(struct verdict *v, const struct condition *c, const char *tensor,
                           double value)
{
    char text[QT_TENSOR_NAME_MAX + 200], number[32] = "undefined";
    if (!isnan(value)) /* printf writes NaN with a sign that means nothing */
        snprintf(number, sizeof number, "%.9g", value);
    snprintf(text, sizeof text, "%s%s%s%s is %s, required %s %.9g", v->failed[0] ? "; " : "",
             c->name, tensor ? " of " : "", tensor ? tensor : "", number,
             relation_text[c->relation], c->limit);
    if (v->more || strlen(v->failed) + strlen(text) > MAX_TEXT)
        v->more++;
    else
        append(v->failed, sizeof v->failed, text);
}

static void fail_more_tensors(struct verdict *v, size_t count)
{
    char text[64];
    snprintf(text, sizeof text, "; and %zu more tensors", count);
    if (v->more || strlen(v->failed) > MAX_TEXT)
        v->more += count;
    else
        append(v->failed, sizeof v->failed, text);
}

/* Keeps the value that is nearest to failing; NaN wins. */
static void note_value(struct verdict *v, const struct condition *c, double value)
{
    struct qt_gate_result *r = &v->current;
    const bool upper = c->relation == AT_MOST || c->relation == BELOW;
    const bool passed = holds(c, value);
    if (!r->text[0] || isnan(value) || (upper ? value > r->value : value < r->value))
        r->value = value;
    r->passed = passed && (!r->text[0] || r->passed);
    snprintf(r->text, sizeof r->text, "%s%s%.*s%s %s %.9g", c->name, c->regex ? "[" : "",
             c->regex ? (int)c->regex_size : 0, c->regex ? c->regex : "", c->regex ? "]" : "",
             relation_text[c->relation], c->limit);
}

static int check_whole(struct verdict *v, const struct condition *c,
                       const struct qt_figure *figures, size_t n, struct qt_err *err)
{
    const struct qt_figure *figure = find_figure(c->name, figures, n);
    if (!figure)
        return unknown_figure(c, figures, n, err);
    note_value(v, c, figure->value);
    if (!holds(c, figure->value))
        fail_condition(v, c, NULL, figure->value);
    return QT_OK;
}

/* figure: index of the figure in each tensor's row. */
static int check_each(struct verdict *v, const struct condition *c, size_t figure,
                      const struct qt_name_regex *regex, const struct qt_tensor_figures *t,
                      struct qt_err *err)
{
    size_t matched = 0, failed = 0;
    for (size_t i = 0; i < t->count; i++) {
        double value = t->figures[i * t->per_tensor + figure].value;
        bool found;
        int rc = qt_name_regex_match(&found, regex, t->tensors[i], err);
        if (rc < 0)
            return rc;
        matched += found;
        if (found)
            note_value(v, c, value);
        if (!found || holds(c, value))
            continue;
        if (failed++ < MAX_NAMED)
            fail_condition(v, c, t->tensors[i], value);
    }
    if (matched == 0)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "gate: '%.*s' matches no quantized tensor",
                       (int)c->regex_size, c->regex);
    if (failed > MAX_NAMED)
        fail_more_tensors(v, failed - MAX_NAMED);
    return QT_OK;
}

static int check_tensors(struct verdict *v, const struct condition *c,
                         const struct qt_tensor_figures *t, struct qt_err *err)
{
    struct qt_name_regex *regex;
    size_t n = t ? t->per_tensor : 0;
    const struct qt_figure *figure = t ? find_figure(c->name, t->figures, n) : NULL;
    if (!figure)
        return unknown_figure(c, t ? t->figures : NULL, n, err);
    int rc = qt_name_regex_new(&regex, c->regex, c->regex_size, "gate:", err);
    if (rc == QT_OK && t->tensors)
        rc = check_each(v, c, (size_t)(figure - t->figures), regex, t, err);
    qt_name_regex_free(regex);
    return rc;
}

int qt_gate_check(const char *expr, const struct qt_figure *figures, size_t n,
                  const struct qt_tensor_figures *tensors, struct qt_err *err)
{
    struct qt_gate_results ignored = {0};
    int rc = qt_gate_run(&ignored, expr, figures, n, tensors, err);
    qt_free(ignored.list);
    return rc;
}

int qt_gate_run(struct qt_gate_results *out, const char *expr, const struct qt_figure *figures,
                size_t n, const struct qt_tensor_figures *tensors, struct qt_err *err)
{
    struct verdict v = {0};
    const char *cursor = expr;
    size_t capacity = 0;
    *out = (struct qt_gate_results){0};
    /* Parse the whole expression even after a failed condition: a syntax error must not depend on
     * the measured values. */
    do {
        struct condition c;
        int rc = parse_condition(&c, &cursor, expr, err);
        if (rc == QT_OK)
            rc = c.regex ? check_tensors(&v, &c, tensors, err)
                         : check_whole(&v, &c, figures, n, err);
        if (rc == QT_OK)
            rc = qt_array_grow(&out->list, &capacity, out->count + 1, sizeof *out->list, err);
        if (rc < 0)
            return rc;
        if (v.current.text[0]) /* empty without the names of tensors */
            out->list[out->count++] = v.current;
        v.current = (struct qt_gate_result){0};
    } while (*cursor);
    if (v.more)
        return qt_fail(err, QT_E_GATE, NULL, NULL, "gate failed: %s; and %zu more", v.failed,
                       v.more);
    if (v.failed[0])
        return qt_fail(err, QT_E_GATE, NULL, NULL, "gate failed: %s", v.failed);
    return QT_OK;
}

bool qt_gate_names(const char *expr, const char *figure)
{
    struct condition c = {0};
    const char *cursor = expr;
    bool found = false;
    while (!found && *cursor && parse_condition(&c, &cursor, expr, NULL) == QT_OK)
        found = !c.regex && strcmp(c.name, figure) == 0;
    return found;
}
