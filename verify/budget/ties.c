/* Names: which tensors get one scheme, and regular expressions for the result. */
#include "verify/budget/budget.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

/* Projections with a common input. */
static const struct {
    const char *component, *tie;
} ties[] = {
    {"q_proj", "qkv"},
    {"k_proj", "qkv"},
    {"v_proj", "qkv"},
    {"q_a_proj", "qkv"},
    {"kv_a_proj_with_mqa", "qkv"},
    {"gate_proj", "gate_up"},
    {"up_proj", "gate_up"},
    {"w1", "gate_up"},
    {"w3", "gate_up"},
};

static bool is_number(const char *s, size_t n)
{
    size_t digits = 0;
    while (digits < n && isdigit((unsigned char)s[digits]))
        digits++;
    return n > 0 && digits == n;
}

/* The number of the decoder layer: the first component that is one; *size = 0: there is none. */
static const char *find_layer(const char *name, size_t *size)
{
    for (const char *at = name; *at;) {
        const size_t n = strcspn(at, ".");
        *size = n;
        if (is_number(at, n))
            return at;
        at += n + (at[n] == '.');
    }
    *size = 0;
    return name;
}

int budget_key(char **out, const char *name, bool untied, struct qt_err *err)
{
    size_t digits;
    const char *layer = find_layer(name, &digits), *rest = layer + digits;
    const char *experts = digits ? strstr(rest, ".experts.") : NULL;
    if (experts)
        return qt_string_format(out, err, "%.*s.experts", (int)(experts - name), name);
    for (const char *at = name; *at && !untied;) {
        const size_t n = strcspn(at, ".");
        for (size_t i = 0; i < sizeof ties / sizeof *ties; i++)
            if (at > layer && strlen(ties[i].component) == n &&
                strncmp(ties[i].component, at, n) == 0)
                return qt_string_format(out, err, "%.*s%s", (int)(at - name), name, ties[i].tie);
        at += n + (at[n] == '.');
    }
    return qt_string_copy(out, name, err);
}

int budget_kind_key(char **out, const char *key, struct qt_err *err)
{
    size_t digits;
    const char *layer = find_layer(key, &digits);
    return digits ? qt_string_format(out, err, "%.*s*%s", (int)(layer - key), key, layer + digits)
                  : qt_string_copy(out, key, err);
}

/* ---- rules ---------------------------------------------------------------------------------- */

struct text {
    char *data;
    size_t size, capacity;
    int rc;
};

static void add(struct text *t, const char *s, size_t n, struct qt_err *err)
{
    if (t->rc == QT_OK)
        t->rc = qt_array_grow(&t->data, &t->capacity, t->size + n + 1, 1, err);
    if (t->rc < 0)
        return;
    memcpy(t->data + t->size, s, n);
    t->size += n;
    t->data[t->size] = '\0';
}

/* Adds a part of a name so that it matches itself; components that are numbers (experts) match all
 * numbers. A '=' would end the regular expression of --tensor. */
static void add_literal(struct text *t, const char *s, size_t n, struct qt_err *err)
{
    static const char special[] = "\\^$.|?*+()[]{}#";
    for (size_t i = 0; i < n; i++) {
        const size_t rest = n - i;
        size_t digits = 0;
        while (digits < rest && isdigit((unsigned char)s[i + digits]))
            digits++;
        const bool whole =
            digits && (i == 0 || s[i - 1] == '.') && (digits == rest || s[i + digits] == '.');
        if (whole) {
            add(t, "[0-9]+", 6, err);
            i += digits - 1;
        } else if (s[i] == '=') {
            add(t, "\\x3d", 4, err);
        } else {
            if (strchr(special, s[i]))
                add(t, "\\", 1, err);
            add(t, s + i, 1, err);
        }
    }
}

/* The number of a layer within a name. */
struct layer {
    const char *digits;
    size_t size;
};

static int compare_layers(const void *a, const void *b)
{
    const struct layer *x = a, *y = b;
    return x->size != y->size ? (x->size > y->size) - (x->size < y->size)
                              : strncmp(x->digits, y->digits, x->size);
}

