#include "cli/cli.h"

#include "kernels/kernels.h"

#include <stddef.h>

struct eval_options {
    struct common_options common;
    const char *data, *ref, *gate;
    size_t seqlen, windows, kv;
    int kv_keys; /* enum qt_kv_keys; KV_KEYS_BEST: static where there are such scales */
};

enum { KV_KEYS_BEST = -1 };

/* ---- data ----------------------------------------------------------------------------------- */

/* Token ids of --data for the model behind w. */
static int read_data(struct qt_data *out, const char *path, const struct qt_weights *w,
                     struct qt_err *err)
{
    struct qt_model *model = NULL;
    int rc;
    QT_TRY(qt_model_open(&model, w, err));
    QT_TRY(qt_data_read(out, &path, 1, w->dir, qt_model_info(model)->vocab, err));
done:
    qt_model_close(model);
    return rc;
}

/* ---- results -------------------------------------------------------------------------------- */

enum { MAX_FIGURES = 10 };

static size_t make_figures(struct qt_figure out[MAX_FIGURES], const struct qt_eval_report *r)
{
    size_t n = 0;
    out[n++] = (struct qt_figure){"ppl", r->ppl};
    if (!r->has_ref)
        return n;
    out[n++] = (struct qt_figure){"ref_ppl", r->ref_ppl};
    out[n++] = (struct qt_figure){"ppl_ratio", r->ppl / r->ref_ppl};
    out[n++] = (struct qt_figure){"kld", r->kld_mean};
    out[n++] = (struct qt_figure){"kld_mean", r->kld_mean};
    out[n++] = (struct qt_figure){"kld_median", r->kld_median};
    out[n++] = (struct qt_figure){"kld_p999", r->kld_p999};
    out[n++] = (struct qt_figure){"same_top", r->same_top};
    out[n++] = (struct qt_figure){"rms_dp", r->rms_dp};
    return n;
}

static int print_report(const struct qt_eval_report *r, struct qt_err *err)
{
    struct table t = {.align = "ll"};
    table_row(&t, "data\t%zu windows of %zu tokens, %llu scored", r->windows, r->seqlen,
              (unsigned long long)r->scored_tokens);
    table_row(&t, r->ppl < 1e6 ? "perplexity\t%.4f" : "perplexity\t%.4g", r->ppl);
    if (r->has_ref) {
        table_row(&t, "reference\t%.4f (%+.3f %%)", r->ref_ppl, 100 * (r->ppl / r->ref_ppl - 1));
        table_row(&t, "KL divergence\t%.6f mean, %.6f median, %.6f 99.9 %% (nats)", r->kld_mean,
                  r->kld_median, r->kld_p999);
        table_row(&t, "same top token\t%.3f %%", 100 * r->same_top);
        table_row(&t, "RMS of dp\t%.3f %%", 100 * r->rms_dp);
    }
    return table_print(&t, err);
}

static void fill_doc(struct cli *cli, const struct qt_eval_report *r,
                     const struct qt_figure *figures, size_t n)
{
    doc_set(cli, cli->doc, "windows", doc_size(r->windows));
    doc_set(cli, cli->doc, "seqlen", doc_size(r->seqlen));
    doc_set(cli, cli->doc, "scored_tokens", doc_size(r->scored_tokens));
    doc_figures(cli, figures, n);
}

/* ---- the command ---------------------------------------------------------------------------- */

/* Before the work: an expression that will not be understood afterwards is refused now. */
static int check_gate(const char *gate, bool has_ref, struct qt_err *err)
{
    const struct qt_eval_report with_ref = {.has_ref = true}, without = {0};
    struct qt_figure figures[MAX_FIGURES];
    int rc = gate_validate(gate, figures, make_figures(figures, &with_ref), NULL, err);
    if (rc == QT_OK && !has_ref &&
        gate_validate(gate, figures, make_figures(figures, &without), NULL, NULL) < 0)
        rc = qt_fail(err, QT_E_USAGE, NULL, NULL, "--gate '%s' needs --ref", gate);
    return rc;
}

static int kv_open(struct qt_kv *out, int keys, const struct source *s, struct qt_err *err)
{
    bool has_scales = s->container && qt_kv_entry(s->container);
    struct qt_model *model;
    if (keys == KV_KEYS_BEST)
        keys = has_scales ? QT_KV_KEYS_STATIC : QT_KV_KEYS_CHANNEL;
    if (keys != QT_KV_KEYS_STATIC) {
        *out = (struct qt_kv){.keys = (enum qt_kv_keys)keys, .container = s->container};
        return QT_OK;
    }
    if (!has_scales)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--kv-keys static needs scales of keys in a container: 'qtool quantize' "
                       "with --data and --kv 4 finds them");
    int rc = qt_model_open(&model, &s->weights, err);
    if (rc < 0)
        return rc;
    rc = qt_kv_open(out, s->container, qt_model_info(model), err);
    qt_model_close(model);
    return rc;
}

