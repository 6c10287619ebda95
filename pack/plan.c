/* Chooses a scheme for each tensor. Refuses here what can be refused before any work. */
#include "pack/guard.h"
#include "pack/roles.h"
#include "pack/schemes/scheme.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- rules ---------------------------------------------------------------------------------- */

struct rule {
    struct qt_name_regex *regex;
    struct qt_spec spec;
    bool used;
    const struct qt_tensor *vector; /* first match that is a vector, for the error message */
};

struct rules {
    struct rule *list;
    size_t count;
};

static void rules_close(struct rules *rules)
{
    for (size_t i = 0; i < rules->count; i++)
        qt_name_regex_free(rules->list[i].regex);
    qt_free(rules->list);
}

static int rules_open(struct rules *out, const struct qt_plan_options *opt, struct qt_err *err)
{
    int rc;
    *out = (struct rules){0};
    QT_TRY(qt_array_new(&out->list, opt->nrules, sizeof *out->list, err));
    for (size_t i = 0; i < opt->nrules; i++) {
        const char *regex = opt->rules[i].regex;
        struct rule *rule = &out->list[out->count++];
        QT_TRY(qt_name_regex_new(&rule->regex, regex, strlen(regex), "--tensor", err));
        QT_TRY(qt_spec_parse(&rule->spec, opt->rules[i].spec, err));
        qt_spec_resolve(&rule->spec, opt->calibrated);
    }
done:
    return rc;
}

static bool is_vector(const struct qt_tensor *t)
{
    return t->ndim < 2 || (t->ndim == 2 && t->shape[0] == 1 &&
                           !qt_name_ends_in(t->name, ".weight")); /* a vector stored as a row */
}

/* Sets *out to the last rule whose regex matches anywhere in the name, or NULL. Marks every
 * matching rule as used, unless it matches only vectors, which cannot be quantized. */
static int rules_find(const struct rule **out, struct rules *rules, const struct qt_tensor *t,
                      struct qt_err *err)
{
    *out = NULL;
    for (size_t i = 0; i < rules->count; i++) {
        struct rule *rule = &rules->list[i];
        bool found;
        int rc = qt_name_regex_match(&found, rule->regex, t->name, err);
        if (rc < 0)
            return rc;
        if (!found)
            continue;
        *out = rule;
        if (!is_vector(t) || !rule->spec.scheme)
            rule->used = true;
        else if (!rule->vector)
            rule->vector = t;
    }
    return QT_OK;
}

static int cannot_quantize(const struct qt_tensor *t, struct qt_err *err)
{
    return qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name,
                   "cannot be quantized: %d dimensions, %s; only matrices of F16, BF16, F32 or "
                   "F64 can",
                   t->ndim, qt_dtype_name(t->dtype));
}

static int rules_check_used(const struct rules *rules, const struct qt_plan_options *opt,
                            struct qt_err *err)
{
    for (size_t i = 0; i < rules->count; i++) {
        const struct rule *rule = &rules->list[i];
        if (!rule->used)
            return rule->vector
                       ? cannot_quantize(rule->vector, err)
                       : qt_fail(err, QT_E_USAGE, NULL, NULL,
                                 "--tensor '%s' matches no tensor; 'qtool inspect' lists them",
                                 opt->rules[i].regex);
    }
    return QT_OK;
}

/* ---- the plan ------------------------------------------------------------------------------- */

/* A checkpoint may have a million tensors that are copied: these share an empty description. */
static const struct qt_packed not_packed;

/* Copies a matrix that its scheme would not make smaller, unless a rule names it, or the scheme is
 * w4ax: linears that share an input have the same scheme. */
static void check_size(struct qt_plan_item *item)
{
    if (qt_packed_bytes(item->packed) < item->tensor->nbytes)
        return;
    item->grown_bpw = (float)qt_packed_bpw(item->packed);
    if (item->named || item->packed->spec.scheme == &qt_scheme_w4ax)
        return;
    item->why = "would grow";
    item->copied = true;
    item->packed = &not_packed;
}

/* Experts have few shapes: matrices of the same shape and scheme share a description, if it is one
 * of the last ones. */
static int describe_item(struct qt_plan_item *item, struct qt_plan *plan,
                         const struct qt_spec *spec, struct qt_err *err)
{
    enum { LAST = 16 };
    const size_t n = item->tensor->shape[0], k = item->tensor->shape[1];
    struct qt_packed *packed;
    for (size_t i = plan->ndescriptions; i > 0 && i + LAST > plan->ndescriptions; i--) {
        item->packed = plan->descriptions[i - 1];
        if (item->packed->n == n && item->packed->k == k &&
            strcmp(item->packed->spec.text, spec->text) == 0)
            return QT_OK;
    }
    item->packed = &not_packed;
    int rc = qt_array_grow(&plan->descriptions, &plan->descriptions_capacity,
                           plan->ndescriptions + 1, sizeof *plan->descriptions, err);
    if (rc == QT_OK)
        rc = qt_array_new(&packed, 1, sizeof *packed, err);
    if (rc < 0)
        return rc;
    plan->descriptions[plan->ndescriptions++] = packed;
    item->packed = packed;
    return qt_packed_describe(packed, spec, n, k, err);
}

