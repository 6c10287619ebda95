/*
 * cli: the command line. The only folder that prints and exits.
 *
 *   main.c         table of commands; start, dispatch, exit status
 *   environment.c  environment variables of libraries and of qtool
 *   comm_mpi.c     the ranks of mpirun; comm_none.c: its replacement in builds without MPI
 *   opts.c         option parser
 *   help.c         help text; recipes.c: which scheme for which runtime
 *   ui.c           messages and progress on stderr
 *   table.c        aligned columns on stdout; readable sizes and shapes
 *   doc.c          the --json document
 *   source.c       PATH and -o arguments, --tensor rules, gates
 *   calibration.c  --data and --calib
 *   budget.c       --target-bpw and --target-size
 *   interrupt.c    SIGINT and SIGTERM
 *   cmd_*.c        one command each; inspect_qcal.c: inspect of calibration files
 */
#ifndef QT_CLI_CLI_H
#define QT_CLI_CLI_H

#include "cli/opts.h"
#include "verify/verify.h"
#include <signal.h>
#include <stdio.h>

/* ---- environment (environment.c) ------------------------------------------------------------ */

/* Sets variables that libraries read before main(), unless they are set, and executes the program
 * again. Returns if nothing is to be set, or if that fails. */
void environment_complete(char **argv);
/* Checks qtool's own variables. QT_E_USAGE: unknown value. */
int environment_check(struct qt_err *err);

/* True if the process was started as one of several ranks (mpirun, srun). */
bool comm_wanted(void);

/* ---- ranks (comm_mpi.c or comm_none.c) ------------------------------------------------------ */

bool comm_built(void);
/* *out = NULL for one process alone. The caller ends with (*out)->close. */
int comm_open(struct qt_comm **out, struct qt_err *err);

/* ---- messages and progress (ui.c) ----------------------------------------------------------- */

enum ui_progress { UI_AUTO, UI_PLAIN, UI_NONE };

struct ui {
    const char *command;
    bool quiet, bar, plain;
    bool drawn;             /* the current line of the terminal shows a bar */
    char stage[32];         /* the current stage, "" before the first */
    double started, shown;  /* times of the stage's start and of its last output, seconds */
    double first, fraction; /* of the stage that was done at its start and when measured */
    double measured;        /* time of the last measurement of the speed */
    double speed, weight;   /* smoothed fraction per second = speed / weight */
    size_t layer, layers;   /* layers = 0: not in a layer */
    double tokens;          /* that the stage runs through every layer; 0: unknown */
};
/* The current line of the terminal shows a bar. */
extern volatile sig_atomic_t ui_line_open;

void ui_init(struct ui *ui, const char *command, bool quiet, enum ui_progress progress);
/* Returns a log that prints through ui, which must outlive it. */
struct qt_log ui_log(struct ui *ui);
/* Before other output: ui_clear erases the bar, ui_end_line keeps it. */
void ui_clear(struct ui *ui);
void ui_end_line(struct ui *ui);

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
    struct qt_comm *comm; /* NULL: one process */
    struct ui ui;
    struct qt_log log;
    char *advice;    /* line to print after the error, freed by the caller of the command */
    json_t *doc;     /* with --json: document for the results; otherwise NULL */
    bool doc_failed; /* out of memory while filling doc */
};

struct command {
    const char *name, *summary;
    const char *description; /* paragraphs, separated by an empty line */
    const char *examples;    /* lines */
    const struct opt *opts;
    const struct opt_positional *positionals;
    const char *const *words; /* possible values of the argument, NULL-terminated; NULL: a file */
    const void *defaults;     /* options struct; begins with struct common_options */
    size_t options_size;
    bool gpu;    /* accepts --device cuda */
    bool writes; /* files, so that a signal must not end it anywhere */
    bool ranks;  /* several ranks can share its work */
    int (*run)(struct cli *cli, const void *options, const char *const *args, struct qt_err *err);
};

extern const struct command cmd_inspect, cmd_plan, cmd_calibrate, cmd_quantize, cmd_export,
    cmd_verify, cmd_eval, cmd_generate, cmd_bench, cmd_report, cmd_list, cmd_version,
    cmd_completion, cmd_manual;
/* All commands, NULL-terminated (main.c). */
extern const struct command *const commands[];
extern const struct opt common_opts[];
/* Returns the GPU number of a valid --device, -1 for cpu (main.c). `cuda` is the first GPU, with
 * several ranks that of the local rank. */
