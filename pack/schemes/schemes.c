/* The table of schemes, and scheme text: NAME[:key=value,...]. */
#include "pack/schemes/scheme.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const struct qt_scheme *const schemes[] = {
    &qt_scheme_fpx, &qt_scheme_lut, &qt_scheme_int, &qt_scheme_mix24, &qt_scheme_w4ax,
};

enum { SCHEMES = sizeof schemes / sizeof *schemes, MAX_NAMES = 64 };

const struct qt_scheme *qt_scheme_at(size_t i)
{
    return i < SCHEMES ? schemes[i] : NULL;
}

const char *qt_scheme_name(const struct qt_scheme *s)
{
    return s->name;
}

const char *qt_scheme_help(const struct qt_scheme *s)
{
    return s->help;
}

bool qt_scheme_needs_data(const struct qt_scheme *s)
{
    return s->needs_data;
}

const struct qt_preset *qt_scheme_preset(const struct qt_scheme *s, size_t i)
{
    for (size_t j = 0; j < i; j++)
        if (!s->presets[j].name)
            return NULL;
    return s->presets[i].name ? &s->presets[i] : NULL;
}

const struct qt_param *qt_scheme_param(const struct qt_scheme *s, size_t i)
{
    for (size_t j = 0; j < i; j++)
        if (!s->params[j].key)
            return NULL;
    return s->params[i].key ? &s->params[i] : NULL;
}

double qt_spec_value(const struct qt_spec *spec, const char *key)
{
    const struct qt_param *params = spec->scheme->params;
    size_t i = 0;
    while (strcmp(params[i].key, key) != 0)
        i++;
    return spec->value[i];
}

const char *const qt_method_names[] = {"auto", "rtn", "search", "gptq", NULL};

enum qt_method qt_spec_method(const struct qt_spec *spec)
{
    return (enum qt_method)qt_spec_value(spec, "method");
}

bool qt_spec_learns(const struct qt_spec *spec)
{
    return spec->scheme && spec->scheme->learnable && qt_spec_value(spec, "learn") != 0;
}

/* ---- did you mean --------------------------------------------------------------------------- */

/* Levenshtein distance of short words, b in lower case; 48 for longer words. */
static size_t edit_distance(const char *a, const char *b)
{
    enum { MAX = 48 };
    size_t n = strlen(a), m = strlen(b), row[MAX + 1];
    if (n > MAX || m > MAX)
        return MAX;
    for (size_t j = 0; j <= m; j++)
        row[j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t change = diagonal + (tolower((unsigned char)a[i - 1]) != b[j - 1]);
            size_t least = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            diagonal = row[j];
            row[j] = change < least ? change : least;
        }
    }
    return row[m];
}

const char *qt_nearest_name(const char *word, const char *const *names, size_t n)
{
    const char *best = NULL;
    size_t limit = strlen(word) / 3 + 1, least = limit + 1;
    for (size_t i = 0; i < n; i++) {
        size_t d = edit_distance(word, names[i]);
        if (d < least) {
            least = d;
            best = names[i];
        }
    }
    return best;
}

/* "unknown KIND 'word'", with a suggestion or the list of names. */
static int fail_unknown(struct qt_err *err, const char *kind, const char *word,
                        const char *const *names, size_t n)
{
    char list[512] = "";
    const char *near = qt_nearest_name(word, names, n);
    if (near)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "unknown %s '%s'; did you mean '%s'?", kind,
                       word, near);
    for (size_t i = 0, at = 0; i < n && at < sizeof list; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%s", i ? ", " : "", names[i]);
    return qt_fail(err, QT_E_USAGE, NULL, NULL, "unknown %s '%s'; there are: %s", kind, word, list);
}

/* Formats by the names of other programs, and the scheme of the same or the closest one. */
static const struct {
    const char *name, *scheme;
} synonyms[] = {
    {"w4a16", "int4"},
    {"w8a16", "int8"},
    {"gptq", "int4"},
    {"awq", "int4"},
    {"bnb", "nf4"},
    {"bitsandbytes", "nf4"},
    {"q8_0", "int8"},
    {"q4_0", "int4:g=32"},
    {"q4_k_m", "iq4nl"},
    {"q4_k", "iq4nl"},
    {"q4_k_s", "iq4nl"},
    {"e4m3", "fp8:max=448"},
    {"e5m2", "fp8:e=5"},
    {"fp8_e5m2", "fp8:e=5"},
    {"fp8_e4m3", "fp8:max=448"},
    {"fp8_dynamic", "fp8:max=448"},
};

