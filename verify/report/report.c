/* The inputs of a report: what they are, and which belong together. */
#include "verify/report/report.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_DOCUMENT = 256 << 20 };

double member(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

const char *member_text(const json_t *object, const char *key)
{
    return json_string_value(json_object_get(object, key));
}

/* ---- subjects ------------------------------------------------------------------------------- */

static bool has_label(const struct qt_report *r, const char *label)
{
    for (size_t i = 0; i < r->nsubjects; i++)
        if (strcmp(r->subjects[i].label, label) == 0)
            return true;
    return false;
}

/* The last component of the path or, if another subject has this label, the path, with a number
 * if need be. */
static int make_label(char **out, const struct qt_report *r, const char *path, struct qt_err *err)
{
    char *whole = NULL;
    int rc;
    *out = NULL;
    QT_TRY(qt_string_copy(&whole, path, err));
    for (size_t n = strlen(whole); n > 1 && whole[n - 1] == '/'; n--)
        whole[n - 1] = '\0';
    QT_TRY(qt_string_copy(out, qt_base_name(whole), err));
    for (size_t number = 1; has_label(r, *out); number++) {
        qt_free(*out);
        *out = NULL;
        QT_TRY(number == 1 ? qt_string_copy(out, whole, err)
                           : qt_string_format(out, err, "%s (%zu)", whole, number));
    }
done:
    qt_free(whole);
    return rc;
}

static int add_subject(struct subject **out, struct qt_report *r, const char *path,
                       struct qt_err *err)
{
    int rc;
    QT_TRY(qt_array_grow(&r->subjects, &r->subjects_capacity, r->nsubjects + 1, sizeof *r->subjects,
                         err));
    struct subject *s = &r->subjects[r->nsubjects];
    *s = (struct subject){.bytes = NAN, .source_bytes = NAN, .bpw = NAN};
    QT_TRY(make_label(&s->label, r, path, err));
    rc = qt_string_copy(&s->path, path, err);
    if (rc < 0) {
        qt_free(s->label);
        goto done;
    }
    r->nsubjects++;
    *out = s;
done:
    return rc;
}

static void free_subject(struct subject *s)
{
    for (size_t i = 0; i < s->count; i++)
        qt_free(s->tensors[i].kind);
    qt_free(s->tensors);
    qt_free(s->path);
    qt_free(s->label);
    json_decref(s->run);
    qt_container_close(s->container);
}

/* ---- tensors -------------------------------------------------------------------------------- */

/* Components before the kind that every decoder layer has: they say nothing. */
static bool is_usual(const char *component, size_t size)
{
    static const char *const usual[] = {"self_attn", "mlp", "attn", "attention", "feed_forward"};
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++)
        if (strlen(usual[i]) == size && strncmp(usual[i], component, size) == 0)
            return true;
    return false;
}

static bool is_number(const char *component, size_t size)
{
    size_t digits = 0;
    while (digits < size && isdigit((unsigned char)component[digits]))
        digits++;
    return size > 0 && digits == size && size < 10;
}

/*
 * "model.layers.3.mlp.experts.17.down_proj.weight": layer 3, kind "experts.*.down_proj". Without a
 * number there is no layer, and all of the name is the kind.
 */
static int split_name(struct tensor_figures *t, struct qt_err *err)
{
    const char *name = t->name, *end = name + strlen(name);
    if (qt_name_ends_in(name, ".weight"))
        end -= strlen(".weight");
    int rc = qt_array_new(&t->kind, (size_t)(end - name) + 1, 1, err);
    if (rc < 0)
        return rc;
    size_t size = 0;
    t->layer = SIZE_MAX;
    for (const char *at = name, *next; at < end; at = next) {
        const char *dot = memchr(at, '.', (size_t)(end - at));
        next = dot ? dot + 1 : end;
        size_t length = (size_t)((dot ? dot : end) - at);
        if (t->layer == SIZE_MAX && is_number(at, length)) {
            t->layer = strtoul(at, NULL, 10);
            size = 0;
            if (dot && is_usual(next, strcspn(next, ".")) && next + strcspn(next, ".") < end)
                next += strcspn(next, ".") + 1;
            continue;
        }
        if (size)
            t->kind[size++] = '.';
        if (is_number(at, length))
            at = "*", length = 1;
        memcpy(t->kind + size, at, length);
        size += length;
    }
    t->kind[size] = '\0';
    return QT_OK;
}