static int plan_item(struct qt_plan_item *item, struct qt_plan *plan, const struct qt_ckpt *ckpt,
                     const struct qt_spec *def, struct rules *rules, struct qt_err *err)
{
    const struct qt_tensor *t = item->tensor;
    const struct rule *rule;
    struct qt_err inner = {0};
    int rc = rules_find(&rule, rules, t, err);
    if (rc < 0)
        return rc;
    const struct qt_spec *spec = rule ? &rule->spec : def;
    const struct qt_role role = qt_role_of(ckpt, t);
    item->linear = role.linear;
    item->named = rule && !is_vector(t);
    item->why = item->named ? NULL : role.why;
    if (!item->why && !spec->scheme)
        item->why = QT_WHY_NONE;
    item->copied = item->why != NULL;
    if (item->copied)
        return QT_OK;
    if (t->ndim != 2 || !qt_dtype_is_weight(t->dtype))
        return cannot_quantize(t, err);
    rc = describe_item(item, plan, spec, &inner);
    if (rc < 0)
        return qt_fail(err, inner.status, t->file, t->name, "%s: %s", spec->text, inner.reason);
    check_size(item);
    return QT_OK;
}

static int check_section_names(const struct qt_plan_item *item, struct qt_err *err)
{
    const struct qt_tensor *t = item->tensor;
    for (size_t s = 0; s < item->packed->nsections; s++)
        if (strlen(t->name) + strlen(".q.") + strlen(item->packed->section[s].name) >
            QT_TENSOR_NAME_MAX)
            return qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name,
                           "its name is too long: with a section name appended it exceeds %d bytes",
                           QT_TENSOR_NAME_MAX);
    return QT_OK;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The sections of a matrix NAME are stored as tensors NAME.q.SECTION. quantized: sorted names. */
static int check_not_section(const struct qt_tensor *t, const char *const *quantized, size_t n,
                             struct qt_err *err)
{
    char name[QT_TENSOR_NAME_MAX + 1];
    const char *key = name;
    for (const char *cut = t->name; (cut = strstr(cut, ".q.")) != NULL; cut++) {
        snprintf(name, sizeof name, "%.*s", (int)(cut - t->name), t->name);
        if (bsearch(&key, quantized, n, sizeof key, compare_names))
            return qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name,
                           "its name collides with a section of %s, which will be quantized", name);
    }
    return QT_OK;
}

static int check_names(const struct qt_plan *plan, struct qt_err *err)
{
    const char **quantized;
    size_t n = 0;
    int rc = qt_array_new(&quantized, plan->quantized, sizeof *quantized, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < plan->count; i++)
        if (!plan->items[i].copied)
            quantized[n++] = plan->items[i].tensor->name;
    qsort(quantized, n, sizeof *quantized, compare_names);
    for (size_t i = 0; i < plan->count && rc == QT_OK; i++) {
        rc = check_section_names(&plan->items[i], err);
        if (rc == QT_OK)
            rc = check_not_section(plan->items[i].tensor, quantized, n, err);
    }
    qt_free(quantized);
    return rc;
}

static void plan_add(struct qt_plan *plan, const struct qt_plan_item *item)
{
    plan->source_bytes += item->tensor->nbytes;
    if (item->linear) {
        plan->share.linear += item->tensor->nbytes;
        if (!item->copied)
            plan->share.quantized += item->tensor->nbytes;
        else if (strcmp(item->why, QT_WHY_NONE) == 0)
            plan->share.chosen += item->tensor->nbytes;
    }
    if (item->copied) {
        plan->output_bytes += item->tensor->nbytes;
        return;
    }
    size_t bytes = qt_packed_bytes(item->packed);
    size_t rows = 2 * QT_FRAG_ROWS * item->packed->k * sizeof(float);
    const struct qt_scheme *scheme = item->packed->spec.scheme;
    const size_t strips = (scheme->scratch_bytes(item->packed) + rows) * (size_t)qt_threads();
    const size_t whole_matrix_bytes =
        scheme->prepare_bytes ? scheme->prepare_bytes(item->packed) : 0;
    const uint64_t working = bytes + qt_max_size(strips, whole_matrix_bytes);
    plan->quantized++;
    plan->weights += item->tensor->count;
    plan->packed_bytes += bytes;
    plan->output_bytes += bytes;
    if (working > plan->working_bytes)
        plan->working_bytes = working;
}

