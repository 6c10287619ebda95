/* eval: perplexity, and divergence from a reference. */
#include "cli/cli.h"

#include "kernels/kernels.h"

#include <math.h>
#include <stddef.h>

struct eval_options {
    struct common_options common;
    const char *data, *ref, *gate, *logits;
    size_t seqlen, windows;
    int bos, runtime; /* runtime: enum runtime */
    struct kv_options kv;
};

struct cache { /* the simulated one */
    enum qt_kv_keys keys;
    size_t head_dim;
};

/* ---- data ----------------------------------------------------------------------------------- */

/* Reads the token ids of --data for the model with weights w: with --windows only the first. */
static int read_data(struct qt_data *out, size_t *head_dim, const struct eval_options *o,
                     const struct qt_weights *w, struct qt_err *err)
{
    const size_t seqlen = o->seqlen ? o->seqlen : QT_EVAL_SEQLEN;
    struct qt_data_options opt = {
        .dir = w->dir, .bos = (enum qt_bos)o->bos, .interrupted = interrupt_came};
    struct qt_model *model = NULL;
    int rc;
    QT_TRY(qt_model_open(&model, w, err));
    opt.vocab = qt_model_info(model)->vocab;
    *head_dim = qt_model_info(model)->head_dim;
    if (qt_mul_overflow(&opt.most, o->windows, seqlen))
        opt.most = 0;
    QT_TRY(qt_data_read(out, &o->data, 1, &opt, err));
done:
    qt_model_close(model);
    return rc;
}

/* ---- results -------------------------------------------------------------------------------- */

enum { MAX_FIGURES = 12 };

static size_t make_figures(struct qt_figure out[MAX_FIGURES], const struct qt_eval_report *r)
{
    size_t n = 0;
    out[n++] = (struct qt_figure){"ppl", r->ppl};
    if (r->hidden)
        out[n++] = (struct qt_figure){"hidden_error", r->hidden_error};
    if (!r->has_ref || r->hidden)
        return n;
    out[n++] = (struct qt_figure){"ref_ppl", r->ref_ppl};
    out[n++] = (struct qt_figure){"ppl_ratio", r->ppl_ratio};
    out[n++] = (struct qt_figure){"kld", r->kld_mean};
    out[n++] = (struct qt_figure){"kld_mean", r->kld_mean};
    out[n++] = (struct qt_figure){"kld_median", r->kld_median};
    out[n++] = (struct qt_figure){"kld_p999", r->kld_p999};
    out[n++] = (struct qt_figure){"same_top", r->same_top};
    out[n++] = (struct qt_figure){"rms_dp", r->rms_dp};
    return n;
}

/* " +- 0.123", or "" if the error is not known. */
static const char *text_error(char buf[TEXT_SIZE], const char *format, double error)
{
    char number[TEXT_SIZE - 4];
    snprintf(number, sizeof number, format, error);
    buf[0] = '\0';
    if (isfinite(error))
        snprintf(buf, TEXT_SIZE, " +- %s", number);
    return buf;
}

static const char *text_perplexity(char buf[2 * TEXT_SIZE], double ppl, double nll)
{
    if (isinf(ppl)) /* e^709.78 is the largest double */
        snprintf(buf, 2 * TEXT_SIZE, "inf: exp of the mean loss, %.6g nats per token, overflows",
                 nll);
    else
        snprintf(buf, 2 * TEXT_SIZE, ppl < 1e6 ? "%.4f" : "%.4g", ppl);
    return buf;
}

