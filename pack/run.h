/*
 * A quantization run (private to pack/). items.c stores tensors; layers.c, learn/ and
 * kv/calibrate.c decide how they are quantized; ranks.c shares them out; quantize.c drives them.
 */
#ifndef QT_PACK_RUN_H
#define QT_PACK_RUN_H

#include "pack/activations/plan.h"
#include "pack/schemes/scheme.h"

struct qt_run {
    const struct qt_ckpt *ckpt;
    const struct qt_quantize_options *opt;
    struct qt_plan plan;
    struct qt_act_plan acts;  /* plan of activations for w4ax linears */
    struct qt_tensor *stored; /* all tensors of the container */
    size_t nstored;
    char **names;    /* names of sections, owned; parallel to stored, NULL for copied tensors */
    size_t *first;   /* per plan item: index of its first stored tensor */
    double *seconds; /* per plan item; 0 if an earlier run made it */
    struct {
        size_t first;  /* index of the first stored tensor: scale and zero of each layer */
        json_t *entry; /* manifest entry; NULL until it is finished */
    } kv;
    struct qt_writer *writer;    /* NULL with `reused` */
    struct qt_container *reused; /* the complete output, if nothing is to be done; else NULL */
    /* With a backend that is not the host, a background thread finishes items: it packs, compares
     * and stores them. Then it alone uses the writer, until qt_run_settle. */
    struct qt_behind *behind;       /* NULL: items are finished at once */
    bool *made;                     /* per plan item: finished, or handed over to be finished */
    size_t *nonfinite;              /* per plan item: values of a copied tensor */
    size_t *handed_over;            /* plan items, in order */
    size_t nhanded_over, collected; /* the first `collected` are counted */
    json_t *learning;               /* result of learning for the report; NULL: none */
    size_t finished;                /* items */
    double done_bytes;              /* source bytes, for progress */
};

/* ---- items.c -------------------------------------------------------------------------------- */

/* QT_E_INTERRUPTED if the caller has asked to stop. */
int qt_run_interrupted(struct qt_run *run, struct qt_err *err);
int qt_run_check_interrupted(struct qt_run *run, struct qt_err *err);
/* Counts the items that an interrupted run or another rank finished as made. */
void qt_run_resume(struct qt_run *run);
/* Waits until all items that were handed over are finished. Returns the error of one that
 * failed. */
int qt_run_settle(struct qt_run *run, struct qt_err *err);
/* *out = the manifest entry of a made item, after qt_run_settle; the caller releases it with
 * json_decref. The journal holds the entries, because those of 100000 matrices would take a
 * gigabyte of memory. */
int qt_run_entry(json_t **out, struct qt_run *run, size_t i, struct qt_err *err);
/* Reason why an item that layers.c does not quantize has no Hessian. */
#define QT_NO_HESSIAN "not a linear of a decoder layer, so there is no Hessian"
/* Handles a tensor without a usable Hessian, which is quantized by search: writes the text for the
 * report to why[size] and logs a warning. With --strict it returns QT_E_UNSUPPORTED. */
int qt_run_fall_back(char *why, size_t size, const struct qt_run *run, const struct qt_tensor *t,
                     const char *reason, struct qt_err *err);
/* Message on a copied tensor: number of such values, number of all. */
#define QT_NONFINITE "%zu of %zu values are NaN or infinity"
/* Calibration results for an item. */
struct qt_run_hessian {
    struct qt_factor *factor; /* NULL: no Hessian */
    const char *fallback;     /* reason why a requested Hessian is missing; else NULL */
    bool is_expert;
    /* For an expert: the router sent routed_tokens to it; its Hessian needs missing_tokens more. */
    size_t routed_tokens, missing_tokens;
    json_t *input; /* borrowed value of QT_RUN_INPUT; NULL: none */
};
/* An item that is quantized, but not stored. */
struct qt_run_item;
/* Prepares item i, or a part of it. arrange: NULL, or how a w4ax matrix is stored. place and part:
 * NULL, or as for qt_packed_round. The factor is valid until the item is rounded. The caller passes
 * *out to qt_run_items_round and then to qt_run_item_finish, or to qt_run_item_free. */
int qt_run_item_new(struct qt_run_item **out, struct qt_run *run, size_t i,
                    const struct qt_run_hessian *hessian, const struct qt_arrange *arrange,
                    const struct qt_place *place, const struct qt_packed_part *part,
                    struct qt_err *err);
