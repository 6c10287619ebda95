/* completion: scripts for shells, generated from the tables of options. */
#include "cli/cli.h"

#include <string.h>

/* True for options whose values can be listed: choices and scheme names. */
static bool has_values(const struct opt *o)
{
    return o->kind == OPT_CHOICE || strcmp(o->name, "scheme") == 0;
}

static void print_choices(const char *const *choices)
{
    for (size_t i = 0; choices[i]; i++)
        printf("%s%s", i ? " " : "", choices[i]);
}

/* Prints the values of option o of command c; NULL: a common option. */
static void print_values(const struct command *c, const struct opt *o)
{
    const struct qt_preset *preset;
    const struct qt_scheme *s;
    if (o->kind == OPT_CHOICE) {
        print_choices(o->choices);
        return;
    }
    for (size_t i = 0; (s = qt_scheme_at(i)) != NULL; i++)
        for (size_t p = 0; (preset = qt_scheme_preset(s, p)) != NULL; p++)
            printf("%s ", preset->name);
    fputs(c == &cmd_bench ? "kv4" : "none", stdout);
}

/* ---- bash ----------------------------------------------------------------------------------- */

/* Completes the argument of a command that takes one of its words. */
static void bash_argument(const struct command *c)
{
    if (!c->words)
        return;
    printf("    %s,%s) values='", c->name, c->name);
    print_choices(c->words);
    fputs("' ;;\n", stdout);
}

static void bash_values(const struct command *c, const struct opt *opts)
{
    for (const struct opt *o = opts; o->name; o++) {
        if (!has_values(o))
            continue;
        printf("    %s,--%s) values='", c ? c->name : "*", o->name);
        print_values(c, o);
        fputs("' ;;\n", stdout);
    }
}

static void bash_options(const struct opt *opts)
{
    for (const struct opt *o = opts; o->name; o++)
        printf(" --%s", o->name);
}

static void print_bash(void)
{
    fputs("# bash completion of qtool, made by qtool completion bash\n"
          "_qtool()\n{\n"
          "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} options= "
          "values=\n"
          "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n        values='",
          stdout);
    for (size_t i = 0; commands[i]; i++)
        printf("%s ", commands[i]->name);
    fputs("help'\n    fi\n    case ${COMP_WORDS[1]},$prev in\n", stdout);
    for (size_t i = 0; commands[i]; i++) {
        bash_argument(commands[i]);
        bash_values(commands[i], commands[i]->opts);
    }
    bash_values(NULL, common_opts);
    fputs("    esac\n    case ${COMP_WORDS[1]} in\n", stdout);
    for (size_t i = 0; commands[i]; i++) {
        printf("    %s) options='", commands[i]->name);
        bash_options(commands[i]->opts);
        bash_options(common_opts);
        fputs("' ;;\n", stdout);
    }
    fputs("    esac\n"
          "    if [[ $cur == -* ]]; then\n"
          "        COMPREPLY=($(compgen -W \"$options\" -- \"$cur\"))\n"
          "    elif [ -n \"$values\" ]; then\n"
          "        COMPREPLY=($(compgen -W \"$values\" -- \"$cur\"))\n"
          "    else\n"
          "        mapfile -t COMPREPLY < <(compgen -f -- \"$cur\")\n"
          "    fi\n}\ncomplete -o filenames -F _qtool qtool\n",
          stdout);
}

/* ---- zsh ------------------------------------------------------------------------------------ */

/* Escapes text for single quotes and for the brackets and colons of _arguments. */
static void zsh_text(const char *text)
{
    for (; *text; text++) {
        if (*text == '\'')
            fputs("'\\''", stdout);
        else if (strchr("[]:\\", *text))
            printf("\\%c", *text);
        else
            putchar(*text);
    }
}

static void zsh_option(const struct command *c, const struct opt *o)
{
    printf("            '%s--%s%s[", o->kind == OPT_LIST ? "*" : "", o->name,
           o->kind == OPT_FLAG ? "" : "=");
    zsh_text(o->help);
    putchar(']');
    if (o->kind != OPT_FLAG) {
        putchar(':');
        zsh_text(o->metavar);
        putchar(':');
        if (has_values(o)) {
            putchar('(');
            print_values(c, o);
            putchar(')');
        } else if (o->kind != OPT_SIZE && o->kind != OPT_REAL) {
            fputs("_files", stdout);
        }
    }
    fputs("' \\\n", stdout);
}