/* The layers, in numeric order, of the names that differ from `name` in the layer only and have its
 * choice, and a flag for each that says so. */
static void add_layers(struct text *t, bool *done, const struct budget *b, size_t item,
                       struct qt_err *err)
{
    const char *name = b->plan[0].items[item].tensor->name;
    const size_t choice = b->groups[b->group_of[item]].choice;
    struct layer own, other, *list = NULL;
    size_t count = 0, room = 0;
    own.digits = find_layer(name, &own.size);
    for (size_t i = item; i < b->plan[0].count && t->rc == QT_OK; i++) {
        const char *at = b->plan[0].items[i].tensor->name;
        other.digits = find_layer(at, &other.size);
        if (done[i] || b->group_of[i] == SIZE_MAX || b->groups[b->group_of[i]].choice != choice ||
            other.digits - at != own.digits - name ||
            strncmp(at, name, (size_t)(own.digits - name)) != 0 ||
            strcmp(other.digits + other.size, own.digits + own.size) != 0)
            continue;
        done[i] = true;
        t->rc = qt_array_grow(&list, &room, count + 1, sizeof *list, err);
        if (t->rc == QT_OK)
            list[count++] = other;
    }
    if (count > 1)
        qsort(list, count, sizeof *list, compare_layers);
    add(t, "(", count > 1, err); /* a single one needs no alternative */
    for (size_t i = 0; i < count; i++) {
        add(t, "|", i > 0, err);
        add(t, list[i].digits, list[i].size, err);
    }
    add(t, ")", count > 1, err);
    qt_free(list);
}

static int add_rule(struct qt_budget *out, size_t *capacity, bool *done, const struct budget *b,
                    size_t item, struct qt_err *err)
{
    const char *name = b->plan[0].items[item].tensor->name;
    const char *spec = b->opt->choices[b->groups[b->group_of[item]].choice];
    size_t digits;
    const char *layer = find_layer(name, &digits);
    struct text t = {0};
    char *copy = NULL;
    int rc;
    add(&t, "^", 1, err);
    add_literal(&t, name, (size_t)(layer - name), err);
    if (digits)
        add_layers(&t, done, b, item, err);
    done[item] = true;
    add_literal(&t, layer + digits, strlen(layer + digits), err);
    add(&t, "$", 1, err);
    QT_TRY(t.rc);
    for (size_t i = 0; i < out->nrules; i++) /* experts: one rule for all */
        if (strcmp(out->rules[i].regex, t.data) == 0)
            goto done;
    QT_TRY(qt_array_grow(&out->rules, capacity, out->nrules + 1, sizeof *out->rules, err));
    QT_TRY(qt_string_copy(&copy, spec, err));
    out->rules[out->nrules++] = (struct qt_rule){.regex = t.data, .spec = copy};
    t.data = NULL;
done:
    qt_free(t.data);
    return rc;
}

int budget_rules(struct qt_budget *out, const struct budget *b, struct qt_err *err)
{
    const struct qt_plan *plan = &b->plan[0];
    double weights[BUDGET_CHOICES] = {0};
    size_t most = 0, capacity = 0;
    bool *done = NULL;
    int rc;
    QT_TRY(qt_array_new(&done, plan->count, sizeof *done, err));
    for (size_t i = 0; i < plan->count; i++)
        if (b->group_of[i] != SIZE_MAX && !plan->items[i].named)
            weights[b->groups[b->group_of[i]].choice] += (double)plan->items[i].tensor->count;
    for (size_t c = 1; c < b->opt->nchoices; c++)
        if (weights[c] > weights[most])
            most = c;
    QT_TRY(qt_string_copy(&out->scheme, b->opt->choices[most], err));
    for (size_t i = 0; i < plan->count; i++)
        if (!done[i] && b->group_of[i] != SIZE_MAX &&
            (plan->items[i].named || b->groups[b->group_of[i]].choice != most))
            QT_TRY(add_rule(out, &capacity, done, b, i, err));
done:
    qt_free(done);
    return rc;
}