static int evaluate(struct qt_eval_report *out, struct cli *cli, const struct eval_options *o,
                    const struct source *model, const struct source *ref, struct qt_err *err)
{
    const struct qt_eval_options opt = {
        .seqlen = o->seqlen, .windows = o->windows, .log = &cli->log};
    struct qt_backend *be = NULL;
    struct qt_data data = {0};
    int rc;
    struct qt_weights w = model->weights;
    struct qt_kv kv = {0};
    if (o->kv) {
        QT_TRY(kv_open(&kv, o->kv_keys, model, err));
        w.runtime.cache = qt_kv_apply;
        w.runtime.cache_ctx = &kv;
    }
    QT_TRY(read_data(&data, o->data, &w, err));
    QT_TRY(backend_open(&be, o->common.device, err));
    QT_TRY(qt_eval(out, &w, o->ref ? &ref->weights : NULL, data.ids, data.count, &opt, be, err));
done:
    if (rc == QT_E_INPUT && err->file[0] == '\0') /* of the model's cache, or the ids or the text */
        snprintf(err->file, sizeof err->file, "%s", err->tensor[0] ? w.dir : o->data);
    if (be)
        be->close(be);
    qt_data_free(&data);
    qt_kv_free(&kv);
    return rc;
}

/* Damaged weights have figures too. */
static int open_whole(struct source *out, const char *path, struct qt_err *err)
{
    int rc = source_open(out, path, err);
    return rc == QT_OK && out->container ? qt_container_check_crcs(out->container, err) : rc;
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    const struct eval_options *o = options;
    struct source model = {0}, ref = {0};
    struct qt_eval_report report;
    struct qt_figure figures[MAX_FIGURES];
    int rc;
    QT_TRY(check_gate(o->gate, o->ref != NULL, err));
    if (o->kv_keys != KV_KEYS_BEST && !o->kv)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--kv-keys needs --kv 4");
    QT_TRY(open_whole(&model, args[0], err));
    if (o->ref)
        QT_TRY(open_whole(&ref, o->ref, err));
    QT_TRY(evaluate(&report, cli, o, &model, &ref, err));
    size_t n = make_figures(figures, &report);
    if (cli->doc)
        fill_doc(cli, &report, figures, n);
    else
        QT_TRY(print_report(&report, err));
    if (o->gate)
        QT_TRY(qt_gate_check(o->gate, figures, n, NULL, err));
done:
    source_close(&ref);
    source_close(&model);
    return rc;
}

static const struct eval_options defaults = {.common = COMMON_DEFAULTS, .kv_keys = KV_KEYS_BEST};

static const char *const kv_keys[] = {"static", "channel", "token", NULL}; /* enum qt_kv_keys */

static const struct opt opts[] = {
    {.name = "data",
     .kind = OPT_STRING,
     .offset = offsetof(struct eval_options, data),
     .required = true,
     .metavar = "FILE",
     .help = "UTF-8 text, .jsonl (the \"text\" of every line), or token ids: .u16, .u32 "
             "(little-endian) or .npy; each also with .gz behind"},
    {.name = "ref",
     .kind = OPT_STRING,
     .offset = offsetof(struct eval_options, ref),
     .metavar = "CKPT",
     .help = "checkpoint or container to compare with, usually the unquantized model"},
    {.name = "seqlen",
     .kind = OPT_SIZE,
     .offset = offsetof(struct eval_options, seqlen),
     .metavar = "N",
     .min = 2,
     .max = 1 << 24,
     .help = "tokens of a window; default: 512, or what the model (and the reference) takes"},
    {.name = "windows",
     .kind = OPT_SIZE,
     .offset = offsetof(struct eval_options, windows),
     .metavar = "N",
     .min = 1,
     .max = (size_t)1 << 40,
     .help = "stop after N windows; default: all of the data"},
    {.name = "kv",
     .kind = OPT_SIZE,
     .offset = offsetof(struct eval_options, kv),
     .metavar = "4",
     .min = 4,
     .max = 4,
     .help = "keys and values of the model pass through a cache of so many bits; the reference's "
             "do not. Default: no rounding"},
    {.name = "kv-keys",
     .kind = OPT_CHOICE,
     .offset = offsetof(struct eval_options, kv_keys),
     .metavar = "HOW",
     .choices = kv_keys,
     .help =
         "with --kv, scales of keys: static, the container's, one per channel; channel, one per "
         "channel and 64 tokens; token, one per token and head, as those of values always are. "
         "Default: static where the container has them, else channel"},
    {.name = "gate",
     .kind = OPT_STRING,
     .offset = offsetof(struct eval_options, gate),
     .metavar = "EXPR",
     .help = "conditions on the figures, for example 'ppl_ratio<=1.01,same_top>=0.95'; exit "
             "status 5 when one fails"},
    {0},
};

static const struct opt_positional positionals[] = {
    {"PATH", "checkpoint or container, with config.json; with tokenizer.json if FILE is text"},
    {0},
};

const struct command cmd_eval = {
    .name = "eval",
    .summary = "perplexity of a model, and its divergence from a reference",
    .description =
        "The data is cut into windows of --seqlen tokens without overlap, the rest at the end "
        "is dropped. Perplexity is taken over all positions of a window but its first. With "
        "--ref both models run side by side, and at every position the next-token distributions "
        "are compared: KL(reference || model) in nats, whether the most probable token is the "
        "same, and the root mean square of the change in the probability of the actual next "
        "token. The data of containers is compared with their checksums first.\n\n"
        "Figures for --gate: ppl; with --ref also ref_ppl, ppl_ratio, kld (the mean), kld_mean, "
        "kld_median, "
        "kld_p999, same_top, rms_dp. Relations: <=, >=, <, >; several conditions are separated "
        "by commas.",
    .examples = "  qtool eval examples/nano-llama --data examples/nano-llama/eval.txt\n"
                "  qtool eval nano-fp6 --data examples/nano-llama/eval.txt \\\n"
                "      --ref examples/nano-llama --gate 'kld_mean<=0.1'\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .gpu = true,
    .run = run,
};