/* Rounds items, together if that is done on a backend. */
int qt_run_items_round(struct qt_run_item *const *items, size_t n, struct qt_err *err);
/* True if nothing is left to round: it was done on the host. */
bool qt_run_item_is_rounded(const struct qt_run_item *item);
/* The packed matrix, in which the caller completes what is missing of a part. */
struct qt_packed *qt_run_item_packed(struct qt_run_item *item);
/* Stores and journals the item. report: E of all parts; NULL: it was quantized in one part. kept:
 * NULL, or receives the packed matrix, which the caller frees after qt_run_settle, also on failure.
 * Takes ownership of the item, also on failure. */
int qt_run_item_finish(struct qt_packed *kept, struct qt_run_item *item,
                       const struct qt_solve_report *report, struct qt_err *err);
/* The caller receives the packed matrix in *kept, unless that is NULL. item: NULL is accepted. */
void qt_run_item_free(struct qt_packed *kept, struct qt_run_item *item);
/* Makes item i, unless it is finished, without calibration: copied, or quantized by search. */
int qt_run_make_item(struct qt_run *run, size_t i, struct qt_err *err);
/* Copies item i unchanged. */
int qt_run_copy_item(struct qt_run *run, size_t i, struct qt_err *err);
/* Replaces the entry of item i, whose data was rewritten after qt_writer_reopen, and journals the
 * new entry. Takes ownership of the entry, also on failure. */
int qt_run_replace_item(struct qt_run *run, size_t i, json_t *entry, struct qt_err *err);
/* The sections of a packed matrix in the form of the manifest. */
json_t *qt_run_sections_json(const struct qt_packed *p);
json_t *qt_run_error_json(const struct qt_error *e);

/* Index of a tensor's plan item. QT_E_INTERNAL if there is none. */
int qt_run_find_item(size_t *out, const struct qt_run *run, const char *name, struct qt_err *err);
/* A matrix with sections that are allocated but empty. The caller frees *out, also on failure. */
int qt_run_packed_new(struct qt_packed *out, const struct qt_run *run, size_t i, int scale_exp2,
                      struct qt_err *err);
/* Reads a finished matrix back from the output, because later steps depend on it. QT_E_RESOURCE if
 * it does not match its entry; the unchecked function does not compare. The caller frees *out, also
 * on failure. */
int qt_run_read_back(struct qt_packed *out, struct qt_run *run, size_t i, struct qt_err *err);
int qt_run_read_unchecked(struct qt_packed *out, struct qt_run *run, size_t i, struct qt_err *err);

/* The partly quantized model: finished matrices dequantized, source weights elsewhere, and
 * simulated quantization of activations. */
struct qt_weights qt_run_weights(struct qt_run *run);

/* ---- waiting.c ------------------------------------------------------------------------------ */

/*
 * Linears that a backend rounds together, because the rows of one may not keep it busy. They can
 * have different inputs: at most QT_RUN_WAITING inputs are left between two calls of
 * qt_run_round_waiting.
 */
enum { QT_RUN_WAITING = 32 };
struct qt_run_waiting {
    struct qt_factor current; /* of the linear input at hand; zeros: none yet */
    struct qt_factor earlier[QT_RUN_WAITING];
    size_t inputs; /* earlier ones */
    struct qt_run_item *item[QT_RUN_WAITING];
    struct qt_packed *kept[QT_RUN_WAITING]; /* as for qt_run_item_finish */
    size_t n, rows;
};
/* Lets an item wait, or rounds all of them if others would wait in vain. Takes ownership of the
 * item. */
int qt_run_wait(struct qt_run_waiting *w, struct qt_run_item *item, struct qt_packed *kept,
                struct qt_err *err);
/* Rounds the items that wait, and finishes them in order. */
int qt_run_round_waiting(struct qt_run_waiting *w, struct qt_err *err);
/* Another input follows: its factor goes to w->current. */
void qt_run_leave_input(struct qt_run_waiting *w);
void qt_run_waiting_free(struct qt_run_waiting *w);

/* ---- distribution.c ------------------------------------------------------------------------- */

/* A member of entries in the journal and in the report, but not in the manifest. */
#define QT_RUN_DISTRIBUTION "distribution"
/* The distribution of the finite weights of a matrix: {"rms", "absmax", "first_bin", "histogram":
 * number of weights per bin of QT_HIST_BINS, from first_bin on, "channels": [input channel, absmax,
 * rms] of those with the largest weights}. The same for any number of threads. *out is owned. */
