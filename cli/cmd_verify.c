/* verify: checks a container, compares it with its source, and runs its GPU kernels. */
#include "cli/cli.h"

#include <math.h>
#include <stddef.h>

struct verify_options {
    struct common_options common;
    const char *source, *gate;
    bool strict, model;
};

/* Measurements: `report` always, `device` if on_gpu, `model` if whole. */
struct results {
    struct qt_verify_report report;
    struct qt_device_report device;
    struct qt_model_check model;
    bool compared, on_gpu, whole;
};

/* ---- figures -------------------------------------------------------------------------------- */

enum { MAX_FIGURES = 20 };

/* The error of all quantized weights together. */
static struct qt_error sum_errors(const struct qt_verify_report *r)
{
    struct qt_error sum = {0};
    for (size_t i = 0; i < r->count; i++) {
        const struct qt_error *e = &r->tensors[i].error;
        sum.sum_w2 += e->sum_w2;
        sum.sum_e2 += e->sum_e2;
    }
    return sum;
}

/* Maximum; NaN wins, because no gate passes it. */
static double worse(double a, double b)
{
    return isnan(a) || a > b ? a : b;
}

/* The mean skips matrices without error, whose SQNR is infinite. All figures are NaN if no tensor
 * is quantized. */
static size_t source_figures(struct qt_figure *out, const struct qt_verify_report *r)
{
    const struct qt_error sum = sum_errors(r);
    double sqnr_min = INFINITY, sqnr_sum = 0, cosine_min = 1, mse_max = 0, max_abs = 0;
    size_t n = 0, finite = 0;
    for (size_t i = 0; i < r->count; i++) {
        const struct qt_error *e = &r->tensors[i].error;
        const double sqnr = qt_error_sqnr_db(e);
        sqnr_min = -worse(-sqnr_min, -sqnr);
        if (!(isinf(sqnr) && sqnr > 0)) {
            sqnr_sum += sqnr;
            finite++;
        }
        cosine_min = -worse(-cosine_min, -qt_error_cosine(e));
        mse_max = worse(mse_max, qt_error_mse(e));
        max_abs = worse(max_abs, e->max_abs);
    }
    out[n++] = (struct qt_figure){"sqnr", qt_error_sqnr_db(&sum)};
    out[n++] = (struct qt_figure){"sqnr_min", sqnr_min};
    out[n++] = (struct qt_figure){"sqnr_mean", finite ? sqnr_sum / (double)finite : INFINITY};
    out[n++] = (struct qt_figure){"cosine_min", cosine_min};
    out[n++] = (struct qt_figure){"mse_max", mse_max};
    out[n++] = (struct qt_figure){"max_abs", max_abs};
    for (size_t i = 0; i < n && r->count == 0; i++)
        out[i].value = NAN;
    return n;
}

enum { TENSOR_FIGURES = 5 };

/* Figures of one tensor, for NAME[REGEX]. Returns their number. */
static size_t tensor_figures(struct qt_figure out[TENSOR_FIGURES], const struct qt_verify_tensor *t,
                             const struct results *r)
{
    size_t n = 0;
    out[n++] = (struct qt_figure){"bpw", t->bpw};
    if (!r->compared)
        return n;
    out[n++] = (struct qt_figure){"sqnr", qt_error_sqnr_db(&t->error)};
    out[n++] = (struct qt_figure){"cosine", qt_error_cosine(&t->error)};
    out[n++] = (struct qt_figure){"mse", qt_error_mse(&t->error)};
    out[n++] = (struct qt_figure){"max_abs", t->error.max_abs};
    return n;
}

static bool is_timed(const struct qt_device_tensor *t)
{
    return !t->missing[0] && isfinite(t->us[0]);
}