static void set_errors(struct tensor_figures *t, const json_t *error)
{
    t->mse = member(error, "mse");
    t->cosine = member(error, "cosine");
    t->max_abs = member(error, "max_abs");
    t->sqnr_db = member(error, "sqnr_db");
}

/* The tensors of qtool-report.json by name. */
static json_t *run_tensors(const json_t *run)
{
    json_t *out = json_object(), *t;
    const json_t *list = json_object_get(run, "tensors");
    bool failed = !out;
    size_t i;
    json_array_foreach (list, i, t) {
        const char *name = member_text(t, "name");
        if (name)
            failed |= json_object_set(out, name, t) < 0;
    }
    if (!failed)
        return out;
    json_decref(out);
    return NULL;
}

static int container_tensors(struct subject *s, struct qt_err *err)
{
    const size_t count = qt_container_count(s->container);
    json_t *records = run_tensors(s->run);
    double weights = 0, bits = 0;
    int rc = records ? QT_OK : qt_no_memory(err, NULL);
    QT_TRY(rc);
    QT_TRY(qt_array_new(&s->tensors, count, sizeof *s->tensors, err));
    for (size_t i = 0; i < count; i++) {
        const struct qt_entry *e = qt_container_entry(s->container, i);
        struct tensor_figures *t = &s->tensors[i];
        json_t *entry;
        double bytes = 0;
        for (size_t k = 0; k < e->nsections; k++)
            bytes += (double)e->section[k].tensor->nbytes;
        t->name = e->name;
        QT_TRY(split_name(t, err));
        s->count++;
        qt_spec_short(t->scheme, e->spec);
        t->weights = (double)e->n * (double)e->k;
        t->bpw = 8 * bytes / t->weights;
        const json_t *record = json_object_get(records, e->name);
        t->ms = member(record, "ms");
        t->distribution = json_object_get(record, "distribution");
        t->outlier = member(t->distribution, "absmax") / member(t->distribution, "rms");
        t->input = json_object_get(record, "input");
        t->input_outlier = member(t->input, "absmax") / member(t->input, "rms");
        QT_TRY(qt_entry_json(&entry, e, err));
        const json_t *hessian = json_object_get(entry, "hessian");
        t->compensated = member(hessian, "error_after") / member(hessian, "error_before");
        t->tokens = member(hessian, "tokens");
        t->missing = member(hessian, "missing_tokens");
        t->fell_back = member_text(hessian, "fallback") != NULL;
        set_errors(t, json_object_get(entry, "error"));
        json_decref(entry);
        weights += t->weights;
        bits += 8 * bytes;
    }
    s->bpw = weights > 0 ? bits / weights : NAN;
done:
    json_decref(records);
    return rc;
}

/* The tensors of a document of verify, if there is nothing better. */
static int document_tensors(struct subject *s, const json_t *doc, struct qt_err *err)
{
    const json_t *list = json_object_get(doc, "tensors"), *v;
    size_t i;
    int rc = QT_OK;
    if (s->tensors)
        return QT_OK;
    QT_TRY(qt_array_new(&s->tensors, json_array_size(list), sizeof *s->tensors, err));
    json_array_foreach (list, i, v) {
        const char *name = member_text(v, "name"), *scheme = member_text(v, "scheme");
        const json_t *shape = json_object_get(v, "shape");
        struct tensor_figures *t = &s->tensors[s->count];
        if (!name || !scheme || json_array_size(shape) != 2)
            continue;
        t->name = name;
        QT_TRY(split_name(t, err));
        s->count++;
        qt_spec_short(t->scheme, scheme);
        t->weights = json_number_value(json_array_get(shape, 0)) *
                     json_number_value(json_array_get(shape, 1));
        t->bpw = member(v, "bpw");
        t->ms = t->compensated = t->outlier = t->input_outlier = t->tokens = t->missing = NAN;
        set_errors(t, v);
    }
done:
    return rc;
}

/* Names the scheme, or says how many there are. */
static int name_schemes(struct subject *s, struct qt_err *err)
{
    json_t *names = json_object();
    bool failed = !names;
    for (size_t i = 0; i < s->count; i++)
        failed |= json_object_set_new(names, s->tensors[i].scheme, json_true()) < 0;
    const size_t n = json_object_size(names);
    s->schemes[0] = '\0';
    if (n == 1)
        snprintf(s->schemes, sizeof s->schemes, "%s", s->tensors[0].scheme);
    else if (n > 3)
        snprintf(s->schemes, sizeof s->schemes, "%zu schemes", n);
    const char *key;
    json_t *value;
    size_t at = 0;
    if (n == 2 || n == 3)
        json_object_foreach (names, key, value) {
            int size =
                snprintf(s->schemes + at, sizeof s->schemes - at, "%s%s", at ? ", " : "", key);
            at = qt_min_size(at + (size_t)size, sizeof s->schemes - 1);
        }
    json_decref(names);
    return failed ? qt_no_memory(err, NULL) : QT_OK;
}

