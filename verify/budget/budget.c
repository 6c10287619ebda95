/* Chooses schemes for a size: groups, errors, costs, result. */
#include "verify/budget/budget.h"

#include <math.h>

/* ---- groups --------------------------------------------------------------------------------- */

/* A tensor takes part if every choice quantizes it and no rule names it but one that leaves it to
 * the choice: its scheme then differs between the plans. */
static bool takes_part(const struct budget *b, size_t i)
{
    const struct qt_plan_item *first = &b->plan[0].items[i], *second = &b->plan[1].items[i];
    for (size_t c = 0; c < b->opt->nchoices; c++)
        if (b->plan[c].items[i].copied)
            return false;
    return first->named ? strcmp(first->packed->spec.text, second->packed->spec.text) != 0
                        : first->linear;
}

/* Bytes of a tensor that takes no part. The most common choice becomes its scheme if that can
 * quantize it; which one that is does not show before the choice, so the most is counted. */
static uint64_t fixed_bytes(const struct budget *b, size_t i)
{
    uint64_t most = 0;
    for (size_t c = 0; c < b->opt->nchoices; c++) {
        const struct qt_plan_item *item = &b->plan[c].items[i];
        const uint64_t bytes = item->copied ? item->tensor->nbytes : qt_packed_bytes(item->packed);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static int find_group(size_t *out, struct budget *b, json_t *numbers, const char *name,
                      struct qt_err *err)
{
    char *key = NULL;
    int rc;
    QT_TRY(budget_key(&key, name, err));
    const json_t *known = json_object_get(numbers, key);
    *out = known ? (size_t)json_integer_value(known) : b->ngroups;
    if (known)
        goto done;
    QT_TRY(qt_array_grow(&b->groups, &b->capacity, b->ngroups + 1, sizeof *b->groups, err));
    if (json_object_set_new(numbers, key, json_integer((json_int_t)b->ngroups)) < 0)
        QT_TRY(qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory"));
    b->groups[b->ngroups++] = (struct group){.key = key, .kld = NAN};
    key = NULL;
done:
    qt_free(key);
    return rc;
}

static int make_groups(struct budget *b, struct qt_err *err)
{
    const struct qt_plan *plan = &b->plan[0];
    json_t *numbers = json_object();
    int rc;
    QT_TRY(qt_array_new(&b->group_of, plan->count, sizeof *b->group_of, err));
    for (size_t i = 0; i < plan->count; i++) {
        const struct qt_plan_item *item = &plan->items[i];
        b->group_of[i] = SIZE_MAX;
        if (!takes_part(b, i)) {
            b->fixed += fixed_bytes(b, i);
            continue;
        }
        QT_TRY(find_group(&b->group_of[i], b, numbers, item->tensor->name, err));
        for (size_t c = 0; c < b->opt->nchoices; c++)
            b->groups[b->group_of[i]].bytes[c] += qt_packed_bytes(b->plan[c].items[i].packed);
    }
    if (b->ngroups == 0)
        rc = qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                     "there is no tensor to choose a scheme for: every choice must be able to "
                     "quantize it, and no --tensor name it");
done:
    json_decref(numbers);
    return rc;
}

/* ---- the budget ----------------------------------------------------------------------------- */

static uint64_t uniform(const struct budget *b, size_t choice)
{
    uint64_t sum = 0;
    for (size_t g = 0; g < b->ngroups; g++)
        sum += b->groups[g].bytes[choice];
    return sum;
}

/* The bytes that the groups may take, and the choice to measure: the largest that fits alone. */
static int find_budget(struct budget *b, struct qt_err *err)
{
    const struct qt_budget_options *o = b->opt;
    const struct qt_plan *plan = &b->plan[0];
    uint64_t least = 0, weights = 0, fixed_packed = 0, total;
    for (size_t i = 0; i < plan->count; i++) {
        if (plan->items[i].copied)
            continue;
        weights += plan->items[i].tensor->count;
        if (b->group_of[i] == SIZE_MAX)
            fixed_packed += fixed_bytes(b, i);
    }
    for (size_t g = 0; g < b->ngroups; g++) {
        uint64_t smallest = b->groups[g].bytes[0];
        for (size_t c = 1; c < o->nchoices; c++)
            smallest = b->groups[g].bytes[c] < smallest ? b->groups[g].bytes[c] : smallest;
        least += smallest;
    }
    total = o->bytes ? o->bytes : (uint64_t)(o->bpw * (double)weights / 8);
    const uint64_t other = o->bytes ? b->fixed : fixed_packed;
    if (total < other + least && o->bytes)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "the target of %llu bytes is below the smallest possible size, %llu bytes",
                       (unsigned long long)total, (unsigned long long)(other + least));
    if (total < other + least)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "the target of %.4g bits per weight is below the smallest possible, %.4f",
                       o->bpw, 8 * (double)(other + least) / (double)weights);
    b->budget = total - other;
    b->base = 0;
    for (size_t c = 1; c < o->nchoices; c++) {
        const uint64_t now = uniform(b, b->base), then = uniform(b, c);
        const bool fits = then <= b->budget;
        if (fits == (now <= b->budget) ? (fits ? then > now : then < now) : fits)
            b->base = c;
    }
    return QT_OK;
}

