/* bench --model: speed of whole models. */
#include "cli/bench.h"

#include <math.h>
#include <string.h>

static const char *const share_names[QT_RUNTIME_SHARES] = {
    "products", "head", "attention", "heads", "norms", "activation", "other"};

/* The figures of one row are computed from these. */
struct view {
    const struct bench_model_options *o;
    const struct qt_bench_model_row *row, *fp16; /* fp16: of the same batch size */
    const char *name;
};

static double decode_rate(const struct view *v, const struct qt_bench_model_row *row)
{
    return row->why[0] ? NAN : (double)(row->batch * v->o->tokens) / row->seconds;
}

static double prefill_rate(const struct view *v)
{
    return (double)(v->row->prompts * v->o->prompt) / v->row->prompt_seconds;
}

static double step_ms(const struct view *v)
{
    return 1000 * v->row->seconds / (double)v->o->tokens;
}

static double speed_up(const struct view *v)
{
    return decode_rate(v, v->row) / decode_rate(v, v->fp16);
}

static double share(const struct view *v, int kind)
{
    double sum = 0;
    for (int i = 0; i < QT_RUNTIME_SHARES; i++)
        sum += v->row->us[i];
    return v->row->us[kind] / sum;
}

static double joules_per_token(const struct view *v)
{
    return v->row->watts * v->row->seconds / (double)(v->row->batch * v->o->tokens);
}

/* Dollars for a million generated tokens. */
static double cost(const struct view *v)
{
    return v->o->price > 0 ? v->o->price / 3600 / decode_rate(v, v->row) * 1e6 : NAN;
}

static const char *number(char text[TEXT_SIZE], const char *format, double v)
    __attribute__((format(printf, 2, 0)));
static const char *number(char text[TEXT_SIZE], const char *format, double v)
{
    if (isfinite(v))
        snprintf(text, TEXT_SIZE, format, v);
    else
        snprintf(text, TEXT_SIZE, "-");
    return text;
}

static void add_row(struct table *t, const struct view *v)
{
    char x[4][TEXT_SIZE], memory[TEXT_SIZE];
    if (v->row->why[0])
        table_row(t, "%s\t%zu\t\t\t\t\t\t\t\t%s", v->name, v->row->batch, v->row->why);
    else
        table_row(t, "%s\t%zu\t%.0f\t%.0f\t%.3f\t%s\t%s\t%s\t%s\t%s", v->name, v->row->batch,
                  prefill_rate(v), decode_rate(v, v->row), step_ms(v),
                  number(x[0], "%.2f", speed_up(v)), text_bytes(memory, v->row->bytes),
                  number(x[1], "%.0f", v->row->watts), number(x[2], "%.3f", joules_per_token(v)),
                  number(x[3], "%.3f", cost(v)));
}

/* The share of each kind of kernel, and the time of all kinds. */
static void add_shares(struct table *t, const struct view *v)
{
    char x[QT_RUNTIME_SHARES][TEXT_SIZE];
    double sum = 0;
    if (v->row->why[0])
        return;
    for (int i = 0; i < QT_RUNTIME_SHARES; i++) {
        number(x[i], "%.1f", 100 * share(v, i));
        sum += v->row->us[i];
    }
    table_row(t, "%s\t%zu\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%.3f", v->name, v->row->batch, x[0], x[1],
              x[2], x[3], x[4], x[5], x[6], sum / 1000);
}

static json_t *row_doc(struct cli *cli, const struct view *v)
{
    json_t *o = json_object(), *shares = json_object();
    doc_set(cli, o, "scheme", doc_text(v->name));
    doc_set(cli, o, "batch", doc_size(v->row->batch));
    doc_set(cli, o, "refused", doc_text(v->row->why[0] ? v->row->why : NULL));
    if (v->row->why[0])
        return o;
    for (int i = 0; i < QT_RUNTIME_SHARES; i++)
        doc_set(cli, shares, share_names[i], doc_real(v->row->us[i]));
    doc_set(cli, o, "prefill_tokens_per_s", doc_real(prefill_rate(v)));
    doc_set(cli, o, "decode_tokens_per_s", doc_real(decode_rate(v, v->row)));
    doc_set(cli, o, "step_ms", doc_real(step_ms(v)));
    doc_set(cli, o, "fp16_speedup", doc_real(speed_up(v)));
    doc_set(cli, o, "kernels_us", shares);
    doc_set(cli, o, "bytes", doc_size(v->row->bytes));
    doc_set(cli, o, "watts", doc_real(v->row->watts));
    doc_set(cli, o, "joules_per_token", doc_real(joules_per_token(v)));
    doc_set(cli, o, "dollars_per_million_tokens", doc_real(cost(v)));
    return o;
}

static struct view view_of(const struct bench_model_options *o,
                           const struct qt_bench_model_report *report, size_t i,
                           const struct qt_bench_model_options *opt, const char *const *names)
{
    const struct qt_bench_model_row *row = &report->rows[i];
    return (struct view){.o = o,
                         .row = row,
                         .fp16 = &report->rows[i % opt->nbatches],
                         .name = row->fp16   ? "fp16"
                                 : row->spec ? names[row->spec - opt->specs]
                                             : "container"};
}

