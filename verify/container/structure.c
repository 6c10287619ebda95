/* Container check: what is stored, and how it differs from the source checkpoint. */
#include "verify/verify.h"

#include <stdio.h>
#include <string.h>

/* State of one check. */
struct check {
    const struct qt_container *container;
    const struct qt_ckpt *stored; /* the container's tensors */
    const struct qt_ckpt *source; /* may be NULL */
    struct qt_comm *comm;
    const struct qt_log *log;
    size_t done, total; /* bytes, for progress */
};

static void advance(struct check *check, size_t bytes)
{
    check->done += bytes;
    qt_log_progress(check->log, "verify", (double)check->done, (double)check->total);
}

static int bad_tensor(const struct qt_container *c, const char *name, const char *reason,
                      struct qt_err *err)
{
    return qt_fail(err, QT_E_INPUT, qt_container_dir(c), name, "%s", reason);
}

/* Tensors go to the ranks in turn. */
static bool is_own(const struct check *check, size_t i)
{
    return i % qt_comm_size(check->comm) == qt_comm_rank(check->comm);
}

static int check_crcs(struct check *check, struct qt_err *err)
{
    for (size_t i = 0; i < qt_ckpt_count(check->stored); i++) {
        if (!is_own(check, i))
            continue;
        int rc = qt_container_check_crc(check->container, i, err);
        if (rc < 0)
            return rc;
        advance(check, qt_ckpt_tensor(check->stored, i)->nbytes);
    }
    return QT_OK;
}

/* ---- decoded weights ------------------------------------------------------------------------ */

/* Decodes whole strips of 16 rows, about 2^23 weights at a time. */
static int check_finite(const struct check *check, const struct qt_packed *p, const char *name,
                        struct qt_err *err)
{
    const size_t weights = 1 << 23, rows = qt_round_up(qt_ceil_div(weights, p->k), 16);
    float *w;
    int rc;
    QT_TRY(qt_array_new(&w, qt_min_size(rows, p->n) * p->k, sizeof *w, err));
    for (size_t row0 = 0; row0 < p->n; row0 += rows) {
        const size_t count = qt_min_size(rows, p->n - row0) * p->k;
        QT_TRY(qt_packed_decode(w, p, row0, count / p->k, err));
        const size_t at = qt_find_nonfinite(w, count);
        if (at == count)
            continue;
        rc = qt_fail(err, QT_E_INPUT, qt_container_dir(check->container), name,
                     "decodes to a non-finite weight at row %zu, column %zu", row0 + at / p->k,
                     at % p->k);
        goto done;
    }
done:
    qt_free(w);
    return rc;
}

/* ---- comparison with the source ------------------------------------------------------------- */

static const struct qt_tensor *find_source(const struct check *check, const char *name,
                                           struct qt_err *err)
{
    const struct qt_tensor *t = qt_ckpt_find(check->source, name);
    if (!t)
        bad_tensor(check->container, name, "is not in the source checkpoint", err);
    return t;
}

/* The manifest has the CRC of each source tensor. Without this check a wrong source would only show
 * as a large error. */
static int check_source_crc(const struct check *check, const char *name, const json_t *entry,
                            const struct qt_blob *blob, struct qt_err *err)
{
    const char *dir = qt_container_dir(check->container), *recorded = NULL;
    char measured[9];
    int rc = qt_json_get_string(&recorded, entry, "source_crc32", dir, err);
    if (rc < 0)
        return rc;
    snprintf(measured, sizeof measured, "%08x", (unsigned)qt_crc32(0, blob->data, blob->size));
    if (recorded && strcmp(recorded, measured) != 0)
        return bad_tensor(check->container, name,
                          "was made from different data than the source holds (CRC-32 differs)",
                          err);
    return QT_OK;
}

