/*
 * The driver: checkpoint -> plan -> container. Tensor by tensor in source order, one packed matrix
 * in memory; the writer journals every finished tensor, so that an interrupted run can go on.
 */
#include "pack/scheme.h"

#include <math.h>
#include <string.h>

struct run {
    const struct qt_ckpt *ckpt;
    const struct qt_quantize_options *opt;
    struct qt_plan plan;
    struct qt_tensor *stored; /* what the container will hold */
    size_t nstored;
    char **names; /* of sections, owned; parallel to stored, NULL for copied tensors */
    struct qt_writer *writer;
};

/* ---- identity
 * ------------------------------------------------------------------------------------ */

/* Names, types, shapes and the ends of the data of all tensors: cheap, and changes with the source.
 */
static int source_sample_crc(uint32_t *out, const struct qt_ckpt *ckpt, struct qt_err *err)
{
    enum { SAMPLE = 4096 };
    uint32_t crc = 0;
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++) {
        const struct qt_tensor *t = qt_ckpt_tensor(ckpt, i);
        struct qt_blob blob;
        int rc = qt_ckpt_read(&blob, ckpt, t, err);
        if (rc < 0)
            return rc;
        size_t n = qt_min_size(SAMPLE, blob.size);
        crc = qt_crc32(crc, t->name, strlen(t->name) + 1);
        crc = qt_crc32(crc, &t->dtype, sizeof t->dtype);
        crc = qt_crc32(crc, t->shape, (size_t)t->ndim * sizeof *t->shape);
        crc = qt_crc32(crc, blob.data, n);
        crc = qt_crc32(crc, blob.data + blob.size - n, n);
        qt_blob_free(&blob);
    }
    *out = crc;
    return QT_OK;
}