static int print_report(const struct qt_eval_report *r, const struct bos_rule *bos,
                        const struct cache *cache, struct qt_err *err)
{
    struct table t = {.align = "ll"};
    char error[TEXT_SIZE], ppl[2 * TEXT_SIZE];
    table_row(&t, "data\t%zu window%s of %zu tokens, %llu %s", r->windows, text_plural(r->windows),
              r->seqlen, (unsigned long long)r->scored_tokens,
              r->hidden   ? "compared"
              : r->masked ? "masked and scored"
                          : "scored");
    bos_row(&t, bos);
    if (cache->keys)
        kv_row(&t, cache->keys, cache->head_dim, r->seqlen);
    if (r->hidden) {
        table_row(&t, "hidden states\trelative error %.6f%s", r->hidden_error,
                  text_error(error, "%.6f", r->hidden_error_se));
        return table_print(&t, err);
    }
    table_row(&t, "perplexity\t%s%s", text_perplexity(ppl, r->ppl, r->nll),
              text_error(error, r->ppl < 1e6 ? "%.4f" : "%.4g", r->ppl_se));
    if (r->has_ref) {
        char change[2 * TEXT_SIZE] = "";
        text_error(error, "%.3f", 100 * r->ppl_ratio_se);
        if (isfinite(r->ppl_ratio))
            snprintf(change, sizeof change, " (%+.3f%s %%)", 100 * (r->ppl_ratio - 1), error);
        table_row(&t, "reference\t%s%s", text_perplexity(ppl, r->ref_ppl, r->ref_nll), change);
        table_row(&t, "KL divergence\t%.6f%s mean, %.6f median, %.6f at 99.9 %% (nats)",
                  r->kld_mean, text_error(error, "%.6f", r->kld_se), r->kld_median, r->kld_p999);
        table_row(&t, "same top token\t%.3f %%", 100 * r->same_top);
        table_row(&t, "RMS of dp\t%.3f %%", 100 * r->rms_dp);
    }
    return table_print(&t, err);
}

static json_t *quantiles_doc(struct cli *cli, const struct qt_eval_report *r)
{
    json_t *array = json_array();
    for (size_t i = 0; i < QT_KLD_QUANTILES; i++) {
        json_t *o = json_object();
        doc_set(cli, o, "q", doc_real(qt_kld_quantiles[i]));
        doc_set(cli, o, "kld", doc_real(r->kld_quantile[i]));
        doc_append(cli, array, o);
    }
    return array;
}

static void fill_doc(struct cli *cli, const struct eval_options *o, const struct cache *cache,
                     const struct qt_eval_report *r, const struct qt_figure *figures, size_t n)
{
    doc_set(cli, cli->doc, "data", doc_text(qt_base_name(qt_data_name(o->data))));
    doc_set(cli, cli->doc, "ref", doc_text(o->ref));
    const enum qt_kv_keys keys = cache->keys;
    doc_set(cli, cli->doc, "kv_keys", keys ? doc_text(kv_keys_name(keys)) : json_null());
    doc_set(cli, cli->doc, "kv_bits",
            keys ? doc_real(qt_kv_sequence_bits(keys, cache->head_dim, r->seqlen)) : json_null());
    doc_set(
        cli, cli->doc, "runtime",
        doc_text(runtime_names[o->runtime == RUNTIME_FUSED ? RUNTIME_FUSED : RUNTIME_REFERENCE]));
    doc_set(cli, cli->doc, "windows", doc_size(r->windows));
    doc_set(cli, cli->doc, "seqlen", doc_size(r->seqlen));
    doc_set(cli, cli->doc, "scored_tokens", doc_size(r->scored_tokens));
    doc_set(cli, cli->doc, "nll", doc_real(r->nll));
    doc_set(cli, cli->doc, "ppl_se", doc_real(r->ppl_se));
    if (r->hidden)
        doc_set(cli, cli->doc, "hidden_error_se", doc_real(r->hidden_error_se));
    if (r->has_ref && !r->hidden) {
        doc_set(cli, cli->doc, "ppl_ratio_se", doc_real(r->ppl_ratio_se));
        doc_set(cli, cli->doc, "kld_se", doc_real(r->kld_se));
        doc_set(cli, cli->doc, "kld_quantiles", quantiles_doc(cli, r));
    }
    doc_figures(cli, figures, n);
}

/* ---- the command ---------------------------------------------------------------------------- */

