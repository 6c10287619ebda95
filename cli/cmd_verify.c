#include "cli/cli.h"

#include <math.h>
#include <stddef.h>

struct verify_options {
    struct common_options common;
    const char *source, *gate;
};

/* ---- figures -------------------------------------------------------------------------------- */

enum { MAX_FIGURES = 8 };

/* Without a source there is no error to speak of. */
static size_t make_figures(struct qt_figure out[MAX_FIGURES], const struct qt_verify_report *r,
                           bool compared)
{
    double sqnr_min = INFINITY, sqnr_sum = 0, cosine_min = 1, mse_max = 0, max_abs = 0;
    size_t n = 0;
    out[n++] = (struct qt_figure){"bpw", r->bpw};
    out[n++] = (struct qt_figure){"bytes", (double)r->bytes};
    if (!compared)
        return n;
    for (size_t i = 0; i < r->count; i++) {
        const struct qt_error *e = &r->tensors[i].error;
        sqnr_min = fmin(sqnr_min, qt_error_sqnr_db(e));
        sqnr_sum += qt_error_sqnr_db(e);
        cosine_min = fmin(cosine_min, qt_error_cosine(e));
        mse_max = fmax(mse_max, qt_error_mse(e));
        max_abs = fmax(max_abs, e->max_abs);
    }
    out[n++] = (struct qt_figure){"sqnr_min", sqnr_min};
    out[n++] = (struct qt_figure){"sqnr_mean", r->count ? sqnr_sum / (double)r->count : INFINITY};
    out[n++] = (struct qt_figure){"cosine_min", cosine_min};
    out[n++] = (struct qt_figure){"mse_max", mse_max};
    out[n++] = (struct qt_figure){"max_abs", max_abs};
    return n;
}

/* ---- results -------------------------------------------------------------------------------- */

static int print_tensors(const struct qt_verify_report *r, struct qt_err *err)
{
    struct table t = {.align = "lllrrrrr"};
    char shape[TEXT_SIZE];
    table_row(&t, "TENSOR\tSCHEME\tSHAPE\tBPW\tSQNR dB\tCOSINE\tMSE\tMAX");
    for (size_t i = 0; i < r->count; i++) {
        const struct qt_verify_tensor *v = &r->tensors[i];
        text_shape(shape, 2, (const size_t[]){v->n, v->k});
        if (v->compared)
            table_row(&t, "%s\t%s\t%s\t%.4f\t%.2f\t%.6f\t%.3g\t%.3g", v->name, v->spec, shape,
                      v->bpw, qt_error_sqnr_db(&v->error), qt_error_cosine(&v->error),
                      qt_error_mse(&v->error), v->error.max_abs);
        else
            table_row(&t, "%s\t%s\t%s\t%.4f", v->name, v->spec, shape, v->bpw);
    }
    return table_print(&t, err);
}

static int print_report(const struct qt_verify_report *r, bool compared,
                        const struct qt_figure *figures, size_t n, struct qt_err *err)
{
    struct table t = {.align = "ll"};
    char bytes[TEXT_SIZE];
    int rc = print_tensors(r, err);
    putchar('\n');
    table_row(&t, "container\tsound: checksums, structure, values, packing%s",
              compared ? ", and equal to its source where copied" : "");
    table_row(&t, "tensors\t%zu quantized, %zu copied", r->count, r->copied);
    table_row(&t, "size\t%s (%llu bytes)", text_bytes(bytes, r->bytes),
              (unsigned long long)r->bytes);
    for (size_t i = 0; i < n; i++)
        if (i != 1) /* bytes are above */
            table_row(&t, "%s\t%.6g", figures[i].name, figures[i].value);
    int second = table_print(&t, rc < 0 ? NULL : err);
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

static void fill_doc(struct cli *cli, const struct qt_verify_report *r,
                     const struct qt_figure *figures, size_t n)
{
    json_t *tensors = json_array();
    for (size_t i = 0; i < r->count; i++)
        doc_append(cli, tensors, tensor_doc(cli, &r->tensors[i]));
    doc_figures(cli, figures, n);
    doc_set(cli, cli->doc, "bytes", doc_size(r->bytes));
    doc_set(cli, cli->doc, "quantized", doc_size(r->count));
    doc_set(cli, cli->doc, "copied", doc_size(r->copied));
    doc_set(cli, cli->doc, "tensors", tensors);
}

/* ---- the command ---------------------------------------------------------------------------- */

/* Before the work: an expression that will not be understood afterwards is refused now. */
static int check_gate(const char *gate, bool compared, struct qt_err *err)
{
    const struct qt_verify_report empty = {0};
    struct qt_figure figures[MAX_FIGURES];
    int rc = gate_validate(gate, figures, make_figures(figures, &empty, true), err);
    if (rc == QT_OK && !compared &&
        gate_validate(gate, figures, make_figures(figures, &empty, false), NULL) < 0)
        rc = qt_fail(err, QT_E_USAGE, NULL, NULL, "--gate '%s' needs --source", gate);
    return rc;
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    const struct verify_options *o = options;
    struct qt_container *container = NULL;
    struct qt_ckpt *source = NULL;
    struct qt_verify_report report = {0};
    struct qt_figure figures[MAX_FIGURES];
    int rc;
    QT_TRY(check_gate(o->gate, o->source != NULL, err));
    QT_TRY(qt_container_open(&container, args[0], err));
    if (o->source)
        QT_TRY(qt_ckpt_open(&source, o->source, err));
    QT_TRY(qt_verify(&report, container, source, &cli->log, err));
    size_t n = make_figures(figures, &report, source != NULL);
    if (cli->doc)
        fill_doc(cli, &report, figures, n);
    else
        QT_TRY(print_report(&report, source != NULL, figures, n, err));
    if (o->gate)
        QT_TRY(qt_gate_check(o->gate, figures, n, err));
done:
    qt_verify_free(&report);
    qt_ckpt_close(source);
    qt_container_close(container);
    return rc;
}

static const struct verify_options defaults = {.common = COMMON_DEFAULTS};

static const struct opt opts[] = {
    {.name = "source",
     .kind = OPT_STRING,
     .offset = offsetof(struct verify_options, source),
     .metavar = "CKPT",
     .help = "the checkpoint it was made from: measures the error of every tensor, and compares "
             "copied ones byte for byte"},
    {.name = "gate",
     .kind = OPT_STRING,
     .offset = offsetof(struct verify_options, gate),
     .metavar = "EXPR",
     .help = "conditions on the figures, for example 'bpw<=4.3,sqnr_min>=18'; exit status 5 when "
             "one fails"},
    {0},
};

static const struct opt_positional positionals[] = {
    {"OUT", "container"},
    {0},
};

const struct command cmd_verify = {
    .name = "verify",
    .summary = "prove that a container is sound, and how close to its source",
    .description =
        "Reads all of a container: checksums, manifest against tensors, what each scheme "
        "requires of its sections, that every weight decodes to a finite number, and that codes "
        "pack to the stored bytes again.\n\n"
        "Figures for --gate: bpw, bytes; with --source also sqnr_min, sqnr_mean (dB, over "
        "tensors), cosine_min, mse_max, max_abs. Relations: <=, >=, <, >; several conditions "
        "are separated by commas.",
    .examples = "  qtool verify nano-fp6\n"
                "  qtool verify nano-fp6 --source examples/nano-llama --gate 'sqnr_min>=30'\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .run = run,
};
