/* The items of a run: quantized or copied, stored, journaled, read back. */
#include "pack/run.h"

#include <math.h>
#include <string.h>

/* ---- manifest entries ----------------------------------------------------------------------- */

static json_t *shape_json(const size_t *shape, int ndim)
{
    json_t *a = json_array();
    for (int i = 0; i < ndim; i++)
        if (json_array_append_new(a, json_integer((json_int_t)shape[i])) < 0) {
            json_decref(a);
            return NULL;
        }
    return a;
}

/* JSON has no infinity, which is the SQNR of an exact result. */
static json_t *real_json(double v)
{
    return isfinite(v) ? json_real(v) : json_null();
}

json_t *qt_run_error_json(const struct qt_error *e)
{
    return json_pack("{s:o, s:o, s:o, s:o}", "mse", real_json(qt_error_mse(e)), "sqnr_db",
                     real_json(qt_error_sqnr_db(e)), "cosine", real_json(qt_error_cosine(e)),
                     "max_abs", real_json(e->max_abs));
}

/* Calibration results of a tensor; null without a Hessian. */
static json_t *hessian_json(const struct qt_run_hessian *h, const struct qt_solve_report *r)
{
    const struct qt_factor *f = h->factor;
    json_t *out, *tokens = NULL, *missing = NULL;
    if (h->is_expert) {
        tokens = json_integer((json_int_t)h->routed_tokens);
        missing = json_integer((json_int_t)h->missing_tokens);
    }
    if (h->fallback)
        out = json_pack("{s:s, s:o*, s:o*}", "fallback", h->fallback, "tokens", tokens,
                        "missing_tokens", missing);
    else if (f)
        out = json_pack("{s:o, s:b, s:I, s:o, s:o, s:o*, s:o*}", "damp", real_json(f->damp),
                        "damp_raised", f->damping == QT_DAMP_RAISED, "dead_channels",
                        (json_int_t)f->dead, "error_before", real_json(r->before), "error_after",
                        real_json(r->after_descent), "tokens", tokens, "missing_tokens", missing);
    else {
        json_decref(tokens);
        json_decref(missing);
        out = json_null();
    }
    return out;
}

/* Replaces the errors in what hessian_json has made. */
static void set_errors(json_t *hessian, const struct qt_solve_report *r)
{
    json_object_set_new(hessian, "error_before", real_json(r->before));
    json_object_set_new(hessian, "error_after", real_json(r->after_descent));
}

json_t *qt_run_sections_json(const struct qt_packed *p)
{
    json_t *sections = json_array();
    for (size_t i = 0; i < p->nsections; i++) {
        const struct qt_section *s = &p->section[i];
        json_t *section = json_pack("{s:s, s:s, s:o, s:o}", "name", s->name, "dtype",
                                    qt_dtype_name(s->dtype), "shape", shape_json(s->shape, s->ndim),
                                    "crc32", qt_crc_json(qt_crc32(0, s->data, s->bytes)));
        if (json_array_append_new(sections, section) < 0) {
            json_decref(sections);
            return NULL; /* makes the caller's json_pack fail */
        }
    }
    return sections;
}

/* Takes ownership of hessian, distribution and input (NULL: none), also on failure. */
static json_t *entry_json(const struct qt_tensor *t, const struct qt_packed *p,
                          const struct qt_error *error, json_t *hessian, json_t *distribution,
                          json_t *input, uint32_t source_crc)
{
    json_t *entry =
        json_pack("{s:s, s:s, s:o, s:i, s:f, s:s, s:o, s:o, s:o, s:o, s:o, s:o*}", "scheme",
                  p->spec.text, "layout", p->layout, "shape", shape_json(t->shape, 2), "scale_exp2",
                  p->scale_exp2, "bpw", qt_packed_bpw(p), "source_dtype", qt_dtype_name(t->dtype),
                  "source_crc32", qt_crc_json(source_crc), "sections", qt_run_sections_json(p),
                  "error", qt_run_error_json(error), "hessian", hessian, QT_RUN_DISTRIBUTION,
                  distribution, QT_RUN_INPUT, input);
    int failed = 0;
    if (entry && t->encoding)
        failed |= json_object_set_new(entry, "source_encoding", json_string(t->encoding));
    if (entry && !isnan(qt_packed_paper_bpw(p)))
        failed |= json_object_set_new(entry, "paper_bpw", json_real(qt_packed_paper_bpw(p)));
    if (!failed)
        return entry;
    json_decref(entry);
    return NULL;
}

