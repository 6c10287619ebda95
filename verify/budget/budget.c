/* Chooses schemes for a size: groups, costs, result. */
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
    QT_TRY(budget_key(&key, name, b->opt->untied, err));
    const json_t *known = json_object_get(numbers, key);
    *out = known ? (size_t)json_integer_value(known) : b->ngroups;
    if (known)
        goto done;
    QT_TRY(qt_array_grow(&b->groups, &b->capacity, b->ngroups + 1, sizeof *b->groups, err));
    if (json_object_set_new(numbers, key, json_integer((json_int_t)b->ngroups)) < 0)
        QT_TRY(qt_no_memory(err, NULL));
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

static uint64_t uniform_bytes(const struct budget *b, size_t choice)
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
    b->uniform = 0;
    for (size_t c = 1; c < o->nchoices; c++) {
        const uint64_t now = uniform_bytes(b, b->uniform), then = uniform_bytes(b, c);
        const bool fits = then <= b->budget;
        if (fits == (now <= b->budget) ? (fits ? then > now : then < now) : fits)
            b->uniform = c;
    }
    b->base = b->uniform;
    return QT_OK;
}

/* ---- costs ---------------------------------------------------------------------------------- */

static double cost_of(const struct budget *b, const struct group *g, size_t choice,
                      const struct kind_factor *kinds, double slope)
{
    const double base = g->error[b->base], error = g->error[choice];
    if (!b->opt->data)
        return error;
    if (!(base > 0 && g->kld > 0)) /* rounding may help a little on few tokens: that is no gain */
        return 0;
    const struct kind_factor *f = &kinds[g->kind];
    return g->kld * (1 + slope * g->depth) *
           (error <= base ? f->cost * error / base : f->cost + f->rise * (error / base - 1));
}

/* out[groups * BUDGET_CHOICES] */
static int find_costs(double *out, const struct budget *b, struct qt_err *err)
{
    struct kind_factor *kinds = NULL;
    double slope;
    int rc;
    QT_TRY(qt_array_new(&kinds, b->nkinds, sizeof *kinds, err));
    QT_TRY(budget_kind_factors(kinds, &slope, b, err));
    for (size_t g = 0; g < b->ngroups; g++)
        for (size_t c = 0; c < b->opt->nchoices; c++)
            out[g * BUDGET_CHOICES + c] = cost_of(b, &b->groups[g], c, kinds, slope);
done:
    qt_free(kinds);
    return rc;
}

/* ---- measuring choices ---------------------------------------------------------------------- */

/* The choices of all groups, and what they give. */
struct candidate {
    size_t *choice; /* [groups] */
    double predicted, measured, se;
};

static void get_choices(size_t *choice, const struct budget *b)
{
    for (size_t g = 0; g < b->ngroups; g++)
        choice[g] = b->groups[g].choice;
}

static void set_choices(struct budget *b, const size_t *choice)
{
    for (size_t g = 0; g < b->ngroups; g++)
        b->groups[g].choice = choice[g];
}

/* Sets *c to group.choice, and measures it if c->measured is unknown. */
static int measure_candidate(struct candidate *c, struct budget *b, const double *cost,
                             struct qt_err *err)
{
    int rc = QT_OK;
    if (isnan(c->measured))
        rc = budget_measure_choice(&c->measured, &c->se, b, b->opt->log, err);
    if (rc < 0)
        return rc;
    get_choices(c->choice, b);
    c->predicted = 0;
    for (size_t g = 0; g < b->ngroups; g++)
        c->predicted += cost[g * BUDGET_CHOICES + c->choice[g]];
    return QT_OK;
}

/* Measures group.choice, corrects the factors of kinds by the result and chooses again, a few
 * times. Then measures the largest choice that fits for all groups. The best becomes
 * group.choice. */