/* Errors are NaN if no tensor has a kernel, the speed-up is NaN if none is timed. */
static size_t device_figures(struct qt_figure *out, const struct qt_device_report *r)
{
    bool none = r->missing == r->count, timed = false;
    double error[2] = {none ? NAN : 0, none ? NAN : 0}, speedup = INFINITY;
    size_t n = 0;
    for (size_t i = 0; i < r->count; i++) {
        const struct qt_device_tensor *t = &r->tensors[i];
        if (t->missing[0])
            continue;
        error[0] = worse(error[0], t->error[0]);
        error[1] = worse(error[1], t->error[1]);
        timed = timed || is_timed(t);
        if (is_timed(t))
            speedup = -worse(-speedup, -t->cublas_us[0] / t->us[0]);
    }
    out[n++] = (struct qt_figure){"kernel_faults", (double)r->faults};
    out[n++] = (struct qt_figure){"kernels_missing", (double)r->missing};
    out[n++] = (struct qt_figure){"kernel_error", error[QTOOL_F16]};
    out[n++] = (struct qt_figure){"kernel_error_bf16", error[QTOOL_BF16]};
    out[n++] = (struct qt_figure){"kernel_speedup_min", timed ? speedup : NAN};
    return n;
}

/* The error is NaN before the measurement. */
static size_t model_figures(struct qt_figure *out, const struct qt_model_check *c)
{
    size_t n = 0;
    out[n++] = (struct qt_figure){"model_faults", (double)c->faults};
    out[n++] = (struct qt_figure){"model_error", c->tokens ? c->error : NAN};
    out[n++] = (struct qt_figure){"model_equal", (double)c->equal / (double)c->tokens};
    return n;
}

/* Errors need a source, kernel figures a GPU. Returns the number of figures. */
static size_t make_figures(struct qt_figure out[MAX_FIGURES], const struct results *r)
{
    size_t n = 0;
    /* NaN if no tensor is quantized: no gate passes. */
    out[n++] = (struct qt_figure){"bpw", r->report.bpw > 0 ? r->report.bpw : NAN};
    out[n++] = (struct qt_figure){"bytes", (double)r->report.bytes};
    if (r->compared)
        n += source_figures(out + n, &r->report);
    if (r->on_gpu)
        n += device_figures(out + n, &r->device);
    if (r->whole)
        n += model_figures(out + n, &r->model);
    return n;
}

/* ---- results -------------------------------------------------------------------------------- */

static int print_tensors(const struct qt_verify_report *r, struct qt_err *err)
{
    struct table t = {.align = "lllrrrrr"};
    char shape[TEXT_SIZE], spec[QT_SPEC_TEXT];
    table_row(&t, "TENSOR\tSCHEME\tSHAPE\tBPW\tSQNR dB\tCOSINE\tMSE\tMAX");
    for (size_t i = 0; i < r->count; i++) {
        const struct qt_verify_tensor *v = &r->tensors[i];
        text_shape(shape, 2, (const size_t[]){v->n, v->k});
        qt_spec_short(spec, v->spec);
        if (v->compared)
            table_row(&t, "%s\t%s\t%s\t%.4f\t%.2f\t%.6f\t%.3g\t%.3g", v->name, spec, shape, v->bpw,
                      qt_error_sqnr_db(&v->error), qt_error_cosine(&v->error),
                      qt_error_mse(&v->error), v->error.max_abs);
        else
            table_row(&t, "%s\t%s\t%s\t%.4f", v->name, spec, shape, v->bpw);
    }
    return table_print(&t, err);
}

/* "12.3 3.21x" (time, speed-up over cuBLAS), "12.3" without cuBLAS, "" without a time. */
static const char *text_time(char buf[TEXT_SIZE], double us, double cublas_us)
{
    buf[0] = '\0';
    if (isfinite(cublas_us))
        snprintf(buf, TEXT_SIZE, "%.2f %.2fx", us, cublas_us / us);
    else if (isfinite(us))
        snprintf(buf, TEXT_SIZE, "%.2f", us);
    return buf;
}

