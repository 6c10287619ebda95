/* report: an HTML page about containers and what was measured on them. */
#include "cli/cli.h"

#include <stddef.h>
#include <string.h>

struct report_options {
    struct common_options common;
    const char *out;
    bool force;
};

/* --force replaces reports, not other files, such as an input that was named by mistake. */
static int check_replaced(const char *path, struct qt_err *err)
{
    static const char mark[] = "<meta name=\"generator\" content=\"qtool ";
    enum { HEAD = 4096 };
    struct qt_map map;
    if (!qt_path_exists(path))
        return QT_OK;
    int rc = qt_map_open(&map, path, err);
    if (rc < 0)
        return rc;
    if (!memmem(map.data, qt_min_size(map.size, HEAD), mark, sizeof mark - 1))
        rc = qt_fail(err, QT_E_USAGE, path, NULL, "not replaced: it is not a report of qtool");
    qt_map_close(&map);
    return rc;
}

static int check_target(const struct report_options *o, struct qt_err *err)
{
    int rc = out_check(o->out, err);
    if (rc == QT_OK && o->force)
        return check_replaced(o->out, err);
    if (rc == QT_OK && qt_path_exists(o->out))
        return qt_fail(err, QT_E_USAGE, o->out, NULL, "exists already; --force replaces it");
    return rc;
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    const struct report_options *o = options;
    struct qt_report *report = NULL;
    json_t *sections = NULL;
    char *text = NULL;
    char bytes[TEXT_SIZE];
    size_t size = 0, inputs = 0;
    int rc;
    QT_TRY(check_target(o, err));
    QT_TRY(qt_report_new(&report, err));
    for (; args[inputs]; inputs++)
        QT_TRY(qt_report_add(report, args[inputs], err));
    QT_TRY(qt_report_html(&text, &size, &sections, report, err));
    QT_TRY(qt_file_publish(o->out, &(struct qt_file_piece){text, size}, 1,
                           o->force ? NULL : "exists already; --force replaces it", err));
    if (cli->doc) {
        doc_set(cli, cli->doc, "out", doc_text(o->out));
        doc_set(cli, cli->doc, "bytes", doc_size(size));
        doc_set(cli, cli->doc, "inputs", doc_size(inputs));
        doc_set(cli, cli->doc, "sections", json_incref(sections));
    } else {
        printf("report  ");
        text_print(stdout, o->out, strlen(o->out));
        printf(", %s, from %zu input%s\n", text_bytes(bytes, size), inputs, text_plural(inputs));
    }
done:
    qt_report_free(report);
    json_decref(sections);
    qt_free(text);
    return rc;
}

static const struct report_options defaults = {.common = COMMON_DEFAULTS, .out = "report.html"};

static const struct opt opts[] = {
    {.name = "out",
     .letter = 'o',
     .kind = OPT_STRING,
     .offset = offsetof(struct report_options, out),
     .metavar = "FILE",
     .help = "file to write (default report.html)"},
    {.name = "force",
     .kind = OPT_FLAG,
     .offset = offsetof(struct report_options, force),
     .help = "replace FILE, an earlier report"},
    {0},
};

static const struct opt_positional positionals[] = {
    {"PATH...", "containers, calibration files, and saved --json output of eval, verify and bench"},
    {0},
};

const struct command cmd_report = {
    .name = "report",
    .summary = "write an HTML page with charts about containers and saved results",
    .description =
        "Writes one HTML file, which loads nothing from elsewhere, with what the inputs say: size "
        "against KL divergence, errors and bits by decoder layer and kind, rare positions, gates, "
        "activations, learning curves, time, speed. Two containers are compared in detail. Every "
        "number is in a table, and as JSON in the element with the id \"data\". Nothing is "
        "measured for it: sections without figures are left out.\n\n"
        "The content of an input decides what it is. Results of eval and verify belong to the "
        "container that they were measured on, wherever it is now: they name the CRC-32 of its "
        "manifest.",
    .examples = "  qtool eval nano-nf4 --data examples/nano-llama/eval.txt \\\n"
                "      --ref examples/nano-llama --json >nano-nf4.json\n"
                "  qtool report nano-nf4 nano-nf4.json -o report.html\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .writes = true,
    .run = run,
};
