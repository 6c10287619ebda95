/* Help text, generated from the tables of options. */
#include "cli/cli.h"

#include <string.h>

enum { WIDTH = 80, COMMAND_COLUMN = 14, OPTION_COLUMN = 26 };

const struct exit_code exit_codes[] = {
    {0, "success"},
    {1, "internal error: a bug in qtool"},
    {2, "usage error: wrong options or arguments"},
    {3, "bad input: a file violates its format or contradicts another file"},
    {4, "unsupported shape, dtype, file feature or model architecture"},
    {5, "a --gate condition failed"},
    {6, "out of memory, disk full, I/O error, output in use or read back wrong"},
    {7, "no usable GPU"},
    {8, "cannot resume: options or inputs changed, or the journal is damaged"},
    {75, "interrupted; 'quantize --resume' continues, other commands start again"},
    {0},
};

/* Prints words from column *at on, breaks lines at WIDTH and indents the next lines. */
static void wrap(FILE *f, size_t *at, size_t indent, const char *text)
{
    while (*text) {
        size_t len = strcspn(text, " \n");
        if (*at > indent && *at + 1 + len > WIDTH) {
            fprintf(f, "\n%*s", (int)indent, "");
            *at = indent;
        } else if (*at > indent) {
            fputc(' ', f);
            *at += 1;
        }
        fwrite(text, 1, len, f);
        *at += len;
        text += len;
        text += strspn(text, " \n");
    }
}

/* Prints "  label      text" with the text wrapped in its own column. */
static void entry(FILE *f, const char *label, size_t column, const char *text)
{
    size_t at = column;
    if (strlen(label) + 4 > column)
        fprintf(f, "  %s\n%*s", label, (int)column, "");
    else
        fprintf(f, "  %-*s", (int)column - 2, label);
    wrap(f, &at, column, text);
    fputc('\n', f);
}

/* Prints paragraphs that an empty line separates. */
static void paragraphs(FILE *f, const char *text)
{
    char one[2048];
    while (*text) {
        const char *end = strstr(text, "\n\n");
        size_t len = end ? (size_t)(end - text) : strlen(text), at = 0;
        snprintf(one, sizeof one, "%.*s", (int)len, text);
        wrap(f, &at, 0, one);
        fputs("\n\n", f);
        text += len + (end ? 2 : 0);
    }
}

/* ---- options -------------------------------------------------------------------------------- */

static const char *opt_metavar(const struct opt *o)
{
    return o->kind == OPT_FLAG ? "" : o->metavar;
}

/* Usage of an option: "--scheme S", or "-o OUT" if it has a short form. */
static void opt_synopsis(char *buf, size_t size, const struct opt *o)
{
    char dashed[64];
    if (o->letter)
        snprintf(dashed, sizeof dashed, "-%c", o->letter);
    else
        snprintf(dashed, sizeof dashed, "--%s", o->name);
    snprintf(buf, size, "%s%s%s%s%s%s", o->required ? "" : "[", dashed,
             o->kind == OPT_FLAG ? "" : " ", opt_metavar(o), o->required ? "" : "]",
             o->kind == OPT_LIST ? "..." : "");
}

/* Prints a blank and text without breaking the text. */
static void usage_part(FILE *f, size_t *at, size_t indent, const char *text)
{
    if (*at + 1 + strlen(text) > WIDTH) {
        fprintf(f, "\n%*s", (int)indent, "");
        *at = indent;
    } else {
        fputc(' ', f);
        *at += 1;
    }
    fputs(text, f);
    *at += strlen(text);
}

static void usage_options(FILE *f, size_t *at, size_t indent, const struct opt *opts, bool required)
{
    char text[128];
    for (const struct opt *o = opts; o && o->name; o++) {
        if (o->required != required)
            continue;
        opt_synopsis(text, sizeof text, o);
        usage_part(f, at, indent, text);
    }
}

static void usage_line(FILE *f, const struct command *cmd)
{
    size_t at = (size_t)fprintf(f, "usage: qtool %s", cmd->name), indent = at + 1;
    for (const struct opt_positional *p = cmd->positionals; p->metavar; p++)
        at += (size_t)fprintf(f, " %s", p->metavar);
    usage_options(f, &at, indent, cmd->opts, true);
    usage_options(f, &at, indent, cmd->opts, false);
    usage_part(f, &at, indent, "[common options]");
    fputs("\n\n", f);
}

static void opt_entry(FILE *f, const struct opt *o)
{
    char label[128], letter[8] = "    ", text[1024];
    if (o->letter)
        snprintf(letter, sizeof letter, "-%c, ", o->letter);
    snprintf(label, sizeof label, "%s--%s%s%s", letter, o->name, o->kind == OPT_FLAG ? "" : " ",
             opt_metavar(o));
    snprintf(text, sizeof text, "%s%s%s", o->help, o->required ? " (required)" : "",
             o->kind == OPT_LIST ? " (may be repeated)" : "");
    entry(f, label, OPTION_COLUMN, text);
}

static void opt_entries(FILE *f, const char *title, const struct opt *opts)
{
    if (!opts || !opts->name)
        return;
    fprintf(f, "%s:\n", title);
    for (const struct opt *o = opts; o->name; o++)
        opt_entry(f, o);
    fputc('\n', f);
}

static void print_exit_codes(FILE *f)
{
    fputs("Exit status:\n", f);
    for (const struct exit_code *c = exit_codes; c->meaning; c++) {
        size_t at = (size_t)fprintf(f, "  %2d  ", c->code);
        wrap(f, &at, at, c->meaning);
        fputc('\n', f);
    }
}

/* ---- pages ---------------------------------------------------------------------------------- */

void help_command(FILE *f, const struct command *cmd)
{
    usage_line(f, cmd);
    paragraphs(f, cmd->description);
    if (cmd->positionals->metavar) {
        fputs("Arguments:\n", f);
        for (const struct opt_positional *p = cmd->positionals; p->metavar; p++)
            entry(f, p->metavar, OPTION_COLUMN, p->help);
        fputc('\n', f);
    }
    opt_entries(f, "Options", cmd->opts);
    opt_entries(f, "Common options", common_opts);
    fprintf(f, "Examples:\n%s\n", cmd->examples);
    print_exit_codes(f);
}

void help_start(FILE *f)
{
    fputs("The common path: make a container, measure the loss, write it for a runtime.\n\n"
          "  qtool quantize CKPT -o OUT --scheme int4 --data TEXT\n"
          "  qtool eval OUT --data OTHER_TEXT --ref CKPT\n"
          "  qtool export OUT -o DIR --format compressed-tensors\n\n"
          "'qtool help recipes' says which scheme for which budget and runtime.\n\n",
          f);
}

void help_overview(FILE *f)
{
    fputs("usage: qtool COMMAND [arguments] [options]\n\n"
          "Quantizes checkpoints of language models into packed containers, and measures\n"
          "their accuracy and speed.\n\nCommands:\n",
          f);
    for (size_t i = 0; commands[i]; i++)
        entry(f, commands[i]->name, COMMAND_COLUMN, commands[i]->summary);
    entry(f, "help", COMMAND_COLUMN, "print this text, or the help of a command");
    fputs("\nRun 'qtool COMMAND --help' for the options of a command, and 'qtool help\n"
          "recipes' for a table of schemes by budget and runtime.\n\n",
          f);
    print_exit_codes(f);
}
