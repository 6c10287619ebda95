/* version: of qtool and of the container format. */
#include "cli/cli.h"

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    (void)options, (void)args, (void)err;
    if (cli->doc) {
        doc_set(cli, cli->doc, "version", doc_text(QT_VERSION));
        doc_set(cli, cli->doc, "format_version", json_integer(QT_FORMAT_VERSION));
        doc_set(cli, cli->doc, "cuda", json_boolean(qt_gpu_built()));
    } else {
        printf("qtool %s\n", QT_VERSION);
        printf("container format %d\n", QT_FORMAT_VERSION);
        printf("GPU kernels %s\n", qt_gpu_built() ? "built in" : "not built in");
    }
    return QT_OK;
}

static const struct common_options defaults = COMMON_DEFAULTS;
static const struct opt opts[] = {{0}};
static const struct opt_positional positionals[] = {{0}};

const struct command cmd_version = {
    .name = "version",
    .summary = "print the version of qtool and of the container format",
    .description = "Prints the version of qtool and of the container format that it reads and "
                   "writes, and whether GPU kernels are built in.",
    .examples = "  qtool version\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .run = run,
};
