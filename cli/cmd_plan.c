/* plan: what quantize would do. */
#include "cli/cli.h"

#include <math.h>
#include <stddef.h>

struct plan_options {
    struct common_options common;
    const char *scheme;
    struct opt_list tensor;
    struct calibration_options calibration;
    struct kv_options kv;
    struct budget_options budget;
    size_t ranks;
    bool strict;
};

/* The memory and time of quantize, and what calibration data it is for. */
struct memory {
    struct qt_memory_options opt;
    uint64_t bytes;
    double seconds; /* NaN: unknown */
};

/* ---- one plan ------------------------------------------------------------------------------- */

static void item_row(struct table *t, const struct qt_plan_item *item)
{
    const struct qt_tensor *tensor = item->tensor;
    char shape[TEXT_SIZE], before[TEXT_SIZE], after[TEXT_SIZE], why[QT_WHY_SIZE];
    char spec[QT_SPEC_TEXT];
    text_shape(shape, tensor->ndim, tensor->shape);
    text_bytes(before, tensor->nbytes);
    if (!item->copied)
        table_row(t, "%s\t%s\t%s\t%s\t%.4f\t%s\t%s", tensor->name, qt_dtype_name(tensor->dtype),
                  shape, qt_spec_short(spec, item->packed->spec.text), qt_packed_bpw(item->packed),
                  before, text_bytes(after, qt_packed_bytes(item->packed)));
    else
        table_row(t, "%s\t%s\t%s\tcopied: %s\t\t%s\t%s", tensor->name, qt_dtype_name(tensor->dtype),
                  shape, qt_plan_item_why(why, item), before, before);
}

static void memory_row(struct table *t, const struct memory *m)
{
    char bytes[TEXT_SIZE], ranks[40] = "";
    text_bytes(bytes, m->bytes);
    if (m->opt.ranks > 1)
        snprintf(ranks, sizeof ranks, " of each of %zu ranks", m->opt.ranks);
    if (m->opt.samples)
        table_row(t, "memory\t%s at the peak%s, for %zu window%s of %zu tokens", bytes, ranks,
                  m->opt.samples, text_plural(m->opt.samples), m->opt.seqlen);
    else
        table_row(t, "memory\t%s at the peak%s, %s", bytes, ranks,
                  m->opt.file ? "with the calibration file" : "without calibration");
}

static void time_row(struct table *t, const struct memory *m)
{
    const double s = m->seconds;
    const char *unit = s < 100 ? "s" : s < 6000 ? "minutes" : "hours";
    const double value = s < 100 ? s : s < 6000 ? s / 60 : s / 3600;
    const int digits = s < 10 || s >= 6000 ? 1 : 0;
    if (m->opt.ranks > 1)
        table_row(t,
                  "time\tabout %.*f %s, estimated for %zu ranks with %d threads on idle machines",
                  digits, value, unit, m->opt.ranks, qt_threads());
    else
        table_row(t, "time\tabout %.*f %s, estimated for %d threads of an idle machine", digits,
                  value, unit, qt_threads());
}

static int print_plan(const struct qt_plan *plan, const struct memory *m, struct qt_err *err)
{
    struct table t = {.align = "llllrrr"}, sum = {.align = "ll"};
    char before[TEXT_SIZE], after[TEXT_SIZE];
    table_row(&t, "TENSOR\tDTYPE\tSHAPE\tSCHEME\tBPW\tBEFORE\tAFTER");
    for (size_t i = 0; i < plan->count; i++)
        item_row(&t, &plan->items[i]);
    table_row(&sum, "tensors\t%zu quantized, %zu copied", plan->quantized,
              plan->count - plan->quantized);
    struct qt_left left[QT_LEFT_MAX];
    share_rows(&sum, &plan->share, left, qt_plan_left(left, plan));
    table_row(&sum, "bpw\t%.4f bits per quantized weight", qt_plan_bpw(plan));
    table_paper_bpw(&sum, qt_plan_paper_bpw(plan));
    if (plan->kv.keys)
        kv_row(&sum, plan->kv.keys, plan->kv.head_dim, 0);
    table_row(&sum, "size\t%s before, %s after (%.1f %%)", text_bytes(before, plan->source_bytes),
              text_bytes(after, plan->output_bytes),
              plan->source_bytes ? 100 * (double)plan->output_bytes / (double)plan->source_bytes
                                 : 100);
    memory_row(&sum, m);
    if (!isnan(m->seconds))
        time_row(&sum, m);
    const struct qt_plan_item *first;
    const enum qt_need need = qt_plan_needs(plan, &first);
    const bool given =
        m->opt.data_bytes > 0 || (m->opt.file && need == QT_NEEDS_HESSIAN); /* --data, --calib */
    if (need != QT_NEEDS_NOTHING && !given)
        table_row(&sum, "needs\tcalibration data (--data%s), %s%s",
                  need == QT_NEEDS_HESSIAN ? " or --calib" : "",
                  first ? "first for " : "for the static key scales",
                  first ? first->tensor->name : "");
    int rc = table_print(&t, err);
    putchar('\n');
    int second = table_print(&sum, rc < 0 ? NULL : err);
    return rc < 0 ? rc : second;
}

