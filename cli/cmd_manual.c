/* manual: the page qtool(1), generated from the tables of options. */
#include "cli/cli.h"

#include <string.h>

/* ---- roff ----------------------------------------------------------------------------------- */

/* Prints text literally: escapes requests and characters that roff would replace. */
static void roff(const char *text)
{
    bool line_start = true;
    for (; *text; text++) {
        if (line_start && (*text == '.' || *text == '\''))
            fputs("\\&", stdout);
        if (*text == '\\')
            fputs("\\e", stdout);
        else if (*text == '-')
            fputs("\\-", stdout);
        else if (*text == '\'')
            fputs("\\(aq", stdout);
        else if (*text == '^')
            fputs("\\(ha", stdout);
        else if (*text == '~')
            fputs("\\(ti", stdout);
        else
            putchar(*text);
        line_start = *text == '\n';
    }
}

/* Prints paragraphs that an empty line separates. */
static void paragraphs(const char *text)
{
    const char *end;
    char one[2048];
    for (; (end = strstr(text, "\n\n")) != NULL; text = end + 2) {
        snprintf(one, sizeof one, "%.*s", (int)(end - text), text);
        roff(one);
        fputs("\n.PP\n", stdout);
    }
    roff(text);
    putchar('\n');
}

static void item(const char *label, const char *text)
{
    fputs(".TP\n.B ", stdout);
    roff(label);
    putchar('\n');
    roff(text);
    putchar('\n');
}

static void option(const struct opt *o)
{
    char label[160], letter[8] = "", text[1200];
    if (o->letter)
        snprintf(letter, sizeof letter, "-%c, ", o->letter);
    snprintf(label, sizeof label, "%s--%s%s%s", letter, o->name, o->kind == OPT_FLAG ? "" : " ",
             o->kind == OPT_FLAG ? "" : o->metavar);
    snprintf(text, sizeof text, "%s%s%s", o->help, o->required ? " (required)" : "",
             o->kind == OPT_LIST ? " (may be repeated)" : "");
    item(label, text);
}

/* ---- sections ------------------------------------------------------------------------------- */

static void command(const struct command *cmd)
{
    printf(".SS qtool %s", cmd->name);
    for (const struct opt_positional *p = cmd->positionals; p->metavar; p++)
        printf(" %s", p->metavar);
    fputs(" [options]\n", stdout);
    paragraphs(cmd->description);
    for (const struct opt_positional *p = cmd->positionals; p->metavar; p++)
        item(p->metavar, p->help);
    for (const struct opt *o = cmd->opts; o->name; o++)
        option(o);
    fputs(".PP\nExamples:\n.PP\n.nf\n.ft CW\n", stdout);
    roff(cmd->examples);
    fputs(".ft\n.fi\n", stdout);
}

static void files(void)
{
    fputs(".SH FILES\n", stdout);
    item("OUT.partial",
         "working directory of 'quantize' until OUT is complete; --resume continues from it");
    item("OUT.old", "the container that --force replaces, until the new one is in place");
    item("X.qcal.partial", "working file of 'calibrate'");
    item("OUT/SHA256SUMS", "checksums; 'sha256sum -c SHA256SUMS' checks them");
    item("/usr/local/share/doc/qtool/docs",
         "format.md (containers, calibration files), schemes.md, json.schema.json (--json)");
    fputs(".SH ENVIRONMENT\n", stdout);
    item("QTOOL_ISA", "generic, avx2 or avx512: the widest vector instructions that qtool uses. "
                      "Results do not depend on it");
    item("OMP_STACKSIZE", "stack of the threads, at least 1M");
    item("GOMP_SPINCOUNT, OPENBLAS_CORETYPE, OPENBLAS_NUM_THREADS",
         "settings of the OpenMP and OpenBLAS libraries; qtool sets those that are unset (see "
         "docs/pipelines.md)");
}

static void overview(void)
{
    printf(".\\\" Made by qtool manual.\n.TH QTOOL 1 \"\" \"qtool %s\" \"User Commands\"\n",
           QT_VERSION);
    fputs(".SH NAME\nqtool \\- quantize checkpoints of language models into packed containers\n"
          ".SH SYNOPSIS\n.B qtool\n.I COMMAND\n[arguments] [options]\n.SH DESCRIPTION\n",
          stdout);
    roff("Quantizes checkpoints of language models into packed containers, and measures their "
         "accuracy and speed. Results go to standard output, everything else to standard error.\n");
    for (size_t i = 0; commands[i]; i++)
        item(commands[i]->name, commands[i]->summary);
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    (void)options, (void)args;
    if (cli->doc)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "manual has no JSON output: omit --json");
    overview();
    fputs(".SH COMMANDS\n", stdout);
    for (size_t i = 0; commands[i]; i++)
        command(commands[i]);
    fputs(".SH COMMON OPTIONS\n", stdout);
    for (const struct opt *o = common_opts; o->name; o++)
        option(o);
    fputs(".SH EXIT STATUS\n", stdout);
    for (const struct exit_code *c = exit_codes; c->meaning; c++) {
        char code[8];
        snprintf(code, sizeof code, "%d", c->code);
        item(code, c->meaning);
    }
    files();
    return QT_OK;
}

static const struct common_options defaults = COMMON_DEFAULTS;
static const struct opt opts[] = {{0}};
static const struct opt_positional positionals[] = {{0}};

const struct command cmd_manual = {
    .name = "manual",
    .summary = "print the manual page qtool(1)",
    .description = "Prints the manual page in the format of man(1). 'make install' installs it.",
    .examples = "  qtool manual | man -l -\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .run = run,
};
