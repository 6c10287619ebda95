/* export: writes a container in a format of other programs. */
#include "cli/cli.h"

#include <ctype.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

struct export_options {
    struct common_options common;
    const char *out, *format;
    size_t max_shard;
    int dtype; /* enum qt_export_dtype */
    bool lossy, fp8_inputs, force, dry_run;
};

/* Lists the formats that a program loads; the program is named in full. */
static size_t list_formats(char *list, size_t size, const char *program)
{
    const struct qt_export_format *f;
    size_t used = 0;
    for (size_t i = 0; (f = qt_export_format_at(i)) != NULL; i++) {
        const char *at = strcasestr(qt_export_runtimes(f), program);
        const size_t n = strlen(program);
        if (at && (at == qt_export_runtimes(f) || at[-1] == ' ') && !isalnum((unsigned char)at[n]))
            used += (size_t)snprintf(list + used, size - used, "%s%s", used ? ", " : "",
                                     qt_export_name(f));
    }
    return used;
}

static int find_format(const struct qt_export_format **out, const char *name, struct qt_err *err)
{
    enum { MOST = 32 };
    const char *names[MOST];
    const struct qt_export_format *f;
    char list[200];
    size_t n = 0;
    *out = qt_export_format_find(name);
    if (*out)
        return QT_OK;
    if (list_formats(list, sizeof list, name))
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "'%s' is a program, which loads these formats: %s", name, list);
    for (; n < MOST && (f = qt_export_format_at(n)) != NULL; n++)
        names[n] = qt_export_name(f);
    return opts_unknown("format", name, names, n, err);
}

static int print_report(const struct qt_export_report *r, const struct export_options *o,
                        const struct qt_export_format *f, struct qt_err *err)
{
    struct table t = {.align = "ll"};
    char bytes[TEXT_SIZE];
    table_row(&t, "format\t%s: runs in %s", o->format, qt_export_runtimes(f));
    table_row(&t, "tensors\t%zu quantized, %zu copied", r->matrices, r->copied);
    table_row(&t, "size\t%s", text_bytes(bytes, r->bytes));
    if (r->rounded && o->dry_run)
        table_row(&t, "rounded\t%zu tensors", r->rounded);
    else if (r->rounded)
        table_row(&t, "rounded\t%zu tensors, at most %.2g of their norm", r->rounded, r->worst);
    else
        table_row(&t, "rounded\tnone: weights are those of the container");
    return table_print(&t, err);
}

static void report_doc(struct cli *cli, const struct qt_export_report *r,
                       const struct export_options *o)
{
    doc_set(cli, cli->doc, "format", doc_text(o->format));
    doc_set(cli, cli->doc, "dry_run", json_boolean(o->dry_run));
    doc_set(cli, cli->doc, "quantized", doc_size(r->matrices));
    doc_set(cli, cli->doc, "copied", doc_size(r->copied));
    doc_set(cli, cli->doc, "bytes", doc_size(r->bytes));
    doc_set(cli, cli->doc, "rounded", doc_size(r->rounded));
    doc_set(cli, cli->doc, "worst_relative_error",
            doc_real(o->dry_run && r->rounded ? NAN : r->worst));
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    const struct export_options *o = options;
    struct qt_container *container = NULL;
    struct qt_export_report report;
    struct qt_export_options opt = {
        .out_dir = o->out,
        .dtype = (enum qt_export_dtype)o->dtype,
        .lossy = o->lossy,
        .fp8_inputs = o->fp8_inputs,
        .force = o->force,
        .dry_run = o->dry_run,
        .max_shard_bytes = (uint64_t)o->max_shard << 20,
        .log = &cli->log,
    };
    int rc;
    QT_TRY(find_format(&opt.format, o->format, err));
    if (!o->out && !o->dry_run)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--out is required, except with --dry-run");
    if (o->out)
        QT_TRY(out_dir_check(o->out, err));
    QT_TRY(container_open(&container, args[0], err));
    QT_TRY(qt_checksums_check_small(args[0], err));
    QT_TRY(qt_export(&report, container, &opt, err));
    if (cli->doc)
        report_doc(cli, &report, o);
    else
        QT_TRY(print_report(&report, o, opt.format, err));
done:
    qt_container_close(container);
    return rc;
}

static const char *const dtypes[] = {"auto", "float16", "bfloat16", "float32", NULL};
static const struct export_options defaults = {.common = COMMON_DEFAULTS};

static const struct opt opts[] = {
    {.name = "out",
     .letter = 'o',
     .kind = OPT_STRING,
     .offset = offsetof(struct export_options, out),
     .metavar = "DIR",
     .help = "directory to write; required, except with --dry-run"},
    {.name = "format",
     .kind = OPT_STRING,
     .offset = offsetof(struct export_options, format),
     .required = true,
     .metavar = "F",
     .help = "format to write; see 'qtool list exports'"},
    {.name = "dtype",
     .kind = OPT_CHOICE,
     .offset = offsetof(struct export_options, dtype),
     .choices = dtypes,
     .metavar = "T",
     .help =
         "auto (the default), float16, bfloat16 or float32: dtype of dequantized weights (auto: "
         "that of the source) or of scales (auto: float16, which is exact; the runtime then "
         "computes in float16); with gguf, of matrices that are not quantized"},
    {.name = "lossy",
     .kind = OPT_FLAG,
     .offset = offsetof(struct export_options, lossy),
     .help = "round once what the format cannot hold exactly, and report the error"},
    {.name = "fp8-inputs",
     .kind = OPT_FLAG,
     .offset = offsetof(struct export_options, fp8_inputs),
     .help = "compressed-tensors: ask the runtime to round the inputs of fp8 matrices to FP8 too, "
             "with one scale per token (W8A8); qtool does not measure what that costs"},
    {.name = "dry-run",
     .kind = OPT_FLAG,
     .offset = offsetof(struct export_options, dry_run),
     .help = "only check whether the format can hold the container, and print the size"},
    {.name = "max-shard",
     .kind = OPT_SIZE,
     .offset = offsetof(struct export_options, max_shard),
     .metavar = "MIB",
     .min = 1,
     .max = (size_t)1 << 24,
     .help = "begin a new file at this size (default 4096; with gguf, one file)"},
    {.name = "force",
     .kind = OPT_FLAG,
     .offset = offsetof(struct export_options, force),
     .help = "replace DIR, an earlier output of qtool, once the new one is complete"},
    {0},
};

static const struct opt_positional positionals[] = {
    {"CONTAINER", "what quantize wrote"},
    {0},
};

const struct command cmd_export = {
    .name = "export",
    .summary = "write a container in a format that runtimes load",
    .description =
        "Writes the weights of a container, bit for bit where the format allows it, in a format "
        "of other programs. 'qtool list exports' shows which format holds which scheme, and where "
        "it runs. A format that cannot hold a matrix is refused before any work, with the name of "
        "the matrix, the reason and a scheme that fits; --lossy allows one rounding.\n\n"
        "DIR has the model's config.json and tokenizer with the weights, qtool-export.json, which "
        "says what was exported and lists the matrices that were rounded, and SHA256SUMS. An "
        "export that is interrupted leaves nothing; the same container and options give the same "
        "bytes.",
    .examples = "  qtool export nano-int4 -o nano-vllm --format compressed-tensors\n"
                "  qtool export nano-fp6 -o nano-dense --format dense\n"
                "  qtool export nano-int4 --format gptq --dry-run\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .writes = true,
    .run = run,
};