static json_t *item_doc(struct cli *cli, const struct qt_plan_item *item)
{
    const struct qt_tensor *t = item->tensor;
    char why[QT_WHY_SIZE];
    json_t *o = json_object();
    doc_set(cli, o, "name", doc_text(t->name));
    doc_set(cli, o, "dtype", doc_text(qt_dtype_name(t->dtype)));
    doc_set(cli, o, "shape", doc_shape(t->ndim, t->shape));
    doc_set(cli, o, "source_bytes", doc_size(t->nbytes));
    if (!item->copied) {
        doc_set(cli, o, "scheme", doc_text(item->packed->spec.text));
        doc_set(cli, o, "bpw", doc_real(qt_packed_bpw(item->packed)));
        if (!isnan(qt_packed_paper_bpw(item->packed)))
            doc_set(cli, o, "paper_bpw", doc_real(qt_packed_paper_bpw(item->packed)));
        doc_set(cli, o, "bytes", doc_size(qt_packed_bytes(item->packed)));
    } else {
        doc_set(cli, o, "copied", doc_text(qt_plan_item_why(why, item)));
        doc_set(cli, o, "bytes", doc_size(t->nbytes));
    }
    return o;
}

static json_t *kv_doc(struct cli *cli, const struct qt_plan *plan)
{
    json_t *o = json_object();
    doc_set(cli, o, "bits", doc_size(4));
    doc_set(cli, o, "keys", doc_text(kv_keys_name(plan->kv.keys)));
    doc_set(cli, o, "layers", doc_size(plan->kv.layers));
    doc_set(cli, o, "kv_heads", doc_size(plan->kv.heads));
    doc_set(cli, o, "head_dim", doc_size(plan->kv.head_dim));
    doc_set(cli, o, "bytes", doc_size(plan->kv.bytes));
    doc_set(cli, o, "bits_per_number", doc_real(qt_kv_bits(plan->kv.keys, plan->kv.head_dim)));
    doc_set(cli, o, "tail_bytes",
            doc_size(qt_kv_tail_bytes(plan->kv.keys, plan->kv.layers, plan->kv.heads,
                                      plan->kv.head_dim)));
    return o;
}

static void fill_doc(struct cli *cli, const struct qt_plan *plan, const struct memory *m)
{
    const enum qt_need need = qt_plan_needs(plan, NULL);
    json_t *items = json_array();
    for (size_t i = 0; i < plan->count; i++)
        doc_append(cli, items, item_doc(cli, &plan->items[i]));
    doc_set(cli, cli->doc, "quantized", doc_size(plan->quantized));
    doc_set(cli, cli->doc, "copied", doc_size(plan->count - plan->quantized));
    doc_set(cli, cli->doc, "bpw", doc_real(qt_plan_bpw(plan)));
    if (!isnan(qt_plan_paper_bpw(plan)))
        doc_set(cli, cli->doc, "paper_bpw", doc_real(qt_plan_paper_bpw(plan)));
    if (plan->kv.keys)
        doc_set(cli, cli->doc, "kv", kv_doc(cli, plan));
    doc_set(cli, cli->doc, "source_bytes", doc_size(plan->source_bytes));
    doc_set(cli, cli->doc, "bytes", doc_size(plan->output_bytes));
    doc_set(cli, cli->doc, "needs_data", json_boolean(need == QT_NEEDS_DATA));
    doc_set(cli, cli->doc, "needs_hessian", json_boolean(need != QT_NEEDS_NOTHING));
    doc_set(cli, cli->doc, "working_bytes", doc_size(plan->working_bytes));
    doc_set(cli, cli->doc, "peak_bytes", doc_size(m->bytes));
    if (m->opt.ranks > 1)
        doc_set(cli, cli->doc, "ranks", doc_size(m->opt.ranks));
    if (!isnan(m->seconds))
        doc_set(cli, cli->doc, "estimated_seconds", doc_real(m->seconds));
    struct qt_left left[QT_LEFT_MAX];
    doc_share(cli, &plan->share, left, qt_plan_left(left, plan));
    doc_set(cli, cli->doc, "tensors", items);
}

