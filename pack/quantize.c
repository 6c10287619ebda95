/*
 * The driver: checkpoint -> plan -> container. Tensors are made in source order, one in memory at a
 * time; with calibration data the linears of the decoder layers come last (layers.c). Then the
 * parameters to learn are tuned through the whole model (learn/learn.c). The writer journals every
 * finished tensor, so that an interrupted run can be resumed.
 */
#include "pack/learn/learn.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- identity ------------------------------------------------------------------------------- */

/* Everything that determines the Hessians and the codes found with them; null without
 * calibration. */
static json_t *calibration_json(const struct qt_calibration *c, uint32_t config_crc,
                                uint32_t weights_crc)
{
    if (!c)
        return json_null();
    const char *backend = c->backend ? c->backend->name : NULL;
    if (c->file)
        return json_pack("{s:o, s:s*}", "file_crc32", qt_crc_json(qt_qcal_crc(c->file)), "backend",
                         backend);
    return json_pack("{s:I, s:I, s:I, s:o, s:o, s:o, s:s*}", "samples", (json_int_t)c->samples,
                     "seqlen", (json_int_t)c->seqlen, "seed", (json_int_t)c->seed, "ids_crc32",
                     qt_crc_json(qt_crc32(0, c->ids, c->samples * c->seqlen * sizeof *c->ids)),
                     "config_crc32", qt_crc_json(config_crc), "weights_crc32",
                     qt_crc_json(weights_crc), "backend", backend);
}

/* CRC of the data of all tensors. With a model run, the result for a tensor depends on all others,
 * also on those that were not reached when the run was interrupted. 0 if no model is run. */
static int weights_crc(uint32_t *crc, struct qt_run *run, struct qt_err *err)
{
    const struct qt_calibration *c = run->opt->calibration;
    double done = 0;
    *crc = 0;
    for (size_t i = 0; c && !c->file && i < qt_ckpt_count(run->ckpt); i++) {
        struct qt_blob blob;
        int rc = qt_run_check_interrupted(run, err);
        if (rc == QT_OK)
            rc = qt_ckpt_read(&blob, run->ckpt, qt_ckpt_tensor(run->ckpt, i), err);
        if (rc < 0)
            return rc;
        *crc = qt_crc32(*crc, blob.data, blob.size);
        done += (double)blob.size;
        qt_log_progress(run->opt->log, "read", done, (double)run->plan.source_bytes);
        qt_blob_free(&blob);
    }
    return QT_OK;
}

/* CRC of config.json, which determines how the model runs on calibration data; 0 without data.
 * before: the CRC at the start of the run, or NULL; QT_E_INPUT if it has changed. */
static int config_crc(uint32_t *crc, const struct qt_run *run, const uint32_t *before,
                      struct qt_err *err)
{
    const struct qt_calibration *c = run->opt->calibration;
    char *path = NULL;
    struct qt_map map = {0};
    int rc = QT_OK;
    *crc = 0;
    if (!c || c->file)
        return QT_OK;
    QT_TRY(qt_path_join(&path, qt_ckpt_dir(run->ckpt), "config.json", err));
    QT_TRY(qt_map_open(&map, path, err));
    *crc = qt_crc32(0, map.data, map.size);
    if (before && *crc != *before)
        rc = qt_fail(err, QT_E_INPUT, path, NULL, "changed during the run");
done:
    qt_map_close(&map);
    qt_free(path);
    return rc;
}

