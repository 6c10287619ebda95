/*
 * cli: the only folder that prints and exits.
 *
 *   main.c       the table of commands; start, dispatch, exit code
 *   environment.c  what libraries read from the environment before main(), and qtool's variables
 *   opts.c       options from tables
 *   help.c       help text from the same tables
 *   ui.c         messages and progress on stderr
 *   table.c      aligned columns on stdout, numbers for people
 *   doc.c        the --json document
 *   source.c     PATH arguments: checkpoint or container; --tensor rules; gates
 *   calibration.c  --data and --calib
 *   cmd_*.c      one subcommand each; inspect_qcal.c: inspect of calibration files
 */
#ifndef QT_CLI_CLI_H
#define QT_CLI_CLI_H

#include "cli/opts.h"
#include "verify/verify.h"
#include <stdio.h>

/* ---- the environment (environment.c) -------------------------------------------------------- */

/* Sets what libraries have read from the environment by now and nobody has set, and starts the
 * program again; where it cannot, or nothing is to be set, it returns. */
void environment_complete(char **argv);
/* QT_E_USAGE: a variable of qtool's own has a value that means nothing. */
int environment_check(struct qt_err *err);

/* ---- messages and progress (ui.c) ----------------------------------------------------------- */

enum ui_progress { UI_AUTO, UI_PLAIN, UI_NONE };

struct ui {
    const char *command;
    bool quiet, bar, plain;
    bool drawn;            /* a bar is on the screen's current line */
    char stage[32];        /* the stage that runs, "" before the first */
    double started, shown; /* of the stage, and its last output: seconds */
};

void ui_init(struct ui *ui, const char *command, bool quiet, enum ui_progress progress);
/* Sink whose ctx is ui. */
struct qt_log ui_log(struct ui *ui);
/* Removes the bar, so that other text can be printed. */
void ui_clear(struct ui *ui);

/* ---- commands ------------------------------------------------------------------------------- */

/* The first member of every command's options. */
struct common_options {
    size_t threads;
    const char *device;
    bool json, quiet, help;
    int progress; /* enum ui_progress */
};

/* A run of a command. */
struct cli {
    int argc;
    char **argv;
    struct ui ui;
    struct qt_log log;
    json_t *doc;     /* --json: results go here instead of stdout; else NULL */
    bool doc_failed; /* out of memory while filling doc */
};

struct command {
    const char *name, *summary;
    const char *description; /* paragraphs, separated by an empty line */
    const char *examples;    /* lines */
    const struct opt *opts;
    const struct opt_positional *positionals;
    const char *const *words; /* its argument is one of these, ended by NULL; NULL: a file */
    const void *defaults;     /* options struct, begins with struct common_options */
    size_t options_size;
    bool gpu; /* takes --device cuda */
    int (*run)(struct cli *cli, const void *options, const char *const *args, struct qt_err *err);
};

extern const struct command cmd_inspect, cmd_plan, cmd_calibrate, cmd_quantize, cmd_verify,
    cmd_eval, cmd_bench, cmd_list, cmd_version, cmd_completion, cmd_manual;
/* All of them, NULL-terminated (main.c). */
extern const struct command *const commands[];
extern const struct opt common_opts[];
/* Of a checked --device: the GPU's number, -1 for cpu (main.c). */
int device_number(const char *device);
/* What runs models: the CPU, or the GPU of --device. Close with be->close(be). */
int backend_open(struct qt_backend **out, const char *device, struct qt_err *err);

/* The initialiser of the common part of a command's defaults. */
#define COMMON_DEFAULTS                                                                            \
    {                                                                                              \
        .device = "cpu"                                                                            \
    }

/* What the exit status means; ends with meaning = NULL (help.c). */
struct exit_code {
    int code;
    const char *meaning;
};
extern const struct exit_code exit_codes[];

/* ---- help (help.c) -------------------------------------------------------------------------- */

void help_overview(FILE *f);
void help_command(FILE *f, const struct command *cmd);

/* ---- text (table.c) ------------------------------------------------------------------------- */

enum { TEXT_SIZE = 48 };

/* Rows of cells; columns are aligned when printed. */
struct table {
    const char *align; /* one letter per column: 'l' or 'r' */
    char **rows;       /* cells separated by tabs */
    size_t count, capacity;
    bool failed; /* out of memory; reported by table_print */
};