static int compare_entry(struct qt_error *out, const struct check *check, const struct qt_entry *e,
                         const struct qt_packed *p, struct qt_err *err)
{
    struct qt_blob blob = {0};
    json_t *entry = NULL;
    const struct qt_tensor *t = find_source(check, e->name, err);
    int rc = QT_OK;
    if (!t)
        return QT_E_INPUT;
    if (t->ndim != 2 || t->shape[0] != e->n || t->shape[1] != e->k)
        return bad_tensor(check->container, e->name, "has a different shape in the source", err);
    if (!qt_dtype_is_weight(t->dtype))
        return bad_tensor(check->container, e->name, "is not floating-point in the source", err);
    QT_TRY(qt_ckpt_read(&blob, check->source, t, err));
    QT_TRY(qt_entry_json(&entry, e, err));
    QT_TRY(check_source_crc(check, e->name, entry, &blob, err));
    struct qt_matrix w = {.data = blob.data,
                          .dtype = t->dtype,
                          .n = e->n,
                          .k = e->k,
                          .file = t->file,
                          .name = t->name};
    QT_TRY(qt_packed_compare(out, p, &w, err));
done:
    json_decref(entry);
    qt_blob_free(&blob);
    return rc;
}

/* Tuned tensors are exempt from the comparison, so only norms of a run with tune_norms may be. */
static int check_tuned(const struct check *check, const struct qt_tensor *copy, struct qt_err *err)
{
    const json_t *identity = json_object_get(qt_container_manifest(check->container), "identity");
    const json_t *learning = json_object_get(identity, "learning");
    if (copy->ndim == 1 && json_is_true(json_object_get(learning, "tune_norms")))
        return QT_OK;
    return bad_tensor(check->container, copy->name,
                      "has 'source_crc32', which only norms tuned by 'identity.learning' may have",
                      err);
}

/* entry: of the manifest. tuned: only dtype and shape equal the source; the CRC of the source
 * tensor is compared. */
static int compare_copy(const struct check *check, const struct qt_tensor *copy,
                        const json_t *entry, bool tuned, struct qt_err *err)
{
    struct qt_blob a = {0}, b = {0};
    const struct qt_tensor *t = find_source(check, copy->name, err);
    int rc = QT_OK;
    if (!t)
        return QT_E_INPUT;
    if (t->dtype != copy->dtype || t->ndim != copy->ndim ||
        memcmp(t->shape, copy->shape, (size_t)t->ndim * sizeof t->shape[0]) != 0)
        return bad_tensor(check->container, copy->name,
                          "has a different dtype or shape in the source", err);
    QT_TRY(qt_ckpt_read(&a, check->stored, copy, err));
    QT_TRY(qt_ckpt_read(&b, check->source, t, err));
    bool same = a.size == b.size && (a.size == 0 || memcmp(a.data, b.data, a.size) == 0);
    if (tuned)
        QT_TRY(check_source_crc(check, copy->name, entry, &b, err));
    else if (!same)
        rc = bad_tensor(check->container, copy->name,
                        "differs from the copied tensor of the source", err);
done:
    qt_blob_free(&a);
    qt_blob_free(&b);
    return rc;
}

/* ---- check ---------------------------------------------------------------------------------- */

static int check_entry(struct qt_verify_tensor *out, const struct check *check,
                       const struct qt_entry *e, struct qt_err *err)
{
    struct qt_packed p = {0};
    int rc;
    QT_TRY(qt_packed_open(&p, check->container, e, err));
    QT_TRY(qt_packed_check_repack(&p, qt_container_dir(check->container), e->name, err));
    QT_TRY(check_finite(check, &p, e->name, err));
    out->name = e->name;
    out->spec = e->spec;
    out->n = e->n;
    out->k = e->k;
    out->bpw = qt_packed_bpw(&p);
    out->compared = check->source != NULL;
    if (out->compared)
        QT_TRY(compare_entry(&out->error, check, e, &p, err));
done:
    qt_packed_free(&p);
    return rc;
}

