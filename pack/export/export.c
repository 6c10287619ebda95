#include "pack/export/run.h"
#include "pack/roles.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

bool qt_export_is(const struct qt_spec *spec, const char *scheme)
{
    return strcmp(qt_scheme_name(spec->scheme), scheme) == 0;
}

bool qt_export_has_table(const struct qt_spec *spec, const char *table)
{
    const struct qt_param *p;
    for (size_t i = 0; (p = qt_scheme_param(spec->scheme, i)) != NULL; i++)
        if (strcmp(p->key, "table") == 0)
            return strcmp(p->choices[(size_t)spec->value[i]], table) == 0;
    return false;
}

bool qt_export_is_integer(const struct qt_spec *spec)
{
    return qt_export_is(spec, "int") || qt_export_has_table(spec, "int");
}

bool qt_export_has_zeros(const struct qt_spec *spec)
{
    return qt_export_is_integer(spec) && qt_spec_value(spec, "zero") != 0;
}

bool qt_export_module(char out[QT_TENSOR_NAME_MAX], const char *name)
{
    if (!qt_name_ends_in(name, ".weight"))
        return false;
    snprintf(out, QT_TENSOR_NAME_MAX, "%.*s", (int)(strlen(name) - strlen(".weight")), name);
    return true;
}

void qt_export_add(struct qt_export_matrix *m, const char *suffix, enum qt_dtype dtype, size_t rows,
                   size_t cols)
{
    struct qt_export_tensor *t = &m->tensor[m->ntensors++];
    *t = (struct qt_export_tensor){.dtype = dtype, .ndim = 2, .shape = {rows, cols}};
    snprintf(t->name, sizeof t->name, "%s%s", m->module, suffix);
    t->bytes = rows * cols * (qt_dtype_bits(dtype) / 8);
}

void qt_export_add_vector(struct qt_export_matrix *m, const char *suffix, enum qt_dtype dtype,
                          size_t count)
{
    qt_export_add(m, suffix, dtype, count, 1);
    m->tensor[m->ntensors - 1].ndim = 1;
}

void qt_export_floats(const struct qt_export_tensor *t, size_t first, const float *values,
                      size_t count)
{
    if (t->dtype == QT_F32) {
        memcpy((float *)(void *)t->data + first, values, count * sizeof *values);
        return;
    }
    uint16_t *dst = (uint16_t *)(void *)t->data + first;
    for (size_t i = 0; i < count; i++)
        dst[i] = t->dtype == QT_BF16 ? qt_f32_to_bf16(values[i]) : qt_f32_to_f16(values[i]);
}

int qt_export_check_groups(const struct qt_export_matrix *m, struct qt_err *err)
{
    size_t whole = 128;
    while (whole > 16 && m->k % whole != 0)
        whole /= 2;
    if (m->k % m->codes.group == 0)
        return QT_OK;
    return whole > 16
               ? qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                         "%zu channels are no multiple of the group of %zu; g=%zu fits", m->k,
                         m->codes.group, whole)
               : qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                         "%zu channels are no multiple of the group of %zu", m->k, m->codes.group);
}

int qt_export_check_shape(const struct qt_export_matrix *m, size_t channels, size_t rows,
                          struct qt_err *err)
{
    int rc = qt_export_check_groups(m, err);
    if (rc < 0)
        return rc;
    if (m->k % channels != 0)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "%zu channels are no multiple of %zu",
                       m->k, channels);
    if (m->n % rows != 0)
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "%zu rows are no multiple of %zu", m->n,
                       rows);
    return QT_OK;
}

bool qt_export_has_head(const struct qt_export *x)
{
    bool head = false;
    for (size_t i = 0; i < x->count; i++)
        head = head || x->matrix[i].head;
    return head;
}

bool qt_export_has_rows(const struct qt_export_matrix *m)
{
    const struct qt_param *p;
    for (size_t i = 0; (p = qt_scheme_param(m->spec->scheme, i)) != NULL; i++)
        if (strcmp(p->key, "g") == 0 && m->spec->value[i] == (double)m->k)
            return false;
    return m->codes.groups == 1;
}