static int print_device(const struct qt_device_report *r, const struct qt_gpu *gpu,
                        struct qt_err *err)
{
    struct table t = {.align = "lllrrrrrl"};
    char shape[TEXT_SIZE], us[QT_DEVICE_TIMES][TEXT_SIZE], spec[QT_SPEC_TEXT];
    printf("\nfused kernels on %s, %s, %s\n", gpu->name, gpu->cuda, gpu->cublas);
    table_row(&t, "TENSOR\tSCHEME\tSHAPE\tFP16\tBF16\tM=%zu us\tM=%zu us\tM=%zu us\tRESULT",
              qt_device_times[0], qt_device_times[1], qt_device_times[2]);
    for (size_t i = 0; i < r->count; i++) {
        const struct qt_device_tensor *d = &r->tensors[i];
        text_shape(shape, 2, (const size_t[]){d->n, d->k});
        qt_spec_short(spec, d->spec);
        if (d->missing[0]) {
            table_row(&t, "%s\t%s\t%s\t\t\t\t\t\tno kernel: %s", d->name, spec, shape, d->missing);
            continue;
        }
        for (int j = 0; j < QT_DEVICE_TIMES; j++)
            text_time(us[j], d->us[j], d->cublas_us[j]);
        table_row(&t, "%s\t%s\t%s\t%.2e\t%.2e\t%s\t%s\t%s\t%s%s", d->name, spec, shape,
                  d->error[QTOOL_F16], d->error[QTOOL_BF16], us[0], us[1], us[2],
                  d->faults ? "FAILED: " : "ok", d->fault);
    }
    return table_print(&t, err);
}

/* quiet: without the rows of single tensors. */
static int print_report(const struct results *r, const struct qt_gpu *gpu,
                        const struct qt_figure *figures, size_t n, bool quiet, struct qt_err *err)
{
    struct table t = {.align = "ll"};
    char bytes[TEXT_SIZE], tuned[TEXT_SIZE] = "";
    int rc = QT_OK, second;
    if (!quiet)
        QT_TRY(print_tensors(&r->report, err));
    if (!quiet && r->on_gpu)
        QT_TRY(print_device(&r->device, gpu, err));
    if (!quiet)
        putchar('\n');
    if (!quiet && r->whole)
        printf("the model on the fused kernels: %zu of %zu greedy choices as on the CPU%s%s\n\n",
               r->model.equal, r->model.tokens, r->model.faults ? "; FAILED: " : "",
               r->model.fault);
    table_row(&t, "container\tsound: checksums, structure, values, packing%s",
              r->compared ? "; copied tensors equal the source" : "");
    if (r->report.tuned)
        snprintf(tuned, sizeof tuned, ", %zu tuned", r->report.tuned);
    table_row(&t, "tensors\t%zu quantized, %zu copied%s", r->report.count, r->report.copied, tuned);
    nonfinite_row(&t, r->report.nonfinite, r->report.nonfinite_tensors, r->report.nonfinite_values);
    table_row(&t, "size\t%s (%llu bytes)", text_bytes(bytes, r->report.bytes),
              (unsigned long long)r->report.bytes);
    for (size_t i = 0; i < n; i++)
        if (i != 1) /* "bytes" is printed above */
            table_row(&t, isnan(figures[i].value) ? "%s\t-" : "%s\t%.6g", figures[i].name,
                      figures[i].value);
done:
    second = table_print(&t, rc < 0 ? NULL : err);
    return rc < 0 ? rc : second;
}

static json_t *tensor_doc(struct cli *cli, const struct qt_verify_tensor *v)
{
    json_t *o = json_object();
    doc_set(cli, o, "name", doc_text(v->name));
    doc_set(cli, o, "scheme", doc_text(v->spec));
    doc_set(cli, o, "shape", doc_shape(2, (const size_t[]){v->n, v->k}));
    doc_set(cli, o, "bpw", doc_real(v->bpw));
    if (v->compared) {
        doc_set(cli, o, "sqnr_db", doc_real(qt_error_sqnr_db(&v->error)));
        doc_set(cli, o, "cosine", doc_real(qt_error_cosine(&v->error)));
        doc_set(cli, o, "mse", doc_real(qt_error_mse(&v->error)));
        doc_set(cli, o, "max_abs", doc_real(v->error.max_abs));
    }
    return o;
}