static int check_entries(struct qt_verify_report *out, struct check *check, struct qt_err *err)
{
    double bits = 0, weights = 0;
    for (size_t i = 0; i < out->count; i++) {
        const struct qt_entry *e = qt_container_entry(check->container, i);
        size_t bytes = 0;
        int rc = is_own(check, i) ? check_entry(&out->tensors[i], check, e, err) : QT_OK;
        if (rc < 0)
            return rc;
        for (size_t s = 0; s < e->nsections; s++)
            bytes += e->section[s].tensor->nbytes;
        bits += 8 * (double)bytes;
        weights += (double)e->n * (double)e->k;
        if (is_own(check, i))
            advance(check, bytes);
    }
    out->bpw = weights > 0 ? bits / weights : 0;
    return QT_OK;
}

/* Counts the values of a copied tensor that are not finite. The source has the same ones, so they
 * are no damage. */
static int count_nonfinite(struct qt_verify_report *out, const struct check *check,
                           const struct qt_tensor *t, struct qt_err *err)
{
    struct qt_blob blob;
    int rc = qt_ckpt_read(&blob, check->stored, t, err);
    if (rc < 0)
        return rc;
    const size_t n = qt_count_nonfinite(blob.data, t->dtype, t->count);
    qt_blob_free(&blob);
    if (n == 0)
        return QT_OK;
    if (!out->nonfinite)
        out->nonfinite = t->name;
    out->nonfinite_tensors++;
    out->nonfinite_values += n;
    qt_log_message(check->log, QT_LOG_WARNING,
                   "%s: tensor %s: %zu of %zu values are NaN or infinity",
                   qt_container_dir(check->container), t->name, n, t->count);
    return QT_OK;
}

static int check_copies(struct qt_verify_report *out, struct check *check, struct qt_err *err)
{
    for (size_t i = 0; i < qt_ckpt_count(check->stored); i++) {
        const struct qt_tensor *t = qt_ckpt_tensor(check->stored, i);
        json_t *entry;
        if (!qt_container_is_copied(check->container, t->name) || !is_own(check, i))
            continue;
        int rc = qt_container_copied_json(&entry, check->container, t->name, err);
        bool tuned = json_object_get(entry, "source_crc32");
        if (rc == QT_OK && tuned)
            rc = check_tuned(check, t, err);
        if (rc == QT_OK && check->source)
            rc = compare_copy(check, t, entry, tuned, err);
        json_decref(entry);
        if (rc == QT_OK)
            rc = count_nonfinite(out, check, t, err);
        if (rc < 0)
            return rc;
        out->tuned += tuned;
        out->copied += !tuned;
        advance(check, t->nbytes);
    }
    return QT_OK;
}

/* Checks the entry, and shapes and values of static key scales. */
static int check_kv(struct check *check, const struct qt_model_info *info, struct qt_err *err)
{
    struct qt_kv kv;
    int rc = qt_kv_open(&kv, check->container, info, err);
    if (kv.scale)
        advance(check, 2 * info->layers * info->kv_heads * info->head_dim * sizeof *kv.scale);
    qt_kv_free(&kv);
    return rc;
}

/* Checks that need the model's shape. */
static int check_with_model(struct check *check, struct qt_err *err)
{
    const struct qt_weights w = qt_weights_of_container(check->container);
    const bool kv = qt_kv_entry(check->container) != NULL, inputs = w.fake_quant.input != NULL;
    struct qt_model *model = NULL;
    int rc = QT_OK;
    if (!kv && !inputs)
        return QT_OK;
    QT_TRY(qt_model_open(&model, &w, err));
    if (inputs)
        QT_TRY(qt_act_agree(check->container, model, err));
    if (kv)
        QT_TRY(check_kv(check, qt_model_info(model), err));
done:
    qt_model_close(model);
    return rc;
}