static int fail_scheme(struct qt_err *err, const char *word, const char *const *names, size_t n)
{
    for (size_t i = 0; i < sizeof synonyms / sizeof *synonyms; i++)
        if (strcasecmp(word, synonyms[i].name) == 0)
            return qt_fail(err, QT_E_USAGE, NULL, NULL, "unknown scheme '%s'; did you mean '%s'?",
                           word, synonyms[i].scheme);
    return fail_unknown(err, "scheme", word, names, n);
}

/* Format of real parameters. */
#define REAL_TEXT "%.9g"

/* ---- parsing -------------------------------------------------------------------------------- */

static int find_preset(struct qt_spec *out, const char *name, struct qt_err *err)
{
    const char *names[MAX_NAMES];
    size_t n = 0;
    for (size_t s = 0; s < SCHEMES; s++)
        for (const struct qt_preset *p = schemes[s]->presets; p->name; p++) {
            if (strcmp(p->name, name) == 0) {
                out->scheme = schemes[s];
                out->preset = p;
                return QT_OK;
            }
            if (n < MAX_NAMES - 1)
                names[n++] = p->name;
        }
    names[n++] = "none";
    return fail_scheme(err, name, names, n);
}

static int fail_value(struct qt_err *err, const struct qt_param *p, const char *value)
{
    return qt_fail(err, QT_E_USAGE, NULL, NULL, "%s=%s: expected %s from %g to %g", p->key, value,
                   p->type == QT_PARAM_REAL ? "a number" : "an integer", p->min, p->max);
}

static int parse_value(double *out, const struct qt_param *p, const char *value, struct qt_err *err)
{
    if (p->choices) {
        size_t n = 0;
        for (; p->choices[n]; n++)
            if (strcmp(p->choices[n], value) == 0) {
                *out = (double)n;
                return QT_OK;
            }
        return fail_unknown(err, p->key, value, p->choices, n);
    }
    char *end, written[32];
    double v = strtod(value, &end);
    bool digits = value[0] && strspn(value, "0123456789.eE+-") == strlen(value);
    if (!digits || *end || !(v >= p->min && v <= p->max))
        return fail_value(err, p, value);
    if (p->type != QT_PARAM_REAL && v != (double)(long)v)
        return fail_value(err, p, value);
    /* Use the value that a reader of the container will parse: section sizes may depend on it. */
    snprintf(written, sizeof written, REAL_TEXT, v);
    v = strtod(written, NULL);
    *out = v;
    return QT_OK;
}

/* Parses one key=value. fixed: parameters that the preset has decided, which the user cannot
 * set. */
static int parse_pair(double *out, unsigned *set, const struct qt_param *params, unsigned fixed,
                      char *pair, struct qt_err *err)
{
    const char *keys[QT_MAX_PARAMS];
    size_t n = 0;
    char *value = strchr(pair, '=');
    if (!value)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "'%s': expected key=value", pair);
    *value++ = '\0';
    for (size_t i = 0; params[i].key; i++) {
        if (strcmp(params[i].key, pair) == 0 && !(fixed >> i & 1)) {
            if (*set >> i & 1)
                return qt_fail(err, QT_E_USAGE, NULL, NULL, "'%s' is given twice", pair);
            *set |= 1u << i;
            return parse_value(&out[i], &params[i], value, err);
        }
        if (!(fixed >> i & 1))
            keys[n++] = params[i].key;
    }
    return fail_unknown(err, "parameter", pair, keys, n);
}

int qt_params_parse(double *value, unsigned *set, const struct qt_param *params, unsigned fixed,
                    const char *text, struct qt_err *err)
{
    char copy[QT_SPEC_TEXT], *rest = copy, *pair;
    int rc = QT_OK;
    snprintf(copy, sizeof copy, "%s", text);
    while (rc == QT_OK && (pair = strsep(&rest, ",")) != NULL)
        rc = parse_pair(value, set, params, fixed, pair, err);
    return rc;
}

/* Parameters that identify the preset, which the user cannot set: the first parameter (bits) and
 * choices. Other values of the preset are defaults. by_preset: parameters that the preset sets. */
static unsigned fixed_params(const struct qt_param *params, unsigned by_preset)
{
    unsigned fixed = 0;
    for (size_t i = 0; params[i].key; i++)
        if (by_preset >> i & 1 && (i == 0 || params[i].type == QT_PARAM_CHOICE))
            fixed |= 1u << i;
    return fixed;
}

void qt_params_text(char *buf, size_t size, char separator, const struct qt_param *params,
                    const double *value, unsigned fixed)
{
    size_t at = strlen(buf);
    for (size_t i = 0; params[i].key && at < size; i++) {
        const bool optional = params[i].type == QT_PARAM_FLAG || params[i].type == QT_PARAM_OPTION;
        if (fixed >> i & 1 || (optional && value[i] == 0) || value[i] == QT_PARAM_ABSENT)
            continue;
        if (params[i].choices)
            at += (size_t)snprintf(buf + at, size - at, "%c%s=%s", separator, params[i].key,
                                   params[i].choices[(size_t)value[i]]);
        else
            at += (size_t)snprintf(buf + at, size - at, "%c%s=" REAL_TEXT, separator, params[i].key,
                                   value[i]);
        separator = ',';
    }
}