/* ---- containers ----------------------------------------------------------------------------- */

static double source_bytes(const json_t *manifest)
{
    const json_t *source = json_object_get(json_object_get(manifest, "identity"), "source");
    const json_t *files = json_object_get(source, "files"), *file;
    double sum = 0;
    size_t i;
    json_array_foreach (files, i, file) {
        sum += member(file, "bytes");
    }
    return sum > 0 ? sum : NAN;
}

/* qtool-report.json may be missing: it is not part of the container's checksums. */
static int load_run(struct subject *s, struct qt_err *err)
{
    char *path = NULL;
    int rc;
    QT_TRY(qt_path_join(&path, s->path, "qtool-report.json", err));
    if (qt_path_exists(path))
        QT_TRY(qt_json_load(&s->run, path, MAX_DOCUMENT, err));
done:
    qt_free(path);
    return rc;
}

static struct subject *find_crc(const struct qt_report *r, const char *crc)
{
    for (size_t i = 0; crc && crc[0] && i < r->nsubjects; i++)
        if (strcmp(r->subjects[i].crc, crc) == 0)
            return &r->subjects[i];
    return NULL;
}

/* Moves what documents brought to a subject of which the container is now known. */
static void forget_tensors(struct subject *s)
{
    for (size_t i = 0; i < s->count; i++)
        qt_free(s->tensors[i].kind);
    qt_free(s->tensors);
    s->tensors = NULL;
    s->count = 0;
}

static int add_container(struct qt_report *r, const char *path, struct qt_err *err)
{
    struct qt_container *container = NULL;
    struct subject *s;
    uint32_t number;
    char crc[16];
    int rc;
    QT_TRY(qt_container_open(&container, path, err));
    QT_TRY(qt_container_crc(&number, container, err));
    snprintf(crc, sizeof crc, "%08x", number);
    s = find_crc(r, crc);
    if (s && s->container) {
        rc = qt_fail(err, QT_E_USAGE, path, NULL, "is the same container as %s", s->path);
        goto done;
    }
    if (s)
        forget_tensors(s);
    else
        QT_TRY(add_subject(&s, r, path, err));
    snprintf(s->crc, sizeof s->crc, "%s", crc);
    s->container = container;
    container = NULL;
    char *copy = NULL;
    QT_TRY(qt_string_copy(&copy, path, err));
    qt_free(s->path);
    s->path = copy;
    s->bytes = 0;
    const struct qt_ckpt *ckpt = qt_container_ckpt(s->container);
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++)
        s->bytes += (double)qt_ckpt_tensor(ckpt, i)->nbytes;
    s->source_bytes = source_bytes(qt_container_manifest(s->container));
    QT_TRY(load_run(s, err));
    QT_TRY(container_tensors(s, err));
    QT_TRY(name_schemes(s, err));
done:
    qt_container_close(container);
    return rc;
}

/* ---- documents ------------------------------------------------------------------------------ */

static int document_kind(enum document_kind *out, const json_t *doc, const char *path,
                         struct qt_err *err)
{
    static const char *const names[] = {"eval", "verify", "bench"};
    const char *command = member_text(doc, "command"), *status;
    const json_t *error = json_object_get(doc, "error");
    if (!member_text(doc, "qtool") || !command)
        return qt_fail(err, QT_E_INPUT, path, NULL,
                       "is JSON, but not a document that 'qtool eval', 'verify' or 'bench' prints "
                       "with --json");
    status = member_text(error, "status");
    if (error && (!status || strcmp(status, "gate_failed") != 0))
        return qt_fail(err, QT_E_INPUT, path, NULL,
                       "is the document of a run that failed, without results: %s",
                       member_text(error, "message") ? member_text(error, "message") : "no reason");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(names[i], command) != 0)
            continue;
        *out = (enum document_kind)i;
        return QT_OK;
    }
    return qt_fail(err, QT_E_INPUT, path, NULL,
                   "is a document of 'qtool %s'; a report takes those of eval, verify and bench",
                   command);
}

