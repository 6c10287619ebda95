#include "pack/learn/learn.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- options -------------------------------------------------------------------------------- */

static const char *const objectives[] = {"kl", "nll", NULL};
static const char *const modes[] = {"frozen", "ste", NULL};
static const char *const scopes[] = {"model", "block", NULL};

enum { OBJECTIVE, MODE, SCOPE, LR, PASSES, BATCH, HELD_OUT };

static const struct qt_param params[] = {
    [OBJECTIVE] = {"objective", QT_PARAM_CHOICE, QT_LEARN_KL, 0, 0, objectives, ""},
    [MODE] = {"mode", QT_PARAM_CHOICE, QT_LEARN_FROZEN, 0, 0, modes, ""},
    [SCOPE] = {"scope", QT_PARAM_CHOICE, QT_LEARN_MODEL, 0, 0, scopes, ""},
    [LR] = {"lr", QT_PARAM_REAL, 1e-3, 1e-9, 1, NULL, ""},
    [PASSES] = {"passes", QT_PARAM_INT, 2, 1, 1000, NULL, ""},
    [BATCH] = {"batch", QT_PARAM_INT, 4, 1, 1024, NULL, ""},
    [HELD_OUT] = {"held-out", QT_PARAM_REAL, 0.125, 0.001, 0.5, NULL, ""},
    {0},
};

int qt_learn_parse(struct qt_learn_options *out, const char *text, struct qt_err *err)
{
    double value[QT_MAX_PARAMS];
    unsigned set = 0;
    int rc = QT_OK;
    for (size_t i = 0; params[i].key; i++)
        value[i] = params[i].initial;
    if (strlen(text) >= QT_SPEC_TEXT)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "the learning options '%.40s...' are too long",
                       text);
    if (text[0])
        rc = qt_params_parse(value, &set, params, 0, text, err);
    *out = (struct qt_learn_options){
        .objective = (enum qt_learn_objective)value[OBJECTIVE],
        .mode = (enum qt_learn_mode)value[MODE],
        .scope = (enum qt_learn_scope)value[SCOPE],
        .lr = value[LR],
        .passes = (size_t)value[PASSES],
        .batch = (size_t)value[BATCH],
        .held_out = value[HELD_OUT],
    };
    char with_separator[QT_SPEC_TEXT + 1] = "";
    qt_params_text(with_separator, sizeof with_separator, ',', params, value, 0);
    snprintf(out->text, sizeof out->text, "%s", with_separator + 1);
    if (rc == QT_OK && out->scope == QT_LEARN_BLOCK && (set & 1u << OBJECTIVE))
        rc = qt_fail(
            err, QT_E_USAGE, NULL, NULL,
            "scope=block takes no objective: its loss is the squared error of a layer's output");
    return rc;
}

/* ---- finding parameters --------------------------------------------------------------------- */

static bool anything_learns(const struct qt_run *run)
{
    if (run->opt->learn && run->opt->learn->norms)
        return true;
    for (size_t i = 0; i < run->plan.count; i++)
        if (!run->plan.items[i].copied && qt_spec_learns(&run->plan.items[i].packed->spec))
            return true;
    return false;
}

static int check_data(const struct qt_run *run, struct qt_err *err)
{
    const struct qt_calibration *data = run->opt->calibration;
    if (!data || data->file)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "learning runs the model: it needs calibration data%s",
                       data ? ", not a calibration file" : "");
    if (data->samples < 2)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "learning needs at least 2 windows of calibration data: one is held out");
    return QT_OK;
}

/* Adds a linear of a decoder layer if it is quantized. */
static int add_linear(struct qt_learner *l, const char *name, size_t layer, size_t index,
                      struct qt_err *err)
{
    size_t item;
    int rc = qt_run_find_item(&item, l->run, name, err);
    if (rc < 0 || l->run->plan.items[item].copied)
        return rc;
    const struct qt_packed *p = l->run->plan.items[item].packed;
    l->matrices[l->nmatrices++] = (struct learn_matrix){.item = item,
                                                        .layer = layer,
                                                        .index = index,
                                                        .learns = qt_spec_learns(&p->spec),
                                                        .packed = *p};
    return QT_OK;
}