static int identity_new(json_t **out, struct qt_run *run, const struct qt_learner *learner,
                        uint32_t config, struct qt_err *err)
{
    uint32_t crc, weights;
    json_t *files = json_array(), *rules = json_array();
    const struct qt_plan_options *opt = &run->opt->plan;
    struct qt_spec def;
    int failed = 0;
    *out = NULL;
    int rc = qt_ckpt_sample_crc(&crc, run->ckpt, err);
    if (rc == QT_OK)
        rc = weights_crc(&weights, run, err);
    if (rc == QT_OK)
        rc = qt_spec_parse(&def, opt->scheme, err);
    for (size_t i = 0; rc == QT_OK && i < qt_ckpt_file_count(run->ckpt); i++) {
        size_t size;
        const char *path = qt_ckpt_file(run->ckpt, i, &size);
        failed |= json_array_append_new(files, json_pack("{s:o, s:I}", "name",
                                                         qt_json_name(qt_base_name(path)), "bytes",
                                                         (json_int_t)size));
    }
    for (size_t i = 0; rc == QT_OK && i < opt->nrules; i++)
        failed |= json_array_append_new(
            rules, json_sprintf("%s=%s", opt->rules[i].regex, opt->rules[i].spec));
    if (rc == QT_OK && !failed)
        *out = json_pack("{s:{s:s, s:s}, s:{s:O, s:o}, s:{s:s, s:O}, s:o}", "tool", "name", "qtool",
                         "version", QT_VERSION, "source", "files", files, "sample_crc32",
                         qt_crc_json(crc), "options", "scheme", def.text, "tensor", rules,
                         "calibration", calibration_json(run->opt->calibration, config, weights));
    if (*out && run->opt->backend && !run->opt->backend->host && !run->opt->calibration)
        failed |= json_object_set_new(*out, "backend", json_string(run->opt->backend->name));
    if (*out && learner)
        failed |= json_object_set_new(*out, "learning", qt_learn_identity(learner));
    if (*out && opt->kv)
        failed |= json_object_update_new(json_object_get(*out, "options"),
                                         json_pack("{s:i, s:s}", "kv", 4, "kv_keys",
                                                   qt_kv_keys_names[opt->kv - QT_KV_KEYS_CHANNEL]));
    json_decref(files);
    json_decref(rules);
    if (rc == QT_OK && (!*out || failed))
        rc = qt_no_memory(err, NULL);
    return rc;
}

/* ---- stored tensors ------------------------------------------------------------------------- */

static int stored_add_section(struct qt_run *run, const struct qt_plan_item *item,
                              const struct qt_section *s, struct qt_err *err)
{
    struct qt_tensor *t = &run->stored[run->nstored];
    char **name = &run->names[run->nstored];
    int rc = qt_string_format(name, err, "%s.q.%s", item->tensor->name, s->name);
    if (rc < 0)
        return rc;
    *t = (struct qt_tensor){.name = *name, .dtype = s->dtype, .ndim = s->ndim, .nbytes = s->bytes};
    memcpy(t->shape, s->shape, sizeof t->shape);
    t->count = s->bytes / (qt_dtype_bits(s->dtype) / 8);
    run->nstored++;
    return QT_OK;
}

static int stored_add_kv(struct qt_run *run, struct qt_err *err)
{
    run->kv.first = run->nstored;
    for (size_t i = 0; run->plan.kv.bytes && i < 2 * run->plan.kv.layers; i++) {
        struct qt_tensor *t = &run->stored[run->nstored];
        char **name = &run->names[run->nstored];
        int rc = qt_kv_tensor_name(name, i / 2, i % 2 ? "zero" : "scale", err);
        if (rc < 0)
            return rc;
        run->nstored++;
        *t = (struct qt_tensor){.name = *name,
                                .dtype = QT_F32,
                                .ndim = 2,
                                .shape = {run->plan.kv.heads, run->plan.kv.head_dim},
                                .count = run->plan.kv.heads * run->plan.kv.head_dim};
        t->nbytes = t->count * sizeof(float);
    }
    return QT_OK;
}

static int stored_new(struct qt_run *run, struct qt_err *err)
{
    size_t n = 2 * run->plan.kv.layers;
    int rc = QT_OK;
    for (size_t i = 0; i < run->plan.count; i++)
        n += run->plan.items[i].copied ? 1 : run->plan.items[i].packed->nsections;
    QT_TRY(qt_array_new(&run->stored, n, sizeof *run->stored, err));
    QT_TRY(qt_array_new(&run->names, n, sizeof *run->names, err));
    QT_TRY(qt_array_new(&run->first, run->plan.count, sizeof *run->first, err));
    QT_TRY(qt_array_new(&run->seconds, run->plan.count, sizeof *run->seconds, err));
    QT_TRY(qt_array_new(&run->made, run->plan.count, sizeof *run->made, err));
    QT_TRY(qt_array_new(&run->nonfinite, run->plan.count, sizeof *run->nonfinite, err));
    QT_TRY(qt_array_new(&run->handed_over, run->plan.count, sizeof *run->handed_over, err));
    for (size_t i = 0; i < run->plan.count; i++) {
        const struct qt_plan_item *item = &run->plan.items[i];
        run->first[i] = run->nstored;
        if (item->copied)
            run->stored[run->nstored++] = *item->tensor;
        for (size_t s = 0; s < item->packed->nsections; s++)
            QT_TRY(stored_add_section(run, item, &item->packed->section[s], err));
    }
    QT_TRY(stored_add_kv(run, err));
done:
    return rc;
}

