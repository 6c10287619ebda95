/* qtool-report.json: the errors from the manifest, with times and memory, which differ between
 * runs. */
#include "pack/run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static const char *const copied_members[] = {
    "scheme", "shape", "bpw", "paper_bpw", "error", "hessian", QT_RUN_DISTRIBUTION, QT_RUN_INPUT};

/* *out = the report of a quantized tensor; the caller releases it. */
static int tensor_json(json_t **out, struct qt_run *run, size_t i, struct qt_err *err)
{
    json_t *t = json_pack("{s:s}", "name", run->plan.items[i].tensor->name), *entry;
    int rc = qt_run_entry(&entry, run, i, err);
    int failed = 0;
    for (size_t m = 0; m < sizeof copied_members / sizeof *copied_members; m++) {
        json_t *value = json_object_get(entry, copied_members[m]);
        if (value) /* some schemes lack some members */
            failed |= json_object_set(t, copied_members[m], value);
    }
    failed |= json_object_set_new(
        t, "ms", run->seconds[i] > 0 ? json_real(1e3 * run->seconds[i]) : json_null());
    json_decref(entry);
    *out = t;
    return rc == QT_OK && failed ? qt_no_memory(err, NULL) : rc;
}

/* Peak memory of this process. VmHWM is preferred: ru_maxrss is inherited from the parent process,
 * which may be larger. */
static size_t peak_memory(void)
{
    struct rusage usage;
    size_t kilobytes = 0;
    char line[128];
    FILE *status = fopen("/proc/self/status", "r");
    while (status && kilobytes == 0 && fgets(line, sizeof line, status))
        if (strncmp(line, "VmHWM:", 6) == 0)
            kilobytes = strtoull(line + 6, NULL, 10);
    if (status)
        fclose(status);
    if (kilobytes == 0 && getrusage(RUSAGE_SELF, &usage) == 0)
        kilobytes = (size_t)usage.ru_maxrss;
    return kilobytes * 1024;
}

static size_t calibration_tokens(const struct qt_calibration *c)
{
    if (!c)
        return 0;
    return c->file ? qt_qcal_info(c->file)->tokens : c->samples * c->seqlen;
}

/* file: NULL, or where the tensors are also written. */
static int report_tensors(size_t *fallbacks, struct qt_json_out *file, struct qt_run *run,
                          struct qt_err *err)
{
    const struct qt_quantize_options *opt = run->opt;
    int rc = QT_OK;
    *fallbacks = 0;
    for (size_t i = 0; i < run->plan.count && rc == QT_OK; i++) {
        json_t *t;
        if (run->plan.items[i].copied)
            continue;
        rc = tensor_json(&t, run, i, err);
        if (rc == QT_OK && file)
            rc = qt_json_out_value(file, NULL, t, err);
        if (rc == QT_OK && opt->tensor)
            opt->tensor(opt->tensor_ctx, t);
        *fallbacks += json_object_get(json_object_get(t, "hessian"), "fallback") != NULL;
        json_decref(t);
    }
    return rc;
}

/* The members behind the tensors. */
static json_t *tail_json(const struct qt_run *run, double start, size_t fallbacks)
{
    return json_pack("{s:{s:I, s:I, s:f, s:I, s:I, s:I, s:f, s:I}, s:O*, s:O*, s:O*}", "totals",
                     "quantized", (json_int_t)run->plan.quantized, "copied",
                     (json_int_t)(run->plan.count - run->plan.quantized), "bpw",
                     qt_plan_bpw(&run->plan), "bytes", (json_int_t)run->plan.output_bytes,
                     "calibration_tokens", (json_int_t)calibration_tokens(run->opt->calibration),
                     "fallbacks", (json_int_t)fallbacks, "seconds", qt_clock() - start,
                     "peak_rss_bytes", (json_int_t)peak_memory(), "learning", run->learning,
                     "activations", run->acts.report, "kv", run->kv.entry);
}