bool is_model_bench(const struct document *d)
{
    return d->kind == DOCUMENT_BENCH && member_text(d->json, "model");
}

/* The subject of a document: the container with the same manifest, or a new one. */
static int document_subject(size_t *out, struct qt_report *r, const json_t *doc, const char *file,
                            struct qt_err *err)
{
    const char *crc = member_text(doc, "manifest_crc32"), *path = member_text(doc, "path");
    struct subject *s = find_crc(r, crc);
    int rc = QT_OK;
    if (!s) {
        QT_TRY(add_subject(&s, r, path ? path : file, err));
        snprintf(s->crc, sizeof s->crc, "%s", crc ? crc : "");
        s->bytes = member(doc, "bytes");
    }
    if (!s->container) {
        QT_TRY(document_tensors(s, doc, err));
        QT_TRY(name_schemes(s, err));
        s->bpw = isnan(s->bpw) ? member(doc, "bpw") : s->bpw;
    }
    *out = (size_t)(s - r->subjects);
done:
    return rc;
}

static int add_document(struct qt_report *r, const char *path, struct qt_err *err)
{
    struct document d = {.path = path};
    int rc;
    QT_TRY(qt_json_load(&d.json, path, MAX_DOCUMENT, err));
    QT_TRY(document_kind(&d.kind, d.json, path, err));
    QT_TRY(qt_array_grow(&r->documents, &r->documents_capacity, r->ndocuments + 1,
                         sizeof *r->documents, err));
    /* Tensors borrow names of the document: it stays even if the rest fails. */
    r->documents[r->ndocuments++] = d;
    if (d.kind != DOCUMENT_BENCH)
        QT_TRY(document_subject(&r->documents[r->ndocuments - 1].subject, r, d.json, path, err));
    return QT_OK;
done:
    if (r->ndocuments == 0 || r->documents[r->ndocuments - 1].json != d.json)
        json_decref(d.json);
    return rc;
}

/* ---- all inputs ----------------------------------------------------------------------------- */

#define ACCEPTED                                                                                   \
    "a report takes containers, calibration files, and saved --json of eval, verify and bench"

static int add_qcal(struct qt_report *r, const char *path, struct qt_err *err)
{
    if (!qt_qcal_probe(path))
        return qt_fail(err, QT_E_INPUT, path, NULL,
                       "is a safetensors file, but not a calibration file (.qcal); " ACCEPTED);
    int rc = qt_array_grow(&r->qcals, &r->qcals_capacity, r->nqcals + 1, sizeof *r->qcals, err);
    if (rc == QT_OK)
        rc = qt_qcal_open(&r->qcals[r->nqcals], path, err);
    r->nqcals += rc == QT_OK;
    return rc;
}

static int file_kind(enum qt_kind *out, const char *path, struct qt_err *err)
{
    struct qt_map map;
    int rc = qt_map_open(&map, path, err);
    if (rc < 0)
        return rc;
    *out = qt_file_kind(map.data, map.size);
    qt_map_close(&map);
    return QT_OK;
}

int qt_report_add(struct qt_report *r, const char *path, struct qt_err *err)
{
    enum qt_kind kind;
    if (qt_path_is_dir(path)) {
        if (qt_container_probe(path))
            return add_container(r, path, err);
        return qt_fail(err, QT_E_INPUT, path, NULL,
                       "is a directory, but not a container; " ACCEPTED);
    }
    int rc = file_kind(&kind, path, err);
    if (rc < 0)
        return rc;
    if (kind == QT_KIND_JSON)
        return add_document(r, path, err);
    if (kind == QT_KIND_SAFETENSORS)
        return add_qcal(r, path, err);
    return qt_fail(err, QT_E_INPUT, path, NULL, "is %s; " ACCEPTED,
                   kind == QT_KIND_UNKNOWN ? "of no known kind" : qt_kind_name(kind));
}

int qt_report_new(struct qt_report **out, struct qt_err *err)
{
    return qt_array_new(out, 1, sizeof **out, err);
}

void qt_report_free(struct qt_report *r)
{
    if (!r)
        return;
    for (size_t i = 0; i < r->nsubjects; i++)
        free_subject(&r->subjects[i]);
    for (size_t i = 0; i < r->ndocuments; i++)
        json_decref(r->documents[i].json);
    for (size_t i = 0; i < r->nqcals; i++)
        qt_qcal_close(r->qcals[i]);
    qt_free(r->subjects);
    qt_free(r->documents);
    qt_free(r->qcals);
    qt_free(r);
}
