/* Speed of whole models: prefill, decode steps, and the share of each kind of kernel. */
#include "verify/runtime/runtime.h"

#include <math.h>
#include <stdio.h>

struct bench_model {
    struct qt_gpu *gpu;
    const struct qt_bench_model_options *opt;
    struct qt_bench_model_report *report;
    struct qt_runtime *rt;
    size_t capacity;
};

enum { WARM_STEPS = 3 };

/* The energy counter of a board moves every 20 to 100 ms. */
static const double power_seconds = 1;

/* ---- one batch size ------------------------------------------------------------------------- */

struct share_work {
    struct qt_runtime *rt;
    int share;
};

static int launch_share(void *ctx, size_t i, struct qt_err *err)
{
    const struct share_work *w = ctx;
    (void)i;
    return rt_enqueue(w->rt, &w->rt->step, w->share, err);
}

static int time_shares(struct qt_bench_model_row *row, struct bench_model *b, struct qt_err *err)
{
    int rc = QT_OK;
    for (int share = 0; share < QT_RUNTIME_SHARES; share++) {
        struct share_work ctx = {b->rt, share};
        const struct qt_gpu_work work = {launch_share, &ctx, 1};
        QT_TRY(qt_stop_check(err));
        QT_TRY(b->gpu->time(b->gpu, &row->us[share], &work, 1, err));
    }
done:
    return rc;
}

static int random_ids(uint32_t **out, size_t count, size_t vocab, struct qt_err *err)
{
    int rc = qt_array_new(out, count, sizeof **out, err);
    for (size_t i = 0; rc == QT_OK && i < count; i++)
        (*out)[i] = (uint32_t)(gpu_random(count, i) % vocab);
    return rc;
}

static double energy(struct qt_gpu *gpu)
{
    return gpu->energy ? gpu->energy(gpu) : NAN;
}

/* Runs the timed steps and waits for them. */
static int run_steps(struct bench_model *b, uint32_t *next, struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < b->opt->tokens; i++)
        QT_TRY(qt_runtime_step(b->rt, err));
    QT_TRY(qt_runtime_read(b->rt, next, NULL, err));
done:
    return rc;
}

/* The power of the board, over the same steps again until enough time has passed. */
static int measure_power(struct qt_bench_model_row *row, struct bench_model *b, uint32_t *next,
                         struct qt_err *err)
{
    const double start = qt_clock(), joules = energy(b->gpu);
    int rc = QT_OK;
    while (isfinite(joules) && qt_clock() - start < power_seconds) {
        QT_TRY(qt_stop_check(err));
        QT_TRY(rt_rewind(b->rt, b->opt->prompt + WARM_STEPS, err));
        QT_TRY(run_steps(b, next, err));
    }
    row->watts = (energy(b->gpu) - joules) / (qt_clock() - start);
done:
    return rc;
}

/* Runs prompts twice: the first time loads code. */
static int measure(struct qt_bench_model_row *row, struct bench_model *b, struct qt_err *err)
{
    const struct qt_bench_model_options *o = b->opt;
    uint32_t *ids = NULL, *next = NULL;
    int rc;
    QT_TRY(random_ids(&ids, row->batch * o->prompt, b->rt->config.vocab, err));
    QT_TRY(qt_array_new(&next, row->batch, sizeof *next, err));
    for (int i = 0; i < 2; i++)
        QT_TRY(rt_prompt_some(b->rt, ids, o->prompt, &row->prompts, &row->prompt_seconds, err));
    for (int i = 0; i < WARM_STEPS; i++)
        QT_TRY(qt_runtime_step(b->rt, err));
    QT_TRY(qt_runtime_read(b->rt, next, NULL, err));
    const double start = qt_clock();
    QT_TRY(run_steps(b, next, err));
    row->seconds = qt_clock() - start;
    QT_TRY(measure_power(row, b, next, err));
    row->bytes = qt_runtime_bytes(b->rt);
    QT_TRY(time_shares(row, b, err));
done:
    qt_free(ids);
    qt_free(next);
    return rc;
}

/* ---- one scheme ----------------------------------------------------------------------------- */

static int open_runtime(struct bench_model *b, const struct qt_bench_model_row *row,
                        struct qt_err *err)
{
    const struct qt_bench_model_options *o = b->opt;
    const struct qt_runtime_options opt = {.sequences = row->batch,
                                           .capacity = b->capacity,
                                           .prompt = o->prompt,
                                           .kv4 = o->kv4 && !row->fp16,
                                           .batch_invariant = o->batch_invariant,
                                           .log = o->log};
    if (o->shape)
        return qt_runtime_open_random(&b->rt, b->gpu, o->shape, row->spec,
                                      row->fp16 ? NULL : o->head, &opt, err);
    return qt_runtime_open(&b->rt, b->gpu, o->model, o->weights, row->fp16 ? NULL : o->container,
                           &opt, err);
}

static int run_row(struct bench_model *b, struct qt_bench_model_row *row, struct qt_err *err)
{
    int rc = b->rt ? qt_runtime_resize(b->rt, row->batch, err) : open_runtime(b, row, err);
    if (rc == QT_OK)
        rc = measure(row, b, err);
    if (rc == QT_E_UNSUPPORTED || rc == QT_E_RESOURCE) {
        snprintf(row->why, sizeof row->why, "%.*s", (int)sizeof row->why - 1, err->reason);
        qt_runtime_close(b->rt); /* its memory may be incomplete */
        b->rt = NULL;
        rc = QT_OK;
    }
    return rc;
}

static int run_scheme(struct bench_model *b, const struct qt_spec *spec, bool fp16,
                      struct qt_err *err)
{
    int rc = QT_OK;
    for (size_t i = 0; i < b->opt->nbatches; i++) {
        struct qt_bench_model_row *row = &b->report->rows[b->report->count++];
        *row = (struct qt_bench_model_row){
            .spec = spec, .fp16 = fp16, .batch = b->opt->batches[i], .watts = NAN};
        QT_TRY(run_row(b, row, err));
    }
done:
    qt_runtime_close(b->rt);
    b->rt = NULL;
    return rc;
}

int qt_bench_model(struct qt_bench_model_report *out, struct qt_gpu *gpu,
                   const struct qt_bench_model_options *opt, struct qt_err *err)
{
    /* The shares are timed at the position after the last step. */
    struct bench_model b = {gpu, opt, out, NULL, opt->prompt + opt->tokens + WARM_STEPS + 1};
    int rc;
    *out = (struct qt_bench_model_report){0};
    QT_TRY(qt_array_new(&out->rows, (2 + opt->nspecs) * opt->nbatches, sizeof *out->rows, err));
    QT_TRY(run_scheme(&b, NULL, true, err));
    for (size_t i = 0; i < opt->nspecs; i++)
        QT_TRY(run_scheme(&b, &opt->specs[i], false, err));
    if (opt->container)
        QT_TRY(run_scheme(&b, NULL, false, err));
done:
    if (rc < 0)
        qt_bench_model_free(out);
    return rc;
}

void qt_bench_model_free(struct qt_bench_model_report *report)
{
    qt_free(report->rows);
    *report = (struct qt_bench_model_report){0};
}