int qt_run_distribution(json_t **out, const struct qt_matrix *w, struct qt_err *err);
/* A member like QT_RUN_DISTRIBUTION, of the first of the linears with an input: the distribution of
 * that input over the calibration tokens, in the partly quantized model (from a calibration file:
 * in the source). "channels" are those with the largest values. */
#define QT_RUN_INPUT "input"
/* *out is owned, or NULL without tokens. c has a histogram. */
int qt_run_input_distribution(json_t **out, const struct qt_channels *c, size_t k,
                              struct qt_err *err);

/* ---- ranks.c -------------------------------------------------------------------------------- */

/* All ranks learn what the others have finished: run->made then has it. rc: the status of the
 * caller's own work; the result is its error, or that of another rank. */
int qt_run_exchange(struct qt_run *run, int rc, struct qt_err *err);
/* Makes all unfinished items but those of later[items] (NULL: none) as qt_run_make_item does. */
int qt_run_make_items(struct qt_run *run, const bool *later, struct qt_err *err);
/* Rows of a matrix that one rank rounds, and multiples of them; 0: one rank rounds all. */
size_t qt_run_unit(const struct qt_packed *p, const struct qt_backend *be);
/* Divides matrices of the same width among ranks: rank r rounds the rows of matrix i from
 * end[i * ranks + r - 1] (r = 0: 0) to end[i * ranks + r]. unit[n]: as above. */
int qt_run_divide(size_t *end, const size_t *rows, const size_t *unit, size_t n, size_t ranks,
                  struct qt_err *err);
/* The rank that has the first rows of a matrix; end[ranks] as above. */
size_t qt_run_first_rank(const size_t *end);
/* Completes a packed matrix of which every rank has its rows, and the first rank all sections that
 * are not divided: in all ranks (to_all), or in the first rank. end: as above. */
int qt_run_join_packed(const struct qt_packed *packed, struct qt_comm *comm, const size_t *end,
                       bool to_all, struct qt_err *err);
/* Rank 0 takes the seconds of all items from the ranks that made them. */
int qt_run_gather_seconds(struct qt_run *run, struct qt_err *err);
/* Says how the ranks have spent the seconds of the run. */
int qt_run_log_ranks(const struct qt_run *run, double seconds, struct qt_err *err);

/* ---- side_files.c --------------------------------------------------------------------------- */

/* A new value of quantization_config for config.json and the manifest; NULL: out of memory. */
json_t *qt_run_quantization(const struct qt_run *run);
/* Copies the side files of the source, config.json with the quantization_config. */
int qt_run_copy_side_files(struct qt_run *run, struct qt_err *err);
/* QT_E_RESUME unless opt->out_dir has the side file `name` that this run would write, or none if it
 * would write none. */
int qt_run_check_side_file(const struct qt_run *run, const char *name, struct qt_err *err);

/* ---- resume.c ------------------------------------------------------------------------------- */

/* QT_E_RESUME if the source of a tensor that the interrupted run finished has changed, or
 * if that run accepted a fallback that --strict refuses. */
int qt_run_check_records(const struct qt_run *run, struct qt_err *err);
/* Sets run->reused if the output is complete; the run's entries are then those of its manifest.
 * QT_E_RESUME as above, and if the output has another identity, other tensors or side files;
 * QT_E_INPUT and QT_E_UNSUPPORTED as qt_container_open. Tensor data is not read. */
int qt_run_reuse(struct qt_run *run, const json_t *identity, struct qt_err *err);

/* ---- layers.c, kv/calibrate.c, report.c ------------------------------------------------------ */

/* Quantizes all linears of the decoder layers, layer by layer. */
int qt_run_layers(struct qt_run *run, struct qt_err *err);

/* Finds the scales of a KV cache when all tensors are final, if the plan has any. */
int qt_run_kv(struct qt_run *run, struct qt_err *err);

#define QT_REPORT_NAME "qtool-report.json"
/* Reports scheme and errors of each tensor, totals, times and peak memory. Passes the tensors on to
 * opt->tensor, and sets *out, owned, to the other members. Writes the file, if there is a writer.
 * If the output is reused, its report is returned, or made without times if it has none. */
int qt_run_report(json_t **out, struct qt_run *run, double start, struct qt_err *err);

#endif