/* ---- making items --------------------------------------------------------------------------- */

int qt_run_interrupted(struct qt_run *run, struct qt_err *err)
{
    qt_run_settle(run, NULL);
    return qt_fail(err, QT_E_INTERRUPTED, run->opt->out_dir, NULL,
                   "interrupted after %zu of %zu tensors", run->finished, run->plan.count);
}

int qt_run_check_interrupted(struct qt_run *run, struct qt_err *err)
{
    const struct qt_quantize_options *opt = run->opt;
    return opt->interrupted && opt->interrupted() ? qt_run_interrupted(run, err) : QT_OK;
}

int qt_run_entry(json_t **out, struct qt_run *run, size_t i, struct qt_err *err)
{
    const struct qt_plan_item *item = &run->plan.items[i];
    const char *name = item->tensor->name;
    *out = NULL;
    int rc = qt_run_settle(run, err);
    if (rc < 0)
        return rc;
    if (!run->reused)
        return qt_writer_record(out, run->writer, name, err);
    return item->copied ? qt_container_copied_json(out, run->reused, name, err)
                        : qt_entry_json(out, qt_container_find(run->reused, name), err);
}

static void count_item(struct qt_run *run, size_t i)
{
    run->finished++;
    run->done_bytes += (double)run->plan.items[i].tensor->nbytes;
    qt_log_progress(run->opt->log, "quantize", run->done_bytes, (double)run->plan.source_bytes);
}

void qt_run_resume(struct qt_run *run)
{
    for (size_t i = 0; i < run->plan.count; i++)
        if (!run->made[i] && qt_writer_done(run->writer, run->plan.items[i].tensor->name)) {
            run->made[i] = true;
            count_item(run, i);
        }
}

/* Takes ownership of the entry, also on failure. */
static int commit_item(struct qt_run *run, size_t i, json_t *entry, struct qt_err *err)
{
    if (!entry)
        return qt_no_memory(err, NULL);
    int rc = qt_writer_commit(run->writer, run->plan.items[i].tensor->name, entry, err);
    json_decref(entry);
    return rc;
}

int qt_run_replace_item(struct qt_run *run, size_t i, json_t *entry, struct qt_err *err)
{
    if (!entry)
        return qt_no_memory(err, NULL);
    int rc = qt_writer_commit(run->writer, run->plan.items[i].tensor->name, entry, err);
    json_decref(entry);
    return rc;
}

int qt_run_fall_back(char *why, size_t size, const struct qt_run *run, const struct qt_tensor *t,
                     const char *reason, struct qt_err *err)
{
    if (run->opt->strict)
        return qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name,
                       "%s; without --strict it would be quantized by search", reason);
    snprintf(why, size, "%s; quantized by search", reason);
    qt_log_message(run->opt->log, QT_LOG_WARNING, "%s: %s", t->name, why);
    return QT_OK;
}

/* ---- finishing items ------------------------------------------------------------------------ */

/* An item whose values are decided: what is left to do needs no backend. Owns its members. */
struct qt_run_item {
    struct qt_run *run;
    size_t i;
    struct qt_packed packed; /* of a quantized item */
    bool borrowed;           /* `packed` belongs to the caller */
    struct qt_matrix w;
    struct qt_blob blob;
    struct qt_error error;
    bool measured;                /* error is known */
    struct qt_rounding *rounding; /* NULL: `packed` is rounded */
    struct qt_solve_report report;
    json_t *hessian;
    json_t *input; /* NULL: none */
};