static bool is_added(const struct qt_learner *l, size_t item)
{
    for (size_t i = 0; i < l->nmatrices; i++)
        if (l->matrices[i].item == item)
            return true;
    return false;
}

/* Adds quantized tensors outside of the decoder layers: they have no parameters, but the forward
 * pass decodes them. */
static void add_others(struct qt_learner *l)
{
    for (size_t i = 0; i < l->run->plan.count; i++) {
        const struct qt_plan_item *item = &l->run->plan.items[i];
        if (item->copied || is_added(l, i))
            continue;
        l->matrices[l->nmatrices++] =
            (struct learn_matrix){.item = i, .layer = l->info.layers, .packed = *item->packed};
    }
}

static int add_norms(struct qt_learner *l, size_t layer, struct qt_err *err)
{
    const struct qt_norm *norms;
    size_t n = qt_model_norms(&norms, l->model, layer);
    for (size_t i = 0; i < n; i++) {
        struct learn_norm *norm = &l->norms[l->nnorms];
        *norm = (struct learn_norm){.layer = layer, .index = i};
        int rc = qt_run_find_item(&norm->item, l->run, norms[i].weight, err);
        if (rc < 0)
            return rc;
        const struct qt_plan_item *item = &l->run->plan.items[norm->item];
        if (!item->copied || !qt_dtype_is_weight(item->tensor->dtype))
            return qt_fail(
                err, QT_E_UNSUPPORTED, item->tensor->file, item->tensor->name,
                "cannot be tuned: only norms that are copied and hold floating-point weights can");
        l->nnorms++;
    }
    return QT_OK;
}

static int find_parameters(struct qt_learner *l, struct qt_err *err)
{
    const struct qt_linear *linear;
    /* scope=block: the loss of a layer does not depend on the final norm. */
    size_t layers = l->info.layers, last = layers + (l->opt.scope == QT_LEARN_MODEL);
    int rc = QT_OK;
    QT_TRY(qt_array_new(&l->matrices, l->run->plan.count, sizeof *l->matrices, err));
    QT_TRY(qt_array_new(&l->norms, (layers + 1) * QT_LAYER_NORMS, sizeof *l->norms, err));
    QT_TRY(qt_array_new(&l->layer_first, layers + 2, sizeof *l->layer_first, err));
    for (size_t layer = 0; layer < layers; layer++)
        for (size_t i = 0, n = qt_model_linears(&linear, l->model, layer); i < n; i++)
            QT_TRY(add_linear(l, linear[i].weight, layer, i, err));
    add_others(l);
    for (size_t layer = 0; l->opt.norms && layer < last; layer++)
        QT_TRY(add_norms(l, layer, err));
done:
    return rc;
}

/* The held-out windows are evenly spread. */
static int split_windows(struct qt_learner *l, struct qt_err *err)
{
    size_t n = l->data->samples, held = (size_t)((double)n * l->opt.held_out + 0.5);
    held = held ? held : 1;
    int rc = QT_OK;
    QT_TRY(qt_array_new(&l->train, n, sizeof *l->train, err));
    QT_TRY(qt_array_new(&l->held, held, sizeof *l->held, err));
    for (size_t i = 0; i < n; i++) {
        if (l->nheld < held && i == (2 * l->nheld + 1) * n / (2 * held))
            l->held[l->nheld++] = i;
        else
            l->train[l->ntrain++] = i;
    }
done:
    return rc;
}

/* ---- the student ---------------------------------------------------------------------------- */

static bool student_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    const struct qt_learner *l = ctx;
    return l->source.shape(l->source.ctx, name, ndim, shape);
}