static int estimate_time(double *seconds, const struct qt_plan *plan, const struct qt_ckpt *ckpt,
                         const struct qt_memory_options *opt, struct qt_err *err)
{
    struct qt_backend *cpu;
    *seconds = NAN;
    if (!opt->samples)
        return QT_OK;
    int rc = qt_backend_cpu_open(&cpu, err);
    if (rc < 0)
        return rc;
    rc = qt_plan_time(seconds, plan, ckpt, opt, cpu, err);
    cpu->close(cpu);
    return rc;
}

static int show_plan(struct cli *cli, const struct qt_ckpt *ckpt, const struct qt_plan_options *opt,
                     const struct qt_memory_options *memory, bool strict, struct qt_err *err)
{
    struct qt_plan plan = {0};
    struct memory m = {.opt = *memory};
    int rc;
    QT_TRY(qt_plan_new(&plan, ckpt, opt, err));
    QT_TRY(qt_plan_review(&plan, ckpt, strict, &cli->log, err));
    QT_TRY(qt_plan_check_model(&plan, ckpt, err));
    QT_TRY(qt_plan_memory(&m.bytes, &plan, ckpt, &m.opt, err));
    QT_TRY(estimate_time(&m.seconds, &plan, ckpt, &m.opt, err));
    if (cli->doc)
        fill_doc(cli, &plan, &m);
    else
        QT_TRY(print_plan(&plan, &m, err));
done:
    qt_plan_free(&plan);
    return rc;
}

/* ---- comparison of all schemes -------------------------------------------------------------- */

struct overview {
    struct table table;
    json_t *array; /* with --json, instead of the table */
    size_t possible;
    struct qt_err first; /* reason of the first refusal */
};

static void overview_add(struct cli *cli, struct overview *o, const char *name,
                         const struct qt_plan *plan)
{
    char bytes[TEXT_SIZE], share[TEXT_SIZE];
    o->possible++;
    if (!o->array) {
        table_row(&o->table, "%s\t%.4f\t%s\t%zu\t%s", name, qt_plan_bpw(plan),
                  text_bytes(bytes, plan->output_bytes), plan->quantized,
                  text_share(share, &plan->share));
        return;
    }
    json_t *row = json_object();
    doc_set(cli, row, "scheme", doc_text(name));
    doc_set(cli, row, "bpw", doc_real(qt_plan_bpw(plan)));
    doc_set(cli, row, "bytes", doc_size(plan->output_bytes));
    doc_set(cli, row, "quantized", doc_size(plan->quantized));
    doc_set(cli, row, "linear_bytes", doc_size(plan->share.linear));
    doc_set(cli, row, "linear_bytes_quantized", doc_size(plan->share.quantized));
    doc_append(cli, o->array, row);
}

static void overview_refuse(struct cli *cli, struct overview *o, const char *name,
                            const struct qt_err *why)
{
    char text[2048];
    qt_err_format(text, sizeof text, why);
    if (!o->first.status)
        o->first = *why;
    if (!o->array) {
        table_row(&o->table, "%s\t\t\t\t\trefused: %s", name, text);
        return;
    }
    json_t *row = json_object();
    doc_set(cli, row, "scheme", doc_text(name));
    doc_set(cli, row, "refused", doc_text(text));
    doc_append(cli, o->array, row);
}

static int compare_scheme(struct cli *cli, struct overview *o, const struct qt_ckpt *ckpt,
                          const struct qt_plan_options *opt, struct qt_err *err)
{
    struct qt_plan plan = {0};
    int rc = qt_plan_new(&plan, ckpt, opt, err);
    bool refused = rc == QT_E_UNSUPPORTED;
    if (rc == QT_OK) { /* a model that cannot be run rules out only the schemes that need it */
        rc = qt_plan_check_model(&plan, ckpt, err);
        refused = rc == QT_E_UNSUPPORTED || rc == QT_E_INPUT;
    }
    if (rc == QT_OK)
        overview_add(cli, o, opt->scheme, &plan);
    else if (refused)
        overview_refuse(cli, o, opt->scheme, err);
    qt_plan_free(&plan);
    return refused ? QT_OK : rc;
}

