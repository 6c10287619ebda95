/* quantize: makes a container. */
#include "cli/cli.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

struct quantize_options {
    struct common_options common;
    const char *out, *scheme, *learn;
    struct opt_list tensor;
    struct calibration_options calibration;
    struct kv_options kv;
    struct budget_options budget;
    bool tune_norms, force, resume, strict;
};

/* ---- command lines -------------------------------------------------------------------------- */

/* Appends a blank and the word quoted for a shell, at most 4 bytes per byte and 3 more. Returns the
 * end. */
static char *append_quoted(char *to, const char *word)
{
    static const char safe[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                               "@%+=:,./_-";
    if (*word && word[strspn(word, safe)] == '\0')
        return to + sprintf(to, " %s", word);
    to += sprintf(to, " '");
    for (; *word; word++)
        to += sprintf(to, *word == '\'' ? "'\\''" : "%c", *word);
    return to + sprintf(to, "'");
}

/* *out = a blank and the word, quoted for a shell. The caller frees it with qt_free. */
static int quote(char **out, const char *word, struct qt_err *err)
{
    int rc = qt_array_new(out, 4 * strlen(word) + 4, 1, err);
    if (rc == QT_OK)
        append_quoted(*out, word);
    return rc;
}

/* *out: the command line that resumes this run. The caller frees it with qt_free. */
static int resume_command(char **out, const struct cli *cli, bool has_resume, struct qt_err *err)
{
    char *line, *to;
    size_t room = sizeof " --resume";
    for (int i = 0; i < cli->argc; i++)
        room += 4 * strlen(cli->argv[i]) + 3;
    int rc = qt_array_new(&line, room, 1, err);
    if (rc < 0)
        return rc;
    to = line;
    for (int i = 0; i < cli->argc; i++) {
        to = append_quoted(to, cli->argv[i]);
        if (i == 1 && !has_resume) /* behind the command's name: "--" may follow */
            to += sprintf(to, " --resume");
    }
    rc = qt_string_copy(out, line + 1, err); /* without the first blank */
    qt_free(line);
    return rc;
}

/* ---- the command ---------------------------------------------------------------------------- */

/* Refuses, before any work, an OUT that may not be replaced. --force would delete the checkpoint if
 * OUT were the same directory; --resume may find OUT complete. */
static int check_out(const struct quantize_options *o, const struct qt_ckpt *ckpt, const char *path,
                     struct qt_err *err)
{
    const struct qt_writer_options opt = {.force = o->force};
    char *to = realpath(o->out, NULL), *from = realpath(path, NULL),
         *dir = realpath(qt_ckpt_dir(ckpt), NULL);
    bool same = to && ((from && strcmp(to, from) == 0) || (dir && strcmp(to, dir) == 0));
    free(to);
    free(from);
    free(dir);
    if (same)
        return qt_fail(err, QT_E_USAGE, o->out, NULL,
                       "is the checkpoint itself: choose another output directory");
    return o->resume ? QT_OK : qt_writer_check(o->out, &opt, err);
}

static const char *text_real(char buf[TEXT_SIZE], const char *format, const json_t *value)
{
    if (json_is_number(value))
        snprintf(buf, TEXT_SIZE, format, json_number_value(value));
    else
        snprintf(buf, TEXT_SIZE, "-");
    return buf;
}

/* Quantized tensors are reported here one by one, in the table on stderr (a message, not a result)
 * or in an array for the document. */
struct tensors {
    struct cli *cli;
    struct table table;
    json_t *list; /* NULL: the table */
    bool quiet;
};

static void tensor_row(struct table *t, const json_t *tensor)
{
    const json_t *error = json_object_get(tensor, "error");
    const json_t *hessian = json_object_get(tensor, "hessian");
    const json_t *shape = json_object_get(tensor, "shape");
    const char *fallback = json_string_value(json_object_get(hessian, "fallback"));
    const long long tokens = json_integer_value(json_object_get(hessian, "tokens"));
    const long long missing = json_integer_value(json_object_get(hessian, "missing_tokens"));
    char text[6][TEXT_SIZE], spec[QT_SPEC_TEXT], few[TEXT_SIZE] = "";
    if (missing > 0)
        snprintf(few, sizeof few, "%lld of %lld tokens", tokens, tokens + missing);
    bool raised = json_is_true(json_object_get(hessian, "damp_raised"));
    table_row(t, "%s\t%lldx%lld\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s",
              json_string_value(json_object_get(tensor, "name")),
              (long long)json_integer_value(json_array_get(shape, 0)),
              (long long)json_integer_value(json_array_get(shape, 1)),
              qt_spec_short(spec, json_string_value(json_object_get(tensor, "scheme"))),
              text_real(text[0], "%.4f", json_object_get(tensor, "bpw")),
              text_real(text[1], "%.3e", json_object_get(error, "mse")),
              text_real(text[2], "%.2f", json_object_get(error, "sqnr_db")),
              text_real(text[3], "%.4g", json_object_get(hessian, "error_before")),
              text_real(text[4], "%.4g", json_object_get(hessian, "error_after")),
              text_real(text[5], "%.0f", json_object_get(tensor, "ms")),
              fallback ? fallback
              : raised ? "damping raised"
                       : few);
}

static void add_tensor(void *ctx, json_t *tensor)
{
    struct tensors *t = ctx;
    if (t->list)
        doc_append(t->cli, t->list, json_incref(tensor));
    else if (!t->quiet)
        tensor_row(&t->table, tensor);
}

/* "dense|gguf": the formats that hold the container exactly. */
static void list_formats(char *text, size_t size, const char *out)
{
    const struct qt_log silent = {0};
    struct qt_export_options opt = {.dry_run = true, .log = &silent};
    struct qt_export_report ignored;
    struct qt_container *container;
    struct qt_err why;
    size_t at = 0;
    text[0] = '\0';
    if (qt_container_open(&container, out, &why) < 0)
        return;
    for (size_t f = 0; at < size && (opt.format = qt_export_format_at(f)) != NULL; f++)
        if (qt_export(&ignored, container, &opt, &why) == QT_OK)
            at += (size_t)snprintf(text + at, size - at, "%s%s", at ? "|" : "",
                                   qt_export_name(opt.format));
    qt_container_close(container);
}

/* Says what to do next. */
static int print_next(struct cli *cli, const struct quantize_options *o, const char *ckpt,
                      struct qt_err *err)
{
    char formats[200], *out = NULL, *source = NULL;
    int rc = QT_OK;
    if (o->common.quiet)
        return rc;
    QT_TRY(quote(&out, o->out, err));
    QT_TRY(quote(&source, ckpt, err));
    list_formats(formats, sizeof formats, o->out);
    const bool any = formats[0] != '\0';
    qt_log_message(&cli->log, QT_LOG_INFO,
                   "next: qtool verify%s --source%s; qtool eval%s --data TEXT --ref%s%s%s%s%s", out,
                   source, out, source, any ? "; qtool export" : "", any ? out : "",
                   any ? " -o DIR --format " : "", formats);
done:
    qt_free(source);
    qt_free(out);
    return rc;
}

static int print_report(struct cli *cli, const struct quantize_options *o,
                        const struct qt_ckpt *ckpt, const struct calibration *calibration,
                        const struct qt_quantize_report *r, struct tensors *tensors,
                        struct qt_err *err)
{
    const struct qt_calibration *data = &calibration->data;
    struct table t = {.align = "ll"};
    int rc = QT_OK;
    char before[TEXT_SIZE], after[TEXT_SIZE];
    uint64_t source_bytes = 0;
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++)
        source_bytes += qt_ckpt_tensor(ckpt, i)->nbytes;
    if (cli->doc) {
        doc_set(cli, cli->doc, "out", doc_text(o->out));
        doc_set(cli, cli->doc, "reused", json_boolean(r->reused));
        doc_set(cli, cli->doc, "quantized", doc_size(r->quantized));
        doc_set(cli, cli->doc, "copied", doc_size(r->copied));
        doc_set(cli, cli->doc, "bpw", doc_real(r->bpw));
        if (!isnan(r->paper_bpw))
            doc_set(cli, cli->doc, "paper_bpw", doc_real(r->paper_bpw));
        doc_set(cli, cli->doc, "bytes", doc_size(r->bytes));
        doc_set(cli, cli->doc, "source_bytes", doc_size(source_bytes));
        doc_share(cli, &r->share, r->left, r->nleft);
        doc_bos(cli, &calibration->bos);
        doc_nonfinite(cli, r->nonfinite, r->nonfinite_tensors, r->nonfinite_values);
        doc_set(cli, r->document, "tensors", json_incref(tensors->list));
        doc_set(cli, cli->doc, "report", json_incref(r->document));
        return QT_OK;
    }
    if (!o->common.quiet)
        rc = table_print_to(stderr, &tensors->table, err);
    if (rc < 0)
        return rc;
    table_row(&t, "container\t%s%s", o->out, r->reused ? ", already complete" : "");
    if (data->samples)
        table_row(&t, "data\t%zu window%s of %zu tokens", data->samples, text_plural(data->samples),
                  data->seqlen);
    bos_row(&t, &calibration->bos);
    table_row(&t, "tensors\t%zu quantized, %zu copied", r->quantized, r->copied);
    nonfinite_row(&t, r->nonfinite, r->nonfinite_tensors, r->nonfinite_values);
    share_rows(&t, &r->share, r->left, r->nleft);
    table_row(&t, "bpw\t%.4f bits per quantized weight", r->bpw);
    table_paper_bpw(&t, r->paper_bpw);
    table_row(&t, "size\t%s (%llu bytes), source %s", text_bytes(after, r->bytes),
              (unsigned long long)r->bytes, text_bytes(before, source_bytes));
    return table_print(&t, err);
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    const struct quantize_options *o = options;
    struct qt_quantize_report report = {0};
    struct qt_ckpt *ckpt = NULL;
    struct rules rules = {0};
    struct calibration calibration = {0};
    struct qt_budget budget = {0};
    struct tensors tensors = {
        .cli = cli, .table = {.align = "lrlrrrrrrl"}, .quiet = o->common.quiet};
    struct qt_learn_options learn;
    enum qt_kv_keys kv;
    char *command = NULL, *hint = NULL;
    int rc;
    QT_TRY(resume_command(&command, cli, o->resume, err));
    QT_TRY(qt_string_format(&hint, err, "To continue: %s\n", command));
    interrupt_hint(hint);
    QT_TRY(budget_check(&o->budget, o->scheme, true, err));
    QT_TRY(out_dir_check(o->out, err));
    QT_TRY(kv_options_keys(&kv, &o->kv, err));
    QT_TRY(rules_parse(&rules, &o->tensor, err));
    QT_TRY(qt_learn_parse(&learn, o->learn ? o->learn : "", err));
    learn.norms = o->tune_norms;
    QT_TRY(checkpoint_open(&ckpt, args[0], err));
    QT_TRY(qt_ckpt_check_whole(ckpt, err));
    QT_TRY(check_out(o, ckpt, args[0], err));
    struct qt_quantize_options opt = {
        .plan = {.scheme = o->scheme, .rules = rules.rule, .nrules = rules.count, .kv = kv},
        .learn = o->learn || o->tune_norms ? &learn : NULL,
        .out_dir = o->out,
        .inputs = o->calibration.file ? &o->calibration.file : o->calibration.data.items,
        .ninputs = o->calibration.file ? 1 : o->calibration.data.count,
        .force = o->force,
        .resume = o->resume,
        .strict = o->strict,
        .comm = cli->comm,
        .log = &cli->log,
        .interrupted = interrupt_came,
        .tensor = add_tensor,
        .tensor_ctx = &tensors,
    };
    QT_TRY(calibration_open(&calibration, &o->calibration, ckpt, o->common.device, err));
    if (budget_wanted(&o->budget)) {
        QT_TRY(budget_choose(&budget, &rules, cli, &o->budget, ckpt, &calibration, err));
        opt.plan.scheme = budget.scheme;
        opt.plan.rules = rules.rule;
        opt.plan.nrules = rules.count;
    }
    if (calibration.data.samples || calibration.file)
        opt.calibration = &calibration.data;
    opt.backend = calibration.backend;
    opt.plan.calibrated = opt.calibration != NULL;
    table_row(&tensors.table,
              "TENSOR\tSHAPE\tSCHEME\tBPW\tMSE\tSQNR dB\tH BEFORE\tH AFTER\tMS\tNOTE");
    if (cli->doc)
        tensors.list = json_array();
    QT_TRY(qt_quantize(&report, ckpt, &opt, err));
    QT_TRY(print_report(cli, o, ckpt, &calibration, &report, &tensors, err));
    if (budget.scheme && cli->doc)
        budget_doc(cli, &budget);
    else if (budget.scheme)
        QT_TRY(budget_print(&budget, err));
    fflush(stdout);
    QT_TRY(print_next(cli, o, args[0], err));
done:
    interrupt_hint(NULL);
    if (rc == QT_E_INTERRUPTED) {
        cli->advice = hint;
        hint = NULL;
    }
    if (rc == QT_E_INTERRUPTED && cli->doc)
        doc_set(cli, cli->doc, "resume", doc_text(command));
    qt_free(command);
    qt_free(hint);
    json_decref(report.document);
    json_decref(tensors.list);
    table_free(&tensors.table);
    calibration_close(&calibration);
    qt_ckpt_close(ckpt);
    rules_free(&rules);
    qt_budget_free(&budget);
    return rc;
}