static void item_free(void *ctx)
{
    struct qt_run_item *f = ctx;
    qt_rounding_free(f->rounding);
    if (!f->borrowed)
        qt_packed_free(&f->packed);
    qt_blob_free(&f->blob);
    json_decref(f->hessian);
    json_decref(f->input);
    qt_free(f);
}

static int finish_quantized(void *ctx, struct qt_err *err)
{
    struct qt_run_item *f = ctx;
    struct qt_run *run = f->run;
    const double start = qt_clock();
    json_t *distribution;
    int rc;
    QT_TRY(qt_packed_complete(&f->packed, &f->w, f->measured ? NULL : &f->error, err));
    for (size_t s = 0; s < f->packed.nsections; s++)
        QT_TRY(qt_writer_put(run->writer, run->first[f->i] + s, f->packed.section[s].data,
                             f->packed.section[s].bytes, 0, err));
    QT_TRY(qt_run_distribution(&distribution, &f->w, err));
    QT_TRY(commit_item(run, f->i,
                       entry_json(run->plan.items[f->i].tensor, &f->packed, &f->error,
                                  json_incref(f->hessian), distribution, json_incref(f->input),
                                  qt_crc32(0, f->blob.data, f->blob.size)),
                       err));
    run->seconds[f->i] += qt_clock() - start;
done:
    return rc;
}

/* Values that are not finite are copied like all others, with a warning. */
static int check_nonfinite(const struct qt_run *run, const struct qt_tensor *t, size_t nonfinite,
                           struct qt_err *err)
{
    return nonfinite && run->opt->strict
               ? qt_fail(err, QT_E_INPUT, t->file, t->name, QT_NONFINITE "; --strict refuses them",
                         nonfinite, t->count)
               : QT_OK;
}

static void warn_of_nonfinite(const struct qt_run *run, size_t i)
{
    const struct qt_tensor *t = run->plan.items[i].tensor;
    if (run->nonfinite[i])
        qt_log_message(run->opt->log, QT_LOG_WARNING,
                       "%s: tensor %s: " QT_NONFINITE ": they are copied as they are", t->file,
                       t->name, run->nonfinite[i], t->count);
}

/* Copies in pieces and returns their pages to the kernel, so that large embeddings do not stay
 * resident. */
static int finish_copied(void *ctx, struct qt_err *err)
{
    enum { PIECE = 1 << 24 };
    struct qt_run_item *f = ctx;
    struct qt_run *run = f->run;
    const struct qt_tensor *t = run->plan.items[f->i].tensor;
    const size_t bits = qt_dtype_bits(t->dtype);
    uint32_t crc = 0;
    size_t nonfinite = 0;
    int rc = qt_ckpt_read(&f->blob, run->ckpt, t, err);
    if (rc < 0)
        return rc;
    for (size_t at = 0; at < f->blob.size; at += PIECE) {
        size_t n = qt_min_size(PIECE, f->blob.size - at);
        crc = qt_crc32(crc, f->blob.data + at, n);
        nonfinite += qt_count_nonfinite(f->blob.data + at, t->dtype, 8 * n / bits);
        QT_TRY(qt_writer_put(run->writer, run->first[f->i], f->blob.data + at, n, at, err));
        if (f->blob.map)
            qt_map_drop(f->blob.map, f->blob.data + at, n);
    }
    QT_TRY(check_nonfinite(run, t, nonfinite, err));
    run->nonfinite[f->i] = nonfinite;
    QT_TRY(
        commit_item(run, f->i,
                    json_pack("{s:s, s:o, s:o, s:o*, s:s*}", "dtype", qt_dtype_name(t->dtype),
                              "shape", shape_json(t->shape, t->ndim), "crc32", qt_crc_json(crc),
                              "nonfinite", nonfinite ? json_integer((json_int_t)nonfinite) : NULL,
                              "source_encoding", t->encoding),
                    err));
done:
    return rc;
}