static int compare_schemes(struct cli *cli, const struct qt_ckpt *ckpt, struct qt_plan_options opt,
                           struct qt_err *err)
{
    struct overview o = {.table = {.align = "lrrrrl"}, .array = cli->doc ? json_array() : NULL};
    const struct qt_scheme *s;
    const struct qt_preset *preset;
    int rc = QT_OK;
    table_row(&o.table, "SCHEME\tBPW\tSIZE\tTENSORS QUANTIZED\tOF LINEARS\t");
    for (size_t i = 0; (s = qt_scheme_at(i)) != NULL; i++)
        for (size_t j = 0; (preset = qt_scheme_preset(s, j)) != NULL; j++) {
            opt.scheme = preset->name;
            QT_TRY(compare_scheme(cli, &o, ckpt, &opt, err));
        }
    if (o.possible == 0) { /* the checkpoint is at fault, not the schemes */
        *err = o.first;
        rc = o.first.status;
        goto done;
    }
    if (!cli->doc)
        QT_TRY(table_print(&o.table, err));
done:
    if (cli->doc)
        doc_set(cli, cli->doc, "schemes", o.array);
    table_free(&o.table);
    return rc;
}

/* ---- the command ---------------------------------------------------------------------------- */

/* The windows that quantize would use. Without --data, as many as its options say. With a target
 * also chooses the schemes. */
static int find_windows(struct qt_memory_options *out, struct qt_budget *budget,
                        struct rules *rules, struct cli *cli, const struct plan_options *options,
                        const struct qt_ckpt *ckpt, struct qt_err *err)
{
    const struct calibration_options *o = &options->calibration;
    const struct qt_weights source = qt_weights_of_ckpt(ckpt);
    struct calibration calibration = {0};
    struct qt_model *model;
    int rc = QT_OK;
    *out = (struct qt_memory_options){.file = o->file != NULL};
    if (o->data.count || o->file || budget_wanted(&options->budget)) {
        rc = calibration_open(&calibration, o, ckpt, options->common.device, err);
        if (rc == QT_OK && budget_wanted(&options->budget))
            rc = budget_choose(budget, rules, cli, &options->budget, ckpt, &calibration, err);
        out->samples = calibration.data.samples;
        out->seqlen = calibration.data.seqlen;
        out->data_bytes = calibration.data_bytes;
        calibration_close(&calibration);
        return rc;
    }
    if (!o->samples && !o->seqlen)
        return QT_OK;
    rc = qt_model_open(&model, &source, err);
    if (rc < 0)
        return rc;
    out->samples = o->samples ? o->samples : CALIBRATION_SAMPLES;
    out->seqlen = o->seqlen ? o->seqlen
                            : qt_min_size(CALIBRATION_SEQLEN, qt_model_info(model)->max_positions);
    qt_model_close(model);
    return QT_OK;
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    const struct plan_options *o = options;
    struct qt_ckpt *ckpt = NULL;
    struct rules rules;
    struct qt_memory_options memory;
    struct qt_budget budget = {0};
    enum qt_kv_keys kv;
    int rc = kv_options_keys(&kv, &o->kv, err);
    if (rc == QT_OK)
        rc = budget_check(&o->budget, o->scheme, false, err);
    if (rc == QT_OK && device_number(o->common.device) >= 0 &&
        !(budget_wanted(&o->budget) && o->calibration.data.count))
        rc =
            qt_fail(err, QT_E_USAGE, NULL, NULL,
                    "--device cuda: the GPU measures schemes, which plan does only with --data and "
                    "--target-bpw or --target-size");
    if (rc < 0)
        return rc;
    QT_TRY(rules_parse(&rules, &o->tensor, err));
    QT_TRY(checkpoint_open(&ckpt, args[0], err));
    QT_TRY(qt_ckpt_check_whole(ckpt, err));
    QT_TRY(find_windows(&memory, &budget, &rules, cli, o, ckpt, err));
    memory.ranks = o->ranks;
    const char *scheme = budget.scheme ? budget.scheme : o->scheme;
    const struct qt_plan_options opt = {.scheme = scheme ? scheme : "none",
                                        .rules = rules.rule,
                                        .nrules = rules.count,
                                        .calibrated = kv == QT_KV_KEYS_STATIC || /* needs data */
                                                      memory.samples || memory.file,
                                        .kv = kv};
    if (scheme || rules.count)
        QT_TRY(show_plan(cli, ckpt, &opt, &memory, o->strict, err));
    else
        QT_TRY(compare_schemes(cli, ckpt, opt, err));
    if (budget.scheme && cli->doc)
        budget_doc(cli, &budget);
    else if (budget.scheme)
        QT_TRY(budget_print(&budget, err));
done:
    qt_ckpt_close(ckpt);
    rules_free(&rules);
    qt_budget_free(&budget);
    return rc;
}