static int student_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    const struct qt_learner *l = ctx;
    const struct qt_plan_item *items = l->run->plan.items;
    for (size_t i = 0; i < l->nmatrices; i++)
        if (strcmp(items[l->matrices[i].item].tensor->name, name) == 0)
            return qt_packed_weights(dst, &l->matrices[i].packed, err);
    for (size_t i = 0; i < l->nnorms; i++)
        if (strcmp(items[l->norms[i].item].tensor->name, name) == 0) {
            void *stored;
            int rc = learn_norm_stored(&stored, dst, l, &l->norms[i], err);
            qt_free(stored);
            return rc;
        }
    return l->source.load(l->source.ctx, name, dst, err);
}

/* Decodes a matrix in backend memory, if its codes are there. */
static int student_place(void *ctx, struct qt_backend *be, const char *name, float *dst, bool *done,
                         struct qt_err *err)
{
    struct qt_learner *l = ctx;
    const struct qt_plan_item *items = l->run->plan.items;
    *done = false;
    for (size_t i = 0; i < l->nmatrices; i++)
        if (strcmp(items[l->matrices[i].item].tensor->name, name) == 0) {
            *done = l->matrices[i].coded != NULL;
            return *done ? learn_coded_decode(dst, l, &l->matrices[i], err) : QT_OK;
        }
    for (size_t i = 0; i < l->nnorms; i++)
        if (strcmp(items[l->norms[i].item].tensor->name, name) == 0)
            return QT_OK;
    return l->source.place(l->source.ctx, be, name, dst, done, err);
}

/* ---- opening -------------------------------------------------------------------------------- */

static int open_model(struct qt_learner *l, struct qt_err *err)
{
    int rc = QT_OK;
    l->source = qt_weights_of_ckpt(l->run->ckpt);
    l->student = (struct qt_weights){.dir = l->source.dir,
                                     .ctx = l,
                                     .shape = student_shape,
                                     .load = student_load,
                                     .place = student_place};
    QT_TRY(qt_model_open(&l->model, &l->source, err));
    l->info = *qt_model_info(l->model);
    const char *part = qt_model_cannot(l->model, QT_USE_LEARN);
    if (part)
        return qt_fail(err, QT_E_UNSUPPORTED, l->source.dir, NULL, "learning does not support %s",
                       part);
    if (l->data->seqlen < 2 || l->data->seqlen > l->info.max_positions)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "windows have %zu tokens, but the model takes 2 to %zu", l->data->seqlen,
                       l->info.max_positions);
    QT_TRY(find_parameters(l, err));
    QT_TRY(split_windows(l, err));
    QT_TRY(learn_params_new(l, err));
done:
    return rc;
}

int qt_learn_open(struct qt_learner **out, struct qt_run *run, struct qt_err *err)
{
    struct qt_learner *l = NULL;
    int rc = QT_OK;
    *out = NULL;
    if (!anything_learns(run)) {
        if (run->opt->learn)
            return qt_fail(err, QT_E_USAGE, NULL, NULL,
                           "--learn tunes tensors whose scheme has learn=1, but no scheme has it");
        return QT_OK;
    }
    QT_TRY(check_data(run, err));
    QT_TRY(qt_array_new(&l, 1, sizeof *l, err));
    l->run = run;
    l->data = run->opt->calibration;
    l->be = l->data->backend;
    if (run->opt->learn)
        l->opt = *run->opt->learn;
    else
        QT_TRY(qt_learn_parse(&l->opt, "", err));
    QT_TRY(open_model(l, err));
    *out = l;
done:
    if (rc < 0)
        qt_learn_close(l);
    return rc;
}

json_t *qt_learn_identity(const struct qt_learner *l)
{
    return json_pack("{s:s, s:b}", "options", l->opt.text, "tune_norms", l->opt.norms);
}

void qt_learn_close(struct qt_learner *l)
{
    if (!l)
        return;
    learn_work_close(l);
    for (size_t i = 0; l->matrices && i < l->nmatrices; i++)
        qt_packed_free(&l->matrices[i].packed);
    learn_params_free(&l->params);
    qt_model_close(l->model);
    qt_free(l->matrices);
    qt_free(l->norms);
    qt_free(l->layer_first);
    qt_free(l->train);
    qt_free(l->held);
    qt_free(l->points);
    qt_free(l);
}