/* Counts the items that are finished since the last call. */
static void collect(struct qt_run *run, size_t done)
{
    for (; run->collected < done; run->collected++) {
        const size_t i = run->handed_over[run->collected];
        warn_of_nonfinite(run, i);
        count_item(run, i);
    }
}

int qt_run_settle(struct qt_run *run, struct qt_err *err)
{
    int rc = run->behind ? qt_behind_wait(run->behind, err) : QT_OK;
    if (run->behind)
        collect(run, qt_behind_done(run->behind));
    return rc;
}

/* Finishes an item: in the background if the run does that. Takes ownership of f. */
static int hand_over(struct qt_run_item *f, int (*finish)(void *ctx, struct qt_err *err),
                     struct qt_err *err)
{
    enum { SMALL = 1 << 21 }; /* weights: an expert's matrix */
    struct qt_run *run = f->run;
    int rc = QT_OK;
    run->handed_over[run->nhanded_over++] = f->i;
    run->made[f->i] = true;
    if (run->behind) {
        rc = qt_behind_add(
            run->behind,
            &(struct qt_behind_job){.run = finish,
                                    .drop = item_free,
                                    .ctx = f,
                                    .small = run->plan.items[f->i].tensor->count <= SMALL},
            err);
        collect(run, qt_behind_done(run->behind));
        return rc;
    }
    rc = finish(f, err);
    item_free(f);
    if (rc == QT_OK)
        collect(run, run->nhanded_over);
    return rc;
}

static int item_new(struct qt_run_item **out, struct qt_run *run, size_t i, struct qt_err *err)
{
    int rc = qt_array_new(out, 1, sizeof **out, err);
    if (rc == QT_OK)
        **out = (struct qt_run_item){.run = run, .i = i};
    return rc;
}

int qt_run_copy_item(struct qt_run *run, size_t i, struct qt_err *err)
{
    struct qt_run_item *f;
    int rc = item_new(&f, run, i, err);
    return rc < 0 ? rc : hand_over(f, finish_copied, err);
}

static int prepare_item(struct qt_run_item *f, const struct qt_spec *spec, struct qt_factor *factor,
                        const struct qt_place *place, const struct qt_packed_part *part,
                        struct qt_err *err)
{
    struct qt_backend *be = factor ? factor->backend : f->run->opt->backend;
    f->measured = !factor && !f->run->behind;
    return f->measured ? qt_packed_quantize_on(be, &f->packed, spec, &f->w, NULL, &f->error, err)
                       : qt_rounding_new(&f->rounding, &f->packed, spec, &f->w, factor, be, place,
                                         part, &f->report, err);
}

int qt_run_item_new(struct qt_run_item **out, struct qt_run *run, size_t i,
                    const struct qt_run_hessian *hessian, const struct qt_arrange *arrange,
                    const struct qt_place *place, const struct qt_packed_part *part,
                    struct qt_err *err)
{
    const struct qt_plan_item *item = &run->plan.items[i];
    const struct qt_tensor *t = item->tensor;
    const double start = qt_clock();
    struct qt_spec spec = item->packed->spec;
    struct qt_run_item *f;
    int rc = item_new(&f, run, i, err);
    *out = NULL;
    if (rc < 0)
        return rc;
    spec.arrange = arrange;
    if (!hessian->factor && qt_spec_method(&spec) == QT_METHOD_GPTQ)
        qt_spec_set_method(&spec, QT_METHOD_SEARCH); /* recorded in the manifest */
    QT_TRY(qt_ckpt_read(&f->blob, run->ckpt, t, err));
    f->w = (struct qt_matrix){.data = f->blob.data,
                              .dtype = t->dtype,
                              .n = t->shape[0],
                              .k = t->shape[1],
                              .file = t->file,
                              .name = t->name};
    QT_TRY(prepare_item(f, &spec, hessian->factor, place, part, err));
    f->hessian = hessian_json(hessian, &f->report);
    if (hessian->input) { /* another thread will count its references */
        f->input = json_deep_copy(hessian->input);
        if (!f->input)
            QT_TRY(qt_no_memory(err, NULL));
    }
    run->seconds[i] = qt_clock() - start;
    *out = f;
    return QT_OK;
done:
    item_free(f);
    return rc;
}