/* Rejects an invalid gate before any work. */
static int check_gate(const char *gate, bool has_ref, struct qt_err *err)
{
    const struct qt_eval_report with_ref = {.has_ref = true}, without = {0};
    struct qt_figure figures[MAX_FIGURES];
    size_t n = make_figures(figures, &with_ref);
    figures[n++] = (struct qt_figure){"hidden_error", 0};
    int rc = gate_validate(gate, figures, n, NULL, err);
    if (rc == QT_OK && !has_ref &&
        gate_validate(gate, figures, make_figures(figures, &without), NULL, NULL) < 0)
        rc = qt_fail(err, QT_E_USAGE, NULL, NULL, "--gate '%s' needs --ref", gate);
    return rc;
}

static int evaluate(struct qt_eval_report *out, struct bos_rule *bos, struct cache *cache,
                    struct cli *cli, const struct eval_options *o, const struct source *model,
                    const struct source *ref, struct qt_err *err)
{
    struct qt_eval_options opt = {.seqlen = o->seqlen,
                                  .windows = o->windows,
                                  .logits = o->logits,
                                  .container = model->container,
                                  .comm = cli->comm,
                                  .log = &cli->log};
    struct qt_backend *be = NULL;
    struct qt_data data = {0};
    int rc;
    struct qt_weights w = model->weights;
    struct qt_kv kv = {0};
    if (o->kv.bits) {
        QT_TRY(kv_open(&kv, &o->kv, model, err));
        cache->keys = kv.keys;
        w.fake_quant.cache = qt_kv_apply;
        w.fake_quant.cache_ctx = &kv;
    }
    QT_TRY(read_data(&data, &cache->head_dim, o, &w, err));
    *bos = bos_rule_of(&data);
    QT_TRY(backend_open(&be, o->common.device, err));
    if (o->runtime == RUNTIME_FUSED)
        QT_TRY(qt_gpu_open(&opt.gpu, device_number(o->common.device), err));
    QT_TRY(qt_eval(out, &w, o->ref ? &ref->weights : NULL, data.ids, data.count, &opt, be, err));
done:
    if (rc == QT_E_INPUT && err->file[0] == '\0') /* errors of the cache name a tensor */
        snprintf(err->file, sizeof err->file, "%s", err->tensor[0] ? w.dir : qt_data_name(o->data));
    if (rc == QT_E_UNSUPPORTED && opt.gpu && !err->file[0])
        snprintf(err->file, sizeof err->file, "%s", w.dir);
    if (be)
        be->close(be);
    if (opt.gpu)
        opt.gpu->close(opt.gpu);
    qt_data_free(&data);
    qt_kv_free(&kv);
    return rc;
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    const struct eval_options *o = options;
    struct source model = {0}, ref = {0};
    struct qt_eval_report report = {0};
    struct bos_rule bos = {0};
    struct qt_figure figures[MAX_FIGURES];
    struct cache cache = {0};
    int rc;
    QT_TRY(check_gate(o->gate, o->ref != NULL, err));
    QT_TRY(kv_options_keys(&cache.keys, &o->kv, err));
    QT_TRY(runtime_check(o->runtime, o->common.device, err));
    if (o->runtime == RUNTIME_FUSED && o->kv.bits)
        QT_TRY(qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--kv simulates a cache: it needs --runtime reference"));
    if (o->logits)
        QT_TRY(out_check(o->logits, err));
    if (o->logits && qt_path_exists(o->logits)) {
        rc = qt_fail(err, QT_E_USAGE, o->logits, NULL, "exists already");
        goto done;
    }
    QT_TRY(source_open_whole(&model, args[0], cli, err));
    if (o->ref)
        QT_TRY(source_open_whole(&ref, o->ref, cli, err));
    QT_TRY(source_check_agreement(&model, err));
    QT_TRY(source_check_agreement(&ref, err));
    rc = evaluate(&report, &bos, &cache, cli, o, &model, &ref, err);
    if (rc == QT_E_INPUT && report.not_finite && !cli->doc)
        printf("perplexity  nan: %s\n", err->reason);
    if (rc < 0)
        goto done;
    if (o->logits && qt_comm_rank(cli->comm) == 0)
        QT_TRY(qt_npy_write(o->logits, report.logits, report.seqlen, report.vocab, err));
    size_t n = make_figures(figures, &report);
    if (cli->doc) {
        fill_doc(cli, o, &cache, &report, figures, n);
        QT_TRY(doc_measured(cli, args[0], model.container, model.ckpt, err));
        doc_bos(cli, &bos);
    } else {
        QT_TRY(print_report(&report, &bos, &cache, err));
    }
    if (o->gate)
        QT_TRY(gate_apply(cli, o->gate, figures, n, NULL, err));
done:
    qt_free(report.logits);
    source_close(&ref);
    source_close(&model);
    return rc;
}

static const struct eval_options defaults = {
    .common = COMMON_DEFAULTS, .runtime = RUNTIME_DEFAULT, .kv = KV_DEFAULTS};

static const struct opt opts[] = {
    {.name = "data",
     .kind = OPT_STRING,
     .offset = offsetof(struct eval_options, data),
     .required = true,
     .metavar = "FILE",
     .help = DATA_HELP},
    BOS_OPT(struct eval_options, bos),
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
     .help = "tokens of a window (default 512, or the models' maximum if smaller)"},
    {.name = "windows",
     .kind = OPT_SIZE,
     .offset = offsetof(struct eval_options, windows),
     .metavar = "N",
     .min = 1,
     .max = (size_t)1 << 40,
     .help = "use the first N windows, and read no more of FILE than they need (default: all)"},
    RUNTIME_OPT(struct eval_options, runtime,
                "reference (the default): weights dequantized to FP32; fused: PATH runs on the "
                "GPU kernels that ship, with FP16 activations, and CKPT as reference"),
    KV_OPTS(
        struct eval_options, kv,
        "simulate a 4-bit KV cache: attention uses keys and values as it would read them from the "
        "cache; not for --ref (default: no simulation)",
        KV_KEYS_HELP "as the container was made, otherwise channel"),
    {.name = "logits",
     .kind = OPT_STRING,
     .offset = offsetof(struct eval_options, logits),
     .metavar = "FILE",
     .help = "write the logits of the first window to FILE, which must not exist: .npy, FP32 "
             "[tokens][vocabulary]"},
    {.name = "gate",
     .kind = OPT_STRING,
     .offset = offsetof(struct eval_options, gate),
     .metavar = "EXPR",
     .help = "conditions on the figures, for example 'ppl_ratio<=1.01,same_top>=0.95'; exit "
             "status 5 if one fails"},
    {0},
};