static const struct quantize_options defaults = {
    .common = COMMON_DEFAULTS,
    .kv = KV_DEFAULTS,
};

static const struct opt opts[] = {
    {.name = "out",
     .letter = 'o',
     .kind = OPT_STRING,
     .offset = offsetof(struct quantize_options, out),
     .required = true,
     .metavar = "OUT",
     .help = "directory of the container"},
    {.name = "scheme",
     .kind = OPT_STRING,
     .offset = offsetof(struct quantize_options, scheme),
     .metavar = "S",
     .help = "required, except with a target: scheme of all linear weights, for example fp6 or "
             "nf4:g=128; see 'qtool list "
             "schemes'"},
    {.name = "tensor",
     .kind = OPT_LIST,
     .offset = offsetof(struct quantize_options, tensor),
     .metavar = "'REGEX=S'",
     .help = "scheme of the tensors whose name matches REGEX; the last match decides; with a "
             "target, S may be 'choice': one of --choices, also for embeddings and the head"},
    CALIBRATION_OPTS(struct quantize_options, calibration),
    {.name = "calib",
     .kind = OPT_STRING,
     .offset = offsetof(struct quantize_options, calibration.file),
     .metavar = "X.qcal",
     .help = "calibration file of 'qtool calibrate', instead of --data"},
    BUDGET_OPTS(struct quantize_options, budget),
    KV_OPTS(struct quantize_options, kv,
            "for runtimes with a 4-bit KV cache: record it in the manifest",
            KV_KEYS_HELP "channel"),
    {.name = "learn",
     .kind = OPT_STRING,
     .offset = offsetof(struct quantize_options, learn),
     .metavar = "KEY=VALUE,...",
     .help = "options of learning, for tensors with learn=1: objective=kl|nll, mode=frozen|ste, "
             "scope=model|block, lr, passes, batch (windows), held-out (fraction); docs/schemes.md "
             "has meanings and defaults"},
    {.name = "tune-norms",
     .kind = OPT_FLAG,
     .offset = offsetof(struct quantize_options, tune_norms),
     .help = "also learn the weights of norms"},
    {.name = "force",
     .kind = OPT_FLAG,
     .offset = offsetof(struct quantize_options, force),
     .help = "replace OUT and all files in it if it exists, once the new container is complete; "
             "without --resume, also delete what an interrupted run left in OUT.partial"},
    {.name = "resume",
     .kind = OPT_FLAG,
     .offset = offsetof(struct quantize_options, resume),
     .help = "continue an interrupted run with the same options; if OUT is complete, check that "
             "this run would have made the same ('verify' checks the data in OUT)"},
    {.name = "strict",
     .kind = OPT_FLAG,
     .offset = offsetof(struct quantize_options, strict),
     .help = "fail if less than 90 % of the bytes of linear weights can be quantized, if a copied "
             "tensor has a value that is NaN or infinity, or if calibration data is given but the "
             "Hessian of a tensor cannot be used"},
    {0},
};

