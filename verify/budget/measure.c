/* The divergence of the model in which one group is quantized, for each group. */
#include "verify/budget/budget.h"

#include <math.h>

#define ALL SIZE_MAX

/* The rounded matrix that takes the place of a tensor; NULL: there is none. */
static const struct qt_packed *find_changed(const struct budget_changed *c, const char *name)
{
    const struct budget *b = c->budget;
    const struct qt_plan_item *item = qt_plan_find(&b->plan[0], name);
    const size_t i = item ? (size_t)(item - b->plan[0].items) : 0;
    const size_t group = item ? b->group_of[i] : SIZE_MAX;
    return group == SIZE_MAX || (c->group != ALL && c->group != group) ? NULL : &b->rounded[i];
}

static bool changed_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    const struct budget_changed *c = ctx;
    return c->source.shape(c->source.ctx, name, ndim, shape);
}

static bool changed_unchanged(void *ctx, const char *name)
{
    return !find_changed(ctx, name);
}

static int changed_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct budget_changed *c = ctx;
    const struct qt_packed *packed = find_changed(c, name);
    return packed ? qt_packed_weights(dst, packed, err)
                  : c->source.load(c->source.ctx, name, dst, err);
}

static int changed_place(void *ctx, struct qt_backend *be, const char *name, float *dst, bool *done,
                         struct qt_err *err)
{
    const struct budget_changed *c = ctx;
    *done = false;
    return find_changed(c, name) ? QT_OK : c->source.place(c->source.ctx, be, name, dst, done, err);
}

struct qt_weights budget_changed_weights(struct budget_changed *out, const struct budget *b,
                                         size_t group)
{
    const struct qt_weights source = qt_weights_of_ckpt(b->ckpt);
    struct qt_weights w = source;
    *out = (struct budget_changed){source, b, group};
    w.ctx = out;
    w.shape = changed_shape;
    w.load = changed_load;
    w.place = changed_place;
    w.unchanged = changed_unchanged;
    return w;
}

static int measure(double *kld, double *se, const struct budget *b, size_t group,
                   struct qt_err *err)
{
    const struct qt_calibration *windows = &b->opt->measured;
    const struct qt_eval_options eval = {.seqlen = windows->seqlen};
    const struct qt_weights source = qt_weights_of_ckpt(b->ckpt);
    struct budget_changed changed;
    const struct qt_weights w = budget_changed_weights(&changed, b, group);
    struct qt_eval_report report;
    int rc = qt_eval(&report, &w, &source, windows->ids, windows->samples * windows->seqlen, &eval,
                     windows->backend, err);
    if (rc < 0)
        return rc;
    *kld = report.kld_mean;
    *se = report.kld_se;
    return QT_OK;
}

int budget_measure_all(double *kld, double *se, const struct budget *b, struct qt_err *err)
{
    return measure(kld, se, b, ALL, err);
}

/* ---- the state file ------------------------------------------------------------------------- */

enum { MAX_STATE = 64 << 20 };

/* Returns the facts that measurements depend on: a state file with others is refused. NULL: it
 * failed. */
static json_t *state_head(const struct budget *b, struct qt_err *err)
{
    const struct qt_calibration *data = b->opt->data, *measured = &b->opt->measured;
    uint32_t crc;
    if (qt_ckpt_sample_crc(&crc, b->ckpt, err) < 0)
        return NULL;
    json_t *head = json_pack(
        "{s:s, s:i, s:s, s:o, s:o, s:I, s:I, s:I}", "format", "qtool-sensitivity", "version", 2,
        "qtool", QT_VERSION, "sample_crc32", qt_crc_json(crc), "ids_crc32",
        qt_crc_json(qt_crc32(0, data->ids, data->samples * data->seqlen * sizeof *data->ids)),
        "samples", (json_int_t)data->samples, "seqlen", (json_int_t)data->seqlen, "measured",
        (json_int_t)measured->samples);
    if (!head)
        qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
    return head;
}

static int check_head(const json_t *state, json_t *head, const char *path, struct qt_err *err)
{
    const char *key;
    json_t *value;
    json_object_foreach (head, key, value) {
        if (!json_equal(value, json_object_get(state, key)))
            return qt_fail(err, QT_E_USAGE, path, NULL,
                           "was made for another checkpoint, data or version: '%s' differs", key);
    }
    return QT_OK;
}