bool qt_run_item_is_rounded(const struct qt_run_item *item)
{
    return !item->rounding || qt_rounding_done(item->rounding);
}

int qt_run_items_round(struct qt_run_item *const *items, size_t n, struct qt_err *err)
{
    const double start = qt_clock();
    struct qt_rounding **all = NULL;
    size_t count = 0;
    int rc;
    QT_TRY(qt_array_new(&all, n, sizeof *all, err));
    for (size_t i = 0; i < n; i++)
        if (items[i]->rounding)
            all[count++] = items[i]->rounding;
    QT_TRY(qt_rounding_run(all, count, err));
    for (size_t i = 0; i < n; i++) {
        struct qt_run_item *f = items[i];
        qt_rounding_free(f->rounding);
        f->rounding = NULL;
        if (json_object_get(f->hessian, "error_before"))
            set_errors(f->hessian, &f->report);
        f->run->seconds[f->i] += (qt_clock() - start) / (double)n;
    }
done:
    qt_free(all);
    return rc;
}

struct qt_packed *qt_run_item_packed(struct qt_run_item *item)
{
    return &item->packed;
}

int qt_run_item_finish(struct qt_packed *kept, struct qt_run_item *f,
                       const struct qt_solve_report *report, struct qt_err *err)
{
    int rc;
    if (report && json_object_get(f->hessian, "error_before"))
        set_errors(f->hessian, report);
    if (kept) {
        QT_TRY(qt_packed_complete(&f->packed, &f->w, NULL, err));
        *kept = f->packed;
        f->borrowed = true;
    }
    return hand_over(f, finish_quantized, err);
done:
    item_free(f);
    return rc;
}

void qt_run_item_free(struct qt_packed *kept, struct qt_run_item *f)
{
    if (f && kept) {
        *kept = f->packed;
        f->borrowed = true;
    }
    if (f)
        item_free(f);
}

int qt_run_make_item(struct qt_run *run, size_t i, struct qt_err *err)
{
    const struct qt_plan_item *item = &run->plan.items[i];
    struct qt_run_item *made;
    char why[128] = "";
    int rc;
    if (run->made[i])
        return QT_OK;
    rc = qt_run_check_interrupted(run, err);
    if (rc == QT_OK && item->copied)
        return qt_run_copy_item(run, i, err);
    if (rc == QT_OK && qt_spec_method(&item->packed->spec) == QT_METHOD_GPTQ)
        rc = qt_run_fall_back(why, sizeof why, run, item->tensor, QT_NO_HESSIAN, err);
    if (rc == QT_OK)
        rc = qt_run_item_new(&made, run, i, &(struct qt_run_hessian){.fallback = *why ? why : NULL},
                             NULL, NULL, NULL, err);
    if (rc < 0)
        return rc;
    rc = qt_run_items_round(&made, 1, err);
    if (rc < 0)
        qt_run_item_free(NULL, made);
    return rc < 0 ? rc : qt_run_item_finish(NULL, made, NULL, err);
}

/* ---- reading items back --------------------------------------------------------------------- */

int qt_run_find_item(size_t *out, const struct qt_run *run, const char *name, struct qt_err *err)
{
    const struct qt_tensor *t = qt_ckpt_find(run->ckpt, name);
    for (size_t i = 0; t && i < run->plan.count; i++)
        if (run->plan.items[i].tensor == t) {
            *out = i;
            return QT_OK;
        }
    return qt_fail(err, QT_E_INTERNAL, NULL, name, "not in the plan");
}