static const struct opt_positional positionals[] = {
    {"CKPT", "checkpoint: a directory, or a .safetensors, .bin, .pt, .pth or .gguf file"},
    {0},
};

const struct command cmd_quantize = {
    .name = "quantize",
    .summary = "make a container of packed weights from a checkpoint",
    .description =
        "Quantizes the linear weights of a checkpoint and writes a container: a directory with "
        "packed tensors, unchanged copies of all other tensors, and the side files of the model. "
        "The work is done in OUT.partial, which is renamed to OUT once everything has been "
        "written and read back. The same input and options give the same bytes for any number of "
        "threads.\n\n"
        "With --data the linear weights of the decoder layers are quantized with GPTQ error "
        "compensation under the Hessian of their inputs (method=gptq), layer by layer; each layer "
        "is calibrated on the output of the quantized layers before it. This needs a model that "
        "qtool can run ('qtool list archs'), on the CPU or with --device cuda on a GPU; without "
        "--data any checkpoint can be quantized. --calib takes the Hessians from a file that "
        "'qtool calibrate' made from the same checkpoint: the model is not run, so no layer "
        "compensates for the errors of earlier layers; --device cuda then speeds up the "
        "rounding.\n\n"
        "--kv 4 records in the manifest that the KV cache has 4 bits, for 'qtool eval --kv 4', "
        "'qtool verify --device cuda' and runtimes (programs that run the container). The runtime "
        "computes the scales of values, and with --kv-keys channel or token also those of keys, "
        "when a token enters the cache. --kv-keys static runs the quantized model once more over "
        "part of --data and stores a scale and zero-point for every key channel; static scales "
        "cost much accuracy on models with outliers in keys. --kv does not change the weights.\n\n"
        "--tensor is split at its first '='; write \\x3d for a '=' in the regular expression "
        "(PCRE2, matched anywhere in the name, also of multimodal tensors). Vectors that match "
        "(norms and biases) are copied; a regular expression that matches nothing else is an "
        "error. The scheme 'none' copies. A matrix that its scheme would make larger is copied "
        "unless --tensor names it.\n\n"
        "With --target-bpw or --target-size a scheme is chosen for each tensor, with --data by the "
        "measured KL divergence of calibrated rounding (docs/targets.md). With --untied, linears "
        "that share an input may get different schemes. The options that give the result are "
        "printed.\n\n"
        "Linear weights are the matrices of the decoder layers. Experts that are stacked in one "
        "tensor, in a form that docs/sources.md lists, are quantized one by one; others count as "
        "linear weights, but are copied. A warning says if less than 90 % of the bytes of linear "
        "weights are quantized. Quantized checkpoints are dequantized when they are read. Those of "
        "formats that qtool cannot read, adapters, and checkpoints without any such matrix are "
        "refused.\n\n"
        "The table on stderr has a row per quantized tensor. H BEFORE and H AFTER are the output "
        "error (w - q) H (w - q)^T, summed over rows w of the matrix, with the Hessian H scaled to "
        "a mean diagonal of 1: for round-to-nearest and for the final codes. Compare them only "
        "within a tensor. MS is the time in milliseconds. NOTE says how many of the calibration "
        "tokens that an expert needs were sent to it, if there were too few.\n\n"
        "Ctrl-C or SIGTERM stops the run (exit status 75) after the current tensor, or after two "
        "seconds; the same command with --resume continues. Learning is resumed from the last "
        "completed step. The choice of activation precisions (w4ax) starts again.",
    .examples = "  qtool quantize examples/nano-llama -o nano-fp6 --scheme fp6:e=2\n"
                "  qtool quantize examples/nano-llama -o nano-nf3 --scheme nf3:g=64 \\\n"
                "      --data examples/nano-llama/calib.txt --seqlen 512\n"
                "  qtool quantize examples/nano-llama -o nano-mix --scheme nf4 \\\n"
                "      --tensor 'down_proj=fp6'\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .gpu = true,
    .writes = true,
    .ranks = true,
    .run = run,
};