int qt_export_check_uniform(const struct qt_export *x, struct qt_err *err)
{
    for (size_t i = 1; i < x->count; i++) {
        const struct qt_export_matrix *first = &x->matrix[0], *m = &x->matrix[i];
        const struct qt_code_info *a = &first->codes, *b = &m->codes;
        const bool rows = qt_export_has_rows(first);
        if (a->bits != b->bits || a->asymmetric != b->asymmetric || rows != qt_export_has_rows(m) ||
            (a->group != b->group && !rows))
            return qt_fail(err, QT_E_UNSUPPORTED, qt_container_dir(x->container), m->entry->name,
                           "%s needs one scheme for all matrices, but this one is %s and %s is %s; "
                           "compressed-tensors can hold both",
                           x->format->name, m->spec->text, first->entry->name, first->spec->text);
    }
    return QT_OK;
}

/* ---- plan ----------------------------------------------------------------------------------- */

float qt_export_round(float v, enum qt_dtype dtype)
{
    return dtype == QT_F16    ? qt_f16_to_f32(qt_f32_to_f16(v))
           : dtype == QT_BF16 ? qt_bf16_to_f32(qt_f32_to_bf16(v))
                              : v;
}

/* Sets *fit to whether this dtype can store all scales of the matrix. */
static int scales_fit(bool *fit, const struct qt_export *x, const struct qt_export_matrix *m,
                      struct qt_err *err)
{
    const struct qt_entry *e = m->entry;
    struct qt_blob blob;
    *fit = true;
    for (size_t i = 0; i < e->nsections; i++) {
        uint16_t bits;
        if (strcmp(e->section[i].name, "scale") != 0)
            continue;
        int rc = qt_ckpt_read(&blob, qt_container_ckpt(x->container), e->section[i].tensor, err);
        if (rc < 0)
            return rc;
        if (qt_crc32(0, blob.data, blob.size) != e->section[i].crc) {
            qt_blob_free(&blob);
            return qt_export_damaged(e->section[i].tensor, err);
        }
        for (size_t at = 0; at + sizeof bits <= blob.size && *fit; at += sizeof bits) {
            memcpy(&bits, blob.data + at, sizeof bits);
            const float exact = ldexpf(qt_f16_to_f32(bits), e->scale_exp2 + m->scale_shift);
            *fit = qt_export_round(exact, m->scale_dtype) == exact;
        }
        qt_blob_free(&blob);
    }
    return QT_OK;
}

static enum qt_dtype source_dtype(const struct qt_entry *e)
{
    static const enum qt_dtype kept[] = {QT_F16, QT_BF16};
    for (size_t i = 0; e->source_dtype && i < sizeof kept / sizeof *kept; i++)
        if (strcmp(e->source_dtype, qt_dtype_name(kept[i])) == 0)
            return kept[i];
    return QT_F32;
}

/* The dtype of weights or scales. */
static enum qt_dtype float_dtype(const struct qt_export *x, const struct qt_entry *e)
{
    if (x->format->plan)
        return x->format->scale_dtype;
    switch (x->opt->dtype) {
    case QT_EXPORT_F16:
        return QT_F16;
    case QT_EXPORT_BF16:
        return QT_BF16;
    case QT_EXPORT_F32:
        return QT_F32;
    default:
        return x->format->weights ? source_dtype(e) : x->format->scale_dtype;
    }
}

/* Says what the matrix is in the model, by its name. */
static void set_role(struct qt_export_matrix *m, const struct qt_export *x)
{
    const struct qt_tensor t = {
        .name = m->entry->name, .dtype = QT_F16, .ndim = 2, .shape = {m->n, m->k}};
    struct qt_role role = qt_role_of(qt_container_ckpt(x->container), &t);
    m->transposed = qt_stored_transposed(x->model_type, t.name);
    m->head = role.why && strcmp(role.why, "head") == 0;
    m->embedding = role.why && strcmp(role.why, "embedding") == 0;
}