int qt_run_packed_new(struct qt_packed *out, const struct qt_run *run, size_t i, int scale_exp2,
                      struct qt_err *err)
{
    int rc = QT_OK;
    *out = *run->plan.items[i].packed;
    out->scale_exp2 = scale_exp2;
    for (size_t s = 0; s < out->nsections && rc == QT_OK; s++)
        rc = qt_array_new(&out->section[s].data, out->section[s].bytes, 1, err);
    return rc;
}

static int read_item(struct qt_packed *out, const struct qt_run *run, size_t i, const json_t *entry,
                     struct qt_err *err)
{
    int rc;
    const json_t *exp2 = json_object_get(entry, "scale_exp2");
    QT_TRY(qt_run_packed_new(out, run, i, (int)json_integer_value(exp2), err));
    for (size_t s = 0; s < out->nsections; s++)
        QT_TRY(qt_writer_get(run->writer, run->first[i] + s, out->section[s].data,
                             out->section[s].bytes, err));
done:
    return rc;
}

int qt_run_read_unchecked(struct qt_packed *out, struct qt_run *run, size_t i, struct qt_err *err)
{
    json_t *entry = NULL;
    int rc = qt_run_entry(&entry, run, i, err);
    *out = (struct qt_packed){0};
    if (rc == QT_OK)
        rc = read_item(out, run, i, entry, err);
    json_decref(entry);
    return rc;
}

int qt_run_read_back(struct qt_packed *out, struct qt_run *run, size_t i, struct qt_err *err)
{
    json_t *entry = NULL, *sections = NULL;
    int rc;
    *out = (struct qt_packed){0};
    QT_TRY(qt_run_entry(&entry, run, i, err));
    QT_TRY(read_item(out, run, i, entry, err));
    sections = qt_run_sections_json(out);
    if (!sections)
        rc = qt_no_memory(err, NULL);
    else if (!json_equal(sections, json_object_get(entry, "sections")))
        rc = qt_fail(
            err, QT_E_RESOURCE, run->opt->out_dir, run->plan.items[i].tensor->name,
            "data read back differs from the data written; start again with --force, not --resume");
done:
    json_decref(entry);
    json_decref(sections);
    return rc;
}

/* ---- the partly quantized model ------------------------------------------------------------- */

static bool current_shape(void *ctx, const char *name, int *ndim, size_t shape[QT_MAX_DIMS])
{
    const struct qt_run *run = ctx;
    const struct qt_weights source = qt_weights_of_ckpt(run->ckpt);
    return source.shape(source.ctx, name, ndim, shape);
}

static int current_load(void *ctx, const char *name, float *dst, struct qt_err *err)
{
    struct qt_run *run = ctx;
    const struct qt_weights source = qt_weights_of_ckpt(run->ckpt);
    struct qt_packed packed = {0};
    size_t i;
    int rc = qt_run_find_item(&i, run, name, err);
    if (rc < 0)
        return rc;
    if (run->plan.items[i].copied || !run->made[i])
        return source.load(source.ctx, name, dst, err);
    rc = qt_run_read_back(&packed, run, i, err);
    if (rc == QT_OK)
        rc = qt_packed_weights(dst, &packed, err);
    qt_packed_free(&packed);
    return rc;
}

static bool current_unchanged(void *ctx, const char *name)
{
    const struct qt_run *run = ctx;
    size_t i;
    return qt_run_find_item(&i, run, name, NULL) == QT_OK &&
           (run->plan.items[i].copied || !run->made[i]);
}

struct qt_weights qt_run_weights(struct qt_run *run)
{
    return (struct qt_weights){
        .dir = qt_ckpt_dir(run->ckpt),
        .ctx = run,
        .shape = current_shape,
        .load = current_load,
        .unchanged = current_unchanged,
        .fake_quant = {.ctx = &run->acts, .input = run->acts.act ? qt_act_plan_input : NULL}};
}