/* ---- running -------------------------------------------------------------------------------- */

/* Whether training has changed a parameter in [first, end). If not, the codes are those on disk. */
static bool has_moved(const struct qt_learner *l, size_t first, size_t end)
{
    for (size_t i = first; i < end; i++)
        if (l->params.delta[i] != 0)
            return true;
    return false;
}

/* Returns the range of parameters that are trained together with parameter `at`. */
static void range_of(size_t *first, size_t *end, const struct qt_learner *l, size_t at)
{
    *first = 0;
    *end = l->params.count;
    for (size_t layer = 0; l->opt.scope == QT_LEARN_BLOCK && layer < l->info.layers; layer++)
        if (at >= l->layer_first[layer] && at < l->layer_first[layer + 1]) {
            *first = l->layer_first[layer];
            *end = l->layer_first[layer + 1];
        }
}

static bool is_changed(const struct qt_learner *l, size_t at)
{
    size_t first, end;
    range_of(&first, &end, l, at);
    return has_moved(l, first, end);
}

/* Moves on to the next layer, with a new optimizer state. */
static void next_layer(struct learn_progress *at)
{
    at->layer++;
    at->step = at->best_step = at->stale = at->loss_steps = 0;
    at->loss_sum = 0;
}

static int train_layers(struct qt_learner *l, struct qt_err *err)
{
    int rc = QT_OK;
    while (l->at.layer < l->info.layers) {
        size_t first = l->layer_first[l->at.layer], end = l->layer_first[l->at.layer + 1];
        if (first < end) {
            QT_TRY(learn_layer_enter(l, err));
            QT_TRY(learn_train(l, first, end, learn_layer_loss, err));
        }
        next_layer(&l->at);
        QT_TRY(learn_params_save(l, err));
    }
done:
    return rc;
}

/* Stores the results of an interrupted run in the matrices: finished layers, or all. */
static int apply_finished(struct qt_learner *l, struct qt_err *err)
{
    int rc = QT_OK;
    if (l->opt.scope == QT_LEARN_MODEL)
        return l->at.done && has_moved(l, 0, l->params.count)
                   ? learn_params_apply(l, 0, l->params.count, err)
                   : QT_OK;
    for (size_t layer = 0; layer < l->at.layer && rc == QT_OK; layer++)
        if (has_moved(l, l->layer_first[layer], l->layer_first[layer + 1]))
            rc = learn_params_apply(l, l->layer_first[layer], l->layer_first[layer + 1], err);
    return rc;
}

static uint32_t matrices_crc(const struct qt_learner *l)
{
    uint32_t crc = 0;
    for (size_t i = 0; i < l->nmatrices; i++)
        for (size_t s = 0; s < l->matrices[i].packed.nsections; s++) {
            const struct qt_section *section = &l->matrices[i].packed.section[s];
            crc = qt_crc32(crc, section->data, section->bytes);
        }
    return crc;
}

static int train(struct qt_learner *l, struct qt_err *err)
{
    int rc = QT_OK;
    if (l->at.done)
        return QT_OK;
    l->be->half = true;
    l->saved_at = qt_clock();
    QT_TRY(learn_work_open(l, err));
    if (l->opt.scope == QT_LEARN_BLOCK)
        QT_TRY(train_layers(l, err));
    else
        QT_TRY(learn_train(l, 0, l->params.count, learn_model_loss, err));
    learn_work_close(l);
    l->at.done = 1;
    l->at.crc = matrices_crc(l);
    QT_TRY(learn_params_save(l, err)); /* from here on, tensors on disk may be overwritten */
done:
    l->be->half = l->be->same_weights = false;
    return rc;
}

/* ---- rewriting ------------------------------------------------------------------------------ */

