/* What an earlier run has made: whether it is of use to this one. */
#include "pack/run.h"

#include <stdio.h>
#include <string.h>

/* record: what an earlier run says of a tensor. The checkpoint's fingerprint looks at a part of
 * each tensor: what was made is of use only if all of its source is still the same; and --strict is
 * no part of the identity. */
static int check_record(const struct qt_run *run, const struct qt_tensor *t, const json_t *record,
                        struct qt_err *err)
{
    const json_t *source = json_object_get(record, "source_crc32");
    if (!source) /* an untouched copy */
        source = json_object_get(record, "crc32");
    const char *before = json_string_value(source);
    const char *fallback =
        json_string_value(json_object_get(json_object_get(record, "hessian"), "fallback"));
    struct qt_blob blob;
    char now[9];
    if (run->opt->strict && fallback)
        return qt_fail(err, QT_E_UNSUPPORTED, t->file, t->name,
                       "the earlier run was without --strict: %s", fallback);
    int rc = qt_ckpt_read(&blob, run->ckpt, t, err);
    if (rc < 0)
        return rc;
    snprintf(now, sizeof now, "%08x", qt_crc32(0, blob.data, blob.size));
    qt_blob_free(&blob);
    if (!before || strcmp(before, now) != 0)
        return qt_fail(err, QT_E_RESUME, t->file, t->name,
                       "cannot resume: its data is not what it was");
    return QT_OK;
}

int qt_run_check_records(const struct qt_run *run, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < run->plan.count && rc == QT_OK; i++) {
        const struct qt_tensor *t = run->plan.items[i].tensor;
        const json_t *record = qt_writer_done(run->writer, t->name);
        if (record)
            rc = check_record(run, t, record, err);
    }
    return rc;
}

/* Takes the entries of the run from a manifest of the same identity. */
static int take_entries(struct qt_run *run, const json_t *manifest, struct qt_err *err)
{
    const json_t *tensors = json_object_get(manifest, "tensors");
    const json_t *copied = json_object_get(manifest, "copied");
    for (size_t i = 0; i < run->plan.count; i++) {
        const struct qt_plan_item *item = &run->plan.items[i];
        json_t *entry = json_object_get(item->why ? copied : tensors, item->tensor->name);
        if (!entry)
            return qt_fail(err, QT_E_INPUT, run->opt->out_dir, item->tensor->name,
                           "is not in the manifest");
        run->entries[i] = json_incref(entry);
        int rc = check_record(run, item->tensor, entry, err);
        if (rc < 0)
            return rc;
    }
    run->kv.entry = json_incref(json_object_get(manifest, "kv"));
    if (!run->acts.report)
        run->acts.report = json_incref(json_object_get(manifest, "activations"));
    return QT_OK;
}

int qt_run_finished(bool *finished, struct qt_run *run, const json_t *identity, struct qt_err *err)
{
    struct qt_container *c;
    *finished = false;
    if (!qt_container_probe(run->opt->out_dir))
        return QT_OK;
    int rc = qt_container_open(&c, run->opt->out_dir, err);
    if (rc < 0)
        return rc;
    const json_t *manifest = qt_container_manifest(c);
    rc = qt_identity_check(json_object_get(manifest, "identity"), identity, run->opt->out_dir, err);
    if (rc == QT_OK)
        rc = take_entries(run, manifest, err);
    *finished = rc == QT_OK;
    qt_container_close(c);
    return rc;
}