static int unsupported(const struct qt_export *x, const struct qt_export_matrix *m,
                       const char *reason, struct qt_err *err)
{
    return qt_fail(err, QT_E_UNSUPPORTED, qt_container_dir(x->container), m->entry->name,
                   "%s cannot hold %s: %s", x->format->name, m->spec->text, reason);
}

/* True if the format has other scales than FP16, which no --dtype changes. */
static bool has_own_scales(const struct qt_spec *spec)
{
    return qt_export_has_table(spec, "mxfp4") || qt_export_has_table(spec, "nvfp4");
}

/* log2 of what tables are divided by: the values of the formats are integers, or those of E2M1. */
static int table_shift(const struct qt_spec *spec)
{
    return qt_export_has_zeros(spec)            ? 0
           : qt_export_has_table(spec, "int")   ? (int)qt_spec_value(spec, "bits") - 1
           : qt_export_has_table(spec, "iq4nl") ? 7
           : has_own_scales(spec)               ? 3
                                                : 0;
}

void qt_export_set_values(struct qt_export_matrix *m, const struct qt_packed *p)
{
    if (!qt_packed_code_info(&m->codes, p))
        m->codes = (struct qt_code_info){0};
    const int shift = table_shift(m->spec);
    for (size_t i = 0; shift && i < sizeof m->codes.value / sizeof *m->codes.value; i++)
        m->codes.value[i] = ldexpf(m->codes.value[i], shift);
    m->scale_shift = -shift;
    m->integer = qt_export_is_integer(m->spec);
}

/* Refuses what needs --lossy. */
static int check_exact(const struct qt_export *x, struct qt_export_matrix *m, const char *why,
                       struct qt_err *err)
{
    const bool stored =
        m->scale_dtype == QT_F16 && m->entry->scale_exp2 == 0 && m->scale_shift == 0;
    bool fit = true;
    if (!why && !x->format->weights && !stored) {
        int rc = scales_fit(&fit, x, m, err);
        if (rc < 0)
            return rc;
    }
    if (!fit)
        why = m->scale_dtype == QT_F16 ? "scales are outside the range of FP16"
                                       : "scales have more than the 8 bits of BF16";
    /* Dequantized weights are FP32. */
    m->rounded = why || (x->format->rounds && !(x->format->weights && m->scale_dtype == QT_F32));
    if (why && !x->opt->lossy)
        return qt_fail(err, QT_E_UNSUPPORTED, qt_container_dir(x->container), m->entry->name,
                       "%s cannot hold %s exactly: %s; --lossy rounds once", x->format->name,
                       m->spec->text, why);
    return QT_OK;
}

static int plan_matrix(struct run *run, size_t i, struct qt_err *err)
{
    struct qt_export *x = &run->x;
    struct qt_export_matrix *m = &x->matrix[i];
    const struct qt_entry *e = qt_container_entry(x->container, i);
    const char *why = NULL;
    struct qt_packed shape;
    int rc;
    m->entry = e;
    m->n = e->n;
    m->k = e->k;
    QT_TRY(qt_spec_read(&run->specs[i], e->spec, err));
    m->spec = &run->specs[i];
    QT_TRY(qt_packed_describe(&shape, m->spec, m->n, m->k, err));
    qt_export_set_values(m, &shape);
    if (!qt_export_module(m->module, e->name))
        return unsupported(x, m, "the tensor is not the .weight of a module", err);
    set_role(m, x);
    if (m->embedding && !x->format->embeddings)
        return unsupported(x, m, "the format has no quantized embeddings", err);
    const bool own = !x->format->weights && has_own_scales(m->spec);
    m->scale_dtype = own ? QT_F32 : float_dtype(x, e);
    enum qt_export_fit fit = qt_export_fit(&why, x->format, m->spec);
    if (fit == QT_EXPORT_NO)
        return unsupported(x, m, why, err);
    if (fit == QT_EXPORT_EXACT)
        why = NULL;
    if (!own && !x->format->weights && m->scale_dtype == QT_F32 && x->format->scale_dtype != QT_F32)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--dtype float32: %s has scales of 16 bits",
                       x->format->name);
    QT_TRY(check_exact(x, m, why, err));
    if (x->format->describe) {
        struct qt_err reason = {0};
        rc = x->format->describe(m, &reason);
        if (rc < 0)
            return unsupported(x, m, reason.reason, err);
    }
