/*
 * A quantization run (private to pack/): items.c makes what is stored, blocks.c, learn.c and
 * kv_calibrate.c decide how, quantize.c drives them.
 */
#ifndef QT_PACK_RUN_H
#define QT_PACK_RUN_H

#include "pack/activations/plan.h"
#include "pack/schemes/scheme.h"

struct qt_run {
    const struct qt_ckpt *ckpt;
    const struct qt_quantize_options *opt;
    struct qt_plan plan;
    struct qt_act_plan acts;  /* of w4ax linears */
    struct qt_tensor *stored; /* what the container will hold */
    size_t nstored;
    char **names;     /* of sections, owned; parallel to stored, NULL for copied tensors */
    size_t *first;    /* per plan item: its first stored tensor */
    json_t **entries; /* per plan item: its part of the manifest, once it is finished */
    double *seconds;  /* per plan item; 0 where an earlier run made it */
    struct {
        size_t first;  /* stored tensor: scale and zero, layer by layer */
        json_t *entry; /* of the manifest, once it is finished */
    } kv;
    struct qt_writer *writer;
    json_t *learning;  /* what learning has done, for the report; NULL: nothing */
    size_t finished;   /* items */
    double done_bytes; /* of the source, for progress */
};

/* ---- items.c -------------------------------------------------------------------------------- */

/* QT_E_INTERRUPTED when the caller has asked to stop. */
int qt_run_check_interrupted(const struct qt_run *run, struct qt_err *err);
/* True when an interrupted run has finished item i: its entry is taken from the journal. */
bool qt_run_resume_item(struct qt_run *run, size_t i);
/* Why one that blocks.c does not quantize has no Hessian. */
#define QT_NO_BLOCK "is no linear of a decoder block, so there is no Hessian"
/* Without a usable Hessian a tensor is quantized by search, and the report says so: *why, `size`
 * bytes, from the reason. --strict: an error. */
int qt_run_fall_back(char *why, size_t size, const struct qt_run *run, const struct qt_tensor *t,
                     const char *reason, struct qt_err *err);
/* What calibration knows of an item. */
struct qt_run_hessian {
    const struct qt_factor *factor; /* NULL: no Hessian */
    const char *fallback;           /* why there is none although there should be; else NULL */
    bool of_expert;
    size_t chose; /* of an expert: the tokens that chose it */
};
/* Quantizes item i, stores and journals it. arrange: NULL, or how a w4ax matrix is stored. *packed
 * is the caller's to free, also on failure. */
int qt_run_quantize_item(struct qt_packed *packed, struct qt_run *run, size_t i,
                         const struct qt_run_hessian *hessian, const struct qt_arrange *arrange,
                         struct qt_err *err);
/* Item i, unless it is finished, without calibration: copied, or quantized by search. */
int qt_run_make_item(struct qt_run *run, size_t i, struct qt_err *err);
/* Copies item i as it is. */
int qt_run_copy_item(struct qt_run *run, size_t i, struct qt_err *err);
/* Replaces the entry of item i, whose stored data has been put anew after qt_writer_reopen, and
 * journals it. Takes the entry over in any case. */
int qt_run_replace_item(struct qt_run *run, size_t i, json_t *entry, struct qt_err *err);
/* The sections of a packed matrix as the manifest lists them. */
json_t *qt_run_sections_json(const struct qt_packed *p);
json_t *qt_run_error_json(const struct qt_error *e);

/* The plan item of a tensor. */
int qt_run_find_item(size_t *out, const struct qt_run *run, const char *name, struct qt_err *err);
/* A finished matrix read back from what was written: what comes later is made by it.
 * QT_E_RESOURCE if it is not what its entry says; unchecked: as it is. *out is the caller's to
 * free, also on failure. */
int qt_run_read_back(struct qt_packed *out, const struct qt_run *run, size_t i, struct qt_err *err);
int qt_run_read_unchecked(struct qt_packed *out, const struct qt_run *run, size_t i,
                          struct qt_err *err);

/* The model as far as it is quantized: finished matrices decoded, the source elsewhere, and what it
 * does to activations. */
struct qt_weights qt_run_weights(struct qt_run *run);

/* ---- the parts of a run --------------------------------------------------------------------- */

/* resume.c: QT_E_RESUME if the source of what an interrupted run has finished is not what it was,
 * or if --strict would have refused it. */
int qt_run_check_records(const struct qt_run *run, struct qt_err *err);
/* Whether the output is complete already; then the run's entries are those of its manifest.
 * QT_E_RESUME as above, and if it is a container of another identity, of other tensors or side
 * files; QT_E_INPUT, QT_E_UNSUPPORTED as qt_container_open. Its data is not read. */
int qt_run_reuse(bool *reused, struct qt_run *run, const json_t *identity, struct qt_err *err);
/* The report of an output that is reused; NULL if it has none. Owned. */
json_t *qt_run_earlier_report(const struct qt_run *run);

/* blocks.c: all linears of the model's decoder blocks, calibrated block by block. */
int qt_run_layers(struct qt_run *run, struct qt_err *err);

/* kv_calibrate.c: when all tensors are final, the scales for a cache, if the plan has any. */
int qt_run_kv(struct qt_run *run, struct qt_err *err);

#define QT_REPORT_NAME "qtool-report.json"
/* report.c: what was done to each tensor, with totals, times, peak memory. *out is owned. */
int qt_run_report(json_t **out, const struct qt_run *run, double start, struct qt_err *err);

#endif