/* Reads the item's entry and sets `value` under `key`; takes ownership of `value`. *differs is
 * false if the entry has that value already: then an interrupted run has journaled it, and the
 * tensor on disk is up to date. Otherwise *before is the value that the entry had. The caller
 * releases *entry and *before. */
static int update_entry(json_t **entry, json_t **before, bool *differs, struct qt_run *run,
                        size_t item, const char *key, json_t *value, struct qt_err *err)
{
    int rc = qt_run_entry(entry, run, item, err);
    *before = json_incref(json_object_get(*entry, key));
    *differs = rc == QT_OK && !json_equal(*before, value);
    if (*differs && json_object_set(*entry, key, value) < 0)
        rc = qt_no_memory(err, NULL);
    json_decref(value);
    return rc;
}

static int rewrite_matrix(struct qt_learner *l, const struct learn_matrix *m, struct qt_err *err)
{
    struct qt_run *run = l->run;
    const struct qt_tensor *t = run->plan.items[m->item].tensor;
    struct qt_error error;
    struct qt_blob blob = {0};
    json_t *entry, *before;
    bool differs;
    int rc;
    QT_TRY(update_entry(&entry, &before, &differs, run, m->item, "sections",
                        qt_run_sections_json(&m->packed), err));
    if (!differs)
        goto done;
    QT_TRY(qt_run_check_interrupted(run, err));
    QT_TRY(qt_ckpt_read(&blob, run->ckpt, t, err));
    struct qt_matrix w = {blob.data, t->dtype, t->shape[0], t->shape[1], t->file, t->name};
    QT_TRY(qt_packed_compare(&error, &m->packed, &w, err));
    if (json_object_set_new(entry, "error", qt_run_error_json(&error)) < 0) {
        rc = qt_no_memory(err, NULL);
        goto done;
    }
    QT_TRY(qt_writer_reopen(run->writer, t->name, err));
    for (size_t s = 0; s < m->packed.nsections; s++)
        QT_TRY(qt_writer_put(run->writer, run->first[m->item] + s, m->packed.section[s].data,
                             m->packed.section[s].bytes, 0, err));
    QT_TRY(qt_run_replace_item(run, m->item, json_incref(entry), err));
done:
    json_decref(entry);
    json_decref(before);
    qt_blob_free(&blob);
    return rc;
}

static int rewrite_norm(struct qt_learner *l, const struct learn_norm *norm, struct qt_err *err)
{
    struct qt_run *run = l->run;
    const struct qt_tensor *t = run->plan.items[norm->item].tensor;
    json_t *entry = NULL, *before = NULL;
    void *stored = NULL;
    float *w = NULL;
    bool differs;
    int rc;
    QT_TRY(qt_array_new(&w, t->count, sizeof *w, err));
    QT_TRY(learn_norm_stored(&stored, w, l, norm, err));
    QT_TRY(update_entry(&entry, &before, &differs, run, norm->item, "crc32",
                        qt_crc_json(qt_crc32(0, stored, t->nbytes)), err));
    if (!differs)
        goto done;
    QT_TRY(qt_run_check_interrupted(run, err));
    if (!json_object_get(entry, "source_crc32"))
        json_object_set(entry, "source_crc32", before);
    QT_TRY(qt_writer_reopen(run->writer, t->name, err));
    QT_TRY(qt_writer_put(run->writer, run->first[norm->item], stored, t->nbytes, 0, err));
    QT_TRY(qt_run_replace_item(run, norm->item, json_incref(entry), err));
done:
    json_decref(entry);
    json_decref(before);
    qt_free(stored);
    qt_free(w);
    return rc;
}

static int rewrite(struct qt_learner *l, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < l->nmatrices && rc == QT_OK; i++)
        if (l->matrices[i].learns && is_changed(l, l->matrices[i].first))
            rc = rewrite_matrix(l, &l->matrices[i], err);
    for (size_t i = 0; i < l->nnorms && rc == QT_OK; i++)
        if (is_changed(l, l->norms[i].first))
            rc = rewrite_norm(l, &l->norms[i], err);
    return rc;
}