/* ---- errors and costs ----------------------------------------------------------------------- */

static int tensor_errors(struct budget *b, size_t i, struct qt_err *err)
{
    const struct qt_tensor *t = b->plan[0].items[i].tensor;
    struct qt_blob blob = {0};
    int rc;
    QT_TRY(qt_ckpt_read(&blob, b->ckpt, t, err));
    const struct qt_matrix w = {blob.data, t->dtype, t->shape[0], t->shape[1], t->file, t->name};
    for (size_t c = 0; c < b->opt->nchoices; c++) {
        struct qt_packed packed = {0};
        struct qt_error e;
        rc = qt_packed_quantize_on(b->opt->backend, &packed, &b->plan[c].items[i].packed->spec, &w,
                                   NULL, &e, err);
        qt_packed_free(&packed);
        QT_TRY(rc);
        if (e.sum_w2 > 0)
            b->groups[b->group_of[i]].error[c] += e.sum_e2 / e.sum_w2 * (double)t->count;
    }
done:
    qt_blob_free(&blob);
    return rc;
}

static int find_errors(struct budget *b, struct qt_err *err)
{
    const size_t count = b->plan[0].count;
    int rc = QT_OK;
    for (size_t i = 0; i < count && rc == QT_OK; i++) {
        qt_log_progress(b->opt->log, "errors", (double)i, (double)count);
        if (b->opt->interrupted && b->opt->interrupted())
            rc = qt_fail(err, QT_E_INTERRUPTED, NULL, NULL, "interrupted");
        else if (b->group_of[i] != SIZE_MAX)
            rc = tensor_errors(b, i, err);
    }
    return rc;
}

static int find_costs(double **out, const struct budget *b, struct qt_err *err)
{
    int rc = qt_array_new(out, b->ngroups * BUDGET_CHOICES, sizeof **out, err);
    for (size_t g = 0; rc == QT_OK && g < b->ngroups; g++) {
        const struct group *one = &b->groups[g];
        const double base = one->error[b->base];
        for (size_t c = 0; c < b->opt->nchoices; c++) {
            /* Rounding may even help a little on few tokens: no gain is counted for it. */
            double factor = isnan(one->kld) ? 1 : base > 0 ? fmax(one->kld, 0) / base : 0;
            (*out)[g * BUDGET_CHOICES + c] = factor * one->error[c];
        }
    }
    return rc;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static int check_options(const struct qt_budget_options *o, struct qt_err *err)
{
    if (o->nchoices < 2 || o->nchoices > BUDGET_CHOICES)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "choices must be 2 to %d schemes",
                       BUDGET_CHOICES);
    for (size_t c = 0; c < o->nchoices; c++) {
        struct qt_spec spec;
        int rc = qt_spec_parse(&spec, o->choices[c], err);
        if (rc < 0)
            return rc;
        if (!spec.scheme || qt_scheme_needs_data(spec.scheme))
            return qt_fail(err, QT_E_USAGE, NULL, NULL, "%s cannot be a choice", o->choices[c]);
        for (size_t i = 0; i < c; i++)
            if (strcmp(o->choices[i], o->choices[c]) == 0)
                return qt_fail(err, QT_E_USAGE, NULL, NULL, "%s is a choice twice", o->choices[c]);
    }
    return QT_OK;
}