/* ---- tensors -------------------------------------------------------------------------------- */

static int check_data(const struct qt_run *run, struct qt_err *err)
{
    const struct qt_calibration *c = run->opt->calibration;
    for (size_t i = 0; i < run->plan.count && (!c || c->file); i++) {
        const struct qt_plan_item *item = &run->plan.items[i];
        const enum qt_need need = qt_plan_item_needs(item);
        if (need == QT_NEEDS_DATA)
            return qt_fail(err, QT_E_USAGE, NULL, item->tensor->name,
                           "%s needs calibration data (--data), because it runs the model%s",
                           item->packed->spec.text, c ? ", not a calibration file" : "");
        if (need == QT_NEEDS_HESSIAN && !c)
            return qt_fail(err, QT_E_USAGE, NULL, item->tensor->name,
                           "%s needs a Hessian: calibration data or a calibration file (--data, "
                           "--calib)",
                           item->packed->spec.text);
    }
    if (run->plan.kv.keys == QT_KV_KEYS_STATIC && (!c || c->file))
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "static scales of 4-bit keys need calibration data (--data)%s",
                       c ? ": a calibration file does not hold them" : "");
    return QT_OK;
}

/* ---- sources -------------------------------------------------------------------------------- */

/* Paths of all files that the run reads. */
struct sources {
    const char **paths;
    char **owned; /* those of side files and indices */
    size_t count, nowned;
};

static void sources_free(struct sources *s)
{
    for (size_t i = 0; i < s->nowned; i++)
        qt_free(s->owned[i]);
    qt_free(s->owned);
    qt_free(s->paths);
}

static int sources_add(struct sources *s, const char *dir, const char *name, struct qt_err *err)
{
    int rc = qt_path_join(&s->owned[s->nowned], dir, name, err);
    if (rc == QT_OK)
        s->paths[s->count++] = s->owned[s->nowned++];
    return rc;
}

static int sources_list(struct sources *s, const struct qt_run *run, struct qt_err *err)
{
    static const char *const indices[] = {QT_INDEX_NAME, "pytorch_model.bin.index.json"};
    enum { INDICES = sizeof indices / sizeof *indices };
    const char *dir = qt_ckpt_dir(run->ckpt), *name;
    const size_t files = qt_ckpt_file_count(run->ckpt);
    size_t sides = 0, size;
    int rc;
    while (qt_side_file(sides))
        sides++;
    QT_TRY(qt_array_new(&s->owned, sides + INDICES, sizeof *s->owned, err));
    QT_TRY(qt_array_new(&s->paths, files + sides + INDICES + run->opt->ninputs, sizeof *s->paths,
                        err));
    for (size_t i = 0; i < files; i++)
        s->paths[s->count++] = qt_ckpt_file(run->ckpt, i, &size);
    for (size_t i = 0; (name = qt_side_file(i)) != NULL; i++)
        QT_TRY(sources_add(s, dir, name, err));
    for (size_t i = 0; i < INDICES; i++)
        QT_TRY(sources_add(s, dir, indices[i], err));
    for (size_t i = 0; i < run->opt->ninputs; i++)
        s->paths[s->count++] = run->opt->inputs[i];
done:
    return rc;
}

