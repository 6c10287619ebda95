/* Start, dispatch and exit status of the program. */
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

const struct command *const commands[] = {
    &cmd_inspect, &cmd_plan,    &cmd_calibrate,  &cmd_quantize, &cmd_export,
    &cmd_verify,  &cmd_eval,    &cmd_generate,   &cmd_bench,    &cmd_report,
    &cmd_list,    &cmd_version, &cmd_completion, &cmd_manual,   NULL,
};

static const char *const progress_modes[] = {"auto", "plain", "none", NULL};

const struct opt common_opts[] = {
    {.name = "threads",
     .kind = OPT_SIZE,
     .offset = offsetof(struct common_options, threads),
     .metavar = "N",
     .max = 4096,
     .help = "worker threads; 0 (the default): one per available core. Results do not depend on "
             "the number"},
    {.name = "device",
     .kind = OPT_STRING,
     .offset = offsetof(struct common_options, device),
     .metavar = "DEV",
     .help = "cpu (the default; bench: cuda), cuda or cuda:N. Only plan, calibrate, quantize, "
             "eval, generate, verify and bench can use a GPU"},
    {.name = "json",
     .kind = OPT_FLAG,
     .offset = offsetof(struct common_options, json),
     .help = "print one JSON document on stdout instead of text, also on failure (not for "
             "completion and manual)"},
    {.name = "progress",
     .kind = OPT_CHOICE,
     .offset = offsetof(struct common_options, progress),
     .choices = progress_modes,
     .metavar = "MODE",
     .help = "auto (a bar on a terminal, otherwise plain lines), plain or none"},
    {.name = "quiet",
     .letter = 'q',
     .kind = OPT_FLAG,
     .offset = offsetof(struct common_options, quiet),
     .help = "print errors only: no messages and no progress on stderr"},
    {.name = "help",
     .letter = 'h',
     .kind = OPT_FLAG,
     .offset = offsetof(struct common_options, help),
     .help = "print this text"},
    {0},
};

/* ---- the process ---------------------------------------------------------------------------- */

/* If a standard descriptor is closed, the next opened file would get its number, and results or
 * messages would be written into that file. A descriptor of the wrong direction makes such writes
 * fail instead. */
static void occupy_standard_descriptors(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd)
            _exit(qt_exit_code(QT_E_RESOURCE));
}

/* Makes a closed pipe or a file size limit an error of write() instead of a fatal signal. */
static void ignore_write_signals(void)
{
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
}

static volatile sig_atomic_t json_wanted;

/* How messages begin: with the number of the rank, except in rank 0. Signal handlers use it. */
static char sender[40] = "qtool: ";

static void write_text(int fd, const char *text)
{
    if (write(fd, text, strlen(text)) < 0)
        return; /* no way left to report it */
}

/* May run in a signal handler: only write, unlink and _exit. */
void process_end(enum qt_status status, const char *message, const char *more)
{
    static atomic_flag ending = ATOMIC_FLAG_INIT;
    const int code = qt_exit_code(status);
    /* Several threads may lose their mappings at once: the first prints. If a signal interrupted
     * that thread, nobody prints the rest: the wait ends. */
    if (atomic_flag_test_and_set(&ending)) {
        poll(NULL, 0, 500);
        _exit(code);
    }
    const char digits[] = {(char)(code >= 10 ? '0' + code / 10 : ' '), (char)('0' + code % 10),
                           '\0'};
    if (json_wanted) {
        write_text(STDOUT_FILENO, "{\n  \"qtool\": \"" QT_VERSION "\",\n  \"schema\": 1,\n"
                                  "  \"command\": null,\n  \"ok\": false,\n  \"error\": {\n"
                                  "    \"status\": \"");
        write_text(STDOUT_FILENO, doc_status(status));
        write_text(STDOUT_FILENO, "\",\n    \"exit_code\": ");
        write_text(STDOUT_FILENO, digits + (code < 10));
        write_text(STDOUT_FILENO, ",\n    \"file\": null,\n    \"tensor\": null,\n"
                                  "    \"message\": \"");
        write_text(STDOUT_FILENO, message);
        write_text(STDOUT_FILENO, "\"\n  }\n}\n");
    }
    if (ui_line_open)
        write_text(STDERR_FILENO, "\n");
    write_text(STDERR_FILENO, sender);
    write_text(STDERR_FILENO, message);
    write_text(STDERR_FILENO, "\n");
    if (more)
        write_text(STDERR_FILENO, more);
    qt_tempdirs_end();
    _exit(code);
}

/* SIGBUS handler. Files are read through mappings; if a file is truncated or its disk fails, no
 * call returns an error, so the process ends here. OUT.partial remains, as after SIGKILL. */
static void mapping_lost(int sig)
{
    (void)sig;
    process_end(QT_E_RESOURCE, QT_MAPPING_LOST, NULL);
}

static void catch_lost_mappings(void)
{
    struct sigaction action = {.sa_handler = mapping_lost};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}

/* True if stdout is a pipe that nobody reads any more: what reads it (head, say) has seen
 * enough. */