static json_t *device_tensor_doc(struct cli *cli, const struct qt_device_tensor *t)
{
    json_t *o = json_object(), *times = json_array();
    doc_set(cli, o, "name", doc_text(t->name));
    doc_set(cli, o, "no_kernel", doc_text(t->missing[0] ? t->missing : NULL));
    for (size_t i = 0; is_timed(t) && i < QT_DEVICE_TIMES; i++) {
        json_t *row = json_object();
        doc_set(cli, row, "m", doc_size(qt_device_times[i]));
        doc_set(cli, row, "us", doc_real(t->us[i]));
        doc_set(cli, row, "cublas_us", doc_real(t->cublas_us[i]));
        doc_append(cli, times, row);
    }
    if (!t->missing[0]) {
        doc_set(cli, o, "products", doc_size(t->runs));
        doc_set(cli, o, "faults", doc_size(t->faults));
        doc_set(cli, o, "first_fault", doc_text(t->fault[0] ? t->fault : NULL));
        doc_set(cli, o, "error_f16", doc_real(t->error[QTOOL_F16]));
        doc_set(cli, o, "error_bf16", doc_real(t->error[QTOOL_BF16]));
    }
    doc_set(cli, o, "times", times);
    return o;
}

static void fill_doc(struct cli *cli, const struct results *r, const struct qt_gpu *gpu,
                     const struct qt_figure *figures, size_t n)
{
    json_t *tensors = json_array(), *device = r->on_gpu ? json_array() : NULL;
    for (size_t i = 0; i < r->report.count; i++)
        doc_append(cli, tensors, tensor_doc(cli, &r->report.tensors[i]));
    doc_figures(cli, figures, n);
    doc_set(cli, cli->doc, "bytes", doc_size(r->report.bytes));
    doc_set(cli, cli->doc, "quantized", doc_size(r->report.count));
    doc_set(cli, cli->doc, "copied", doc_size(r->report.copied));
    doc_set(cli, cli->doc, "tuned", doc_size(r->report.tuned));
    doc_nonfinite(cli, r->report.nonfinite, r->report.nonfinite_tensors,
                  r->report.nonfinite_values);
    doc_set(cli, cli->doc, "tensors", tensors);
    if (!r->on_gpu)
        return;
    for (size_t i = 0; i < r->device.count; i++)
        doc_append(cli, device, device_tensor_doc(cli, &r->device.tensors[i]));
    doc_set(cli, cli->doc, "gpu", doc_gpu(cli, gpu));
    doc_set(cli, cli->doc, "kernels", device);
    if (!r->whole)
        return;
    json_t *model = json_object();
    doc_set(cli, model, "choices", doc_size(r->model.tokens));
    doc_set(cli, model, "equal", doc_size(r->model.equal));
    doc_set(cli, model, "error", doc_real(r->model.error));
    doc_set(cli, model, "gap", doc_real(r->model.gap));
    doc_set(cli, model, "rms", doc_real(r->model.rms));
    doc_set(cli, model, "rms_rounded", doc_real(r->model.rms_rounded));
    doc_set(cli, model, "fault", doc_text(r->model.faults ? r->model.fault : NULL));
    doc_set(cli, cli->doc, "model", model);
}

/* ---- the command ---------------------------------------------------------------------------- */

/* Checks the gate against the names of the figures that the measurements in r give. */
static int check_syntax(const char *gate, struct results r, struct qt_err *err)
{
    const struct qt_verify_tensor none = {0};
    struct qt_figure figures[MAX_FIGURES], each[TENSOR_FIGURES];
    const struct qt_tensor_figures tensors = {NULL, 1, each, tensor_figures(each, &none, &r)};
    return gate_validate(gate, figures, make_figures(figures, &r), &tensors, err);
}

static int needs(const char *gate, struct results r, const char *option, struct qt_err *err)
{
    if (check_syntax(gate, r, NULL) < 0)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--gate '%s' needs %s", gate, option);
    return QT_OK;
}