/* ---- report --------------------------------------------------------------------------------- */

static json_t *curve_json(const struct qt_learner *l)
{
    json_t *curve = json_array();
    bool failed = !curve;
    for (size_t i = 0; i < l->at.points; i++) {
        const struct learn_point *p = &l->points[i];
        json_t *row = json_pack("{s:I, s:f, s:f}", "step", (json_int_t)p->step, "train", p->train,
                                "held_out", p->held_out);
        if (l->opt.scope == QT_LEARN_BLOCK)
            failed |= json_object_set_new(row, "block", json_integer((json_int_t)p->layer)) < 0;
        failed |= json_array_append_new(curve, row) < 0;
    }
    if (!failed)
        return curve;
    json_decref(curve);
    return NULL;
}

static json_t *report_json(const struct qt_learner *l, double start)
{
    json_t *report = json_pack(
        "{s:s, s:b, s:I, s:{s:I, s:I}, s:{s:I, s:I}, s:s, s:f, s:f, s:o}", "options", l->opt.text,
        "tune_norms", l->opt.norms, "parameters", (json_int_t)l->params.count, "matrices",
        "backend", (json_int_t)l->ncoded, "host", (json_int_t)(l->nmatrices - l->ncoded), "windows",
        "train", (json_int_t)l->ntrain, "held_out", (json_int_t)l->nheld, "optimizer",
        LEARN_OPTIMIZER, "training_seconds", l->seconds, "seconds", qt_clock() - start, "curve",
        curve_json(l));
    if (report && l->opt.scope == QT_LEARN_MODEL &&
        json_object_set_new(report, "best_step", json_integer((json_int_t)l->at.best_step)) < 0) {
        json_decref(report);
        return NULL;
    }
    return report;
}

/* ---- running all steps ---------------------------------------------------------------------- */

/* The journal unit that is committed when all tensors are rewritten. */
static const char unit_name[] = "(learning)";

/* After training, an interrupted run may have overwritten some matrices, so they are read
 * unchecked; resume() checks them by their CRC. */
static int read_matrices(struct qt_learner *l, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < l->nmatrices && rc == QT_OK; i++) {
        struct learn_matrix *m = &l->matrices[i];
        rc = l->at.done ? qt_run_read_unchecked(&m->packed, l->run, m->item, err)
                        : qt_run_read_back(&m->packed, l->run, m->item, err);
    }
    return rc;
}

/* Applies the progress that an interrupted run has saved. */
static int resume(struct qt_learner *l, struct qt_err *err)
{
    int rc = apply_finished(l, err);
    if (rc == QT_OK && l->at.done && l->at.crc != matrices_crc(l))
        rc = qt_fail(
            err, QT_E_RESOURCE, l->run->opt->out_dir, NULL,
            "data read back differs from the data written; start again with --force, not --resume");
    return rc;
}

int qt_learn_run(struct qt_learner *l, struct qt_err *err)
{
    double start = qt_clock();
    bool found;
    int rc = QT_OK;
    if (qt_writer_done(l->run->writer, unit_name))
        return qt_writer_record(&l->run->learning, l->run->writer, unit_name, err);
    QT_TRY(learn_params_load(&found, l, err));
    QT_TRY(read_matrices(l, err));
    QT_TRY(found ? resume(l, err) : learn_params_read(l, err));
    QT_TRY(train(l, err));
    QT_TRY(qt_comm_meet(l->run->opt->comm, QT_OK, err)); /* all have read what is rewritten */
    if (qt_comm_rank(l->run->opt->comm) > 0)
        return QT_OK;
    QT_TRY(rewrite(l, err));
    l->run->learning = report_json(l, start);
    if (!l->run->learning)
        return qt_no_memory(err, NULL);
    QT_TRY(qt_writer_commit(l->run->writer, unit_name, l->run->learning, err));
done:
    return rc;
}