static int check_choice(struct qt_budget *out, struct budget *b, double *cost, struct qt_err *err)
{
    enum { ROUNDS = 4, CANDIDATES };
    struct candidate candidates[CANDIDATES], *best = candidates;
    const struct qt_log *log = b->opt->log;
    const size_t size = b->ngroups * sizeof *best->choice;
    size_t *choices = NULL, count = 0;
    int rc;
    QT_TRY(qt_array_new(&choices, CANDIDATES, size, err));
    for (size_t i = 0; i < CANDIDATES; i++)
        candidates[i] = (struct candidate){.choice = choices + i * b->ngroups, .measured = NAN};
    while (count < ROUNDS) {
        struct candidate *c = &candidates[count];
        bool known = false;
        get_choices(c->choice, b);
        for (size_t i = 0; i < count; i++)
            known |= memcmp(candidates[i].choice, c->choice, size) == 0;
        if (known)
            break;
        QT_TRY(measure_candidate(c, b, cost, err));
        qt_log_message(log, QT_LOG_INFO,
                       "KL divergence of choice %zu: %.4f predicted, %.4f measured", ++count,
                       c->predicted, c->measured);
        if (c->measured < best->measured)
            best = c;
        QT_TRY(budget_observe(b, c->measured, err));
        QT_TRY(find_costs(cost, b, err));
        QT_TRY(budget_solve(b, cost, err));
    }
    if (uniform_bytes(b, b->uniform) <= b->budget) {
        struct candidate *c = &candidates[count];
        for (size_t g = 0; g < b->ngroups; g++)
            b->groups[g].choice = b->uniform;
        c->measured = b->uniform == b->base ? b->whole : NAN;
        c->se = b->whole_se;
        QT_TRY(measure_candidate(c, b, cost, err));
        qt_log_message(log, QT_LOG_INFO, "KL divergence of %s alone: %.4f",
                       b->opt->choices[b->uniform], c->measured);
        if (c->measured <= best->measured)
            best = c;
    }
    set_choices(b, best->choice);
    out->kld = best->predicted;
    out->measured = best->measured;
    out->measured_se = best->se;
done:
    qt_free(choices);
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
    for (size_t i = 0; b->rounded && i < b->plan[0].count; i++)
        qt_packed_free(&b->rounded[i]);
    qt_free(b->rounded);
    for (size_t c = 0; c < b->opt->nchoices && c < BUDGET_CHOICES; c++)
        qt_plan_free(&b->plan[c]);
    for (size_t g = 0; g < b->ngroups; g++)
        qt_free(b->groups[g].key);
    for (size_t k = 0; k < b->nkinds; k++)
        qt_free(b->kinds[k].key);
    for (size_t m = 0; m < b->nmodels; m++)
        qt_free(b->models[m].error);
    qt_free(b->models);
    json_decref(b->state);
    qt_free(b->groups);
    qt_free(b->kinds);
    qt_free(b->group_of);
    qt_free(b);
}

static void fill(struct qt_budget *out, const struct budget *b)
{
    const struct qt_plan *plan = &b->plan[0];
    double weights = 0, packed = 0;
    out->bytes = b->fixed;
    out->groups = b->ngroups;
    for (size_t g = 0; g < b->ngroups; g++) {
        out->bytes += b->groups[g].bytes[b->groups[g].choice];
        packed += (double)b->groups[g].bytes[b->groups[g].choice];
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
    size_t measured = 0;
    int rc;
    *out = (struct qt_budget){.kld = NAN, .measured = NAN, .measured_se = NAN};
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
        plan.calibrated = opt->data != NULL;
        QT_TRY(qt_plan_new(&b->plan[c], ckpt, &plan, err));
    }
    QT_TRY(make_groups(b, err));
    QT_TRY(budget_find_kinds(b, err));
    QT_TRY(find_budget(b, err));
    if (opt->data)
        QT_TRY(budget_load(b, err));
    QT_TRY(budget_errors(b, err));
    if (opt->data) {
        QT_TRY(budget_measure(b, err));
        QT_TRY(budget_measure_kinds(b, err));
    }
    QT_TRY(qt_array_new(&cost, b->ngroups * BUDGET_CHOICES, sizeof *cost, err));
    do {
        QT_TRY(find_costs(cost, b, err));
        QT_TRY(budget_solve(b, cost, err));
        if (opt->data)
            QT_TRY(budget_measure_worse(&measured, b, err));
    } while (measured);
    if (opt->data)
        QT_TRY(check_choice(out, b, cost, err));
    QT_TRY(budget_rules(out, b, err));
    fill(out, b);
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
