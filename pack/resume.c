/* Checks whether the output of an earlier run can be used by this run. */
#include "pack/run.h"

#include <stdio.h>
#include <string.h>

/* Checks the record that an earlier run left of a tensor. The fingerprint of the checkpoint covers
 * only a part of each tensor, so the CRC of the whole source is compared. --strict is not part of
 * the identity, so fallbacks are checked here. */
static int check_record(const struct qt_run *run, const struct qt_tensor *t, const json_t *record,
                        struct qt_err *err)
{
    const json_t *source = json_object_get(record, "source_crc32");
    if (!source) /* a copy that learning did not change */
        source = json_object_get(record, "crc32");
    const char *before = json_string_value(source);
    const char *fallback =
        json_string_value(json_object_get(json_object_get(record, "hessian"), "fallback"));
    char now[9];
    if (run->opt->strict && fallback)
        return qt_fail(err, QT_E_RESUME, t->file, t->name,
                       "cannot resume with --strict: the earlier run fell back: %s", fallback);
    if (run->opt->strict && json_object_get(record, "nonfinite"))
        return qt_fail(err, QT_E_RESUME, t->file, t->name,
                       "cannot resume with --strict: " QT_NONFINITE,
                       (size_t)json_integer_value(json_object_get(record, "nonfinite")), t->count);
    uint32_t crc;
    int rc = qt_ckpt_crc(&crc, run->ckpt, t, err);
    if (rc < 0)
        return rc;
    snprintf(now, sizeof now, "%08x", crc);
    if (!before || strcmp(before, now) != 0)
        return qt_fail(err, QT_E_RESUME, t->file, t->name,
                       "cannot resume: its source data has changed");
    return QT_OK;
}

int qt_run_check_records(const struct qt_run *run, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < run->plan.count && rc == QT_OK; i++) {
        const struct qt_tensor *t = run->plan.items[i].tensor;
        json_t *record = NULL;
        if (qt_writer_done(run->writer, t->name) &&
            i % qt_comm_size(run->opt->comm) == qt_comm_rank(run->opt->comm))
            rc = qt_writer_record(&record, run->writer, t->name, err);
        if (record)
            rc = check_record(run, t, record, err);
        json_decref(record);
    }
    return qt_comm_meet(run->opt->comm, rc, err);
}

/* ---- complete output ------------------------------------------------------------------------ */

static int check_stored(const struct qt_run *run, const struct qt_ckpt *container,
                        struct qt_err *err)
{
    for (size_t i = 0; i < run->nstored; i++) {
        const struct qt_tensor *t = &run->stored[i], *stored = qt_ckpt_find(container, t->name);
        if (!stored || stored->dtype != t->dtype || stored->ndim != t->ndim ||
            memcmp(stored->shape, t->shape, (size_t)t->ndim * sizeof *t->shape) != 0)
            return qt_fail(err, QT_E_RESUME, run->opt->out_dir, t->name, "cannot resume: %s",
                           stored ? "stored with another type or shape" : "missing");
    }
    if (qt_ckpt_count(container) != run->nstored)
        return qt_fail(err, QT_E_RESUME, run->opt->out_dir, NULL,
                       "cannot resume: the output has %zu tensors, expected %zu",
                       qt_ckpt_count(container), run->nstored);
    return QT_OK;
}

/* SHA256SUMS is the last file that a run writes; without it the container is incomplete. */
static int check_checksums(const struct qt_run *run, struct qt_err *err)
{
    char *path;
    int rc = qt_path_join(&path, run->opt->out_dir, QT_CHECKSUMS_NAME, err);
    if (rc < 0)
        return rc;
    if (!qt_path_exists(path))
        rc = qt_fail(err, QT_E_INPUT, path, NULL, "missing: the container is not complete");
    qt_free(path);
    return rc;
}

static int take_entries(struct qt_run *run, struct qt_err *err)
{
    const json_t *manifest = qt_container_manifest(run->reused);
    for (size_t i = 0; i < run->plan.count; i++) {
        const struct qt_plan_item *item = &run->plan.items[i];
        const char *name = item->tensor->name;
        json_t *entry = NULL;
        if (item->copied ? !qt_container_is_copied(run->reused, name)
                         : !qt_container_find(run->reused, name))
            return qt_fail(err, QT_E_INPUT, run->opt->out_dir, name, "missing from the manifest");
        run->made[i] = true;
        int rc = qt_run_check_interrupted(run, err);
        if (rc == QT_OK)
            rc = qt_run_entry(&entry, run, i, err);
        if (rc == QT_OK)
            rc = check_record(run, item->tensor, entry, err);
        json_decref(entry);
        if (rc < 0)
            return rc;
    }
    run->kv.entry = json_incref(json_object_get(manifest, "kv"));
    run->acts.report = json_incref(json_object_get(manifest, "activations"));
    return QT_OK;
}

int qt_run_reuse(struct qt_run *run, const json_t *identity, struct qt_err *err)
{
    const char *name;
    int rc = QT_OK;
    if (!qt_container_probe(run->opt->out_dir))
        return QT_OK;
    QT_TRY(qt_container_open(&run->reused, run->opt->out_dir, err));
    QT_TRY(qt_identity_check(json_object_get(qt_container_manifest(run->reused), "identity"),
                             identity, run->opt->out_dir, err));
    QT_TRY(check_checksums(run, err));
    QT_TRY(check_stored(run, qt_container_ckpt(run->reused), err));
    for (size_t i = 0; (name = qt_side_file(i)) != NULL; i++)
        QT_TRY(qt_run_check_side_file(run, name, err));
    QT_TRY(qt_checksums_check_small(run->opt->out_dir, err));
    QT_TRY(take_entries(run, err));
done:
    return rc;
}