done:
    return rc;
}

/* The index of the matrix whose first section is this stored tensor; SIZE_MAX: none. */
static size_t matrix_at(const struct qt_export *x, const struct qt_tensor *t)
{
    const char *cut = strstr(t->name, ".q.");
    char name[QT_TENSOR_NAME_MAX + 1];
    for (; cut; cut = strstr(cut + 1, ".q.")) {
        snprintf(name, sizeof name, "%.*s", (int)(cut - t->name), t->name);
        const struct qt_entry *e = qt_container_find(x->container, name);
        if (e && e->section[0].tensor == t)
            return (size_t)(e - qt_container_entry(x->container, 0));
    }
    return SIZE_MAX;
}

static void add_tensor(struct run *run, struct qt_tensor t)
{
    run->tensors[run->ntensors++] = t;
    run->bytes += t.nbytes;
}

static void add_item(struct run *run, struct item item)
{
    const struct qt_export_matrix *m =
        item.copied || item.stack ? NULL : &run->x.matrix[item.matrix];
    item.first = run->ntensors;
    item.ntensors = m ? m->ntensors : 1;
    if (item.stack) /* finish_stacks describes it */
        add_tensor(run, (struct qt_tensor){0});
    if (item.copied) {
        struct qt_tensor t = *item.copied;
        if (qt_export_is_turned(&run->x, &t)) {
            t.shape[0] = item.copied->shape[1];
            t.shape[1] = item.copied->shape[0];
        }
        add_tensor(run, t);
    }
    for (size_t i = 0; m && i < m->ntensors; i++) {
        const struct qt_export_tensor *from = &m->tensor[i];
        struct qt_tensor t = {
            .name = from->name, .dtype = from->dtype, .ndim = from->ndim, .nbytes = from->bytes};
        memcpy(t.shape, from->shape, sizeof t.shape);
        add_tensor(run, t);
    }
    for (size_t i = item.first; i < run->ntensors; i++)
        item.bytes += run->tensors[i].nbytes;
    run->items[run->nitems++] = item;
}

static int finish_stacks(struct run *run, struct qt_err *err)
{
    for (size_t i = 0; i < run->nitems; i++) {
        struct item *item = &run->items[i];
        struct qt_tensor *t = &run->tensors[item->first];
        if (!item->stack)
            continue;
        int rc = qt_export_stack_tensor(t, run, &run->stacks[item->stack - 1], err);
        if (rc < 0)
            return rc;
        item->bytes = t->nbytes;
        run->bytes += t->nbytes;
    }
    return QT_OK;
}

/* Lists what is written, in the order of the container's files. */
static int list_items(struct run *run, struct qt_err *err)
{
    struct qt_export *x = &run->x;
    const struct qt_ckpt *ckpt = qt_container_ckpt(x->container);
    const size_t stored = qt_ckpt_count(ckpt);
    int rc;
    QT_TRY(qt_array_new(&run->items, stored + 1, sizeof *run->items, err));
    QT_TRY(qt_array_new(&run->tensors, stored + QT_EXPORT_TENSORS * x->count + 1,
                        sizeof *run->tensors, err));
    QT_TRY(qt_array_new(&x->copied, stored + 1, sizeof *x->copied, err));
    for (size_t i = 0; i < stored; i++) {
        const struct qt_tensor *t = qt_ckpt_tensor(ckpt, i);
        const size_t matrix = matrix_at(x, t);
        struct item item = {.matrix = matrix}, items[QT_EXPORT_TENSORS];
        size_t count;
        if (matrix == SIZE_MAX && !qt_container_is_copied(x->container, t->name))
            continue;
        if (matrix == SIZE_MAX)
            item.copied = x->copied[x->ncopied++] = t;
        QT_TRY(qt_export_stack_add(items, &count, run, &item,
                                   item.copied ? t->name : x->matrix[matrix].entry->name, err));
        for (size_t k = 0; k < count; k++)
            add_item(run, items[k]);
    }
    QT_TRY(finish_stacks(run, err));
done:
    return rc;
}