static const struct plan_options defaults = {.common = COMMON_DEFAULTS, .kv = KV_DEFAULTS};

static const struct opt opts[] = {
    {.name = "scheme",
     .kind = OPT_STRING,
     .offset = offsetof(struct plan_options, scheme),
     .metavar = "S",
     .help = "scheme of all linear weights, for example fp6 or nf4:g=128; see 'qtool list "
             "schemes'"},
    {.name = "tensor",
     .kind = OPT_LIST,
     .offset = offsetof(struct plan_options, tensor),
     .metavar = "'REGEX=S'",
     .help = "scheme of the tensors whose name matches REGEX; the last match decides; with a "
             "target, S may be 'choice': one of --choices, also for embeddings and the head"},
    CALIBRATION_OPTS(struct plan_options, calibration),
    {.name = "calib",
     .kind = OPT_STRING,
     .offset = offsetof(struct plan_options, calibration.file),
     .metavar = "X.qcal",
     .help = "calibration file of 'qtool calibrate', instead of --data"},
    BUDGET_OPTS(struct plan_options, budget),
    KV_OPTS(struct plan_options, kv, "also plan a 4-bit KV cache", KV_KEYS_HELP "channel"),
    {.name = "ranks",
     .kind = OPT_SIZE,
     .offset = offsetof(struct plan_options, ranks),
     .min = 1,
     .max = 4096,
     .metavar = "N",
     .help = "memory and time of N ranks that share the work, on machines like this one "
             "(docs/cluster.md); without the time in which data is exchanged"},
    {.name = "strict",
     .kind = OPT_FLAG,
     .offset = offsetof(struct plan_options, strict),
     .help = "fail if less than 90 % of the bytes of linear weights would be quantized"},
    {0},
};

static const struct opt_positional positionals[] = {
    {"CKPT", "checkpoint: a directory, or a .safetensors, .bin, .pt, .pth or .gguf file"},
    {0},
};

const struct command cmd_plan = {
    .name = "plan",
    .summary = "show what quantize would do: schemes, sizes, refusals",
    .description =
        "Decides for every tensor what 'quantize' with the same --scheme, --tensor and --kv would "
        "do, checks all shapes, and shows bits per weight and sizes with scales, tables and "
        "padding. With --data or --calib, method=auto stands for gptq, otherwise for search; "
        "schemes and sizes are the same. For schemes that need calibration (w4ax, learn=1, "
        "method=gptq), and with --kv, the model must be one that qtool can run. Nothing is "
        "written. Without --scheme and --tensor, all schemes are compared, one per line.\n\n"
        "Linear weights are the matrices of the decoder layers. Experts that are stacked in one "
        "tensor, in a form that docs/sources.md lists, are quantized one by one; others count as "
        "linear weights, but are copied. A warning says if less than 90 % of the bytes of linear "
        "weights would be quantized. A matrix that its scheme would make larger is copied unless "
        "--tensor names it.\n\n"
        "With --target-bpw or --target-size a scheme is chosen for each tensor (docs/targets.md): "
        "with --data by the measured KL divergence of calibrated rounding, which runs the model, "
        "on a GPU with --device cuda; otherwise by the errors of the weights. With --untied, "
        "linears that share an input may get different schemes. The options that give the result "
        "are printed.\n\n"
        "--tensor is split at its first '='; write \\x3d for a '=' in the regular expression "
        "(PCRE2, matched anywhere in the name). Vectors that match (norms and biases) are copied; "
        "a regular expression that matches nothing else is an error. The scheme 'none' copies.",
    .examples = "  qtool plan examples/nano-llama\n"
                "  qtool plan examples/nano-llama --scheme nf4:g=128 --tensor 'down_proj=fp6'\n"
                "  qtool plan examples/nano-llama --target-bpw 3.5 --choices nf3,nf4,fp6\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .gpu = true,
    .run = run,
};