static json_t *crc_json(uint32_t crc)
{
    return json_sprintf("%08x", crc);
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int identity_new(json_t **out, const struct run *run, struct qt_err *err)
{
    uint32_t crc;
    json_t *files = json_array(), *rules = json_array();
    const struct qt_plan_options *opt = &run->opt->plan;
    struct qt_spec def;
    *out = NULL;
    int rc = source_sample_crc(&crc, run->ckpt, err);
    if (rc == QT_OK)
        rc = qt_spec_parse(&def, opt->scheme, err);
    for (size_t i = 0; rc == QT_OK && i < qt_ckpt_file_count(run->ckpt); i++) {
        size_t size;
        const char *path = qt_ckpt_file(run->ckpt, i, &size);
        json_array_append_new(
            files, json_pack("{s:s, s:I}", "name", base_name(path), "bytes", (json_int_t)size));
    }
    for (size_t i = 0; rc == QT_OK && i < opt->nrules; i++)
        json_array_append_new(rules,
                              json_sprintf("%s=%s", opt->rules[i].regex, opt->rules[i].spec));
    if (rc == QT_OK)
        *out = json_pack("{s:{s:s, s:s}, s:{s:O, s:o}, s:{s:s, s:O}}", "tool", "name", "qtool",
                         "version", QT_VERSION, "source", "files", files, "sample_crc32",
                         crc_json(crc), "options", "scheme", def.text, "tensor", rules);
    json_decref(files);
    json_decref(rules);
    if (rc == QT_OK && !*out)
        rc = qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
    return rc;
}

/* ---- what will be stored
 * ------------------------------------------------------------------------- */

static int stored_add_section(struct run *run, const struct qt_plan_item *item,
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

static int stored_new(struct run *run, struct qt_err *err)
{
    size_t n = 0;
    int rc = QT_OK;
    for (size_t i = 0; i < run->plan.count; i++)
        n += run->plan.items[i].why ? 1 : run->plan.items[i].packed.nsections;
    QT_TRY(qt_array_new(&run->stored, n, sizeof *run->stored, err));
    QT_TRY(qt_array_new(&run->names, n, sizeof *run->names, err));
    for (size_t i = 0; i < run->plan.count; i++) {
        const struct qt_plan_item *item = &run->plan.items[i];
        if (item->why)
            run->stored[run->nstored++] = *item->tensor;
        for (size_t s = 0; s < item->packed.nsections; s++)
            QT_TRY(stored_add_section(run, item, &item->packed.section[s], err));
    }
done:
    return rc;
}

/* ---- tensors
 * --------------------------------------------------------------------------------------- */

static json_t *shape_json(const size_t *shape, int ndim)
{
    json_t *a = json_array();
    for (int i = 0; i < ndim; i++)
        json_array_append_new(a, json_integer((json_int_t)shape[i]));
    return a;
}

/* Infinity (an exact result) has no JSON number. */
static json_t *real_json(double v)
{
    return isfinite(v) ? json_real(v) : json_null();
}

static json_t *error_json(const struct qt_error *e)
{
    return json_pack("{s:o, s:o, s:o, s:o}", "mse", real_json(qt_error_mse(e)), "sqnr_db",
                     real_json(qt_error_sqnr_db(e)), "cosine", real_json(qt_error_cosine(e)),
                     "max_abs", real_json(e->max_abs));
}

static json_t *entry_json(const struct qt_tensor *t, const struct qt_packed *p,
                          const struct qt_error *error, uint32_t source_crc)
{
    json_t *sections = json_array();
    for (size_t i = 0; i < p->nsections; i++) {
        const struct qt_section *s = &p->section[i];
        json_array_append_new(sections, json_pack("{s:s, s:s, s:o, s:o}", "name", s->name, "dtype",
                                                  qt_dtype_name(s->dtype), "shape",
                                                  shape_json(s->shape, s->ndim), "crc32",
                                                  crc_json(qt_crc32(0, s->data, s->bytes))));
    }
    return json_pack("{s:s, s:s, s:o, s:i, s:f, s:s, s:o, s:o, s:o}", "scheme", p->spec.text,
                     "layout", p->layout, "shape", shape_json(t->shape, 2), "scale_exp2",
                     p->scale_exp2, "bpw", qt_packed_bpw(p), "source_dtype",
                     qt_dtype_name(t->dtype), "source_crc32", crc_json(source_crc), "sections",
                     sections, "error", error_json(error));
}

static int quantize_tensor(json_t **entry, struct run *run, const struct qt_plan_item *item,
                           size_t first, struct qt_err *err)
{
    const struct qt_tensor *t = item->tensor;
    struct qt_packed packed = {0};
    struct qt_error error;
    struct qt_blob blob = {0};
    int rc = QT_OK;
    QT_TRY(qt_ckpt_read(&blob, run->ckpt, t, err));
    struct qt_matrix w = {blob.data, t->dtype, t->shape[0], t->shape[1], t->file, t->name};
    QT_TRY(qt_packed_quantize(&packed, &item->packed.spec, &w, NULL, &error, err));
    *entry = entry_json(t, &packed, &error, qt_crc32(0, blob.data, blob.size));
    for (size_t s = 0; s < packed.nsections; s++)
        QT_TRY(qt_writer_put(run->writer, first + s, packed.section[s].data,
                             packed.section[s].bytes, 0, err));
done:
    qt_blob_free(&blob);
    qt_packed_free(&packed);
    return rc;
}

/* In pieces that are given back to the kernel, so that large embeddings do not stay resident. */
static int copy_tensor(json_t **entry, struct run *run, const struct qt_plan_item *item,
                       size_t index, struct qt_err *err)
{
    enum { PIECE = 1 << 24 };
    const struct qt_tensor *t = item->tensor;
    struct qt_blob blob;
    uint32_t crc = 0;
    int rc = qt_ckpt_read(&blob, run->ckpt, t, err);
    if (rc < 0)
        return rc;
    for (size_t at = 0; at < blob.size; at += PIECE) {
        size_t n = qt_min_size(PIECE, blob.size - at);
        crc = qt_crc32(crc, blob.data + at, n);
        QT_TRY(qt_writer_put(run->writer, index, blob.data + at, n, at, err));
        if (blob.map)
            qt_map_drop(blob.map, blob.data + at, n);
    }
    *entry = json_pack("{s:s, s:o, s:o}", "dtype", qt_dtype_name(t->dtype), "shape",
                       shape_json(t->shape, t->ndim), "crc32", crc_json(crc));
done:
    qt_blob_free(&blob);
    return rc;
}

/* Makes, stores and journals one tensor, or takes its record from the journal. */
static int run_item(json_t *manifest, struct run *run, const struct qt_plan_item *item,
                    size_t first, struct qt_err *err)
{
    const char *group = item->why ? "copied" : "tensors", *name = item->tensor->name;
    const json_t *record = qt_writer_done(run->writer, name);
    json_t *entry = NULL;
    int rc = QT_OK;
    if (record) {
        entry = json_deep_copy(record);
    } else if (item->why) {
        rc = copy_tensor(&entry, run, item, first, err);
    } else {
        rc = quantize_tensor(&entry, run, item, first, err);
    }
    if (rc == QT_OK && !entry)
        rc = qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
    if (rc == QT_OK && !record)
        rc = qt_writer_commit(run->writer, name, entry, err);
    if (rc < 0)
        json_decref(entry);
    else
        json_object_set_new(json_object_get(manifest, group), name, entry);
    return rc;
}

static int run_items(json_t *manifest, struct run *run, struct qt_err *err)
{
    const struct qt_quantize_options *opt = run->opt;
    double done = 0, total = (double)run->plan.source_bytes;
    size_t first = 0;
    for (size_t i = 0; i < run->plan.count; i++) {
        const struct qt_plan_item *item = &run->plan.items[i];
        if (opt->interrupted && opt->interrupted())
            return qt_fail(err, QT_E_INTERRUPTED, opt->out_dir, NULL,
                           "interrupted after %zu of %zu tensors", i, run->plan.count);
        int rc = run_item(manifest, run, item, first, err);
        if (rc < 0)
            return rc;
        first += item->why ? 1 : item->packed.nsections;
        done += (double)item->tensor->nbytes;
        qt_log_progress(opt->log, "quantize", done, total);
    }
    return QT_OK;
}

/* ---- the run
 * --------------------------------------------------------------------------------------- */

static int copy_side_files(struct run *run, struct qt_err *err)
{
    static const char *const names[] = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char *path;
        int rc = qt_path_join(&path, qt_ckpt_dir(run->ckpt), names[i], err);
        if (rc == QT_OK && qt_path_exists(path))
            rc = qt_writer_copy_file(run->writer, path, err);
        qt_free(path);
        if (rc < 0)
            return rc;
    }
    return QT_OK;
}

static json_t *manifest_new(const struct run *run, json_t *identity)
{
    const struct qt_plan *plan = &run->plan;
    return json_pack("{s:s, s:i, s:O, s:{s:f, s:I, s:I}, s:{}, s:{}}", "format", "qtool",
                     "format_version", QT_FORMAT_VERSION, "identity", identity, "totals", "bpw",
                     qt_plan_bpw(plan), "quantized_weights", (json_int_t)plan->weights, "bytes",
                     (json_int_t)plan->output_bytes, "tensors", "copied");
}

static void run_close(struct run *run)
{
    qt_writer_close(run->writer);
    for (size_t i = 0; run->names && i < run->nstored; i++)
        qt_free(run->names[i]);
    qt_free(run->names);
    qt_free(run->stored);
    qt_plan_free(&run->plan);
}

int qt_quantize(struct qt_quantize_report *out, const struct qt_ckpt *ckpt,
                const struct qt_quantize_options *opt, struct qt_err *err)
{
    struct run run = {.ckpt = ckpt, .opt = opt};
    struct qt_writer_options wopt = {.force = opt->force, .resume = opt->resume};
    json_t *identity = NULL, *manifest = NULL;
    int rc = QT_OK;
    QT_TRY(qt_plan_new(&run.plan, ckpt, &opt->plan, err));
    QT_TRY(identity_new(&identity, &run, err));
    QT_TRY(stored_new(&run, err));
    QT_TRY(
        qt_writer_open(&run.writer, opt->out_dir, run.stored, run.nstored, identity, &wopt, err));
    manifest = manifest_new(&run, identity);
    if (!manifest) {
        rc = qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
        goto done;
    }
    QT_TRY(copy_side_files(&run, err));
    QT_TRY(run_items(manifest, &run, err));
    QT_TRY(qt_writer_finish(run.writer, manifest, err));
    *out = (struct qt_quantize_report){
        .quantized = run.plan.quantized,
        .copied = run.plan.count - run.plan.quantized,
        .bpw = qt_plan_bpw(&run.plan),
        .bytes = run.plan.output_bytes,
    };
done:
    /* Input that will not get better by trying again leaves nothing behind; the rest can resume. */
    if (rc == QT_E_INPUT || rc == QT_E_UNSUPPORTED)
        qt_writer_discard(run.writer);
    json_decref(identity);
    json_decref(manifest);
    run_close(&run);
    return rc;
}