static int load_config(struct qt_export *x, struct qt_err *err)
{
    char *path;
    int rc = qt_path_join(&path, qt_container_dir(x->container), "config.json", err);
    if (rc == QT_OK && qt_path_exists(path))
        rc = qt_json_load_lenient(&x->config, path, (size_t)1 << 26, err);
    else if (rc == QT_OK && x->format->config)
        rc = qt_fail(err, QT_E_INPUT, path, NULL,
                     "missing: runtimes look for the options of %s there; copy it from the "
                     "checkpoint",
                     x->format->name);
    x->model_type = json_string_value(json_object_get(x->config, "model_type"));
    qt_free(path);
    return rc;
}

static int plan(struct run *run, struct qt_err *err)
{
    struct qt_export *x = &run->x;
    int rc;
    x->count = qt_container_count(x->container);
    if (x->count == 0)
        return qt_fail(err, QT_E_UNSUPPORTED, qt_container_dir(x->container), NULL,
                       "nothing in it is quantized");
    QT_TRY(qt_array_new(&x->matrix, x->count + 1, sizeof *x->matrix, err));
    QT_TRY(qt_array_new(&run->specs, x->count + 1, sizeof *run->specs, err));
    QT_TRY(load_config(x, err));
    for (size_t i = 0; i < x->count; i++) {
        QT_TRY(qt_stop_check(err));
        QT_TRY(plan_matrix(run, i, err));
    }
    if (x->opt->fp8_inputs && !x->format->fp8_inputs)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--fp8-inputs: %s cannot ask for it; compressed-tensors can",
                       x->format->name);
    if (x->format->check)
        QT_TRY(x->format->check(x, err));
    QT_TRY(list_items(run, err));
    if (x->format->describe && !x->format->plan)
        qt_export_warn(x);
    if (x->format->fused)
        QT_TRY(qt_export_warn_fused(x, err));
    if (x->format->plan)
        QT_TRY(x->format->plan(x, &run->bytes, err));
done:
    return rc;
}

/* ---- the run -------------------------------------------------------------------------------- */

static int copy_side_files(struct run *run, struct qt_err *err)
{
    const char *name, *why, *dir = qt_container_dir(run->x.container);
    int rc = QT_OK;
    for (size_t i = 0; rc == QT_OK && (name = qt_side_file(i)) != NULL; i++) {
        char *path;
        if (strcmp(name, "config.json") == 0)
            continue;
        rc = qt_side_file_find(&path, &why, dir, name, err);
        if (rc == QT_OK && path)
            rc = qt_output_copy(run->x.out, path, err);
        qt_free(path);
    }
    return rc;
}

/* Settles everything that determines the output bytes. */
static int identity_new(json_t **out, const struct qt_export *x, struct qt_err *err)
{
    static const char *const dtypes[] = {"auto", "float16", "bfloat16", "float32"};
    char *path = NULL, *text = NULL;
    size_t size;
    int rc;
    *out = NULL;
    QT_TRY(qt_path_join(&path, qt_container_dir(x->container), "qtool.json", err));
    QT_TRY(qt_file_read(&text, &size, path, (size_t)1 << 28, err));
    *out = json_pack("{s:{s:s, s:s}, s:{s:o}, s:s, s:{s:s, s:b, s:b, s:I}}", "tool", "name",
                     "qtool", "version", QT_VERSION, "container", "manifest_crc32",
                     qt_crc_json(qt_crc32(0, text, size)), "format", x->format->name, "options",
                     "dtype", dtypes[x->opt->dtype], "lossy", x->opt->lossy, "fp8_inputs",
                     x->opt->fp8_inputs, "max_shard_bytes", (json_int_t)x->opt->max_shard_bytes);
    if (!*out)
        rc = qt_no_memory(err, NULL);
done:
    qt_free(text);
    qt_free(path);
    return rc;
}