/* Rejects an invalid gate before any work, and names the option that a figure needs. */
static int check_gate(const char *gate, const struct results *r, struct qt_err *err)
{
    int rc;
    const struct results all = {.compared = true, .on_gpu = true, .whole = true};
    struct results some = all;
    QT_TRY(check_syntax(gate, all, err));
    some.compared = r->compared;
    QT_TRY(needs(gate, some, "--source", err));
    some = all;
    some.on_gpu = some.whole = r->on_gpu;
    QT_TRY(needs(gate, some, "--device cuda", err));
    some = all;
    some.whole = r->whole;
    QT_TRY(needs(gate, some, "--model", err));
done:
    return rc;
}

/* Figures of all tensors of the container, for a gate. Values are 0 before the measurements. */
struct tensor_rows {
    struct qt_tensor_figures t;
    struct qt_figure *each;
    const char **names;
};

static void rows_free(struct tensor_rows *rows)
{
    qt_free(rows->each);
    qt_free(rows->names);
}

static int rows_new(struct tensor_rows *rows, const struct results *r,
                    const struct qt_container *container, struct qt_err *err)
{
    const struct qt_verify_tensor none = {0};
    const size_t count = qt_container_count(container);
    int rc;
    *rows = (struct tensor_rows){0};
    QT_TRY(qt_array_new(&rows->each, (count + 1) * TENSOR_FIGURES, sizeof *rows->each, err));
    QT_TRY(qt_array_new(&rows->names, count, sizeof *rows->names, err));
    const size_t n = tensor_figures(rows->each, &none,
                                    r); /* the names are needed even if there are no tensors */
    for (size_t i = 0; i < count; i++) {
        rows->names[i] = qt_container_entry(container, i)->name;
        if (i < r->report.count)
            tensor_figures(rows->each + i * n, &r->report.tensors[i], r);
    }
    rows->t = (struct qt_tensor_figures){rows->names, count, rows->each, n};
done:
    if (rc < 0)
        rows_free(rows);
    return rc;
}

/* Rejects regular expressions that match no quantized tensor, before any work. */
static int check_gate_names(const char *gate, const struct results *r,
                            const struct qt_container *container, struct qt_err *err)
{
    struct qt_figure figures[MAX_FIGURES];
    struct tensor_rows rows;
    if (!gate)
        return QT_OK;
    int rc = rows_new(&rows, r, container, err);
    if (rc < 0)
        return rc;
    rc = gate_validate(gate, figures, make_figures(figures, r), &rows.t, err);
    rows_free(&rows);
    return rc;
}

static int check_figures(struct cli *cli, const char *gate, const struct results *r,
                         const struct qt_container *container, const struct qt_figure *figures,
                         size_t n, struct qt_err *err)
{
    struct tensor_rows rows;
    int rc = rows_new(&rows, r, container, err);
    if (rc < 0)
        return rc;
    rc = gate_apply(cli, gate, figures, n, &rows.t, err);
    rows_free(&rows);
    return rc;
}

/* On a GPU, two conditions are always required, of which --gate can replace the second; with a
 * model a third. */
static int apply_gates(struct cli *cli, const char *gate, const struct results *r,
                       const struct qt_container *container, const struct qt_figure *figures,
                       size_t n, struct qt_err *err)
{
    const char *own = gate && qt_gate_names(gate, "kernels_missing")
                          ? "kernel_faults<=0"
                          : "kernel_faults<=0,kernels_missing<=0";
    char *text = NULL;
    int rc = QT_OK;
    if (r->on_gpu)
        QT_TRY(qt_string_format(&text, err, "%s%s%s%s", own, r->whole ? ",model_faults<=0" : "",
                                gate ? "," : "", gate ? gate : ""));
    if (text || gate)
        QT_TRY(check_figures(cli, text ? text : gate, r, container, figures, n, err));
done:
    qt_free(text);
    return rc;
}

