/* qtool-report.json: the errors from the manifest, with times and memory, which differ between
 * runs. */
#include "pack/run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static const char *const copied_members[] = {"scheme",    "shape", "bpw",
                                             "paper_bpw", "error", "hessian"};

static json_t *tensor_json(const struct qt_run *run, size_t i)
{
    const struct qt_plan_item *item = &run->plan.items[i];
    json_t *t = json_pack("{s:s}", "name", item->tensor->name);
    int failed = 0;
    for (size_t m = 0; m < sizeof copied_members / sizeof *copied_members; m++) {
        json_t *value = json_object_get(run->entries[i], copied_members[m]);
        if (value) /* some schemes lack some members */
            failed |= json_object_set(t, copied_members[m], value);
    }
    failed |= json_object_set_new(
        t, "ms", run->seconds[i] > 0 ? json_real(1e3 * run->seconds[i]) : json_null());
    if (!failed)
        return t;
    json_decref(t);
    return NULL;
}

static size_t count_fallbacks(const json_t *tensors)
{
    size_t i, n = 0;
    json_t *t;
    json_array_foreach (tensors, i, t) {
        n += json_object_get(json_object_get(t, "hessian"), "fallback") != NULL;
    }
    return n;
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

int qt_run_report(json_t **out, const struct qt_run *run, double start, struct qt_err *err)
{
    json_t *tensors = json_array();
    int failed = 0;
    *out = NULL;
    for (size_t i = 0; i < run->plan.count; i++)
        if (!run->plan.items[i].copied)
            failed |= json_array_append_new(tensors, tensor_json(run, i));
    size_t fallbacks = count_fallbacks(tensors);
    if (failed) {
        json_decref(tensors);
        return qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
    }
    *out = json_pack(
        "{s:s, s:o, s:{s:I, s:I, s:f, s:I, s:I, s:I, s:f, s:I}}", "format", "qtool-report",
        "tensors", tensors, "totals", "quantized", (json_int_t)run->plan.quantized, "copied",
        (json_int_t)(run->plan.count - run->plan.quantized), "bpw", qt_plan_bpw(&run->plan),
        "bytes", (json_int_t)run->plan.output_bytes, "calibration_tokens",
        (json_int_t)calibration_tokens(run->opt->calibration), "fallbacks", (json_int_t)fallbacks,
        "seconds", qt_clock() - start, "peak_rss_bytes", (json_int_t)peak_memory());
    if (*out && run->learning)
        failed |= json_object_set(*out, "learning", run->learning);
    if (*out && run->acts.report)
        failed |= json_object_set(*out, "activations", run->acts.report);
    if (*out && run->kv.entry)
        failed |= json_object_set(*out, "kv", run->kv.entry);
    return *out && !failed ? QT_OK : qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory");
}