/* ||exported - container|| / ||container|| */
static double relative_error(const struct qt_error *e)
{
    return e->sum_w2 > 0 ? sqrt(e->sum_e2 / e->sum_w2) : 0;
}

static json_t *rounded_json(const struct run *run)
{
    json_t *list = json_object();
    for (size_t i = 0; i < run->x.count; i++) {
        const struct qt_error *e = &run->x.matrix[i].error;
        if (!run->x.matrix[i].rounded)
            continue;
        if (json_object_set_new(list, run->x.matrix[i].entry->name,
                                json_pack("{s:f, s:f}", "relative", relative_error(e), "max_abs",
                                          e->max_abs)) < 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static int record_new(json_t **out, const struct run *run, json_t *identity, struct qt_err *err)
{
    *out = json_pack("{s:s, s:O, s:I, s:o}", "format", run->x.format->name, "identity", identity,
                     "bytes", (json_int_t)run->bytes, "rounded", rounded_json(run));
    return *out ? QT_OK : qt_no_memory(err, NULL);
}

static int open_output(struct run *run, const json_t *identity, struct qt_err *err)
{
    const struct qt_ckpt *ckpt = qt_container_ckpt(run->x.container);
    const size_t files = qt_ckpt_file_count(ckpt);
    size_t size;
    int rc = qt_array_new(&run->sources, files + 1, sizeof *run->sources, err);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < files; i++)
        run->sources[i] = qt_ckpt_file(ckpt, i, &size);
    const struct qt_writer_options opt = {
        .force = run->x.opt->force, .sources = run->sources, .nsources = files};
    return qt_output_open(&run->x.out, run->x.opt->out_dir, identity, &opt, err);
}

static int write_all(struct run *run, struct qt_err *err)
{
    struct qt_export *x = &run->x;
    if (x->format->write)
        return x->format->write(x, err);
    int rc;
    QT_TRY(qt_export_write_shards(run, err));
    QT_TRY(copy_side_files(run, err));
    QT_TRY(qt_export_write_config(x, err));
done:
    return rc;
}

static void set_report(struct qt_export_report *out, const struct run *run)
{
    *out = (struct qt_export_report){
        .matrices = run->x.count,
        .copied = run->x.ncopied,
        .bytes = run->bytes,
    };
    for (size_t i = 0; i < run->x.count; i++) {
        if (!run->x.matrix[i].rounded)
            continue;
        out->rounded++;
        out->worst = fmax(out->worst, relative_error(&run->x.matrix[i].error));
    }
}

static void run_free(struct run *run)
{
    if (run->x.format->release)
        run->x.format->release(&run->x);
    qt_output_close(run->x.out);
    qt_export_stacks_free(run);
    qt_free(run->sources);
    json_decref(run->x.config);
    qt_free(run->x.matrix);
    qt_free(run->x.copied);
    qt_free(run->items);
    qt_free(run->data);
    qt_free(run->tensors);
    qt_free(run->specs);
}

int qt_export(struct qt_export_report *report, const struct qt_container *c,
              const struct qt_export_options *opt, struct qt_err *err)
{
    struct run run = {.x = {.container = c, .opt = opt, .format = opt->format}};
    json_t *identity = NULL, *record = NULL;
    int rc;
    *report = (struct qt_export_report){0};
    QT_TRY(plan(&run, err));
    if (!opt->dry_run) {
        QT_TRY(identity_new(&identity, &run.x, err));
        QT_TRY(open_output(&run, identity, err));
        QT_TRY(write_all(&run, err));
        QT_TRY(record_new(&record, &run, identity, err));
        QT_TRY(qt_output_finish(run.x.out, record, err));
    }
    set_report(report, &run);
done:
    if (rc < 0 && run.x.out)
        qt_output_discard(run.x.out);
    json_decref(identity);
    json_decref(record);
    run_free(&run);
    return rc;
}