static const struct opt_positional positionals[] = {
    {"PATH", "checkpoint or container with config.json, and tokenizer.json if FILE is text"},
    {0},
};

const struct command cmd_eval = {
    .name = "eval",
    .summary = "measure perplexity, and divergence from a reference model",
    .description =
        "Cuts the data into windows of --seqlen tokens without overlap and drops the remainder. "
        "Perplexity is computed over all tokens of a window except the first. With --ref both "
        "models run side by side, and their next-token distributions are compared at every "
        "position: KL(reference || model) in nats, the fraction of positions with the same most "
        "probable token, and the root mean square of the change in the probability of the actual "
        "next token. Checksums of containers are checked first. Numbers after +- are standard "
        "errors over windows; that of the change from the reference is of the differences between "
        "both models. Of encoders (BERT) every seventh token is masked, and only these tokens are "
        "scored and compared. Encoders without the head that predicts masked tokens have no "
        "perplexity: their final hidden states are compared with those of --ref.\n\n"
        "Figures for --gate: ppl; with --ref also ref_ppl, ppl_ratio, kld_mean (short: kld), "
        "kld_median, kld_p999, same_top, rms_dp (the last two are fractions from 0 to 1, which the "
        "table shows in %); of encoders without a head only hidden_error. Relations: <=, >=, <, >; "
        "commas separate conditions.",
    .examples = "  qtool eval examples/nano-llama --data examples/nano-llama/eval.txt\n"
                "  qtool eval nano-fp6 --data examples/nano-llama/eval.txt \\\n"
                "      --ref examples/nano-llama --gate 'kld_mean<=0.1'\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .gpu = true,
    .ranks = true,
    .run = run,
};