/* *state = the content of the state file, NULL: there is none. */
static int load_state(json_t **state, const struct budget *b, struct qt_err *err)
{
    const char *path = b->opt->state;
    json_t *head = NULL;
    int rc = QT_OK;
    *state = NULL;
    if (!path || !qt_path_exists(path))
        return QT_OK;
    head = state_head(b, err);
    rc = head ? qt_json_load(state, path, MAX_STATE, err) : (int)QT_E_RESOURCE;
    if (rc == QT_OK)
        rc = check_head(*state, head, path, err);
    json_decref(head);
    return rc;
}

int budget_load_base(struct budget *b, struct qt_err *err)
{
    const char *scheme = NULL;
    json_t *state = NULL;
    size_t base = 0;
    int rc;
    QT_TRY(load_state(&state, b, err));
    if (!state)
        goto done;
    QT_TRY(qt_json_need_string(&scheme, state, "scheme", b->opt->state, err));
    while (base < b->opt->nchoices && strcmp(b->opt->choices[base], scheme) != 0)
        base++;
    if (base == b->opt->nchoices)
        QT_TRY(qt_fail(err, QT_E_USAGE, b->opt->state, NULL,
                       "has measurements with %s: add it to --choices", scheme));
    b->base = base;
done:
    json_decref(state);
    return rc;
}

static double number_or_nan(const json_t *value)
{
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static int load_measurements(struct budget *b, struct qt_err *err)
{
    json_t *state = NULL;
    int rc = load_state(&state, b, err);
    b->whole = b->whole_se = NAN;
    if (rc == QT_OK && state) {
        b->whole = number_or_nan(json_object_get(state, "kld"));
        b->whole_se = number_or_nan(json_object_get(state, "kld_se"));
        for (size_t g = 0; g < b->ngroups; g++)
            b->groups[g].kld =
                number_or_nan(json_object_get(json_object_get(state, "groups"), b->groups[g].key));
    }
    json_decref(state);
    return rc;
}

static int save_state(const struct budget *b, struct qt_err *err)
{
    if (!b->opt->state)
        return QT_OK;
    json_t *state = state_head(b, err), *groups = json_object();
    bool failed = !groups;
    if (!state) {
        json_decref(groups);
        return QT_E_RESOURCE;
    }
    for (size_t g = 0; g < b->ngroups; g++)
        if (!isnan(b->groups[g].kld))
            failed |=
                json_object_set_new(groups, b->groups[g].key, json_real(b->groups[g].kld)) < 0;
    failed |= json_object_set_new(state, "scheme", json_string(b->opt->choices[b->base])) < 0;
    failed |= json_object_set_new(state, "kld", json_real(b->whole)) < 0;
    failed |= json_object_set_new(state, "kld_se", json_real(b->whole_se)) < 0;
    failed |= json_object_set_new(state, "groups", groups) < 0;
    char *text = NULL;
    size_t size;
    int rc = failed ? qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory")
                    : qt_json_text(&text, &size, state, JSON_INDENT(1), err);
    json_decref(state);
    if (rc == QT_OK)
        rc = qt_file_publish(b->opt->state, &(struct qt_file_piece){text, size}, 1, NULL, err);
    qt_free(text);
    return rc;
}

int budget_measure(struct budget *b, struct qt_err *err)
{
    const struct qt_budget_options *o = b->opt;
    size_t measured;
    double se;
    int rc;
    QT_TRY(load_measurements(b, err));
    if (isnan(b->whole))
        QT_TRY(measure(&b->whole, &b->whole_se, b, ALL, err));
    do {
        QT_TRY(budget_measure_pass(&measured, b, err));
        if (measured)
            QT_TRY(save_state(b, err));
    } while (measured);
    /* The others are no linears of decoder layers. */
    for (size_t g = 0; g < b->ngroups; g++) {
        qt_log_progress(o->log, "measure", (double)g, (double)b->ngroups);
        if (!isnan(b->groups[g].kld))
            continue;
        if (o->interrupted && o->interrupted())
            QT_TRY(qt_fail(err, QT_E_INTERRUPTED, NULL, NULL, "interrupted"));
        QT_TRY(measure(&b->groups[g].kld, &se, b, g, err));
        QT_TRY(save_state(b, err));
    }
    qt_log_progress(o->log, "measure", (double)b->ngroups, (double)b->ngroups);
done:
    return rc;
}