static int measure_kernels(struct cli *cli, struct results *r, const struct qt_container *container,
                           struct qt_gpu *gpu, struct qt_err *err)
{
    struct qt_backend *cpu = NULL;
    int rc = qt_backend_cpu_open(&cpu, err);
    if (rc < 0)
        return rc;
    rc = qt_verify_device(&r->device, container, gpu, cpu, cli->comm, &cli->log, err);
    if (rc == QT_OK && r->whole && qt_comm_rank(cli->comm) == 0)
        rc = qt_verify_model(&r->model, container, gpu, cpu, &cli->log, err);
    cpu->close(cpu);
    return rc;
}

static int check_strict(const struct qt_verify_report *r, const char *dir, struct qt_err *err)
{
    return r->nonfinite_tensors == 0
               ? QT_OK
               : qt_fail(err, QT_E_INPUT, dir, r->nonfinite,
                         "has values that are NaN or infinity (%llu in all copied tensors); "
                         "--strict refuses them",
                         (unsigned long long)r->nonfinite_values);
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    const struct verify_options *o = options;
    struct qt_container *container = NULL;
    struct qt_ckpt *source = NULL;
    struct qt_gpu *gpu = NULL;
    struct results r = {.compared = o->source != NULL,
                        .on_gpu = device_number(o->common.device) >= 0,
                        .whole = o->model};
    struct qt_figure figures[MAX_FIGURES];
    int rc;
    if (r.whole && !r.on_gpu)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--model needs --device cuda");
    QT_TRY(check_gate(o->gate, &r, err));
    if (r.on_gpu)
        QT_TRY(qt_gpu_open(&gpu, device_number(o->common.device), err));
    QT_TRY(container_open(&container, args[0], err));
    QT_TRY(check_gate_names(o->gate, &r, container, err));
    if (o->source)
        QT_TRY(checkpoint_open(&source, o->source, err));
    QT_TRY(qt_verify(&r.report, container, source, cli->comm, &cli->log, err));
    if (r.on_gpu)
        QT_TRY(measure_kernels(cli, &r, container, gpu, err));
    size_t n = make_figures(figures, &r);
    ui_clear(&cli->ui);
    if (cli->doc)
        QT_TRY(doc_measured(cli, args[0], container, qt_container_ckpt(container), err));
    if (cli->doc)
        fill_doc(cli, &r, gpu, figures, n);
    else
        QT_TRY(print_report(&r, gpu, figures, n, o->common.quiet, err));
    if (o->strict)
        QT_TRY(check_strict(&r.report, args[0], err));
    QT_TRY(apply_gates(cli, o->gate, &r, container, figures, n, err));
done:
    qt_device_free(&r.device);
    qt_verify_free(&r.report);
    qt_ckpt_close(source);
    qt_container_close(container);
    if (gpu)
        gpu->close(gpu);
    return rc;
}

static const struct verify_options defaults = {.common = COMMON_DEFAULTS};

static const struct opt opts[] = {
    {.name = "source",
     .kind = OPT_STRING,
     .offset = offsetof(struct verify_options, source),
     .metavar = "CKPT",
     .help = "checkpoint that the container was made from: measures the error of every tensor and "
             "compares copied tensors (except learned norms) byte for byte"},
    {.name = "gate",
     .kind = OPT_STRING,
     .offset = offsetof(struct verify_options, gate),
     .metavar = "EXPR",
     .help = "conditions on the figures, for example 'bpw<=4.3,sqnr_min>=18'; exit status 5 if "
             "one fails"},
    {.name = "strict",
     .kind = OPT_FLAG,
     .offset = offsetof(struct verify_options, strict),
     .help = "fail if a copied tensor has a value that is NaN or infinity"},
    {.name = "model",
     .kind = OPT_FLAG,
     .offset = offsetof(struct verify_options, model),
     .help = "with --device cuda: also run the whole model on the fused kernels, and compare with "
             "the CPU"},
    {0},
};

static const struct opt_positional positionals[] = {
    {"OUT", "container"},
    {0},
};