/* Canonical text: the name of the preset and every parameter that is not fixed, in table order. */
static void write_text(struct qt_spec *spec)
{
    snprintf(spec->text, sizeof spec->text, "%s", spec->preset->name);
    qt_params_text(spec->text, sizeof spec->text, ':', spec->scheme->params, spec->value,
                   spec->fixed);
}

/* Parses the parameters after the preset's name, "" or ":...", on top of those of the preset.
 * stored: the text of a container. */
static int read_params(struct qt_spec *out, const char *text, bool stored, struct qt_err *err)
{
    const struct qt_param *params = out->scheme->params;
    const char *added = out->scheme->added_param;
    unsigned by_preset = 0, by_user = 0;
    int rc = QT_OK;
    for (size_t i = 0; params[i].key; i++)
        out->value[i] = stored && added && strcmp(params[i].key, added) == 0 ? QT_PARAM_ABSENT
                                                                             : params[i].initial;
    if (out->preset->values[0])
        QT_TRY(qt_params_parse(out->value, &by_preset, params, 0, out->preset->values, err));
    out->fixed = fixed_params(params, by_preset);
    if (*text)
        QT_TRY(qt_params_parse(out->value, &by_user, params, out->fixed, text + 1, err));
    QT_TRY(out->scheme->check_spec(out, err));
done:
    return rc;
}

static int read_spec(struct qt_spec *out, const char *text, bool stored, struct qt_err *err)
{
    struct qt_err inner = {0};
    char name[32];
    size_t len = strcspn(text, ":");
    *out = (struct qt_spec){0};
    if (strlen(text) >= QT_SPEC_TEXT || len >= sizeof name)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "scheme text '%.40s...' is too long", text);
    memcpy(name, text, len);
    name[len] = '\0';
    if (strcmp(text, "none") == 0) {
        snprintf(out->text, sizeof out->text, "none");
        return QT_OK;
    }
    if (strcmp(name, "none") == 0)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "'%s': none takes no parameters", text);
    int rc = find_preset(out, name, err);
    if (rc < 0)
        return rc;
    rc = read_params(out, text + len, stored, &inner);
    write_text(out);
    return rc < 0 ? qt_fail(err, rc, NULL, NULL, "scheme '%s': %s", text, inner.reason) : QT_OK;
}

int qt_spec_read(struct qt_spec *out, const char *text, struct qt_err *err)
{
    return read_spec(out, text, true, err);
}

int qt_spec_parse(struct qt_spec *out, const char *text, struct qt_err *err)
{
    int rc = read_spec(out, text, false, err);
    return rc == QT_OK && out->scheme && out->scheme->check_unused
               ? out->scheme->check_unused(out, err)
               : rc;
}

int qt_spec_format_version(const struct qt_spec *spec)
{
    const char *added = spec->scheme->added_param;
    return added && qt_spec_value(spec, added) != QT_PARAM_ABSENT ? 2 : 1;
}

const char *qt_spec_short(char buf[QT_SPEC_TEXT], const char *text)
{
    struct qt_spec spec, usual;
    snprintf(buf, QT_SPEC_TEXT, "%s", text);
    if (qt_spec_read(&spec, text, NULL) < 0 || !spec.scheme ||
        qt_spec_parse(&usual, spec.preset->name, NULL) < 0)
        return buf;
    qt_spec_resolve(&usual, false);
    unsigned omit = spec.fixed;
    for (size_t i = 0; spec.scheme->params[i].key; i++)
        if (spec.value[i] == usual.value[i])
            omit |= 1u << i;
    snprintf(buf, QT_SPEC_TEXT, "%s", spec.preset->name);
    qt_params_text(buf, QT_SPEC_TEXT, ':', spec.scheme->params, spec.value, omit);
    return buf;
}

void qt_spec_set_method(struct qt_spec *spec, enum qt_method method)
{
    for (size_t i = 0; spec->scheme->params[i].key; i++)
        if (strcmp(spec->scheme->params[i].key, "method") == 0)
            spec->value[i] = method;
    write_text(spec);
}

void qt_spec_resolve(struct qt_spec *spec, bool calibrated)
{
    if (spec->scheme && qt_spec_method(spec) == QT_METHOD_AUTO)
        qt_spec_set_method(spec, calibrated ? QT_METHOD_GPTQ : QT_METHOD_SEARCH);
}