/* True if the scheme found nothing to do, not even a matrix that it would make larger. */
static bool has_no_linears(const struct qt_plan *plan)
{
    for (size_t i = 0; i < plan->count; i++)
        if (plan->items[i].grown_bpw > 0)
            return false;
    return plan->quantized == 0 && plan->share.chosen == 0;
}

int qt_plan_new(struct qt_plan *out, const struct qt_ckpt *ckpt, const struct qt_plan_options *opt,
                struct qt_err *err)
{
    struct rules rules = {0};
    struct qt_spec def;
    int rc = QT_OK;
    *out = (struct qt_plan){.kv.keys = opt->kv};
    QT_TRY(qt_spec_parse(&def, opt->scheme, err));
    qt_spec_resolve(&def, opt->calibrated);
    QT_TRY(rules_open(&rules, opt, err));
    QT_TRY(qt_array_new(&out->items, qt_ckpt_count(ckpt), sizeof *out->items, err));
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++) {
        struct qt_plan_item *item = &out->items[out->count++];
        *item = (struct qt_plan_item){.tensor = qt_ckpt_tensor(ckpt, i), .packed = &not_packed};
        QT_TRY(plan_item(item, out, ckpt, &def, &rules, err));
        plan_add(out, item);
    }
    if (out->quantized || def.scheme)
        QT_TRY(qt_guard_check(out, ckpt, has_no_linears(out), err));
    QT_TRY(check_names(out, err));
    QT_TRY(rules_check_used(&rules, opt, err));
done:
    rules_close(&rules);
    if (rc < 0)
        qt_plan_free(out);
    return rc;
}

void qt_plan_free(struct qt_plan *plan)
{
    for (size_t i = 0; i < plan->ndescriptions; i++)
        qt_free((void *)(uintptr_t)plan->descriptions[i]);
    qt_free(plan->descriptions);
    qt_free(plan->items);
    *plan = (struct qt_plan){0};
}

/* ---- calibration data that a plan needs ----------------------------------------------------- */

enum qt_need qt_plan_item_needs(const struct qt_plan_item *item)
{
    const struct qt_spec *spec = &item->packed->spec;
    if (item->copied)
        return QT_NEEDS_NOTHING;
    if (qt_scheme_needs_data(spec->scheme) || qt_spec_learns(spec))
        return QT_NEEDS_DATA;
    return qt_spec_method(spec) == QT_METHOD_GPTQ ? QT_NEEDS_HESSIAN : QT_NEEDS_NOTHING;
}

enum qt_need qt_plan_needs(const struct qt_plan *plan, const struct qt_plan_item **first)
{
    enum qt_need most = plan->kv.keys == QT_KV_KEYS_STATIC ? QT_NEEDS_DATA : QT_NEEDS_NOTHING;
    const struct qt_plan_item *found = NULL;
    for (size_t i = 0; i < plan->count; i++) {
        const enum qt_need need = qt_plan_item_needs(&plan->items[i]);
        if (need > most || (need == most && need != QT_NEEDS_NOTHING && !found))
            found = &plan->items[i];
        most = need > most ? need : most;
    }
    if (first)
        *first = found;
    return most;
}

const struct qt_plan_item *qt_plan_find(const struct qt_plan *plan, const char *name)
{
    for (size_t i = 0; i < plan->count; i++)
        if (strcmp(plan->items[i].tensor->name, name) == 0)
            return &plan->items[i];
    return NULL;
}

/* ---- sizes ---------------------------------------------------------------------------------- */

int qt_plan_format_version(const struct qt_plan *plan)
{
    int version = 1;
    for (size_t i = 0; i < plan->count; i++) {
        const struct qt_plan_item *item = &plan->items[i];
        const int own = item->copied ? 1 : qt_spec_format_version(&item->packed->spec);
        version = own > version ? own : version;
    }
    return version;
}

double qt_plan_bpw(const struct qt_plan *plan)
{
    return plan->weights ? 8 * (double)plan->packed_bytes / (double)plan->weights : 0;
}

double qt_plan_paper_bpw(const struct qt_plan *plan)
{
    double bits = 0;
    bool other = false;
    for (size_t i = 0; i < plan->count; i++) {
        const struct qt_plan_item *item = &plan->items[i];
        if (item->copied)
            continue;
        double paper = qt_packed_paper_bpw(item->packed);
        other |= !isnan(paper);
        bits += (double)item->tensor->count * (isnan(paper) ? qt_packed_bpw(item->packed) : paper);
    }
    return other ? bits / (double)plan->weights : NAN;
}