const struct command cmd_verify = {
    .name = "verify",
    .summary = "check a container, and measure its error against the source",
    .description =
        "Reads the whole container and checks that checksums (also SHA256SUMS) are right, that "
        "manifest and tensors agree, that sections have the form their scheme requires, that "
        "every quantized weight decodes to a finite number, that packing the codes again gives "
        "the stored bytes, and that w4ax tensors with a common input agree. Copied tensors are "
        "compared with --source. NaN and infinity in copied tensors are no error, because the "
        "source has them, too: a warning gives their number and names a tensor.\n\n"
        "With --device cuda every quantized tensor also runs through its fused GPU kernel, with 1 "
        "to 128 tokens and random and heavy-tailed activations in FP16 and BF16, and is compared "
        "with CPU products of the decoded weights (FP32, some rows in FP64). Every product runs "
        "twice. Before, outputs and workspace (except the part that must be zero) are filled with "
        "NaN and surrounded by guard bytes. Batch-"
        "invariant products must have the same bits for any number of tokens; dequantized weights "
        "must match bit for bit. For kernels that round weights to FP16 (with 17 tokens or more: "
        "all with groups of 32 channels, some with groups of 64) the reference uses rounded "
        "weights, too. w4ax: "
        "quantized activations must match those of the CPU bit for bit, and their products must "
        "match up to FP32 rounding.\n\n"
        "The table has one row per tensor, and one for a 4-bit KV cache ('quantize --kv 4'): "
        "appended tokens must match bit for bit, and attention is compared with FP64. Only keys "
        "with scales per channel and 64 tokens ('--kv-keys channel', the default) have kernels; "
        "other caches count in kernels_missing. The table shows relative errors (rounding the "
        "outputs alone gives about 2.07e-4 in FP16 and 1.66e-3 in BF16), microseconds with "
        "weights that are not in the L2 cache, and the speed-up over cuBLAS in FP16.\n\n"
        "With --model the fused runtime (as in 'generate --device cuda') and the CPU (FP32, "
        "dequantized weights) run a prompt of 16 random tokens and 64 greedy steps. It is a fault "
        "if a logit differs by more than 2 % of the range of the logits (largest - smallest). So "
        "choices may differ only where the two largest logits are closer than 4 % of the range. "
        "With w4ax, where a small difference moves activations to another code, it is a fault if "
        "the RMS difference of the logits is more than twice what it is between the CPU and the "
        "CPU with linear inputs rounded to FP16 (taken as 0.1 % of the range at least).\n\n"
        "Figures for --gate: bpw and bytes. With --source also sqnr (dB, over all quantized "
        "weights); over tensors: sqnr_min, sqnr_mean (without tensors that have no error), "
        "cosine_min and mse_max; max_abs: the largest difference of a weight. With --device cuda "
        "also kernel_faults: number of products and other checks that failed; kernels_missing: "
        "tensors and caches without a kernel; kernel_error and kernel_error_bf16: the largest "
        "relative errors; kernel_speedup_min: the smallest speed-up over cuBLAS with one token. "
        "--device cuda always requires 'kernel_faults<=0,kernels_missing<=0'; a --gate that names "
        "kernels_missing replaces the second condition. With --model also model_faults (always "
        "required to be 0), model_error (the largest difference of a logit, relative to the "
        "range) and model_equal (the fraction of equal choices).\n\n"
        "Relations: <=, >=, <, >; commas separate conditions. NAME[REGEX] is a condition on each "
        "tensor whose name matches: bpw[REGEX]; with --source also sqnr, cosine, mse, max_abs.",
    .examples = "  qtool verify nano-fp6\n"
                "  qtool verify nano-fp6 --source examples/nano-llama --gate 'sqnr_min>=30'\n"
                "  qtool verify nano-fp6 --source examples/nano-llama \\\n"
                "      --gate 'sqnr[down_proj]>=31'\n"
                "  qtool verify nano-fp6 --device cuda --gate 'kernel_speedup_min>=1.2'\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .gpu = true,
    .ranks = true,
    .run = run,
};