static bool stdout_is_unread(void)
{
    struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
    return poll(&out, 1, 0) == 1 && (out.revents & POLLERR) != 0;
}

/* Turns success into QT_E_RESOURCE if the results could not be written. */
static int close_stdout(const char *command, int rc)
{
    const bool unread = stdout_is_unread();
    bool failed = ferror(stdout);
    errno = 0;
    failed |= fclose(stdout) != 0;
    if (!failed || unread)
        return rc;
    fprintf(stderr, "qtool %s: cannot write results to standard output%s%s\n", command,
            errno ? ": " : "", errno ? strerror(errno) : "");
    return rc == QT_OK || rc == QT_E_GATE ? QT_E_RESOURCE : rc;
}

/* ---- running a command ---------------------------------------------------------------------- */

/* True if --json or --help is given. These must be known even if the command line has errors. */
static bool has_flag(int argc, char **argv, const char *name, const char *letter)
{
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], name) == 0 || (letter && strcmp(argv[i], letter) == 0))
            return true;
    return false;
}

static int own_gpu; /* of `--device cuda` */

int device_number(const char *device)
{
    return strncmp(device, "cuda", 4) ? -1 : device[4] == ':' ? atoi(device + 5) : own_gpu;
}

/* ---- ranks ---------------------------------------------------------------------------------- */

/* Only rank 0 prints; errors of others come to it by qt_comm_meet. */
static void silence(const struct qt_comm *comm)
{
    if (qt_comm_rank(comm) == 0)
        return;
    snprintf(sender, sizeof sender, "qtool: rank %zu: ", comm->rank);
    if (!freopen("/dev/null", "w", stdout))
        fclose(stdout);
}

/* All ranks must run the same program with the same arguments. */
static int check_ranks(struct cli *cli, const struct command *cmd, struct qt_err *err)
{
    struct {
        char version[32];
        uint32_t arguments;
    } mine = {QT_VERSION, 0}, first;
    int rc;
    if (qt_comm_size(cli->comm) == 1)
        return QT_OK;
    if (!cmd->ranks)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "'%s' is not shared by several ranks: start it without mpirun", cmd->name);
    for (int i = 1; i < cli->argc; i++)
        mine.arguments = qt_crc32(mine.arguments, cli->argv[i], strlen(cli->argv[i]) + 1);
    first = mine;
    QT_TRY(qt_comm_broadcast(cli->comm, &first, sizeof first, 0, err));
    if (strcmp(first.version, mine.version) != 0)
        rc = qt_fail(err, QT_E_USAGE, NULL, NULL, "is qtool %s, but rank 0 is %s", mine.version,
                     first.version);
    else if (first.arguments != mine.arguments)
        rc = qt_fail(err, QT_E_USAGE, NULL, NULL, "has other arguments than rank 0");
    rc = qt_comm_meet(cli->comm, rc, err);
done:
    return rc;
}

/* Ranks of one host take its GPUs in turn. */
static void choose_gpu(const struct qt_comm *comm, const char *device)
{
    const size_t count = comm && strcmp(device, "cuda") == 0 ? qt_gpu_count() : 0;
    if (count)
        own_gpu = (int)(comm->local_rank % count);
}

static int check_device(const struct command *cmd, const char *device, struct qt_err *err)
{
    static const char *const names[] = {"cpu", "cuda"};
    static const char *const gpus[] = {"gpu", "nvidia"};
    size_t index;
    if (strcmp(device, "cpu") == 0)
        return QT_OK;
    if (strncmp(device, "cuda:", 5) == 0) {
        int rc = opts_size(&index, "--device cuda:N", device + 5, 0, 1023, err);
        if (rc < 0)
            return rc;
    } else if (strcmp(device, "cuda") != 0) {
        for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++)
            if (strncasecmp(device, gpus[i], strlen(gpus[i])) == 0)
                return qt_fail(err, QT_E_USAGE, NULL, NULL,
                               "unknown device '%s'; did you mean 'cuda'?", device);
        return opts_unknown("device", device, names, 2, err);
    }
    return cmd->gpu ? QT_OK
                    : qt_fail(err, QT_E_USAGE, NULL, NULL, "--device %s: '%s' runs on the CPU only",
                              device, cmd->name);
}

/* command: NULL if the command is unknown. */
static void print_error(const char *command, const struct qt_err *err)
{
    char text[2048];
    qt_err_format(text, sizeof text, err);
    fprintf(stderr, "qtool%s%s: %s\n", command ? " " : "", command ? command : "", text);
    if (err->status == QT_E_USAGE)
        fprintf(stderr, "Run 'qtool %s%s--help' for usage.\n", command ? command : "",
                command ? " " : "");
}