/* Arguments that are not options. */
static void zsh_arguments(const struct command *c)
{
    if (!c->words) {
        fputs("            '*:file:_files'\n", stdout);
        return;
    }
    printf("            '1:%s:(", c->positionals->metavar);
    print_choices(c->words);
    fputs(")'\n", stdout);
}

static void print_zsh(void)
{
    fputs("#compdef qtool\n# zsh completion of qtool, made by qtool completion zsh\n"
          "_qtool() {\n    local -a commands\n    commands=(\n",
          stdout);
    for (size_t i = 0; commands[i]; i++) {
        printf("        '%s:", commands[i]->name);
        zsh_text(commands[i]->summary);
        fputs("'\n", stdout);
    }
    fputs("    )\n    if (( CURRENT == 2 )); then\n        _describe command commands\n"
          "        return\n    fi\n    local command=$words[2]\n    shift words\n"
          "    (( CURRENT-- ))\n    case $command in\n",
          stdout);
    for (size_t i = 0; commands[i]; i++) {
        printf("    %s)\n        _arguments \\\n", commands[i]->name);
        for (const struct opt *o = commands[i]->opts; o->name; o++)
            zsh_option(commands[i], o);
        for (const struct opt *o = common_opts; o->name; o++)
            zsh_option(commands[i], o);
        zsh_arguments(commands[i]);
        fputs("        ;;\n", stdout);
    }
    fputs("    esac\n}\n_qtool \"$@\"\n", stdout);
}

/* ---- fish ----------------------------------------------------------------------------------- */

/* Prints text in single quotes. */
static void fish_text(const char *text)
{
    putchar('\'');
    for (; *text; text++)
        printf(*text == '\'' || *text == '\\' ? "\\%c" : "%c", *text);
    putchar('\'');
}

static void fish_options(const struct command *c, const struct opt *opts)
{
    for (const struct opt *o = opts; o->name; o++) {
        printf("complete -c qtool -n '__fish_seen_subcommand_from %s' -l %s", c->name, o->name);
        if (o->letter)
            printf(" -s %c", o->letter);
        if (has_values(o)) {
            fputs(" -x -a '", stdout);
            print_values(c, o);
            putchar('\'');
        } else if (o->kind == OPT_SIZE || o->kind == OPT_REAL) {
            fputs(" -x", stdout);
        } else if (o->kind != OPT_FLAG) {
            fputs(" -r", stdout);
        }
        fputs(" -d ", stdout);
        fish_text(o->help);
        putchar('\n');
    }
}

static void print_fish(void)
{
    fputs("# fish completion of qtool, made by qtool completion fish\n", stdout);
    for (size_t i = 0; commands[i]; i++) {
        printf("complete -c qtool -n __fish_use_subcommand -f -a %s -d ", commands[i]->name);
        fish_text(commands[i]->summary);
        putchar('\n');
    }
    fputs("complete -c qtool -n __fish_use_subcommand -f -a help -d 'show the help of a command'\n",
          stdout);
    for (size_t i = 0; commands[i]; i++) {
        if (commands[i]->words) {
            printf("complete -c qtool -n '__fish_seen_subcommand_from %s' -f -a '",
                   commands[i]->name);
            print_choices(commands[i]->words);
            fputs("'\n", stdout);
        }
        fish_options(commands[i], commands[i]->opts);
        fish_options(commands[i], common_opts);
    }
}

/* ---- the command ---------------------------------------------------------------------------- */

static const char *const shells[] = {"bash", "zsh", "fish", NULL};

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    static void (*const print[])(void) = {print_bash, print_zsh, print_fish};
    (void)options;
    if (cli->doc)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "completion has no JSON output: omit --json");
    for (size_t i = 0; shells[i]; i++)
        if (strcmp(args[0], shells[i]) == 0) {
            print[i]();
            return QT_OK;
        }
    return opts_unknown("shell", args[0], shells, sizeof print / sizeof *print, err);
}

static const struct common_options defaults = COMMON_DEFAULTS;
static const struct opt opts[] = {{0}};
static const struct opt_positional positionals[] = {
    {"SHELL", "bash, zsh or fish"},
    {0},
};

const struct command cmd_completion = {
    .name = "completion",
    .summary = "print a completion script for bash, zsh or fish",
    .description = "Prints a script that completes qtool's commands, options and schemes in a "
                   "shell. 'make install' installs the scripts.",
    .examples = "  . <(qtool completion bash)\n"
                "  qtool completion zsh >~/.zfunc/_qtool\n"
                "  qtool completion fish >~/.config/fish/completions/qtool.fish\n",
    .opts = opts,
    .positionals = positionals,
    .words = shells,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .run = run,
};