/* Entries in source order, whatever order the items were made in. */
static int write_entries(struct qt_json_out *out, struct qt_run *run, bool copied,
                         struct qt_err *err)
{
    int rc = qt_json_out_begin(out, copied ? "copied" : "tensors", '{', err);
    for (size_t i = 0; i < run->plan.count && rc == QT_OK; i++) {
        json_t *entry;
        if (run->plan.items[i].copied != copied)
            continue;
        rc = qt_run_entry(&entry, run, i, err);
        json_object_del(entry, QT_RUN_DISTRIBUTION); /* are for the report */
        json_object_del(entry, QT_RUN_INPUT);
        if (rc == QT_OK)
            rc = qt_json_out_value(out, run->plan.items[i].tensor->name, entry, err);
        json_decref(entry);
    }
    return rc < 0 ? rc : qt_json_out_end(out, err);
}

static int write_manifest(struct qt_run *run, json_t *identity, struct qt_err *err)
{
    const struct qt_plan *plan = &run->plan;
    const json_t *source = qt_ckpt_quantization(run->ckpt);
    struct qt_json_out out;
    json_t *head = NULL, *tail = NULL;
    int rc;
    QT_TRY(qt_writer_begin_manifest(&out, run->writer, err));
    head = json_pack("{s:s, s:i, s:O, s:{s:f, s:I, s:I}}", "format", "qtool", "format_version",
                     qt_plan_format_version(plan), "identity", identity, "totals", "bpw",
                     qt_plan_bpw(plan), "quantized_weights", (json_int_t)plan->weights, "bytes",
                     (json_int_t)plan->output_bytes);
    tail = json_pack("{s:o, s:O*, s:O*, s:O*}", QT_QUANTIZATION_KEY, qt_run_quantization(run),
                     "source_quantization", source, "activations", run->acts.report, "kv",
                     run->kv.entry);
    if (!head || !tail) {
        rc = qt_no_memory(err, NULL);
        goto done;
    }
    QT_TRY(qt_json_out_members(&out, head, err));
    QT_TRY(write_entries(&out, run, false, err));
    QT_TRY(write_entries(&out, run, true, err));
    QT_TRY(qt_json_out_members(&out, tail, err));
    QT_TRY(qt_json_out_finish(&out, err));
done:
    qt_json_out_close(&out);
    json_decref(head);
    json_decref(tail);
    return rc;
}

static int report_new(struct qt_quantize_report *out, struct qt_run *run, double start,
                      struct qt_err *err)
{
    out->quantized = run->plan.quantized;
    out->copied = run->plan.count - run->plan.quantized;
    out->bpw = qt_plan_bpw(&run->plan);
    out->paper_bpw = qt_plan_paper_bpw(&run->plan);
    out->bytes = run->plan.output_bytes;
    out->share = run->plan.share;
    out->nleft = qt_plan_left(out->left, &run->plan);
    for (size_t i = 0; i < run->plan.count; i++) {
        json_t *entry;
        if (!run->plan.items[i].copied)
            continue;
        int rc = qt_run_entry(&entry, run, i, err);
        if (rc < 0)
            return rc;
        const json_t *nonfinite = json_object_get(entry, "nonfinite");
        if (nonfinite && !out->nonfinite)
            out->nonfinite = run->plan.items[i].tensor->name;
        out->nonfinite_tensors += nonfinite != NULL;
        out->nonfinite_values += (uint64_t)json_integer_value(nonfinite);
        json_decref(entry);
    }
    return qt_run_report(&out->document, run, start, err);
}

/* Learning; then static scales of keys, which rank 0 finds while the others wait. */
static int finish_weights(struct qt_run *run, struct qt_learner *learner, struct qt_err *err)
{
    int rc = learner ? qt_learn_run(learner, err) : QT_OK;
    if (rc == QT_OK && qt_comm_rank(run->opt->comm) == 0)
        rc = qt_run_kv(run, err);
    return qt_comm_meet(run->opt->comm, rc, err);
}

static int finish_behind(struct qt_run *run, struct qt_err *err)
{
    const struct qt_quantize_options *opt = run->opt;
    const struct qt_backend *be = opt->calibration ? opt->calibration->backend : opt->backend;
    return be && !be->host ? qt_behind_open(&run->behind, err) : QT_OK;
}

