/* calibrate: makes and merges calibration files. */
#include "cli/cli.h"

#include <stddef.h>
#include <string.h>
#include <sys/stat.h>

struct calibrate_options {
    struct common_options common;
    const char *out;
    struct calibration_options calibration;
    bool merge, force;
};

/* Prints a summary of the new file. */
static int print_result(struct cli *cli, const char *path, const struct bos_rule *bos,
                        struct qt_err *err)
{
    struct qt_qcal *q;
    struct table t = {.align = "ll"};
    int rc = qt_qcal_open(&q, path, err);
    if (rc < 0)
        return rc;
    const struct qt_qcal_info *info = qt_qcal_info(q);
    if (cli->doc) {
        doc_set(cli, cli->doc, "out", doc_text(path));
        doc_set(cli, cli->doc, "layers", doc_size(info->layers));
        doc_set(cli, cli->doc, "tokens", doc_size(info->tokens));
        doc_set(cli, cli->doc, "parts", doc_size(info->nparts));
        doc_bos(cli, bos);
    } else {
        table_row(&t, "calibration\t%s", path);
        table_row(&t, "model\t%s: %zu layers, hidden %zu", info->family, info->layers,
                  info->hidden);
        table_row(&t, "tokens\t%zu", info->tokens);
        bos_row(&t, bos);
        rc = table_print(&t, err);
    }
    qt_qcal_close(q);
    return rc;
}

static int check_arguments(const struct calibrate_options *o, const char *const *args,
                           struct qt_err *err)
{
    const char *what = NULL;
    if (o->merge && o->calibration.data.count)
        what = "--merge and --data cannot be used together";
    else if (o->merge && calibration_has_windows(&o->calibration))
        what = WINDOWS_WITHOUT_DATA;
    else if (o->merge && device_number(o->common.device) >= 0)
        what = "--device cuda: --merge runs on the CPU only";
    else if (o->merge && !args[1])
        what = "--merge needs at least two calibration files";
    else if (!o->merge && !o->calibration.data.count)
        what = "--data FILE is missing (or --merge to add calibration files)";
    if (what)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "%s", what);
    if (!o->merge && args[1])
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "unexpected argument '%s'", args[1]);
    return QT_OK;
}

/* With --force the merged file must not replace one of its sources: what it adds could not be told
 * from what was there. */
static int check_merged(const char *out, const char *const *args, struct qt_err *err)
{
    struct stat to, from;
    for (size_t i = 0; stat(out, &to) == 0 && args[i]; i++)
        if (stat(args[i], &from) == 0 && from.st_dev == to.st_dev && from.st_ino == to.st_ino)
            return qt_fail(err, QT_E_USAGE, args[i], NULL,
                           "would be deleted: it is %s, which would be replaced", out);
    return QT_OK;
}

static int calibrate(struct cli *cli, struct bos_rule *bos, const struct calibrate_options *o,
                     const char *path, struct qt_err *err)
{
    struct qt_calibrate_options opt = {
        .comm = cli->comm, .force = o->force, .log = &cli->log, .interrupted = interrupt_came};
    struct calibration calibration = {0};
    struct qt_ckpt *ckpt = NULL;
    int rc;
    QT_TRY(checkpoint_open(&ckpt, path, err));
    QT_TRY(qt_ckpt_check_whole(ckpt, err));
    QT_TRY(qt_ckpt_check_readable(ckpt, err));
    QT_TRY(calibration_open(&calibration, &o->calibration, ckpt, o->common.device, err));
    opt.backend = calibration.backend;
    *bos = calibration.bos;
    QT_TRY(qt_calibrate(o->out, ckpt, calibration.ids, &calibration.part, &opt, err));
done:
    calibration_close(&calibration);
    qt_ckpt_close(ckpt);
    return rc;
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    const struct calibrate_options *o = options;
    struct qt_calibrate_options opt = {
        .force = o->force, .comm = cli->comm, .log = &cli->log, .interrupted = interrupt_came};
    struct bos_rule bos = {0};
    size_t n = 0;
    int rc;
    QT_TRY(check_arguments(o, args, err));
    QT_TRY(out_check(o->out, err));
    while (args[n])
        n++;
    if (o->merge)
        QT_TRY(check_merged(o->out, args, err));
    QT_TRY(o->merge ? qt_calibrate_merge(o->out, args, n, &opt, err)
                    : calibrate(cli, &bos, o, args[0], err));
    if (qt_comm_rank(cli->comm) == 0)
        QT_TRY(print_result(cli, o->out, &bos, err));
done:
    return rc;
}

static const struct calibrate_options defaults = {
    .common = COMMON_DEFAULTS,
};

static const struct opt opts[] = {
    {.name = "out",
     .letter = 'o',
     .kind = OPT_STRING,
     .offset = offsetof(struct calibrate_options, out),
     .required = true,
     .metavar = "X.qcal",
     .help = "calibration file to write"},
    CALIBRATION_OPTS(struct calibrate_options, calibration),
    {.name = "merge",
     .kind = OPT_FLAG,
     .offset = offsetof(struct calibrate_options, merge),
     .help = "add calibration files of one checkpoint that have different data"},
    {.name = "force",
     .kind = OPT_FLAG,
     .offset = offsetof(struct calibrate_options, force),
     .help = "replace X.qcal if it exists, once the new file is complete"},
    {0},
};

static const struct opt_positional positionals[] = {
    {"PATH...", "a checkpoint; with --merge at least two calibration files"},
    {0},
};

const struct command cmd_calibrate = {
    .name = "calibrate",
    .summary = "gather statistics of a model's activations for quantize --calib",
    .description =
        "Runs calibration data through the unquantized model, layer by layer, and writes the "
        "statistics that 'quantize' needs. For the input X of each linear (matrix product) of the "
        "decoder layers these are the Hessian X^T X, and for every channel the largest absolute "
        "value, the sum of squares and a histogram. Each expert of a mixture of experts has its "
        "own, over the tokens that the router sends to it, and the file is as large as its "
        "Hessians. 'qtool quantize --calib' uses the file, as often as needed; 'qtool inspect' "
        "shows it. Without --merge, PATH is one checkpoint and --data is required. --merge adds "
        "calibration files, in any order; the result is that of a calibration on the data of all "
        "of them. --merge refuses two files that were made from exactly the same windows. Files "
        "that share some windows are accepted; those tokens count twice. docs/format.md describes "
        "the file.\n\n"
        "The same checkpoint and data give the same bytes for any number of threads. The work is "
        "done in X.qcal.partial, which is renamed to X.qcal at the end. Ctrl-C or SIGTERM stops "
        "(exit status 75) and removes the partial file; calibrate cannot be resumed.",
    .examples = "  qtool calibrate examples/nano-llama -o nano.qcal \\\n"
                "      --data examples/nano-llama/calib.txt --seqlen 512\n"
                "  qtool calibrate --merge prose.qcal code.qcal -o both.qcal\n"
                "  qtool inspect nano.qcal\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .gpu = true,
    .writes = true,
    .ranks = true,
    .run = run,
};