/* options: the command's options struct, filled with the defaults. */
static int parse_and_run(struct cli *cli, const struct command *cmd, void *options,
                         struct qt_err *err)
{
    const struct opt_syntax syntax = {{cmd->opts, common_opts}, cmd->positionals};
    struct common_options *common = options;
    const char *args[OPTS_MAX_ARGS] = {0};
    int rc;
    QT_TRY(opts_parse(options, args, &syntax, cli->argc - 2, cli->argv + 2, err));
    common->quiet |= qt_comm_rank(cli->comm) > 0;
    ui_init(&cli->ui, cmd->name, common->quiet, (enum ui_progress)common->progress);
    cli->log = ui_log(&cli->ui);
    interrupt_catch(cmd->writes);
    QT_TRY(environment_check(err));
    QT_TRY(check_device(cmd, common->device, err));
    QT_TRY(check_ranks(cli, cmd, err));
    choose_gpu(cli->comm, common->device);
    qt_threads_set((int)common->threads);
    QT_TRY(cmd->run(cli, options, args, err));
    if (cli->doc_failed)
        rc = qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory for the JSON document");
done:
    if (rc == QT_E_INTERRUPTED)
        ui_end_line(&cli->ui);
    else
        ui_clear(&cli->ui);
    opts_free(options, &syntax);
    return rc;
}

/* Prints the error on stderr and, with --json, the document on stdout. */
static int report(struct cli *cli, const char *command, int rc, const struct qt_err *err)
{
    if (rc < 0 && qt_comm_rank(cli->comm) == 0) {
        fflush(stdout); /* keep the order if both go to one file */
        print_error(command, err);
        if (cli->advice)
            fputs(cli->advice, stderr);
    }
    qt_free(cli->advice);
    if (cli->doc)
        rc = doc_print(cli, command, rc, err);
    json_decref(cli->doc);
    return rc;
}

static struct cli cli_new(int argc, char **argv, struct qt_comm *comm)
{
    bool json = qt_comm_rank(comm) == 0 && has_flag(argc - 1, argv + 1, "--json", NULL);
    json_wanted = json;
    return (struct cli){
        .argc = argc, .argv = argv, .comm = comm, .doc = json ? json_object() : NULL};
}

static int run_command(const struct command *cmd, int argc, char **argv, struct qt_comm *comm)
{
    struct qt_err err = {0};
    void *options = NULL;
    if (has_flag(argc - 2, argv + 2, "--help", "-h")) {
        help_command(stdout, cmd);
        return QT_OK;
    }
    struct cli cli = cli_new(argc, argv, comm);
    int rc = qt_array_new(&options, 1, cmd->options_size, &err);
    if (rc == QT_OK) {
        memcpy(options, cmd->defaults, cmd->options_size);
        rc = parse_and_run(&cli, cmd, options, &err);
    }
    qt_free(options);
    rc = qt_comm_meet(comm, rc, &err);
    return report(&cli, cmd->name, rc, &err);
}

/* ---- dispatch ------------------------------------------------------------------------------- */

static const struct command *find_command(const char *name)
{
    for (size_t i = 0; commands[i]; i++)
        if (strcmp(commands[i]->name, name) == 0)
            return commands[i];
    return NULL;
}

static int unknown_command(int argc, char **argv, const char *name)
{
    const char *names[16];
    struct cli cli = cli_new(argc, argv, NULL);
    struct qt_err err = {0};
    size_t n = 0;
    for (; commands[n] && n < sizeof names / sizeof *names; n++)
        names[n] = commands[n]->name;
    int rc = opts_unknown("command", name, names, n, &err);
    return report(&cli, NULL, rc, &err);
}

static bool is_help(const char *word)
{
    return !strcmp(word, "help") || !strcmp(word, "--help") || !strcmp(word, "-h");
}

/* "help [COMMAND]", "help recipes", "--help", "-h" */
static int show_help(int argc, char **argv)
{
    if (argc < 3 || is_help(argv[2])) {
        help_overview(stdout);
        return QT_OK;
    }
    if (strcmp(argv[2], "recipes") == 0)
        return help_recipes(NULL);
    const struct command *cmd = find_command(argv[2]);
    if (!cmd)
        return unknown_command(argc, argv, argv[2]);
    help_command(stdout, cmd);
    return QT_OK;
}

static int dispatch(int argc, char **argv, struct qt_comm *comm)
{
    if (argc < 2) {
        help_start(stderr);
        help_overview(stderr);
        return QT_E_USAGE;
    }
    const char *name = argv[1];
    if (!strcmp(name, "--version") || !strcmp(name, "-V"))
        name = "version";
    if (is_help(name))
        return show_help(argc, argv);
    const struct command *cmd = find_command(name);
    return cmd ? run_command(cmd, argc, argv, comm) : unknown_command(argc, argv, name);
}

int main(int argc, char **argv)
{
    environment_complete(argv);
    occupy_standard_descriptors();
    ignore_write_signals();
    catch_lost_mappings();
    struct qt_comm *comm = NULL;
    struct qt_err err = {0};
    int rc = comm_open(&comm, &err);
    silence(comm);
    if (rc < 0)
        print_error(NULL, &err);
    else
        rc = dispatch(argc, argv, comm);
    rc = close_stdout(argc > 1 ? argv[1] : "", rc);
    if (comm)
        comm->close(comm);
    return qt_exit_code((enum qt_status)rc);
}