static void run_close(struct qt_run *run)
{
    qt_behind_close(run->behind);
    qt_writer_close(run->writer);
    qt_container_close(run->reused);
    for (size_t i = 0; run->names && i < run->nstored; i++)
        qt_free(run->names[i]);
    json_decref(run->learning);
    json_decref(run->kv.entry);
    qt_free(run->seconds);
    qt_free(run->made);
    qt_free(run->nonfinite);
    qt_free(run->handed_over);
    qt_free(run->first);
    qt_free(run->names);
    qt_free(run->stored);
    qt_plan_free(&run->plan);
    qt_act_plan_free(&run->acts);
}

int qt_quantize(struct qt_quantize_report *out, const struct qt_ckpt *ckpt,
                const struct qt_quantize_options *opt, struct qt_err *err)
{
    struct qt_run run = {.ckpt = ckpt, .opt = opt};
    struct qt_writer_options wopt = {.force = opt->force, .resume = opt->resume, .comm = opt->comm};
    struct sources sources = {0};
    struct qt_learner *learner = NULL;
    json_t *identity = NULL;
    double start = qt_clock();
    uint32_t config, config_now;
    int rc = QT_OK;
    *out = (struct qt_quantize_report){0};
    QT_TRY(qt_plan_new(&run.plan, ckpt, &opt->plan, err));
    if (run.plan.quantized == 0)
        qt_log_message(opt->log, QT_LOG_WARNING, "nothing is quantized: all tensors are copied");
    if (run.plan.quantized && opt->calibration && !opt->learn &&
        qt_plan_needs(&run.plan, NULL) == QT_NEEDS_NOTHING)
        qt_log_message(opt->log, QT_LOG_WARNING,
                       "no scheme uses the calibration data: weights are the same without it");
    QT_TRY(qt_plan_review(&run.plan, ckpt, opt->strict, opt->log, err));
    QT_TRY(check_data(&run, err));
    QT_TRY(qt_plan_check_model(&run.plan, ckpt, err));
    QT_TRY(qt_learn_open(&learner, &run, err));
    QT_TRY(config_crc(&config, &run, NULL, err));
    QT_TRY(identity_new(&identity, &run, learner, config, err));
    QT_TRY(stored_new(&run, err));
    if (opt->resume && !opt->force)
        QT_TRY(qt_run_reuse(&run, identity, err));
    out->reused = run.reused != NULL;
    if (out->reused) {
        QT_TRY(report_new(out, &run, start, err));
        goto done;
    }
    QT_TRY(sources_list(&sources, &run, err));
    wopt.sources = sources.paths;
    wopt.nsources = sources.count;
    QT_TRY(
        qt_writer_open(&run.writer, opt->out_dir, run.stored, run.nstored, identity, &wopt, err));
    QT_TRY(qt_run_check_records(&run, err));
    QT_TRY(qt_run_copy_side_files(&run, err));
    qt_run_resume(&run);
    QT_TRY(finish_behind(&run, err));
    if (opt->calibration)
        QT_TRY(qt_run_layers(&run, err));
    QT_TRY(qt_run_make_items(&run, NULL, err));
    QT_TRY(finish_weights(&run, learner, err));
    QT_TRY(qt_ckpt_check_unchanged(ckpt, err));
    QT_TRY(config_crc(&config_now, &run, &config, err));
    QT_TRY(qt_run_gather_seconds(&run, err));
    QT_TRY(qt_run_log_ranks(&run, qt_clock() - start, err));
    QT_TRY(report_new(out, &run, start, err));
    QT_TRY(write_manifest(&run, identity, err));
    QT_TRY(qt_writer_finish(run.writer, err));
done:
    qt_run_settle(&run, NULL);
    if (rc == QT_E_INTERRUPTED && !err->file[0]) /* a parallel loop was stopped */
        qt_run_interrupted(&run, err);
    /* Bad input fails again: discard the output. After other errors the run can be resumed. */
    if (rc == QT_E_INPUT || rc == QT_E_UNSUPPORTED || rc == QT_E_USAGE)
        qt_writer_discard(run.writer);
    if (rc < 0) {
        json_decref(out->document);
        *out = (struct qt_quantize_report){0};
    }
    json_decref(identity);
    qt_learn_close(learner);
    run_close(&run);
    sources_free(&sources);
    return rc;
}