int device_number(const char *device);
/* Opens the backend of --device. The caller closes it with be->close(be). */
int backend_open(struct qt_backend **out, const char *device, struct qt_err *err);

/* Initializer of struct common_options in a command's defaults. */
#define COMMON_DEFAULTS                                                                            \
    {                                                                                              \
        .device = "cpu"                                                                            \
    }

/* Meanings of the exit status; meaning = NULL ends the table (help.c). */
struct exit_code {
    int code;
    const char *meaning;
};
extern const struct exit_code exit_codes[];

/* ---- help (help.c) -------------------------------------------------------------------------- */

void help_overview(FILE *f);
/* Three commands of the common path, for those who give none. */
void help_start(FILE *f);
/* Prints the table of recipes on stdout (recipes.c). */
int help_recipes(struct qt_err *err);
void help_command(FILE *f, const struct command *cmd);

/* ---- text (table.c) ------------------------------------------------------------------------- */

enum { TEXT_SIZE = 48 };

/* A table of text whose columns are aligned when it is printed. */
struct table {
    const char *align; /* one letter per column: 'l' or 'r' */
    char **rows;       /* tabs separate the cells */
    size_t count, capacity;
    bool failed; /* out of memory; reported by table_print */
};

/* Adds a row: a printf format with tabs between cells. */
void table_row(struct table *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Adds the bits per weight as counted in the scheme's paper; NaN (same count): adds nothing. */
void table_paper_bpw(struct table *t, double bpw);
/* Prints to stdout (or f) and frees the rows. */
int table_print(struct table *t, struct qt_err *err);
int table_print_to(FILE *f, struct table *t, struct qt_err *err);
void table_free(struct table *t);

/* interrupt.c. After interrupt_catch, the first SIGINT or SIGTERM ends a command that writes no
 * files, with exit status 75. Otherwise it makes a request, which interrupt_came returns; if nobody
 * asks for it in two seconds, the process ends. A second signal ends the process at once. Signals
 * ignored from the start (nohup) stay ignored. */
void interrupt_catch(bool writes);
bool interrupt_came(void);
/* Sets a line to print on stderr if the process ends by a request that nobody heard, or NULL. */
void interrupt_hint(const char *text);
/* Ends the process from a signal handler: prints the message, `more` unless it is NULL, and with
 * --json the document (main.c). */
void process_end(enum qt_status status, const char *message, const char *more)
    __attribute__((noreturn));

/* Prints text with control characters replaced: names from untrusted files may have them. */
void text_print(FILE *f, const char *p, size_t len);
const char *text_plural(size_t n); /* "" or "s" */
/* Write into buf and return it. */
const char *text_bytes(char buf[TEXT_SIZE], uint64_t bytes);                /* "3.9 MiB" */
const char *text_shape(char buf[TEXT_SIZE], int ndim, const size_t *shape); /* "384x384" */

/* ---- the JSON document (doc.c) -------------------------------------------------------------- */

/* Take ownership of value; failure sets cli->doc_failed. */
void doc_set(struct cli *cli, json_t *object, const char *key, json_t *value);
void doc_append(struct cli *cli, json_t *array, json_t *value);
json_t *doc_text(const char *s); /* any bytes; null if s is NULL */
json_t *doc_real(double value);  /* null if not finite */
json_t *doc_size(uint64_t value);
json_t *doc_shape(int ndim, const size_t *shape);
json_t *doc_gpu(struct cli *cli, const struct qt_gpu *gpu);
void doc_figures(struct cli *cli, const struct qt_figure *figures, size_t n);
/* The name of a status in the document: "interrupted". */
const char *doc_status(int status);
/* Adds the command's result rc to the document and prints it on stdout. Returns rc, or
 * QT_E_RESOURCE if out of memory. */
int doc_print(struct cli *cli, const char *command, int rc, const struct qt_err *err);

/* ---- shared by commands (source.c) ---------------------------------------------------------- */

/* A PATH argument: a checkpoint, or a container (`container` is set, `ckpt` has its tensors). */
struct source {
    struct qt_container *container;
    struct qt_ckpt *opened;
    const struct qt_ckpt *ckpt;
    struct qt_weights weights;
};
int source_open(struct source *out, const char *path, struct qt_err *err);
void source_close(struct source *s);
/* Adds what was measured to the document: the path as given, the size of all tensors and, of a
 * container, the CRC-32 of its manifest, by which a report finds the container. container: NULL for
 * a checkpoint. */
int doc_measured(struct cli *cli, const char *path, const struct qt_container *container,
                 const struct qt_ckpt *ckpt, struct qt_err *err);
/* source_open, and checks the CRCs of a container's weights and the checksums of its other files:
 * damaged ones would give plausible results. */
int source_open_whole(struct source *out, const char *path, struct cli *cli, struct qt_err *err);
/* w4ax tensors that share an input must agree, as 'verify' demands. */
int source_check_agreement(const struct source *s, struct qt_err *err);
/* checkpoint_open refuses containers, container_open refuses checkpoints. */
int checkpoint_open(struct qt_ckpt **out, const char *path, struct qt_err *err);
int container_open(struct qt_container **out, const char *path, struct qt_err *err);

/* Checks -o before any work: QT_E_USAGE if the directory to write in does not exist. */
int out_check(const char *path, struct qt_err *err);
/* The same for a directory, which must not be named like a file of weights. */
int out_dir_check(const char *path, struct qt_err *err);

/* --tensor 'REGEX=SPEC', split at the first '='. */
struct rules {
    struct qt_rule *rule;
    char **text; /* strings that the rules point into */
    size_t count, texts;
};
int rules_parse(struct rules *out, const struct opt_list *list, struct qt_err *err);
/* Puts n rules, whose strings are borrowed, before the others, and drops those that leave their
 * tensors to the choice of schemes for a target. */
int rules_prepend(struct rules *rules, const struct qt_rule *more, size_t n, struct qt_err *err);
void rules_free(struct rules *rules);

/* Checks, before any work, that a --gate expression (or NULL) is well-formed and names only these
 * figures. */
int gate_validate(const char *expr, const struct qt_figure *figures, size_t n,
                  const struct qt_tensor_figures *tensors, struct qt_err *err);
/* Checks the gate and prints each condition with its value, in the document as "gates". */
int gate_apply(struct cli *cli, const char *expr, const struct qt_figure *figures, size_t n,
               const struct qt_tensor_figures *tensors, struct qt_err *err);

/* ---- calibration data (calibration.c) ------------------------------------------------------- */

struct calibration_options {
    struct opt_list data;
    int bos; /* enum qt_bos */
    size_t samples, seqlen, seed;
    const char *file; /* --calib, for commands that have it */
};

enum { CALIBRATION_SAMPLES = 128, CALIBRATION_SEQLEN = 2048 };

/* What --data accepts. */
#define DATA_HELP                                                                                  \
    "UTF-8 text; JSON Lines or a JSON array of strings, of objects with \"text\" or of "           \
    "conversations (\"messages\", \"conversations\"); or token ids (.npy, raw .u16 or .u32); "     \
    "also "                                                                                        \
    "as gzip files; - is standard input"

/* --bos. member: an int in the command's options. */
#define BOS_OPT(type, member)                                                                      \
    {                                                                                              \
        .name = "bos", .kind = OPT_CHOICE, .offset = offsetof(type, member), .metavar = "HOW",     \
        .choices = bos_names,                                                                      \
        .help = "put a BOS token before every document of text: auto (default, as the "            \
                "tokenizer's files say), yes or no"                                                \
    }
extern const char *const bos_names[]; /* in the order of enum qt_bos */

/* Option rows. member: the struct calibration_options in the command's options. */
#define CALIBRATION_OPTS(type, member)                                                             \
    {.name = "data",                                                                               \
     .kind = OPT_LIST,                                                                             \
     .offset = offsetof(type, member.data),                                                        \
     .metavar = "FILE",                                                                            \
     .help = "calibration data: " DATA_HELP},                                                      \
        BOS_OPT(type, member.bos),                                                                 \
        {.name = "samples",                                                                        \
         .kind = OPT_SIZE,                                                                         \
         .offset = offsetof(type, member.samples),                                                 \
         .metavar = "N",                                                                           \
         .min = 1,                                                                                 \
         .max = (size_t)1 << 24,                                                                   \
         .help = "windows of calibration data (default 128, or all if fewer)"},                    \
        {.name = "seqlen",                                                                         \
         .kind = OPT_SIZE,                                                                         \
         .offset = offsetof(type, member.seqlen),                                                  \
         .metavar = "N",                                                                           \
         .min = 1,                                                                                 \
         .max = (size_t)1 << 24,                                                                   \
         .help = "tokens of a window (default 2048, or the model's maximum)"},                     \
    {                                                                                              \
        .name = "seed", .kind = OPT_SIZE, .offset = offsetof(type, member.seed), .metavar = "N",   \
        .max = INT64_MAX,                                                                          \
        .help = "how windows are chosen: 0 (default): evenly spaced; otherwise drawn at random"    \
                " with this seed"                                                                  \
    }

/* `texts` and `chats` documents were read; `why` says what decided whether a BOS precedes them. */
struct bos_rule {
    size_t texts, chats;
    bool bos;
    const char *why;
};
struct bos_rule bos_rule_of(const struct qt_data *data);
/* Adds a row or members; nothing if the data has token ids only. */
void bos_row(struct table *t, const struct bos_rule *rule);
void doc_bos(struct cli *cli, const struct bos_rule *rule);

struct calibration {
    struct qt_calibration data; /* zero without --data and --calib */
    struct qt_qcal_part part;   /* origin of the data; points into the options */
    struct bos_rule bos;
    uint32_t *ids;
    uint64_t data_bytes; /* see qt_data.bytes */
    struct qt_backend *backend;
    struct qt_qcal *file;
};

/* Returns true if --samples, --seqlen or --seed is given. */
bool calibration_has_windows(const struct calibration_options *o);
#define WINDOWS_WITHOUT_DATA "--samples, --seqlen, --seed and --bos need --data"
/* Opens the backend, and reads the windows of --data or opens the file of --calib. Without either
 * it only checks that options which need them are not given (QT_E_USAGE). */
int calibration_open(struct calibration *out, const struct calibration_options *o,
                     const struct qt_ckpt *ckpt, const char *device, struct qt_err *err);
void calibration_close(struct calibration *c);

/* ---- schemes for a size (budget.c) ---------------------------------------------------------- */

struct budget_options {
    const char *bpw, *size, *choices, *state; /* NULL: not given */
    bool untied;
};

/* Option rows. member: the struct budget_options in the command's options. */
#define BUDGET_OPTS(type, member)                                                                  \
    {.name = "target-bpw",                                                                         \
     .kind = OPT_STRING,                                                                           \
     .offset = offsetof(type, member.bpw),                                                         \
     .metavar = "BITS",                                                                            \
     .help = "instead of --scheme: choose a scheme for each tensor, so that quantized weights "    \
             "have at most BITS bits on average, with scales, tables and padding"},                \
        {.name = "target-size",                                                                    \
         .kind = OPT_STRING,                                                                       \
         .offset = offsetof(type, member.size),                                                    \
         .metavar = "SIZE",                                                                        \
         .help = "the same for a largest size of all tensors: 5GB, 700MiB"},                       \
        {.name = "choices",                                                                        \
         .kind = OPT_STRING,                                                                       \
         .offset = offsetof(type, member.choices),                                                 \
         .metavar = "S,S,...",                                                                     \
         .help = "schemes to choose from (default: of nf2, nf3, nf4 with groups of 128 and 64, "   \
                 "fp5, fp6 and fp8 those near the target; lut instead of nf where the result is "  \
                 "calibrated)"},                                                                   \
        {.name = "untied",                                                                         \
         .kind = OPT_FLAG,                                                                         \
         .offset = offsetof(type, member.untied),                                                  \
         .help =                                                                                   \
             "linears that share an input (q, k and v; gate and up) need not have one scheme: "    \
             "the error is smaller, but other runtimes may refuse the result"},                    \
    {                                                                                              \
        .name = "sensitivity", .kind = OPT_STRING, .offset = offsetof(type, member.state),         \
        .metavar = "FILE",                                                                         \
        .help = "with --data: keep the measured divergences in FILE, which another run with the "  \
                "same checkpoint and data reads"                                                   \
    }

bool budget_wanted(const struct budget_options *o);
/* Checks the options before any work. scheme: --scheme, or NULL; needs_scheme: one is required. */
int budget_check(const struct budget_options *o, const char *scheme, bool needs_scheme,
                 struct qt_err *err);
/* Chooses, and adds the rules to those of the user, which then borrow from *out. The caller frees
 * *out with qt_budget_free. */
int budget_choose(struct qt_budget *out, struct rules *rules, struct cli *cli,
                  const struct budget_options *o, const struct qt_ckpt *ckpt,
                  const struct calibration *calibration, struct qt_err *err);
int budget_print(const struct qt_budget *b, struct qt_err *err);
void budget_doc(struct cli *cli, const struct qt_budget *b);

/* ---- KV caches (kv.c) ----------------------------------------------------------------------- */

struct kv_options {
    size_t bits; /* 4, or 0: no --kv */
    int keys;    /* index into qt_kv_keys_names, or KV_KEYS_DEFAULT */
};

enum { KV_KEYS_DEFAULT = -1 };
#define KV_DEFAULTS                                                                                \
    {                                                                                              \
        .keys = KV_KEYS_DEFAULT                                                                    \
    }

/* Option rows. member: the struct kv_options in the command's options. */
#define KV_OPTS(type, member, kv_help, keys_help)                                                  \
    {.name = "kv",                                                                                 \
     .kind = OPT_SIZE,                                                                             \
     .offset = offsetof(type, member.bits),                                                        \
     .metavar = "4",                                                                               \
     .min = 4,                                                                                     \
     .max = 4,                                                                                     \
     .help = kv_help},                                                                             \
    {                                                                                              \
        .name = "kv-keys", .kind = OPT_CHOICE, .offset = offsetof(type, member.keys),              \
        .metavar = "HOW", .choices = qt_kv_keys_names, .help = keys_help                           \
    }
#define KV_KEYS_HELP                                                                               \
    "with --kv, key scales: channel (one per channel for each 64 tokens, the form that the "       \
    "attention kernels take), static (one per channel, from calibration data) or token (one per "  \
    "token and KV head). Default: "

/* Sets *out to the chosen kind of keys, QT_KV_KEYS_NONE without --kv. */
int kv_options_keys(enum qt_kv_keys *out, const struct kv_options *o, struct qt_err *err);
/* The cache that --kv-keys names, or else the one that the container was made for; freed by
 * qt_kv_free, also after an error. s: the model; must outlive *out. */
int kv_open(struct qt_kv *out, const struct kv_options *o, const struct source *s,
            struct qt_err *err);
/* "channel", "static" or "token". */
const char *kv_keys_name(enum qt_kv_keys keys);
/* Adds a row about a cache. head_dim: 0 if unknown. tokens: of a sequence; 0: no bits for it. */
void kv_row(struct table *t, enum qt_kv_keys keys, size_t head_dim, size_t tokens);

/* ---- the fused runtime (runtime.c) ---------------------------------------------------------- */

/* Values of --runtime. */
enum runtime { RUNTIME_DEFAULT = -1, RUNTIME_FUSED, RUNTIME_REFERENCE };
extern const char *const runtime_names[];
#define RUNTIME_OPT(type, member, runtime_help)                                                    \
    {                                                                                              \
        .name = "runtime", .kind = OPT_CHOICE, .offset = offsetof(type, member),                   \
        .metavar = "NAME", .choices = runtime_names, .help = runtime_help                          \
    }
/* QT_E_USAGE: --runtime fused without a GPU. */
int runtime_check(int runtime, const char *device, struct qt_err *err);
/* True if the fused runtime runs the model: the default on a GPU. */
bool runtime_is_fused(int runtime, const char *device);
/* QT_E_UNSUPPORTED: the fused runtime has no cache with such keys. */
int runtime_check_kv(int runtime, const char *device, enum qt_kv_keys keys, struct qt_err *err);

/* ---- share.c -------------------------------------------------------------------------------- */

const char *text_share(char buf[TEXT_SIZE], const struct qt_share *share); /* "98.5 %", or "-" */
/* Rows and members with the share of the linear weights that is quantized, and the reasons why
 * tensors are copied (left[n]). */
void share_rows(struct table *t, const struct qt_share *share, const struct qt_left *left,
                size_t n);
void doc_share(struct cli *cli, const struct qt_share *share, const struct qt_left *left, size_t n);
/* The same for copied values that are not finite: `first` is NULL and there is no row if there are
 * none. */
void nonfinite_row(struct table *t, const char *first, size_t tensors, uint64_t values);
void doc_nonfinite(struct cli *cli, const char *first, size_t tensors, uint64_t values);

/* ---- inspect (inspect_qcal.c) --------------------------------------------------------------- */

/* Runs inspect on a calibration file. */
int inspect_qcal(struct cli *cli, const char *path, struct qt_err *err);

#endif
