/* The divergence of the model in which one group is quantized, for each group. */
#include "verify/budget/budget.h"

#include <math.h>

/* The source's weights, with those of one group, or of all, quantized and dequantized. */
struct changed {
    struct qt_weights source;
    const struct budget *budget;
    size_t group; /* ALL: with the schemes that were chosen */
};
#define ALL SIZE_MAX

static bool changed_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    const struct changed *c = ctx;
    return c->source.shape(c->source.ctx, name, ndim, shape);
}

static int changed_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct changed *c = ctx;
    const struct budget *b = c->budget;
    const struct qt_plan_item *item = qt_plan_find(&b->plan[b->base], name);
    const size_t i = item ? (size_t)(item - b->plan[b->base].items) : 0;
    const size_t group = item ? b->group_of[i] : SIZE_MAX;
    struct qt_packed packed = {0};
    struct qt_blob blob = {0};
    int rc;
    if (group == SIZE_MAX || (c->group != ALL && c->group != group))
        return c->source.load(c->source.ctx, name, dst, err);
    if (c->group == ALL)
        item = &b->plan[b->groups[group].choice].items[i];
    const struct qt_tensor *t = item->tensor;
    QT_TRY(qt_ckpt_read(&blob, b->ckpt, t, err));
    const struct qt_matrix w = {blob.data, t->dtype, t->shape[0], t->shape[1], t->file, t->name};
    QT_TRY(
        qt_packed_quantize_on(b->opt->backend, &packed, &item->packed->spec, &w, NULL, NULL, err));
    QT_TRY(qt_packed_weights(dst, &packed, err));
done:
    qt_packed_free(&packed);
    qt_blob_free(&blob);
    return rc;
}

static int measure(struct qt_eval_report *report, const struct budget *b, size_t group,
                   struct qt_err *err)
{
    const struct qt_budget_options *o = b->opt;
    const struct qt_eval_options eval = {.seqlen = o->seqlen};
    const struct qt_weights source = qt_weights_of_ckpt(b->ckpt);
    struct changed changed = {source, b, group};
    struct qt_weights w = source;
    w.ctx = &changed;
    w.shape = changed_shape;
    w.load = changed_load;
    w.place = NULL;
    return qt_eval(report, &w, &source, o->ids, o->samples * o->seqlen, &eval, o->backend, err);
}

int budget_measure_all(struct qt_budget *out, const struct budget *b, struct qt_err *err)
{
    struct qt_eval_report report;
    int rc = measure(&report, b, ALL, err);
    if (rc < 0)
        return rc;
    out->measured = report.kld_mean;
    out->measured_se = report.kld_se;
    return QT_OK;
}

/* ---- the state file ------------------------------------------------------------------------- */

enum { MAX_STATE = 64 << 20 };

/* Returns the facts that measurements depend on: a state file with others is refused. NULL: it
 * failed. */
static json_t *state_head(const struct budget *b, struct qt_err *err)
{
    const struct qt_budget_options *o = b->opt;
    uint32_t crc;
    if (qt_ckpt_sample_crc(&crc, b->ckpt, err) < 0)
        return NULL;
    json_t *head =
        json_pack("{s:s, s:i, s:s, s:o, s:o, s:I, s:I}", "format", "qtool-sensitivity", "version",
                  1, "qtool", QT_VERSION, "sample_crc32", qt_crc_json(crc), "ids_crc32",
                  qt_crc_json(qt_crc32(0, o->ids, o->samples * o->seqlen * sizeof *o->ids)),
                  "samples", (json_int_t)o->samples, "seqlen", (json_int_t)o->seqlen);
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

/* Takes base and measurements from the state file. */
static int load_state(struct budget *b, json_t *head, struct qt_err *err)
{
    const char *path = b->opt->state, *scheme = NULL;
    json_t *state = NULL;
    size_t base = 0;
    int rc = QT_OK;
    if (!path || !qt_path_exists(path))
        return QT_OK;
    QT_TRY(qt_json_load(&state, path, MAX_STATE, err));
    QT_TRY(check_head(state, head, path, err));
    QT_TRY(qt_json_need_string(&scheme, state, "scheme", path, err));
    while (base < b->opt->nchoices && strcmp(b->opt->choices[base], scheme) != 0)
        base++;
    if (base == b->opt->nchoices)
        QT_TRY(qt_fail(err, QT_E_USAGE, path, NULL, "has measurements with %s: add it to --choices",
                       scheme));
    b->base = base;
    for (size_t g = 0; g < b->ngroups; g++) {
        const json_t *kld = json_object_get(json_object_get(state, "groups"), b->groups[g].key);
        if (json_is_number(kld) && isfinite(json_number_value(kld)))
            b->groups[g].kld = json_number_value(kld);
    }
done:
    json_decref(state);
    return rc;
}

static int save_state(const struct budget *b, json_t *head, struct qt_err *err)
{
    json_t *state, *groups = json_object();
    bool failed = !groups;
    if (!b->opt->state) {
        json_decref(groups);
        return QT_OK;
    }
    for (size_t g = 0; g < b->ngroups; g++)
        if (!isnan(b->groups[g].kld))
            failed |=
                json_object_set_new(groups, b->groups[g].key, json_real(b->groups[g].kld)) < 0;
    state = json_copy(head);
    failed |= json_object_set_new(state, "scheme", json_string(b->opt->choices[b->base])) < 0;
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
    json_t *head = state_head(b, err);
    struct qt_eval_report report;
    int rc = head ? QT_OK : (int)QT_E_RESOURCE;
    QT_TRY(rc);
    QT_TRY(load_state(b, head, err));
    for (size_t g = 0; g < b->ngroups; g++) {
        qt_log_progress(o->log, "measure", (double)g, (double)b->ngroups);
        if (!isnan(b->groups[g].kld))
            continue;
        if (o->interrupted && o->interrupted())
            QT_TRY(qt_fail(err, QT_E_INTERRUPTED, NULL, NULL, "interrupted"));
        QT_TRY(measure(&report, b, g, err));
        b->groups[g].kld = report.kld_mean;
        QT_TRY(save_state(b, head, err));
    }
    qt_log_progress(o->log, "measure", (double)b->ngroups, (double)b->ngroups);
done:
    json_decref(head);
    return rc;
}