/* A report is made of these. */
struct results {
    const struct bench_model_options *o;
    const struct qt_bench_model_report *report;
    const struct qt_bench_model_options *opt;
    const char *const *names;
    const struct qt_gpu *gpu;
};

static struct view view_at(const struct results *r, size_t i)
{
    return view_of(r->o, r->report, i, r->opt, r->names);
}

static void fill_doc(struct cli *cli, const struct results *r)
{
    json_t *rows = json_array();
    for (size_t i = 0; i < r->report->count; i++) {
        const struct view v = view_at(r, i);
        doc_append(cli, rows, row_doc(cli, &v));
    }
    doc_set(cli, cli->doc, "gpu", doc_gpu(cli, r->gpu));
    doc_set(cli, cli->doc, "model", doc_text(r->o->path));
    doc_set(cli, cli->doc, "random_weights", json_boolean(r->opt->shape != NULL));
    doc_set(cli, cli->doc, "head", doc_text(r->opt->head ? r->o->head : NULL));
    doc_set(cli, cli->doc, "prompt", doc_size(r->o->prompt));
    doc_set(cli, cli->doc, "tokens", doc_size(r->o->tokens));
    doc_set(cli, cli->doc, "kv_bits", doc_size(r->o->kv ? r->o->kv : 16));
    doc_set(cli, cli->doc, "rows", rows);
}

static int print_report(const struct results *r, struct qt_err *err)
{
    struct table speed = {.align = "lrrrrrrrrl"}, shares = {.align = "lrrrrrrrrr"};
    printf("%s, %s, %s\n", r->gpu->name, r->gpu->cuda, r->gpu->cublas);
    printf("%s%s, prompts of %zu tokens, %zu decode steps, %s\n", r->o->path,
           r->opt->shape ? " with random weights" : "", r->o->prompt, r->o->tokens,
           r->o->kv ? "4-bit KV cache (fp16: FP16)" : "FP16 KV cache");
    if (r->opt->head)
        printf("head in %s (fp16: FP16)\n", r->o->head);
    putchar('\n');
    table_row(&speed, "SCHEME\tBATCH\tPREFILL\tDECODE\tMS\tX FP16\tMEMORY\tW\tJ/TOKEN\t$/M");
    table_row(&shares, "SCHEME\tBATCH\tPRODUCTS %%\tHEAD %%\tATTENTION %%\tHEADS %%\tNORMS %%\tACT "
                       "%%\tOTHER %%\tSUM MS");
    for (size_t i = 0; i < r->report->count; i++) {
        const struct view v = view_at(r, i);
        add_row(&speed, &v);
        add_shares(&shares, &v);
    }
    int rc = table_print(&speed, err);
    putchar('\n');
    const int second = table_print(&shares, rc < 0 ? NULL : err);
    return rc < 0 ? rc : second;
}

/* The shape with this name, unless there is a file of this name; NULL: none. */
static const struct qt_runtime_shape *find_shape(const char *name)
{
    const struct qt_runtime_shape *s = NULL;
    for (size_t i = 0; !qt_path_exists(name) && (s = qt_runtime_shape_at(i)) != NULL; i++)
        if (strcmp(s->name, name) == 0)
            return s;
    return NULL;
}

int bench_model(struct cli *cli, const struct bench_options *options, const struct bench_request *r,
                struct qt_err *err)
{
    const struct bench_model_options *o = &options->whole;
    struct qt_bench_model_options opt = {.shape = find_shape(o->path),
                                         .specs = r->specs,
                                         .nspecs = r->nspecs,
                                         .batches = r->m,
                                         .nbatches = r->nm,
                                         .prompt = o->prompt,
                                         .tokens = o->tokens,
                                         .kv4 = o->kv != 0,
                                         .batch_invariant = options->invariant,
                                         .log = &cli->log};
    struct qt_bench_model_report report = {0};
    struct source source = {0};
    struct qt_model *model = NULL;
    struct qt_gpu *gpu = NULL;
    struct qt_spec head;
    int rc = QT_OK;
    if (!opt.shape && (r->nspecs || o->head))
        return qt_fail(
            err, QT_E_USAGE, NULL, NULL,
            "%s needs a shape (--model 8b, 70b or qwen3-30b); quantize %s first and give the "
            "container",
            r->nspecs ? "--scheme" : "--head", o->path);
    if (o->head) {
        QT_TRY(qt_spec_parse(&head, o->head, err));
        opt.head = head.scheme ? &head : NULL;
    }
    if (!opt.shape) {
        QT_TRY(source_open_whole(&source, o->path, cli, err));
        QT_TRY(qt_model_open(&model, &source.weights, err));
        opt.model = model;
        opt.weights = &source.weights;
        opt.container = source.container;
    }
    QT_TRY(qt_gpu_open(&gpu, device_number(options->common.device), err));
    QT_TRY(qt_bench_model(&report, gpu, &opt, err));
    ui_clear(&cli->ui);
    const struct results results = {o, &report, &opt, r->names, gpu};
    if (cli->doc)
        fill_doc(cli, &results);
    else
        QT_TRY(print_report(&results, err));
done:
    qt_bench_model_free(&report);
    if (gpu)
        gpu->close(gpu);
    qt_model_close(model);
    source_close(&source);
    return rc;
}