/* Adds a row: a format whose cells are separated by tabs. */
void table_row(struct table *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The size by the scheme's publication; no row for NaN, where it counts the same. */
void table_paper_bpw(struct table *t, double bpw);
/* Prints to stdout (or f) and frees the rows. */
int table_print(struct table *t, struct qt_err *err);
int table_print_to(FILE *f, struct table *t, struct qt_err *err);
void table_free(struct table *t);

/* interrupt.c. From catch on the first SIGINT or SIGTERM is kept for long work to ask after; a
 * second one ends the process at once. One that is ignored from the start (nohup, a background job)
 * stays ignored. */
void interrupt_catch(void);
bool interrupt_came(void);

/* Names come out of untrusted files: no control character may reach a terminal. */
void text_print(FILE *f, const char *p, size_t len);
/* Each writes into buf and returns it. */
const char *text_bytes(char buf[TEXT_SIZE], uint64_t bytes);                /* "3.9 MiB" */
const char *text_shape(char buf[TEXT_SIZE], int ndim, const size_t *shape); /* "384x384" */

/* ---- the JSON document (doc.c) -------------------------------------------------------------- */

/* All take ownership of value, and note a failure in cli->doc_failed. */
void doc_set(struct cli *cli, json_t *object, const char *key, json_t *value);
void doc_append(struct cli *cli, json_t *array, json_t *value);
json_t *doc_text(const char *s); /* any bytes; NULL gives null */
json_t *doc_real(double value);  /* null when not finite */
json_t *doc_size(uint64_t value);
json_t *doc_shape(int ndim, const size_t *shape);
json_t *doc_gpu(struct cli *cli, const struct qt_gpu *gpu);
void doc_figures(struct cli *cli, const struct qt_figure *figures, size_t n);
/* Completes the document with the command's result rc and prints it on stdout. Returns rc, or
 * QT_E_RESOURCE when memory did not suffice. */
int doc_print(struct cli *cli, const char *command, int rc, const struct qt_err *err);

/* ---- shared by commands (source.c) ---------------------------------------------------------- */

/* A PATH argument: a checkpoint, or a container (then container is set and ckpt is its own). */
struct source {
    struct qt_container *container;
    struct qt_ckpt *opened;
    const struct qt_ckpt *ckpt;
    struct qt_weights weights;
};
int source_open(struct source *out, const char *path, struct qt_err *err);
void source_close(struct source *s);
/* A checkpoint: a container is refused; and the other way round. */
int checkpoint_open(struct qt_ckpt **out, const char *path, struct qt_err *err);
int container_open(struct qt_container **out, const char *path, struct qt_err *err);

/* --tensor 'REGEX=SPEC', cut at the first '='. */
struct rules {
    struct qt_rule *rule;
    char **text; /* what the rules point into */
    size_t count;
};
int rules_parse(struct rules *out, const struct opt_list *list, struct qt_err *err);
void rules_free(struct rules *rules);

/* Whether a --gate expression (or NULL) is well-formed and names only these figures: to be called
 * before the work that measures them. */
int gate_validate(const char *expr, const struct qt_figure *figures, size_t n,
                  const struct qt_tensor_figures *tensors, struct qt_err *err);

/* ---- calibration data (calibration.c) ------------------------------------------------------- */

struct calibration_options {
    struct opt_list data;
    size_t samples, seqlen, seed;
    const char *file; /* --calib, of commands that have it */
};

enum { CALIBRATION_SAMPLES = 128, CALIBRATION_SEQLEN = 2048 };

/* Option rows; member is the struct calibration_options in the command's options. */
#define CALIBRATION_OPTS(type, member)                                                             \
    {.name = "data",                                                                               \
     .kind = OPT_LIST,                                                                             \
     .offset = offsetof(type, member.data),                                                        \
     .metavar = "FILE",                                                                            \
     .help = "calibration data: UTF-8 text, .jsonl with \"text\", or token ids (.u16, .u32, "      \
             ".npy), each also .gz; may be given several times"},                                  \
        {.name = "samples",                                                                        \
         .kind = OPT_SIZE,                                                                         \
         .offset = offsetof(type, member.samples),                                                 \
         .metavar = "N",                                                                           \
         .min = 1,                                                                                 \
         .max = (size_t)1 << 24,                                                                   \
         .help = "windows of calibration data (default 128, or what there is)"},                   \
        {.name = "seqlen",                                                                         \
         .kind = OPT_SIZE,                                                                         \
         .offset = offsetof(type, member.seqlen),                                                  \
         .metavar = "N",                                                                           \
         .min = 1,                                                                                 \
         .max = (size_t)1 << 24,                                                                   \
         .help = "tokens of a window (default 2048 or what the model takes)"},                     \
    {                                                                                              \
        .name = "seed", .kind = OPT_SIZE, .offset = offsetof(type, member.seed), .metavar = "N",   \
        .max = INT64_MAX,                                                                          \
        .help = "0 (default): windows spread evenly over the data; else drawn by this seed"        \
    }

struct calibration {
    struct qt_calibration data; /* all zero without --data and --calib */
    struct qt_qcal_part part;   /* where data came from; points into the options */
    uint32_t *ids;
    struct qt_backend *backend;
    struct qt_qcal *file;
};

/* Whether windows of --data are chosen; what to say if there are none. */
bool calibration_has_windows(const struct calibration_options *o);
#define WINDOWS_WITHOUT_DATA                                                                       \
    "--samples, --seqlen and --seed choose windows of --data, which is not given"
#define GPU_WITHOUT_DATA "--device cuda: only what calibration data decide runs on a GPU"
/* Opens the backend, and reads the windows or opens the file; without --data and --calib it only
 * checks that there are no options of theirs (QT_E_USAGE). */
int calibration_open(struct calibration *out, const struct calibration_options *o,
                     const struct qt_ckpt *ckpt, const char *device, struct qt_err *err);
void calibration_close(struct calibration *c);

/* ---- inspect (inspect_qcal.c) --------------------------------------------------------------- */

/* What inspect says of a calibration file. */
int inspect_qcal(struct cli *cli, const char *path, struct qt_err *err);

#endif
