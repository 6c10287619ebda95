/*
 * The parts of the command bench (cmd_bench.c).
 *
 *   bench_request.c   what the options ask for
 *   bench_moe.c       --moe: layers of experts
 *   bench_model.c     --model: whole models
 */
#ifndef QT_CLI_BENCH_H
#define QT_CLI_BENCH_H

#include "cli/cli.h"

struct bench_model_options {
    const char *path; /* a checkpoint or container, or the name of a shape; NULL: no --model */
    const char *batch;
    const char *head; /* scheme of a shape's head; NULL: FP16 */
    size_t prompt, tokens, kv;
    double price; /* dollars per hour; 0: unknown */
};

struct bench_options {
    struct common_options common;
    struct opt_list scheme, shape, moe;
    const char *m, *length; /* length: NULL when not given */
    int dtype;              /* enum qtool_dtype */
    int compute;            /* index into the choices */
    bool dependent, invariant;
    struct bench_model_options whole;
};

extern const char bench_default_m[]; /* the default of bench_options.m */

/* With --model: specs, and batch sizes in m; with --moe: specs, moe and m. */
struct bench_request {
    struct qt_spec *specs;
    const char **names; /* [nspecs], the specs as given */
    struct qt_bench_shape *shapes;
    struct qt_bench_cache *caches;
    struct qt_bench_moe *moe;
    size_t *m, *lengths;
    size_t nspecs, nshapes, ncaches, nmoe, nm, nlengths;
    size_t shapes_capacity, caches_capacity;
    bool kv4;
};
/* *r is all zeros before. The caller calls bench_request_free, after an error as well. */
int bench_request_parse(struct bench_request *r, const struct bench_options *o, struct qt_err *err);
void bench_request_free(struct bench_request *r);

/* Parses EXPERTS,TOPK,HIDDEN,INTERMEDIATE or a name. */
int bench_moe_parse(struct qt_bench_moe *out, const char *text, struct qt_err *err);
/* Prints the rows of experts. */
int bench_moe_print(const struct qt_bench_report *report, const struct bench_request *r,
                    struct qt_err *err);
/* The same as a JSON array. */
json_t *bench_moe_doc(struct cli *cli, const struct qt_bench_report *report,
                      const struct bench_request *r);

/* Measures a whole model on a GPU. */
int bench_model(struct cli *cli, const struct bench_options *o, const struct bench_request *r,
                struct qt_err *err);

#endif