/* Every tensor of the source must be in the container. */
static int check_complete(const struct check *check, struct qt_err *err)
{
    for (size_t i = 0; check->source && i < qt_ckpt_count(check->source); i++) {
        const char *name = qt_ckpt_tensor(check->source, i)->name;
        if (!qt_container_find(check->container, name) &&
            !qt_container_is_copied(check->container, name))
            return bad_tensor(check->container, name, "is in the source but not in the container",
                              err);
    }
    return QT_OK;
}

/* Every rank receives what the others have found. */
static int gather(struct qt_verify_report *out, const struct check *check, struct qt_err *err)
{
    const size_t size = qt_comm_size(check->comm);
    struct counts {
        size_t copied, tuned, tensors, first;
        uint64_t values;
    } mine = {out->copied, out->tuned, out->nonfinite_tensors, SIZE_MAX, out->nonfinite_values};
    struct counts *counts = NULL, sum = {.first = SIZE_MAX};
    struct qt_verify_tensor *all = NULL;
    int rc = QT_OK;
    if (size == 1)
        return QT_OK;
    for (size_t i = 0; out->nonfinite && i < qt_ckpt_count(check->stored); i++)
        if (qt_ckpt_tensor(check->stored, i)->name == out->nonfinite)
            mine.first = i;
    QT_TRY(qt_array_new(&counts, size, sizeof *counts, err));
    QT_TRY(qt_array_new(&all, size, out->count * sizeof *all, err));
    QT_TRY(qt_comm_gather(check->comm, counts, &mine, sizeof mine, err));
    QT_TRY(qt_comm_gather(check->comm, all, out->tensors, out->count * sizeof *all, err));
    for (size_t i = 0; i < out->count; i++) {
        const struct qt_entry *e = qt_container_entry(check->container, i);
        out->tensors[i] = all[i % size * out->count + i];
        out->tensors[i].name = e->name;
        out->tensors[i].spec = e->spec;
    }
    for (size_t r = 0; r < size; r++) {
        sum.copied += counts[r].copied;
        sum.tuned += counts[r].tuned;
        sum.tensors += counts[r].tensors;
        sum.values += counts[r].values;
        sum.first = qt_min_size(sum.first, counts[r].first);
    }
    out->copied = sum.copied;
    out->tuned = sum.tuned;
    out->nonfinite_tensors = sum.tensors;
    out->nonfinite_values = sum.values;
    if (sum.tensors)
        out->nonfinite = qt_ckpt_tensor(check->stored, sum.first)->name;
done:
    qt_free(counts);
    qt_free(all);
    return rc;
}

int qt_verify(struct qt_verify_report *out, const struct qt_container *c,
              const struct qt_ckpt *source, struct qt_comm *comm, const struct qt_log *log,
              struct qt_err *err)
{
    struct check check = {
        .container = c, .stored = qt_container_ckpt(c), .source = source, .comm = comm, .log = log};
    int rc;
    *out = (struct qt_verify_report){.count = qt_container_count(c)};
    for (size_t i = 0; i < qt_ckpt_count(check.stored); i++)
        out->bytes += qt_ckpt_tensor(check.stored, i)->nbytes;
    check.total = 2 * out->bytes; /* every byte is read twice: CRC, values */
    QT_TRY(qt_array_new(&out->tensors, out->count, sizeof *out->tensors, err));
    QT_TRY(check_crcs(&check, err));
    QT_TRY(check_entries(out, &check, err));
    QT_TRY(check_copies(out, &check, err));
    QT_TRY(check_with_model(&check, err));
    QT_TRY(check_complete(&check, err));
    if (qt_comm_rank(comm) == 0)
        QT_TRY(qt_checksums_check(qt_container_dir(c), err));
    QT_TRY(gather(out, &check, err));
done:
    if (rc < 0)
        qt_verify_free(out);
    return rc;
}

void qt_verify_free(struct qt_verify_report *report)
{
    qt_free(report->tensors);
    *report = (struct qt_verify_report){0};
}