static int make_report(json_t **out, struct qt_run *run, double start, struct qt_err *err)
{
    struct qt_json_out file = {.fd = -1};
    json_t *head = json_pack("{s:s}", "format", "qtool-report"), *tail = NULL;
    size_t fallbacks;
    int rc = head ? QT_OK : qt_no_memory(err, NULL);
    QT_TRY(rc);
    if (run->writer) {
        QT_TRY(qt_writer_begin_json(&file, run->writer, QT_REPORT_NAME, err));
        QT_TRY(qt_json_out_members(&file, head, err));
        QT_TRY(qt_json_out_begin(&file, "tensors", '[', err));
    }
    QT_TRY(report_tensors(&fallbacks, run->writer ? &file : NULL, run, err));
    tail = tail_json(run, start, fallbacks);
    if (!tail || json_object_set_new(head, "tensors", json_array()) < 0 ||
        json_object_update(head, tail) < 0) {
        rc = qt_no_memory(err, NULL);
        goto done;
    }
    if (run->writer) {
        QT_TRY(qt_json_out_end(&file, err));
        QT_TRY(qt_json_out_members(&file, tail, err));
        QT_TRY(qt_json_out_finish(&file, err));
    }
    *out = json_incref(head);
done:
    qt_json_out_close(&file);
    json_decref(head);
    json_decref(tail);
    return rc;
}

/* ---- the report of a reused output ---------------------------------------------------------- */

typedef void tensor_fn(void *ctx, json_t *tensor);

/* Counts the tensors that have what readers of a report need, and calls fn, unless NULL, for each.
 * Returns false if the text is not an array. */
static bool read_tensors(size_t *count, struct qt_json_part text, tensor_fn *fn, void *ctx)
{
    struct qt_json_cursor c;
    struct qt_json_part part;
    enum qt_json_step step = QT_JSON_FAULT;
    bool sound = qt_json_enter(&c, text, '[');
    while (sound && (step = qt_json_next(&part, &c)) == QT_JSON_PART) {
        json_t *one;
        sound = qt_json_parse_part(&one, part, '[', false, QT_REPORT_NAME, NULL) == QT_OK;
        json_t *t = json_array_get(one, 0);
        const bool usable = json_is_string(json_object_get(t, "name")) &&
                            json_is_string(json_object_get(t, "scheme"));
        *count += usable;
        if (usable && fn)
            fn(ctx, t);
        json_decref(one);
    }
    return sound && step == QT_JSON_END;
}

/* The report with `tensors` empty, owned, or NULL if the text is not one. */
static json_t *read_report(size_t *count, struct qt_json_part text, tensor_fn *fn, void *ctx)
{
    struct qt_json_cursor c;
    struct qt_json_part part, value;
    enum qt_json_step step = QT_JSON_FAULT;
    json_t *report = json_object();
    bool sound = report && qt_json_enter(&c, text, '{');
    *count = 0;
    while (sound && (step = qt_json_next(&part, &c)) == QT_JSON_PART) {
        json_t *one = NULL;
        if (qt_json_part_value(&value, part, "tensors"))
            sound = read_tensors(count, value, fn, ctx) &&
                    json_object_set_new(report, "tensors", json_array()) == 0;
        else
            sound = qt_json_parse_part(&one, part, '{', false, QT_REPORT_NAME, NULL) == QT_OK &&
                    json_object_update(report, one) == 0;
        json_decref(one);
    }
    if (sound && step == QT_JSON_END && json_is_object(json_object_get(report, "totals")))
        return report;
    json_decref(report);
    return NULL;
}

/* The report of the reused output; NULL if there is none that can be used: SHA256SUMS does not
 * cover it. */
static json_t *earlier_report(const struct qt_run *run)
{
    enum { LIMIT = 1 << 28 };
    char *path = NULL, *text = NULL;
    json_t *report = NULL;
    size_t size, count = 0;
    if (qt_path_join(&path, run->opt->out_dir, QT_REPORT_NAME, NULL) == QT_OK &&
        qt_path_exists(path) && qt_file_read(&text, &size, path, LIMIT, NULL) == QT_OK)
        report = read_report(&count, (struct qt_json_part){text, size}, NULL, NULL);
    if (report && count == run->plan.quantized && run->opt->tensor) {
        json_decref(report);
        report = read_report(&count, (struct qt_json_part){text, size}, run->opt->tensor,
                             run->opt->tensor_ctx);
    }
    qt_free(text);
    qt_free(path);
    if (count == run->plan.quantized)
        return report;
    json_decref(report);
    return NULL;
}

int qt_run_report(json_t **out, struct qt_run *run, double start, struct qt_err *err)
{
    *out = run->reused ? earlier_report(run) : NULL;
    return *out ? QT_OK : make_report(out, run, start, err);
}