static void free_budget(struct budget *b)
{
    for (size_t c = 0; c < b->opt->nchoices && c < BUDGET_CHOICES; c++)
        qt_plan_free(&b->plan[c]);
    for (size_t g = 0; g < b->ngroups; g++)
        qt_free(b->groups[g].key);
    qt_free(b->groups);
    qt_free(b->group_of);
    qt_free(b);
}

static void fill(struct qt_budget *out, const struct budget *b, const double *cost)
{
    const struct qt_plan *plan = &b->plan[0];
    double weights = 0, packed = 0;
    out->bytes = b->fixed;
    out->kld = b->opt->ids ? 0 : NAN;
    out->groups = b->ngroups;
    for (size_t g = 0; g < b->ngroups; g++) {
        out->bytes += b->groups[g].bytes[b->groups[g].choice];
        packed += (double)b->groups[g].bytes[b->groups[g].choice];
        if (b->opt->ids)
            out->kld += cost[g * BUDGET_CHOICES + b->groups[g].choice];
    }
    for (size_t i = 0; i < plan->count; i++) {
        if (plan->items[i].copied)
            continue;
        weights += (double)plan->items[i].tensor->count;
        if (b->group_of[i] == SIZE_MAX)
            packed += (double)fixed_bytes(b, i);
    }
    out->bpw = 8 * packed / weights;
}

int qt_budget_choose(struct qt_budget *out, const struct qt_ckpt *ckpt,
                     const struct qt_budget_options *opt, struct qt_err *err)
{
    struct qt_rule *rules = NULL;
    struct budget *b = NULL;
    double *cost = NULL;
    int rc;
    *out = (struct qt_budget){.measured = NAN, .measured_se = NAN};
    QT_TRY(check_options(opt, err));
    QT_TRY(qt_array_new(&b, 1, sizeof *b, err));
    b->ckpt = ckpt;
    b->opt = opt;
    QT_TRY(qt_array_new(&rules, opt->plan.nrules, sizeof *rules, err));
    for (size_t c = 0; c < opt->nchoices; c++) {
        struct qt_plan_options plan = opt->plan;
        for (size_t i = 0; i < plan.nrules; i++) {
            rules[i] = opt->plan.rules[i];
            if (strcmp(rules[i].spec, QT_BUDGET_CHOICE) == 0)
                rules[i].spec = opt->choices[c];
        }
        plan.rules = rules;
        plan.scheme = opt->choices[c];
        plan.calibrated = false; /* errors are those of scales that are searched for */
        QT_TRY(qt_plan_new(&b->plan[c], ckpt, &plan, err));
    }
    QT_TRY(make_groups(b, err));
    QT_TRY(find_budget(b, err));
    QT_TRY(find_errors(b, err));
    if (opt->ids)
        QT_TRY(budget_measure(b, err));
    QT_TRY(find_costs(&cost, b, err));
    QT_TRY(budget_solve(b, cost, err));
    QT_TRY(budget_rules(out, b, err));
    fill(out, b, cost);
    if (opt->ids)
        QT_TRY(budget_measure_all(out, b, err));
done:
    qt_free(rules);
    qt_free(cost);
    if (b)
        free_budget(b);
    if (rc < 0)
        qt_budget_free(out);
    return rc;
}

void qt_budget_free(struct qt_budget *b)
{
    for (size_t i = 0; i < b->nrules; i++) {
        qt_free((void *)(uintptr_t)b->rules[i].regex);
        qt_free((void *)(uintptr_t)b->rules[i].spec);
    }
    qt_free(b->rules);
    qt_free(b->scheme);
    *b = (struct qt_budget){0};
}
